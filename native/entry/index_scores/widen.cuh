// Rows of keys as fragments of bf16, exactly: codes are looked at in place, and scales that are bf16 too are multiplied
// in.
//
// A dot product may take its elements in any order. Thread t of a row's four has elements [32 t, 32 t + 32), which
// stand together: in its s-th fragment element 32 t + 4 s + j, where an element of k = 16 s + 2 t + j % 2 + j / 2 * 8
// belongs. Queries are laid down in that order.
#pragma once
#include "entry/index_scores/index_scores.cuh"
#include "tiles/ptx.cuh"

namespace kvx {
namespace cuda {

__device__ __forceinline__ uint32_t multiply_pair(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 %0, %1, %2, zero; }" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
__device__ __forceinline__ uint32_t twice_bf16(float x) {
  return __float_as_uint(x) >> 16 | (__float_as_uint(x) & 0xffff0000u);
}  // x is a bf16

// 32 elements of a row in two bits of exponent and one of mantissa: pairs of fragment s are 2 s and 2 s + 1. kGroup:
// elements under one scale.
template <int kGroup, int kScaleDtype> struct WidenE2m1 {
  static constexpr int kDtype = KVX_DTYPE_E2M1, kRowBytes = 64, kScaleBytes = 128 / kGroup;
  static constexpr int kElements = kGroup, kScale = kScaleDtype;

  static __device__ __forceinline__ float widen(uint32_t (&pairs)[16], uint32_t row, const char* scales, int t) {
    const uint4 raw = tiles::load_shared_16(row + t * 16);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t factor[32 / kGroup];
#pragma unroll
    for (int i = 0; i < 32 / kGroup; i++)
      factor[i] = twice_bf16(load_scale(scales + t * (32 / kGroup) + i, kScaleDtype));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      // Elements come out as (0, 4), (1, 5), (2, 6), (3, 7) and are put side by side.
      uint32_t apart[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t x = words[i] << (12 - 4 * j);
        // Exponent and mantissa at the low end of bf16's: a number 2^126 too small, subnormals included.
        apart[j] = multiply_pair((x & 0x80008000u) | ((x & 0x70007000u) >> 6), 0x7e807e80u);
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t side = __byte_perm(apart[j % 2 * 2], apart[j % 2 * 2 + 1], j < 2 ? 0x5410 : 0x7632);
        pairs[4 * i + j] = multiply_pair(side, factor[i * 8 / kGroup]);
      }
    }
    return 1.f;
  }
};

// 32 bytes of e4m3; their row's f32 scale is multiplied last.
struct WidenE4m3 {
  static constexpr int kDtype = KVX_DTYPE_F8_E4M3, kRowBytes = 128, kScaleBytes = 4, kElements = 128,
                       kScale = KVX_DTYPE_F32;

  static __device__ __forceinline__ float widen(uint32_t (&pairs)[16], uint32_t row, const char* scales, int t) {
    uint32_t has_nan = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const uint4 raw = tiles::load_shared_16(row + t * 32 + i * 4);
      const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t x = words[j],
                       spread[2] = {__byte_perm(x, 0, 0x1404),
                                    __byte_perm(x, 0, 0x3424)};  // bytes (0, 1) and (2, 3), each above a zero
        has_nan |= ((x & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
#pragma unroll
        for (int h = 0; h < 2; h++)
          pairs[2 * (i + j) + h] =
              multiply_pair((spread[h] & 0x80008000u) | ((spread[h] & 0x7f007f00u) >> 4), 0x7b807b80u);  // 2^120
      }
    }
    // One NaN makes the score NaN. Only a thread in four keeps the row's sum: all of the four are told.
    has_nan |= __shfl_xor_sync(0xffffffffu, has_nan, 1);
    has_nan |= __shfl_xor_sync(0xffffffffu, has_nan, 2);
    return has_nan ? __int_as_float(0x7fffffff) : *reinterpret_cast<const float*>(scales);
  }
};

// 32 bf16 as they are.
struct WidenBf16 {
  static constexpr int kDtype = KVX_DTYPE_BF16, kRowBytes = 256, kScaleBytes = 0, kElements = 0,
                       kScale = KVX_DTYPE_INVALID;

  static __device__ __forceinline__ float widen(uint32_t (&pairs)[16], uint32_t row, const char*, int t) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 raw = tiles::load_shared_16(row + t * 64 + i * 16);
      pairs[4 * i] = raw.x, pairs[4 * i + 1] = raw.y, pairs[4 * i + 2] = raw.z, pairs[4 * i + 3] = raw.w;
    }
    return 1.f;
  }
};

}  // namespace cuda
}  // namespace kvx
