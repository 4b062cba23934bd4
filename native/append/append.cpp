// qkv_norm_rope and qkv_norm_rope_append: descriptors to params, then run where the memory is.
#include "append/append.h"

#include <string.h>

#include "array.h"
#include "format.h"
#include "lower.h"
#include "run.h"

namespace kvx {
using namespace common;

namespace {

bool is_float(int dtype) { return dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 || dtype == KVX_DTYPE_F32; }

kvx_status_t lower_weight(const char* what, const kvx_array_t& a, int64_t dim, const char** data, int32_t* dtype) {
  *data = nullptr, *dtype = 0;
  if (a.ndim == 0) return KVX_STATUS_OK;
  KVX_NEED(is_float(a.dtype), "%s is %s; weights are f16, bf16 or f32.", what, dtype_name(a.dtype));
  KVX_NEED(a.ndim == 1 && a.shape[0] == dim && (dim == 1 || a.stride[0] == 1),
           "%s has %u dimensions and %lld elements; it must be an adjacent [head_dim] = [%lld].", what, a.ndim,
           (long long)a.shape[0], (long long)dim);
  KVX_TRY(check_array(what, "weight", a, true));
  *data = static_cast<const char*>(a.data), *dtype = a.dtype;
  return KVX_STATUS_OK;
}

kvx_status_t lower_table(const char* what, const kvx_array_t& a, int io, int64_t dim, const char** data, int64_t* row) {
  KVX_NEED(a.dtype == KVX_DTYPE_F32 || a.dtype == io, "%s is %s; it must be f32 or the type of the rows, %s.", what,
           dtype_name(a.dtype), dtype_name(io));
  KVX_NEED(a.ndim == 2 && a.shape[0] > 0 && a.shape[1] > 0,
           "%s has %u dimensions; it must be [max_positions, rotary_dim / 2], neither 0.", what, a.ndim);
  KVX_NEED(a.shape[1] <= dim / 2, "%s has %lld columns, and twice as many elements rotate; a row has %lld.", what,
           (long long)a.shape[1], (long long)dim);
  KVX_NEED(a.shape[1] == 1 || a.stride[1] == 1,
           "%s has stride %lld along its columns; they must be adjacent. Call .contiguous().", what,
           (long long)a.stride[1]);
  KVX_TRY(check_array(what, "table", a, true));
  *data = static_cast<const char*>(a.data), *row = a.shape[0] == 1 ? 0 : a.stride[0] * dtype_bits(a.dtype) / 8;
  return KVX_STATUS_OK;
}

kvx_status_t lower_norm_rope(const kvx_norm_rope_t& n, int io, int64_t tokens, int64_t dim, bool has_k,
                             NormRopeParams* out) {
  KVX_NEED(n.struct_bytes >= sizeof n, "norm_rope.struct_bytes is %u; this version has %llu.", n.struct_bytes,
           (unsigned long long)sizeof n);
  KVX_NEED(n.reserved[0] == 0 && n.reserved[1] == 0, "norm_rope.reserved is not 0.");
  KVX_NEED(n.style >= KVX_ROPE_NONE && n.style <= KVX_ROPE_INTERLEAVED,
           "rope style is %d; 0 (none), 1 (half) and 2 (interleaved) exist.", n.style);
  KVX_NEED(has_k || n.k_weight.ndim == 0, "k_weight is given, but there is no K.");
  KVX_TRY(lower_weight("q_weight", n.q_weight, dim, &out->weight[0], &out->weight_dtype[0]));
  KVX_TRY(lower_weight("k_weight", n.k_weight, dim, &out->weight[1], &out->weight_dtype[1]));
  out->style = n.style;
  out->eps = n.eps;
  out->weight_offset = n.weight_offset;
  out->inverse_dim = float(1.0 / double(dim));
  KVX_NEED(n.eps >= 0 && n.eps < 1e30f, "eps is %g; it must be 0 or more.", double(n.eps));
  if (n.style == KVX_ROPE_NONE) {
    KVX_NEED(n.cos.ndim == 0 && n.sin.ndim == 0 && n.positions.ndim == 0,
             "cos, sin or positions are given, but the rope style is none.");
    return KVX_STATUS_OK;
  }
  KVX_TRY(lower_table("cos", n.cos, io, dim, &out->cos, &out->cos_row));
  KVX_TRY(lower_table("sin", n.sin, io, dim, &out->sin, &out->sin_row));
  KVX_NEED(n.cos.dtype == n.sin.dtype && n.cos.shape[0] == n.sin.shape[0] && n.cos.shape[1] == n.sin.shape[1],
           "cos is [%lld, %lld] %s and sin [%lld, %lld] %s; they must agree.", (long long)n.cos.shape[0],
           (long long)n.cos.shape[1], dtype_name(n.cos.dtype), (long long)n.sin.shape[0], (long long)n.sin.shape[1],
           dtype_name(n.sin.dtype));
  const kvx_array_t& at = n.positions;
  KVX_NEED(at.dtype == KVX_DTYPE_S32 || at.dtype == KVX_DTYPE_S64, "positions is %s; it must be int32 or int64.",
           dtype_name(at.dtype));
  KVX_NEED(at.ndim == 1 && at.shape[0] == tokens,
           "positions has %u dimensions and %lld entries; it must be [num_tokens] = [%lld].", at.ndim,
           (long long)at.shape[0], (long long)tokens);
  KVX_TRY(check_array("positions", "array", at, tokens > 0));
  out->table_dtype = n.cos.dtype;
  out->rotary = int32_t(2 * n.cos.shape[1]);
  out->max_positions = n.cos.shape[0];
  out->positions = at.data;
  out->position_bytes = at.dtype == KVX_DTYPE_S64 ? 8 : 4;
  out->position_stride = at.stride[0] * out->position_bytes;
  return KVX_STATUS_OK;
}

// One kind of rows in, and rows out where `to` is given. `first` is the kind that sets tokens and type.
kvx_status_t lower_kind(const char* what, const char* what_out, const kvx_array_t& from, const kvx_array_t* to,
                        int64_t tokens, int io, int kind, AppendParams* out) {
  KVX_NEED(from.ndim == 3, "%s has %u dimensions; it must be [num_tokens, heads, head_dim].", what, from.ndim);
  KVX_NEED(from.shape[0] == tokens, "%s has %lld tokens; the others have %lld.", what, (long long)from.shape[0],
           (long long)tokens);
  KVX_NEED(from.dtype == io, "%s is %s; the others are %s.", what, dtype_name(from.dtype), dtype_name(io));
  const int64_t heads = from.shape[1], dim = from.shape[2], limit = int64_t(1) << 30;
  KVX_NEED(heads > 0 && dim > 0 && heads < limit && dim < limit,
           "%s has %lld heads of %lld elements; each must be from 1 to 2^30.", what, (long long)heads, (long long)dim);
  KVX_TRY(lower_rows(what, what, from, heads, dim, tokens > 0, &out->rows[kind]));
  out->heads[kind] = heads;
  out->dim[kind] = dim;
  if (to == nullptr) return KVX_STATUS_OK;
  KVX_NEED(to->ndim == 3 && to->shape[0] == tokens,
           "%s has %u dimensions and %lld tokens; it must be shaped like %s, [%lld, %lld, %lld].", what_out, to->ndim,
           (long long)to->shape[0], what, (long long)tokens, (long long)heads, (long long)dim);
  KVX_NEED(to->dtype == io, "%s is %s; it has %s's type, %s.", what_out, dtype_name(to->dtype), what, dtype_name(io));
  KVX_TRY(lower_rows(what_out, what_out, *to, heads, dim, tokens > 0, &out->rows_out[kind]));
  KVX_NEED(!overlaps_itself(*to), "%s strides make two elements share an address.", what_out);
  return KVX_STATUS_OK;
}

kvx_status_t lower_qkv_norm_rope(const kvx_qkv_norm_rope_args_t& a, AppendParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  const int64_t tokens = a.q.shape[0];
  const int io = a.q.dtype;
  KVX_TRY(lower_kind("q", "q_out", a.q, &a.q_out, tokens, io, ROW_Q, out));
  if (a.k.ndim) KVX_TRY(lower_kind("k", "k_out", a.k, &a.k_out, tokens, io, ROW_K, out));
  if (a.v.ndim) KVX_TRY(lower_kind("v", "v_out", a.v, &a.v_out, tokens, io, ROW_V, out));
  KVX_NEED(a.k.ndim == 0 || out->dim[ROW_K] == out->dim[ROW_Q], "k has head_dim %lld and q %lld; they must agree.",
           (long long)out->dim[ROW_K], (long long)out->dim[ROW_Q]);
  KVX_TRY(lower_norm_rope(a.norm_rope, io, tokens, out->dim[ROW_Q], a.k.ndim != 0, &out->norm_rope));
  KVX_TRY(check_apart({{"q_out", a.q_out}, {"k_out", a.k_out}, {"v_out", a.v_out}},
                      {{"positions", a.norm_rope.positions}}));
  out->num_tokens = tokens;
  out->device = a.device;
  out->errors = reinterpret_cast<unsigned long long*>(a.errors);
  return KVX_STATUS_OK;
}

// Blocks with addresses of their own.
kvx_status_t with_pointers(const kvx_append_args_t& a, kvx_cache_t* c, AppendParams* out) {
  const kvx_array_t* pointers[2] = {&a.k_pointers, &a.v_pointers};
  kvx_plane_t* planes[2] = {&c->k, &c->v};
  static const char* const names[2] = {"k_pointers", "v_pointers"};
  for (int i = 0; i < 2; i++) {
    const kvx_array_t& p = *pointers[i];
    KVX_NEED(p.ndim == 1 && p.dtype == KVX_DTYPE_S64,
             "%s has %u dimensions of %s; k_pointers and v_pointers are [num_blocks] int64, both or neither.", names[i],
             p.ndim, dtype_name(p.dtype));
    KVX_NEED(p.shape[0] == c->num_blocks && (c->num_blocks == 1 || p.stride[0] == 1),
             "%s has %lld addresses; it must be an adjacent [num_blocks] = [%lld].", names[i], (long long)p.shape[0],
             (long long)c->num_blocks);
    KVX_TRY(check_array(names[i], "table", p, true));
    KVX_TRY(lower_pointers(names[i], i, planes[i]));
    out->bases[i] = static_cast<const int64_t*>(p.data);
  }
  return KVX_STATUS_OK;
}

kvx_status_t lower_append(const kvx_cache_t& cache, const kvx_append_args_t& a, AppendParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  const bool has_pointers = a.k_pointers.ndim || a.v_pointers.ndim;
  kvx_cache_t c = cache;
  if (has_pointers) {
    KVX_TRY(check_header("cache", c.version, c.struct_bytes, sizeof c));
    KVX_TRY(with_pointers(a, &c, out));
  }
  kvx_write_args_t w{};
  w.version = a.version, w.struct_bytes = sizeof w;
  w.k = a.k, w.v = a.v, w.slots = a.slots, w.invalid_slot = a.invalid_slot;
  w.k_token_scale = a.k_token_scale, w.v_token_scale = a.v_token_scale, w.errors = a.errors;
  KVX_TRY(lower_write(c, w, &out->kv));
  for (PlaneParams& plane : out->kv.plane)
    if (has_pointers) plane.data = nullptr, plane.block = 0;
  const int64_t tokens = out->kv.num_tokens;
  KVX_TRY(lower_kind("k", "", a.k, nullptr, tokens, a.k.dtype, ROW_K, out));
  KVX_TRY(lower_kind("v", "", a.v, nullptr, tokens, a.k.dtype, ROW_V, out));
  if (a.q.ndim) {
    KVX_TRY(lower_kind("q", "q_out", a.q, &a.q_out, tokens, a.k.dtype, ROW_Q, out));
    KVX_NEED(out->dim[ROW_Q] == out->dim[ROW_K], "q has head_dim %lld and k %lld; they must agree.",
             (long long)out->dim[ROW_Q], (long long)out->dim[ROW_K]);
  }
  KVX_NEED(a.q.ndim || a.norm_rope.q_weight.ndim == 0, "q_weight is given, but there is no Q.");
  KVX_TRY(lower_norm_rope(a.norm_rope, a.k.dtype, tokens, out->dim[ROW_K], true, &out->norm_rope));
  const std::initializer_list<Indices> indices = {{"positions", a.norm_rope.positions},
                                                  {"slot_mapping", a.slots},
                                                  {"k_pointers", a.k_pointers},
                                                  {"v_pointers", a.v_pointers}};
  KVX_TRY(check_apart_from_cache(cache, indices));
  if (a.q.ndim) KVX_TRY(check_apart({{"q_out", a.q_out}}, indices));
  out->has_cache = true;
  out->num_tokens = tokens;
  out->device = cache.device;
  out->errors = out->kv.errors;
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t run_norm_rope(const kvx_qkv_norm_rope_args_t& args, void* stream) {
  AppendParams p;
  bool on_device;
  KVX_TRY(lower_qkv_norm_rope(args, &p));
  KVX_TRY(check_memory(args.memory, &on_device));
  return on_device ? cuda::append(p, stream) : cpu::append(p);
}

kvx_status_t run_append(const kvx_cache_t& cache, const kvx_append_args_t& args, void* stream) {
  AppendParams p;
  bool on_device;
  KVX_TRY(lower_append(cache, args, &p));
  KVX_TRY(check_memory(cache.memory, &on_device));
  return on_device ? cuda::append(p, stream) : cpu::append(p);
}

}  // namespace kvx

using namespace kvx;

extern "C" {

kvx_status_t kvx_qkv_norm_rope(const kvx_qkv_norm_rope_args_t* args, void* stream) {
  return entry("qkv_norm_rope()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    return run_norm_rope(*args, stream);
  });
}

kvx_status_t kvx_qkv_norm_rope_append(const kvx_cache_t* cache, const kvx_append_args_t* args, void* stream) {
  return entry("qkv_norm_rope_append()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    return run_append(*cache, *args, stream);
  });
}

}  // extern "C"
