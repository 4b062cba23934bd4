// Eight elements at a time: the unit of the fast quantising kernels. Eight 16-bit elements are one 16-byte access.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "device.cuh"

namespace kvx {
namespace cuda {

constexpr int kChunk = 8;

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {  // NaN becomes 0x7fff, as format.h has it
  __nv_bfloat162 r = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t pack_f16(float lo, float hi) {
  __half2 r = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<uint32_t*>(&r);
}

// ---- IO rows: F16, BF16, F32

template <int IO> __device__ __forceinline__ void load_chunk(const char* p, float (&x)[kChunk]) {
  if constexpr (IO == KVX_DTYPE_F32) {
    const float4 a = load_once<float4>(p), b = load_once<float4>(p + 16);
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
  } else {
    const uint4 r = load_once<uint4>(p);
    const uint32_t w[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (IO == KVX_DTYPE_BF16) {
        x[2 * i] = __uint_as_float(w[i] << 16), x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
      } else {
        const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[i]));
        x[2 * i] = f.x, x[2 * i + 1] = f.y;
      }
    }
  }
}

template <int IO> __device__ __forceinline__ void store_chunk(char* p, const float (&x)[kChunk]) {
  if constexpr (IO == KVX_DTYPE_F32) {
    store_once(p, make_float4(one_nan(x[0]), one_nan(x[1]), one_nan(x[2]), one_nan(x[3])));
    store_once(p + 16, make_float4(one_nan(x[4]), one_nan(x[5]), one_nan(x[6]), one_nan(x[7])));
  } else if constexpr (IO == KVX_DTYPE_BF16) {
    store_once(p, make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])));
  } else {
    store_once(p, make_uint4(pack_f16(x[0], x[1]), pack_f16(x[2], x[3]), pack_f16(x[4], x[5]), pack_f16(x[6], x[7])));
  }
}

// ---- quantised cells

template <int C> constexpr int chunk_bytes = C == KVX_DTYPE_F32 ? 32 : (C == KVX_DTYPE_F16 || C == KVX_DTYPE_BF16) ? 16 : (C == KVX_DTYPE_S4 || C == KVX_DTYPE_E2M1) ? 4 : 8;
template <int C> constexpr bool is_code = chunk_bytes<C> <= 8;

// x / s, correctly rounded, for many x and one s: a reciprocal once, then a multiplication and two exact corrections each
// (Markstein), instead of the long division per element. Exact where |s| is moderate; other scales take the division.
struct Divider {
  float s, r, limit;
  bool is_fast, is_one;

  __device__ __forceinline__ explicit Divider(float scale) : s(scale) {
    const float a = fabsf(scale);
    is_one = scale == 1.0f;
    is_fast = a >= 0x1p-80f && a <= 0x1p100f;  // remainders then neither overflow nor vanish where they could matter
    r = __frcp_rn(scale);
    limit = a * 0x1p17f;  // beyond every type's largest value (57344): quotients there saturate whatever they are
  }
  __device__ __forceinline__ float operator()(float x) const {
    if (is_one) return x;
    if (!is_fast) return __fdiv_rn(x, s);
    // NaN-propagating clamp: keeps infinities out of the corrections, and NaN in.
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-limit));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(limit));
    float q = __fmul_rn(x, r);
    q = __fmaf_rn(__fmaf_rn(-q, s, x), r, q);
    return __fmaf_rn(__fmaf_rn(-q, s, x), r, q);
  }
};

template <int C> __device__ __forceinline__ uint32_t encode_pair(float lo, float hi) {
  if constexpr (C == KVX_DTYPE_F8_E4M3) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E4M3);
  } else if constexpr (C == KVX_DTYPE_F8_E5M2) {
    return __nv_cvt_float2_to_fp8x2(make_float2(lo, hi), __NV_SATFINITE, __NV_E5M2);
  } else {
    return uint32_t(encode8(lo, C)) | uint32_t(encode8(hi, C)) << 8;
  }
}

template <int C> __device__ __forceinline__ void encode_chunk(char* p, const float (&x)[kChunk], const Divider& divide) {
  if constexpr (!is_code<C>) {
    store_chunk<C>(p, x);
  } else if constexpr (chunk_bytes<C> == 8) {
    uint32_t w[2];
#pragma unroll
    for (int i = 0; i < 2; i++)
      w[i] = encode_pair<C>(divide(x[4 * i]), divide(x[4 * i + 1])) | encode_pair<C>(divide(x[4 * i + 2]), divide(x[4 * i + 3])) << 16;
    store_once(p, make_uint2(w[0], w[1]));
  } else {
    uint32_t w = 0;
#pragma unroll
    for (int i = 0; i < kChunk; i++) w |= uint32_t(encode8(divide(x[i]), C)) << (4 * i);
    store_once(p, w);
  }
}

template <int C> __device__ __forceinline__ void decode_chunk(const char* p, float (&x)[kChunk], float scale) {
  if constexpr (!is_code<C>) {
    load_chunk<C>(p, x);
  } else if constexpr (chunk_bytes<C> == 8) {
    const uint2 r = load_once<uint2>(p);
    const uint32_t w[2] = {r.x, r.y};
#pragma unroll
    for (int i = 0; i < kChunk; i++) x[i] = decode8(uint8_t(w[i / 4] >> (8 * (i % 4))), C) * scale;
  } else {
    const uint32_t w = load_once<uint32_t>(p);
#pragma unroll
    for (int i = 0; i < kChunk; i++) x[i] = decode8(uint8_t(w >> (4 * i) & 15), C) * scale;
  }
}

__device__ __forceinline__ float chunk_amax(const float (&x)[kChunk]) {
  float best = 0;
#pragma unroll
  for (int i = 0; i < kChunk; i++) {
    const float a = fabsf(x[i]);
    best = fmaxf(best, a < __int_as_float(0x7f800000) ? a : 0.0f);  // NaN compares false
  }
  return best;
}

// ---- one row's scale, as cpu/row.h has it

__device__ __forceinline__ float tensor_scale_of(const ScaleParams& s) { return s.tensor_scale ? *s.tensor_scale : 1.0f; }

__device__ __forceinline__ char* scale_at(const ScaleParams& s, int64_t block, int64_t offset, int64_t head, int64_t group) {
  return s.data + block * s.block + offset * s.token + head * s.head + group * s.group;
}

__device__ __forceinline__ float read_scale(const ScaleParams& s, int64_t block, int64_t offset, int64_t head, int64_t group) {
  if (s.mode == SCALE_NONE) return 1.0f;
  const float tensor = tensor_scale_of(s);
  return s.data ? load_scale(scale_at(s, block, offset, head, group), s.dtype) * tensor : tensor;
}

// The scale as it will be read back, and its store by the one thread that owns it.
__device__ __forceinline__ float settle_scale(const ScaleParams& s, int dtype, int64_t token, int64_t block, int64_t offset, int64_t head, int64_t group, float amax,
                                              bool owns) {
  if (s.mode <= SCALE_READ) return read_scale(s, block, offset, head, group);
  const float tensor = tensor_scale_of(s);
  const float scale = s.mode == SCALE_GIVEN ? *reinterpret_cast<const float*>(s.given + token * s.given_token + head * s.given_head + group * s.given_group)
                                            : scale_from_amax(amax, dtype, s.dtype, tensor);
  alignas(4) char stored[4];
  store_scale(stored, s.dtype, scale);
  if (owns) store_scale(scale_at(s, block, offset, head, group), s.dtype, scale);
  return load_scale(stored, s.dtype) * tensor;
}

}  // namespace cuda
}  // namespace kvx
