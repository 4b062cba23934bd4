// What every kernel of decode is given: the args of a launch, and what is read and written by them.
#pragma once
#include "attention/cuda/plan.cuh"
#include "attention/cuda/scales.cuh"
#include "tiles/block_rows.cuh"
#include "tiles/elements.cuh"

namespace kvx {
namespace cuda {

struct DecodeArgs {
  tiles::RowFinder rows;
  const char* data[2];  // planes
  int32_t dims[2];      // of a row of K and of V
  int32_t unit;         // bytes of a copy, and of what rows' offsets count: 16, 8 or 4
  RowsParams q, out;
  char* lse;
  int64_t lse_token, lse_head;
  const float* sinks;
  const void* cu_seqlens;
  int32_t cu_bytes;
  int32_t num_seqs, num_kv_heads, group, query_len, max_seq_len;
  int64_t window, num_tokens;
  float scale, soft_cap;
  int32_t is_causal;
  ScaleParams scales[2];
  int32_t scale_steps[2][3];  // of block, token and head, in bytes
  int32_t scale_words[2];     // GROUP_SCALES: ScaleWords
  int32_t has_one_scale[2];   // ROW_SCALES: a plane that has one a head all the same
  char* workspace;
  PlanShape plan;
};

// What a row of sums is multiplied by; its LSE is written on the way. A total of zero: nothing was seen. NaN stays.
__device__ __forceinline__ float finish(const DecodeArgs& a, int64_t token, int32_t head, float largest, float total,
                                        float value_scale, bool writes) {
  if (writes && a.lse)
    *reinterpret_cast<float*>(a.lse + token * a.lse_token + head * a.lse_head) =
        total != 0.f ? (largest + log2f(total)) * 0.69314718f : -INFINITY;
  if (total == 0.f) return 0.f;
  if (a.sinks) total += tiles::exp2_fast(a.sinks[head] * 1.44269504f - largest);
  return value_scale / total;
}

__device__ __forceinline__ void write(const RowsParams& out, char* row, int dim, float x) {
  char* p = row + dim * out.dim;
  if (out.dtype == KVX_DTYPE_BF16) *reinterpret_cast<__nv_bfloat16*>(p) = __float2bfloat16(x);
  else if (out.dtype == KVX_DTYPE_F16) *reinterpret_cast<__half*>(p) = __float2half(x);
  else *reinterpret_cast<float*>(p) = x;
}

__device__ __forceinline__ int32_t rows_of(const DecodeArgs& a, const SeqQueries& queries) {
  return query_rows(queries, a.num_tokens, a.group, a.plan.rows);
}

}  // namespace cuda
}  // namespace kvx
