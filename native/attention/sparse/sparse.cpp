// attention_sparse: descriptors to params, then run where the memory is.
#include <string.h>

#include <algorithm>

#include "array.h"
#include "entry/hybrid.h"
#include "format.h"
#include "lower.h"

namespace kvx {
namespace {

kvx_status_t lower_places(const kvx_attention_sparse_args_t& a, int64_t tokens, SparseParams* out) {
  KVX_TRY(lower_row_pages("window", a.window, &out->window));
  const RowPages& w = out->window;
  KVX_NEED(a.positions.dtype == KVX_DTYPE_S32 && a.positions.ndim == 2 && a.positions.shape[0] == w.num_pages &&
               a.positions.shape[1] == w.rows && (w.rows == 1 || a.positions.stride[1] == 1) &&
               (w.num_pages <= 1 || a.positions.stride[0] == w.rows),
           "positions are adjacent int32 [num_pages, rows] = [%lld, %d].", (long long)w.num_pages, w.rows);
  KVX_TRY(check_array("positions", "array", a.positions, w.num_pages > 0));
  out->positions = static_cast<const int32_t*>(a.positions.data);
  KVX_NEED(a.window_tokens >= 1 && a.window_tokens <= INT32_MAX, "window_tokens is %lld; it must be 1 or more.",
           (long long)a.window_tokens);
  out->window_tokens = int32_t(a.window_tokens);
  // A ring of rows holds so many positions and no more; what lies further back would be
  // looked for in vain, or without end.
  if (a.fresh.pages.ndim) {
    KVX_NEED(a.window_tokens - 1 <= w.rows,
             "a window of %lld tokens, of which pages of %d rows hold those before this step.",
             (long long)a.window_tokens, w.rows);
    KVX_TRY(lower_row_pages("fresh", a.fresh, &out->fresh));
    KVX_NEED(out->fresh.dim == w.dim && tokens <= out->fresh.num_pages * out->fresh.rows,
             "fresh has %lld rows of %d elements; %lld tokens of %d need them.",
             (long long)(out->fresh.num_pages * out->fresh.rows), out->fresh.dim, (long long)tokens, w.dim);
  } else {
    KVX_NEED(w.rows >= a.window_tokens, "a window of %lld tokens in pages of %d rows.", (long long)a.window_tokens,
             w.rows);
  }
  out->ratio = 1;
  if (a.entries.pages.ndim == 0) {
    KVX_NEED(a.selected.ndim == 0, "selected is given, and entries are not.");
    return KVX_STATUS_OK;
  }
  KVX_TRY(lower_row_pages("entries", a.entries, &out->entries));
  KVX_NEED(out->entries.dim == w.dim, "entries have %d elements and rows of the window %d.", out->entries.dim, w.dim);
  KVX_NEED(a.ratio >= 1 && a.ratio <= INT32_MAX, "ratio is %lld; it must be 1 or more.", (long long)a.ratio);
  out->ratio = int32_t(a.ratio);
  KVX_TRY(lower_entry_table(a.block_table, w.num_pages, &out->table));
  const int64_t room = int64_t(out->table.columns) * out->entries.rows;
  out->max_entries = a.max_entries > 0 ? std::min(a.max_entries, room) : room;
  if (a.selected.ndim) {
    KVX_NEED(a.selected.dtype == KVX_DTYPE_S32 && a.selected.ndim == 2 && a.selected.shape[0] == tokens &&
                 a.selected.shape[1] <= INT32_MAX && (a.selected.shape[1] <= 1 || a.selected.stride[1] == 1),
             "selected is int32 [num_tokens, k] with %lld tokens and adjacent columns.", (long long)tokens);
    KVX_TRY(check_array("selected", "array", a.selected, tokens > 0 && a.selected.shape[1] > 0));
    out->selected = static_cast<const int32_t*>(a.selected.data), out->selected_token = a.selected.stride[0] * 4,
    out->num_selected = int32_t(a.selected.shape[1]);
    if (out->num_selected == 0) out->entries.data = nullptr;
    out->max_entries = out->num_selected;
  }
  return KVX_STATUS_OK;
}

kvx_status_t lower(const kvx_attention_sparse_args_t& a, SparseParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(a.q.ndim == 3 && a.q.shape[1] >= 1 && a.q.shape[1] <= INT32_MAX,
           "q has %u dimensions; it must be [num_tokens, heads, dim].", a.q.ndim);
  const int64_t tokens = a.q.shape[0], heads = a.q.shape[1];
  KVX_TRY(lower_places(a, tokens, out));
  const int64_t dim = out->window.dim;
  KVX_NEED(a.q.dtype != KVX_DTYPE_F8_E4M3 && a.out.dtype != KVX_DTYPE_F8_E4M3, "q and out are f16, bf16 or f32.");
  KVX_TRY(lower_tokens("q", a.q, heads, dim, &out->q));
  KVX_NEED(a.out.ndim == 3 && a.out.shape[0] == tokens, "out has %u dimensions; it must be [%lld, %lld, %lld].",
           a.out.ndim, (long long)tokens, (long long)heads, (long long)dim);
  KVX_TRY(lower_tokens("out", a.out, heads, dim, &out->out));
  KVX_NEED(!overlaps_itself(a.out), "out strides make two elements share an address.");
  if (a.lse.ndim) {
    KVX_NEED(a.lse.dtype == KVX_DTYPE_F32 && a.lse.ndim == 2 && a.lse.shape[0] == tokens && a.lse.shape[1] == heads,
             "lse must be [%lld, %lld] f32.", (long long)tokens, (long long)heads);
    KVX_TRY(check_array("lse", "array", a.lse, tokens > 0));
    KVX_NEED(!overlaps_itself(a.lse), "lse strides make two elements share an address.");
    out->lse = static_cast<char*>(a.lse.data), out->lse_token = a.lse.stride[0] * 4,
    out->lse_head = a.lse.stride[1] * 4;
  }
  if (a.sinks.ndim) {
    KVX_NEED(a.sinks.dtype == KVX_DTYPE_F32 && a.sinks.ndim == 1 && a.sinks.shape[0] == heads &&
                 (heads == 1 || a.sinks.stride[0] == 1),
             "sinks must be an adjacent [heads] = [%lld] f32.", (long long)heads);
    KVX_TRY(check_array("sinks", "array", a.sinks, true));
    out->sinks = static_cast<const float*>(a.sinks.data);
  }
  KVX_TRY(lower_turn(a.cos, a.sin, dim, &out->cos, &out->sin, &out->table_row, &out->num_positions, &out->rope_dim));
  KVX_TRY(lower_step(a.step, tokens, out->window.num_pages, &out->step));
  KVX_TRY(check_apart({{"out", a.out}, {"lse", a.lse}}, {{"step.slots", a.step.slots},
                                                         {"step.cu_seqlens", a.step.cu_seqlens},
                                                         {"step.starts", a.step.starts},
                                                         {"block_table", a.block_table},
                                                         {"positions", a.positions},
                                                         {"selected", a.selected}}));
  out->num_heads = int32_t(heads), out->dim = int32_t(dim), out->scale = a.scale;
  out->workspace = static_cast<char*>(a.workspace), out->workspace_bytes = a.workspace_bytes;
  out->errors = reinterpret_cast<unsigned long long*>(a.errors), out->device = a.device;
  return KVX_STATUS_OK;
}

}  // namespace
}  // namespace kvx

extern "C" {

kvx_status_t kvx_attention_sparse_workspace(const kvx_attention_sparse_args_t* args, uint64_t* bytes) {
  using namespace kvx;
  return entry("attention_sparse()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr && bytes != nullptr, "args or bytes is NULL.");
    SparseParams p;
    bool on_device;
    KVX_TRY(lower(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    *bytes = on_device ? cuda::sparse_workspace(p) : 0;
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_attention_sparse(const kvx_attention_sparse_args_t* args, void* stream) {
  using namespace kvx;
  return entry("attention_sparse()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    SparseParams p;
    bool on_device;
    KVX_TRY(lower(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    if (!on_device) {
      KVX_TRY(check_host_step(p.step));
      return cpu::attention_sparse(p);
    }
    const uint64_t need = cuda::sparse_workspace(p);
    KVX_NEED(p.workspace_bytes >= need && (need == 0 || reinterpret_cast<uintptr_t>(p.workspace) % 256 == 0),
             "workspace has %llu bytes; this call needs %llu, 256-aligned (kvx_attention_sparse_workspace).",
             (unsigned long long)p.workspace_bytes, (unsigned long long)need);
    return cuda::attention_sparse(p, stream);
  });
}

}  // extern "C"
