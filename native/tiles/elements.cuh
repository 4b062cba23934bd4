// What a tile's rows hold, and how their bytes in shared memory become fragments of a multiplication.
//
// S = K * q has tokens down and queries across; out = V * p has dims down and queries across: with few queries a
// sequence, 16 rows of keys fill a tensor core's tall side and no query row is padded to 16. Eight-bit rows become f16
// on the way, exactly.
#pragma once
#include "tiles/ptx.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

// Rows of kBytes bytes in chunks of 16, chunk numbers mixed with the row so that eight
// rows of one column meet all banks.
template <int kBytes> struct Swizzle {
  static constexpr int kChunks = kBytes / 16;
  static_assert(kBytes % 64 == 0, "rows of whole 64s");
  static __device__ __forceinline__ uint32_t at(uint32_t row, uint32_t chunk) {
    const uint32_t mix = kBytes % 128 ? (row >> 1) & 3 : row & 7;  // an odd row begins in the middle of the banks
    return row * kBytes + ((chunk ^ mix) << 4);
  }
};

// Sixteen-bit elements. A group is 16 dims: one fragment.
template <class Numbers_> struct Halves {
  using Numbers = Numbers_;
  static constexpr int kBytes = 2, kGroupDims = 16;

  // Tokens [16 m, 16 m + 16) by dims of `group`.
  template <int kRowBytes>
  static __device__ __forceinline__ void load_k(uint32_t (&a)[1][4], uint32_t tile, int m, int group, int lane) {
    const int matrix = lane / 8, row = m * 16 + (matrix & 1) * 8 + lane % 8;
    load_matrices(a[0], tile + Swizzle<kRowBytes>::at(row, group * 2 + matrix / 2));
  }
  // Dims of `group` by tokens [16 k, 16 k + 16).
  template <int kRowBytes>
  static __device__ __forceinline__ void load_v(uint32_t (&a)[1][4], uint32_t tile, int k, int group, int lane) {
    const int matrix = lane / 8, row = k * 16 + (matrix / 2) * 8 + lane % 8;
    load_matrices_turned(a[0], tile + Swizzle<kRowBytes>::at(row, group * 2 + (matrix & 1)));
  }
  // Which dim of its group a query element multiplies: slots 0, 1 (b[0]) and 2, 3 (b[1]) of lane t.
  static __device__ __forceinline__ int query_dim(int slot, int t) { return 2 * t + (slot & 1) + (slot / 2) * 8; }
  // Which dim rows g (half 0) and g + 8 (half 1) of a fragment of V are.
  static __device__ __forceinline__ int value_dim(int half, int g) { return g + 8 * half; }
};

// Eight-bit elements: a group is 32 dims, two fragments. Dims are taken in the order that bytes fall out of a matrix of
// 16-bit elements: four adjacent ones a lane for K, two adjacent ones for V.
template <class Convert_> struct Bytes {
  using Convert = Convert_;
  using Numbers = F16Numbers;
  static constexpr int kBytes = 1, kGroupDims = 32;

  template <int kRowBytes>
  static __device__ __forceinline__ void load_k(uint32_t (&a)[2][4], uint32_t tile, int m, int group, int lane) {
    const int matrix = lane / 8, row = m * 16 + (matrix & 1) * 8 + lane % 8;
    uint32_t r[4];
    load_matrices(r, tile + Swizzle<kRowBytes>::at(row, group * 2 + matrix / 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t x = Convert::prepare(r[i]);
      a[i / 2][i % 2] = Convert::template pair<0, 1>(x), a[i / 2][i % 2 + 2] = Convert::template pair<2, 3>(x);
    }
  }
  template <int kRowBytes>
  static __device__ __forceinline__ void load_v(uint32_t (&a)[2][4], uint32_t tile, int k, int group, int lane) {
    const int matrix = lane / 8, row = k * 16 + (matrix & 1) * 8 + lane % 8;
    uint32_t r[4];
    load_matrices_turned(r, tile + Swizzle<kRowBytes>::at(row, group * 2 + matrix / 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {  // bytes: (token 2t, dim 2g), (2t, 2g + 1), (2t + 1, 2g), (2t + 1, 2g + 1)
      const uint32_t x = Convert::prepare(r[i]);
      a[i / 2][i % 2 * 2] = Convert::template pair<0, 2>(x), a[i / 2][i % 2 * 2 + 1] = Convert::template pair<1, 3>(x);
    }
  }
  static __device__ __forceinline__ int query_dim(int slot, int t) { return 4 * t + slot; }
  static __device__ __forceinline__ int value_dim(int half, int g) { return 2 * g + half; }
};

struct ConvertE4m3 {
  static __device__ __forceinline__ uint32_t prepare(uint32_t x) { return x; }
  template <int A, int B> static __device__ __forceinline__ uint32_t pair(uint32_t x) {
    return e4m3_to_f16(A == 0 && B == 1 ? x : A == 2 && B == 3 ? x >> 16 : __byte_perm(x, 0, A | B << 4 | 0x4400));
  }
  static __device__ __forceinline__ uint2 four(uint32_t x) {
    return make_uint2(e4m3_to_f16(x), e4m3_high_to_f16(x));
  }  // in their order
};
// f16 with the lower half of its mantissa gone: a code is its high byte.
struct ConvertE5m2 {
  static __device__ __forceinline__ uint32_t prepare(uint32_t x) { return x; }
  template <int A, int B> static __device__ __forceinline__ uint32_t pair(uint32_t x) {
    return __byte_perm(x, 0, 4 | A << 4 | 4 << 8 | B << 12);
  }
  static __device__ __forceinline__ uint2 four(uint32_t x) { return make_uint2(pair<0, 1>(x), pair<2, 3>(x)); }
};
struct ConvertS8 {
  static __device__ __forceinline__ uint32_t prepare(uint32_t x) { return x ^ 0x80808080u; }
  template <int A, int B> static __device__ __forceinline__ uint32_t pair(uint32_t x) {
    return s8_to_f16(x, A | 4 << 4 | B << 8 | 4 << 12);
  }
  static __device__ __forceinline__ uint2 four(uint32_t x) {
    return make_uint2(pair<0, 1>(prepare(x)), pair<2, 3>(prepare(x)));
  }
};

using Bf16Rows = Halves<Bf16Numbers>;
using F16Rows = Halves<F16Numbers>;
using E4m3Rows = Bytes<ConvertE4m3>;
using E5m2Rows = Bytes<ConvertE5m2>;
using S8Rows = Bytes<ConvertS8>;

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
