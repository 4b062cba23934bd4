// Attention: what its kernels are given. Made and checked by attention.cpp.
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

struct AttentionParams {
  GatherParams kv;  // planes, table, block geometry; table.h finds blocks by it. Its rows are not used
  RowsParams q, out;
  char* lse;  // f32; NULL = not wanted
  int64_t lse_token, lse_head;
  const void* cu_seqlens;  // NULL: query_len each
  int32_t cu_bytes;
  const float* sinks;  // [Hq], dense; NULL = none
  float scale, soft_cap;
  bool is_causal, is_planned, allows_fp8;  // fp8: queries and weights may be rounded to it
  int64_t window;                          // 0 = none
  int64_t num_tokens, num_seqs, query_len, max_query_len, max_seq_len;
  int64_t skip_rows;  // sequences of up to so many query rows (queries * group) are another kernel's; 0 = none are
  int64_t num_heads, num_kv_heads, group;  // query heads, KV heads, and how many of the first share one of the second
  int64_t head_dim, v_head_dim;
  // Latent (MLA): plane 0 holds latents, plane 1 rotary parts of rope_dim. A key is both, a value is the latent:
  // head_dim is the latent's and v_head_dim the same; query rows are head_dim + rope_dim wide.
  bool is_latent;
  int64_t rope_dim;
  char* workspace;
  uint64_t workspace_bytes;
};

// Lower, check memory, run: what the C calls and Python's door share.
kvx_status_t run_attention(const kvx_cache_t& cache, const kvx_attention_args_t& args, void* stream);
kvx_status_t run_attention_plan(const kvx_cache_t& cache, const kvx_attention_args_t& args, void* stream);
kvx_status_t attention_workspace(const kvx_cache_t& cache, const kvx_attention_args_t& args, uint64_t* bytes);

namespace cpu {
kvx_status_t attention(const AttentionParams& p);
kvx_status_t attention_latent(const AttentionParams& p);
}  // namespace cpu
namespace cuda {
constexpr int kLatentDim = 512, kRopeDim = 64;  // of latent caches that have kernels of their own
uint64_t attention_workspace(const AttentionParams& p);
KVX_ON_DEVICE(plan_attention, AttentionParams)
KVX_ON_DEVICE(attention, AttentionParams)
}  // namespace cuda

}  // namespace kvx
