// index_scores and topk: descriptors to params, then run where the memory is.
#include <string.h>

#include "array.h"
#include "entry/hybrid.h"
#include "format.h"
#include "lower.h"

namespace kvx {
namespace {

kvx_status_t lower(const kvx_index_scores_args_t& a, IndexScoresParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(a.ratio >= 1 && a.ratio <= INT32_MAX, "ratio is %lld; it must be 1 or more.", (long long)a.ratio);
  KVX_TRY(lower_row_pages("keys", a.keys, &out->keys));
  KVX_NEED(a.q.ndim == 3, "q has %u dimensions; it must be [num_tokens, heads, dim].", a.q.ndim);
  const int64_t tokens = a.q.shape[0], heads = a.q.shape[1];
  KVX_NEED(heads >= 1 && heads <= INT32_MAX, "q has %lld heads; it has 1 or more.", (long long)heads);
  KVX_TRY(lower_tokens("q", a.q, heads, out->keys.dim, &out->q));
  KVX_NEED(a.weights.dtype == KVX_DTYPE_F32 && a.weights.ndim == 2 && a.weights.shape[0] == tokens &&
               a.weights.shape[1] == heads,
           "weights are f32 [num_tokens, heads] = [%lld, %lld].", (long long)tokens, (long long)heads);
  KVX_TRY(check_array("weights", "array", a.weights, tokens > 0));
  KVX_NEED(a.scores.dtype == KVX_DTYPE_F32 && a.scores.ndim == 2 && a.scores.shape[0] == tokens &&
               (a.scores.shape[1] <= 1 || a.scores.stride[1] == 1) && a.scores.shape[1] <= INT32_MAX,
           "scores are f32 [num_tokens, entries] with adjacent columns and %lld tokens.", (long long)tokens);
  KVX_TRY(check_array("scores", "array", a.scores, tokens > 0 && a.scores.shape[1] > 0));
  KVX_NEED(!overlaps_itself(a.scores), "scores strides make two elements share an address.");
  const int64_t slots = a.block_table.ndim == 2 ? a.block_table.shape[0] : 0;
  KVX_TRY(lower_entry_table(a.block_table, slots, &out->table));
  KVX_TRY(lower_step(a.step, tokens, slots, &out->step));
  KVX_TRY(check_apart({{"scores", a.scores}}, {{"step.slots", a.step.slots},
                                               {"step.cu_seqlens", a.step.cu_seqlens},
                                               {"step.starts", a.step.starts},
                                               {"block_table", a.block_table}}));
  out->weights = static_cast<const char*>(a.weights.data), out->weight_token = a.weights.stride[0] * 4,
  out->weight_head = a.weights.stride[1] * 4;
  out->num_heads = int32_t(heads), out->ratio = int32_t(a.ratio);
  out->scores = static_cast<float*>(a.scores.data), out->score_token = a.scores.stride[0] * 4,
  out->num_entries = a.scores.shape[1];
  out->errors = reinterpret_cast<unsigned long long*>(a.errors), out->device = a.device;
  return KVX_STATUS_OK;
}

kvx_status_t lower(const kvx_topk_args_t& a, TopkParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(a.scores.dtype == KVX_DTYPE_F32 && a.scores.ndim == 2 &&
               (a.scores.shape[1] <= 1 || a.scores.stride[1] == 1) && a.scores.shape[0] <= INT32_MAX &&
               a.scores.shape[1] <= INT32_MAX,
           "scores are %s with %u dimensions; they must be f32 [num_tokens, entries], columns adjacent.",
           dtype_name(a.scores.dtype), a.scores.ndim);
  const int64_t tokens = a.scores.shape[0];
  KVX_TRY(check_array("scores", "array", a.scores, tokens > 0 && a.scores.shape[1] > 0));
  KVX_NEED(a.indices.dtype == KVX_DTYPE_S32 && a.indices.ndim == 2 && a.indices.shape[0] == tokens &&
               a.indices.shape[1] >= 1 && a.indices.shape[1] <= INT32_MAX &&
               (a.indices.shape[1] == 1 || a.indices.stride[1] == 1),
           "indices are int32 [num_tokens, k] with %lld tokens, k 1 or more and columns adjacent.", (long long)tokens);
  KVX_TRY(check_array("indices", "array", a.indices, tokens > 0));
  KVX_NEED(!overlaps_itself(a.indices), "indices strides make two elements share an address.");
  if (a.lengths.ndim) {
    KVX_NEED(a.lengths.dtype == KVX_DTYPE_S32 && a.lengths.ndim == 1 && a.lengths.shape[0] == tokens &&
                 (tokens <= 1 || a.lengths.stride[0] == 1),
             "lengths are an adjacent int32 [num_tokens] = [%lld].", (long long)tokens);
    KVX_TRY(check_array("lengths", "array", a.lengths, tokens > 0));
    out->lengths = static_cast<const int32_t*>(a.lengths.data);
  }
  out->scores = static_cast<const float*>(a.scores.data), out->score_token = a.scores.stride[0] * 4;
  out->indices = static_cast<int32_t*>(a.indices.data), out->index_token = a.indices.stride[0] * 4;
  out->num_tokens = tokens, out->num_entries = a.scores.shape[1], out->k = int32_t(a.indices.shape[1]);
  out->workspace = static_cast<char*>(a.workspace), out->workspace_bytes = a.workspace_bytes, out->device = a.device;
  return KVX_STATUS_OK;
}

}  // namespace
}  // namespace kvx

extern "C" {

kvx_status_t kvx_index_scores(const kvx_index_scores_args_t* args, void* stream) {
  using namespace kvx;
  return entry("index_scores()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    IndexScoresParams p;
    bool on_device;
    KVX_TRY(lower(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    if (on_device) return cuda::index_scores(p, stream);
    KVX_TRY(check_host_step(p.step));
    return cpu::index_scores(p);
  });
}

kvx_status_t kvx_topk_workspace(const kvx_topk_args_t* args, uint64_t* bytes) {
  using namespace kvx;
  return entry("topk()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr && bytes != nullptr, "args or bytes is NULL.");
    TopkParams p;
    bool on_device;
    KVX_TRY(lower(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    *bytes = on_device ? cuda::topk_workspace(p) : 0;
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_topk(const kvx_topk_args_t* args, void* stream) {
  using namespace kvx;
  return entry("topk()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    TopkParams p;
    bool on_device;
    KVX_TRY(lower(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    if (!on_device) return cpu::topk(p);
    const uint64_t need = cuda::topk_workspace(p);
    KVX_NEED(p.workspace_bytes >= need && (need == 0 || reinterpret_cast<uintptr_t>(p.workspace) % 256 == 0),
             "workspace has %llu bytes; this call needs %llu, 256-aligned (kvx_topk_workspace).",
             (unsigned long long)p.workspace_bytes, (unsigned long long)need);
    return cuda::topk(p, stream);
  });
}

}  // extern "C"
