// Rows of 128, the keys of an indexer, from f32 numbers to their page in the registers of one warp: lane l holds
// elements [4l, 4l + 4). Any format that codes all of them in groups; the arithmetic
// and its order are those of entry/cuda/encode.cuh.
#pragma once
#include "entry/cuda/encode.cuh"

namespace kvx {
namespace cuda {

constexpr int kIndexRow = 128, kIndexLane = kIndexRow / 32;

inline bool fits_index_row(const RowPages& r, const FinishParams& f) {
  const uint64_t row_bits = uint64_t(uintptr_t(r.data)) | uint64_t(r.page) | uint64_t(r.data_bytes);
  const uint64_t bits =
      uint64_t(uintptr_t(f.cos)) | uint64_t(uintptr_t(f.sin)) | uint64_t(f.table_row) | uint64_t(uintptr_t(f.weight));
  const bool has_groups = r.group == 16 || r.group == 32 || r.group == 64 || r.group == 128;
  const bool has_scale =
      r.scale_dtype == KVX_DTYPE_E8M0 || r.scale_dtype == KVX_DTYPE_F32 || r.scale_dtype == KVX_DTYPE_F8_E4M3;
  const bool has_codes = r.dtype == KVX_DTYPE_E2M1 || r.dtype == KVX_DTYPE_F8_E4M3;
  return r.dim == kIndexRow && r.coded == r.dim && has_groups && has_scale && has_codes &&
         (!f.cos || f.rope_dim % kIndexLane == 0) && f.table_row <= kMaxCount && common_alignment(row_bits) >= 4 &&
         common_alignment(bits) >= 16;
}

__device__ __forceinline__ float4 load_index_weight(const FinishParams& f, uint32_t lane) {
  if (f.weight_dtype == KVX_DTYPE_F32) return __ldg(reinterpret_cast<const float4*>(f.weight) + lane);
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(f.weight) + lane);
  float x[kIndexLane];
  const uint32_t w[2] = {v.x, v.y};
#pragma unroll
  for (int i = 0; i < kIndexLane; i++) {
    if (f.weight_dtype == KVX_DTYPE_BF16) x[i] = __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
    else x[i] = __half2float(__ushort_as_half(uint16_t(i % 2 ? w[i / 2] >> 16 : w[i / 2])));
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

// `hadamard`: dim^-0.5; 0: no such rotation.
__device__ __forceinline__ void finish_index(const FinishParams& f, float hadamard, uint32_t lane, int32_t at,
                                             float (&x)[kIndexLane]) {
  const int32_t turned =
      int32_t(lane) * kIndexLane - (kIndexRow - f.rope_dim);  // place of its first in the rotary part
  float2 c{}, s{};
  if (f.cos && turned >= 0) {
    const uint64_t offset = uint64_t(uint32_t(at)) * uint32_t(f.table_row) + uint32_t(turned) * 2;
    c = __ldg(reinterpret_cast<const float2*>(reinterpret_cast<const char*>(f.cos) + offset));
    s = __ldg(reinterpret_cast<const float2*>(reinterpret_cast<const char*>(f.sin) + offset));
  }
  if (f.weight) {
    const float4 w = load_index_weight(f, lane);
    // Squares of eight neighbours as a tree, and those by halves: a neighbour first, then lanes 16, 8, 4 and 2 away.
    float sum = __fadd_rn(__fadd_rn(__fmul_rn(x[0], x[0]), __fmul_rn(x[1], x[1])),
                          __fadd_rn(__fmul_rn(x[2], x[2]), __fmul_rn(x[3], x[3])));
    sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
#pragma unroll
    for (int hop = 16; hop > 1; hop /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, hop));
    const float r = norm_factor(sum, f.inverse_dim, f.eps);
    x[0] = __fmul_rn(__fmul_rn(x[0], r), w.x), x[1] = __fmul_rn(__fmul_rn(x[1], r), w.y);
    x[2] = __fmul_rn(__fmul_rn(x[2], r), w.z), x[3] = __fmul_rn(__fmul_rn(x[3], r), w.w);
  }
  if (f.cos && turned >= 0) rotate_pair(&x[0], &x[1], c.x, s.x), rotate_pair(&x[2], &x[3], c.y, s.y);
  if (hadamard == 0.0f) return;
  const float a = __fadd_rn(x[0], x[1]), b = __fsub_rn(x[0], x[1]), d = __fadd_rn(x[2], x[3]),
              e = __fsub_rn(x[2], x[3]);
  x[0] = __fadd_rn(a, d), x[1] = __fadd_rn(b, e), x[2] = __fsub_rn(a, d), x[3] = __fsub_rn(b, e);
#pragma unroll
  for (int hop = 1; hop < 32; hop *= 2) {
    const uint32_t sign = lane & hop ? 0x80000000u : 0u;  // the upper of a pair gets lower - upper
#pragma unroll
    for (int i = 0; i < kIndexLane; i++)
      x[i] = __fadd_rn(__shfl_xor_sync(0xffffffffu, x[i], hop), __uint_as_float(__float_as_uint(x[i]) ^ sign));
  }
#pragma unroll
  for (int i = 0; i < kIndexLane; i++) x[i] = __fmul_rn(x[i], hadamard);
}

// settle_group of a type that is known: its switches are gone.
template <int Scale> __device__ __forceinline__ float settle_as(char* place, float scale, bool owns) {
  alignas(4) char stored[4];
  store_scale(stored, Scale, scale);
  if (owns) store_scale(place, Scale, scale);
  return load_scale(stored, Scale);
}

__device__ __forceinline__ float settle_index(const RowPages& r, char* place, float amax, bool owns) {
  const float qmax = r.dtype == KVX_DTYPE_E2M1 ? dtype_qmax(KVX_DTYPE_E2M1) : dtype_qmax(KVX_DTYPE_F8_E4M3);
  float scale = fmaxf(__fdiv_rn(fmaxf(amax, r.least_amax), qmax), r.least_scale);
  if (r.has_power_scale) scale = settle_as<KVX_DTYPE_E8M0>(nullptr, scale, false);
  if (r.scale_dtype == KVX_DTYPE_E8M0) return settle_as<KVX_DTYPE_E8M0>(place, scale, owns);
  return r.scale_dtype == KVX_DTYPE_F32 ? settle_as<KVX_DTYPE_F32>(place, scale, owns)
                                        : settle_as<KVX_DTYPE_F8_E4M3>(place, scale, owns);
}

// Every lane of the warp comes here.
__device__ __forceinline__ void store_index(const RowPages& r, const RowAt& to, uint32_t lane, float (&x)[kIndexLane]) {
  if (r.rounds_first) {
#pragma unroll
    for (int i = 0; i < kIndexLane; i++) x[i] = bf16_to_f32(f32_to_bf16(x[i]));
  }
  uint32_t most = max(max(finite_bits(x[0]), finite_bits(x[1])), max(finite_bits(x[2]), finite_bits(x[3])));
#pragma unroll
  for (int hop = 1; hop < 32; hop *= 2)
    if (hop * kIndexLane < r.group) most = max(most, __shfl_xor_sync(0xffffffffu, most, hop));
  const int scale_size = r.scale_dtype == KVX_DTYPE_F32 ? 4 : 1, lanes = r.group / kIndexLane;
  const float scale = settle_index(r, to.scales + int(lane) / lanes * scale_size, __uint_as_float(most),
                                   (lane & uint32_t(lanes - 1)) == 0);
#pragma unroll 1
  for (int32_t i = r.num_groups * scale_size + int32_t(lane); i < r.scale_bytes; i += 32) to.scales[i] = 0;
  float q[kIndexLane];
#pragma unroll
  for (int i = 0; i < kIndexLane; i++) q[i] = __fdiv_rn(x[i], scale);
  if (r.dtype != KVX_DTYPE_E2M1) {
    *reinterpret_cast<uint32_t*>(to.data + 4 * lane) = e4m3_four(q[0], q[1], q[2], q[3]);
    return;
  }
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kIndexLane; i++)
    codes |= (r.ties_down ? e2m1_down(q[i]) : uint32_t(encode8(q[i], KVX_DTYPE_E2M1))) << (4 * i);
  *reinterpret_cast<uint16_t*>(to.data + 2 * lane) = uint16_t(codes);
}

}  // namespace cuda
}  // namespace kvx
