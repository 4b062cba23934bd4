// Sparse attention's loading role: rows of the list into a stage as f16 or bf16, 64 at a time, 16 a warp.
//
// A lane has kSparseSlots chunks of 16 bytes on their way at any time, across tiles, to slots that it alone reads: as
// one is stored the next is asked for, and the rows of the next tile are known by then.
//
// FP8 rows (448 e4m3, 64 bf16, a power of two for each 64) become f16 in units of 2^-kUnit: exactly, but for what is
// under 2^-30, where f16 ends. Rows with numbers past f16's other end (of 896 and more: normed rows have none) are told
// of, and the item is computed anew (`is_wide`).
#pragma once
#include "attention/sparse/item.cuh"
#include "tiles/ptx.cuh"
#include "tiles/ring.cuh"

namespace kvx {
namespace cuda {

constexpr int kSparseColumnBytes = kSparseKeys * 128, kSparseTileBytes = kSparseDim / 64 * kSparseColumnBytes;
constexpr int kSparseSlots = 12, kSparseSlotBytes = 128 * 16;  // of chunks on their way: 16 bytes of each thread
using SparseRing = tiles::Ring<2, kSparseTileBytes>;

__device__ __forceinline__ uint32_t sparse_chunk_at(uint32_t row, uint32_t chunk) {
  return (chunk / 8) * kSparseColumnBytes + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
}

__device__ __forceinline__ uint32_t multiply_f16(uint32_t x, uint32_t by) {
  const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&by));
  return *reinterpret_cast<const uint32_t*>(&y);
}

template <bool kIsFp8> struct SparseLoad {
  static constexpr int kUnit = 6,
                       kMostScale = 128;  // FP8: f16 is 2^kUnit times the number; scales of more than 2 would leave it
  static constexpr int kLoads = kIsFp8 ? 18 : 32;  // chunks of a lane in a tile
  static constexpr int kSpans = kIsFp8 ? 4 : 8;    // whole 128 bytes of a row
  const SparseArgs& a;
  const SparseItem& w;
  SparseRing ring;
  uint32_t* valid;    // [4 tiles][4 warps]: a bit a row, twice
  uint32_t* is_wide;  // set where a row does not fit
  uint32_t raw;       // this thread's place in the first slot

  // A warp has 16 rows. Eight lanes take 128 bytes of a row (a span), four rows at a time; the last 64 bytes of FP8
  // rows are taken by four lanes each, eight rows at a time. Lane l knows where row l % 16 is. Addresses are written so
  // that a lane keeps few of them: what differs from chunk to chunk is added, or flips a bit, at the end.
  static __host__ __device__ constexpr bool is_span(int k) { return k < 4 * kSpans; }

  static __device__ __forceinline__ const char* row_of(const char* rows, int k, uint32_t lane) {
    const int from = is_span(k) ? k / kSpans * 4 + int(lane / 8) : (k - 4 * kSpans) * 8 + int(lane / 4);
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(rows), from));
  }
  // Chunks k and k + 1, which are of one row but where a row ends.
  static __device__ __forceinline__ void copy_chunks(uint32_t slot, const char* rows, int k, uint32_t lane) {
    const char* row[2];
    row[0] = row_of(rows, k, lane), row[1] = is_span(k) ? row[0] : row_of(rows, k + 1, lane);
#pragma unroll
    for (int i = 0; i < 2; i++)
      tiles::copy_16(slot + i * kSparseSlotBytes,
                     row[i] + (is_span(k) ? lane % 8 : lane % 4) * 16 + (is_span(k) ? k % kSpans + i : kSpans) * 128,
                     row[i] ? 16 : 0);
    tiles::commit_copies();
  }
  static __device__ __forceinline__ uint2 load_scales(const KeyPlace& from) {
    return kIsFp8 && from.data ? __ldg(reinterpret_cast<const uint2*>(from.scales)) : make_uint2(0, 0);
  }

  // Four codes as two pairs of f16, times `by`.
  static __device__ __forceinline__ uint2 widen_codes(uint32_t codes, uint32_t by) {
    return make_uint2(multiply_f16(tiles::e4m3_to_f16(codes), by), multiply_f16(tiles::e4m3_high_to_f16(codes), by));
  }
  // 2^kUnit times a scale, twice in a word. Its byte is at most kMostScale; f16 has none under 2^-24.
  static __device__ __forceinline__ uint32_t widened_scale(uint32_t byte) {
    const int e = int(byte) - 127 + kUnit;
    return (e >= -14 ? uint32_t(e + 15) << 10 : e >= -24 ? 1u << (e + 24) : 0u) * 0x00010001u;
  }
  // Pairs of bf16 as f16 in units of 2^-kUnit. Infinite where they do not fit.
  __device__ __forceinline__ uint4 narrow_chunk(const uint4& x) const {
    if (!kIsFp8) return x;
    const uint32_t in[4] = {x.x, x.y, x.z, x.w};
    uint32_t out[4], ends = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      out[i] = tiles::F16Numbers::pack(__uint_as_float(in[i] << 16) * float(1 << kUnit),
                                       __uint_as_float(in[i] & 0xffff0000u) * float(1 << kUnit));
      ends |= (out[i] & 0x7c007c00u) + 0x04000400u;
    }
    if (ends & 0x80008000u) *is_wide = 1;
    return make_uint4(out[0], out[1], out[2], out[3]);
  }

  // Chunk k of this lane to the stage; `rows` is where the warp's begin, `word` has the row's scales of the span.
  __device__ __forceinline__ void store_chunk(uint32_t rows, int k, uint32_t lane, const uint4& x,
                                              uint32_t word) const {
    if (!is_span(k)) {  // the last four chunks of the last column
      tiles::store_shared_16(rows + sparse_chunk_at(lane / 4, kSparseDim / 8 - 4 + lane % 4) + (k - 4 * kSpans) * 1024,
                             narrow_chunk(x));
      return;
    }
    const uint32_t flip = k / kSpans % 2 * 64, step = k / kSpans * 512;  // row r + 4: the swizzle has another bit
    if (!kIsFp8) {
      tiles::store_shared_16(
          rows + (sparse_chunk_at(lane / 8, lane % 8) ^ flip) + step + k % kSpans * kSparseColumnBytes, x);
      return;
    }
    if (k % kSpans == kSpans - 1 && lane % 8 >= 4) {  // behind the codes
      tiles::store_shared_16(rows + (sparse_chunk_at(lane / 8, kSparseDim / 8 - 8 + lane % 4) ^ flip) + step,
                             narrow_chunk(x));
      return;
    }
    const uint32_t by = widened_scale(word >> ((k % 2 * 2 + lane % 8 / 4) * 8) & 0xff);
    const uint32_t turned =
        lane / 4 % 2;  // lanes 4 to 7 of a row store their second half first: eight lanes then meet all banks
    const uint2 r0 = widen_codes(turned ? x.z : x.x, by), r1 = widen_codes(turned ? x.w : x.y, by),
                r2 = widen_codes(turned ? x.x : x.z, by), r3 = widen_codes(turned ? x.y : x.w, by);
    const uint32_t first = sparse_chunk_at(lane / 8, lane % 8 * 2 + turned) ^ flip,
                   to = rows + step + k % kSpans * 2 * kSparseColumnBytes;
    tiles::store_shared_16(to + first, make_uint4(r0.x, r0.y, r1.x, r1.y));
    tiles::store_shared_16(to + (first ^ 16), make_uint4(r2.x, r2.y, r3.x, r3.y));
  }

  // Scales past kMostScale: their item is computed anew, so that what becomes of them here does not matter.
  __device__ __forceinline__ void look_at_scales(const uint2& scales) const {
    static_assert(kMostScale == 128, "a byte's top bit and another one");
    const uint32_t low = ((scales.x & 0x7f7f7f7fu) + 0x7f7f7f7fu) & scales.x & 0x80808080u,
                   high = ((scales.y & 0x007f7f7fu) + 0x007f7f7fu) & scales.y & 0x00808080u;
    if (low | high) *is_wide = 1;
  }

  __device__ __forceinline__ void load() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const bool counts = lane < 16 && w.first_head == 0 && w.num_tiles > 0;
    const int32_t first = w.first_tile * kSparseKeys + int32_t(warp * 16 + lane % 16), n = w.num_tiles;
    KeyAsked asked = ask_key(a, w, first);
    ask_page(a, w, &asked, counts);
    KeyPlace place = place_key(a, w, asked);
    KeyAsked next = ask_key(a, w, first + kSparseKeys), after = ask_key(a, w, first + 2 * kSparseKeys);
    uint2 scales = load_scales(place);
    const char* rows = place.data;
#pragma unroll
    for (int k = 0; k < kSparseSlots; k += 2) copy_chunks(raw + k * kSparseSlotBytes, rows, k, lane);
    uint32_t slot = raw;
    // Chunks k and k + 1 of the tile to the stage, two for the sake of what can be done while the other waits; the
    // chunks that take their slots are number `ahead` and its neighbour of the rows `from`.
    const auto pass = [&](uint32_t tile, int k, const char* from, int ahead) {
      tiles::wait_copies<kSparseSlots / 2 - 1>();
      const uint4 x = tiles::load_shared_16(slot), y = tiles::load_shared_16(slot + kSparseSlotBytes);
      const uint32_t word = kIsFp8 && is_span(k) ? __shfl_sync(0xffffffffu, k % kSpans < 2 ? scales.x : scales.y,
                                                               k / kSpans * 4 + int(lane / 8))
                                                 : 0;
      store_chunk(tile, k, lane, x, word), store_chunk(tile, k + 1, lane, y, word);
      copy_chunks(slot, from, ahead, lane);
      slot = slot == raw + (kSparseSlots - 2) * kSparseSlotBytes ? raw : slot + 2 * kSparseSlotBytes;
    };
    if (n > 1) ask_page(a, w, &next, counts);
    for (int32_t i = 0; i < n; i++) {
      ring.wait_free();
      const uint32_t tile = ring.tile() + warp * 16 * 128;
      const uint32_t there = __ballot_sync(0xffffffffu, rows != nullptr);
      if (lane == 0) valid[ring.step % 4 * 4 + warp] = there;
      if (kIsFp8) look_at_scales(scales);
#pragma unroll
      for (int k = 0; k < kLoads - kSparseSlots; k += 2) pass(tile, k, rows, k + kSparseSlots);
      // The rest of this tile comes in as the next one's first chunks are asked for.
      place = i + 1 < n ? place_key(a, w, next) : KeyPlace{nullptr, nullptr};
      rows = place.data;
      const uint2 new_scales = load_scales(place);
#pragma unroll
      for (int k = kLoads - kSparseSlots; k < kLoads; k += 2) pass(tile, k, rows, k - (kLoads - kSparseSlots));
      scales = new_scales;
      ring.arrive_full();  // who multiplies shows itself the stores: done here, that would wait for the copies under
                           // way
      ring.next();
      next = after;
      if (i + 2 < n) ask_page(a, w, &next, counts);
      after = ask_key(a, w, first + (i + 3) * kSparseKeys);
    }
    tiles::wait_copies<0>();
  }
};

}  // namespace cuda
}  // namespace kvx
