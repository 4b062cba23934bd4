// Attention's arguments: checked, lowered, and sent where the cache lives.
#include "attention/attention.h"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "array.h"
#include "lower.h"

namespace kvx {
namespace {

kvx_status_t lower_attention(const kvx_cache_t& cache, const kvx_attention_args_t& a, AttentionParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  kvx_cache_t c = cache;
  if (a.k_pointers || a.v_pointers) {
    KVX_NEED(a.k_pointers && a.v_pointers, "%s is NULL beside %s; give both or neither.",
             a.k_pointers ? "v_pointers" : "k_pointers", a.k_pointers ? "k_pointers" : "v_pointers");
    KVX_NEED(c.pool_primary == nullptr, "the cache has a pool beside k_pointers; leave one of them out.");
    KVX_NEED(!(a.flags & KVX_ATTENTION_LATENT), "flags say LATENT beside k_pointers; latent caches lie in one buffer.");
    KVX_NEED((reinterpret_cast<uintptr_t>(a.k_pointers) | reinterpret_cast<uintptr_t>(a.v_pointers)) % 8 == 0,
             "k_pointers or v_pointers is not aligned to 8 bytes.");
    KVX_TRY(lower_pointers("k_pointers", 0, &c.k));
    KVX_TRY(lower_pointers("v_pointers", 1, &c.v));
    out->kv.bases[0] = a.k_pointers, out->kv.bases[1] = a.v_pointers;
  }
  KVX_TRY(lower_cache(c, out->kv.plane));
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof(kvx_attention_args_t)));
  constexpr uint64_t kFlags =
      KVX_ATTENTION_CAUSAL | KVX_ATTENTION_PLANNED | KVX_ATTENTION_LATENT | KVX_ATTENTION_FP8_PRODUCTS;
  KVX_NEED((a.flags & ~kFlags) == 0,
           "args.flags is %llu; CAUSAL (1), PLANNED (2), LATENT (4) and FP8_PRODUCTS (8) are known.",
           (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_TRY(lower_table(c, a.table, &out->kv));
  const int64_t seqs = out->kv.table.num_seqs * out->kv.table.beam_width, tokens = a.q.ndim == 3 ? a.q.shape[0] : 0;
  KVX_NEED(a.q.ndim == 3 && a.out.ndim == 3,
           "q has %u dimensions and out %u; they must be [num_tokens, num_heads, head_dim].", a.q.ndim, a.out.ndim);
  const int64_t heads = a.q.shape[1];
  const bool is_latent = a.flags & KVX_ATTENTION_LATENT;
  KVX_NEED(!is_latent || c.num_kv_heads == 1, "the cache has %lld KV heads; a latent cache has one.",
           (long long)c.num_kv_heads);
  const int64_t query_dim = is_latent ? c.k_head_dim + c.v_head_dim : c.k_head_dim,
                value_dim = is_latent ? c.k_head_dim : c.v_head_dim;
  KVX_NEED(heads > 0 && heads % c.num_kv_heads == 0,
           "q has %lld heads and the cache %lld; the first is a multiple of the second.", (long long)heads,
           (long long)c.num_kv_heads);
  KVX_NEED(a.out.shape[0] == tokens && a.out.shape[1] == heads,
           "out is [%lld, %lld, ...]; q makes it [%lld, %lld, %lld].", (long long)a.out.shape[0],
           (long long)a.out.shape[1], (long long)tokens, (long long)heads, (long long)value_dim);
  KVX_TRY(lower_rows("attention", "q", a.q, heads, query_dim, tokens > 0, &out->q));
  KVX_TRY(lower_rows("attention", "out", a.out, heads, value_dim, tokens > 0, &out->out));
  KVX_NEED(!overlaps_itself(a.out), "out strides make two elements share an address.");
  if (a.lse.data != nullptr) {
    KVX_NEED(a.lse.dtype == KVX_DTYPE_F32 && a.lse.ndim == 2 && a.lse.shape[0] == tokens && a.lse.shape[1] == heads,
             "lse must be [%lld, %lld] f32.", (long long)tokens, (long long)heads);
    KVX_TRY(check_array("attention", "lse", a.lse, tokens > 0));
    KVX_NEED(!overlaps_itself(a.lse), "lse strides make two elements share an address.");
    out->lse = static_cast<char*>(a.lse.data);
    out->lse_token = a.lse.stride[0] * 4, out->lse_head = a.lse.stride[1] * 4;
  }
  if (a.cu_seqlens.data != nullptr) {
    const kvx_array_t& cu = a.cu_seqlens;
    KVX_NEED(cu.dtype == KVX_DTYPE_S32 || cu.dtype == KVX_DTYPE_S64, "cu_seqlens is %s; it must be int32 or int64.",
             dtype_name(cu.dtype));
    KVX_NEED(cu.ndim == 1 && cu.shape[0] == seqs + 1 && cu.stride[0] == 1,
             "cu_seqlens must be a dense [%lld], one more than the sequences.", (long long)(seqs + 1));
    KVX_TRY(check_array("attention", "cu_seqlens", cu, true));
    out->cu_seqlens = cu.data, out->cu_bytes = cu.dtype == KVX_DTYPE_S64 ? 8 : 4;
  } else {
    KVX_NEED(seqs == 0 ? tokens == 0 : tokens % seqs == 0,
             "q has %lld tokens for %lld sequences; without cu_seqlens every sequence has as many.", (long long)tokens,
             (long long)seqs);
    out->query_len = seqs ? tokens / seqs : 0;
  }
  if (a.sinks.data != nullptr) {
    KVX_NEED(a.sinks.dtype == KVX_DTYPE_F32 && a.sinks.ndim == 1 && a.sinks.shape[0] == heads && a.sinks.stride[0] == 1,
             "sinks must be a dense [%lld] f32.", (long long)heads);
    KVX_TRY(check_array("attention", "sinks", a.sinks, true));
    out->sinks = static_cast<const float*>(a.sinks.data);
  }
  KVX_NEED(isfinite(a.softmax_scale) && a.softmax_scale != 0, "softmax_scale is %g; it must be finite and not 0.",
           double(a.softmax_scale));
  KVX_NEED(isfinite(a.soft_cap) && a.soft_cap >= 0, "soft_cap is %g; it must be finite, 0 for none.",
           double(a.soft_cap));
  KVX_NEED(a.window >= 0 && a.max_query_len >= 0 && a.max_seq_len >= 0,
           "window %lld, max_query_len %lld, max_seq_len %lld: none is negative.", (long long)a.window,
           (long long)a.max_query_len, (long long)a.max_seq_len);
  KVX_NEED(tokens < (int64_t(1) << 31) && seqs < (int64_t(1) << 31),
           "q has %lld tokens of %lld sequences; both are under 2^31.", (long long)tokens, (long long)seqs);
  const TableParams& t = out->kv.table;
  int64_t most =
      t.format == KVX_BLOCK_TABLE_PACKED || t.format == KVX_BLOCK_TABLE_KV_OFFSETS ? t.max_blocks : t.num_indices;
  if (t.format != KVX_BLOCK_TABLE_RAGGED)
    KVX_NEED(mul_fits(most, c.block_size, &most), "the table's blocks hold more tokens than can be counted.");
  out->max_seq_len = a.max_seq_len && a.max_seq_len < most ? a.max_seq_len : most;
  KVX_NEED(out->max_seq_len < (int64_t(1) << 31), "sequences of up to %lld tokens; at most 2^31 - 1. Give max_seq_len.",
           (long long)out->max_seq_len);
  out->max_query_len = !out->cu_seqlens                              ? out->query_len
                       : a.max_query_len && a.max_query_len < tokens ? a.max_query_len
                                                                     : tokens;
  out->kv.block_size = c.block_size, out->kv.num_blocks = c.num_blocks, out->kv.num_heads = c.num_kv_heads,
  out->kv.device = c.device;
  out->kv.max_seq_len = out->max_seq_len;
  out->kv.errors = reinterpret_cast<unsigned long long*>(a.errors);
  // A larger one changes no score either, and what kernels make of it would not be finite.
  constexpr float kMostCap = 1e20f;
  out->scale = a.softmax_scale, out->soft_cap = std::min(a.soft_cap, kMostCap),
  out->window = a.window < out->max_seq_len ? a.window : 0;  // a wider one hides nothing
  out->is_causal = a.flags & KVX_ATTENTION_CAUSAL, out->is_planned = a.flags & KVX_ATTENTION_PLANNED;
  out->allows_fp8 = a.flags & KVX_ATTENTION_FP8_PRODUCTS;
  out->num_tokens = tokens, out->num_seqs = seqs;
  out->num_heads = heads, out->num_kv_heads = c.num_kv_heads, out->group = heads / c.num_kv_heads;
  out->head_dim = c.k_head_dim, out->v_head_dim = value_dim;
  out->is_latent = is_latent, out->rope_dim = is_latent ? c.v_head_dim : 0;
  out->workspace = static_cast<char*>(a.workspace), out->workspace_bytes = a.workspace_bytes;
  return KVX_STATUS_OK;
}

// What is written lies apart from what is read again. Of calls that run: others
// describe an `out` that may not be there.
kvx_status_t check_outputs_apart(const kvx_cache_t& c, const kvx_attention_args_t& a) {
  kvx_array_t pointers[2] = {};
  const int64_t* given[2] = {a.k_pointers, a.v_pointers};
  for (int i = 0; i < 2; i++)
    pointers[i].data = const_cast<int64_t*>(given[i]), pointers[i].ndim = 1, pointers[i].dtype = KVX_DTYPE_S64,
    pointers[i].shape[0] = c.num_blocks, pointers[i].stride[0] = 1;
  return check_apart({{"out", a.out}, {"lse", a.lse}}, {{"block_table", a.table.indices},
                                                        {"indptr", a.table.indptr},
                                                        {"last_page_len", a.table.last_page_len},
                                                        {"seq_lens", a.table.seq_lens},
                                                        {"cu_seqlens", a.cu_seqlens},
                                                        {"k_pointers", pointers[0]},
                                                        {"v_pointers", pointers[1]}});
}

// Sharing out work reads no scales, only where they would stand: a caller may leave them out.
kvx_cache_t with_scales(const kvx_cache_t& cache) {
  kvx_cache_t c = cache;
  for (int i = 0; i < 2; i++) {
    kvx_plane_t& plane = i ? c.v : c.k;
    const int64_t groups = plane.group_size ? (i ? c.v_head_dim : c.k_head_dim) / plane.group_size : 1;
    if (plane.scale.data != nullptr || plane.granularity == KVX_SCALE_GRANULARITY_NONE ||
        (plane.flags & KVX_PLANE_FLAG_SCALE_INLINE))
      continue;
    int64_t shape[4] = {c.num_blocks, c.block_size, c.num_kv_heads, groups};
    uint32_t ndim = 0;
    switch (plane.granularity) {
      case KVX_SCALE_GRANULARITY_PER_BLOCK: ndim = 1; break;
      case KVX_SCALE_GRANULARITY_PER_HEAD: ndim = 1, shape[0] = c.num_kv_heads; break;
      case KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD: ndim = 2, shape[1] = c.num_kv_heads; break;
      case KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD: ndim = 3; break;
      case KVX_SCALE_GRANULARITY_PER_GROUP: ndim = 4; break;
      default: break;
    }
    plane.scale.data = reinterpret_cast<void*>(uintptr_t(1) << 46), plane.scale.data_bytes = 0,
    plane.scale.ndim = ndim;  // never followed
    int64_t stride = 1;
    for (int d = int(ndim) - 1; d >= 0; d--)
      plane.scale.shape[d] = shape[d], plane.scale.stride[d] = stride, stride = mul_most(stride, shape[d]);
  }
  return c;
}

kvx_status_t check_workspace(const AttentionParams& p) {
  const uint64_t need = cuda::attention_workspace(p);
  KVX_NEED(p.workspace_bytes >= need && (p.workspace != nullptr || need == 0),
           "the workspace has %llu bytes; these arguments need %llu (kvx_attention_workspace).",
           (unsigned long long)p.workspace_bytes, (unsigned long long)need);
  KVX_NEED(reinterpret_cast<uintptr_t>(p.workspace) % 16 == 0, "the workspace is not aligned to 16 bytes.");
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t attention_workspace(const kvx_cache_t& cache, const kvx_attention_args_t& args, uint64_t* bytes) {
  AttentionParams p;
  bool on_device;
  KVX_TRY(lower_attention(with_scales(cache), args, &p));
  KVX_TRY(check_memory(cache.memory, &on_device));
  *bytes = on_device ? cuda::attention_workspace(p) : 0;
  return KVX_STATUS_OK;
}

kvx_status_t run_attention_plan(const kvx_cache_t& cache, const kvx_attention_args_t& args, void* stream) {
  AttentionParams p;
  bool on_device;
  KVX_TRY(lower_attention(with_scales(cache), args, &p));
  KVX_TRY(check_memory(cache.memory, &on_device));
  if (!on_device) return KVX_STATUS_OK;  // the host shares its work out as it goes
  KVX_TRY(check_workspace(p));
  return cuda::plan_attention(p, stream);
}

kvx_status_t run_attention(const kvx_cache_t& cache, const kvx_attention_args_t& args, void* stream) {
  AttentionParams p;
  bool on_device;
  KVX_TRY(lower_attention(cache, args, &p));
  KVX_TRY(check_outputs_apart(cache, args));
  KVX_TRY(check_memory(cache.memory, &on_device));
  if (!on_device) return cpu::attention(p);
  KVX_TRY(check_workspace(p));
  return cuda::attention(p, stream);
}

}  // namespace kvx

using namespace kvx;

extern "C" {

kvx_status_t kvx_attention_workspace(const kvx_cache_t* cache, const kvx_attention_args_t* args, uint64_t* bytes) {
  return entry("attention_workspace()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr && bytes != nullptr, "cache, args or bytes is NULL.");
    return attention_workspace(*cache, *args, bytes);
  });
}

kvx_status_t kvx_attention_plan(const kvx_cache_t* cache, const kvx_attention_args_t* args, void* stream) {
  return entry("attention_plan()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    return run_attention_plan(*cache, *args, stream);
  });
}

kvx_status_t kvx_attention(const kvx_cache_t* cache, const kvx_attention_args_t* args, void* stream) {
  return entry("attention()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    return run_attention(*cache, *args, stream);
  });
}

}  // extern "C"
