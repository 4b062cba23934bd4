// Python's way in (kvx/ops/native.py): tensors arrive as objects, are read as DLTensors through the framework's own
// exchange function (framework.h), and leave as v1.2 descriptors. The functions that open them and that release the
// interpreter lock are handed over once, by kvx_door_init. Not part of the public ABI.
#include <string.h>

#include <memory>
#include <vector>

#include "append/append.h"
#include "attention/attention.h"
#include "attention/merge.h"
#include "check.h"
#include "format.h"
#include "framework.h"
#include "move/convert.h"
#include "move/copy_blocks.h"
#include "run.h"

using namespace kvx;

extern "C" {

// How one plane's axes lie in a cache tensor: stride of axis i = tensor
// stride[dim[i]] * mul[i]. Made by kvx/ops/native.py.
typedef struct kvx_door_plane_t {
  int32_t tensor;    // 0 or 1: which cache tensor
  int32_t ndim;      // of that tensor
  int32_t num_axes;  // 4: block token head dim; 5: block head dim/x token dim%x
  int32_t raw;       // 1: the tensor is one of bytes (4-bit types, inline scales, and what stands beside them)
  int64_t shape[8];  // of the tensor
  int64_t axis_size[5];
  int32_t dim[5];
  int32_t offset_dim;  // -1: the plane starts where the tensor does
  int64_t mul[5];
  int64_t offset_mul;
} kvx_door_plane_t;

typedef struct kvx_door_spec_t {
  kvx_cache_t cache;  // everything but addresses
  kvx_door_plane_t plane[2];
  int64_t reserved[2];
} kvx_door_spec_t;

typedef struct kvx_door_extra_t {  // objects; NULL = absent
  void* k_scale;
  void* v_scale;
  void* k_tensor_scale;
  void* v_tensor_scale;
  void* k_token_scale;
  void* v_token_scale;
  void* errors;
} kvx_door_extra_t;

typedef struct kvx_door_table_t {
  void *indices, *indptr, *last_page_len, *seq_lens, *cu_seqlens;
  void *pool_primary, *pool_secondary;
  void *k_pointers, *v_pointers;  // attention: a buffer a block instead of the cache tensors
  int64_t format, beam_width, max_seq_len, bytes_per_block;
} kvx_door_table_t;

typedef struct kvx_door_attention_t {
  void *q, *out, *lse, *sinks, *workspace;  // objects; planning and asking for bytes take no out
  int64_t step;                             // 0 run, 1 plan, 2 ask for the bytes of the workspace
  int64_t flags, window, max_query_len;
  int64_t bytes;  // step 2: the answer
  float softmax_scale, soft_cap;
} kvx_door_attention_t;

typedef struct kvx_door_append_t {  // objects; NULL = absent
  void *q, *k, *v;                  // num_q_heads > 0: q holds all three, [T, ...]
  void *q_out, *k_out, *v_out;
  void *q_weight, *k_weight, *cos, *sin, *positions;
  void *slots, *k_pointers, *v_pointers;
  int64_t style, num_q_heads, num_kv_heads, k_head_dim, v_head_dim;
  double eps, weight_offset;
} kvx_door_append_t;

KVX_API void kvx_door_init(void* open, void* save, void* restore, void* clear, void* size, void* item) {
  open_tensor = open ? reinterpret_cast<OpenTensor>(open) : copy_tensor;
  save_thread = reinterpret_cast<void* (*)()>(save);
  restore_thread = reinterpret_cast<void (*)(void*)>(restore);
  clear_error = reinterpret_cast<void (*)()>(clear);
  tuple_size = reinterpret_cast<int64_t (*)(void*)>(size);
  tuple_item = reinterpret_cast<void* (*)(void*, int64_t)>(item);
}

}  // extern "C"

namespace kvx {
namespace {

// Checking some hundred tensors in Python takes longer than moving a block of them. So the buffers of a conversion are
// noted when they have been checked and bound, and the next call asks whether the same objects come and are what they
// were. The objects are not held.
class Sides {
 public:
  std::unique_ptr<Bound> bound;

  // False: a tensor is of a kind that cannot be noted, and Python must ask.
  bool note(void* tensors) {
    noted_.resize(size_t(tuple_size(tensors)));
    for (size_t i = 0; i < noted_.size(); i++) {
      Noted& n = noted_[i];
      n.object = tuple_item(tensors, int64_t(i));
      Tensor t;
      if (!read(n.object, &t.dl) || t.dl.ndim > kMaxDims || !t.dl.strides) return false;
      n.tensor = t.dl;
      n.tensor.shape = n.tensor.strides = nullptr;  // they are the tensor's own
      memcpy(n.shape, t.dl.shape, size_t(t.dl.ndim) * sizeof(int64_t));
      memcpy(n.stride, t.dl.strides, size_t(t.dl.ndim) * sizeof(int64_t));
    }
    return true;
  }

  bool are(void* tensors) const {
    if (size_t(tuple_size(tensors)) != noted_.size()) return false;
    for (size_t i = 0; i < noted_.size(); i++)  // all of them first: opening one takes as long as fifty such looks
      if (tuple_item(tensors, int64_t(i)) != noted_[i].object) return false;
    for (const Noted& n : noted_) {
      DLTensor now;
      if (!read(n.object, &now) || !is_same(now, n)) return false;
    }
    return true;
  }

 private:
  struct Noted {
    void* object;
    DLTensor tensor;
    int64_t shape[kMaxDims], stride[kMaxDims];
  };

  static bool read(void* object, DLTensor* out) {
    if (open_tensor(object, out) == 0) return true;
    clear_error();
    return false;
  }

  static bool is_same(const DLTensor& now, const Noted& n) {
    const DLTensor& then = n.tensor;
    const size_t bytes = size_t(then.ndim) * sizeof(int64_t);
    return now.data == then.data && now.byte_offset == then.byte_offset && now.device_type == then.device_type &&
           now.device_id == then.device_id && now.ndim == then.ndim && now.type_code == then.type_code &&
           now.type_bits == then.type_bits && now.type_lanes == then.type_lanes && now.strides &&
           memcmp(now.shape, n.shape, bytes) == 0 && memcmp(now.strides, n.stride, bytes) == 0;
  }

  std::vector<Noted> noted_;
};

constexpr kvx_status_t kOtherTensors = kvx_status_t(-2);  // not those that were noted: check and bind them

// Block ids: a tensor, or `count` numbers of 64 bits in host memory where that is not negative.
kvx_status_t open_blocks(Door& door, const char* name, void* ids, int64_t count, kvx_array_t* a) {
  if (count < 0) return door.array(name, ids, a);
  a->data = ids, a->data_bytes = uint64_t(count) * 8;
  a->ndim = 1, a->dtype = KVX_DTYPE_S64, a->shape[0] = count, a->stride[0] = 1;
  return KVX_STATUS_OK;
}

kvx_status_t open_cache(Door& door, const kvx_door_spec_t& spec, void* cache0, void* cache1, kvx_cache_t* c) {
  Tensor t[2];
  KVX_TRY(door.open("cache", cache0, &t[0]));
  if (cache1) KVX_TRY(door.open("v_cache", cache1, &t[1]));
  *c = spec.cache;
  for (int i = 0; i < 2; i++) {
    const kvx_door_plane_t& d = spec.plane[i];
    KVX_NEED((cache1 != nullptr) == (spec.plane[1].tensor == 1), "cache is %s; the spec's layout has %s.",
             cache1 ? "a pair" : "one tensor",
             cache1 ? "one tensor that holds K and V" : "K and V apart: pass (k_cache, v_cache)");
    const Tensor& x = t[d.tensor];
    kvx_array_t& a = i ? c->v.data : c->k.data;
    const char* name = d.tensor ? "v_cache" : (cache1 ? "k_cache" : "cache");
    char got[160], want[160];
    bool same = x.dl.ndim == d.ndim;
    for (int j = 0; same && j < d.ndim; j++) same = x.dl.shape[j] == d.shape[j];
    KVX_NEED(same, "%s is %s; the spec makes it %s.", name, shape_text(x.dl.shape, x.dl.ndim, got),
             shape_text(d.shape, d.ndim, want));
    const int dtype = dtype_of(x.dl), bits = common::dtype_bits(a.dtype);
    const bool bytes_of_words = d.raw && bits > 8;  // whole elements in a tensor of bytes
    KVX_NEED(bytes_of_words ? x.dl.type_bits == 8 : dtype == a.dtype || (bits <= 8 && dtype == KVX_DTYPE_U8),
             "%s is %s; the spec's format makes it %s%s.", name, dtype_name(dtype),
             bytes_of_words ? "uint8" : dtype_name(a.dtype), bits <= 8 ? " (or uint8)" : "");
    const int64_t unit = bits == 4 ? 2 : 1,
                  size = bytes_of_words ? bits / 8 : 1;  // elements in a unit of the tensor, units in an element
    a.ndim = uint32_t(d.num_axes);
    const int lo = d.num_axes - 1;
    for (int j = 0; j < d.num_axes; j++) {
      const int64_t stride = x.stride(d.dim[j]) * d.mul[j];
      a.shape[j] = d.axis_size[j];
      KVX_NEED(j == lo || a.shape[j] == 1 || stride % size == 0,
               "%s has a stride of %lld bytes, which cuts a %s in two.", name, (long long)stride, dtype_name(a.dtype));
      a.stride[j] = stride * unit / size;
    }
    if (unit == 2 || size > 1) {
      KVX_NEED(x.stride(d.dim[lo]) * d.mul[lo] == 1, "%s is kept in bytes and needs stride 1 along dim.", name);
      a.stride[lo] = 1;
    }
    const int64_t offset =
        d.offset_dim < 0 ? 0 : x.stride(d.offset_dim) * d.offset_mul * x.dl.type_bits * x.dl.type_lanes / 8;
    a.data = x.data() + offset;
    const uint64_t bytes = x.bytes();
    a.data_bytes = bytes > uint64_t(offset) ? bytes - uint64_t(offset) : 1;
  }
  return KVX_STATUS_OK;
}

// The tensors the spec describes, or the pools a KV_OFFSETS table leads into.
kvx_status_t open_cache_or_pools(Door& door, const kvx_door_spec_t& spec, void* cache0, void* cache1,
                                 const kvx_door_table_t& table, kvx_cache_t* c) {
  if (!table.pool_primary) return open_cache(door, spec, cache0, cache1, c);
  *c = spec.cache;
  kvx_array_t pool[2] = {};
  KVX_TRY(door.array("primary pool", table.pool_primary, &pool[0]));
  KVX_TRY(door.optional("secondary pool", table.pool_secondary, &pool[1]));
  c->bytes_per_block = uint64_t(table.bytes_per_block);
  c->pool_primary = pool[0].data;
  c->primary_bytes = pool[0].data_bytes;
  c->pool_secondary = pool[1].data;
  c->secondary_bytes = pool[1].data_bytes;
  c->secondary_blocks = c->bytes_per_block ? int64_t(pool[1].data_bytes / c->bytes_per_block) : 0;
  return KVX_STATUS_OK;
}

// Addresses of blocks that are buffers of their own.
kvx_status_t open_pointers(Door& door, const char* name, void* object, int64_t num_blocks, const int64_t** pointers) {
  kvx_array_t a{};
  KVX_TRY(door.array(name, object, &a));
  KVX_NEED(a.dtype == KVX_DTYPE_S64 && a.ndim == 1 && a.shape[0] == num_blocks && (num_blocks == 1 || a.stride[0] == 1),
           "%s is [%lld] %s with %u dimensions; it must be an adjacent [num_blocks] = [%lld] int64.", name,
           (long long)(a.ndim ? a.shape[0] : 0), dtype_name(a.dtype), a.ndim, (long long)num_blocks);
  *pointers = static_cast<const int64_t*>(a.data);
  return KVX_STATUS_OK;
}

kvx_status_t open_table(Door& door, const kvx_door_table_t& table, kvx_table_t* t) {
  t->struct_bytes = sizeof *t;
  t->format = int32_t(table.format);
  t->beam_width = table.beam_width;
  KVX_TRY(door.array("block_table", table.indices, &t->indices));
  KVX_TRY(door.optional("indptr", table.indptr, &t->indptr));
  KVX_TRY(door.optional("last_page_len", table.last_page_len, &t->last_page_len));
  return door.optional("seq_lens", table.seq_lens, &t->seq_lens);
}

kvx_status_t open_scales(Door& door, const kvx_door_extra_t* e, kvx_cache_t* c) {
  if (e == nullptr) return KVX_STATUS_OK;
  void* const scale[2] = {e->k_scale, e->v_scale};
  void* const tensor[2] = {e->k_tensor_scale, e->v_tensor_scale};
  for (int i = 0; i < 2; i++) {
    kvx_plane_t& plane = i ? c->v : c->k;
    const int want = plane.scale.dtype;
    KVX_TRY(door.optional(i ? "v_scale" : "k_scale", scale[i], &plane.scale));
    const int got = plane.scale.dtype;
    KVX_NEED(scale[i] == nullptr || got == want || (common::dtype_bits(want) == 8 && got == KVX_DTYPE_U8),
             "%s is %s; the spec's format makes it %s.", i ? "v_scale" : "k_scale", dtype_name(got), dtype_name(want));
    plane.scale.dtype = want;
    if (tensor[i]) {
      kvx_array_t a{};
      KVX_TRY(door.array(i ? "v_tensor_scale" : "k_tensor_scale", tensor[i], &a));
      KVX_NEED(a.dtype == KVX_DTYPE_F32 && a.data && (a.ndim == 0 || (a.ndim == 1 && a.shape[0] == 1)),
               "%s must be one f32.", i ? "v_tensor_scale" : "k_tensor_scale");
      plane.tensor_scale = static_cast<const float*>(a.data);
    }
  }
  return KVX_STATUS_OK;
}

kvx_status_t open_errors(Door& door, void* object, uint64_t** errors) {
  if (object == nullptr) return KVX_STATUS_OK;
  kvx_array_t a{};
  KVX_TRY(door.array("errors", object, &a));
  KVX_NEED(a.dtype == KVX_DTYPE_S64 && a.data && (a.ndim == 0 || (a.ndim == 1 && a.shape[0] == 1)),
           "errors must be one int64.");
  *errors = static_cast<uint64_t*>(a.data);
  return KVX_STATUS_OK;
}

// Heads of a fused [T, ...] as [T, heads, dim]; `*at` is the column they start at, and moves past them.
void cut_heads(const kvx_array_t& fused, int64_t heads, int64_t dim, int64_t* at, kvx_array_t* out) {
  const int64_t size = common::dtype_bits(fused.dtype) / 8, offset = *at * fused.stride[1] * size;
  *out = fused;
  out->ndim = 3;
  out->shape[1] = heads, out->stride[1] = dim * fused.stride[1];
  out->shape[2] = dim, out->stride[2] = fused.stride[1];
  if (fused.data)
    out->data = static_cast<char*>(fused.data) + offset, out->data_bytes = fused.data_bytes - uint64_t(offset);
  *at += heads * dim;
}

kvx_status_t open_rows(Door& door, const kvx_door_append_t& d, kvx_array_t* q, kvx_array_t* k, kvx_array_t* v) {
  if (d.num_q_heads == 0) {
    KVX_TRY(door.optional("q", d.q, q));
    KVX_TRY(door.optional("k", d.k, k));
    return door.optional("v", d.v, v);
  }
  kvx_array_t fused{};
  KVX_TRY(door.array("qkv", d.q, &fused));
  const int64_t width = (d.num_q_heads + d.num_kv_heads) * d.k_head_dim + d.num_kv_heads * d.v_head_dim;
  KVX_NEED(
      fused.ndim == 2 && fused.shape[1] == width,
      "qkv has %u dimensions and %lld columns; %lld + %lld heads of %lld and %lld of %lld make it [num_tokens, %lld].",
      fused.ndim, (long long)(fused.ndim > 1 ? fused.shape[1] : 0), (long long)d.num_q_heads, (long long)d.num_kv_heads,
      (long long)d.k_head_dim, (long long)d.num_kv_heads, (long long)d.v_head_dim, (long long)width);
  int64_t at = 0;
  cut_heads(fused, d.num_q_heads, d.k_head_dim, &at, q);
  cut_heads(fused, d.num_kv_heads, d.k_head_dim, &at, k);
  cut_heads(fused, d.num_kv_heads, d.v_head_dim, &at, v);
  return KVX_STATUS_OK;
}

kvx_status_t open_norm_rope(Door& door, const kvx_door_append_t& d, kvx_norm_rope_t* n) {
  n->struct_bytes = sizeof *n;
  n->style = int32_t(d.style);
  n->eps = float(d.eps);
  n->weight_offset = float(d.weight_offset);
  KVX_TRY(door.optional("q_weight", d.q_weight, &n->q_weight));
  KVX_TRY(door.optional("k_weight", d.k_weight, &n->k_weight));
  KVX_TRY(door.optional("cos", d.cos, &n->cos));
  KVX_TRY(door.optional("sin", d.sin, &n->sin));
  return door.optional("positions", d.positions, &n->positions);
}

}  // namespace
}  // namespace kvx

extern "C" {

KVX_API int kvx_door_write(const kvx_door_spec_t* spec, void* cache0, void* cache1, void* k, void* v, void* slots,
                           const kvx_door_extra_t* extra, void* stream) {
  return entry("write()", [&]() -> kvx_status_t {
    Door door;
    kvx_cache_t c;
    kvx_write_args_t w{};
    w.version = KVX_ABI_VERSION;
    w.struct_bytes = sizeof w;
    w.invalid_slot = -1;
    KVX_TRY(open_cache(door, *spec, cache0, cache1, &c));
    KVX_TRY(door.array("k", k, &w.k));
    KVX_TRY(door.array("v", v, &w.v));
    KVX_TRY(door.array("slot_mapping", slots, &w.slots));
    if (extra) {
      KVX_TRY(open_scales(door, extra, &c));
      KVX_TRY(door.optional("k_token_scale", extra->k_token_scale, &w.k_token_scale));
      KVX_TRY(door.optional("v_token_scale", extra->v_token_scale, &w.v_token_scale));
      KVX_TRY(open_errors(door, extra->errors, &w.errors));
    }
    c.memory = door.memory();
    c.device = door.device_id;
    return unlocked(int64_t(w.k.data_bytes + w.v.data_bytes), [&] { return run_write(c, w, stream); });
  });
}

KVX_API int kvx_door_gather(const kvx_door_spec_t* spec, void* cache0, void* cache1, void* k, void* v,
                            const kvx_door_table_t* table, const kvx_door_extra_t* extra, void* stream) {
  return entry("gather()", [&]() -> kvx_status_t {
    Door door;
    kvx_cache_t c;
    kvx_gather_args_t g{};
    g.version = KVX_ABI_VERSION;
    g.struct_bytes = sizeof g;
    KVX_TRY(open_cache_or_pools(door, *spec, cache0, cache1, *table, &c));
    KVX_TRY(door.array("k", k, &g.k));
    KVX_TRY(door.array("v", v, &g.v));
    KVX_TRY(open_table(door, *table, &g.table));
    KVX_TRY(door.optional("cu_seqlens", table->cu_seqlens, &g.cu_seqlens));
    g.max_seq_len = table->max_seq_len;
    if (extra) {
      KVX_TRY(open_scales(door, extra, &c));
      KVX_TRY(open_errors(door, extra->errors, &g.errors));
    }
    c.memory = door.memory();
    c.device = door.device_id;
    return unlocked(int64_t(g.k.data_bytes + g.v.data_bytes), [&] { return run_gather(c, g, stream); });
  });
}

KVX_API int kvx_door_attention(const kvx_door_spec_t* spec, void* cache0, void* cache1, const kvx_door_table_t* table,
                               const kvx_door_extra_t* extra, kvx_door_attention_t* attention, void* stream) {
  const bool is_latent = attention->flags & KVX_ATTENTION_LATENT;
  const char* call = is_latent           ? "attention_mla()"
                     : table->k_pointers ? "attention_decode_batched()"
                     : table->cu_seqlens ? "attention_varlen()"
                                         : "attention_decode()";
  return entry(call, [&]() -> kvx_status_t {
    Door door;
    kvx_cache_t c;
    kvx_attention_args_t a{};
    a.version = KVX_ABI_VERSION;
    a.struct_bytes = sizeof a;
    a.flags = uint64_t(attention->flags);
    if (table->k_pointers) {
      c = spec->cache;
      KVX_TRY(open_pointers(door, "k_pointers", table->k_pointers, c.num_blocks, &a.k_pointers));
      KVX_TRY(open_pointers(door, "v_pointers", table->v_pointers, c.num_blocks, &a.v_pointers));
    } else {
      KVX_TRY(open_cache_or_pools(door, *spec, cache0, cache1, *table, &c));
    }
    KVX_TRY(door.array("q", attention->q, &a.q));
    KVX_TRY(open_table(door, *table, &a.table));
    KVX_TRY(door.optional("cu_seqlens", table->cu_seqlens, &a.cu_seqlens));
    KVX_TRY(door.optional("lse", attention->lse, &a.lse));
    KVX_TRY(door.optional("sinks", attention->sinks, &a.sinks));
    if (attention->out) {
      KVX_TRY(door.array("out", attention->out, &a.out));
    } else if (a.q.ndim == 3) {  // only its shape is read
      const int64_t dim = is_latent ? c.k_head_dim : c.v_head_dim;
      a.out = a.q;
      a.out.shape[2] = dim, a.out.data_bytes = 0;
      a.out.stride[2] = 1, a.out.stride[1] = dim, a.out.stride[0] = dim * a.q.shape[1];
    }
    if (attention->workspace) {
      kvx_array_t w{};
      KVX_TRY(door.array("workspace", attention->workspace, &w));
      a.workspace = w.data, a.workspace_bytes = w.data_bytes;
    }
    a.softmax_scale = attention->softmax_scale, a.soft_cap = attention->soft_cap, a.window = attention->window;
    a.max_query_len = attention->max_query_len, a.max_seq_len = table->max_seq_len;
    KVX_TRY(open_scales(door, extra, &c));
    KVX_TRY(open_errors(door, extra->errors, &a.errors));
    c.memory = door.memory();
    c.device = door.device_id;
    if (attention->step == 1) return run_attention_plan(c, a, stream);
    if (attention->step == 2) return attention_workspace(c, a, reinterpret_cast<uint64_t*>(&attention->bytes));
    return unlocked(int64_t(a.q.data_bytes) * 64, [&] { return run_attention(c, a, stream); });
  });
}

// `tensors` is a tuple of all buffers, source first, or NULL where Python finds out by itself whether they are the
// same. *is_noted: whether kvx_door_convert can.
KVX_API int kvx_door_sides(const kvx_plan_t* plan, const kvx_convert_args_t* args, void* tensors, void** sides,
                           int* is_noted) {
  return entry("convert()", [&]() -> kvx_status_t {
    kvx_bound_t* bound = nullptr;
    KVX_TRY(kvx_bind_buffers(plan, args, &bound));
    auto made = std::make_unique<Sides>();
    made->bound.reset(reinterpret_cast<Bound*>(bound));
    *is_noted = tensors != nullptr && made->note(tensors);
    *sides = made.release();
    return KVX_STATUS_OK;
  });
}

KVX_API void kvx_door_sides_free(void* sides) { delete static_cast<Sides*>(sides); }

KVX_API int kvx_door_convert(const void* sides, void* tensors, void* src_blocks, int64_t num_src, void* dst_blocks,
                             int64_t num_dst, void* seq_lens, void* errors, void* stream) {
  const Sides& known = *static_cast<const Sides*>(sides);
  if (tensors && !known.are(tensors)) return kOtherTensors;
  return entry("convert()", [&]() -> kvx_status_t {
    const Bound& bound = *known.bound;
    Door door;
    if (num_src >= 0 || num_dst >= 0) door.device_type = 1;
    kvx_convert_args_t a{};
    a.version = KVX_ABI_VERSION, a.struct_bytes = sizeof a;
    KVX_TRY(open_blocks(door, "src_blocks", src_blocks, num_src, &a.src_blocks));
    KVX_TRY(open_blocks(door, "dst_blocks", dst_blocks, num_dst, &a.dst_blocks));
    KVX_TRY(door.optional("seq_lens", seq_lens, &a.seq_lens));
    a.table_memory = kvx_memory_type_t(door.memory());
    a.errors = errors;
    KVX_NEED(a.table_memory == KVX_MEMORY_HOST || door.device_id == bound.device,
             "block ids are on device %d, the caches on device %d. Keep them on one, or on the host.", door.device_id,
             bound.device);
    // A device's work is only enqueued. The host's is so many units of the blocks at hand.
    const kvx_array_t& ids = a.src_blocks;
    int64_t bytes = 0;
    for (uint32_t i = 0; i < ids.ndim && !bound.on_device; i++) bytes = mul_most(bytes ? bytes : 1, ids.shape[i]);
    bytes = mul_most(mul_most(bytes, bound.sizes.block_size[SRC] / bound.sizes.unit_tokens), bound.unit_bytes);
    return unlocked(bytes, [&] { return run_blocks(bound, a, stream); });
  });
}

KVX_API int kvx_door_amax(void* amax, void* x, void* slots, int granularity, int64_t block_size, void* errors,
                          void* stream) {
  return entry("amax()", [&]() -> kvx_status_t {
    Door door;
    kvx_amax_args_t a{};
    a.version = KVX_ABI_VERSION;
    a.struct_bytes = sizeof a;
    a.granularity = granularity;
    a.block_size = block_size;
    a.invalid_slot = -1;
    KVX_TRY(door.array("x", x, &a.x));
    KVX_TRY(door.array("amax", amax, &a.amax));
    KVX_TRY(door.optional("slot_mapping", slots, &a.slots));
    KVX_TRY(open_errors(door, errors, &a.errors));
    a.memory = door.memory();
    a.device = door.device_id;
    return unlocked(int64_t(a.x.data_bytes), [&] { return kvx_amax(&a, stream); });
  });
}

KVX_API int kvx_door_norm_rope(const char* call, const kvx_door_append_t* d, void* errors, void* stream) {
  return entry(call, [&]() -> kvx_status_t {
    Door door;
    kvx_qkv_norm_rope_args_t a{};
    a.version = KVX_ABI_VERSION;
    a.struct_bytes = sizeof a;
    KVX_TRY(open_rows(door, *d, &a.q, &a.k, &a.v));
    KVX_TRY(door.array("q_out", d->q_out, &a.q_out));
    KVX_TRY(door.optional("k_out", d->k_out, &a.k_out));
    KVX_TRY(door.optional("v_out", d->v_out, &a.v_out));
    KVX_TRY(open_norm_rope(door, *d, &a.norm_rope));
    KVX_TRY(open_errors(door, errors, &a.errors));
    a.memory = door.memory();
    a.device = door.device_id;
    return unlocked(int64_t(a.q.data_bytes), [&] { return run_norm_rope(a, stream); });
  });
}

KVX_API int kvx_door_append(const char* call, const kvx_door_spec_t* spec, void* cache0, void* cache1,
                            const kvx_door_append_t* d, const kvx_door_extra_t* extra, void* stream) {
  return entry(call, [&]() -> kvx_status_t {
    Door door;
    kvx_cache_t c;
    kvx_append_args_t a{};
    a.version = KVX_ABI_VERSION;
    a.struct_bytes = sizeof a;
    a.invalid_slot = -1;
    if (d->k_pointers) {
      c = spec->cache;
      KVX_TRY(door.array("k_pointers", d->k_pointers, &a.k_pointers));
      KVX_TRY(door.optional("v_pointers", d->v_pointers, &a.v_pointers));
    } else {
      KVX_TRY(open_cache(door, *spec, cache0, cache1, &c));
    }
    KVX_TRY(open_rows(door, *d, &a.q, &a.k, &a.v));
    KVX_TRY(door.optional("q_out", d->q_out, &a.q_out));
    KVX_TRY(door.array("slot_mapping", d->slots, &a.slots));
    KVX_TRY(open_norm_rope(door, *d, &a.norm_rope));
    if (extra) {
      KVX_TRY(open_scales(door, extra, &c));
      KVX_TRY(door.optional("k_token_scale", extra->k_token_scale, &a.k_token_scale));
      KVX_TRY(door.optional("v_token_scale", extra->v_token_scale, &a.v_token_scale));
      KVX_TRY(open_errors(door, extra->errors, &a.errors));
    }
    c.memory = door.memory();
    c.device = door.device_id;
    return unlocked(int64_t(a.k.data_bytes), [&] { return run_append(c, a, stream); });
  });
}

KVX_API int kvx_door_merge(void* out, void* lse, void* outs, void* lses, void* sinks, void* stream) {
  return entry("merge_attention()", [&]() -> kvx_status_t {
    Door door;
    kvx_merge_args_t a{};
    a.version = KVX_ABI_VERSION;
    a.struct_bytes = sizeof a;
    KVX_TRY(door.array("outs", outs, &a.outs));
    KVX_TRY(door.array("lses", lses, &a.lses));
    KVX_TRY(door.array("out", out, &a.out));
    KVX_TRY(door.optional("lse", lse, &a.lse));
    KVX_TRY(door.optional("sinks", sinks, &a.sinks));
    a.memory = door.memory();
    a.device = door.device_id;
    return unlocked(int64_t(a.outs.data_bytes), [&] { return run_merge(a, stream); });
  });
}

KVX_API int kvx_door_copy_blocks(const kvx_door_spec_t* spec, void* cache0, void* cache1, void* pairs,
                                 const kvx_door_extra_t* extra, void* stream) {
  return entry("copy_blocks()", [&]() -> kvx_status_t {
    Door door;
    kvx_cache_t c;
    kvx_copy_blocks_args_t a{};
    a.version = KVX_ABI_VERSION;
    a.struct_bytes = sizeof a;
    KVX_TRY(open_cache(door, *spec, cache0, cache1, &c));
    KVX_TRY(door.array("pairs", pairs, &a.pairs));
    KVX_TRY(open_scales(door, extra, &c));
    KVX_TRY(open_errors(door, extra->errors, &a.errors));
    c.memory = door.memory();
    c.device = door.device_id;
    return unlocked(int64_t(c.k.data.data_bytes), [&] { return run_copy_blocks(c, a, stream); });
  });
}

// The usual calls without a struct to fill: a fused QKV, no scales, nothing to count.
KVX_API int kvx_door_append_usual(const char* call, const kvx_door_spec_t* spec, void* cache0, void* cache1,
                                  void* q_out, void* qkv, int64_t num_q_heads, void* slots, void* q_weight,
                                  void* k_weight, void* cos, void* sin, void* positions, int64_t style, double eps,
                                  double weight_offset, void* stream) {
  kvx_door_append_t d{};
  d.q = qkv, d.q_out = q_out, d.slots = slots;
  d.q_weight = q_weight, d.k_weight = k_weight, d.cos = cos, d.sin = sin, d.positions = positions;
  d.num_q_heads = num_q_heads, d.num_kv_heads = spec->cache.num_kv_heads, d.k_head_dim = spec->cache.k_head_dim,
  d.v_head_dim = spec->cache.v_head_dim;
  d.style = style, d.eps = eps, d.weight_offset = weight_offset;
  return kvx_door_append(call, spec, cache0, cache1, &d, nullptr, stream);
}

KVX_API int kvx_door_norm_rope_usual(const char* call, void* out, void* x, void* weight, void* cos, void* sin,
                                     void* positions, int64_t style, double eps, double weight_offset, void* stream) {
  kvx_door_append_t d{};
  d.q = x, d.q_out = out, d.q_weight = weight, d.cos = cos, d.sin = sin, d.positions = positions;
  d.style = style, d.eps = eps, d.weight_offset = weight_offset;
  return kvx_door_norm_rope(call, &d, nullptr, stream);
}

KVX_API int64_t kvx_door_append_bytes(void) { return int64_t(sizeof(kvx_door_append_t)); }

// Sizes of the door's structs, so that kvx/ops/native.py can refuse a library of another build.
// It says how many it knows: a library that knows others leaves the rest 0.
KVX_API void kvx_door_sizes(int64_t* out, int64_t count) {
  const int64_t sizes[] = {sizeof(kvx_door_spec_t), sizeof(kvx_door_extra_t), sizeof(kvx_door_table_t),
                           sizeof(kvx_door_attention_t)};
  for (int64_t i = 0; i < count && i < int64_t(sizeof sizes / sizeof sizes[0]); i++) out[i] = sizes[i];
}

}  // extern "C"
