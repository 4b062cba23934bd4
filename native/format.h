// Numbers <-> bytes, one element at a time, the same on host and device. kvx/quant/numbers.py is the same arithmetic in
// torch.
//
// The rules every backend keeps, bit for bit:
//   - elements are widened to f32 exactly; division is IEEE division; no fused multiply-add, no fast-math
//   - floats round to nearest even; int8 and int4 round half away from zero
//   - quantised types saturate, infinities included. fp8 keeps NaN (0x7f); int8, int4, e2m1 have none and store 0
//   - a NaN that passes through arithmetic comes out as the one NaN 0x7fff (16-bit) or 0x7fffffff (f32)
#pragma once
#include <stdint.h>
#include <string.h>

#include "../include/kvx_abi.h"

#if defined(__CUDACC__)
#define KVX_HD static __host__ __device__ __forceinline__
#else
#define KVX_HD static inline
#endif

// Files compiled once per instruction set put everything they include in a namespace of their own: otherwise the linker
// could pick an AVX-512 copy of an inline function for a machine without it.
#ifndef KVX_ISA_NAMESPACE
#define KVX_ISA_NAMESPACE common
#endif

namespace kvx {
namespace KVX_ISA_NAMESPACE {

KVX_HD uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t b;
  memcpy(&b, &x, 4);
  return b;
#endif
}

KVX_HD float float_of(uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(b);
#else
  float x;
  memcpy(&x, &b, 4);
  return x;
#endif
}

// c ? a : b. On the host by masks: a choice written as a branch keeps loops over it from being vectorised.
KVX_HD uint32_t pick(bool c, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return c ? a : b;
#else
  return b ^ ((a ^ b) & (0u - (uint32_t)c));
#endif
}

KVX_HD bool is_nan(float x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }

// ---- 16-bit floats

KVX_HD float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, m = h & 0x7fffu;
  float normal = float_of((m << 13) + (112u << 23));
  float subnormal = float_of((m << 13) + (113u << 23)) - float_of(113u << 23);
  uint32_t b = pick(m < 0x0400u, bits_of(subnormal), bits_of(normal));
  b = pick(m >= 0x7c00u, 0x7f800000u, b) | sign;
  return float_of(pick(m > 0x7c00u, 0x7fffffffu, b));
}

KVX_HD uint16_t f32_to_f16(float x) {
  uint32_t b = bits_of(x), sign = (b >> 16) & 0x8000u;
  b &= 0x7fffffffu;
  uint32_t subnormal = bits_of(float_of(b) + 0.5f) - bits_of(0.5f);  // 0.5 has ulp 2^-24, f16's smallest step
  uint32_t normal = (b + 0xfffu + ((b >> 13) & 1u) - (112u << 23)) >> 13;
  uint32_t r = pick(b < 0x38800000u, subnormal, normal);
  r = pick(b >= 0x477ff000u, 0x7c00u, r);  // 65520 and up round to infinity
  return (uint16_t)pick(b > 0x7f800000u, 0x7fffu, r | sign);
}

KVX_HD float bf16_to_f32(uint16_t h) { return float_of((uint32_t)h << 16); }

KVX_HD uint16_t f32_to_bf16(float x) {
  uint32_t b = bits_of(x);
  uint32_t r = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  return (uint16_t)pick((b & 0x7fffffffu) > 0x7f800000u, 0x7fffu, r);
}

KVX_HD float one_nan(float x) { return float_of(pick(is_nan(x), 0x7fffffffu, bits_of(x))); }

// ---- fp8

KVX_HD float e4m3_to_f32(uint8_t c) {
  uint32_t sign = (uint32_t)(c & 0x80u) << 24, m = c & 0x7fu;
  float normal = float_of((m << 20) + (120u << 23));
  float subnormal = float_of((m << 20) + (121u << 23)) - float_of(121u << 23);
  uint32_t b = pick(m < 8u, bits_of(subnormal), bits_of(normal)) | sign;
  return float_of(pick(m == 0x7fu, 0x7fffffffu, b));
}

KVX_HD uint8_t f32_to_e4m3(float x) {
  uint32_t b = bits_of(x), sign = (b >> 24) & 0x80u;
  b &= 0x7fffffffu;
  bool nan = b > 0x7f800000u;
  b = pick(b > 0x43e00000u, 0x43e00000u, b);                                 // 448
  uint32_t subnormal = bits_of(float_of(b) + 16384.0f) - bits_of(16384.0f);  // 16384 has ulp 2^-9
  uint32_t normal = (b + 0x7ffffu + ((b >> 20) & 1u) - (120u << 23)) >> 20;
  uint32_t r = pick(b < 0x3c800000u, subnormal, normal) | sign;
  return (uint8_t)pick(nan, 0x7fu, r);
}

KVX_HD float e5m2_to_f32(uint8_t c) {
  uint32_t m = c & 0x7fu;
  return float_of(pick(m > 0x7cu, 0x7fffffffu, bits_of(f16_to_f32((uint16_t)((uint32_t)c << 8)))));
}

KVX_HD uint8_t f32_to_e5m2(float x) {
  uint32_t b = bits_of(x), sign = (b >> 24) & 0x80u;
  b &= 0x7fffffffu;
  bool nan = b > 0x7f800000u;
  b = pick(b > 0x47600000u, 0x47600000u, b);                             // 57344
  uint32_t subnormal = bits_of(float_of(b) + 128.0f) - bits_of(128.0f);  // 128 has ulp 2^-16
  uint32_t normal = (b + 0xfffffu + ((b >> 21) & 1u) - (112u << 23)) >> 21;
  uint32_t r = pick(b < 0x38800000u, subnormal, normal) | sign;
  return (uint8_t)pick(nan, 0x7fu, r);
}

// ---- integers and fp4

KVX_HD float clamp(float x, float lo, float hi) {  // NaN comes out as lo: callers treat it after
  x = float_of(pick(x > lo, bits_of(x), bits_of(lo)));
  return float_of(pick(x < hi, bits_of(x), bits_of(hi)));
}

// Half away from zero. x is within +-2^22. The largest float under 0.5 is added, since 0.5 itself would carry
// 0.49999997 to 1.
KVX_HD int32_t round_half_away(float x) {
  float half = float_of((bits_of(x) & 0x80000000u) | 0x3effffffu);
  return (int32_t)(x + half);
}

KVX_HD uint8_t f32_to_s8(float x) {
  return (uint8_t)pick(is_nan(x), 0u, (uint32_t)round_half_away(clamp(x, -128.0f, 127.0f)));
}
KVX_HD float s8_to_f32(uint8_t c) { return (float)(int8_t)c; }

KVX_HD uint8_t f32_to_s4(float x) {
  return (uint8_t)(pick(is_nan(x), 0u, (uint32_t)round_half_away(clamp(x, -8.0f, 7.0f))) & 15u);
}
KVX_HD float s4_to_f32(uint8_t c) { return (float)((int32_t)((uint32_t)c << 28) >> 28); }

KVX_HD uint8_t f32_to_e2m1(float x) {
  uint32_t b = bits_of(x), sign = (b >> 28) & 8u;
  b &= 0x7fffffffu;
  bool nan = b > 0x7f800000u;
  b = pick(b > 0x40c00000u, 0x40c00000u, b);                                     // 6
  uint32_t subnormal = bits_of(float_of(b) + 4194304.0f) - bits_of(4194304.0f);  // 2^22 has ulp 0.5
  uint32_t normal = (b + 0x1fffffu + ((b >> 22) & 1u) - (126u << 23)) >> 22;
  uint32_t r = pick(b < 0x3f800000u, subnormal, normal) | sign;
  return (uint8_t)pick(nan, 0u, r);
}

KVX_HD float e2m1_to_f32(uint8_t c) {
  uint32_t sign = (uint32_t)(c & 8u) << 28, m = c & 7u;
  uint32_t b = pick(m < 2u, m * 0x3f000000u, (m << 22) + (126u << 23));
  return float_of(b | sign);
}

KVX_HD float e8m0_to_f32(uint8_t c) {
  return float_of(c == 255u ? 0x7fffffffu : (c == 0u ? 0x00400000u : (uint32_t)c << 23));
}

// ---- scales

KVX_HD int dtype_bits(int dtype) {
  switch (dtype) {
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32: return 32;
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
    case KVX_DTYPE_F64: return 64;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16: return 16;
    case KVX_DTYPE_S4:
    case KVX_DTYPE_E2M1: return 4;
    case KVX_DTYPE_F8_E4M3:
    case KVX_DTYPE_F8_E5M2:
    case KVX_DTYPE_U8:
    case KVX_DTYPE_S8:
    case KVX_DTYPE_E8M0: return 8;
    default: return 0;
  }
}

KVX_HD bool is_quantised(int dtype) { return dtype_bits(dtype) <= 8; }

// The largest magnitude a computed scale maps amax to. int8 uses 127, not 128, so that the range is symmetric.
KVX_HD float dtype_qmax(int dtype) {
  switch (dtype) {
    case KVX_DTYPE_F8_E4M3: return 448.0f;
    case KVX_DTYPE_F8_E5M2: return 57344.0f;
    case KVX_DTYPE_S8: return 127.0f;
    case KVX_DTYPE_S4: return 7.0f;
    case KVX_DTYPE_E2M1: return 6.0f;
    default: return 1.0f;
  }
}

KVX_HD float load_scale(const char* p, int dtype) {
  switch (dtype) {
    case KVX_DTYPE_F32: return *(const float*)p;
    case KVX_DTYPE_F16: return f16_to_f32(*(const uint16_t*)p);
    case KVX_DTYPE_BF16: return bf16_to_f32(*(const uint16_t*)p);
    case KVX_DTYPE_F8_E4M3: return e4m3_to_f32(*(const uint8_t*)p);
    case KVX_DTYPE_E8M0: return e8m0_to_f32(*(const uint8_t*)p);
    default: return 1.0f;
  }
}

KVX_HD void store_scale(char* p, int dtype, float s) {
  switch (dtype) {
    case KVX_DTYPE_F32: *(float*)p = one_nan(s); break;
    // Saturates: an infinite scale would turn a whole row into NaN.
    case KVX_DTYPE_F16: *(uint16_t*)p = f32_to_f16(s > 65504.0f ? 65504.0f : s); break;
    case KVX_DTYPE_BF16: *(uint16_t*)p = f32_to_bf16(s); break;
    case KVX_DTYPE_F8_E4M3: *(uint8_t*)p = f32_to_e4m3(s); break;
    case KVX_DTYPE_E8M0: {  // the smallest power of two that is not below s
      uint32_t b = bits_of(s), e = b <= 0x00400000u ? 0u : (b + 0x7fffffu) >> 23;  // code 0 is 2^-127
      *(uint8_t*)p = (uint8_t)(is_nan(s) ? 255u : (e > 254u ? 254u : e));
      break;
    }
    default: break;
  }
}

// The smallest scale that is stored, so that no row divides by zero. 1e-6 is vLLM's; 2^-9 is e4m3's smallest step.
KVX_HD float scale_floor(int dtype) {
  switch (dtype) {
    case KVX_DTYPE_F8_E4M3: return 0.001953125f;
    case KVX_DTYPE_E8M0: return 0.0f;
    default: return 1e-6f;
  }
}

KVX_HD float scale_from_amax(float amax, int dtype, int scale_dtype, float tensor_scale) {
  float s = amax / dtype_qmax(dtype) / tensor_scale;
  float floor = scale_floor(scale_dtype);
  return s > floor ? s : floor;
}

// ---- one element of any type

KVX_HD float load_float(const char* p, int dtype) {  // F16, BF16, F32
  switch (dtype) {
    case KVX_DTYPE_F32: return *(const float*)p;
    case KVX_DTYPE_F16: return f16_to_f32(*(const uint16_t*)p);
    default: return bf16_to_f32(*(const uint16_t*)p);
  }
}

KVX_HD void store_float(char* p, int dtype, float x) {
  switch (dtype) {
    case KVX_DTYPE_F32: *(float*)p = one_nan(x); break;
    case KVX_DTYPE_F16: *(uint16_t*)p = f32_to_f16(x); break;
    default: *(uint16_t*)p = f32_to_bf16(x); break;
  }
}

KVX_HD uint8_t encode8(float x, int dtype) {
  switch (dtype) {
    case KVX_DTYPE_F8_E4M3: return f32_to_e4m3(x);
    case KVX_DTYPE_F8_E5M2: return f32_to_e5m2(x);
    case KVX_DTYPE_S8: return f32_to_s8(x);
    case KVX_DTYPE_S4: return f32_to_s4(x);
    default: return f32_to_e2m1(x);
  }
}

KVX_HD float decode8(uint8_t c, int dtype) {
  switch (dtype) {
    case KVX_DTYPE_F8_E4M3: return e4m3_to_f32(c);
    case KVX_DTYPE_F8_E5M2: return e5m2_to_f32(c);
    case KVX_DTYPE_S8: return s8_to_f32(c);
    case KVX_DTYPE_S4: return s4_to_f32(c);
    default: return e2m1_to_f32(c);
  }
}

}  // namespace KVX_ISA_NAMESPACE
}  // namespace kvx
