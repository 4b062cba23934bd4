// Sixteen elements at a time: the unit of the quantising kernels. Sixteen 8-bit codes are one 16-byte access.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "cuda/device.cuh"

namespace kvx {
namespace cuda {

constexpr int kChunk = 16;
constexpr uint32_t kInfinity = 0x7f800000u;

template <int C> constexpr int element_bits = C == KVX_DTYPE_F32                            ? 32
                                              : (C == KVX_DTYPE_F16 || C == KVX_DTYPE_BF16) ? 16
                                              : (C == KVX_DTYPE_S4 || C == KVX_DTYPE_E2M1)  ? 4
                                                                                            : 8;
template <int C> constexpr int chunk_bytes = kChunk * element_bits<C> / 8;
template <int C> constexpr bool is_code = element_bits<C> <= 8;

// ---- IO rows: F16, BF16, F32, as loaded

template <int IO> struct RawChunk {
  uint32_t w[chunk_bytes<IO> / 4];
};

template <int IO> __device__ __forceinline__ RawChunk<IO> load_raw(const char* p) {
  RawChunk<IO> r;
#pragma unroll
  for (int i = 0; i < chunk_bytes<IO> / 16; i++) {
    const uint4 v = load_once<uint4>(p + 16 * i);
    r.w[4 * i] = v.x, r.w[4 * i + 1] = v.y, r.w[4 * i + 2] = v.z, r.w[4 * i + 3] = v.w;
  }
  return r;
}

template <int IO> __device__ __forceinline__ float element_of(const uint32_t* w, int i) {
  if constexpr (IO == KVX_DTYPE_F32) return __uint_as_float(w[i]);
  else if constexpr (IO == KVX_DTYPE_BF16) return __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
  else return __half2float(__ushort_as_half(uint16_t(i % 2 ? w[i / 2] >> 16 : w[i / 2])));
}
template <int IO> __device__ __forceinline__ float element(const RawChunk<IO>& r, int i) {
  return element_of<IO>(r.w, i);
}

// Bits of the largest magnitude of N elements as f32; at or above kInfinity when a NaN or an infinity is among them.
template <int IO, int N> __device__ __forceinline__ uint32_t magnitude_bits(const uint32_t* w) {
  if constexpr (IO == KVX_DTYPE_F32) {
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < N; i++) m = max(m, w[i] & 0x7fffffffu);
    return m;
  } else {
    // Magnitudes order as their bits do: two at a time, three operands a step.
    uint32_t m = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i += 2) m = __vimax3_u16x2(m, w[i] & 0x7fff7fffu, w[i + 1] & 0x7fff7fffu);
    m = max(m & 0xffffu, m >> 16);
    return IO == KVX_DTYPE_BF16 ? m << 16 : __float_as_uint(__half2float(__ushort_as_half(uint16_t(m))));
  }
}
template <int IO> __device__ __forceinline__ uint32_t magnitude_bits(const RawChunk<IO>& r) {
  return magnitude_bits<IO, kChunk>(r.w);
}

template <int IO, int N> __device__ __forceinline__ uint32_t finite_magnitude_bits(const uint32_t* w) {
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const uint32_t b = __float_as_uint(element_of<IO>(w, i)) & 0x7fffffffu;
    m = max(m, b < kInfinity ? b : 0u);
  }
  return m;
}
template <int IO> __device__ __forceinline__ uint32_t finite_magnitude_bits(const RawChunk<IO>& r) {
  return finite_magnitude_bits<IO, kChunk>(r.w);
}

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {  // NaN becomes 0x7fff, as format.h has it
  __nv_bfloat162 r = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
  __half2 r = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&r);
}
template <int IO> __device__ __forceinline__ uint32_t pack_pair(float lo, float hi) {
  if constexpr (IO == KVX_DTYPE_BF16) return pack_bf16(lo, hi);
  else return pack_f16(lo, hi);
}

template <int IO> __device__ __forceinline__ void store_chunk(char* p, const float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < chunk_bytes<IO> / 16; i++) {
    uint32_t w[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (IO == KVX_DTYPE_F32) w[j] = __float_as_uint(one_nan(x[4 * i + j]));
      else w[j] = pack_pair<IO>(x[8 * i + 2 * j], x[8 * i + 2 * j + 1]);
    }
    store_once(p + 16 * i, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

// ---- quantising

// Codes of type C change where a quotient passes a boundary, and boundaries have few bits: this many low bits of a
// 25-bit midpoint beside one are 0...01 or 1...11.
template <int C> constexpr int kBoundaryZeros = C == KVX_DTYPE_S8        ? 17
                                                : C == KVX_DTYPE_F8_E4M3 ? 20
                                                : C == KVX_DTYPE_E2M1    ? 22
                                                                         : 21;

// x / s for many x and one s, such that the code is that of the correctly rounded quotient. Holds for moderate s and
// for |x| up to 2^17 s, past which every type saturates; other chunks divide.
//   16-bit x: 1/s as a sum r + low, so x*r + x*low is within 2^-44 before its one rounding. Only an x/s that close to
//             the middle between a boundary and its neighbour could come out wrong, and a few scales, told by their low
//             bits, have such an x (tests/quant/test_quotient.py counts them): those divide. r is rounded down, so that
//             -0 stays -0.
//   f32 x:    a product and two exact corrections (Markstein), the steps of the division routine without its checks.
template <int C> struct Quantiser {
  float s, r, low;
  uint32_t limit_bits;  // magnitudes under this take the short way; 0 = none does

  __device__ __forceinline__ explicit Quantiser(float scale) {
    set(scale);
    limit_bits = is_plain(scale) && scale >= 0x1p-80f && scale <= 0x1p100f ? __float_as_uint(scale * 0x1p17f) : 0u;
  }
  // A scale made from the row itself, at least 1e-6: no finite element passes the largest value by more than rounding.
  __device__ static __forceinline__ Quantiser of_largest(float scale) {
    Quantiser q;
    q.set(scale);
    q.limit_bits = is_plain(scale) && scale <= 0x1p100f ? kInfinity : 0u;
    return q;
  }
  template <int IO> __device__ __forceinline__ float quotient(float x) const {
    if constexpr (IO != KVX_DTYPE_F32) return __fmaf_rn(x, r, __fmul_rn(x, low));
    float q = __fmul_rn(x, r);  // remainders are taken as q*s - x: the signs then work out so that -0 stays -0
    q = __fmaf_rn(-__fmaf_rn(q, s, -x), r, q);
    return __fmaf_rn(-__fmaf_rn(q, s, -x), r, q);
  }

 private:
  Quantiser() = default;
  __device__ __forceinline__ void set(float scale) {
    s = scale;
    asm("rcp.approx.ftz.f32 %0, %1;"
        : "=f"(r)
        : "f"(scale));  // within an ulp; one Newton step, as the division routine does
    r = __fmaf_rn(__fmaf_rn(-scale, r, 1.0f), r, r);
    r = __uint_as_float(__float_as_uint(r) - (__float_as_uint(__fmaf_rn(-scale, r, 1.0f)) >> 31));
    low = __fmul_rn(__fmaf_rn(-scale, r, 1.0f), r);
  }
  __device__ static __forceinline__ bool is_plain(float scale) {
    constexpr uint32_t mask = (1u << kBoundaryZeros<C>)-1;
    const uint32_t bits = __float_as_uint(scale);
    return (bits + 64 & mask) > 128 || (bits & mask) == 0;
  }
};

// Integers' codes before they saturate: of numbers that are no NaN, and that an int32 holds.
__device__ __forceinline__ int32_t rounded(float x) {
  return __float2int_rz(__fadd_rn(x, __uint_as_float((__float_as_uint(x) & 0x80000000u) | 0x3effffffu)));
}

// Codes of four elements in the bytes of a word; of int8, tame ones.
template <int C> __device__ __forceinline__ uint32_t encode_four(float a, float b, float c, float d) {
  if constexpr (C == KVX_DTYPE_S8) {
    uint32_t w;  // two integers saturate into two bytes at a time; the third operand goes above them
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(w) : "r"(rounded(d)), "r"(rounded(c)), "r"(0));
    asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(w) : "r"(rounded(b)), "r"(rounded(a)), "r"(w));
    return w;
  } else {
    static_assert(C == KVX_DTYPE_F8_E4M3 || C == KVX_DTYPE_F8_E5M2, "codes of a byte");
    constexpr __nv_fp8_interpretation_t kind = C == KVX_DTYPE_F8_E4M3 ? __NV_E4M3 : __NV_E5M2;
    const uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kind),
                   hi = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, kind);
    return __byte_perm(lo, hi, 0x5410);
  }
}

// e2m1 of two tame elements, without their signs, in the halves of a word. Under 2 values are 0.5 apart, then 1, then
// 2, and a sum with 2^22, 2^23 or 2^24 is rounded to that. Its last bits count steps, with 2 or 4 added for the smaller
// steps there were before; the least of the three is the code.
__device__ __forceinline__ uint32_t e2m1_magnitudes(float a, float b) {
  a = fminf(fabsf(a), 6.f), b = fminf(fabsf(b), 6.f);
  const auto halves = [&](float magic) {
    return __byte_perm(__float_as_uint(__fadd_rn(a, magic)), __float_as_uint(__fadd_rn(b, magic)), 0x5410);
  };
  return __vimin3_u16x2(halves(0x1p22f), halves(0x1p23f + 2.f), halves(0x1p24f + 8.f));
}

// Codes of eight tame elements in the nibbles of a word.
template <int C> __device__ __forceinline__ uint32_t encode_eight(const float* x) {
  if constexpr (C == KVX_DTYPE_E2M1) {
    const auto tops = [&](int i) {  // bytes with the signs of x[i], x[i + 2], x[i + 4] and x[i + 6]
      return __byte_perm(__byte_perm(__float_as_uint(x[i]), __float_as_uint(x[i + 2]), 0x0073),
                         __byte_perm(__float_as_uint(x[i + 4]), __float_as_uint(x[i + 6]), 0x0073), 0x5410);
    };
    const auto bytes = [&](int i) {
      return __byte_perm(e2m1_magnitudes(x[i], x[i + 2]), e2m1_magnitudes(x[i + 4], x[i + 6]), 0x6420);
    };
    return bytes(0) | bytes(1) << 4 | (tops(0) >> 4 & 0x08080808u) | (tops(1) & 0x80808080u);
  } else {
    static_assert(C == KVX_DTYPE_S4, "codes of four bits");
    uint32_t w = 0;
#pragma unroll
    for (int i = 6; i >= 0; i -= 2)  // as bytes of int8 are packed
      asm("cvt.pack.sat.s4.s32.b32 %0, %1, %2, %3;" : "=r"(w) : "r"(rounded(x[i + 1])), "r"(rounded(x[i])), "r"(w));
    return w;
  }
}

// Any chunk, the first half divided by `a` and the second by `b`: one element after the other, since sixteen divisions
// side by side were most of a kernel's instructions. Registers have no index, so elements leave the words of `raw` at
// one end and codes enter theirs at the other.
template <int IO, int C>
__device__ __forceinline__ void divide_words(RawChunk<IO> raw, float a, float b,
                                             uint32_t (&codes)[chunk_bytes<C> / 4]) {
  constexpr int kIn = chunk_bytes<IO> / 4, kOut = chunk_bytes<C> / 4, kBits = element_bits<C>;
#pragma unroll
  for (int j = 0; j < kOut; j++) codes[j] = 0;
#pragma unroll 1
  for (int i = 0; i < kChunk; i++) {
    const float x = __fdiv_rn(element(raw, 0), i < kChunk / 2 ? a : b);
    uint32_t code;
    if constexpr (C == KVX_DTYPE_F8_E4M3 || C == KVX_DTYPE_F8_E5M2)
      code = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, C == KVX_DTYPE_F8_E4M3 ? __NV_E4M3 : __NV_E5M2);
    else code = encode8(x, C);
#pragma unroll
    for (int j = 0; j + 1 < kIn; j++)
      raw.w[j] = element_bits<IO> == 32 ? raw.w[j + 1] : __funnelshift_r(raw.w[j], raw.w[j + 1], 16);
    if (element_bits<IO> == 16) raw.w[kIn - 1] >>= 16;
#pragma unroll
    for (int j = 0; j + 1 < kOut; j++) codes[j] = __funnelshift_r(codes[j], codes[j + 1], kBits);
    codes[kOut - 1] = codes[kOut - 1] >> kBits | code << (32 - kBits);
  }
}

// N words, adjacent; `width`: bytes an access may have.
template <int N> __device__ __forceinline__ void store_words(char* p, const uint32_t* w, int width) {
  if (N == 4 && width >= 16) {
    store_once(p, make_uint4(w[0], w[1], w[2], w[3]));
  } else if (N >= 2 && width >= 8) {
#pragma unroll
    for (int i = 0; i < N; i += 2) store_once(p + 4 * i, make_uint2(w[i], w[i + 1]));
  } else {  // cells with inline scales are multiples of 4 bytes
#pragma unroll
    for (int i = 0; i < N; i++) store_once(p + 4 * i, w[i]);
  }
}

// The first half of a chunk by scale `a`, the second by `b`. `is_tame`: magnitudes are under the limits of both.
template <int IO, int C> __device__ __forceinline__ void encode_words(const RawChunk<IO>& raw, bool is_tame,
                                                                      const Quantiser<C>& a, const Quantiser<C>& b,
                                                                      uint32_t (&codes)[chunk_bytes<C> / 4]) {
  if (!is_tame) return divide_words<IO, C>(raw, a.s, b.s, codes);
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; i++) x[i] = (i < kChunk / 2 ? a : b).template quotient<IO>(element(raw, i));
#pragma unroll
  for (int i = 0; i < chunk_bytes<C> / 4; i++) {
    if constexpr (element_bits<C> == 4) codes[i] = encode_eight<C>(x + 8 * i);
    else codes[i] = encode_four<C>(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  }
}

template <int IO, int C> __device__ __forceinline__ void encode_chunk(char* p, const RawChunk<IO>& raw,
                                                                      uint32_t magnitude, const Quantiser<C>& quantiser,
                                                                      int width) {
  uint32_t codes[chunk_bytes<C> / 4];
  encode_words<IO, C>(raw, magnitude < quantiser.limit_bits, quantiser, quantiser, codes);
  store_words<chunk_bytes<C> / 4>(p, codes, width);
}

template <int IO, int C> __device__ __forceinline__ void cast_chunk(char* p, const RawChunk<IO>& raw) {
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; i++) x[i] = element(raw, i);
  store_chunk<C>(p, x);
}

// ---- dequantising

template <int C> struct CodeChunk {
  uint32_t w[chunk_bytes<C> / 4];
};

// 0x4b000000 is 2^23 as a float: its low bits count in ones, so an integer becomes a float by an or and a subtraction.
template <int C> __device__ __forceinline__ void decode_codes(const CodeChunk<C>& r, float (&x)[kChunk]) {
  if constexpr (C == KVX_DTYPE_F8_E4M3 || C == KVX_DTYPE_F8_E5M2) {
#pragma unroll
    for (int i = 0; i < kChunk / 2; i++) {
      const __half2_raw h = __nv_cvt_fp8x2_to_halfraw2(__nv_fp8x2_storage_t(r.w[i / 2] >> (16 * (i % 2))),
                                                       C == KVX_DTYPE_F8_E4M3 ? __NV_E4M3 : __NV_E5M2);
      const float2 f = __half22float2(__half2(h));
      x[2 * i] = f.x, x[2 * i + 1] = f.y;
    }
  } else if constexpr (C == KVX_DTYPE_S8) {
#pragma unroll
    for (int i = 0; i < kChunk; i++)
      x[i] = __uint_as_float(__byte_perm(r.w[i / 4] ^ 0x80808080u, 0x4b000000u, 0x7650 | (i % 4))) - 8388736.0f;
  } else if constexpr (C == KVX_DTYPE_S4) {
#pragma unroll
    for (int i = 0; i < kChunk; i++)
      x[i] = __uint_as_float(((r.w[i / 8] ^ 0x88888888u) >> (4 * (i % 8)) & 15u) | 0x4b000000u) - 8388616.0f;
  } else {
    // e2m1's three magnitude bits under f16's exponent are the value times 2^-14, subnormals included.
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
      const uint32_t c = r.w[i / 8] >> (4 * (i % 8));
      x[i] = __half2float(__ushort_as_half(uint16_t((c & 7u) << 9 | (c & 8u) << 12))) * 16384.0f;
    }
  }
}

template <int C> __device__ __forceinline__ CodeChunk<C> load_codes(const char* p, int width) {
  CodeChunk<C> r;
  if constexpr (element_bits<C> == 4) {
    if (width >= 8) {
      const uint2 v = load_once<uint2>(p);
      r.w[0] = v.x, r.w[1] = v.y;
    } else {
      r.w[0] = load_once<uint32_t>(p), r.w[1] = load_once<uint32_t>(p + 4);
    }
  } else if (width >= 16) {
    const uint4 v = load_once<uint4>(p);
    r.w[0] = v.x, r.w[1] = v.y, r.w[2] = v.z, r.w[3] = v.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++) r.w[i] = load_once<uint32_t>(p + 4 * i);
  }
  return r;
}

// ---- one row's scale, as cpu/row.h has it

__device__ __forceinline__ char* scale_at(const ScaleParams& s, int64_t block, int64_t offset, int64_t head,
                                          int64_t group) {
  return s.data + block * s.block + offset * s.token + head * s.head + group * s.group;
}

// The usual scale first: the switch over the others is long.
__device__ __forceinline__ float load_scale_as(const char* p, int dtype) {
  return dtype == KVX_DTYPE_F32 ? *reinterpret_cast<const float*>(p) : load_scale(p, dtype);
}

__device__ __forceinline__ float read_scale(const ScaleParams& s, int64_t block, int64_t offset, int64_t head,
                                            int64_t group) {
  if (s.mode == SCALE_NONE) return 1.0f;
  const float scale = s.data ? load_scale_as(scale_at(s, block, offset, head, group), s.dtype) : 1.0f;
  return s.tensor_scale ? scale * *s.tensor_scale : scale;
}

// The scale as it will be read back, and its store by the one thread that owns it.
__device__ __forceinline__ float settle_scale(const ScaleParams& s, int dtype, int64_t token, int64_t block,
                                              int64_t offset, int64_t head, int64_t group, float amax, bool owns) {
  if (s.mode <= SCALE_READ) return read_scale(s, block, offset, head, group);
  float scale;
  if (s.mode == SCALE_GIVEN) {
    scale =
        *reinterpret_cast<const float*>(s.given + token * s.given_token + head * s.given_head + group * s.given_group);
  } else {
    scale = __fdiv_rn(amax, dtype_qmax(dtype));
    if (s.tensor_scale) scale = __fdiv_rn(scale, *s.tensor_scale);
    const float floor = scale_floor(s.dtype);
    scale = scale > floor ? scale : floor;
  }
  char* place = scale_at(s, block, offset, head, group);
  if (s.dtype == KVX_DTYPE_F32) {
    scale = one_nan(scale);
    if (owns) *reinterpret_cast<float*>(place) = scale;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890  // which have instructions for it
  } else if (s.dtype == KVX_DTYPE_F8_E4M3) {
    const __nv_fp8_storage_t code = __nv_cvt_float_to_fp8(scale, __NV_SATFINITE, __NV_E4M3);
    if (owns) *reinterpret_cast<__nv_fp8_storage_t*>(place) = code;
    scale = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
#endif
  } else {
    alignas(4) char stored[4];
    store_scale(stored, s.dtype, scale);
    if (owns && dtype_bits(s.dtype) == 16) *reinterpret_cast<uint16_t*>(place) = *reinterpret_cast<uint16_t*>(stored);
    else if (owns) *place = *stored;
    scale = load_scale(stored, s.dtype);
  }
  return s.tensor_scale ? scale * *s.tensor_scale : scale;
}

// amax / qmax, correctly rounded: qmax is known, so is its reciprocal. Magnitudes too small for this come out under the
// floor of every scale type it is used with, as they should.
template <int C> __device__ __forceinline__ float divide_by_qmax(float amax) {
  constexpr float s = C == KVX_DTYPE_F8_E4M3   ? 448.0f
                      : C == KVX_DTYPE_F8_E5M2 ? 57344.0f
                      : C == KVX_DTYPE_S8      ? 127.0f
                      : C == KVX_DTYPE_S4      ? 7.0f
                                               : 6.0f;
  constexpr float r = 1.0f / s;
  float q = __fmul_rn(amax, r);
  q = __fmaf_rn(-__fmaf_rn(q, s, -amax), r, q);
  return __fmaf_rn(-__fmaf_rn(q, s, -amax), r, q);
}

}  // namespace cuda
}  // namespace kvx
