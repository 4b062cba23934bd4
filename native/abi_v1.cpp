// The v1.1 entry points: size-checked descriptors are translated to v1.2 and run there.
#include <string.h>

#include "check.h"
#include "lower.h"
#include "run.h"

namespace kvx {
namespace {

kvx_status_t check_size(const char* what, uint32_t size, uint64_t need) {
  KVX_NEED(size >= need, "%s.size is %u; v1 has %llu.", what, size, (unsigned long long)need);
  return KVX_STATUS_OK;
}

kvx_array_t array_of(const kvx_tensor_desc_t& t) {
  kvx_array_t a{};
  a.data = t.data;
  memcpy(a.shape, t.shape, sizeof a.shape);
  memcpy(a.stride, t.stride, sizeof a.stride);
  a.ndim = t.ndim;
  a.dtype = t.dtype;
  return a;
}

kvx_array_t vector_of(const void* data, int64_t count, int dtype) {
  kvx_array_t a{};
  a.data = const_cast<void*>(data);
  a.shape[0] = count;
  a.stride[0] = 1;
  a.ndim = 1;
  a.dtype = dtype;
  return a;
}

kvx_status_t translate_cache(const kvx_cache_desc_t* d, kvx_cache_t* c) {
  KVX_NEED(d != nullptr, "cache is NULL.");
  KVX_TRY(check_size("cache", d->size, sizeof *d));
  KVX_NEED(d->num_blocks && d->block_size && d->num_kv_heads && d->head_dim,
           "cache has num_blocks %u, block_size %u, num_kv_heads %u, head_dim %u; each must be 1 or more.",
           d->num_blocks, d->block_size, d->num_kv_heads, d->head_dim);
  KVX_TRY(check_size("cache.k", d->k.size, sizeof d->k));
  KVX_TRY(check_size("cache.v", d->v.size, sizeof d->v));
  KVX_NEED(d->k.layout == d->v.layout,
           "cache.k.layout is %s and cache.v.layout %s; v1 wants them equal, kvx_write() does not.",
           layout_name(d->k.layout), layout_name(d->v.layout));
  KVX_NEED(d->k.dtype == d->v.dtype,
           "cache.k.dtype is %s and cache.v.dtype %s; v1 wants them equal, kvx_write() does not.",
           dtype_name(d->k.dtype), dtype_name(d->v.dtype));
  KVX_NEED(d->k.dtype >= KVX_DTYPE_F16 && d->k.dtype <= KVX_DTYPE_F8_E5M2,
           "cache.k.dtype is %s; v1 caches are f16, bf16, f32, fp8_e4m3 or fp8_e5m2.", dtype_name(d->k.dtype));
  KVX_NEED(d->k.data != nullptr && d->v.data != nullptr, "cache.k.data or cache.v.data is NULL.");
  KVX_NEED(d->k.memory == d->v.memory, "cache.k.memory is %d and cache.v.memory %d; they must agree.", d->k.memory,
           d->v.memory);
  *c = kvx_cache_t{};
  c->version = KVX_ABI_VERSION;
  c->struct_bytes = sizeof *c;
  c->num_blocks = d->num_blocks;
  c->block_size = d->block_size;
  c->num_kv_heads = d->num_kv_heads;
  c->k_head_dim = c->v_head_dim = d->head_dim;
  c->memory = d->k.memory;
  c->device = -1;
  c->k.data = array_of(d->k);
  c->v.data = array_of(d->v);
  c->k.layout = c->v.layout = d->k.layout;
  return KVX_STATUS_OK;
}

bool is_memory(int memory) { return memory >= KVX_MEMORY_HOST && memory <= KVX_MEMORY_UNIFIED; }
bool is_device(int memory) { return memory == KVX_MEMORY_DEVICE || memory == KVX_MEMORY_UNIFIED; }

kvx_status_t check_io(const kvx_kv_io_desc_t& io, const kvx_cache_desc_t& cache) {
  KVX_TRY(check_size("io", io.size, sizeof io));
  KVX_TRY(check_size("io.key", io.key.size, sizeof io.key));
  KVX_TRY(check_size("io.value", io.value.size, sizeof io.value));
  KVX_NEED(io.num_kv_heads == cache.num_kv_heads && io.head_dim == cache.head_dim,
           "io has %u heads of %u; the cache has %u of %u.", io.num_kv_heads, io.head_dim, cache.num_kv_heads,
           cache.head_dim);
  KVX_NEED(is_device(io.key.memory) == is_device(cache.k.memory) &&
               is_device(io.value.memory) == is_device(cache.k.memory) && is_memory(io.key.memory) &&
               is_memory(io.value.memory),
           "io memory is %d and %d, the cache's is %d; they must be on the same side.", io.key.memory, io.value.memory,
           cache.k.memory);
  return KVX_STATUS_OK;
}

kvx_status_t translate_scale(const char* what, const kvx_scale_desc_t& d, const void* scalar, kvx_plane_t* plane) {
  const bool quantised = plane->data.dtype == KVX_DTYPE_F8_E4M3 || plane->data.dtype == KVX_DTYPE_F8_E5M2;
  if (d.size == 0 || d.data == nullptr || d.granularity == KVX_SCALE_GRANULARITY_NONE) {
    if (quantised) plane->tensor_scale = static_cast<const float*>(scalar);
    return KVX_STATUS_OK;
  }
  KVX_TRY(check_size(what, d.size, sizeof d));
  KVX_NEED(d.granularity >= KVX_SCALE_GRANULARITY_PER_TENSOR && d.granularity <= KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD,
           "%s.granularity is %d; v1 has 1 (tensor) to 4 (block-head).", what, d.granularity);
  KVX_NEED(d.dtype >= KVX_DTYPE_F16 && d.dtype <= KVX_DTYPE_F32, "%s.dtype is %s; v1 scales are f32, f16 or bf16.",
           what, dtype_name(d.dtype));
  plane->granularity = d.granularity;
  plane->scale.data = const_cast<void*>(d.data);
  memcpy(plane->scale.shape, d.shape, sizeof d.shape);
  memcpy(plane->scale.stride, d.stride, sizeof d.stride);
  plane->scale.ndim = d.ndim;
  plane->scale.dtype = d.dtype;
  return KVX_STATUS_OK;
}

kvx_status_t write_v1(const char* name, const kvx_cache_desc_t* cache, const kvx_write_desc_t* write, int io_dtype,
                      void* stream) {
  return entry(name, [&]() -> kvx_status_t {
    kvx_cache_t c;
    KVX_TRY(translate_cache(cache, &c));
    KVX_NEED(write != nullptr, "write is NULL.");
    KVX_TRY(check_size("write", write->size, sizeof *write));
    KVX_TRY(check_io(write->io, *cache));
    KVX_TRY(check_size("slots", write->slots.size, sizeof write->slots));
    KVX_NEED(write->slots.token_count == write->io.num_tokens, "slots.token_count is %u; io.num_tokens is %u.",
             write->slots.token_count, write->io.num_tokens);
    KVX_NEED(io_dtype == KVX_DTYPE_INVALID || (write->io.key.dtype == io_dtype && write->io.value.dtype == io_dtype),
             "io is %s and %s; this entry takes %s.", dtype_name(write->io.key.dtype),
             dtype_name(write->io.value.dtype), dtype_name(io_dtype));
    KVX_TRY(translate_scale("k_scale_desc", write->k_scale_desc, write->k_scale, &c.k));
    KVX_TRY(translate_scale("v_scale_desc", write->v_scale_desc, write->v_scale, &c.v));
    kvx_write_args_t w{};
    w.version = KVX_ABI_VERSION;
    w.struct_bytes = sizeof w;
    w.k = array_of(write->io.key);
    w.v = array_of(write->io.value);
    w.slots = vector_of(write->slots.slots, write->slots.token_count, write->slots.dtype);
    w.invalid_slot = write->slots.invalid_slot;
    return run_write(c, w, stream);
  });
}

kvx_status_t translate_table(const kvx_cache_desc_t& cache, const kvx_gather_desc_t& g, kvx_cache_t* c,
                             kvx_table_t* t) {
  const kvx_block_table_t& b = g.block_table;
  KVX_TRY(check_size("block_table", b.size, sizeof b));
  KVX_TRY(check_size("seq_lens", g.seq_lens.size, sizeof g.seq_lens));
  KVX_NEED(g.seq_lens.seq_count == b.seq_count, "seq_lens.seq_count is %u; block_table.seq_count is %u.",
           g.seq_lens.seq_count, b.seq_count);
  *t = kvx_table_t{};
  t->struct_bytes = sizeof *t;
  t->format = b.format;
  t->seq_lens = vector_of(g.seq_lens.lengths, b.seq_count, g.seq_lens.dtype);
  t->indices = vector_of(b.indices, b.indices_count, b.index_dtype);
  const uint64_t s = b.seq_count, m = b.max_blocks_per_seq, w = b.beam_width;
  switch (b.format) {
    case KVX_BLOCK_TABLE_PACKED:
      KVX_NEED(w == 1, "block_table.beam_width is %u; PACKED has 1.", b.beam_width);
      KVX_NEED(b.indices_count == s * m, "block_table.indices_count is %u; PACKED has %u x %u.", b.indices_count,
               b.seq_count, b.max_blocks_per_seq);
      KVX_NEED(b.indptr == nullptr && b.indptr_count == 0, "block_table.indptr_count is %u; PACKED has no indptr.",
               b.indptr_count);
      t->indices.ndim = 2;
      t->indices.shape[0] = int64_t(s);
      t->indices.shape[1] = int64_t(m);
      t->indices.stride[0] = int64_t(m);
      t->indices.stride[1] = 1;
      break;
    case KVX_BLOCK_TABLE_RAGGED:
      KVX_NEED(w == 1, "block_table.beam_width is %u; RAGGED has 1.", b.beam_width);
      KVX_NEED(b.indptr_count == s + 1, "block_table.indptr_count is %u; RAGGED has %u.", b.indptr_count,
               b.seq_count + 1);
      KVX_NEED(b.indptr != nullptr, "block_table.indptr is NULL; RAGGED needs it.");
      t->indptr = vector_of(b.indptr, b.indptr_count, b.indptr_dtype);
      break;
    case KVX_BLOCK_TABLE_KV_OFFSETS:
      KVX_NEED(w >= 1, "block_table.beam_width is 0; KV_OFFSETS has 1 or more.");
      KVX_NEED(b.flags & KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX,
               "block_table.flags is %u; KV_OFFSETS needs KVCACHEINDEX (1).", b.flags);
      KVX_NEED(b.indices_count == s * w * 2 * m, "block_table.indices_count is %u; KV_OFFSETS has %u x %u x 2 x %u.",
               b.indices_count, b.seq_count, b.beam_width, b.max_blocks_per_seq);
      KVX_NEED(b.indptr == nullptr && b.indptr_count == 0, "block_table.indptr_count is %u; KV_OFFSETS has no indptr.",
               b.indptr_count);
      KVX_TRY(check_size("cache.pool", cache.pool.size, sizeof cache.pool));
      KVX_NEED(cache.pool.bytes_per_block != 0 && cache.pool.primary != nullptr,
               "KV_OFFSETS needs cache.pool.bytes_per_block and primary.");
      KVX_NEED(is_memory(cache.pool.memory) && is_device(cache.pool.memory) == is_device(cache.k.memory),
               "cache.pool.memory is %d, the cache's is %d.", cache.pool.memory, cache.k.memory);
      t->beam_width = int64_t(w);
      t->indices.ndim = 4;
      t->indices.shape[0] = int64_t(s), t->indices.shape[1] = int64_t(w), t->indices.shape[2] = 2,
      t->indices.shape[3] = int64_t(m);
      t->indices.stride[0] = int64_t(w * 2 * m), t->indices.stride[1] = int64_t(2 * m),
      t->indices.stride[2] = int64_t(m), t->indices.stride[3] = 1;
      c->pool_primary = cache.pool.primary;
      c->pool_secondary = cache.pool.secondary;
      c->bytes_per_block = cache.pool.bytes_per_block;
      break;
    default:
      return fail(KVX_STATUS_INVALID_ARGUMENT, "block_table.format is %d; v1 has PACKED 1, RAGGED 2 and KV_OFFSETS 3.",
                  b.format);
  }
  return KVX_STATUS_OK;
}

kvx_status_t gather_v1(const char* name, const kvx_cache_desc_t* cache, const kvx_gather_desc_t* gather, int io_dtype,
                       void* stream) {
  return entry(name, [&]() -> kvx_status_t {
    kvx_cache_t c;
    KVX_TRY(translate_cache(cache, &c));
    KVX_NEED(gather != nullptr, "gather is NULL.");
    KVX_TRY(check_size("gather", gather->size, sizeof *gather));
    KVX_TRY(check_io(gather->io, *cache));
    KVX_NEED(gather->max_seq_len > 0, "max_seq_len is 0; it must be 1 or more.");
    KVX_NEED(io_dtype == KVX_DTYPE_INVALID || (gather->io.key.dtype == io_dtype && gather->io.value.dtype == io_dtype),
             "io is %s and %s; this entry takes %s.", dtype_name(gather->io.key.dtype),
             dtype_name(gather->io.value.dtype), dtype_name(io_dtype));
    kvx_gather_args_t g{};
    g.version = KVX_ABI_VERSION;
    g.struct_bytes = sizeof g;
    KVX_TRY(translate_table(*cache, *gather, &c, &g.table));
    const uint64_t rows = uint64_t(gather->block_table.seq_count) *
                          (g.table.beam_width ? uint64_t(g.table.beam_width) : 1) * gather->max_seq_len;
    KVX_NEED(gather->io.num_tokens == rows, "io.num_tokens is %u; sequences x beams x max_seq_len make it %llu.",
             gather->io.num_tokens, (unsigned long long)rows);
    g.k = array_of(gather->io.key);
    g.v = array_of(gather->io.value);
    g.max_seq_len = gather->max_seq_len;
    return run_gather(c, g, stream);
  });
}

kvx_status_t prefill_v1(const char* name, const kvx_cache_desc_t* cache, const kvx_write_desc_t* write,
                        int32_t tokens_per_seq, int io_dtype, void* stream) {
  return entry(name, [&]() -> kvx_status_t {
    KVX_NEED(write != nullptr, "write is NULL.");
    KVX_TRY(check_size("write", write->size, sizeof *write));
    KVX_NEED(tokens_per_seq > 0 && write->io.num_tokens % uint32_t(tokens_per_seq) == 0,
             "tokens_per_seq is %d; it must divide io.num_tokens %u.", tokens_per_seq, write->io.num_tokens);
    return write_v1(name, cache, write, io_dtype, stream);
  });
}

}  // namespace
}  // namespace kvx

using namespace kvx;

extern "C" {

kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t* cache) {
  return entry("kvx_validate_cache_desc()", [&]() -> kvx_status_t {
    kvx_cache_t c;
    KVX_TRY(translate_cache(cache, &c));
    PlaneParams plane[2];
    bool on_device;
    KVX_TRY(lower_cache(c, plane));
    return check_memory(c.memory, &on_device);
  });
}

#define KVX_CACHE const kvx_cache_desc_t* cache
#define KVX_WRITE_ENTRY(name, dtype)                                          \
  kvx_status_t name(KVX_CACHE, const kvx_write_desc_t* write, void* stream) { \
    return write_v1(#name "()", cache, write, dtype, stream);                 \
  }
#define KVX_PREFILL_ENTRY(name, dtype)                                                                \
  kvx_status_t name(KVX_CACHE, const kvx_write_desc_t* write, int32_t tokens_per_seq, void* stream) { \
    return prefill_v1(#name "()", cache, write, tokens_per_seq, dtype, stream);                       \
  }
#define KVX_GATHER_ENTRY(name, dtype)                                           \
  kvx_status_t name(KVX_CACHE, const kvx_gather_desc_t* gather, void* stream) { \
    return gather_v1(#name "()", cache, gather, dtype, stream);                 \
  }

KVX_WRITE_ENTRY(kvx_write_kv, KVX_DTYPE_INVALID)
KVX_WRITE_ENTRY(kvx_launch_write_kv, KVX_DTYPE_INVALID)
KVX_WRITE_ENTRY(kvx_launch_write_kv_f32, KVX_DTYPE_F32)
KVX_WRITE_ENTRY(kvx_launch_write_kv_f16, KVX_DTYPE_F16)
KVX_WRITE_ENTRY(kvx_launch_write_kv_bf16, KVX_DTYPE_BF16)
KVX_PREFILL_ENTRY(kvx_launch_write_kv_prefill, KVX_DTYPE_INVALID)
KVX_PREFILL_ENTRY(kvx_launch_write_kv_prefill_f32, KVX_DTYPE_F32)
KVX_PREFILL_ENTRY(kvx_launch_write_kv_prefill_f16, KVX_DTYPE_F16)
KVX_PREFILL_ENTRY(kvx_launch_write_kv_prefill_bf16, KVX_DTYPE_BF16)
KVX_GATHER_ENTRY(kvx_gather_kv, KVX_DTYPE_INVALID)
KVX_GATHER_ENTRY(kvx_launch_gather_kv, KVX_DTYPE_INVALID)
KVX_GATHER_ENTRY(kvx_launch_gather_kv_f32, KVX_DTYPE_F32)
KVX_GATHER_ENTRY(kvx_launch_gather_kv_f16, KVX_DTYPE_F16)
KVX_GATHER_ENTRY(kvx_launch_gather_kv_bf16, KVX_DTYPE_BF16)

}  // extern "C"
