/* Descriptors that lie. Whatever they say, a call answers with a status: it does not crash, does not hang, and does not
 * write a byte outside the buffers that were described. v1.2 says how long its buffers are, so there every field may
 * lie; v1 does not, so there only fields are changed whose change has to be refused. */
#define _POSIX_C_SOURCE 200809L /* alarm */
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"

/* All different, so that a field that is changed together with its equals changes one meaning. */
enum { NB = 5, BS = 4, H = 2, D = 8, T = 6, S = 3, M = 2, L = 7, ROUNDS = 200000, HANG_S = 30 };
#define AXES(...) \
  (const int64_t[5]) { __VA_ARGS__ }

static void on_alarm(int signal) { /* a hang is a failure with a name */
  static const char text[] = "hostile.c: a call did not come back; the last case is above\n0 passed, 1 failed\n";
  (void)signal;
  if (write(1, text, sizeof text - 1) < 0) _exit(3);
  _exit(2);
}

/* ------------------------------------------------------------------ buffers between canaries */

/* Under AddressSanitizer the allocator guards both sides itself, and sees reads too. */
#if defined(__SANITIZE_ADDRESS__)
enum { GUARD = 0 };
#else
enum { GUARD = 64 };
#endif

typedef struct Buffer {
  uint8_t *base, *data;
  size_t bytes;
  int index_bytes; /* 4 or 8: its entries are indices, which may lie as well */
  int is_input;    /* no call may write it */
  uint8_t* saved;  /* inputs: what it must still be after a call */
} Buffer;

static Buffer buffers[256];
static int num_buffers;

static void* new_buffer(size_t bytes, int is_input) {
  Buffer* b = &buffers[num_buffers++];
  b->base = malloc(bytes + 2 * GUARD);
  b->saved = malloc(bytes);
  if (!b->base || !b->saved) exit(3);
  b->data = b->base + GUARD;
  b->bytes = bytes;
  b->is_input = is_input;
  b->index_bytes = 0;
  memset(b->base, 0xC5, bytes + 2 * GUARD);
  for (size_t i = 0; i + 4 <= bytes; i += 4) put_number(b->data + i, KVX_DTYPE_F32, (float)(i % 100) + 1);
  return b->data;
}

static int buffers_are_intact(int first, int end) {
  static uint8_t canary[64];
  if (!canary[0]) memset(canary, 0xC5, sizeof canary);
  for (int i = first; i < end; i++) {
    Buffer* b = &buffers[i];
    if (memcmp(b->base, canary, GUARD) != 0 || memcmp(b->data + b->bytes, canary, GUARD) != 0) {
      memset(b->base, 0xC5, GUARD), memset(b->data + b->bytes, 0xC5, GUARD);
      printf("canary of buffer %d (%zu bytes) is gone\n", i, b->bytes);
      return 0;
    }
    if (b->is_input && memcmp(b->data, b->saved, b->bytes) != 0) {
      memcpy(b->data, b->saved, b->bytes);
      printf("input buffer %d (%zu bytes) was written\n", i, b->bytes);
      return 0;
    }
  }
  return 1;
}

/* ------------------------------------------------------------------ scenes: valid calls, with
 * lengths that are exact */

typedef struct Scene {
  kvx_cache_t cache;
  kvx_write_args_t write;
  kvx_gather_args_t gather;
  kvx_amax_args_t amax;
} Scene;

enum { PACKED_F32, CSR_S8, INLINE_S8, GROUPS_E2M1, POOLS_F16, SCALED_F8, GIVEN_S4, NUM_SCENES };
static const char* const scene_names[NUM_SCENES] = {
    "f32, packed table",      "s8 per token-head, page CSR", "s8 inline and fused, packed output",
    "e2m1 per group, ragged", "f16 pools, KV_OFFSETS",       "fp8 per block-head, s64 indices",
    "s4 with scales given"};
static Scene scenes[NUM_SCENES];
static int scene_buffers[NUM_SCENES + 1];

static int dtype_bits(int dtype) {
  return dtype == KVX_DTYPE_S4 || dtype == KVX_DTYPE_E2M1 ? 4 : 8 * dtype_bytes(dtype);
}

static kvx_array_t array_at(void* data, kvx_dtype_t dtype, uint32_t ndim, const int64_t* shape, const int64_t* stride) {
  kvx_array_t a;
  int64_t last = 0;
  memset(&a, 0, sizeof a);
  a.data = data;
  a.ndim = ndim;
  a.dtype = dtype;
  memcpy(a.shape, shape, ndim * sizeof *shape);
  for (int64_t i = (int64_t)ndim - 1, dense = 1; i >= 0; dense *= shape[i], i--) {
    a.stride[i] = stride ? stride[i] : dense;
    last += (shape[i] - 1) * a.stride[i];
  }
  a.data_bytes = (uint64_t)(((last + 1) * dtype_bits(dtype) + 7) / 8);
  return a;
}

static kvx_array_t new_array(int is_input, kvx_dtype_t dtype, uint32_t ndim, const int64_t* shape,
                             const int64_t* stride) {
  kvx_array_t a = array_at(NULL, dtype, ndim, shape, stride);
  a.data = new_buffer((size_t)a.data_bytes, is_input);
  return a;
}

static kvx_array_t new_indices(kvx_dtype_t dtype, uint32_t ndim, const int64_t* shape, const int64_t* values) {
  kvx_array_t a = new_array(1, dtype, ndim, shape, NULL);
  for (int i = 0; i < (int)a.data_bytes / dtype_bytes(dtype); i++)
    put_number((char*)a.data + i * dtype_bytes(dtype), dtype, (float)values[i]);
  buffers[num_buffers - 1].index_bytes = dtype_bytes(dtype);
  return a;
}

static kvx_plane_t new_plane(kvx_dtype_t dtype, kvx_layout_t layout, uint32_t ndim, const int64_t* shape,
                             const int64_t* stride) {
  kvx_plane_t p;
  memset(&p, 0, sizeof p);
  p.data = new_array(0, dtype, ndim, shape, stride);
  p.layout = layout;
  return p;
}

static const int64_t slot_values[T] = {9, -1, 0, 19, 14, 3}, length_values[S] = {6, 3, 0};

static Scene new_scene(kvx_dtype_t cache_dtype, kvx_dtype_t io_dtype, kvx_dtype_t index_dtype) {
  Scene s;
  memset(&s, 0, sizeof s);
  kvx_cache_t* c = &s.cache;
  c->version = s.write.version = s.gather.version = s.amax.version = KVX_ABI_VERSION;
  c->struct_bytes = sizeof *c, s.write.struct_bytes = sizeof s.write, s.gather.struct_bytes = sizeof s.gather,
  s.amax.struct_bytes = sizeof s.amax;
  s.gather.table.struct_bytes = sizeof s.gather.table;
  c->num_blocks = NB, c->block_size = BS, c->num_kv_heads = H, c->k_head_dim = c->v_head_dim = D;
  c->memory = s.amax.memory = KVX_MEMORY_HOST;
  c->device = s.amax.device = -1;
  if (cache_dtype != KVX_DTYPE_INVALID) {
    c->k = new_plane(cache_dtype, KVX_LAYOUT_BLOCK_NHD, 4, AXES(NB, BS, H, D), NULL);
    c->v = new_plane(cache_dtype, KVX_LAYOUT_BLOCK_HND, 4, AXES(NB, H, BS, D), NULL);
  }
  s.write.k = new_array(1, io_dtype, 3, AXES(T, H, D), NULL);
  s.write.v = new_array(1, io_dtype, 3, AXES(T, H, D), AXES(40, 20, 2));
  s.write.slots = new_indices(index_dtype, 1, AXES(T), slot_values);
  s.write.invalid_slot = -1;
  s.gather.k = new_array(0, io_dtype, 3, AXES(S * L, H, D), NULL);
  s.gather.v = new_array(0, io_dtype, 4, AXES(S, L, H, D), AXES(280, 40, 20, 2));
  s.gather.max_seq_len = L;
  s.gather.table.format = KVX_BLOCK_TABLE_PACKED;
  s.gather.table.indices = new_indices(index_dtype, 2, AXES(S, M), (const int64_t[S * M]){2, 4, 0, 1, 3, 0});
  s.gather.table.seq_lens = new_indices(index_dtype, 1, AXES(S), length_values);
  s.amax.x = s.write.k;
  s.amax.slots = s.write.slots;
  s.amax.invalid_slot = -1;
  s.amax.granularity = KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
  s.amax.block_size = BS;
  s.amax.amax = new_array(0, KVX_DTYPE_F32, 2, AXES(NB, H), NULL);
  return s;
}

static void add_scales(kvx_plane_t* p, int is_input, kvx_scale_granularity_t granularity, kvx_dtype_t dtype,
                       uint32_t ndim, const int64_t* shape) {
  p->granularity = granularity;
  p->scale = new_array(is_input, dtype, ndim, shape, NULL);
}

/* PAGE_CSR and packed output: pages 2 4 | 0 | none, rows 0..6, 6..9, 9..9. */
static void use_pages(Scene* s, kvx_dtype_t dtype) {
  s->gather.table.format = KVX_BLOCK_TABLE_PAGE_CSR;
  s->gather.table.indices = new_indices(dtype, 1, AXES(3), AXES(2, 4, 0));
  s->gather.table.indptr = new_indices(dtype, 1, AXES(S + 1), AXES(0, 2, 3, 3));
  s->gather.table.last_page_len = new_indices(dtype, 1, AXES(S), AXES(2, 3, 0));
  memset(&s->gather.table.seq_lens, 0, sizeof s->gather.table.seq_lens);
}

static void use_packed_output(Scene* s, kvx_dtype_t dtype) {
  s->gather.k = new_array(0, (kvx_dtype_t)s->gather.k.dtype, 3, AXES(9, H, D), NULL);
  s->gather.v = new_array(0, (kvx_dtype_t)s->gather.v.dtype, 3, AXES(9, H, D), NULL);
  s->gather.cu_seqlens = new_indices(dtype, 1, AXES(S + 1), AXES(0, 6, 9, 9));
}

static float tensor_scale = 2.0f;

static Scene build_scene(int kind) {
  Scene s;
  switch (kind) {
    case PACKED_F32: return new_scene(KVX_DTYPE_F32, KVX_DTYPE_F32, KVX_DTYPE_S32);
    case CSR_S8:
      s = new_scene(KVX_DTYPE_S8, KVX_DTYPE_F16, KVX_DTYPE_S32);
      add_scales(&s.cache.k, 0, KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD, KVX_DTYPE_F32, 3, AXES(NB, BS, H));
      add_scales(&s.cache.v, 0, KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD, KVX_DTYPE_BF16, 3, AXES(NB, BS, H));
      use_pages(&s, KVX_DTYPE_S64);
      s.amax.granularity = KVX_SCALE_GRANULARITY_PER_HEAD;
      s.amax.amax = new_array(0, KVX_DTYPE_F32, 1, AXES(H), NULL);
      memset(&s.amax.slots, 0, sizeof s.amax.slots); /* no block axis, no slots */
      return s;
    case INLINE_S8: { /* cells of 8 elements and their scale, K and V side by side: 12 + 12 bytes */
      const int64_t stride[4] = {BS * H * 24, H * 24, 24, 1};
      s = new_scene(KVX_DTYPE_INVALID, KVX_DTYPE_F32, KVX_DTYPE_S64);
      uint8_t* cells = new_buffer(NB * BS * H * 24, 0);
      kvx_plane_t* planes[] = {&s.cache.k, &s.cache.v};
      for (int i = 0; i < 2; i++) {
        planes[i]->data = array_at(cells + 12 * i, KVX_DTYPE_S8, 4, AXES(NB, BS, H, D), stride);
        planes[i]->data.data_bytes = NB * BS * H * 24 - 12; /* from its first cell to the end of its last */
        planes[i]->layout = KVX_LAYOUT_BLOCK_NHD;
        planes[i]->granularity = KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD;
        planes[i]->flags = KVX_PLANE_FLAG_SCALE_INLINE;
        planes[i]->scale_offset = 8;
        planes[i]->scale_dtype = KVX_DTYPE_F32;
      }
      use_pages(&s, KVX_DTYPE_S32);
      use_packed_output(&s, KVX_DTYPE_S64);
      s.amax.granularity = KVX_SCALE_GRANULARITY_PER_TENSOR;
      s.amax.amax = new_array(0, KVX_DTYPE_F32, 0, AXES(0), NULL);
      memset(&s.amax.slots, 0, sizeof s.amax.slots);
      return s;
    }
    case GROUPS_E2M1:
      s = new_scene(KVX_DTYPE_E2M1, KVX_DTYPE_BF16, KVX_DTYPE_S32);
      s.cache.k = new_plane(KVX_DTYPE_E2M1, KVX_LAYOUT_BLOCK_HND_PACKED, 5, AXES(NB, H, D / 4, BS, 4), NULL);
      add_scales(&s.cache.k, 0, KVX_SCALE_GRANULARITY_PER_GROUP, KVX_DTYPE_F8_E4M3, 4, AXES(NB, BS, H, D / 2));
      add_scales(&s.cache.v, 0, KVX_SCALE_GRANULARITY_PER_GROUP, KVX_DTYPE_E8M0, 4, AXES(NB, BS, H, D / 4));
      s.cache.k.group_size = 2, s.cache.v.group_size = 4;
      s.cache.k.tensor_scale = s.cache.v.tensor_scale = &tensor_scale;
      s.gather.table.format = KVX_BLOCK_TABLE_RAGGED;
      s.gather.table.indices = new_indices(KVX_DTYPE_S32, 1, AXES(9), (const int64_t[]){2, 2, 2, 2, 4, 4, 0, 0, 0});
      s.gather.table.indptr = new_indices(KVX_DTYPE_S64, 1, AXES(S + 1), AXES(0, 6, 9, 9));
      return s;
    case POOLS_F16:
      s = new_scene(KVX_DTYPE_F16, KVX_DTYPE_F16, KVX_DTYPE_S32);
      s.cache.bytes_per_block = BS * H * D * 2;
      s.cache.primary_bytes = NB * s.cache.bytes_per_block, s.cache.secondary_bytes = 3 * s.cache.bytes_per_block;
      s.cache.secondary_blocks = 3;
      s.cache.pool_primary = new_buffer((size_t)s.cache.primary_bytes, 1);
      s.cache.pool_secondary = new_buffer((size_t)s.cache.secondary_bytes, 1);
      s.gather.table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
      s.gather.table.beam_width = 2;
      s.gather.table.indices =
          new_indices(KVX_DTYPE_S32, 4, AXES(S, 2, 2, M), (const int64_t[S * 2 * 2 * M]){0, 1, 2, 3, 4, 0, 1, 2, 3, 4});
      ((int32_t*)s.gather.table.indices.data)[1] = -2147483647; /* block 1 of the secondary pool */
      ((int32_t*)s.gather.table.indices.data)[2] = -1;
      s.gather.k = new_array(0, KVX_DTYPE_F16, 3, AXES(S * 2 * L, H, D), NULL);
      s.gather.v = new_array(0, KVX_DTYPE_F16, 4, AXES(S * 2, L, H, D), NULL);
      return s;
    case SCALED_F8:
      s = new_scene(KVX_DTYPE_F8_E4M3, KVX_DTYPE_F32, KVX_DTYPE_S64);
      s.cache.k =
          new_plane(KVX_DTYPE_F8_E5M2, KVX_LAYOUT_BLOCK_CUSTOM, 4, AXES(NB, BS, H, D), AXES(BS * H * D, 1, BS * D, BS));
      add_scales(&s.cache.k, 1, KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD, KVX_DTYPE_F32, 2, AXES(NB, H));
      add_scales(&s.cache.v, 1, KVX_SCALE_GRANULARITY_PER_HEAD, KVX_DTYPE_F16, 1, AXES(H));
      s.amax.granularity = KVX_SCALE_GRANULARITY_PER_BLOCK;
      s.amax.amax = new_array(0, KVX_DTYPE_F32, 1, AXES(NB), NULL);
      use_packed_output(&s, KVX_DTYPE_S32);
      return s;
    default:
      s = new_scene(KVX_DTYPE_S4, KVX_DTYPE_F32, KVX_DTYPE_S32);
      add_scales(&s.cache.k, 0, KVX_SCALE_GRANULARITY_PER_GROUP, KVX_DTYPE_F16, 4, AXES(NB, BS, H, D / 4));
      add_scales(&s.cache.v, 0, KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD, KVX_DTYPE_F32, 3, AXES(NB, BS, H));
      s.cache.k.group_size = 4;
      s.write.k_token_scale = new_array(1, KVX_DTYPE_F32, 3, AXES(T, H, D / 4), NULL);
      s.write.v_token_scale = new_array(1, KVX_DTYPE_F32, 2, AXES(T, H), NULL);
      return s;
  }
}

/* ------------------------------------------------------------------ the fields of a scene */

enum { PLAIN, LENGTH, MEMORY };
typedef struct Field {
  char name[48];
  size_t offset;
  int bytes, kind;
} Field;

static Field fields[512];
static int num_fields;

static void add_field(const char* group, const char* name, size_t offset, int bytes, int kind) {
  Field* f = &fields[num_fields++];
  print_to(f->name, sizeof f->name, "%s.%s", group, name);
  f->offset = offset, f->bytes = bytes, f->kind = kind;
}

static void add_array_fields(const char* group, size_t at) {
  char name[16];
  for (int i = 0; i < 5; i++) {
    print_to(name, sizeof name, "shape[%d]", i);
    add_field(group, name, at + offsetof(kvx_array_t, shape) + 8 * (size_t)i, 8, PLAIN);
    print_to(name, sizeof name, "stride[%d]", i);
    add_field(group, name, at + offsetof(kvx_array_t, stride) + 8 * (size_t)i, 8, PLAIN);
  }
  add_field(group, "ndim", at + offsetof(kvx_array_t, ndim), 4, PLAIN);
  add_field(group, "dtype", at + offsetof(kvx_array_t, dtype), 4, PLAIN);
  add_field(group, "data_bytes", at + offsetof(kvx_array_t, data_bytes), 8, LENGTH);
}

#define FIELD(type, part, at, field, kind) \
  add_field(part, #field, (at) + offsetof(type, field), (int)sizeof(((type*)0)->field), kind)
#define ARRAY(object, field) add_array_fields(#object "." #field, offsetof(Scene, object.field))

static void add_plane_fields(const char* group, size_t at) {
  FIELD(kvx_plane_t, group, at, layout, PLAIN);
  FIELD(kvx_plane_t, group, at, granularity, PLAIN);
  FIELD(kvx_plane_t, group, at, group_size, PLAIN);
  FIELD(kvx_plane_t, group, at, flags, PLAIN);
  FIELD(kvx_plane_t, group, at, scale_offset, PLAIN);
  FIELD(kvx_plane_t, group, at, scale_dtype, PLAIN);
}

static void list_fields(void) {
  const size_t c = offsetof(Scene, cache), w = offsetof(Scene, write), g = offsetof(Scene, gather),
               a = offsetof(Scene, amax);
  FIELD(kvx_cache_t, "cache", c, version, PLAIN);
  FIELD(kvx_cache_t, "cache", c, struct_bytes, PLAIN);
  FIELD(kvx_cache_t, "cache", c, flags, PLAIN);
  FIELD(kvx_cache_t, "cache", c, num_blocks, PLAIN);
  FIELD(kvx_cache_t, "cache", c, block_size, PLAIN);
  FIELD(kvx_cache_t, "cache", c, num_kv_heads, PLAIN);
  FIELD(kvx_cache_t, "cache", c, k_head_dim, PLAIN);
  FIELD(kvx_cache_t, "cache", c, v_head_dim, PLAIN);
  FIELD(kvx_cache_t, "cache", c, memory, MEMORY);
  FIELD(kvx_cache_t, "cache", c, device, PLAIN);
  FIELD(kvx_cache_t, "cache", c, bytes_per_block, PLAIN);
  FIELD(kvx_cache_t, "cache", c, secondary_blocks, PLAIN);
  FIELD(kvx_cache_t, "cache", c, primary_bytes, LENGTH);
  FIELD(kvx_cache_t, "cache", c, secondary_bytes, LENGTH);
  ARRAY(cache, k.data);
  ARRAY(cache, k.scale);
  ARRAY(cache, v.data);
  ARRAY(cache, v.scale);
  add_plane_fields("cache.k", offsetof(Scene, cache.k));
  add_plane_fields("cache.v", offsetof(Scene, cache.v));
  FIELD(kvx_write_args_t, "write", w, version, PLAIN);
  FIELD(kvx_write_args_t, "write", w, struct_bytes, PLAIN);
  FIELD(kvx_write_args_t, "write", w, flags, PLAIN);
  FIELD(kvx_write_args_t, "write", w, invalid_slot, PLAIN);
  ARRAY(write, k);
  ARRAY(write, v);
  ARRAY(write, slots);
  ARRAY(write, k_token_scale);
  ARRAY(write, v_token_scale);
  FIELD(kvx_gather_args_t, "gather", g, version, PLAIN);
  FIELD(kvx_gather_args_t, "gather", g, struct_bytes, PLAIN);
  FIELD(kvx_gather_args_t, "gather", g, flags, PLAIN);
  FIELD(kvx_gather_args_t, "gather", g, max_seq_len, PLAIN);
  FIELD(kvx_gather_args_t, "gather", g, table.struct_bytes, PLAIN);
  FIELD(kvx_gather_args_t, "gather", g, table.format, PLAIN);
  FIELD(kvx_gather_args_t, "gather", g, table.beam_width, PLAIN);
  ARRAY(gather, k);
  ARRAY(gather, v);
  ARRAY(gather, table.indices);
  ARRAY(gather, table.indptr);
  ARRAY(gather, table.last_page_len);
  ARRAY(gather, table.seq_lens);
  ARRAY(gather, cu_seqlens);
  FIELD(kvx_amax_args_t, "amax", a, version, PLAIN);
  FIELD(kvx_amax_args_t, "amax", a, struct_bytes, PLAIN);
  FIELD(kvx_amax_args_t, "amax", a, flags, PLAIN);
  FIELD(kvx_amax_args_t, "amax", a, invalid_slot, PLAIN);
  FIELD(kvx_amax_args_t, "amax", a, block_size, PLAIN);
  FIELD(kvx_amax_args_t, "amax", a, granularity, PLAIN);
  FIELD(kvx_amax_args_t, "amax", a, memory, MEMORY);
  FIELD(kvx_amax_args_t, "amax", a, device, PLAIN);
  ARRAY(amax, x);
  ARRAY(amax, slots);
  ARRAY(amax, amax);
}

static int64_t get_field(const void* object, size_t offset, int bytes) {
  int64_t wide;
  int32_t narrow;
  if (bytes == 8) return memcpy(&wide, (const char*)object + offset, 8), wide;
  return memcpy(&narrow, (const char*)object + offset, 4), narrow;
}

static void set_field(void* object, size_t offset, int bytes, int64_t value) {
  const int32_t narrow = (int32_t)(uint32_t)(uint64_t)value;
  if (bytes == 8) memcpy((char*)object + offset, &value, 8);
  else memcpy((char*)object + offset, &narrow, 4);
}

static uint64_t random_state = 0x9E3779B97F4A7C15u;
static uint64_t random_bits(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}
static int random_below(int n) { return (int)(random_bits() >> 33) % n; }

static int64_t hostile_value(int i, int64_t old) {
  const uint64_t o = (uint64_t)old; /* unsigned: the neighbours of the ends wrap */
  switch (i) {
    case 0: return 0;
    case 1: return 1;
    case 2: return -1;
    case 3: return INT64_MIN;
    case 4: return INT64_MAX;
    case 5: return (int64_t)1 << 31;
    case 6: return (int64_t)0xffffffff;
    case 7: return (int64_t)1 << 62;
    case 8: return (int64_t)(o + 1);
    case 9: return (int64_t)(o - 1);
    case 10: return (int64_t)(o * 2);
    case 11: return old / 2;
    case 12: return INT32_MAX;
    case 13: return (int64_t)1 << 40;
    case 14: return (int64_t)1 << 61;
    default: return random_below(24);
  }
}
enum { NUM_VALUES = 16 };

/* ------------------------------------------------------------------ pseudo-random lies */

static int accepted[3];

/* Validation and the call agree; only what stands in the tables may still be out of range. */
static int agree(kvx_status_t validated, kvx_status_t ran) {
  return ran == validated || (validated == KVX_STATUS_OK && ran == KVX_STATUS_OUT_OF_RANGE);
}

static int run_scene(Scene* s) {
  const kvx_status_t cache_says = kvx_validate_cache(&s->cache);
  const kvx_status_t can_write = kvx_validate_write(&s->cache, &s->write),
                     wrote = kvx_write(&s->cache, &s->write, NULL);
  const kvx_status_t can_gather = kvx_validate_gather(&s->cache, &s->gather),
                     gathered = kvx_gather(&s->cache, &s->gather, NULL);
  const kvx_status_t measured = kvx_amax(&s->amax, NULL);
  accepted[0] += wrote == KVX_STATUS_OK, accepted[1] += gathered == KVX_STATUS_OK,
      accepted[2] += measured == KVX_STATUS_OK;
  return agree(can_write, wrote) && agree(can_gather, gathered) &&
         (cache_says == KVX_STATUS_OK || (can_write != KVX_STATUS_OK && can_gather != KVX_STATUS_OK));
}

static void lie(Scene* s, char* story, size_t story_bytes) {
  const Field* f = &fields[random_below(num_fields)];
  const int64_t old = get_field(s, f->offset, f->bytes);
  int64_t value = hostile_value(random_below(NUM_VALUES), old);
  if (f->kind == LENGTH) { /* only shorter, and not 0: that would mean unknown */
    if (old <= 1) return;
    value = 1 + (int64_t)(random_bits() % (uint64_t)old);
  }
  if (f->kind == MEMORY && (value == KVX_MEMORY_DEVICE || value == KVX_MEMORY_UNIFIED))
    value = 77; /* these pointers are not the device's */
  set_field(s, f->offset, f->bytes, value);
  size_t used = strlen(story);
  print_to(story + used, story_bytes - used, " %s=%lld", f->name, (long long)value);
  if (f->kind != PLAIN || f->bytes != 8 || old == 0 || random_below(2)) return;
  for (int i = 0; i < num_fields; i++) /* everywhere it is said: lies that agree get further */
    if (fields[i].kind == PLAIN && fields[i].bytes == 8 && get_field(s, fields[i].offset, 8) == old)
      set_field(s, fields[i].offset, 8, value);
  used = strlen(story);
  print_to(story + used, story_bytes - used, " (everywhere)");
}

static void test_random_lies(void) {
  static char story[512];
  int shown = 0;
  printf("random lies\n"), fflush(stdout);
  check_case = story;
  for (int round = 0; round < ROUNDS && shown < 20; round++) {
    const int kind = round % NUM_SCENES;
    const int first = scene_buffers[kind], end = scene_buffers[kind + 1];
    Scene s = scenes[kind];
    print_to(story, sizeof story, "round %d, %s:", round, scene_names[kind]);
    for (int n = 1 + random_below(4); n > 0; n--) lie(&s, story, sizeof story);
    Buffer* b = &buffers[first + random_below(end - first)];
    if (b->index_bytes && random_below(2)) { /* an entry of a table lies too */
      const size_t at = (size_t)random_below((int)b->bytes / b->index_bytes) * (size_t)b->index_bytes;
      set_field(b->data, at, b->index_bytes,
                hostile_value(random_below(NUM_VALUES), get_field(b->data, at, b->index_bytes)));
    } else {
      b = NULL;
    }
    uint8_t honest[1024];
    if (b) memcpy(honest, b->saved, b->bytes), memcpy(b->saved, b->data, b->bytes);
    const int sane = run_scene(&s);
    if (!check_counts(sane && buffers_are_intact(first, end)))
      printf("%s (%s)\n    last error: %s\n", story, sane ? "memory" : "statuses disagree", kvx_last_error()), shown++;
    if (b) memcpy(b->saved, honest, b->bytes), memcpy(b->data, honest, b->bytes);
    if (round % 5000 == 0) alarm(HANG_S);
  }
  /* A test whose lies are all caught at the door tests the door alone. */
  for (int i = 0; i < 3; i++) CHECK(accepted[i] > ROUNDS / 20);
  printf("%d rounds; accepted: %d writes, %d gathers, %d amaxes\n", ROUNDS, accepted[0], accepted[1], accepted[2]);
  check_case = "";
}

/* ------------------------------------------------------------------ directed lies */

static void test_honest(void) {
  for (int i = 0; i < NUM_SCENES; i++) {
    Scene* s = &scenes[i];
    check_case = scene_names[i];
    CHECK_OK(kvx_validate_cache(&s->cache));
    CHECK_OK(kvx_validate_write(&s->cache, &s->write));
    CHECK_OK(kvx_write(&s->cache, &s->write, NULL));
    CHECK_OK(kvx_validate_gather(&s->cache, &s->gather));
    CHECK_OK(kvx_gather(&s->cache, &s->gather, NULL));
    CHECK_OK(kvx_amax(&s->amax, NULL));
    CHECK(buffers_are_intact(scene_buffers[i], scene_buffers[i + 1]));
  }
  check_case = "";
}

/* Every length in every scene is exact, so one byte less is one byte too few for some call. */
static void test_short_by_one(void) {
  static char story[128];
  check_case = story;
  for (int i = 0; i < NUM_SCENES; i++)
    for (int n = 0; n < num_fields; n++) {
      Scene s = scenes[i];
      if (fields[n].kind != LENGTH || get_field(&s, fields[n].offset, 8) == 0) continue;
      set_field(&s, fields[n].offset, 8, get_field(&s, fields[n].offset, 8) - 1);
      print_to(story, sizeof story, "%s: %s is short by one byte", scene_names[i], fields[n].name);
      CHECK(kvx_write(&s.cache, &s.write, NULL) == KVX_STATUS_INVALID_ARGUMENT ||
            kvx_gather(&s.cache, &s.gather, NULL) == KVX_STATUS_INVALID_ARGUMENT ||
            kvx_amax(&s.amax, NULL) == KVX_STATUS_INVALID_ARGUMENT);
      CHECK(buffers_are_intact(scene_buffers[i], scene_buffers[i + 1]));
    }
  check_case = "";
}

static void test_strides(void) {
  Scene s = scenes[PACKED_F32];
  kvx_cache_t* c = &s.cache;
  static const int64_t huge[] = {INT64_MAX,        (int64_t)1 << 62, (int64_t)1 << 61,
                                 (int64_t)1 << 60, (int64_t)1 << 56, ((int64_t)1 << 62) - 1};
  static const int64_t negative[] = {-1, -64, INT64_MIN, -((int64_t)1 << 62)};
  for (int axis = 0; axis < 4; axis++) {
    for (int i = 0; i < 6; i++) REFUSES(c->k.data.stride[axis], huge[i], kvx_validate_cache(c));
    for (int i = 0; i < 4; i++) REFUSES(c->v.data.stride[axis], negative[i], kvx_validate_cache(c));
    REFUSES(c->k.data.stride[axis], 0, kvx_validate_cache(c));
  }
  /* Unknown lengths leave the arithmetic alone to notice. */
  c->k.data.data_bytes = c->v.data.data_bytes = 0;
  for (int axis = 0; axis < 4; axis++)
    for (int i = 0; i < 6; i++) REFUSES(c->k.data.stride[axis], huge[i], kvx_validate_cache(c));
  REFUSES(c->k.data.stride[2], D - 1, kvx_validate_cache(c));     /* heads share an element */
  REFUSES(c->k.data.stride[1], H * D - 1, kvx_validate_cache(c)); /* tokens do */
  REFUSES(c->k.data.stride[0], BS * H * D - 1, kvx_validate_cache(c));
  REFUSES(c->k.data.stride[1], D, kvx_validate_cache(c)); /* as far apart as heads are */
  s = scenes[PACKED_F32];
  for (int axis = 0; axis < 3; axis++) {
    for (int i = 0; i < 6; i++) REFUSES(s.write.k.stride[axis], huge[i], kvx_write(c, &s.write, NULL));
    for (int i = 0; i < 4; i++) REFUSES(s.write.v.stride[axis], negative[i], kvx_write(c, &s.write, NULL));
    for (int i = 0; i < 6; i++) REFUSES(s.gather.k.stride[axis], huge[i], kvx_gather(c, &s.gather, NULL));
    for (int i = 0; i < 4; i++) REFUSES(s.gather.v.stride[axis], negative[i], kvx_gather(c, &s.gather, NULL));
    REFUSES(s.gather.k.stride[axis], 0, kvx_gather(c, &s.gather, NULL)); /* output rows share an address */
  }
  REFUSES(s.gather.k.stride[0], H * D - 1, kvx_gather(c, &s.gather, NULL));
  for (int i = 0; i < 6; i++) REFUSES(s.write.slots.stride[0], huge[i], kvx_write(c, &s.write, NULL));
  for (int i = 0; i < 4; i++) REFUSES(s.write.slots.stride[0], negative[i], kvx_write(c, &s.write, NULL));
  for (int i = 0; i < 6; i++) REFUSES(s.gather.table.indices.stride[0], huge[i], kvx_gather(c, &s.gather, NULL));
  for (int i = 0; i < 4; i++) REFUSES(s.gather.table.indices.stride[1], negative[i], kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.seq_lens.stride[0], 2, kvx_gather(c, &s.gather, NULL));
}

/* Numbers whose product is small again after it has wrapped. */
static void test_products(void) {
  Scene s = scenes[PACKED_F32];
  kvx_cache_t* c = &s.cache;
  c->k.data.data_bytes = c->v.data.data_bytes = 0;
  c->num_blocks = c->k.data.shape[0] = c->v.data.shape[0] = (int64_t)1 << 62; /* x block_size 4 = 2^64 */
  c->k.data.stride[0] = c->v.data.stride[0] = (int64_t)1 << 32;
  CHECK_INVALID(kvx_validate_cache(c));
  c->num_blocks = c->k.data.shape[0] = c->v.data.shape[0] = ((int64_t)1 << 32) + 1; /* x stride 2^32 = 2^64 + 2^32 */
  CHECK_INVALID(kvx_validate_cache(c));
  s = scenes[PACKED_F32];
  s.gather.max_seq_len = (int64_t)1 << 62;
  CHECK_INVALID(kvx_gather(c, &s.gather, NULL));
  s.gather.max_seq_len = ((int64_t)1 << 62) + L; /* x 4 sequences would be 28 */
  CHECK_INVALID(kvx_gather(c, &s.gather, NULL));
  s = scenes[POOLS_F16];
  REFUSES(s.cache.bytes_per_block, UINT64_MAX, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.cache.bytes_per_block, (uint64_t)1 << 63, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.cache.secondary_blocks, INT64_MAX, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.cache.secondary_blocks, 4, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.beam_width, (int64_t)1 << 32 | 2,
          kvx_gather(c, &s.gather, NULL)); /* 2, to who looks at 32 bits */
  REFUSES(s.gather.table.indices.shape[0], (int64_t)1 << 61, kvx_gather(c, &s.gather, NULL));
  REFUSES(c->k_head_dim, ((int64_t)1 << 32) + D, kvx_validate_cache(c));
}

/* A row range whose length and end wrap to numbers that look right: it once wrote in front of the outputs. */
static void test_wrapping_rows(void) {
  static int64_t rows[S + 1] = {INT64_MAX, INT64_MIN, 0, 0};
  Scene s = scenes[INLINE_S8];
  s.gather.cu_seqlens.data = rows;
  CHECK_STATUS(kvx_gather(&s.cache, &s.gather, NULL), KVX_STATUS_OUT_OF_RANGE);
  static int64_t pages[S + 1] = {INT64_MIN, INT64_MAX, 3, 3};
  s = scenes[INLINE_S8];
  s.gather.table.indptr.data = pages, s.gather.table.indptr.dtype = KVX_DTYPE_S64,
  s.gather.table.indptr.data_bytes = sizeof pages;
  CHECK_STATUS(kvx_gather(&s.cache, &s.gather, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK(buffers_are_intact(scene_buffers[INLINE_S8], scene_buffers[INLINE_S8 + 1]));
}

/* Heads that are all one: the call once asked for 4 TB, and the process ended. And an index that the call itself
 * writes. */
static void test_repeats(void) {
  Scene s = scenes[CSR_S8];
  s.amax.x.shape[1] = s.amax.amax.shape[0] = (int64_t)1 << 40, s.amax.x.stride[1] = s.amax.amax.stride[0] = 0;
  CHECK_INVALID(kvx_amax(&s.amax, NULL));
  s = scenes[PACKED_F32];
  s.write.slots.data = s.cache.k.data.data;
  CHECK_INVALID(kvx_write(&s.cache, &s.write, NULL));
  CHECK_ERROR_HAS("share memory");
}

/* K and V in one buffer. */
static void test_shared_planes(void) {
  static float store[4096];
  Scene s = scenes[PACKED_F32];
  kvx_cache_t* c = &s.cache;
  const int64_t shape[] = {NB, BS, H, D}, fused[] = {2 * BS * H * D, 2 * H * D, 2 * D, 1};
  c->v.layout = KVX_LAYOUT_BLOCK_NHD;
  c->k.data = array_at(store, KVX_DTYPE_F32, 4, shape, fused);
  c->v.data = array_at(store + D, KVX_DTYPE_F32, 4, shape, fused);
  CHECK_OK(kvx_validate_cache(c));
  REFUSES(c->v.data.data, store, kvx_validate_cache(c));
  REFUSES(c->v.data.data, store + 1, kvx_validate_cache(c));
  REFUSES(c->v.data.data, store + D - 1, kvx_validate_cache(c));
  REFUSES(c->v.data.data, store + D + 1, kvx_validate_cache(c)); /* V ends in the next K */
  REFUSES(c->v.data.data, store + 2 * D, kvx_validate_cache(c)); /* V of head 0 is K of head 1 */
  REFUSES(c->k.data.data, store + D, kvx_validate_cache(c));
  REFUSES(c->v.data.stride[0], 2 * BS * H * D + 16, kvx_validate_cache(c)); /* in step at first, out of it later */
  c->v_head_dim = c->v.data.shape[3] = s.write.v.shape[2] = D / 2;
  CHECK_OK(kvx_validate_cache(c));
  REFUSES(c->v.data.data, store + D - 1, kvx_validate_cache(c));
  c->v_head_dim = c->v.data.shape[3] = D;

  check_case = "elements apart, V wider than K";
  /* K has elements 0..3 of 8, V has 4, 6, 8, 10: its last two stand in the next head. */
  c->k_head_dim = c->v_head_dim = 4;
  c->k.data = array_at(store, KVX_DTYPE_F32, 4, AXES(NB, BS, H, 4), AXES(BS * H * 8, H * 8, 8, 1));
  c->v.data = array_at(store + 4, KVX_DTYPE_F32, 4, AXES(NB, BS, H, 4), AXES(BS * H * 8, H * 8, 8, 2));
  CHECK_INVALID(kvx_validate_cache(c));
  c->k.data.stride[3] = 2, c->v.data.stride[3] = 1,
  c->v.data.data = store + 3; /* and the other way round: V's 3..6 meet K's 4 and 6 */
  CHECK_INVALID(kvx_validate_cache(c));

  check_case = "a pool beside data pointers";
  /* With KV_OFFSETS the planes may be anywhere, since gathers use the pools. Writes use the planes. */
  s = scenes[POOLS_F16];
  s.cache.v.data.data = s.cache.k.data.data;
  CHECK_OK(kvx_validate_gather(&s.cache, &s.gather));
  CHECK_INVALID(kvx_validate_write(&s.cache, &s.write));
  check_case = "";
}

static void test_inline_scales(void) {
  Scene s = scenes[INLINE_S8];
  kvx_cache_t* c = &s.cache;
  static const int64_t wrong[] = {0, 1, 4, 7, -8, 9, 12, INT64_MAX, INT64_MIN, (int64_t)1 << 32};
  for (int i = 0; i < 10; i++)
    REFUSES(c->k.scale_offset, wrong[i], kvx_validate_cache(c)); /* in the elements, not aligned, in V, nowhere */
  REFUSES(c->k.scale_dtype, KVX_DTYPE_S8, kvx_validate_cache(c));
  REFUSES(c->k.flags, 3, kvx_validate_cache(c));
  REFUSES(c->k.granularity, KVX_SCALE_GRANULARITY_PER_BLOCK, kvx_validate_cache(c));
  REFUSES(c->k.data.stride[2], 8, kvx_validate_cache(c)); /* the scale would be the next head's first elements */
  c->k.granularity = KVX_SCALE_GRANULARITY_PER_GROUP;
  REFUSES(c->k.group_size, 4, kvx_validate_cache(c)); /* two scales, where there is room for one before V */
  static int8_t cells[4096];
  s = scenes[INLINE_S8];
  /* Heads 12 apart and tokens 20 apart: the elements miss each other, but head 1's scale is at 20..23, where token 1
   * begins. */
  c->k.data = array_at(cells, KVX_DTYPE_S8, 4, AXES(NB, BS, H, D), AXES(400, 20, 12, 1));
  c->k.data.data_bytes = 2400;
  c->v.data = array_at(cells + 2400, KVX_DTYPE_S8, 4, AXES(NB, BS, H, D), AXES(BS * H * 12, H * 12, 12, 1));
  c->v.data.data_bytes = NB * BS * H * 12;
  CHECK_INVALID(kvx_validate_cache(c));
  c->k.data.stride[1] = 24;
  CHECK_OK(kvx_validate_cache(c));
}

static void test_disagreement(void) {
  Scene s = scenes[PACKED_F32];
  kvx_cache_t* c = &s.cache;
  REFUSES(c->num_blocks, NB + 1, kvx_validate_cache(c));
  REFUSES(c->block_size, BS - 1, kvx_validate_cache(c));
  REFUSES(c->num_kv_heads, H + 1, kvx_validate_cache(c));
  REFUSES(c->k_head_dim, D / 2, kvx_validate_cache(c));
  REFUSES(c->v_head_dim, D * 2, kvx_validate_cache(c));
  REFUSES(c->k.layout, KVX_LAYOUT_BLOCK_HND_PACKED, kvx_validate_cache(c)); /* five axes, four given */
  REFUSES(c->k.data.ndim, 0xffffffffu, kvx_validate_cache(c));
  REFUSES(c->k.granularity, KVX_SCALE_GRANULARITY_PER_HEAD, kvx_validate_cache(c));
  REFUSES(c->k.flags, KVX_PLANE_FLAG_SCALE_INLINE, kvx_validate_cache(c));
  REFUSES(s.write.k.shape[0], T - 1, kvx_write(c, &s.write, NULL));
  REFUSES(s.write.v.shape[1], H - 1, kvx_write(c, &s.write, NULL));
  REFUSES(s.write.slots.shape[0], T - 1, kvx_write(c, &s.write, NULL));
  REFUSES(s.write.k.dtype, KVX_DTYPE_F8_E4M3, kvx_write(c, &s.write, NULL));
  REFUSES(s.write.slots.dtype, KVX_DTYPE_U64, kvx_write(c, &s.write, NULL));
  REFUSES(s.write.k_token_scale, scenes[GIVEN_S4].write.k_token_scale,
          kvx_write(c, &s.write, NULL)); /* scales for a cache that has none */
  REFUSES(s.gather.max_seq_len, L + 1, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.max_seq_len, 0, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.max_seq_len, -1, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.seq_lens.shape[0], S - 1, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.format, KVX_BLOCK_TABLE_RAGGED, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.format, KVX_BLOCK_TABLE_KV_OFFSETS, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.format, 5, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.indptr, s.gather.table.seq_lens, kvx_gather(c, &s.gather, NULL));
  REFUSES(s.gather.table.beam_width, 2, kvx_gather(c, &s.gather, NULL));
  s = scenes[GROUPS_E2M1];
  REFUSES(c->k.group_size, 3, kvx_validate_cache(c));
  REFUSES(c->k.group_size, 16, kvx_validate_cache(c));
  REFUSES(c->k.group_size, 0xffffffffu, kvx_validate_cache(c));
  REFUSES(c->v.group_size, 0, kvx_validate_cache(c));
  REFUSES(c->k.data.shape[4], 8, kvx_validate_cache(c)); /* the packs then make 16 elements */
  REFUSES(c->k.data.shape[4], 0, kvx_validate_cache(c));
  REFUSES(c->k.data.shape[4], -4, kvx_validate_cache(c));
}

/* Nothing to do, in large numbers: it must not take long. */
static void test_hangs(void) {
  alarm(HANG_S);
  Scene s = scenes[INLINE_S8];
  s.gather.max_seq_len = ((int64_t)1 << 40) - 1; /* nine rows are described; the rest is a claim */
  check_case = "packed output, max_seq_len near 2^40";
  printf("%s\n", check_case), fflush(stdout);
  CHECK_OK(kvx_gather(&s.cache, &s.gather, NULL));
  alarm(HANG_S);
  s.amax.x.shape[0] = (int64_t)1 << 60, s.amax.x.shape[2] = 0;
  check_case = "amax of 2^60 rows without elements";
  printf("%s\n", check_case), fflush(stdout);
  kvx_amax(&s.amax, NULL);
  s.amax.x.shape[0] = 0, s.amax.x.shape[1] = (int64_t)1 << 60, s.amax.x.shape[2] = D;
  check_case = "amax of no tokens with 2^60 heads";
  printf("%s\n", check_case), fflush(stdout);
  kvx_amax(&s.amax, NULL);
  CHECK(buffers_are_intact(scene_buffers[INLINE_S8], scene_buffers[INLINE_S8 + 1]));
  check_case = "";
  alarm(HANG_S);
}

/* ------------------------------------------------------------------ v1 */

typedef struct SceneV1 {
  kvx_cache_desc_t cache;
  kvx_write_desc_t write;
  kvx_gather_desc_t gather;
} SceneV1;

enum {
  ANY,
  SMALLER,
  NO_INDEX,
  NO_FLOAT,
  FAR
}; /* which values have to be refused: all others, smaller ones, all but ... */
enum { IN_CACHE = 1, IN_WRITE = 2, IN_GATHER = 4 };
typedef struct FieldV1 {
  const char* name;
  size_t offset;
  int bytes, refused, calls;
} FieldV1;
#define V1(field, refused, calls) {#field, offsetof(SceneV1, field), (int)sizeof(((SceneV1*)0)->field), refused, calls}
#define V1_TENSOR(t, no_type, calls)                                                                                   \
  V1(t.size, SMALLER, calls), V1(t.dtype, no_type, calls), V1(t.memory, ANY, calls), V1(t.ndim, ANY, calls),           \
      V1(t.shape[0], ANY, calls), V1(t.shape[1], ANY, calls), V1(t.shape[2], ANY, calls), V1(t.stride[0], FAR, calls), \
      V1(t.stride[1], FAR, calls), V1(t.stride[2], FAR, calls)

static const FieldV1 fields_v1[] = {
    V1(cache.size, SMALLER, 7),
    V1(cache.num_blocks, ANY, 7),
    V1(cache.block_size, ANY, 7),
    V1(cache.num_kv_heads, ANY, 7),
    V1(cache.head_dim, ANY, 7),
    V1_TENSOR(cache.k, ANY, 7),
    V1_TENSOR(cache.v, ANY, 7),
    V1(cache.k.layout, ANY, 7),
    V1(cache.v.layout, ANY, 7),
    V1(cache.k.shape[3], ANY, 7),
    V1(cache.v.shape[3], ANY, 7),
    V1(cache.k.stride[3], FAR, 7),
    V1(write.size, SMALLER, IN_WRITE),
    V1(write.io.size, SMALLER, IN_WRITE),
    V1_TENSOR(write.io.key, NO_FLOAT, IN_WRITE),
    V1_TENSOR(write.io.value, NO_FLOAT, IN_WRITE),
    V1(write.io.num_tokens, ANY, IN_WRITE),
    V1(write.io.num_kv_heads, ANY, IN_WRITE),
    V1(write.io.head_dim, ANY, IN_WRITE),
    V1(write.slots.size, SMALLER, IN_WRITE),
    V1(write.slots.dtype, NO_INDEX, IN_WRITE),
    V1(write.slots.token_count, ANY, IN_WRITE),
    V1(gather.size, SMALLER, IN_GATHER),
    V1(gather.io.size, SMALLER, IN_GATHER),
    V1_TENSOR(gather.io.key, NO_FLOAT, IN_GATHER),
    V1_TENSOR(gather.io.value, NO_FLOAT, IN_GATHER),
    V1(gather.io.num_tokens, ANY, IN_GATHER),
    V1(gather.io.num_kv_heads, ANY, IN_GATHER),
    V1(gather.io.head_dim, ANY, IN_GATHER),
    V1(gather.block_table.size, SMALLER, IN_GATHER),
    V1(gather.block_table.format, ANY, IN_GATHER),
    V1(gather.block_table.index_dtype, NO_INDEX, IN_GATHER),
    V1(gather.block_table.seq_count, ANY, IN_GATHER),
    V1(gather.block_table.beam_width, ANY, IN_GATHER),
    V1(gather.block_table.max_blocks_per_seq, ANY, IN_GATHER),
    V1(gather.block_table.indices_count, ANY, IN_GATHER),
    V1(gather.block_table.indptr_count, ANY, IN_GATHER),
    V1(gather.seq_lens.size, SMALLER, IN_GATHER),
    V1(gather.seq_lens.dtype, NO_INDEX, IN_GATHER),
    V1(gather.seq_lens.seq_count, ANY, IN_GATHER),
    V1(gather.max_seq_len, ANY, IN_GATHER),
};

static kvx_tensor_desc_t tensor_v1(const kvx_array_t* a, kvx_layout_t layout) {
  kvx_tensor_desc_t t;
  memset(&t, 0, sizeof t);
  t.size = sizeof t;
  t.dtype = (kvx_dtype_t)a->dtype, t.layout = layout, t.memory = KVX_MEMORY_HOST, t.ndim = a->ndim;
  memcpy(t.shape, a->shape, sizeof t.shape), memcpy(t.stride, a->stride, sizeof t.stride);
  t.data = a->data;
  return t;
}

static SceneV1 build_v1(const Scene* from) {
  SceneV1 s;
  memset(&s, 0, sizeof s);
  s.cache.size = sizeof s.cache;
  s.cache.num_blocks = NB, s.cache.block_size = BS, s.cache.num_kv_heads = H, s.cache.head_dim = D;
  s.cache.k = tensor_v1(&from->cache.k.data, KVX_LAYOUT_BLOCK_NHD);
  s.cache.v = s.cache.k;
  s.cache.v.data = from->cache.v.data.data;
  s.write.size = sizeof s.write;
  s.write.io.size = sizeof s.write.io;
  s.write.io.key = tensor_v1(&from->write.k, KVX_LAYOUT_BLOCK_CUSTOM),
  s.write.io.value = tensor_v1(&from->write.v, KVX_LAYOUT_BLOCK_CUSTOM);
  s.write.io.num_tokens = T, s.write.io.num_kv_heads = H, s.write.io.head_dim = D;
  s.write.slots.size = sizeof s.write.slots;
  s.write.slots.dtype = KVX_DTYPE_S32, s.write.slots.token_count = T, s.write.slots.invalid_slot = -1,
  s.write.slots.slots = from->write.slots.data;
  s.gather.size = sizeof s.gather;
  s.gather.io = s.write.io;
  s.gather.io.key = tensor_v1(&from->gather.k, KVX_LAYOUT_BLOCK_CUSTOM),
  s.gather.io.value = tensor_v1(&from->gather.v, KVX_LAYOUT_BLOCK_CUSTOM);
  s.gather.io.num_tokens = S * L;
  s.gather.block_table.size = sizeof s.gather.block_table;
  s.gather.block_table.format = KVX_BLOCK_TABLE_PACKED, s.gather.block_table.index_dtype = KVX_DTYPE_S32;
  s.gather.block_table.seq_count = S, s.gather.block_table.beam_width = 1, s.gather.block_table.max_blocks_per_seq = M;
  s.gather.block_table.indices = from->gather.table.indices.data, s.gather.block_table.indices_count = S * M;
  s.gather.seq_lens.size = sizeof s.gather.seq_lens;
  s.gather.seq_lens.dtype = KVX_DTYPE_S32, s.gather.seq_lens.seq_count = S,
  s.gather.seq_lens.lengths = from->gather.table.seq_lens.data;
  s.gather.max_seq_len = L;
  return s;
}

static int must_be_refused(int refused, int64_t value, int64_t old) {
  switch (refused) {
    case SMALLER: return value >= 0 && value < old; /* sizes are unsigned: a negative one is a large one */
    case NO_INDEX: return value != KVX_DTYPE_S32 && value != KVX_DTYPE_S64;
    case NO_FLOAT: return value < KVX_DTYPE_F16 || value > KVX_DTYPE_F32;
    case FAR: return value < 0 || value >= (int64_t)1 << 61; /* nearer ones may be true, and v1 cannot tell */
    default: return value != old;
  }
}

static void test_v1(void) {
  static char story[128];
  const SceneV1 honest = build_v1(&scenes[PACKED_F32]);
  CHECK_OK(kvx_validate_cache_desc(&honest.cache));
  CHECK_OK(kvx_write_kv(&honest.cache, &honest.write, NULL));
  CHECK_OK(kvx_gather_kv(&honest.cache, &honest.gather, NULL));
  check_case = story;
  for (size_t n = 0; n < sizeof fields_v1 / sizeof fields_v1[0]; n++)
    for (int i = 0; i < NUM_VALUES; i++) {
      const FieldV1* f = &fields_v1[n];
      SceneV1 s = honest;
      const int64_t old = get_field(&s, f->offset, f->bytes);
      set_field(&s, f->offset, f->bytes, hostile_value(i, old));
      const int64_t value = get_field(&s, f->offset, f->bytes); /* as the field holds it */
      if (!must_be_refused(f->refused, value, old)) continue;
      print_to(story, sizeof story, "%s = %lld, was %lld", f->name, (long long)value, (long long)old);
      if (f->calls & IN_CACHE) CHECK_INVALID(kvx_validate_cache_desc(&s.cache));
      if (f->calls & IN_WRITE) CHECK_INVALID(kvx_write_kv(&s.cache, &s.write, NULL));
      if (f->calls & IN_WRITE) CHECK_INVALID(kvx_launch_write_kv_prefill(&s.cache, &s.write, 1, NULL));
      if (f->calls & IN_GATHER) CHECK_INVALID(kvx_gather_kv(&s.cache, &s.gather, NULL));
      CHECK(buffers_are_intact(scene_buffers[PACKED_F32], scene_buffers[PACKED_F32 + 1]));
    }
  check_case = "";
}

int main(void) {
  signal(SIGALRM, on_alarm);
  alarm(HANG_S);
  list_fields();
  for (int i = 0; i < NUM_SCENES; i++) {
    scene_buffers[i] = num_buffers;
    scenes[i] = build_scene(i);
    scene_buffers[i + 1] = num_buffers;
  }
  for (int i = 0; i < num_buffers; i++) memcpy(buffers[i].saved, buffers[i].data, buffers[i].bytes);
  test_honest();
  test_short_by_one();
  test_strides();
  test_products();
  test_wrapping_rows();
  test_repeats();
  test_shared_planes();
  test_inline_scales();
  test_disagreement();
  test_v1();
  fflush(stdout);
  test_hangs();
  test_random_lies();
  return check_report();
}
