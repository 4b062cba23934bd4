// v1.1, which does not say how long memory is: there a descriptor that leads past it is not tried. Names of blocks,
// versions, and Dynamo's calls.
#include "../../include/kvbm_kernels.h"
#include "scenes.h"

namespace fuzz {
namespace {

kvx_tensor_desc_t tensor(Scene& s, int dtype, int layout, const Shape& shape, bool is_output) {
  kvx_array_t* a = s.add<kvx_array_t>();
  s.array(a, dtype, shape, is_output);
  s.parts.pop_back();
  kvx_tensor_desc_t t = {};
  t.size = sizeof t, t.dtype = kvx_dtype_t(dtype), t.layout = kvx_layout_t(layout), t.memory = KVX_MEMORY_HOST,
  t.ndim = a->ndim, t.data = a->data;
  memcpy(t.shape, a->shape, sizeof t.shape), memcpy(t.stride, a->stride, sizeof t.stride);
  return t;
}

bool is_inside(const Scene& s, const kvx_tensor_desc_t& t) {
  if (t.data == nullptr || t.ndim > 5) return true;
  __int128 last = 0;
  for (uint32_t i = 0; i < t.ndim; i++) {
    if (t.shape[i] < 0 || t.stride[i] < 0) return true;  // refused for that
    if (t.shape[i] == 0) return true;
    last += __int128(t.shape[i] - 1) * t.stride[i];
  }
  return (last + 1) * bits_of(t.dtype) <= __int128(s.available(t.data)) * 8;
}

struct V1 {
  kvx_cache_desc_t cache;
  kvx_write_desc_t write;
  kvx_gather_desc_t gather;
  int32_t tokens_per_seq, entry;
};

void add_v1(const Sizes& z, int dtype, bool writes, Scenes* out) {
  auto s = std::make_unique<Scene>(writes ? "v1.1 write" : "v1.1 gather");
  V1* v = s->add<V1>();
  kvx_cache_desc_t& c = v->cache;
  c.size = sizeof c, c.num_blocks = uint32_t(z.blocks), c.block_size = uint32_t(z.block_size),
  c.num_kv_heads = uint32_t(z.heads), c.head_dim = uint32_t(z.dim);
  c.k = tensor(*s, dtype, KVX_LAYOUT_BLOCK_NHD, {z.blocks, z.block_size, z.heads, z.dim}, true),
  c.v = tensor(*s, dtype, KVX_LAYOUT_BLOCK_NHD, {z.blocks, z.block_size, z.heads, z.dim}, true);
  const int64_t rows = writes ? z.tokens : z.seqs * z.longest;
  kvx_kv_io_desc_t& io = writes ? v->write.io : v->gather.io;
  io.size = sizeof io, io.num_tokens = uint32_t(rows), io.num_kv_heads = c.num_kv_heads, io.head_dim = c.head_dim;
  io.key = tensor(*s, KVX_DTYPE_F32, KVX_LAYOUT_INVALID, {rows, z.heads, z.dim}, !writes),
  io.value = tensor(*s, KVX_DTYPE_F32, KVX_LAYOUT_INVALID, {rows, z.heads, z.dim}, !writes);
  v->write.size = sizeof v->write, v->write.slots.size = sizeof v->write.slots, v->write.slots.dtype = KVX_DTYPE_S32,
  v->write.slots.token_count = uint32_t(z.tokens), v->write.slots.invalid_slot = -1;
  v->gather.size = sizeof v->gather, v->gather.max_seq_len = uint32_t(z.longest);
  kvx_block_table_t& t = v->gather.block_table;
  t.size = sizeof t, t.format = KVX_BLOCK_TABLE_PACKED, t.index_dtype = KVX_DTYPE_S32, t.seq_count = uint32_t(z.seqs),
  t.beam_width = 1, t.max_blocks_per_seq = uint32_t(z.columns), t.indices_count = uint32_t(z.seqs * z.columns);
  v->gather.seq_lens.size = sizeof v->gather.seq_lens, v->gather.seq_lens.dtype = KVX_DTYPE_S32,
  v->gather.seq_lens.seq_count = uint32_t(z.seqs);
  const auto ints = [&](int64_t count, std::vector<int64_t> values) {
    kvx_array_t* a = s->add<kvx_array_t>();
    s->indices(a, KVX_DTYPE_S32, {count}, values);
    s->parts.pop_back();
    return a->data;
  };
  v->write.slots.slots = ints(z.tokens, {3, 9, -1, 0, 7, 12}), t.indices = ints(z.seqs * z.columns, {0, 2, 1, 4, 3, 3}),
  v->gather.seq_lens.lengths = ints(z.seqs, {z.longest, 2, 0});
  for (void* field :
       {(void*)&c.k.data, (void*)&c.v.data, (void*)&c.pool.primary, (void*)&c.pool.secondary, (void*)&io.key.data,
        (void*)&io.value.data, (void*)&v->write.slots.slots, (void*)&v->write.k_scale, (void*)&v->write.v_scale,
        (void*)&v->write.k_scale_desc.data, (void*)&v->write.v_scale_desc.data, (void*)&t.indices, (void*)&t.indptr,
        (void*)&v->gather.seq_lens.lengths})
    s->note_pointer(field);
  s->call = [v, writes, z, scene = s.get()]() -> int {
    const kvx_kv_io_desc_t& io = writes ? v->write.io : v->gather.io;
    for (const kvx_tensor_desc_t* t : {static_cast<const kvx_tensor_desc_t*>(&v->cache.k),
                                       static_cast<const kvx_tensor_desc_t*>(&v->cache.v), &io.key, &io.value})
      if (!is_inside(*scene, *t)) return KVX_STATUS_INVALID_ARGUMENT;
    kvx_validate_cache_desc(&v->cache);
    if (writes) {
      if (v->write.slots.token_count > uint32_t(z.tokens) / (v->write.slots.dtype == KVX_DTYPE_S64 ? 2 : 1))
        return KVX_STATUS_INVALID_ARGUMENT;
      switch (uint32_t(v->entry) % 8) {
        case 0: return kvx_launch_write_kv(&v->cache, &v->write, nullptr);
        case 1: return kvx_launch_write_kv_f32(&v->cache, &v->write, nullptr);
        case 2: return kvx_launch_write_kv_f16(&v->cache, &v->write, nullptr);
        case 3: return kvx_launch_write_kv_bf16(&v->cache, &v->write, nullptr);
        case 4: return kvx_launch_write_kv_prefill(&v->cache, &v->write, v->tokens_per_seq, nullptr);
        case 5: return kvx_launch_write_kv_prefill_f32(&v->cache, &v->write, v->tokens_per_seq, nullptr);
        case 6:
          return kvx_launch_write_kv_prefill_f16(&v->cache, &v->write, v->tokens_per_seq, nullptr) == 0
                     ? 0
                     : kvx_launch_write_kv_prefill_bf16(&v->cache, &v->write, v->tokens_per_seq, nullptr);
        default: return kvx_write_kv(&v->cache, &v->write, nullptr);
      }
    }
    const kvx_block_table_t& t = v->gather.block_table;
    const uint32_t wide = t.index_dtype == KVX_DTYPE_S64 ? 2 : 1,
                   wide_lens = v->gather.seq_lens.dtype == KVX_DTYPE_S64 ? 2 : 1;
    if (t.indices_count > uint32_t(z.seqs * z.columns) / wide ||
        v->gather.seq_lens.seq_count > uint32_t(z.seqs) / wide_lens)
      return KVX_STATUS_INVALID_ARGUMENT;
    switch (uint32_t(v->entry) % 5) {
      case 0: return kvx_launch_gather_kv(&v->cache, &v->gather, nullptr);
      case 1: return kvx_launch_gather_kv_f32(&v->cache, &v->gather, nullptr);
      case 2: return kvx_launch_gather_kv_f16(&v->cache, &v->gather, nullptr);
      case 3: return kvx_launch_gather_kv_bf16(&v->cache, &v->gather, nullptr);
      default: return kvx_gather_kv(&v->cache, &v->gather, nullptr);
    }
  };
  v->tokens_per_seq = 1, v->entry = 9;
  out->push_back(std::move(s));
}

struct Names {
  int64_t num_blocks, block_size;
  int32_t hash, major;
  const void* parent;
  const int32_t* tokens;
  void* names;
};

void add_names(const Sizes& z, Scenes* out) {
  auto s = std::make_unique<Scene>("kvx_hash_blocks");
  Names* n = s->add<Names>();
  n->num_blocks = z.blocks, n->block_size = z.block_size, n->hash = KVX_HASH_SHA256, n->major = 1;
  n->parent = s->new_buffer(32, false).data,
  n->tokens = reinterpret_cast<int32_t*>(s->new_buffer(size_t(4 * z.blocks * z.block_size), false).data),
  n->names = s->new_buffer(size_t(32 * z.blocks), true).data;
  for (void* field : {(void*)&n->parent, (void*)&n->tokens, (void*)&n->names}) s->note_pointer(field);
  s->call = [n, z] {
    kvx_version_t version;
    kvx_build_info_t info;
    info.struct_bytes = n->major == 2 ? 0 : sizeof info;
    kvx_get_version(&version), kvx_check_version(uint32_t(n->major), 9), kvx_build_info(&info), kvx_build_info(nullptr),
        kvx_status_text(kvx_status_t(n->hash & 7));
    const __int128 tokens = __int128(n->num_blocks) * n->block_size;
    const bool is_there = n->num_blocks <= z.blocks && tokens <= z.blocks * z.block_size;
    const bool overflows = n->num_blocks < 0 || n->block_size < 1 || tokens > __int128(1) << 59;
    return is_there || overflows || !n->tokens
               ? kvx_hash_blocks(n->hash, n->parent, n->tokens, n->num_blocks, n->block_size, n->names)
               : int(KVX_STATUS_INVALID_ARGUMENT);
  };
  out->push_back(std::move(s));
}

struct Dynamo {
  size_t nb, nh, nl, no, nt, hd, inner, elem_size, bytes;
  int32_t dtype, layout, direction, backend, pairs, mode;
  void *chunks, *wholes;
};

// Of a build without CUDA: everything that has work to do is refused, after tables the host reads were read.
void add_dynamo(Scenes* out) {
  if (!kvbm_kernels_is_stub_build()) return;
  auto s = std::make_unique<Scene>("libkvbm_kernels");
  Dynamo* d = s->add<Dynamo>();
  *d = Dynamo{3, 2, 2,       2,      4, 8, 64, 2, 128, KVBM_DTYPE_F16, KVBM_LAYOUT_NHD, 0, KVBM_BACKEND_MEMCPY_ASYNC,
              3, 1, nullptr, nullptr};
  d->chunks = s->new_buffer(12 * 8, false).data, d->wholes = s->new_buffer(3 * 8, false).data;
  s->note_pointer(&d->chunks), s->note_pointer(&d->wholes);
  s->call = [d] {
    void** chunks = static_cast<void**>(d->chunks);
    void** wholes = static_cast<void**>(d->wholes);
    int status = kvbm_kernels_launch_universal_from_block(wholes, chunks, d->nb, d->nh, d->nl, d->no, d->nt, d->hd,
                                                          d->dtype, d->layout, nullptr);
    status |= kvbm_kernels_launch_block_from_universal(wholes, chunks, d->nb, d->nh, d->nl, d->no, d->nt, d->hd,
                                                       d->dtype, d->layout, nullptr);
    const unsigned __int128 count = (unsigned __int128)d->nb * d->nl * d->no;
    if ((count <= 12 && d->nb <= 3) || count >> 64)
      status |= kvbm_kernels_launch_operational_copy(chunks, chunks, wholes, wholes, d->nb, d->nl, d->no, d->inner,
                                                     d->elem_size, d->dtype, d->direction, d->backend, nullptr);
    status |= kvbm_kernels_launch_vectorized_copy(chunks, wholes, d->bytes, d->pairs, nullptr);
    if (d->nb <= 3) status |= kvbm_kernels_memcpy_batch(chunks, wholes, d->bytes, d->nb, d->mode, nullptr);
    kvbm_kernels_has_memcpy_batch_async();
    return status == KVBM_SUCCESS ? KVX_STATUS_OK : KVX_STATUS_INVALID_ARGUMENT;
  };
  out->push_back(std::move(s));
}

}  // namespace

void add_other_scenes(const Sizes& z, Scenes* out) {
  for (bool writes : {true, false})
    for (int dtype : {KVX_DTYPE_F32, KVX_DTYPE_F8_E4M3}) add_v1(z, dtype, writes, out);
  add_names(z, out);
  add_dynamo(out);
}

}  // namespace fuzz
