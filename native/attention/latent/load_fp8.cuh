// Latent attention's loading role, 656-byte records of FP8 rows: the copy engine lays them down in a stage, where they
// become f16.
#pragma once
#include "attention/latent/tile.cuh"

namespace kvx {
namespace cuda {

// What a token's record holds: FP8 latents, the scale of each 128 of them, the rotary part in bf16.
constexpr int kRecordScalesAt = kLatentDim, kRecordRopeAt = kRecordScalesAt + kLatentDim / 128 * 4,
              kRecordBytes = kRecordRopeAt + kRopeDim * 2;

struct LatentLoadFp8 : LatentTile<true> {
  // A tile passes through three states in its stage: raw records, one after the other; registers; f16. Nobody waits
  // while copies are on their way through memory: other tiles become f16 meanwhile. Records lie at the end of the
  // latents' columns: the first kBeside columns are beside them and are written at once, the others when all records
  // are in registers.
  //
  // A warp copies sixteen rows and widens them. A thread has 16-byte chunks c + 4 i of rows r and r + 8, c < 4, r < 8;
  // eight neighbours have the same chunk of eight rows. An odd number of chunks lies between records, and f16 chunks
  // are swizzled by their row: neither loads nor stores meet in a bank.
  static_assert(kRecordBytes / 16 % 2 == 1, "chunks of neighbouring records begin in different banks");
  static constexpr int kRawAt = kLatentDim / 64 * C::kColumnBytes - kLatentKeys * kRecordBytes,
                       kBeside = kRawAt / C::kColumnBytes, kHeld = 8 - kBeside;

  static __device__ __forceinline__ uint32_t own_row(uint32_t thread) { return thread / 32 * 16 + thread % 8; }
  static __device__ __forceinline__ uint32_t own_chunk(uint32_t thread) { return thread % 32 / 8; }
  __device__ __forceinline__ uint32_t records_of(uint32_t tile) const { return keys(tile).tile() + kRawAt; }

  // Lanes l and l + 16 ask for row l of the warp's.
  __device__ __forceinline__ tiles::RowAsked ask(const LatentItem& w, uint32_t tile) const {
    return tiles::ask_row(a.rows, w.seq, tile * kLatentKeys + role_thread() / 32 * 16 + role_thread() % 16, w.begin,
                          w.length);
  }
  // Into a stage that is free. Records that follow each other in memory are one copy. Rows that are not there are not
  // copied, and named in `valid`; there are four of those, since who reads them may be two tiles behind.
  __device__ __forceinline__ void copy(const tiles::RowAsked& asked, uint32_t tile) const {
    const uint32_t thread = role_thread(), lane = thread % 32, barrier = arrived(tile);
    const tiles::RowPlace place = tiles::place_row(a.rows, asked, 0);
    const bool is_there = place.block >= 0 && lane < 16;
    const uint32_t offset = is_there ? place.offset[0] : ~0u, before = __shfl_up_sync(0xffffffffu, offset, 1);
    const uint32_t there = __ballot_sync(0xffffffffu, is_there);
    const bool begins = is_there && (lane == 0 || before == ~0u || before + kRecordBytes / 16 != offset);
    const uint32_t ends = __ballot_sync(0xffffffffu, begins) | ~there;  // where a run is over
    if (lane == 0) {
      reinterpret_cast<uint16_t*>(shared + C::kValidAt)[tile % 4 * 4 + thread / 32] = uint16_t(there);
      tiles::arrive_and_expect(barrier, __popc(there) * kRecordBytes);
    }
    __syncwarp();
    if (begins) {
      const int rows = __ffs(int(ends >> lane >> 1));  // bit 16 of `ends` is set
      tiles::copy_run(records_of(tile) + (thread / 32 * 16 + lane) * kRecordBytes, a.data[0] + uint64_t(offset) * 16,
                      rows * kRecordBytes, barrier);
    }
  }
  // Rows that are not there become zeros: two threads a row.
  __device__ __forceinline__ void clear_missing(uint32_t tile) const {
    const uint2 valid = *reinterpret_cast<const uint2*>(shared + C::kValidAt + tile % 4 * 8);
    if ((valid.x & valid.y) == 0xffffffffu) return;
    const uint32_t thread = role_thread(), row = thread / 2, to = records_of(tile) + row * kRecordBytes;
    if (!((row < 32 ? valid.x : valid.y) >> (row % 32) & 1)) {
#pragma unroll 1
      for (uint32_t chunk = thread % 2; chunk < kRecordBytes / 16; chunk += 2)
        tiles::store_shared_16(to + chunk * 16, make_uint4(0, 0, 0, 0));
    }
    tiles::meet(1, 128);
  }

  __device__ __forceinline__ void move_rope(uint32_t tile) const {  // chunk t % 8 of rows t / 8 + 16 j
    const uint32_t thread = role_thread(), row = thread / 8, stage = keys(tile).tile();
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint4 x =
          tiles::load_shared_16(stage + kRawAt + (row + 16 * j) * kRecordBytes + kRecordRopeAt + thread % 8 * 16);
      tiles::store_shared_16(stage + chunk_at(row, kLatentDim / 8 + thread % 8) + j * 16 * 128, x);
    }
  }
  // Of columns [kFirst, kFirst + kCount), a chunk each, of the thread's first row or its second.
  template <int kFirst, int kCount> __device__ __forceinline__ void read_row(uint4 (&x)[kCount], uint32_t tile,
                                                                             int second) const {
    const uint32_t thread = role_thread(),
                   from = records_of(tile) + (own_row(thread) + 8 * second) * kRecordBytes + own_chunk(thread) * 16;
#pragma unroll
    for (int k = 0; k < kCount; k++) x[k] = tiles::load_shared_16(from + (kFirst + k) * 64);
  }

  // Lane l has row l % 16 of its warp's. Scales are left for the warp, which will have written over the records, and
  // the largest of them for all: after they have met, all know the tile's shift.
  __device__ __forceinline__ float4* scales_of(uint32_t row) const {
    return reinterpret_cast<float4*>(shared + C::kOffsetsAt) + row;
  }
  __device__ __forceinline__ void leave_scales(uint32_t tile) const {
    const uint32_t thread = role_thread(), row = thread / 32 * 16 + thread % 16;
    const float4 four = *reinterpret_cast<const float4*>(shared + C::kStagesAt + tile % 2 * C::kTileBytes + kRawAt +
                                                         row * kRecordBytes + kRecordScalesAt);
    if (thread % 32 < 16) *scales_of(row) = four;
    const float largest = fmaxf(fmaxf(fabsf(four.x), fabsf(four.y)), fmaxf(fabsf(four.z), fabsf(four.w)));
    const uint32_t mine = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));
    if (thread % 32 == 0) reinterpret_cast<uint32_t*>(shared + C::kLargestAt)[tile % 2 * 4 + thread / 32] = mine;
  }
  __device__ __forceinline__ int find_shift(uint32_t tile) const {
    const uint4 four = *reinterpret_cast<const uint4*>(shared + C::kLargestAt + tile % 2 * 16);
    const uint32_t largest = max(max(four.x, four.y), max(four.z, four.w));
    const int exponent = int(largest >> 23) - 127;
    return largest == 0 || exponent == 128 || (exponent < 0 && exponent >= -12) ? 0 : exponent + 1;
  }

  static __device__ __forceinline__ uint4 widen(uint32_t lo, uint32_t hi, __half2 scale) {
    const uint32_t in[2] = {lo, hi};
    uint32_t out[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t x = i % 2 ? tiles::e4m3_high_to_f16(in[i / 2]) : tiles::e4m3_to_f16(in[i / 2]);
      const __half2 y = __hmul2(*reinterpret_cast<const __half2*>(&x), scale);
      out[i] = *reinterpret_cast<const uint32_t*>(&y);
    }
    return make_uint4(out[0], out[1], out[2], out[3]);
  }
  // Of both rows: an element's is that of its 128, in the tile's unit.
  __device__ __forceinline__ void read_scales(__half2 (&scales)[2][4], float unit) const {
    const uint32_t row = own_row(role_thread());
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 four = *scales_of(row + 8 * i);
      scales[i][0] = __float2half2_rn(four.x * unit), scales[i][1] = __float2half2_rn(four.y * unit);
      scales[i][2] = __float2half2_rn(four.z * unit), scales[i][3] = __float2half2_rn(four.w * unit);
    }
  }
  template <int kFirst, int kCount> __device__ __forceinline__ void widen_row(const uint4 (&x)[kCount], uint32_t tile,
                                                                              int second,
                                                                              const __half2 (&scales)[2][4]) const {
    const uint32_t thread = role_thread(),
                   place = keys(tile).tile() + chunk_at(own_row(thread), 2 * own_chunk(thread)) + second * 1024;
#pragma unroll
    for (int k = 0; k < kCount; k++) {
      const __half2 scale = scales[second][(kFirst + k) / 2];
      const uint32_t to = (kFirst + k) * C::kColumnBytes;
      tiles::store_shared_16(place + to, widen(x[k].x, x[k].y, scale));
      tiles::store_shared_16((place ^ 16) + to, widen(x[k].z, x[k].w, scale));
    }
  }
  __device__ __forceinline__ void shift_rope(uint32_t stage, float unit) const {  // the chunks this thread has moved
    const uint32_t thread = role_thread(), first = stage + chunk_at(thread / 8, kLatentDim / 8 + thread % 8);
#pragma unroll 1
    for (int j = 0; j < 4; j++) {
      uint4 x = tiles::load_shared_16(first + j * 16 * 128);
      const auto by = [&](uint32_t two) {
        return tiles::Bf16Numbers::pack(__uint_as_float(two << 16) * unit, __uint_as_float(two & 0xffff0000u) * unit);
      };
      tiles::store_shared_16(first + j * 16 * 128, make_uint4(by(x.x), by(x.y), by(x.z), by(x.w)));
    }
  }

  // The next tile's records are asked for before this one is widened to its end if their
  // stage is free by then, else after.
  __device__ __forceinline__ void load(const LatentItem& w) {
    tiles::RowAsked asked = ask(w, w.first_tile);
    keys().wait_free();
    copy(asked, count);
    asked = ask(w, w.first_tile + 1);
    for (uint32_t left = w.num_tiles; left > 0; left--, count++) {
      const uint32_t next = count + 1;
      tiles::wait(arrived(count), keys().parity());
      clear_missing(count);
      leave_scales(count);
      uint4 beside[2][kBeside], held[2][kHeld];
      for (int i = 0; i < 2; i++) read_row<0, kBeside>(beside[i], count, i);
      tiles::meet(1, 128);
      const int shift = find_shift(count);
      __half2 scales[2][4];
      read_scales(scales, power_of_two(-kUnit - shift));
      if (role_thread() == 0) *shift_of(count) = shift;
      move_rope(count);
      for (int i = 0; i < 2; i++) widen_row<0, kBeside>(beside[i], count, i, scales);
      for (int i = 0; i < 2; i++) read_row<kBeside, kHeld>(held[i], count, i);
      tiles::meet(1, 128);
      widen_row<kBeside, kHeld>(held[0], count, 0, scales);
      const bool is_early = left > 1 && __all_sync(0xffffffffu, keys(next).is_free());
      if (is_early) copy(asked, next);
      widen_row<kBeside, kHeld>(held[1], count, 1, scales);
      if (shift) shift_rope(keys().tile(), power_of_two(-shift));
      tiles::show_to_multiplications();
      keys().arrive_full();
      if (left > 1) {
        if (!is_early) {
          keys(next).wait_free();
          copy(asked, next);
        }
        asked = ask(w, w.first_tile + w.num_tiles - left + 2);
      }
    }
  }
};

}  // namespace cuda
}  // namespace kvx
