// Sparse attention's loading role, FP8 rows (448 e4m3, 64 bf16, a power of two for each 64): 64 of the list into a
// stage as f16, 16 a warp.
//
// Numbers become f16 in units of 2^-kUnit: exactly, but for what is under 2^-30, where f16 ends. Rows with numbers past
// f16's other end (of 1,024 and more: normed rows have none) are told of, and the item is computed anew (`is_wide`).
#pragma once
#include "attention/sparse/load.cuh"

namespace kvx {
namespace cuda {

struct SparseLoadFp8 {
  // A lane has 16-byte chunks c + 4 k of row r of eight, c < 4, r < 8, which come by way of slots that it alone reads,
  // three at a time (a unit): six units a tile. One is in registers, becoming f16; four are on their way, across
  // tiles; one is read meanwhile.
  //
  // Chunks of f16 are swizzled by their row, so eight neighbours, which have the same chunk of eight rows, meet in no
  // bank. The 64 elements that share a scale are the chunks of one k.
  static constexpr int kUnit = 6,
                       kMostScale = 128;  // f16 is 2^kUnit times the number; scales of more than 2 would leave it
  static constexpr int kScaled = 448 / 64, kChunks = 576 / 64;  // chunks of a lane: of codes, of a row
  static constexpr int kChunksAtOnce = 3, kUnits = 2 * kChunks / kChunksAtOnce, kAhead = 4;
  static constexpr int kChunkBytes = 128 * 16, kSlotBytes = kChunksAtOnce * kChunkBytes,
                       kRawBytes = kAhead * kSlotBytes;
  using Unit = uint4[kChunksAtOnce];
  const SparseArgs& a;
  const SparseItem& w;
  SparseRing ring;
  uint32_t* valid;    // [4 tiles][4 warps]: a bit a row, twice
  uint32_t* is_wide;  // set where a row does not fit
  uint32_t raw;       // the slots
  uint32_t finder;    // of KeyFinder, then [128] of scales

  // Scales of the row of this lane come to shared memory, with the next unit.
  __device__ __forceinline__ void ask_scales(const KeyPlace& place) const {
    tiles::copy_8(own_scales(), place.scales, place.data ? 8 : 0);
  }
  __device__ __forceinline__ uint32_t own_scales() const {
    return finder + 128 * KeyFinder::kSlotBytes + threadIdx.x % 128 * 8;
  }
  __device__ __forceinline__ uint2 load_scales() const {
    return make_uint2(tiles::load_shared_4(own_scales()), tiles::load_shared_4(own_scales() + 4));
  }
  // What lane `from` knows.
  static __device__ __forceinline__ const char* row_of(const char* rows, int from) {
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(rows), from));
  }
  static __device__ __forceinline__ uint2 scales_of(const uint2& scales, int from) {
    return make_uint2(__shfl_sync(0xffffffffu, scales.x, from), __shfl_sync(0xffffffffu, scales.y, from));
  }
  // Part of a row, a third of this lane's chunks: zeros where there is none.
  static __device__ __forceinline__ void copy_unit(uint32_t slot, const char* row, int part) {
#pragma unroll
    for (int j = 0; j < kChunksAtOnce; j++)
      tiles::copy_16(slot + j * kChunkBytes, row + threadIdx.x % 32 / 8 * 16 + (part * kChunksAtOnce + j) * 64,
                     row ? 16 : 0);
    tiles::commit_copies();
  }

  // 2^kUnit times the scale of a byte, twice in a word: exactly, but that f16 has none under 2^-24.
  static __device__ __forceinline__ uint32_t widened_scale(const uint2& scales, int i) {
    const float scale = __uint_as_float(__byte_perm(i < 4 ? scales.x : scales.y, 0, 0x0444 | i % 4 << 12) >> 1);
    return tiles::F16Numbers::pack(scale * float(1 << kUnit), scale * float(1 << kUnit));
  }
  static __device__ __forceinline__ uint32_t multiply(uint32_t x, uint32_t by) {
    const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&by));
    return *reinterpret_cast<const uint32_t*>(&y);
  }
  static __device__ __forceinline__ uint4 widen(uint32_t lo, uint32_t hi, uint32_t by) {
    return make_uint4(multiply(tiles::e4m3_to_f16(lo), by), multiply(tiles::e4m3_high_to_f16(lo), by),
                      multiply(tiles::e4m3_to_f16(hi), by), multiply(tiles::e4m3_high_to_f16(hi), by));
  }
  // Pairs of bf16 as f16; `most` becomes the largest magnitudes.
  static __device__ __forceinline__ uint4 narrow(const uint4& x, uint32_t* most) {
    const uint32_t in[4] = {x.x, x.y, x.z, x.w};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[i] = tiles::F16Numbers::pack(__uint_as_float(in[i] << 16) * float(1 << kUnit),
                                       __uint_as_float(in[i] & 0xffff0000u) * float(1 << kUnit));
      *most = __vmaxu2(*most, in[i] & 0x7fff7fffu);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }

  // To the stage; `place` is where the lane's row begins there, swizzled for its first chunk of f16.
  __device__ __forceinline__ void store_unit(const Unit& x, int part, const uint2& scales, uint32_t place) const {
    const uint32_t row = threadIdx.x % 8, chunk = threadIdx.x % 32 / 8;
    const uint32_t last = place - (((2 * chunk) ^ row) << 4) + ((chunk ^ row) << 4) + kScaled * kSparseColumnBytes;
    uint32_t most = 0;
#pragma unroll
    for (int j = 0; j < kChunksAtOnce; j++) {
      const int k = part * kChunksAtOnce + j;
      if (k < kScaled) {
        const uint32_t by = widened_scale(scales, k);
        tiles::store_shared_16(place + k * kSparseColumnBytes, widen(x[j].x, x[j].y, by));
        tiles::store_shared_16((place ^ 16) + k * kSparseColumnBytes, widen(x[j].z, x[j].w, by));
      } else {
        tiles::store_shared_16(k == kScaled ? last : last ^ 64, narrow(x[j], &most));
      }
    }
    constexpr uint32_t kWide = 0x4480;  // 1,024 in bf16: 2^16 is past f16's end
    if (max(most >> 16, most & 0xffffu) >= kWide) *is_wide = 1;
  }

  // Scales past kMostScale: their item is computed anew, so that what becomes of them here does not matter.
  __device__ __forceinline__ void look_at_scales(const uint2& scales) const {
    static_assert(kMostScale == 128, "a byte's top bit and another one");
    const uint32_t low = ((scales.x & 0x7f7f7f7fu) + 0x7f7f7f7fu) & scales.x & 0x80808080u,
                   high = ((scales.y & 0x007f7f7fu) + 0x007f7f7fu) & scales.y & 0x00808080u;
    if (low | high) *is_wide = 1;
  }

  __device__ __forceinline__ void load() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, row = lane % 8, chunk = lane / 8;
    const uint32_t own = (warp * 16 + row) * 128 + (((2 * chunk) ^ row) << 4);  // in a stage
    const uint32_t slots = raw + threadIdx.x % 128 * 16;
    KeyFinder keys(a, w, finder);
    const auto find = [&]() {
      const KeyPlace place = keys.find();
      ask_scales(place);
      return place.data;
    };
    const char *rows = find(), *later = nullptr;  // of these two tiles, and of the next two
    const char *first = row_of(rows, int(row)), *last = row_of(rows, 8 + int(row));  // of the tile: row r, and r + 8
    uint32_t slot = slots;
    // Reads what is in the slot next, and has another unit come there.
    const auto take = [&](Unit& to, const char* from, int part) {
      tiles::wait_copies<kAhead - 1>();
#pragma unroll
      for (int j = 0; j < kChunksAtOnce; j++) to[j] = tiles::load_shared_16(slot + j * kChunkBytes);
      copy_unit(slot, from, part);
      slot = slot == slots + (kAhead - 1) * kSlotBytes ? slots : slot + kSlotBytes;
    };
#pragma unroll
    for (int u = 0; u < kAhead; u++) copy_unit(slots + u * kSlotBytes, u < 3 ? first : last, u % 3);
    Unit x;
    take(x, last, 1);
    uint2 scales;
    for (int32_t i = 0, n = w.num_tiles; i < n; i++) {
      const int second = i % 2;
      if (!second) {
        scales = load_scales();
        look_at_scales(scales);
      }
      const uint32_t there = rows_of_tile(__ballot_sync(0xffffffffu, rows != nullptr), second);
      const uint2 of_row[2] = {scales_of(scales, 16 * second + int(row)),
                               scales_of(scales, 16 * second + 8 + int(row))};
      if (second) rows = later;
      first = row_of(rows, 16 * (second ^ 1) + int(row));  // of the next tile
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        Unit next;
        if (u == 1) last = row_of(rows, 16 * (second ^ 1) + 8 + int(row));
        take(next, u >= 1 && u < 4 ? first : last,
             (u + 5) % 3);  // five units ahead of u, that after is the next tile's
        if (u == 0) {
          ring.wait_free();
          if (lane == 0) valid[ring.step % 4 * 4 + warp] = there;
        }
        store_unit(x, u % 3, of_row[u / 3], ring.tile() + own + u / 3 * 8 * 128);
#pragma unroll
        for (int j = 0; j < kChunksAtOnce; j++) x[j] = next[j];
      }
      ring.arrive_full();  // who multiplies shows itself the stores: here that would wait for all copies under way
      ring.next();
      if (!second) later = find();
    }
    tiles::wait_copies<0>();
  }
};

}  // namespace cuda
}  // namespace kvx
