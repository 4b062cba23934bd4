// What a tile's rows hold, and how their bytes in shared memory become fragments of a multiplication.
//
// S = K * q has tokens down and queries across; out = V * p has dims down and queries across: with few queries a
// sequence, 16 rows of keys fill a tensor core's tall side and no query row is padded to 16. Rows of eight and of four
// bits become f16 on the way, exactly but for a power of two that they share (kUnit), and what is added to them
// (kBias).
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
  static constexpr int kBits = 16, kGroupDims = 16;
  static constexpr int kParts = 1;          // numbers that make a query or a weight
  static constexpr bool kHasRests = false;  // queries in f32: as many numbers again have what those leave over
  static constexpr int kScaleDims = 0;      // elements under one scale, where rows have several
  static constexpr float kUnit = 1.f;       // what numbers are to be multiplied by
  static constexpr float kBias = 0.f;       // what codes are more than they mean, as they are multiplied

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
  // Which dim a query element of fragment `f` multiplies: slots 0, 1 (b[0]) and 2, 3 (b[1]) of lane t.
  static __device__ __forceinline__ int query_dim(int f, int slot, int t) {
    return f * 16 + 2 * t + (slot & 1) + (slot / 2) * 8;
  }
  // Which dim rows g (half 0) and g + 8 (half 1) of a fragment of V are.
  static constexpr __device__ __forceinline__ int value_dim(int f, int half, int g) { return f * 16 + g + 8 * half; }
};

// Eight-bit elements: a group is 32 dims, two fragments. Dims are taken in the order that bytes fall out of a matrix of
// 16-bit elements: four adjacent ones a lane for K, two adjacent ones for V.
template <class Convert_> struct Bytes {
  using Convert = Convert_;
  using Numbers = F16Numbers;
  static constexpr int kBits = 8, kGroupDims = 32, kParts = 1, kScaleDims = 0;
  static constexpr bool kHasRests = false;
  static constexpr float kUnit = 1.f;
  static constexpr float kBias = 0.f;

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
  static __device__ __forceinline__ int query_dim(int f, int slot, int t) { return f * 16 + 4 * t + slot; }
  static constexpr __device__ __forceinline__ int value_dim(int f, int half, int g) { return f * 16 + 2 * g + half; }
};

// Four-bit elements: a group is 64 dims, two chunks of 32, four fragments. A word of a matrix has eight codes, which
// become pairs of those 16 bits apart: for K of one token, for V of two tokens and one dim. `of(i, pair)` is what the
// pairs of word i become: its token's half is i % 2, its chunk of the group i / 2.
struct AsTheyAre {
  __device__ __forceinline__ uint32_t operator()(int, uint32_t pair) const { return pair; }
};
template <class Convert_> struct Nibbles {
  using Convert = Convert_;
  using Numbers = F16Numbers;
  static constexpr int kBits = 4, kGroupDims = 64, kParts = 1, kScaleDims = 0;
  static constexpr bool kHasRests = false;
  static constexpr float kUnit = Convert::kUnit, kBias = Convert::kBias;

  template <int kRowBytes, class Of = AsTheyAre> static __device__ __forceinline__ void load_k(uint32_t (&a)[4][4],
                                                                                               uint32_t tile, int m,
                                                                                               int group, int lane,
                                                                                               const Of& of = Of()) {
    const int matrix = lane / 8, row = m * 16 + (matrix & 1) * 8 + lane % 8;
    uint32_t r[4];
    load_matrices(r, tile + Swizzle<kRowBytes>::at(row, group * 2 + matrix / 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t pair[4];
      Convert::pairs(r[i], pair);
#pragma unroll
      for (int j = 0; j < 4; j++) a[i / 2 * 2 + j / 2][i % 2 + j % 2 * 2] = of(i, pair[j]);
    }
  }
  template <int kRowBytes, class Of = AsTheyAre> static __device__ __forceinline__ void load_v(uint32_t (&a)[4][4],
                                                                                               uint32_t tile, int k,
                                                                                               int group, int lane,
                                                                                               const Of& of = Of()) {
    const int matrix = lane / 8, row = k * 16 + (matrix & 1) * 8 + lane % 8;
    uint32_t r[4];
    load_matrices_turned(r, tile + Swizzle<kRowBytes>::at(row, group * 2 + matrix / 2));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t pair[4];
      Convert::pairs(r[i], pair);
#pragma unroll
      for (int j = 0; j < 4; j++) a[i / 2 * 2 + j / 2][i % 2 * 2 + j % 2] = of(i, pair[j]);
    }
  }
  static __device__ __forceinline__ int query_dim(int f, int slot, int t) {
    return f / 2 * 32 + 8 * t + f % 2 * 2 + slot / 2 + slot % 2 * 4;
  }
  static constexpr __device__ __forceinline__ int value_dim(int f, int half, int g) {
    return f / 2 * 32 + 4 * g + f % 2 * 2 + half;
  }
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

// Codes i and i + 4 of eight, i from 0 to 3. By themselves an f16's low bits are a number under 2^-14: a code is
// multiplied as (code + 8) * 2^-20 at odd places of a word, at even ones as a 16th of that.
struct ConvertS4 {
  static constexpr float kUnit = 1048576.f, kBias = 8.f;
  static __device__ __forceinline__ void pairs(uint32_t x, uint32_t (&pair)[4]) {
    x ^= 0x88888888u;
    pair[0] = x & 0x000f000fu, pair[1] = x & 0x00f000f0u;
    pair[2] = x >> 8 & 0x000f000fu, pair[3] = x >> 8 & 0x00f000f0u;
  }
};
// As they are, where every group of them has a scale of its own. Over 1024, an f16 has a code under 16 in its low bits.
struct ConvertS4Groups {
  static constexpr float kUnit = 1.f, kBias = 0.f;
  static __device__ __forceinline__ void pairs(uint32_t x, uint32_t (&pair)[4]) {
    const __half2 base = __float2half2_rn(-1032.f), part = __float2half2_rn(0.0625f), rest = __float2half2_rn(-72.f);
    // Constants in registers: one instruction a pair, where an instruction could have one of two in itself.
    uint32_t masks[2] = {0x000f000fu, 0x00f000f0u}, tops[2] = {0x64086408u, 0x64806480u};
    asm("" : "+r"(masks[0]), "+r"(masks[1]), "+r"(tops[0]), "+r"(tops[1]));
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t of = x >> 8 * i, low = (of & masks[0]) ^ tops[0], high = (of & masks[1]) ^ tops[1];
      const __half2 a = __hadd2(*reinterpret_cast<const __half2*>(&low), base),
                    b = __hfma2(*reinterpret_cast<const __half2*>(&high), part, rest);
      pair[2 * i] = *reinterpret_cast<const uint32_t*>(&a), pair[2 * i + 1] = *reinterpret_cast<const uint32_t*>(&b);
    }
  }
};
// Sign, exponent and mantissa moved to f16's places make x * 2^-14, 0 and 0.5 as well. Four high bytes at a time.
struct ConvertE2m1 {
  static constexpr float kUnit = 16384.f, kBias = 0.f;
  static __device__ __forceinline__ void pairs(uint32_t x, uint32_t (&pair)[4]) {
    const uint32_t even = (x << 4 & 0x80808080u) | (x << 1 & 0x0e0e0e0eu),
                   odd = (x & 0x80808080u) | (x >> 3 & 0x0e0e0e0eu);
    pair[0] = __byte_perm(even, 0, 0x2404), pair[1] = __byte_perm(odd, 0, 0x2404);
    pair[2] = even & 0xff00ff00u, pair[3] = odd & 0xff00ff00u;
  }
};

// What a scale along a row is stored as.
struct E8m0Scales {
  using Code = uint8_t;
  static constexpr int kBytes = 1;
};
struct E4m3Scales {
  using Code = uint8_t;
  static constexpr int kBytes = 1;
};
struct F16Scales {
  using Code = uint16_t;
  static constexpr int kBytes = 2;
};
template <class Rows, class Scales_, int kDims> struct Grouped : Rows {
  using Scales = Scales_;
  static constexpr int kScaleDims = kDims;
};

// Queries and weights of more digits than bf16 has: the sum of two.
struct Bf16RowsInParts : Halves<Bf16Numbers> {
  static constexpr int kParts = 2;
};

// Under queries in f32. Of f16 numbers there are two, of 22 digits together, and of bf16 numbers four.
template <class Rows> struct UnderF32 : Rows {
  static constexpr bool kHasRests = true;
};

using Bf16Rows = Halves<Bf16Numbers>;
using F16Rows = Halves<F16Numbers>;
using E4m3Rows = Bytes<ConvertE4m3>;
using E5m2Rows = Bytes<ConvertE5m2>;
// Multiplied as they are (prefill).
struct E4m3Products {
  using Numbers = E4m3Numbers;
  static constexpr int kBits = 8;
};
using S8Rows = Bytes<ConvertS8>;
using S4Rows = Nibbles<ConvertS4>;
using S4GroupRows = Grouped<Nibbles<ConvertS4Groups>, F16Scales, 32>;
using Nvfp4Rows = Grouped<Nibbles<ConvertE2m1>, E4m3Scales, 16>;
using Mxfp4Rows = Grouped<Nibbles<ConvertE2m1>, E8m0Scales, 32>;
using Mxfp8Rows = Grouped<E4m3Rows, E8m0Scales, 32>;

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
