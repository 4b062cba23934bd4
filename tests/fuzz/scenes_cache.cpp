// Calls of v1.2 over one cache.
#include "reference.h"
#include "scenes.h"

namespace fuzz {
namespace {

enum Kind {
  F32_NHD,
  F16_HND,
  BF16_PACKED,
  S8_TOKEN_HEAD,
  E2M1_GROUP,
  F8_BLOCK_HEAD,
  S8_INLINE,
  S4_GROUP,
  F16_POOLS,
  KINDS
};

float tensor_scale = 0.5f;

std::vector<int64_t> count_up(int64_t n, int64_t most, int64_t step = 1) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < n; i++) out.push_back(i * step % most);
  return out;
}

void scales(Scene& s, kvx_plane_t* p, int granularity, int dtype, const Shape& shape, bool is_output) {
  p->granularity = granularity;
  s.array(&p->scale, dtype, shape, is_output);
}

kvx_cache_t* add_cache(Scene& s, const Sizes& z, Kind kind) {
  kvx_cache_t* c = s.add_args<kvx_cache_t>();
  const int64_t nb = z.blocks, bs = z.block_size, h = z.heads, d = z.dim;
  c->num_blocks = nb, c->block_size = bs, c->num_kv_heads = h, c->k_head_dim = c->v_head_dim = d,
  c->memory = KVX_MEMORY_HOST, c->device = -1;
  static const int dtypes[KINDS] = {KVX_DTYPE_F32,     KVX_DTYPE_F16, KVX_DTYPE_BF16, KVX_DTYPE_S8, KVX_DTYPE_E2M1,
                                    KVX_DTYPE_F8_E4M3, KVX_DTYPE_S8,  KVX_DTYPE_S4,   KVX_DTYPE_F16};
  for (kvx_plane_t* p : {&c->k, &c->v}) {
    const bool is_k = p == &c->k;
    if (kind == S8_INLINE) continue;
    if (kind == BF16_PACKED && is_k)
      p->layout = KVX_LAYOUT_BLOCK_HND_PACKED, s.array(&p->data, dtypes[kind], {nb, h, d / 4, bs, 4}, true);
    else if (is_k && kind != F16_HND)
      p->layout = KVX_LAYOUT_BLOCK_NHD, s.array(&p->data, dtypes[kind], {nb, bs, h, d}, true);
    else p->layout = KVX_LAYOUT_BLOCK_HND, s.array(&p->data, dtypes[kind], {nb, h, bs, d}, true);
    if (kind == S8_TOKEN_HEAD)
      scales(s, p, KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD, is_k ? KVX_DTYPE_F32 : KVX_DTYPE_BF16, {nb, bs, h}, true);
    if (kind == E2M1_GROUP || kind == S4_GROUP)
      p->group_size = 4, scales(s, p, KVX_SCALE_GRANULARITY_PER_GROUP, is_k ? KVX_DTYPE_F8_E4M3 : KVX_DTYPE_E8M0,
                                {nb, bs, h, d / 4}, true);
    if (kind == E2M1_GROUP) p->tensor_scale = &tensor_scale;
    if (kind == F8_BLOCK_HEAD && is_k) scales(s, p, KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD, KVX_DTYPE_F32, {nb, h}, true);
    if (kind == F8_BLOCK_HEAD && !is_k) scales(s, p, KVX_SCALE_GRANULARITY_PER_HEAD, KVX_DTYPE_F16, {h}, true);
  }
  if (kind == S8_INLINE) {  // K and V in one buffer, cells of elements and their scale
    const int64_t cell = d + 4;
    Buffer& b = s.new_buffer(size_t(nb * bs * h * 2 * cell), true);
    for (kvx_plane_t* p : {&c->k, &c->v}) {
      p->data.data = b.data + (p == &c->v ? cell : 0), p->data.data_bytes = b.bytes - size_t(p == &c->v ? cell : 0);
      const int64_t shape[4] = {nb, bs, h, d}, stride[4] = {bs * h * 2 * cell, h * 2 * cell, 2 * cell, 1};
      memcpy(p->data.shape, shape, sizeof shape), memcpy(p->data.stride, stride, sizeof stride);
      p->data.ndim = 4, p->data.dtype = KVX_DTYPE_S8, p->layout = KVX_LAYOUT_BLOCK_NHD;
      p->granularity = KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD, p->flags = KVX_PLANE_FLAG_SCALE_INLINE,
      p->scale_offset = d, p->scale_dtype = KVX_DTYPE_F32;
    }
  }
  if (kind == F16_POOLS) {
    c->bytes_per_block = uint64_t(bs * h * d * 2), c->secondary_blocks = 3;
    c->primary_bytes = uint64_t(nb) * c->bytes_per_block, c->secondary_bytes = 3 * c->bytes_per_block;
    c->pool_primary = s.new_buffer(c->primary_bytes, false).data,
    c->pool_secondary = s.new_buffer(c->secondary_bytes, false).data;
  }
  s.note_sized(&c->pool_primary, &c->primary_bytes), s.note_sized(&c->pool_secondary, &c->secondary_bytes);
  for (kvx_plane_t* p : {&c->k, &c->v})
    s.note_array(&p->data), s.note_array(&p->scale), s.note_pointer(&p->tensor_scale);
  return c;
}

int io_dtype(Kind kind) {
  return kind == F32_NHD || kind == S8_INLINE        ? KVX_DTYPE_F32
         : kind == BF16_PACKED || kind == E2M1_GROUP ? KVX_DTYPE_BF16
                                                     : KVX_DTYPE_F16;
}

// Sequences of `longest`, half of it and no tokens, in blocks that are all different as long as there are enough.
void add_table(Scene& s, const Sizes& z, kvx_table_t* t, int format, int dtype) {
  t->struct_bytes = sizeof *t, t->format = format;
  std::vector<int64_t> lens;
  for (int64_t i = 0; i < z.seqs; i++) lens.push_back(i == 0 ? z.longest : i == z.seqs - 1 ? 0 : z.longest / 2);
  if (format == KVX_BLOCK_TABLE_PACKED)
    s.indices(&t->indices, dtype, {z.seqs, z.columns}, count_up(z.seqs * z.columns, z.blocks));
  if (format == KVX_BLOCK_TABLE_KV_OFFSETS) {
    t->beam_width = 2;
    s.indices(&t->indices, KVX_DTYPE_S32, {z.seqs, 2, 2, z.columns}, count_up(z.seqs * 4 * z.columns, z.blocks));
    const int32_t odd[2] = {-2147483647, -1};  // of the secondary pool, and no block
    memcpy(static_cast<char*>(t->indices.data) + 4, odd, 8);
  }
  std::vector<int64_t> first = {0}, last, ids;
  for (int64_t n : lens) {
    const bool ragged = format == KVX_BLOCK_TABLE_RAGGED;
    const int64_t pages = (n + z.block_size - 1) / z.block_size;
    first.push_back(first.back() + (ragged ? n : pages)), last.push_back(n ? n - (pages - 1) * z.block_size : 0);
    for (int64_t i = 0; i < (ragged ? n : pages); i++) ids.push_back((ragged ? i / z.block_size : i) % z.blocks);
  }
  if (format == KVX_BLOCK_TABLE_RAGGED || format == KVX_BLOCK_TABLE_PAGE_CSR) {
    s.indices(&t->indices, dtype, {int64_t(ids.size())}, ids);
    s.indices(&t->indptr, KVX_DTYPE_S64, {z.seqs + 1}, first);
  }
  if (format == KVX_BLOCK_TABLE_PAGE_CSR) s.indices(&t->last_page_len, dtype, {z.seqs}, last);
  else s.indices(&t->seq_lens, dtype, {z.seqs}, lens);
  s.note_arrays_of(&t->indices, 4);
}

bool agree(int validated, int ran) {
  return ran == validated || (validated == KVX_STATUS_OK && ran != KVX_STATUS_INVALID_ARGUMENT);
}
constexpr int kDisagree = 77;

void add_write(const Sizes& z, Kind kind, int index, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_write");
  kvx_cache_t* c = add_cache(*s, z, kind == F16_POOLS ? F16_HND : kind);
  kvx_write_args_t* w = s->add_args<kvx_write_args_t>();
  const int64_t t = z.tokens, h = z.heads, d = z.dim;
  s->array(&w->k, io_dtype(kind), {t, h, d});
  s->array(&w->v, io_dtype(kind), {t, h, d}, false, index == KVX_DTYPE_S32 ? Shape{} : Shape{3 * h * d, 2 * d + 4, 2});
  s->indices(&w->slots, index, {t}, count_up(t, z.blocks * z.block_size, 3));
  const int64_t skipped = -1;
  memcpy(w->slots.data, &skipped, size_t(bits_of(index) / 8));
  w->invalid_slot = -1;
  if (kind == S8_TOKEN_HEAD) s->array(&w->v_token_scale, KVX_DTYPE_F32, {t, h});
  if (kind == S4_GROUP) s->array(&w->k_token_scale, KVX_DTYPE_F32, {t, h, d / 4});
  s->note_array(&w->k_token_scale), s->note_array(&w->v_token_scale), s->note_pointer(&w->errors);
  s->call = [c, w] {
    const int cache = kvx_validate_cache(c), validated = kvx_validate_write(c, w), ran = kvx_write(c, w, nullptr);
    return agree(validated, ran) && (cache == KVX_STATUS_OK || validated != KVX_STATUS_OK) ? ran : kDisagree;
  };
  s->check = [c, w, scene = s.get()] { return check_write(*scene, *c, *w); };
  out->push_back(std::move(s));
}

void add_gather(const Sizes& z, Kind kind, int format, bool packed, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_gather");
  kvx_cache_t* c = add_cache(*s, z, kind);
  kvx_gather_args_t* g = s->add_args<kvx_gather_args_t>();
  add_table(*s, z, &g->table, format, format == KVX_BLOCK_TABLE_RAGGED ? KVX_DTYPE_S64 : KVX_DTYPE_S32);
  const int64_t n = z.seqs * (format == KVX_BLOCK_TABLE_KV_OFFSETS ? 2 : 1), h = z.heads, d = z.dim, l = z.longest;
  g->max_seq_len = l;
  if (packed) {
    const int64_t rows = n * (l / 2);
    s->array(&g->k, io_dtype(kind), {rows, h, d}, true),
        s->array(&g->v, io_dtype(kind), {rows, h, d}, true, {h * d + 2, d, 1});
    s->indices(&g->cu_seqlens, KVX_DTYPE_S64, {n + 1}, count_up(n + 1, INT64_MAX, l / 2));
  } else {
    s->array(&g->k, io_dtype(kind), {n * l, h, d}, true),
        s->array(&g->v, io_dtype(kind), {n, l, h, d}, true, {2 * l * h * d + 8, 2 * h * d, 2 * d, 2});
  }
  s->note_array(&g->cu_seqlens), s->note_pointer(&g->errors);
  s->call = [c, g] {
    const int validated = kvx_validate_gather(c, g), ran = kvx_gather(c, g, nullptr);
    return agree(validated, ran) ? ran : kDisagree;
  };
  s->check = [c, g, scene = s.get()] { return check_gather(*scene, *c, *g); };
  out->push_back(std::move(s));
}

void add_amax(const Sizes& z, int granularity, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_amax");
  kvx_amax_args_t* a = s->add_args<kvx_amax_args_t>();
  s->array(&a->x, granularity % 2 ? KVX_DTYPE_F32 : KVX_DTYPE_BF16, {z.tokens, z.heads, z.dim});
  const bool by_block =
                 granularity == KVX_SCALE_GRANULARITY_PER_BLOCK || granularity == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD,
             by_head = granularity >= KVX_SCALE_GRANULARITY_PER_HEAD;
  Shape shape;
  if (by_block)
    shape.push_back(z.blocks),
        a->block_size = z.block_size,
        s->indices(&a->slots, KVX_DTYPE_S64, {z.tokens}, count_up(z.tokens, z.blocks * z.block_size, 3));
  if (by_head) shape.push_back(z.heads);
  s->array(&a->amax, KVX_DTYPE_F32, shape, true);
  a->granularity = granularity, a->memory = KVX_MEMORY_HOST, a->device = -1, a->invalid_slot = -1;
  s->note_array(&a->slots), s->note_pointer(&a->errors);
  s->call = [a] { return kvx_amax(a, nullptr); };
  out->push_back(std::move(s));
}

void add_attention(const Sizes& z, Kind kind, int format, int queries, uint64_t flags, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_attention");
  Sizes sizes = z;
  if (flags & KVX_ATTENTION_LATENT) sizes.heads = 1;
  kvx_cache_t* c = add_cache(*s, sizes, kind);
  kvx_attention_args_t* a = s->add_args<kvx_attention_args_t>();
  add_table(*s, sizes, &a->table, format, KVX_DTYPE_S32);
  const int64_t n = z.seqs * (format == KVX_BLOCK_TABLE_KV_OFFSETS ? 2 : 1), t = n * queries + (queries > 1 ? 1 : 0),
                heads = 2 * z.heads, d = z.dim;
  s->array(&a->q, KVX_DTYPE_F32, {t, heads, flags & KVX_ATTENTION_LATENT ? 2 * d : d});
  s->array(&a->out, KVX_DTYPE_F16, {t, heads, d}, true);
  s->array(&a->lse, KVX_DTYPE_F32, {t, heads}, true);
  if (queries > 1)
    s->indices(&a->cu_seqlens, KVX_DTYPE_S32, {n + 1}, count_up(n + 1, INT64_MAX, queries)), a->max_query_len = queries;
  s->array(&a->sinks, KVX_DTYPE_F32, {heads});
  a->softmax_scale = 0.25f, a->soft_cap = kind == F32_NHD ? 8.0f : 0.0f, a->window = kind == S8_TOKEN_HEAD ? 3 : 0,
  a->flags = flags;
  s->note_array(&a->cu_seqlens), s->note_sized(&a->workspace, &a->workspace_bytes), s->note_pointer(&a->errors),
      s->note_pointer(&a->k_pointers), s->note_pointer(&a->v_pointers);
  if (queries == 3 && kind == F32_NHD) {  // blocks that are buffers of their own
    const int64_t bytes = z.block_size * z.heads * d * 4;
    for (int i = 0; i < 2; i++) {
      kvx_plane_t* p = i ? &c->v : &c->k;
      char* blocks = static_cast<char*>(p->data.data);
      Buffer& b = s->new_buffer(size_t(8 * z.blocks), false);
      for (int64_t n = 0; n < z.blocks; n++) {
        const int64_t address = int64_t(uintptr_t(blocks)) + n * bytes;
        memcpy(b.data + 8 * n, &address, 8);
      }
      (i ? a->v_pointers : a->k_pointers) = reinterpret_cast<int64_t*>(b.data);
      p->data.data = nullptr, p->data.data_bytes = 0;
    }
    const kvx_cache_t honest = *c;  // what lies behind an address no field can say: these numbers stay
    s->truth = [c, a, honest] {
      if (!a->k_pointers || !a->v_pointers) return;
      const bool is_so = c->num_blocks == honest.num_blocks && c->block_size == honest.block_size &&
                         c->num_kv_heads == honest.num_kv_heads && c->k_head_dim == honest.k_head_dim &&
                         c->v_head_dim == honest.v_head_dim &&
                         memcmp(&c->k.data, &honest.k.data, sizeof c->k.data) == 0 &&
                         memcmp(&c->v.data, &honest.v.data, sizeof c->v.data) == 0 && c->k.layout == honest.k.layout &&
                         c->v.layout == honest.v.layout;
      if (!is_so) a->k_pointers = nullptr;
    };
  }
  s->call = [c, a] {
    uint64_t bytes;
    const int asked = kvx_attention_workspace(c, a, &bytes), planned = kvx_attention_plan(c, a, nullptr),
              ran = kvx_attention(c, a, nullptr);
    return ran == KVX_STATUS_OK && (asked == KVX_STATUS_INVALID_ARGUMENT || planned == KVX_STATUS_INVALID_ARGUMENT)
               ? kDisagree
               : ran;
  };
  out->push_back(std::move(s));
}

void add_norm_rope_arrays(Scene& s, const Sizes& z, int io, int style, kvx_norm_rope_t* n) {
  n->struct_bytes = sizeof *n, n->style = style, n->eps = 1e-5f;
  s.array(&n->q_weight, KVX_DTYPE_F32, {z.dim}), s.array(&n->k_weight, io, {z.dim});
  if (style) {
    s.array(&n->cos, style == 1 ? KVX_DTYPE_F32 : io, {32, z.dim / 2}),
        s.array(&n->sin, style == 1 ? KVX_DTYPE_F32 : io, {32, z.dim / 2});
    s.indices(&n->positions, KVX_DTYPE_S64, {z.tokens}, count_up(z.tokens, 32, 5));
  }
  s.note_arrays_of(&n->q_weight, 5);
}

void add_append(const Sizes& z, Kind kind, int style, bool has_pointers, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_qkv_norm_rope_append");
  kvx_cache_t* c = add_cache(*s, z, kind);
  kvx_append_args_t* a = s->add_args<kvx_append_args_t>();
  const int io = io_dtype(kind);
  const int64_t t = z.tokens, h = z.heads, d = z.dim;
  s->array(&a->q, io, {t, 2 * h, d}), s->array(&a->q_out, io, {t, 2 * h, d}, true);
  s->array(&a->k, io, {t, h, d}), s->array(&a->v, io, {t, h, d}, false, {2 * h * d, d, 1});
  s->indices(&a->slots, KVX_DTYPE_S32, {t}, count_up(t, z.blocks * z.block_size, 3));
  a->invalid_slot = -1;
  add_norm_rope_arrays(*s, z, io, style, &a->norm_rope);
  if (has_pointers) {
    const int64_t bytes = z.block_size * h * d * bits_of(c->k.data.dtype) / 8;
    for (kvx_plane_t* p : {&c->k, &c->v}) {
      std::vector<int64_t> addresses;
      for (int64_t n = 0; n < z.blocks; n++) addresses.push_back(int64_t(uintptr_t(p->data.data)) + n * bytes);
      s->indices(p == &c->k ? &a->k_pointers : &a->v_pointers, KVX_DTYPE_S64, {z.blocks}, addresses);
      s->buffers.back().index_bytes = 0;  // an address that lies cannot be told
      p->data.data = nullptr, p->data.data_bytes = 0;
    }
    const kvx_cache_t honest = *c;
    const kvx_array_t k = a->k_pointers, v = a->v_pointers;
    s->truth = [c, a, honest, k, v] {
      if (a->k_pointers.ndim || a->v_pointers.ndim) {
        const uint32_t version = c->version;
        *c = honest, c->version = version, a->k_pointers = k, a->v_pointers = v;
      }
    };
  }
  s->note_arrays_of(&a->k_token_scale, has_pointers ? 2 : 4), s->note_pointer(&a->errors);
  s->call = [c, a] { return kvx_qkv_norm_rope_append(c, a, nullptr); };
  if (!has_pointers)
    s->truth = [a] {  // pointers may appear where there were none, but not lead anywhere
      if (a->k_pointers.ndim && a->v_pointers.ndim) a->k_pointers.ndim = 0;
    };
  out->push_back(std::move(s));
}

void add_norm_rope(const Sizes& z, int io, int style, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_qkv_norm_rope");
  kvx_qkv_norm_rope_args_t* a = s->add_args<kvx_qkv_norm_rope_args_t>();
  const int64_t t = z.tokens, h = z.heads, d = z.dim;
  s->array(&a->q, io, {t, 2 * h, d}), s->array(&a->q_out, io, {t, 2 * h, d}, true);
  s->array(&a->k, io, {t, h, d}, false, {h * d * 2, d * 2, 2}),
      s->array(&a->k_out, io, {t, h, d}, true, {h * d * 2, d * 2, 2});
  s->array(&a->v, io, {t, h, d}), s->array(&a->v_out, io, {t, h, d}, true);
  add_norm_rope_arrays(*s, z, io, style, &a->norm_rope);
  a->memory = KVX_MEMORY_HOST, a->device = -1;
  s->note_pointer(&a->errors);
  s->call = [a] { return kvx_qkv_norm_rope(a, nullptr); };
  out->push_back(std::move(s));
}

void add_merge(const Sizes& z, int io, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_merge_attention");
  kvx_merge_args_t* a = s->add_args<kvx_merge_args_t>();
  const int64_t t = z.tokens, h = z.heads, d = z.dim;
  s->array(&a->outs, io, {3, t, h, d}), s->array(&a->lses, KVX_DTYPE_F32, {3, t, h});
  s->array(&a->out, KVX_DTYPE_F32, {t, h, d}, true, {h * d + 3, d, 1}), s->array(&a->lse, KVX_DTYPE_F32, {t, h}, true),
      s->array(&a->sinks, KVX_DTYPE_F32, {h});
  a->memory = KVX_MEMORY_HOST, a->device = -1;
  s->call = [a] { return kvx_merge_attention(a, nullptr); };
  out->push_back(std::move(s));
}

void add_copy(const Sizes& z, Kind kind, int index, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_copy_blocks");
  kvx_cache_t* c = add_cache(*s, z, kind);
  kvx_copy_blocks_args_t* a = s->add_args<kvx_copy_blocks_args_t>();
  s->indices(&a->pairs, index, {3, 2}, {0, 3, 1, 4, -1, 2});
  s->note_pointer(&a->errors);
  s->call = [c, a] { return kvx_copy_blocks(c, a, nullptr); };
  s->check = [c, a, scene = s.get()] { return check_copy(*scene, *c, *a); };
  out->push_back(std::move(s));
}

}  // namespace

void add_cache_scenes(const Sizes& z, Scenes* out) {
  for (int kind = 0; kind < KINDS; kind++) {
    add_write(z, Kind(kind), kind % 2 ? KVX_DTYPE_S64 : KVX_DTYPE_S32, out);
    const bool pools = kind == F16_POOLS;
    add_gather(z, Kind(kind),
               pools           ? KVX_BLOCK_TABLE_KV_OFFSETS
               : kind % 3 == 0 ? KVX_BLOCK_TABLE_PACKED
               : kind % 3 == 1 ? KVX_BLOCK_TABLE_PAGE_CSR
                               : KVX_BLOCK_TABLE_RAGGED,
               kind % 2, out);
    add_gather(z, Kind(kind),
               pools      ? KVX_BLOCK_TABLE_KV_OFFSETS
               : kind % 2 ? KVX_BLOCK_TABLE_PACKED
                          : KVX_BLOCK_TABLE_PAGE_CSR,
               !(kind % 2), out);
    add_attention(z, Kind(kind),
                  pools      ? KVX_BLOCK_TABLE_KV_OFFSETS
                  : kind % 2 ? KVX_BLOCK_TABLE_PACKED
                             : KVX_BLOCK_TABLE_RAGGED,
                  kind % 3 + 1, KVX_ATTENTION_CAUSAL, out);
    if (!pools) add_append(z, Kind(kind), kind % 3, false, out);
    if (!pools) add_copy(z, Kind(kind), kind % 2 ? KVX_DTYPE_S64 : KVX_DTYPE_S32, out);
  }
  add_attention(z, F32_NHD, KVX_BLOCK_TABLE_PACKED, 3, KVX_ATTENTION_CAUSAL, out);
  add_attention(z, F32_NHD, KVX_BLOCK_TABLE_PAGE_CSR, 2, 0, out);
  add_attention(z, F16_HND, KVX_BLOCK_TABLE_PAGE_CSR, 2, KVX_ATTENTION_LATENT, out);
  add_append(z, F32_NHD, KVX_ROPE_HALF, true, out);
  for (int granularity = 1; granularity <= 4; granularity++) add_amax(z, granularity, out);
  for (int style = 0; style <= 2; style++) add_norm_rope(z, style == 1 ? KVX_DTYPE_BF16 : KVX_DTYPE_F32, style, out);
  add_merge(z, KVX_DTYPE_F32, out), add_merge(z, KVX_DTYPE_F16, out);
}

}  // namespace fuzz
