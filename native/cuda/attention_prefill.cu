// The table of prefill kernels, and which calls they take.
#include "attention_prefill.cuh"

#include <algorithm>

#include "attention.cuh"

namespace kvx {
namespace cuda {

namespace {

bool fits_rows(const RowsParams& r, bool to_16) {
  const int64_t unit = to_16 ? 16 : 4;
  return r.is_dense && r.token % unit == 0 && r.head % unit == 0 && reinterpret_cast<uintptr_t>(r.data) % unit == 0;
}

template <class C>
kvx_status_t start(const PrefillArgs& args, int64_t blocks, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&prefill<C>), C::kSharedBytes));
  return launch_early_with("attention_prefill", prefill<C>, dim3(unsigned(blocks)), dim3(C::kThreads), C::kSharedBytes, stream, args);
}

template <class Numbers>
kvx_status_t start_with(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) {
  const bool caps = p.soft_cap > 0.f;
  if (p.head_dim == 64) return caps ? start<PrefillConfig<Numbers, 64, true>>(args, blocks, stream) : start<PrefillConfig<Numbers, 64, false>>(args, blocks, stream);
  return caps ? start<PrefillConfig<Numbers, 128, true>>(args, blocks, stream) : start<PrefillConfig<Numbers, 128, false>>(args, blocks, stream);
}

}  // namespace

bool takes_prefill(const AttentionParams& p) {
  const PlaneParams *k = &p.kv.plane[0], *v = &p.kv.plane[1];
  if (!has_warpgroups() || p.scale <= 0.f || !fits_row_finder(p)) return false;
  if (p.head_dim != p.v_head_dim || (p.head_dim != 64 && p.head_dim != 128) || k->dtype != v->dtype || p.q.dtype != k->dtype) return false;
  if (k->dtype != KVX_DTYPE_BF16 && k->dtype != KVX_DTYPE_F16) return false;
  if (!fits_rows(p.q, true) || !fits_rows(p.out, false) || p.num_tokens * p.group > kMaxCount) return false;
  return true;
}

kvx_status_t run_prefill(const AttentionParams& p, void* stream) {
  PrefillArgs a = {};
  a.rows = make_row_finder(p);
  for (int i = 0; i < 2; i++) a.data[i] = p.kv.plane[i].data;
  a.q = p.q, a.out = p.out, a.lse = p.lse, a.lse_token = p.lse_token, a.lse_head = p.lse_head, a.sinks = p.sinks;
  a.cu_seqlens = p.cu_seqlens, a.cu_bytes = p.cu_bytes;
  a.num_seqs = int32_t(p.num_seqs), a.num_kv_heads = int32_t(p.num_kv_heads), a.query_len = int32_t(p.query_len), a.max_seq_len = int32_t(p.max_seq_len);
  a.skip_rows = int32_t(p.skip_rows), a.group = make_fast_divider(p.group);
  a.window = p.window, a.num_tokens = p.num_tokens, a.scale = p.scale, a.soft_cap = p.soft_cap, a.is_causal = p.is_causal;
  // No sequence has more blocks of rows than its own, rounded up: a bound that needs no lengths. Those we take have more than skip_rows.
  const int64_t rows = p.num_tokens * p.group, seqs = std::min(p.num_seqs, rows / (p.skip_rows + 1));
  const int64_t most = p.cu_seqlens ? rows / 128 + seqs : p.num_seqs * ((p.query_len * p.group + 127) / 128);
  const int64_t blocks = most * p.num_kv_heads;
  if (blocks > kMaxCount) return fail(KVX_STATUS_UNSUPPORTED, "%lld blocks of query rows are more than one launch takes.", (long long)blocks);
  return p.q.dtype == KVX_DTYPE_BF16 ? start_with<tiles::Bf16Numbers>(p, a, blocks, stream) : start_with<tiles::F16Numbers>(p, a, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
