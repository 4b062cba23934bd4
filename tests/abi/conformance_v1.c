/* v1.1 as a client of the draft sees it, in host memory: every minimum test of the draft's section 9, and the bytes
 * behind them. */
#include "check.h"

enum {
  NB = 6,
  BS = 4,
  H = 2,
  D = 8, /* the cache */
  T = 7, /* tokens of a write */
  S = 2,
  L = 10,
  M = 3,                   /* sequences, rows and blocks of a gather */
  CACHE_ELEMENTS = 640,    /* the widest layout below has 590 */
  IO_ELEMENTS = S * L * 40 /* 40 = widest token stride below */
};

/* int64_t so that every dtype is aligned. */
static int64_t k_cache[CACHE_ELEMENTS], v_cache[CACHE_ELEMENTS], k_want[CACHE_ELEMENTS], v_want[CACHE_ELEMENTS];
static int64_t k_io[IO_ELEMENTS], v_io[IO_ELEMENTS], k_expect[IO_ELEMENTS], v_expect[IO_ELEMENTS];
static int64_t slots[T], table[64], lengths[8], indptr[8];

typedef struct Layout {
  const char* name;
  kvx_layout_t layout;
  uint32_t ndim;
  int64_t shape[5], stride[5];
} Layout;

static const Layout layouts[] = {
    {"NHD", KVX_LAYOUT_BLOCK_NHD, 4, {NB, BS, H, D, 0}, {64, 16, 8, 1, 0}},
    {"NHD with holes", KVX_LAYOUT_BLOCK_NHD, 4, {NB, BS, H, D, 0}, {100, 24, 10, 1, 0}},
    {"HND", KVX_LAYOUT_BLOCK_HND, 4, {NB, H, BS, D, 0}, {64, 32, 8, 1, 0}},
    {"HND with holes", KVX_LAYOUT_BLOCK_HND, 4, {NB, H, BS, D, 0}, {80, 36, 9, 1, 0}},
    {"HND_PACKED", KVX_LAYOUT_BLOCK_HND_PACKED, 5, {NB, H, D / 4, BS, 4}, {64, 32, 16, 4, 1}},
    {"HND_PACKED with holes", KVX_LAYOUT_BLOCK_HND_PACKED, 5, {NB, H, D / 4, BS, 4}, {75, 36, 17, 4, 1}},
    {"HND_PACKED, one pack", KVX_LAYOUT_BLOCK_HND_PACKED, 5, {NB, H, 1, BS, D}, {64, 32, 32, 8, 1}},
    {"CUSTOM in HND order", KVX_LAYOUT_BLOCK_CUSTOM, 4, {NB, BS, H, D, 0}, {64, 8, 32, 1, 0}},
    {"CUSTOM with tokens innermost", KVX_LAYOUT_BLOCK_CUSTOM, 4, {NB, BS, H, D, 0}, {64, 1, 32, 4, 0}},
    {"CUSTOM with heads outermost", KVX_LAYOUT_BLOCK_CUSTOM, 4, {NB, BS, H, D, 0}, {32, 8, 200, 1, 0}},
    {"CUSTOM 5-D", KVX_LAYOUT_BLOCK_CUSTOM, 5, {NB, H, D / 4, BS, 4}, {64, 32, 16, 4, 1}},
};
enum { NUM_LAYOUTS = sizeof layouts / sizeof layouts[0] };
static const kvx_dtype_t float_types[] = {KVX_DTYPE_F32, KVX_DTYPE_F16, KVX_DTYPE_BF16};
static const kvx_dtype_t index_types[] = {KVX_DTYPE_S32, KVX_DTYPE_S64};

/* Where element (block, offset, head, dim) stands, from the words of the enum and nothing else. */
static int64_t element(const Layout* l, int64_t b, int64_t t, int64_t h, int64_t d) {
  const int64_t* s = l->stride;
  if (l->ndim == 5) return b * s[0] + h * s[1] + d / l->shape[4] * s[2] + t * s[3] + d % l->shape[4] * s[4];
  if (l->layout == KVX_LAYOUT_BLOCK_HND) return b * s[0] + h * s[1] + t * s[2] + d * s[3];
  return b * s[0] + t * s[1] + h * s[2] + d * s[3];
}

/* At most 240, and bf16 holds integers to 256. */
static float number(int plane, int t, int h, int d) { return (float)(1 + (t * H + h) * D + d + 128 * plane); }

static kvx_tensor_desc_t tensor(kvx_dtype_t dtype, uint32_t ndim, const int64_t* shape, const int64_t* stride,
                                void* data) {
  kvx_tensor_desc_t t;
  memset(&t, 0, sizeof t);
  t.size = sizeof t;
  t.dtype = dtype;
  t.layout = KVX_LAYOUT_BLOCK_CUSTOM;
  t.memory = KVX_MEMORY_HOST;
  t.ndim = ndim;
  memcpy(t.shape, shape, ndim * sizeof *shape);
  memcpy(t.stride, stride, ndim * sizeof *stride);
  t.data = data;
  return t;
}

static kvx_cache_desc_t make_cache(const Layout* l, kvx_dtype_t dtype) {
  kvx_cache_desc_t c;
  memset(&c, 0, sizeof c);
  c.size = sizeof c;
  c.num_blocks = NB, c.block_size = BS, c.num_kv_heads = H, c.head_dim = D;
  c.k = tensor(dtype, l->ndim, l->shape, l->stride, k_cache);
  c.v = tensor(dtype, l->ndim, l->shape, l->stride, v_cache);
  c.k.layout = c.v.layout = l->layout;
  return c;
}

/* Rows of the caller: dense, or with holes between tokens, heads and elements. */
static const int64_t dense_rows[] = {H * D, D, 1}, wide_rows[] = {40, 20, 2};

static kvx_kv_io_desc_t make_io(kvx_dtype_t dtype, int64_t rows, const int64_t* stride) {
  const int64_t shape[] = {rows, H, D};
  kvx_kv_io_desc_t io;
  memset(&io, 0, sizeof io);
  io.size = sizeof io;
  io.key = tensor(dtype, 3, shape, stride, k_io);
  io.value = tensor(dtype, 3, shape, stride, v_io);
  io.num_tokens = (uint32_t)rows, io.num_kv_heads = H, io.head_dim = D;
  return io;
}

static void set_index(void* base, kvx_dtype_t dtype, int i, int64_t value) {
  if (dtype == KVX_DTYPE_S64) ((int64_t*)base)[i] = value;
  else ((int32_t*)base)[i] = (int32_t)value;
}

static kvx_write_desc_t make_write(kvx_dtype_t dtype, const int64_t* stride, kvx_dtype_t slot_dtype,
                                   const int64_t* where) {
  kvx_write_desc_t w;
  memset(&w, 0, sizeof w);
  w.size = sizeof w;
  w.io = make_io(dtype, T, stride);
  w.slots.size = sizeof w.slots;
  w.slots.dtype = slot_dtype;
  w.slots.token_count = T;
  w.slots.invalid_slot = -1;
  w.slots.slots = slots;
  for (int t = 0; t < T; t++) set_index(slots, slot_dtype, t, where[t]);
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++)
      for (int d = 0; d < D; d++) {
        const int64_t i = (t * stride[0] + h * stride[1] + d * stride[2]) * dtype_bytes(dtype);
        put_number((char*)k_io + i, dtype, number(0, t, h, d));
        put_number((char*)v_io + i, dtype, number(1, t, h, d));
      }
  return w;
}

/* What the cache must hold after that write, every byte of it: the poison where nothing may be written. */
static void expect_write(const Layout* l, kvx_dtype_t dtype, const int64_t* where) {
  memset(k_want, 0xA5, sizeof k_want);
  memset(v_want, 0xA5, sizeof v_want);
  for (int t = 0; t < T; t++)
    for (int h = 0; where[t] >= 0 && where[t] < NB * BS && h < H; h++)
      for (int d = 0; d < D; d++) {
        const int64_t i = element(l, where[t] / BS, where[t] % BS, h, d) * dtype_bytes(dtype);
        put_number((char*)k_want + i, dtype, number(0, t, h, d));
        put_number((char*)v_want + i, dtype, number(1, t, h, d));
      }
}

static void poison_cache(void) {
  memset(k_cache, 0xA5, sizeof k_cache);
  memset(v_cache, 0xA5, sizeof v_cache);
}

#define CHECK_CACHE()                             \
  do {                                            \
    CHECK_BYTES(k_cache, k_want, sizeof k_cache); \
    CHECK_BYTES(v_cache, v_want, sizeof v_cache); \
  } while (0)

static kvx_gather_desc_t make_gather(kvx_dtype_t dtype, const int64_t* stride, kvx_dtype_t index_dtype) {
  kvx_gather_desc_t g;
  memset(&g, 0, sizeof g);
  g.size = sizeof g;
  g.io = make_io(dtype, S * L, stride);
  g.max_seq_len = L;
  g.block_table.size = sizeof g.block_table;
  g.block_table.format = KVX_BLOCK_TABLE_PACKED;
  g.block_table.index_dtype = index_dtype;
  g.block_table.seq_count = S, g.block_table.beam_width = 1, g.block_table.max_blocks_per_seq = M;
  g.block_table.indices = table, g.block_table.indices_count = S * M;
  g.seq_lens.size = sizeof g.seq_lens;
  g.seq_lens.dtype = index_dtype, g.seq_lens.seq_count = S, g.seq_lens.lengths = lengths;
  return g;
}

/* Sequence 0 has 9 tokens in blocks 2, 0, 5; sequence 1 has 5 in 3, 2, and an entry no one may use. */
static const int64_t packed_table[S * M] = {2, 0, 5, 3, 2, 1 << 30}, packed_lengths[S] = {9, 5};

static void fill_packed(kvx_dtype_t index_dtype) {
  for (int i = 0; i < S * M; i++) set_index(table, index_dtype, i, packed_table[i]);
  for (int i = 0; i < S; i++) set_index(lengths, index_dtype, i, packed_lengths[i]);
}

/* Rows as the cache has them, zero past each length, the poison in the holes. */
static void expect_gather(const Layout* l, int bytes, const int64_t* stride) {
  memset(k_expect, 0x5A, sizeof k_expect);
  memset(v_expect, 0x5A, sizeof v_expect);
  for (int row = 0; row < S * L; row++)
    for (int h = 0; h < H; h++)
      for (int d = 0; d < D; d++) {
        const int s = row / L, pos = row % L;
        const int64_t to = (row * stride[0] + h * stride[1] + d * stride[2]) * bytes;
        memset((char*)k_expect + to, 0, (size_t)bytes);
        memset((char*)v_expect + to, 0, (size_t)bytes);
        if (pos >= packed_lengths[s]) continue;
        const int64_t from = element(l, packed_table[s * M + pos / BS], pos % BS, h, d) * bytes;
        memcpy((char*)k_expect + to, (char*)k_cache + from, (size_t)bytes);
        memcpy((char*)v_expect + to, (char*)v_cache + from, (size_t)bytes);
      }
}

static void poison_output(void) {
  memset(k_io, 0x5A, sizeof k_io);
  memset(v_io, 0x5A, sizeof v_io);
}

#define CHECK_OUTPUT()                        \
  do {                                        \
    CHECK_BYTES(k_io, k_expect, sizeof k_io); \
    CHECK_BYTES(v_io, v_expect, sizeof v_io); \
  } while (0)

/* ------------------------------------------------------------------ section 9 */

static void test_version(void) {
  kvx_version_t v;
  memset(&v, 0xff, sizeof v);
  CHECK_OK(kvx_get_version(&v));
  CHECK_INT(v.size, sizeof v);
  CHECK_INT(v.abi_major, KVX_ABI_VERSION_MAJOR);
  CHECK_INT(v.abi_minor, KVX_ABI_VERSION_MINOR);
  CHECK_INT(v.abi_patch, KVX_ABI_VERSION_PATCH);
  CHECK_INVALID(kvx_get_version(NULL));
  CHECK_OK(kvx_check_version(1, 1)); /* a client of the draft */
}

/* layout.c freezes the sizes; here the library holds callers to them. */
static void test_sizes(void) {
  static const int64_t where[T] = {0, 1, 2, 3, 4, 5, 6};
  kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S64, where);
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  fill_packed(KVX_DTYPE_S32);
  REFUSES(c.size, sizeof c - 1, kvx_validate_cache_desc(&c));
  REFUSES(c.k.size, sizeof c.k - 1, kvx_validate_cache_desc(&c));
  REFUSES(c.v.size, 0, kvx_validate_cache_desc(&c));
  REFUSES(w.size, sizeof w - 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.size, sizeof w.io - 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.key.size, sizeof w.io.key - 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.value.size, 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.slots.size, sizeof w.slots - 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(g.size, sizeof g - 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.size, sizeof g.io - 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.block_table.size, sizeof g.block_table - 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.seq_lens.size, sizeof g.seq_lens - 1, kvx_gather_kv(&c, &g, NULL));
  c.size += 8, c.k.size += 8, w.size += 8, w.slots.size += 8, g.size += 8; /* a producer with a later header */
  CHECK_OK(kvx_validate_cache_desc(&c));
  CHECK_OK(kvx_write_kv(&c, &w, NULL));
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
}

static void test_layout_validation(void) {
  for (int i = 0; i < NUM_LAYOUTS; i++) {
    const Layout* l = &layouts[i];
    kvx_cache_desc_t c = make_cache(l, KVX_DTYPE_BF16);
    check_case = l->name;
    CHECK_OK(kvx_validate_cache_desc(&c));
    for (uint32_t axis = 0; axis < l->ndim; axis++) {
      REFUSES(c.k.shape[axis], l->shape[axis] + 1, kvx_validate_cache_desc(&c));
      REFUSES(c.v.shape[axis], 0, kvx_validate_cache_desc(&c));
      REFUSES(c.v.shape[axis], -1, kvx_validate_cache_desc(&c));
      REFUSES(c.k.stride[axis], -1, kvx_validate_cache_desc(&c));
      if (l->shape[axis] > 1) REFUSES(c.k.stride[axis], 0, kvx_validate_cache_desc(&c)); /* elements share an address */
    }
    REFUSES(c.k.stride[0], l->layout == KVX_LAYOUT_BLOCK_CUSTOM ? 7 : 63,
            kvx_validate_cache_desc(&c)); /* blocks overlap */
    REFUSES(c.k.ndim, 3, kvx_validate_cache_desc(&c));
    REFUSES(c.v.ndim, l->ndim == 4 ? 5 : 4, kvx_validate_cache_desc(&c));
    REFUSES(c.k.ndim, 6, kvx_validate_cache_desc(&c));
    REFUSES(c.num_blocks, 0, kvx_validate_cache_desc(&c));
    REFUSES(c.block_size, 0, kvx_validate_cache_desc(&c));
    REFUSES(c.num_kv_heads, 0, kvx_validate_cache_desc(&c));
    REFUSES(c.head_dim, 0, kvx_validate_cache_desc(&c));
    REFUSES(c.block_size, BS + 1, kvx_validate_cache_desc(&c));
    REFUSES(c.k.data, NULL, kvx_validate_cache_desc(&c));
    REFUSES(c.k.dtype, KVX_DTYPE_F16, kvx_validate_cache_desc(&c)); /* v stays bf16 */
    REFUSES(c.v.layout, l->layout == KVX_LAYOUT_BLOCK_NHD ? KVX_LAYOUT_BLOCK_HND : KVX_LAYOUT_BLOCK_NHD,
            kvx_validate_cache_desc(&c));
    REFUSES(c.v.memory, KVX_MEMORY_DEVICE, kvx_validate_cache_desc(&c));
    c.k.dtype = c.v.dtype = KVX_DTYPE_S8;
    CHECK_INVALID(kvx_validate_cache_desc(&c)); /* 1.2 has it, v1 does not */
    c = make_cache(l, KVX_DTYPE_BF16);
    c.k.layout = c.v.layout = (kvx_layout_t)4;
    CHECK_INVALID(kvx_validate_cache_desc(&c));
  }
  check_case = "pack";
  kvx_cache_desc_t c = make_cache(&layouts[4], KVX_DTYPE_F16);
  c.k.shape[4] = c.v.shape[4] = 3; /* does not divide 8 */
  CHECK_INVALID(kvx_validate_cache_desc(&c));
  CHECK_INVALID(kvx_validate_cache_desc(NULL));
  check_case = "";
}

static void test_table_validation(void) {
  const kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  kvx_block_table_t* b = &g.block_table;
  fill_packed(KVX_DTYPE_S32);
  check_case = "PACKED";
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indices_count, S * M - 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indices_count, S * M + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->seq_count, S + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->max_blocks_per_seq, M + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->beam_width, 2, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->beam_width, 0, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr, indptr, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr_count, S + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indices, NULL, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->index_dtype, KVX_DTYPE_U32, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->format, KVX_BLOCK_TABLE_INVALID, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->format, KVX_BLOCK_TABLE_PAGE_CSR, kvx_gather_kv(&c, &g, NULL)); /* 1.2 only */
  REFUSES(g.seq_lens.seq_count, S - 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.seq_lens.dtype, KVX_DTYPE_F32, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.seq_lens.lengths, NULL, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.max_seq_len, 0, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.max_seq_len, L + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.num_tokens, S * L - 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.num_kv_heads, H + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.head_dim, D - 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.key.shape[0], S * L + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.value.shape[2], D + 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.key.stride[0], 0, kvx_gather_kv(&c, &g, NULL)); /* two rows in one place */
  REFUSES(g.io.key.dtype, KVX_DTYPE_F8_E4M3, kvx_gather_kv(&c, &g, NULL));
  REFUSES(g.io.value.data, NULL, kvx_gather_kv(&c, &g, NULL));
  CHECK_INVALID(kvx_gather_kv(&c, NULL, NULL));
  CHECK_INVALID(kvx_gather_kv(NULL, &g, NULL));
  check_case = "RAGGED";
  b->format = KVX_BLOCK_TABLE_RAGGED;
  b->indptr = indptr, b->indptr_count = S + 1, b->indptr_dtype = KVX_DTYPE_S32, b->indices_count = 14;
  for (int i = 0; i < 14; i++)
    set_index(table, KVX_DTYPE_S32, i, i < 9 ? packed_table[i / BS] : packed_table[M + (i - 9) / BS]);
  set_index(indptr, KVX_DTYPE_S32, 0, 0), set_index(indptr, KVX_DTYPE_S32, 1, 9),
      set_index(indptr, KVX_DTYPE_S32, 2, 14);
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr_count, S, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr_count, 0, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr, NULL, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr_dtype, KVX_DTYPE_INVALID, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr_dtype, KVX_DTYPE_U64, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->beam_width, 2, kvx_gather_kv(&c, &g, NULL));
  b->indices_count = 13; /* the last sequence then ends past the indices */
  CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
  b->indices_count = 14;
  set_index(indptr, KVX_DTYPE_S32, 1, 8); /* shorter than seq_lens says */
  CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
  set_index(indptr, KVX_DTYPE_S32, 1, 9), set_index(indptr, KVX_DTYPE_S32, 0, -1);
  CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
  check_case = "";
}

/* ------------------------------------------------------------------ bytes */

static void test_round_trips(void) {
  /* In order, scattered, negative, invalid_slot (outside the cache, and still no error), first and last slot. */
  static const int64_t where[T] = {9, -1, 0, 23, 14, 99, -7};
  char label[96];
  check_case = label;
  for (int i = 0; i < NUM_LAYOUTS; i++)
    for (int f = 0; f < 3; f++)
      for (int n = 0; n < 2; n++) {
        const Layout* l = &layouts[i];
        const kvx_dtype_t dtype = float_types[f], index = index_types[n];
        const int64_t* rows = (i + f + n) % 2 ? dense_rows : wide_rows;
        print_to(label, sizeof label, "%s, dtype %d, index dtype %d, %s rows", l->name, dtype, index,
                 rows == dense_rows ? "dense" : "wide");
        const kvx_cache_desc_t c = make_cache(l, dtype);
        kvx_write_desc_t w = make_write(dtype, rows, index, where);
        w.slots.invalid_slot = 99;
        poison_cache();
        expect_write(l, dtype, where);
        CHECK_OK(kvx_write_kv(&c, &w, NULL));
        CHECK_CACHE();
        kvx_gather_desc_t g = make_gather(dtype, rows, index);
        fill_packed(index);
        expect_gather(l, dtype_bytes(dtype), rows);
        poison_output();
        CHECK_OK(kvx_gather_kv(&c, &g, NULL));
        CHECK_OUTPUT();
        /* [S, L, H, D] is the same memory said in four dimensions. */
        const int64_t shape[] = {S, L, H, D}, stride[] = {L * rows[0], rows[0], rows[1], rows[2]};
        g.io.key = tensor(dtype, 4, shape, stride, k_io);
        g.io.value = tensor(dtype, 4, shape, stride, v_io);
        poison_output();
        CHECK_OK(kvx_gather_kv(&c, &g, NULL));
        CHECK_OUTPUT();
      }
  check_case = "f32 rows into an f16 cache and back";
  const kvx_cache_desc_t c = make_cache(&layouts[2], KVX_DTYPE_F16);
  const kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S64, where);
  poison_cache();
  expect_write(&layouts[2], KVX_DTYPE_F16, where);
  CHECK_STATUS(kvx_write_kv(&c, &w, NULL), KVX_STATUS_OUT_OF_RANGE); /* 99 is no slot when invalid_slot is -1 */
  static const int64_t all[T] = {8, 9, 10, 11, 0, 1, 2};
  const kvx_write_desc_t w2 = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S64, all);
  expect_write(&layouts[2], KVX_DTYPE_F16, all);
  CHECK_OK(kvx_write_kv(&c, &w2, NULL));
  CHECK_CACHE();
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  fill_packed(KVX_DTYPE_S32);
  set_index(lengths, KVX_DTYPE_S32, 0, T), set_index(lengths, KVX_DTYPE_S32, 1, 0);
  poison_output();
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  for (int t = 0; t < T; t++) CHECK_INT(((float*)v_io)[(t * H + 1) * D + 3], number(1, t, 1, 3));
  memset(k_expect, 0, sizeof k_expect);
  CHECK_BYTES((float*)k_io + T * H * D, k_expect, (S * L - T) * H * D * 4);
  check_case = "";
}

static void test_invalid_slots(void) {
  static const int64_t none[T] = {-1, -1, -1, -2147483647 - 1, -5, -1, -1};
  static const int64_t two[T] = {2, 2, 2, 4, 2, 2, -1};
  const kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  for (int n = 0; n < 2; n++) {
    check_case = n ? "S64" : "S32";
    kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, index_types[n], none);
    poison_cache();
    expect_write(&layouts[0], KVX_DTYPE_F32, none);
    CHECK_OK(kvx_write_kv(&c, &w, NULL)); /* every token is padding: a no-op, and no error */
    CHECK_CACHE();
    w = make_write(KVX_DTYPE_F32, dense_rows, index_types[n], two);
    w.slots.invalid_slot = 2; /* a sentinel inside the cache is skipped all the same */
    static const int64_t one[T] = {-1, -1, -1, 4, -1, -1, -1};
    expect_write(&layouts[0], KVX_DTYPE_F32, one);
    CHECK_OK(kvx_write_kv(&c, &w, NULL));
    CHECK_CACHE();
  }
  check_case = "invalid_slot inside a run of slots";
  static const int64_t run[T] = {8, 9, 10, 11, 12, 13, 14}, holed[T] = {8, 9, -1, 11, 12, 13, 14};
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32, run);
  w.slots.invalid_slot = 10;
  poison_cache();
  expect_write(&layouts[0], KVX_DTYPE_F32, holed);
  CHECK_OK(kvx_write_kv(&c, &w, NULL));
  CHECK_CACHE();
  check_case = "";
}

static void test_write_validation(void) {
  static const int64_t where[T] = {0, 1, 2, 3, 4, 5, 6};
  const kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32, where);
  REFUSES(w.slots.token_count, T + 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.slots.dtype, KVX_DTYPE_U32, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.slots.slots, NULL, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.num_tokens, T - 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.num_kv_heads, H - 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.head_dim, 2 * D, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.key.shape[0], T - 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.value.shape[1], H + 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.key.shape[2], D + 1, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.key.ndim, 2, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.key.dtype, KVX_DTYPE_S32, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.value.dtype, KVX_DTYPE_INVALID, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.key.data, NULL, kvx_write_kv(&c, &w, NULL));
  REFUSES(w.io.value.stride[0], -16, kvx_write_kv(&c, &w, NULL));
  CHECK_INVALID(kvx_write_kv(&c, NULL, NULL));
  CHECK_INVALID(kvx_write_kv(NULL, &w, NULL));
}

static void test_ragged(void) {
  const Layout* l = &layouts[2];
  for (int f = 0; f < 3; f++)
    for (int n = 0; n < 4; n++) {
      const kvx_dtype_t dtype = float_types[f], index = index_types[n & 1], pointer = index_types[n >> 1];
      const kvx_cache_desc_t c = make_cache(l, dtype);
      kvx_gather_desc_t g = make_gather(dtype, wide_rows, index);
      for (int i = 0; i < CACHE_ELEMENTS; i++)
        k_cache[i] = i % 127 * 0x0101010101010101LL + i, v_cache[i] = ~k_cache[i];
      fill_packed(index); /* lengths, and the table that the ragged one below spells out token by token */
      expect_gather(l, dtype_bytes(dtype), wide_rows);
      g.block_table.format = KVX_BLOCK_TABLE_RAGGED;
      g.block_table.indptr = indptr, g.block_table.indptr_count = S + 1, g.block_table.indptr_dtype = pointer;
      g.block_table.indices_count = 16; /* two unused entries first: indptr need not start at 0 */
      for (int i = 0; i < 16; i++)
        set_index(table, index, i,
                  i < 2    ? 1 << 30
                  : i < 11 ? packed_table[(i - 2) / BS]
                           : packed_table[M + (i - 11) / BS]);
      set_index(indptr, pointer, 0, 2), set_index(indptr, pointer, 1, 11), set_index(indptr, pointer, 2, 16);
      poison_output();
      CHECK_OK(kvx_gather_kv(&c, &g, NULL));
      CHECK_OUTPUT();
    }
}

/* Two beams, K and V with their own indices, both pools, and no block at all. */
static void test_kv_offsets(void) {
  enum { W = 2, MB = 2, ROWS = 8, POOL_BLOCKS = 8, BLOCK = H * BS * D };
  static float primary[POOL_BLOCKS * (BLOCK + 4)],
      secondary[POOL_BLOCKS * (BLOCK + 4)];      /* + 4: blocks need not touch */
  static const int32_t second = -2147483647 - 1; /* bit 31 */
  static const int32_t index[S][W][2][MB] = {{{{0, 2}, {1, 3}}, {{4, -1}, {5, 7}}},
                                             {{{second | 7, second | 0}, {second | 3, 6}}, {{-1, -1}, {2, -1}}}};
  for (int i = 0; i < POOL_BLOCKS * (BLOCK + 4); i++) primary[i] = (float)i, secondary[i] = (float)(-1 - i);
  const Layout hnd = {"HND", KVX_LAYOUT_BLOCK_HND, 4, {POOL_BLOCKS, H, BS, D, 0}, {BLOCK, BS * D, D, 1, 0}};
  kvx_cache_desc_t c = make_cache(&hnd, KVX_DTYPE_F32);
  c.num_blocks = POOL_BLOCKS;
  c.k.data = c.v.data = primary; /* as an adapter for KVCacheIndex tables does: the pools decide */
  c.pool.size = sizeof c.pool;
  c.pool.memory = KVX_MEMORY_HOST;
  c.pool.bytes_per_block = (BLOCK + 4) * 4;
  c.pool.primary = primary, c.pool.secondary = secondary;
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  kvx_block_table_t* b = &g.block_table;
  g.max_seq_len = ROWS;
  g.io = make_io(KVX_DTYPE_F32, S * W * ROWS, dense_rows);
  b->format = KVX_BLOCK_TABLE_KV_OFFSETS;
  b->flags = KVX_BLOCK_TABLE_FLAG_KVCACHEINDEX;
  b->beam_width = W, b->max_blocks_per_seq = MB, b->indices = index, b->indices_count = S * W * 2 * MB;
  set_index(lengths, KVX_DTYPE_S32, 0, 7), set_index(lengths, KVX_DTYPE_S32, 1, 5);
  memset(k_expect, 0x5A, sizeof k_expect);
  memset(v_expect, 0x5A, sizeof v_expect);
  for (int row = 0; row < S * W * ROWS; row++)
    for (int plane = 0; plane < 2; plane++)
      for (int i = 0; i < H * D; i++) {
        const int s = row / ROWS / W, beam = row / ROWS % W, pos = row % ROWS, h = i / D;
        const int32_t id = index[s][beam][plane][pos / BS];
        const int64_t at = (int64_t)(id & 0x7fffffff) * (BLOCK + 4) + h * BS * D + pos % BS * D + i % D;
        ((float*)(plane ? v_expect : k_expect))[row * H * D + i] = pos >= (s ? 5 : 7) || id == -1 ? 0.0f
                                                                   : id < 0                       ? secondary[at]
                                                                                                  : primary[at];
      }
  poison_output();
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  CHECK_OUTPUT();
  const int64_t shape[] = {S * W, ROWS, H, D}, stride[] = {ROWS * H * D, H * D, D, 1};
  g.io.key = tensor(KVX_DTYPE_F32, 4, shape, stride, k_io);
  g.io.value = tensor(KVX_DTYPE_F32, 4, shape, stride, v_io);
  poison_output();
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  CHECK_OUTPUT();
  REFUSES(b->indices_count, S * W * MB, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->beam_width, 1, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->beam_width, 0, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->flags, 0, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->index_dtype, KVX_DTYPE_S64, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr, indptr, kvx_gather_kv(&c, &g, NULL));
  REFUSES(b->indptr_count, 3, kvx_gather_kv(&c, &g, NULL));
  REFUSES(c.pool.size, 0, kvx_gather_kv(&c, &g, NULL));
  REFUSES(c.pool.primary, NULL, kvx_gather_kv(&c, &g, NULL));
  REFUSES(c.pool.bytes_per_block, 0, kvx_gather_kv(&c, &g, NULL));
  REFUSES(c.pool.bytes_per_block, BLOCK * 4 - 4, kvx_gather_kv(&c, &g, NULL)); /* a block does not fit */
  REFUSES(c.pool.memory, KVX_MEMORY_DEVICE, kvx_gather_kv(&c, &g, NULL));      /* the cache is in host memory */
  c.pool.secondary = NULL;                                                     /* bit 31 then names no pool */
  CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
  c.pool.secondary = secondary;
  kvx_cache_desc_t odd = c; /* 3 tokens a block: no power of two */
  odd.block_size = 3;
  odd.k.shape[2] = odd.v.shape[2] = 3;
  CHECK_INVALID(kvx_gather_kv(&odd, &g, NULL));
  CHECK_ERROR_HAS("power of two");
}

/* ------------------------------------------------------------------ the draft's kernel names */

typedef kvx_status_t WriteCall(const kvx_cache_desc_t*, const kvx_write_desc_t*, void*);
typedef kvx_status_t PrefillCall(const kvx_cache_desc_t*, const kvx_write_desc_t*, int32_t, void*);
typedef kvx_status_t GatherCall(const kvx_cache_desc_t*, const kvx_gather_desc_t*, void*);

static void test_launch_names(void) {
  static WriteCall* const writes[] = {kvx_launch_write_kv, kvx_launch_write_kv_f32, kvx_launch_write_kv_f16,
                                      kvx_launch_write_kv_bf16};
  static PrefillCall* const prefills[] = {kvx_launch_write_kv_prefill, kvx_launch_write_kv_prefill_f32,
                                          kvx_launch_write_kv_prefill_f16, kvx_launch_write_kv_prefill_bf16};
  static GatherCall* const gathers[] = {kvx_launch_gather_kv, kvx_launch_gather_kv_f32, kvx_launch_gather_kv_f16,
                                        kvx_launch_gather_kv_bf16};
  static const int64_t where[T] = {5, 6, 7, 8, 3, 23, -1};
  for (int n = 0; n < 4; n++)
    for (int f = 0; f < 3; f++) {
      const kvx_dtype_t dtype = float_types[f];
      const int takes = n == 0 || n - 1 == f; /* float_types has the order f32, f16, bf16 too */
      const kvx_cache_desc_t c = make_cache(&layouts[0], dtype);
      const kvx_status_t want = takes ? KVX_STATUS_OK : KVX_STATUS_INVALID_ARGUMENT;
      for (int prefill = 0; prefill < 2; prefill++) {
        const kvx_write_desc_t w = make_write(dtype, dense_rows, KVX_DTYPE_S64, where);
        poison_cache();
        memcpy(k_want, k_cache, sizeof k_want), memcpy(v_want, v_cache, sizeof v_want);
        if (takes) expect_write(&layouts[0], dtype, where);
        CHECK_STATUS(prefill ? prefills[n](&c, &w, 7, NULL) : writes[n](&c, &w, NULL), want);
        CHECK_CACHE();
      }
      const kvx_gather_desc_t g = make_gather(dtype, dense_rows, KVX_DTYPE_S32);
      fill_packed(KVX_DTYPE_S32);
      if (takes) expect_gather(&layouts[0], dtype_bytes(dtype), dense_rows);
      else memset(k_expect, 0x5A, sizeof k_expect), memset(v_expect, 0x5A, sizeof v_expect);
      poison_output();
      CHECK_STATUS(gathers[n](&c, &g, NULL), want);
      CHECK_OUTPUT();
    }
  const kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  const kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S64, where);
  CHECK_OK(kvx_launch_write_kv_prefill(&c, &w, 1, NULL));
  CHECK_INVALID(kvx_launch_write_kv_prefill(&c, &w, 0, NULL));
  CHECK_INVALID(kvx_launch_write_kv_prefill(&c, &w, -7, NULL));
  CHECK_INVALID(kvx_launch_write_kv_prefill(&c, &w, 2, NULL)); /* does not divide 7 */
  CHECK_INVALID(kvx_launch_write_kv_prefill_f32(&c, &w, 14, NULL));
  CHECK_ERROR_HAS("kvx_launch_write_kv_prefill_f32()");
  CHECK_INVALID(kvx_launch_write_kv_prefill(&c, NULL, 1, NULL));
}

/* ------------------------------------------------------------------ FP8 */

/* Integers to 15 are exact in e4m3; e5m2 has 2 bits of mantissa, so powers of two are left of them. */
static float code_number(kvx_dtype_t dtype, int plane, int t, int h, int d) {
  return dtype == KVX_DTYPE_F8_E4M3 ? (float)(1 + (t + 3 * h + d + plane) % 15) : (float)(1 << (t + h + d + plane) % 5);
}

typedef float ScaleOf(int plane, int block, int head);
static float scale_one(int plane, int block, int head) { return (void)plane, (void)block, (void)head, 1.0f; }
static float scale_tensor(int plane, int block, int head) { return (void)block, (void)head, plane ? 0.25f : 2.0f; }
static float scale_head(int plane, int block, int head) { return (void)block, (float)(1 << (head + plane)); }
static float scale_block(int plane, int block, int head) {
  return (void)head, (float)(1 << block) * (plane ? 0.5f : 1.0f);
}
static float scale_block_head(int plane, int block, int head) {
  return (float)(1 << block) * (head ? 0.125f : 4.0f) * (plane ? 2.0f : 1.0f);
}

/* Rows are code x scale, so that dividing by the scale gives the code back exactly. */
static kvx_write_desc_t make_fp8_write(kvx_dtype_t dtype, const Layout* l, const int64_t* where, ScaleOf* scale) {
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32, where);
  poison_cache();
  memset(k_want, 0xA5, sizeof k_want), memset(v_want, 0xA5, sizeof v_want);
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++)
      for (int d = 0; d < D; d++)
        for (int plane = 0; plane < 2; plane++) {
          const int block = where[t] < 0 ? 0 : (int)where[t] / BS;
          const float code = code_number(dtype, plane, t, h, d);
          ((float*)(plane ? v_io : k_io))[(t * H + h) * D + d] = code * scale(plane, block, h);
          if (where[t] >= 0)
            put_number((char*)(plane ? v_want : k_want) + element(l, block, where[t] % BS, h, d), dtype, code);
        }
  return w;
}

static kvx_scale_desc_t make_scale(kvx_scale_granularity_t granularity, kvx_dtype_t dtype, uint32_t ndim, int64_t n0,
                                   int64_t n1, int64_t s0, int64_t s1, const void* data) {
  kvx_scale_desc_t s;
  memset(&s, 0, sizeof s);
  s.size = sizeof s;
  s.dtype = dtype, s.granularity = granularity, s.ndim = ndim;
  s.shape[0] = n0, s.shape[1] = n1, s.stride[0] = s0, s.stride[1] = s1;
  s.data = data;
  return s;
}

static void test_fp8(void) {
  static const int64_t where[T] = {9, -1, 0, 23, 14, 10, -7};
  static const kvx_dtype_t types[] = {KVX_DTYPE_F8_E4M3, KVX_DTYPE_F8_E5M2};
  static const float k_scalar = 2.0f, v_scalar = 0.25f, wrong = 77.0f;
  static int64_t scales[2][NB * 3 * H];
  for (int n = 0; n < 2; n++)
    for (int i = 0; i < NUM_LAYOUTS; i++) {
      const Layout* l = &layouts[i];
      const kvx_cache_desc_t c = make_cache(l, types[n]);
      check_case = l->name;
      CHECK_OK(kvx_validate_cache_desc(&c));
      kvx_write_desc_t w = make_fp8_write(types[n], l, where, scale_one);
      CHECK_OK(kvx_write_kv(&c, &w, NULL)); /* no scale at all is 1 */
      CHECK_CACHE();
      w = make_fp8_write(types[n], l, where, scale_tensor);
      w.k_scale = &k_scalar, w.v_scale = &v_scalar;
      CHECK_OK(kvx_write_kv(&c, &w, NULL));
      CHECK_CACHE();
      w = make_fp8_write(types[n], l, where, scale_tensor); /* described, but without data: the scalars stand in */
      w.k_scale = &k_scalar, w.v_scale = &v_scalar;
      w.k_scale_desc = make_scale(KVX_SCALE_GRANULARITY_PER_HEAD, KVX_DTYPE_F32, 1, H, 0, 1, 0, NULL);
      w.v_scale_desc = make_scale(KVX_SCALE_GRANULARITY_PER_TENSOR, KVX_DTYPE_F32, 0, 0, 0, 0, 0, NULL);
      CHECK_OK(kvx_write_kv(&c, &w, NULL));
      CHECK_CACHE();
    }
  const Layout* l = &layouts[2];
  const kvx_cache_desc_t c = make_cache(l, KVX_DTYPE_F8_E4M3);
  for (int f = 0; f < 3; f++) {
    static ScaleOf* const of[] = {scale_tensor, scale_head, scale_block, scale_block_head};
    static const char* const name[] = {"per tensor", "per head", "per block", "per block-head"};
    const kvx_dtype_t dtype = float_types[f];
    for (int kind = 0; kind < 4; kind++) {
      check_case = name[kind];
      kvx_write_desc_t w = make_fp8_write(KVX_DTYPE_F8_E4M3, l, where, of[kind]);
      memset(scales, 0xff, sizeof scales); /* NaN between the scales */
      for (int plane = 0; plane < 2; plane++)
        for (int b = 0; b < NB; b++)
          for (int h = 0; h < H; h++) {
            const int at = kind == 0   ? 0
                           : kind == 1 ? 3 * h
                           : kind == 2 ? 2 * b
                                       : 6 * b + 2 * h; /* strides in elements, with holes */
            put_number((char*)scales[plane] + at * dtype_bytes(dtype), dtype, of[kind](plane, b, h));
          }
      kvx_scale_desc_t* desc[] = {&w.k_scale_desc, &w.v_scale_desc};
      for (int plane = 0; plane < 2; plane++)
        *desc[plane] = kind == 0   ? make_scale(KVX_SCALE_GRANULARITY_PER_TENSOR, dtype, 0, 0, 0, 0, 0, scales[plane])
                       : kind == 1 ? make_scale(KVX_SCALE_GRANULARITY_PER_HEAD, dtype, 1, H, 0, 3, 0, scales[plane])
                       : kind == 2
                           ? make_scale(KVX_SCALE_GRANULARITY_PER_BLOCK, dtype, 1, NB, 0, 2, 0, scales[plane])
                           : make_scale(KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD, dtype, 2, NB, H, 6, 2, scales[plane]);
      w.k_scale = w.v_scale = &wrong; /* a descriptor with data outranks the scalars */
      CHECK_OK(kvx_write_kv(&c, &w, NULL));
      CHECK_CACHE();
      if (kind == 0) continue;
      REFUSES(w.k_scale_desc.shape[0], kind == 1 ? H + 1 : NB + 1, kvx_write_kv(&c, &w, NULL));
      REFUSES(w.v_scale_desc.ndim, kind == 3 ? 1 : 2, kvx_write_kv(&c, &w, NULL));
      REFUSES(w.k_scale_desc.size, sizeof w.k_scale_desc - 1, kvx_write_kv(&c, &w, NULL));
      REFUSES(w.k_scale_desc.granularity, KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD,
              kvx_write_kv(&c, &w, NULL)); /* 1.2 only */
      REFUSES(w.v_scale_desc.dtype, KVX_DTYPE_S32, kvx_write_kv(&c, &w, NULL));
      REFUSES(w.v_scale_desc.dtype, KVX_DTYPE_F8_E4M3, kvx_write_kv(&c, &w, NULL)); /* a scale in 1.2, not in v1 */
    }
  }
  check_case = "an f32 cache ignores k_scale";
  const kvx_cache_desc_t plain = make_cache(&layouts[0], KVX_DTYPE_F32);
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32, where);
  w.k_scale = w.v_scale = &wrong;
  poison_cache();
  expect_write(&layouts[0], KVX_DTYPE_F32, where);
  CHECK_OK(kvx_write_kv(&plain, &w, NULL));
  CHECK_CACHE();
  check_case = "";
}

/* ------------------------------------------------------------------ range, memory, empty, alignment, words */

static void test_out_of_range(void) {
  const kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  for (int n = 0; n < 2; n++) {
    const int64_t where[T] = {
        0,
        1,
        2,
        3,
        4,
        5,
        n ? (int64_t)1 << 40 : NB * BS}; /* the last token: the others could have been written by then */
    const kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, index_types[n], where);
    poison_cache();
    memcpy(k_want, k_cache, sizeof k_want), memcpy(v_want, v_cache, sizeof v_want);
    CHECK_STATUS(kvx_write_kv(&c, &w, NULL), KVX_STATUS_OUT_OF_RANGE);
    CHECK_ERROR_HAS("slot_mapping[6]");
    CHECK_CACHE();
    static const int64_t bad[] = {NB, -1, -2147483647 - 1, 2147483647};
    for (int i = 0; i < 4; i++) {
      const kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, index_types[n]);
      fill_packed(index_types[n]);
      set_index(table, index_types[n], S * M - 2, bad[i]); /* the last block that is used */
      poison_output();
      memcpy(k_expect, k_io, sizeof k_io), memcpy(v_expect, v_io, sizeof v_io);
      CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
      CHECK_ERROR_HAS("sequence 1");
      CHECK_OUTPUT();
    }
    const kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, index_types[n]);
    fill_packed(index_types[n]);
    set_index(lengths, index_types[n], 1, -3);
    CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
    set_index(lengths, index_types[n], 1, 3),
        set_index(lengths, index_types[n], 0, 1000); /* longer than the output: cut at max_seq_len */
    CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  }
  /* Ten tokens need three blocks; the table has two columns. */
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  fill_packed(KVX_DTYPE_S32);
  g.block_table.max_blocks_per_seq = 2, g.block_table.indices_count = S * 2;
  CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
}

static void test_memory(void) {
  static const int64_t where[T] = {0, 1, 2, 3, 4, 5, 6};
  static const kvx_memory_type_t device[] = {KVX_MEMORY_DEVICE, KVX_MEMORY_UNIFIED};
  kvx_build_info_t info;
  memset(&info, 0, sizeof info);
  info.struct_bytes = sizeof info;
  CHECK_OK(kvx_build_info(&info));
  kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32, where);
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  fill_packed(KVX_DTYPE_S32);
  poison_cache();
  memcpy(k_want, k_cache, sizeof k_want), memcpy(v_want, v_cache, sizeof v_want);
  /* IO and cache on different sides. */
  for (int i = 0; i < 2; i++) {
    REFUSES(w.io.key.memory, device[i], kvx_write_kv(&c, &w, NULL));
    REFUSES(w.io.value.memory, device[i], kvx_write_kv(&c, &w, NULL));
    REFUSES(g.io.key.memory, device[i], kvx_gather_kv(&c, &g, NULL));
    REFUSES(g.io.value.memory, device[i], kvx_gather_kv(&c, &g, NULL));
  }
  c.k.memory = c.v.memory = KVX_MEMORY_DEVICE;
  CHECK_INVALID(kvx_write_kv(&c, &w, NULL));
  CHECK_INVALID(kvx_gather_kv(&c, &g, NULL));
  /* Nobody can say where UNKNOWN is, nor what memory 9 is. */
  for (int i = 0; i < 2; i++) {
    const kvx_memory_type_t nowhere = i ? (kvx_memory_type_t)9 : KVX_MEMORY_UNKNOWN;
    c.k.memory = c.v.memory = nowhere;
    CHECK_INVALID(kvx_validate_cache_desc(&c));
    CHECK_INVALID(kvx_write_kv(&c, &w, NULL));
    CHECK_INVALID(kvx_gather_kv(&c, &g, NULL));
    c.k.memory = c.v.memory = KVX_MEMORY_HOST;
    REFUSES(w.io.key.memory, nowhere, kvx_write_kv(&c, &w, NULL));
    REFUSES(w.io.value.memory, nowhere, kvx_write_kv(&c, &w, NULL));
    REFUSES(g.io.key.memory, nowhere, kvx_gather_kv(&c, &g, NULL));
  }
  CHECK_CACHE();
  /* Everything on the device. With a device these pointers would be followed there, so only machines without one are
   * asked. */
  for (int i = 0; i < 2 && info.cuda_devices == 0; i++) {
    c.k.memory = c.v.memory = w.io.key.memory = w.io.value.memory = g.io.key.memory = g.io.value.memory = device[i];
    if (info.has_cuda) {
      CHECK(kvx_write_kv(&c, &w, NULL) != KVX_STATUS_OK);
      CHECK(kvx_gather_kv(&c, &g, NULL) != KVX_STATUS_OK);
    } else {
      CHECK_STATUS(kvx_write_kv(&c, &w, NULL), KVX_STATUS_UNSUPPORTED);
      CHECK_ERROR_HAS("kvx_write_kv(): ");
      CHECK_ERROR_HAS("without CUDA");
      CHECK_STATUS(kvx_gather_kv(&c, &g, NULL), KVX_STATUS_UNSUPPORTED);
      CHECK_ERROR_HAS("kvx_gather_kv(): ");
    }
    CHECK_CACHE();
  }
}

static void test_empty(void) {
  static const int64_t where[T] = {0, 1, 2, 3, 4, 5, 6};
  const kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32, where);
  w.io.key.shape[0] = w.io.value.shape[0] = 0;
  w.io.num_tokens = w.slots.token_count = 0;
  poison_cache();
  memcpy(k_want, k_cache, sizeof k_want), memcpy(v_want, v_cache, sizeof v_want);
  CHECK_OK(kvx_write_kv(&c, &w, NULL));
  w.io.key.data = w.io.value.data = NULL, w.slots.slots = NULL; /* nothing to point at */
  CHECK_OK(kvx_write_kv(&c, &w, NULL));
  CHECK_OK(kvx_launch_write_kv_prefill(&c, &w, 4, NULL));
  CHECK_CACHE();
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  fill_packed(KVX_DTYPE_S32);
  g.io.key.shape[0] = g.io.value.shape[0] = 0;
  g.io.num_tokens = g.block_table.seq_count = g.block_table.indices_count = g.seq_lens.seq_count = 0;
  poison_output();
  memcpy(k_expect, k_io, sizeof k_io), memcpy(v_expect, v_io, sizeof v_io);
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  g.io.key.data = g.io.value.data = NULL, g.block_table.indices = NULL, g.seq_lens.lengths = NULL;
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  CHECK_OUTPUT();
  /* Sequences without tokens: every row is zero, and the table is not read. */
  g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  for (int i = 0; i < S * M; i++) set_index(table, KVX_DTYPE_S32, i, 1 << 30);
  set_index(lengths, KVX_DTYPE_S32, 0, 0), set_index(lengths, KVX_DTYPE_S32, 1, 0);
  memset(k_expect, 0, S * L * H * D * 4), memset(v_expect, 0, S * L * H * D * 4);
  CHECK_OK(kvx_gather_kv(&c, &g, NULL));
  CHECK_OUTPUT();
}

static void shift(int64_t* buffer, size_t bytes, int by) {
  memmove((char*)buffer + by, buffer, bytes - (size_t)by);
  memset(buffer, 0xA5, (size_t)by);
}

static void test_alignment(void) {
  static const int64_t where[T] = {9, -1, 0, 23, 14, 3, 4};
  for (int f = 0; f < 3; f++) {
    const kvx_dtype_t dtype = float_types[f];
    const int size = dtype_bytes(dtype);
    kvx_cache_desc_t c = make_cache(&layouts[0], dtype);
    kvx_write_desc_t w = make_write(dtype, dense_rows, KVX_DTYPE_S32, where);
    kvx_gather_desc_t g = make_gather(dtype, dense_rows, KVX_DTYPE_S32);
    fill_packed(KVX_DTYPE_S32);
    REFUSES(c.k.data, (char*)k_cache + 1, kvx_validate_cache_desc(&c));
    REFUSES(c.v.data, (char*)v_cache + size / 2, kvx_write_kv(&c, &w, NULL));
    REFUSES(w.io.key.data, (char*)k_io + 1, kvx_write_kv(&c, &w, NULL));
    REFUSES(w.slots.slots, (char*)slots + 2, kvx_write_kv(&c, &w, NULL));
    REFUSES(g.io.value.data, (char*)v_io + 1, kvx_gather_kv(&c, &g, NULL));
    REFUSES(g.block_table.indices, (char*)table + 1, kvx_gather_kv(&c, &g, NULL));
    REFUSES(g.seq_lens.lengths, (char*)lengths + 2, kvx_gather_kv(&c, &g, NULL));
    /* One element past a 16-byte boundary: no vector access fits, and the bytes are the same. */
    poison_cache();
    expect_write(&layouts[0], dtype, where);
    shift(k_want, sizeof k_want, size), shift(v_want, sizeof v_want, size);
    shift(k_io, sizeof k_io, size), shift(v_io, sizeof v_io, size);
    c.k.data = (char*)k_cache + size, c.v.data = (char*)v_cache + size;
    w.io.key.data = (char*)k_io + size, w.io.value.data = (char*)v_io + size;
    CHECK_OK(kvx_write_kv(&c, &w, NULL));
    CHECK_CACHE();
  }
}

static void test_words(void) {
  static const int64_t where[T] = {0, 1, 2, 3, 4, 5, 6};
  kvx_cache_desc_t c = make_cache(&layouts[0], KVX_DTYPE_F32);
  kvx_write_desc_t w = make_write(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32, where);
  kvx_gather_desc_t g = make_gather(KVX_DTYPE_F32, dense_rows, KVX_DTYPE_S32);
  c.size = 0;
  CHECK_INVALID(kvx_validate_cache_desc(&c));
  CHECK_ERROR_HAS("kvx_validate_cache_desc(): ");
  c = make_cache(&layouts[0], KVX_DTYPE_F32);
  c.v.shape[3] = 9; /* found later than the size is, and still said by the call that was made */
  CHECK_INVALID(kvx_validate_cache_desc(&c));
  CHECK_ERROR_HAS("kvx_validate_cache_desc(): ");
  CHECK_INVALID(kvx_write_kv(&c, &w, NULL));
  CHECK_ERROR_HAS("kvx_write_kv(): ");
  CHECK_ERROR_HAS("9"); /* the value it got */
  CHECK_INVALID(kvx_gather_kv(&c, &g, NULL));
  CHECK_ERROR_HAS("kvx_gather_kv(): ");
  CHECK_INVALID(kvx_launch_gather_kv_bf16(&c, &g, NULL));
  CHECK_ERROR_HAS("kvx_launch_gather_kv_bf16(): ");
}

int main(void) {
  test_version();
  test_sizes();
  test_layout_validation();
  test_table_validation();
  test_round_trips();
  test_invalid_slots();
  test_write_validation();
  test_ragged();
  test_kv_offsets();
  test_launch_names();
  test_fp8();
  test_out_of_range();
  test_memory();
  test_empty();
  test_alignment();
  test_words();
  return check_report();
}
