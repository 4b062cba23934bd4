// Latent attention's loading role, records of FP8 rows: through registers, where they become f16, into a stage.
#pragma once
#include "attention_latent_load.cuh"

namespace kvx {
namespace cuda {

struct LatentLoadFp8 : LatentLoad<true> {
  // FP8 rows pass through registers: half a tile (256 of 512 elements of a row) is on its way while the other half becomes f16.
  // A thread has 16-byte chunks c + 16 m of rows r + 8 j, c < 16, r < 8; eight neighbours have four chunks of two rows, so that the f16
  // chunks they store, every other one of a row, meet all banks.


  static __device__ __forceinline__ uint32_t fp8_chunk(uint32_t thread) { return thread % 4 + thread % 32 / 8 * 4; }
  static __device__ __forceinline__ uint32_t fp8_row(uint32_t thread) { return thread / 32 * 2 + thread / 4 % 2; }

  __device__ __forceinline__ void fetch(uint4 (&x)[8], uint32_t tile, int m) const {
    const uint32_t thread = role_thread();
    const char* data = a.data[0] + fp8_chunk(thread) * 16 + m * 256;
    const uint4* mine = reinterpret_cast<const uint4*>(offsets_of(tile) + fp8_row(thread) * 8);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 four = mine[h];
      const uint32_t offset[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; j++) x[4 * h + j] = offset[j] == kNoRow ? make_uint4(0, 0, 0, 0) : tiles::load_passing_16(data + uint64_t(offset[j]) * 16);
    }
  }
  // A warp has rows 2 w + k % 2 + 8 (k / 2), k < 16; lane l holds the scale of elements [128 (l % 4), ...) of rows k = l / 4 and l / 4 + 8.
  // A record's scales stand as far from its latents as any other's.
  __device__ __forceinline__ float2 fetch_scales(uint32_t tile) const {
    const uint32_t thread = role_thread(), lane = thread % 32;
    float x[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t k = lane / 4 + 8 * i, row = thread / 32 * 2 + k % 2 + 8 * (k / 2), offset = offsets_of(tile)[row % 8 * 8 + row / 8];
      x[i] = offset == kNoRow ? 0.f : __ldg(reinterpret_cast<const float*>(a.scale.data + uint64_t(offset) * 16) + lane % 4);
    }
    return make_float2(x[0], x[1]);
  }

  // Each warp leaves the largest scale of its rows; after they have met, all know the tile's shift.
  __device__ __forceinline__ void leave_largest(uint32_t tile, const float2& scales) const {
    const uint32_t mine = __reduce_max_sync(0xffffffffu, __float_as_uint(fmaxf(scales.x, scales.y)) & 0x7fffffffu), thread = role_thread();
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
  __device__ __forceinline__ void widen_half(const uint4 (&x)[8], uint32_t stage, int m, const float2& scales, float unit) const {
    const uint32_t thread = role_thread(), chunk = fp8_chunk(thread), row = fp8_row(thread);
    const uint32_t to = stage + (chunk / 4 + 4 * m) * C::kColumnBytes + row * 128 + (((2 * (chunk % 4)) ^ row) << 4);
    const int lane = int(row % 2 * 4 + chunk / 8 + 2 * m);  // that holds this thread's scale of row j = 0
    const auto scale_of = [&](int j) { return __shfl_sync(0xffffffffu, j < 4 ? scales.x : scales.y, lane + j % 4 * 8); };
    float ahead = scale_of(0);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const __half2 scale = __float2half2_rn(ahead * unit);
      if (j < 7) ahead = scale_of(j + 1);  // on its way while this row is widened
      tiles::store_shared_16(to + j * 1024, widen(x[j].x, x[j].y, scale));
      tiles::store_shared_16((to ^ 16) + j * 1024, widen(x[j].z, x[j].w, scale));
    }
  }
  __device__ __forceinline__ void shift_rope(uint32_t stage, float unit) const {  // the chunks this thread has copied
    const uint32_t thread = role_thread(), first = stage + chunk_at(thread / 8, kLatentDim / 8 + thread % 8);
#pragma unroll 1
    for (int j = 0; j < 4; j++) {
      uint4 x = tiles::load_shared_16(first + j * 16 * 128);
      const auto by = [&](uint32_t two) { return tiles::Bf16Numbers::pack(__uint_as_float(two << 16) * unit, __uint_as_float(two & 0xffff0000u) * unit); };
      tiles::store_shared_16(first + j * 16 * 128, make_uint4(by(x.x), by(x.y), by(x.z), by(x.w)));
    }
  }

  __device__ __forceinline__ void load(const LatentItem& w) {
    tiles::RowAsked asked = tiles::ask_row(a.rows, w.seq, uint32_t(w.first_tile * kLatentKeys + role_thread() % 64), w.length);
    uint4 low[8], high[8];
    const uint32_t end = w.first_tile + w.num_tiles, length = w.length;
    find(&asked, w, w.first_tile + 1, length, count);
    fetch(low, count, 0);
    float2 scales = fetch_scales(count), next = scales;
    for (uint32_t tile = w.first_tile; tile < end; tile++, count++) {
      const uint32_t s = count % 2, stage = at + C::kStagesAt + s * C::kTileBytes;
      fetch(high, count, 1);
      leave_largest(count, scales);
      if (tile + 1 < end) find(&asked, w, tile + 2, length, count + 1);
      else tiles::meet(1, 128);
      const int shift = find_shift(count);
      const float unit = power_of_two(-kUnit - shift);
      tiles::wait(free(s), (count / 2 & 1) ^ 1);
      if (role_thread() == 0) *shift_of(count) = shift;
      copy_rope(stage, offsets_of(count));
      tiles::commit_copies();
      widen_half(low, stage, 0, scales, unit);
      // Loads are waited for all together: the second half is waited for before the next tile's first is asked for.
#pragma unroll
      for (int j = 0; j < 8; j++) asm volatile("" : "+r"(high[j].x), "+r"(high[j].y), "+r"(high[j].z), "+r"(high[j].w));
      if (tile + 1 < end) {
        fetch(low, count + 1, 0);
        next = fetch_scales(count + 1);
      }
      widen_half(high, stage, 1, scales, unit);
      tiles::wait_copies<0>();
      if (shift) shift_rope(stage, power_of_two(-shift));
      tiles::show_to_multiplications();
      tiles::arrive(full(s));
      scales = next;
    }
  }
};

}  // namespace cuda
}  // namespace kvx
