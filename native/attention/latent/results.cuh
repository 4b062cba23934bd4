// Where sums of latent attention go: to rows of the output, or to a part in the workspace that is added up with others.
//
// Sums stand as multiplications leave them: of every eight columns (a group), a thread has elements 2 t and 2 t + 1 of
// rows r0 = 16 * warp + g and r0 + 8, in four registers.
#pragma once
#include "attention/latent/items.cuh"

namespace kvx {
namespace cuda {

// A row of the output, and what its sums are multiplied by.
struct LatentOut {
  char* to;
  float by;
  bool is_there;
};

// Its LSE is written on the way.
__device__ __forceinline__ LatentOut latent_out(const LatentArgs& a, int64_t first_query, int32_t row, int32_t rows,
                                                float base, float sum, bool writes_lse) {
  LatentOut out = {nullptr, 0.f, row < rows};
  if (!out.is_there) return out;
  const int32_t token = int32_t(a.heads.divide(row)), head = row - token * int32_t(a.heads.d);
  const int64_t at = first_query + token;
  if (writes_lse && a.lse)
    *reinterpret_cast<float*>(a.lse + at * a.lse_token + head * a.lse_head) =
        sum != 0.f ? (base + log2f(sum)) * 0.69314718f : -INFINITY;  // NaN stays
  if (a.sinks && sum != 0.f) sum += tiles::exp2_fast(a.sinks[head] * 1.44269504f - base);
  out.by = sum != 0.f ? 1.f / sum : 0.f;
  out.to = a.out.data + at * a.out.token + int64_t(head) * a.out.head;
  return out;
}

__device__ __forceinline__ void store_pair(int dtype, char* row, int dim, float x, float y) {
  if (dtype == KVX_DTYPE_F32) *reinterpret_cast<float2*>(row + dim * 4) = make_float2(x, y);
  else
    *reinterpret_cast<uint32_t*>(row + dim * 2) =
        dtype == KVX_DTYPE_BF16 ? tiles::Bf16Numbers::pack(x, y) : tiles::F16Numbers::pack(x, y);
}

// Four lanes have a word of each of four groups; each gets four words of one.
__device__ __forceinline__ uint4 turn_quad(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int t) {
  const bool is_odd = t & 1, is_high = t & 2;
  const uint32_t ab = __shfl_xor_sync(0xffffffffu, is_odd ? a : b, 1),
                 cd = __shfl_xor_sync(0xffffffffu, is_odd ? c : d, 1);
  if (is_odd) a = ab, c = cd;
  else b = ab, d = cd;
  const uint32_t ac = __shfl_xor_sync(0xffffffffu, is_high ? a : c, 2),
                 bd = __shfl_xor_sync(0xffffffffu, is_high ? b : d, 2);
  if (is_high) a = ac, b = bd;
  else c = ac, d = bd;
  return make_uint4(a, b, c, d);
}

template <class Numbers, int N>
__device__ __forceinline__ void store_groups_16(const LatentOut (&out)[2], int dim, int t, const float (&x)[N]) {
#pragma unroll
  for (int h = 0; h < 2; h++)
#pragma unroll
    for (int n = 0; n < N / 4; n += 4) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        word[i] = Numbers::pack(x[4 * (n + i) + 2 * h] * out[h].by, x[4 * (n + i) + 2 * h + 1] * out[h].by);
      const uint4 chunk = turn_quad(word[0], word[1], word[2], word[3], t);
      if (out[h].is_there) *reinterpret_cast<uint4*>(out[h].to + (dim + 8 * (n + t)) * 2) = chunk;
    }
}

// Groups that begin with column `dim`. By a whole warp. `t` is asked for: what follows from a number that the compiler
// knows for the whole kernel, it would find before the items, and spill.
template <int N>
__device__ __forceinline__ void store_groups(const LatentArgs& a, const LatentOut (&out)[2], int dim, int t,
                                             const float (&x)[N]) {
  if (a.stores_16 && a.out.dtype == KVX_DTYPE_BF16) return store_groups_16<tiles::Bf16Numbers>(out, dim, t, x);
  if (a.stores_16 && a.out.dtype == KVX_DTYPE_F16) return store_groups_16<tiles::F16Numbers>(out, dim, t, x);
#pragma unroll
  for (int h = 0; h < 2; h++) {
    if (!out[h].is_there) continue;
#pragma unroll
    for (int n = 0; n < N / 4; n++) {
      const int at = dim + 8 * n + 2 * t;
      store_pair(a.out.dtype, out[h].to, at, x[4 * n + 2 * h] * out[h].by, x[4 * n + 2 * h + 1] * out[h].by);
    }
  }
}

// A part of 64 rows: sums, [64, 512], then base and sum of each row.
struct LatentPart {
  float* sums;
  float2* stats;

  static constexpr int64_t kBytes = kLatentRows * (kLatentDim + 2) * 4;
  static __device__ __forceinline__ LatentPart at(const LatentArgs& a, int64_t number) {
    char* part = a.workspace + a.plan.partial_at + number * a.plan.partial_bytes;
    return {reinterpret_cast<float*>(part), reinterpret_cast<float2*>(part + kLatentRows * kLatentDim * 4)};
  }
  __device__ __forceinline__ float* row(int number) const { return sums + number * kLatentDim; }
};

}  // namespace cuda
}  // namespace kvx
