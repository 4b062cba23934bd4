/* v1.2 in host memory: what v1.1 cannot say. conformance_v1.c has layouts, tables and slots; here are K unlike V, fused
 * buffers, scales that the library writes, page tables, packed output and amax. */
#include "check.h"

enum { NB = 5, BS = 4, H = 2, D = 8, T = 6, BYTES = 4096 };
#define UNTOUCHED 0xA5
#define AXES(...) \
  (const int64_t[5]) { __VA_ARGS__ }

/* int64_t so that every dtype is aligned. */
static int64_t k_cache[BYTES / 8], v_cache[BYTES / 8], k_want[BYTES / 8], v_want[BYTES / 8];
static int64_t k_io[BYTES / 8], v_io[BYTES / 8], k_expect[BYTES / 8], v_expect[BYTES / 8];
static const int64_t where[T] = {9, -1, 0, 19, 14, 3};

static kvx_array_t array(const void* data, uint64_t bytes, kvx_dtype_t dtype, uint32_t ndim, const int64_t* shape,
                         const int64_t* stride) {
  kvx_array_t a;
  memset(&a, 0, sizeof a);
  a.data = (void*)(uintptr_t)data;
  a.data_bytes = bytes;
  a.ndim = ndim;
  a.dtype = dtype;
  memcpy(a.shape, shape, ndim * sizeof *shape);
  for (int64_t i = (int64_t)ndim - 1, dense = 1; i >= 0; dense *= shape[i], i--)
    a.stride[i] = stride ? stride[i] : dense;
  return a;
}

static kvx_plane_t make_plane(void* data, kvx_dtype_t dtype, kvx_layout_t layout, uint32_t ndim, const int64_t* shape,
                              const int64_t* stride) {
  kvx_plane_t p;
  memset(&p, 0, sizeof p);
  p.data = array(data, BYTES, dtype, ndim, shape, stride);
  p.layout = layout;
  return p;
}

static kvx_cache_t make_cache(kvx_dtype_t dtype) {
  kvx_cache_t c;
  memset(&c, 0, sizeof c);
  c.version = KVX_ABI_VERSION;
  c.struct_bytes = sizeof c;
  c.num_blocks = NB, c.block_size = BS, c.num_kv_heads = H, c.k_head_dim = c.v_head_dim = D;
  c.memory = KVX_MEMORY_HOST;
  c.device = -1;
  c.k = make_plane(k_cache, dtype, KVX_LAYOUT_BLOCK_NHD, 4, AXES(NB, BS, H, D), NULL);
  c.v = make_plane(v_cache, dtype, KVX_LAYOUT_BLOCK_NHD, 4, AXES(NB, BS, H, D), NULL);
  return c;
}

static kvx_write_args_t make_write(const kvx_cache_t* c, kvx_dtype_t dtype) {
  kvx_write_args_t w;
  memset(&w, 0, sizeof w);
  w.version = KVX_ABI_VERSION;
  w.struct_bytes = sizeof w;
  w.k = array(k_io, BYTES, dtype, 3, AXES(T, H, c->k_head_dim), NULL);
  w.v = array(v_io, BYTES, dtype, 3, AXES(T, H, c->v_head_dim), NULL);
  w.slots = array(where, sizeof where, KVX_DTYPE_S64, 1, AXES(T), NULL);
  w.invalid_slot = -1;
  return w;
}

/* Two sequences, 6 tokens in blocks 2 and 4, 3 tokens in block 0. */
enum { S = 2, L = 7, M = 2 };
static const int32_t ids[S * M] = {2, 4, 0, 1 << 30};
static const int64_t lens[S] = {6, 3};

static kvx_gather_args_t make_gather(const kvx_cache_t* c, kvx_dtype_t dtype) {
  kvx_gather_args_t g;
  memset(&g, 0, sizeof g);
  g.version = KVX_ABI_VERSION;
  g.struct_bytes = sizeof g;
  g.k = array(k_io, BYTES, dtype, 3, AXES(S * L, H, c->k_head_dim), NULL);
  g.v = array(v_io, BYTES, dtype, 4, AXES(S, L, H, c->v_head_dim), NULL);
  g.table.struct_bytes = sizeof g.table;
  g.table.format = KVX_BLOCK_TABLE_PACKED;
  g.table.indices = array(ids, sizeof ids, KVX_DTYPE_S32, 2, AXES(S, M), NULL);
  g.table.seq_lens = array(lens, sizeof lens, KVX_DTYPE_S64, 1, AXES(S), NULL);
  g.max_seq_len = L;
  return g;
}

static float number(int plane, int t, int h, int d) { return (float)(1 + (t * H + h) * D + d + 128 * plane); }

static void fill_rows(kvx_dtype_t dtype, int k_dim, int v_dim) {
  for (int plane = 0; plane < 2; plane++)
    for (int t = 0, i = 0; t < T; t++)
      for (int h = 0; h < H; h++)
        for (int d = 0; d < (plane ? v_dim : k_dim); d++, i++)
          put_number((char*)(plane ? v_io : k_io) + i * dtype_bytes(dtype), dtype, number(plane, t, h, d));
}

static void poison(void) {
  memset(k_cache, UNTOUCHED, BYTES), memset(v_cache, UNTOUCHED, BYTES);
  memset(k_want, UNTOUCHED, BYTES), memset(v_want, UNTOUCHED, BYTES);
}

static void poison_output(void) {
  memset(k_io, UNTOUCHED, BYTES), memset(v_io, UNTOUCHED, BYTES);
  memset(k_expect, UNTOUCHED, BYTES), memset(v_expect, UNTOUCHED, BYTES);
}

#define CHECK_CACHE() (CHECK_BYTES(k_cache, k_want, BYTES), CHECK_BYTES(v_cache, v_want, BYTES))
#define CHECK_OUTPUT() (CHECK_BYTES(k_io, k_expect, BYTES), CHECK_BYTES(v_io, v_expect, BYTES))

/* The token that was written to position `pos` of sequence `s`, or -1. */
static int token_at(int s, int pos) {
  const int64_t slot = (int64_t)ids[s * M + pos / BS] * BS + pos % BS;
  for (int t = 0; t < T; t++)
    if (where[t] == slot) return t;
  return -1;
}

/* ------------------------------------------------------------------ versions, sizes, words */

static void test_headers(void) {
  CHECK_OK(kvx_check_version(KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR));
  CHECK_OK(kvx_check_version(1, 0));
  CHECK_OK(kvx_check_version(1, 999)); /* a newer minor only adds */
  CHECK_STATUS(kvx_check_version(2, 0), KVX_STATUS_INCOMPATIBLE);
  CHECK_ERROR_HAS("kvx_check_version(): ");
  CHECK_ERROR_HAS("2.0");
  CHECK_STATUS(kvx_check_version(0, 9), KVX_STATUS_INCOMPATIBLE);

  kvx_cache_t c = make_cache(KVX_DTYPE_F32);
  kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  CHECK_OK(kvx_validate_cache(&c));
  CHECK_OK(kvx_validate_write(&c, &w));
  CHECK_OK(kvx_validate_gather(&c, &g));
  CHECK_INVALID(kvx_validate_cache(NULL));
  CHECK_INVALID(kvx_write(&c, NULL, NULL));
  CHECK_INVALID(kvx_write(NULL, &w, NULL));
  CHECK_INVALID(kvx_gather(&c, NULL, NULL));
  CHECK_INVALID(kvx_gather(NULL, &g, NULL));
  CHECK_INVALID(kvx_amax(NULL, NULL));
  REFUSES(c.struct_bytes, sizeof c - 1, kvx_validate_cache(&c));
  REFUSES(c.struct_bytes, 0, kvx_write(&c, &w, NULL));
  REFUSES(w.struct_bytes, sizeof w - 8, kvx_write(&c, &w, NULL));
  REFUSES(g.struct_bytes, sizeof g - 8, kvx_gather(&c, &g, NULL));
  REFUSES(g.table.struct_bytes, sizeof g.table - 8, kvx_gather(&c, &g, NULL));
  REFUSES(c.flags, 1, kvx_validate_cache(&c));
  REFUSES(w.flags, 1, kvx_write(&c, &w, NULL));
  REFUSES(g.flags, (uint64_t)1 << 63, kvx_gather(&c, &g, NULL));
  REFUSES(c.k.flags, 2, kvx_validate_cache(&c));
  static const uint32_t other[] = {0, 2u << 16, 2u << 16 | 2, 0xffffffffu, 2};
  for (int i = 0; i < 5; i++) {
    c.version = other[i];
    CHECK_STATUS(kvx_validate_cache(&c), KVX_STATUS_INCOMPATIBLE);
    CHECK_STATUS(kvx_write(&c, &w, NULL), KVX_STATUS_INCOMPATIBLE);
    c.version = KVX_ABI_VERSION;
    w.version = g.version = other[i];
    CHECK_STATUS(kvx_write(&c, &w, NULL), KVX_STATUS_INCOMPATIBLE);
    CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_INCOMPATIBLE);
    w.version = g.version = KVX_ABI_VERSION;
  }
  c.version = w.version = g.version = 1u << 16 | 77; /* a later minor with longer structs */
  c.struct_bytes += 64, w.struct_bytes += 64, g.struct_bytes += 64, g.table.struct_bytes += 64;
  CHECK_OK(kvx_validate_write(&c, &w));
  CHECK_OK(kvx_validate_gather(&c, &g));
}

static void test_words(void) {
  static const char* const names[] = {"OK",           "INVALID_ARGUMENT", "UNSUPPORTED",
                                      "OUT_OF_RANGE", "INCOMPATIBLE",     "INTERNAL_ERROR"};
  for (int i = 0; i < 6; i++) CHECK(strcmp(kvx_status_text((kvx_status_t)i), names[i]) == 0);
  CHECK(kvx_status_text((kvx_status_t)99) != NULL);
  kvx_cache_t c = make_cache(KVX_DTYPE_F32);
  const kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  const kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  kvx_amax_args_t a;
  memset(&a, 0, sizeof a);
  c.v.data.shape[3] = 77;
  CHECK_INVALID(kvx_validate_cache(&c));
  CHECK_ERROR_HAS("kvx_validate_cache(): ");
  CHECK_ERROR_HAS("77"); /* what it got */
  CHECK_ERROR_HAS("8");  /* what it takes */
  CHECK_INVALID(kvx_validate_write(&c, &w));
  CHECK_ERROR_HAS("kvx_validate_write(): ");
  CHECK_INVALID(kvx_validate_gather(&c, &g));
  CHECK_ERROR_HAS("kvx_validate_gather(): ");
  CHECK_INVALID(kvx_write(&c, &w, NULL));
  CHECK_ERROR_HAS("write(): ");
  CHECK_INVALID(kvx_gather(&c, &g, NULL));
  CHECK_ERROR_HAS("gather(): ");
  CHECK_STATUS(kvx_amax(&a, NULL), KVX_STATUS_INCOMPATIBLE);
  CHECK_ERROR_HAS("amax(): ");

  kvx_build_info_t info;
  memset(&info, 0, sizeof info);
  CHECK_INVALID(kvx_build_info(&info));
  CHECK_INVALID(kvx_build_info(NULL));
  info.struct_bytes = sizeof info;
  CHECK_OK(kvx_build_info(&info));
  CHECK(info.simd != NULL && info.simd[0] != 0);
  CHECK(info.cuda_archs != NULL);
  CHECK(info.max_threads >= 1);
  CHECK(info.has_cuda || (info.cuda_devices == 0 && info.cuda_runtime == 0));
}

/* ------------------------------------------------------------------ K unlike V, and both in one buffer */

static void test_k_unlike_v(void) {
  enum { DV = 4 };
  kvx_cache_t c = make_cache(KVX_DTYPE_F16);
  c.k = make_plane(k_cache, KVX_DTYPE_F16, KVX_LAYOUT_BLOCK_HND_PACKED, 5, AXES(NB, H, D / 2, BS, 2), NULL);
  c.v = make_plane(v_cache, KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_CUSTOM, 4, AXES(NB, BS, H, DV),
                   AXES(BS * H * DV, 1, BS * DV, BS)); /* tokens innermost */
  c.v_head_dim = DV;
  poison();
  fill_rows(KVX_DTYPE_BF16, D, DV);
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H && where[t] >= 0; h++)
      for (int d = 0; d < D; d++) {
        const int64_t b = where[t] / BS, o = where[t] % BS;
        put_number((char*)k_want + 2 * ((((b * H + h) * (D / 2) + d / 2) * BS + o) * 2 + d % 2), KVX_DTYPE_F16,
                   number(0, t, h, d));
        if (d < DV)
          put_number((char*)v_want + 4 * (((b * H + h) * DV + d) * BS + o), KVX_DTYPE_F32, number(1, t, h, d));
      }
  kvx_write_args_t w = make_write(&c, KVX_DTYPE_BF16);
  CHECK_OK(kvx_validate_write(&c, &w));
  CHECK_OK(kvx_write(&c, &w, NULL));
  CHECK_CACHE();
  /* Unwritten cells would come out as whatever the poison is in f16, so they are zero here. */
  for (int i = 0; i < BYTES / 2; i++)
    if (((uint16_t*)k_cache)[i] == 0xA5A5) ((uint16_t*)k_cache)[i] = 0;
  for (int i = 0; i < BYTES / 4; i++)
    if (((uint32_t*)v_cache)[i] == 0xA5A5A5A5u) ((uint32_t*)v_cache)[i] = 0;
  static const kvx_dtype_t types[] = {KVX_DTYPE_F32, KVX_DTYPE_BF16};
  for (int n = 0; n < 2; n++) { /* K out as one type, V out as the other */
    kvx_gather_args_t g = make_gather(&c, types[n]);
    g.v.dtype = types[1 - n];
    poison_output();
    for (int row = 0; row < S * L; row++)
      for (int i = 0; i < H * D; i++) {
        const int s = row / L, pos = row % L, t = pos < lens[s] ? token_at(s, pos) : -1;
        put_number((char*)k_expect + (row * H * D + i) * dtype_bytes(types[n]), types[n],
                   t < 0 ? 0 : number(0, t, i / D, i % D));
        if (i < H * DV)
          put_number((char*)v_expect + (row * H * DV + i) * dtype_bytes(types[1 - n]), types[1 - n],
                     t < 0 ? 0 : number(1, t, i / DV, i % DV));
      }
    CHECK_OK(kvx_validate_gather(&c, &g));
    CHECK_OK(kvx_gather(&c, &g, NULL));
    CHECK_OUTPUT();
  }
  REFUSES(c.v_head_dim, D, kvx_write(&c, &w, NULL));
  REFUSES(w.v.shape[2], D, kvx_write(&c, &w, NULL));
}

/* One buffer, seen twice. Offsets and strides in elements. */
typedef struct Fused {
  const char* name;
  int64_t v_offset, v_dim;
  int64_t stride[4]; /* block, token, head, dim; the same for K and V */
} Fused;

static void test_fused(void) {
  static const Fused kinds[] = {
      {"[2, blocks, tokens, heads, dim]", NB * BS * H * D, D, {BS * H * D, H * D, D, 1}},
      {"[blocks, 2, tokens, heads, dim]", BS * H * D, D, {2 * BS * H * D, H * D, D, 1}},
      {"[blocks, tokens, 2, heads, dim]", H * D, D, {2 * BS * H * D, 2 * H * D, D, 1}},
      {"[blocks, tokens, heads, 2, dim]", D, D, {2 * BS * H * D, 2 * H * D, 2 * D, 1}},
      {"[blocks, tokens, heads, 8 + 4]", D, 4, {BS * H * 12, H * 12, 12, 1}},
      {"[blocks, tokens, heads, dim, 2]", 1, D, {2 * BS * H * D, 2 * H * D, 2 * D, 2}},
  };
  for (int n = 0; n < (int)(sizeof kinds / sizeof kinds[0]); n++) {
    const Fused* f = &kinds[n];
    check_case = f->name;
    kvx_cache_t c = make_cache(KVX_DTYPE_F32);
    float* v_base = (float*)k_cache + f->v_offset;
    c.v_head_dim = f->v_dim;
    c.k = make_plane(k_cache, KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_NHD, 4, AXES(NB, BS, H, D), f->stride);
    c.v = make_plane(v_base, KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_NHD, 4, AXES(NB, BS, H, f->v_dim), f->stride);
    c.v.data.data_bytes = BYTES - (uint64_t)f->v_offset * 4;
    poison();
    fill_rows(KVX_DTYPE_F32, D, (int)f->v_dim);
    for (int t = 0; t < T; t++)
      for (int h = 0; h < H && where[t] >= 0; h++)
        for (int d = 0; d < D; d++) {
          const int64_t at =
              where[t] / BS * f->stride[0] + where[t] % BS * f->stride[1] + h * f->stride[2] + d * f->stride[3];
          ((float*)k_want)[at] = number(0, t, h, d);
          if (d < f->v_dim) ((float*)k_want)[at + f->v_offset] = number(1, t, h, d);
        }
    const kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
    CHECK_OK(kvx_write(&c, &w, NULL));
    CHECK_CACHE();
    const kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
    CHECK_OK(kvx_gather(&c, &g, NULL));
    for (int s = 0; s < S; s++)
      for (int pos = 0; pos < L; pos++) {
        const int t = pos < lens[s] ? token_at(s, pos) : -1;
        const float *k = (float*)k_io + (s * L + pos) * H * D, *v = (float*)v_io + (s * L + pos) * H * f->v_dim;
        if (t >= 0) CHECK(k[D + 5] == number(0, t, 1, 5) && v[f->v_dim + 2] == number(1, t, 1, 2));
        if (pos >= lens[s]) CHECK(k[0] == 0 && v[0] == 0);
      }
    c.v.data.data = v_base - 1; /* the last element of K, or of the V before: they collide now */
    CHECK_INVALID(kvx_validate_cache(&c));
    c.v.data.data = k_cache;
    CHECK_INVALID(kvx_validate_cache(&c));
  }
  check_case = "";
}

/* ------------------------------------------------------------------ scales that the library writes */

/* Row (t, h) has the largest magnitude 127 * 2^e, so its int8 scale is 2^e, and its codes are whole numbers. */
static int exponent(int plane, int t, int h) { return t - 2 * h + plane; }
static int code(int plane, int t, int h, int d) {
  return d == (t + h) % D ? (t % 2 ? 127 : -127) : 9 * d - 20 - t + h + plane;
}
static float power_of_two(int e) {
  const uint32_t bits = (uint32_t)(127 + e) << 23;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static void fill_s8_rows(void) {
  for (int plane = 0; plane < 2; plane++)
    for (int i = 0; i < T * H * D; i++) {
      const int t = i / (H * D), h = i / D % H, d = i % D;
      ((float*)(plane ? v_io : k_io))[i] = (float)code(plane, t, h, d) * power_of_two(exponent(plane, t, h));
    }
}

static void check_s8_gather(const kvx_cache_t* c) {
  const kvx_gather_args_t g = make_gather(c, KVX_DTYPE_F32);
  CHECK_OK(kvx_gather(c, &g, NULL));
  for (int row = 0; row < S * L; row++)
    for (int plane = 0; plane < 2; plane++) {
      const int s = row / L, pos = row % L, t = pos < lens[s] ? token_at(s, pos) : -1;
      const float* x = (float*)(plane ? v_io : k_io) + row * H * D;
      int right = 1;
      for (int i = 0; i < H * D; i++)
        right &= t >= 0 ? x[i] == (float)code(plane, t, i / D, i % D) * power_of_two(exponent(plane, t, i / D))
                        : pos < lens[s] || x[i] == 0;
      CHECK(right);
    }
}

static void test_token_head_scales(void) {
  static float k_scale[BYTES / 4], v_scale[BYTES / 4], scale_want[2][BYTES / 4];
  kvx_cache_t c = make_cache(KVX_DTYPE_S8);
  c.k.granularity = c.v.granularity = KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD;
  c.k.scale = array(k_scale, BYTES, KVX_DTYPE_F32, 3, AXES(NB, BS, H), NULL);
  c.v.scale = array(v_scale, BYTES, KVX_DTYPE_F32, 3, AXES(NB, BS, H),
                    AXES(1, 20, 100)); /* heads outermost, blocks innermost */
  for (int given = 0; given < 2; given++) {
    check_case = given ? "separate, given" : "separate, computed";
    kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
    static float token_scale[2][T * H];
    poison();
    memset(k_scale, UNTOUCHED, BYTES), memset(v_scale, UNTOUCHED, BYTES),
        memset(scale_want, UNTOUCHED, sizeof scale_want);
    fill_s8_rows();
    for (int t = 0; t < T; t++)
      for (int h = 0; h < H; h++) {
        /* Given scales are twice the computed ones: codes come out halved, and half away from zero. */
        for (int plane = 0; plane < 2; plane++) token_scale[plane][t * H + h] = 2 * power_of_two(exponent(plane, t, h));
        if (where[t] < 0) continue;
        const int64_t b = where[t] / BS, o = where[t] % BS;
        for (int plane = 0; plane < 2; plane++) {
          scale_want[plane][plane ? b + 20 * o + 100 * h : (b * BS + o) * H + h] =
              power_of_two(exponent(plane, t, h) + given);
          for (int d = 0; d < D; d++) {
            const int n = code(plane, t, h, d);
            ((int8_t*)(plane ? v_want : k_want))[((b * BS + o) * H + h) * D + d] = (int8_t)(!given  ? n
                                                                                            : n < 0 ? (n - 1) / 2
                                                                                                    : (n + 1) / 2);
          }
        }
      }
    if (given) w.k_token_scale = array(token_scale[0], sizeof token_scale[0], KVX_DTYPE_F32, 2, AXES(T, H), NULL);
    if (given) w.v_token_scale = array(token_scale[1], sizeof token_scale[1], KVX_DTYPE_F32, 2, AXES(T, H), NULL);
    CHECK_OK(kvx_write(&c, &w, NULL));
    CHECK_CACHE();
    CHECK_BYTES(k_scale, scale_want[0], BYTES);
    CHECK_BYTES(v_scale, scale_want[1], BYTES);
    if (!given) check_s8_gather(&c);
  }
  kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  REFUSES(c.k.scale.data, NULL, kvx_write(&c, &w, NULL));
  REFUSES(c.k.scale.shape[1], BS + 1, kvx_write(&c, &w, NULL));
  REFUSES(c.v.scale.stride[0], 0, kvx_write(&c, &w, NULL));
  REFUSES(c.v.scale.dtype, KVX_DTYPE_S8, kvx_write(&c, &w, NULL));
  w.k_token_scale = array(k_scale, BYTES, KVX_DTYPE_F16, 2, AXES(T, H), NULL);
  CHECK_INVALID(kvx_write(&c, &w, NULL)); /* f32 only */
  w.k_token_scale = array(k_scale, BYTES, KVX_DTYPE_F32, 2, AXES(T, H + 1), NULL);
  CHECK_INVALID(kvx_write(&c, &w, NULL));

  check_case = "inline";
  enum { CELL = D + 8 }; /* 8 elements, the f32 scale, 4 bytes that belong to no one */
  c = make_cache(KVX_DTYPE_S8);
  kvx_plane_t* planes[] = {&c.k, &c.v};
  for (int plane = 0; plane < 2; plane++) {
    *planes[plane] = make_plane(plane ? v_cache : k_cache, KVX_DTYPE_S8, KVX_LAYOUT_BLOCK_HND, 4, AXES(NB, H, BS, D),
                                AXES(H * BS * CELL, BS * CELL, CELL, 1));
    planes[plane]->granularity = KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD;
    planes[plane]->flags = KVX_PLANE_FLAG_SCALE_INLINE;
    planes[plane]->scale_offset = D;
    planes[plane]->scale_dtype = KVX_DTYPE_F32;
  }
  poison();
  fill_s8_rows();
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H && where[t] >= 0; h++)
      for (int plane = 0; plane < 2; plane++) {
        char* cell = (char*)(plane ? v_want : k_want) + ((where[t] / BS * H + h) * BS + where[t] % BS) * CELL;
        for (int d = 0; d < D; d++) cell[d] = (char)code(plane, t, h, d);
        put_number(cell + D, KVX_DTYPE_F32, power_of_two(exponent(plane, t, h)));
      }
  w = make_write(&c, KVX_DTYPE_F32);
  CHECK_OK(kvx_write(&c, &w, NULL));
  CHECK_CACHE();
  check_s8_gather(&c);
  REFUSES(c.k.scale_offset, D - 1, kvx_write(&c, &w, NULL));
  REFUSES(c.k.scale_offset, D + 1, kvx_write(&c, &w, NULL)); /* not aligned */
  REFUSES(c.v.scale_offset, CELL, kvx_write(&c, &w, NULL));  /* in the next row */
  REFUSES(c.v.scale_dtype, KVX_DTYPE_INVALID, kvx_write(&c, &w, NULL));
  REFUSES(c.k.granularity, KVX_SCALE_GRANULARITY_PER_HEAD, kvx_write(&c, &w, NULL));
  REFUSES(c.k.scale.data, k_scale, kvx_write(&c, &w, NULL)); /* inline and separate at once */
  check_case = "";
}

/* Groups of four e2m1 numbers under one power of two, two numbers a byte. */
static void test_groups(void) {
  enum { G = D / 4 };
  static const float values[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  static uint8_t k_scale[BYTES], v_scale[BYTES], scale_want[BYTES];
  kvx_cache_t c = make_cache(KVX_DTYPE_E2M1);
  c.k.granularity = c.v.granularity = KVX_SCALE_GRANULARITY_PER_GROUP;
  c.k.group_size = c.v.group_size = 4;
  c.k.scale = array(k_scale, BYTES, KVX_DTYPE_E8M0, 4, AXES(NB, BS, H, G), NULL);
  c.v.scale = array(v_scale, BYTES, KVX_DTYPE_E8M0, 4, AXES(NB, BS, H, G), NULL);
  poison();
  memset(k_scale, UNTOUCHED, BYTES), memset(v_scale, UNTOUCHED, BYTES), memset(scale_want, UNTOUCHED, BYTES);
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++)
      for (int d = 0; d < D; d++) {
        const int e = t - h + d / 4,
                  n = d % 4 == 1 ? 7 + 8 * (t % 2) : (t + 3 * h + 5 * d) % 16; /* one 6 in every group */
        ((float*)k_io)[(t * H + h) * D + d] = ((float*)v_io)[(t * H + h) * D + d] = values[n] * power_of_two(e);
        if (where[t] < 0) continue;
        uint8_t* byte = (uint8_t*)k_want + ((where[t] * H + h) * D + d) / 2;
        *byte = (uint8_t)(d % 2 ? (*byte & 15) | n << 4 : (*byte & 0xf0) | n); /* the even element is the low nibble */
        scale_want[(where[t] * H + h) * G + d / 4] = (uint8_t)(127 + e);
      }
  memcpy(v_want, k_want, BYTES);
  kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  CHECK_OK(kvx_write(&c, &w, NULL));
  CHECK_CACHE();
  CHECK_BYTES(k_scale, scale_want, BYTES);
  CHECK_BYTES(v_scale, scale_want, BYTES);
  float first[H * D];
  memcpy(first, (float*)k_io + 2 * H * D, sizeof first); /* token 2 is in slot 0: sequence 1, position 0 */
  const kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  CHECK_OK(kvx_gather(&c, &g, NULL));
  CHECK_BYTES((float*)k_io + L * H * D, first, sizeof first);
  REFUSES(c.k.group_size, 3, kvx_write(&c, &w, NULL)); /* does not divide 8 */
  REFUSES(c.k.group_size, 0, kvx_write(&c, &w, NULL));
  REFUSES(c.v.group_size, 8, kvx_write(&c, &w, NULL));         /* the scales have two groups */
  REFUSES(c.v.group_size, 1, kvx_write(&c, &w, NULL));         /* half a byte */
  REFUSES(c.k.data.stride[2], D + 1, kvx_write(&c, &w, NULL)); /* rows would start inside a byte */
  REFUSES(c.k.data.stride[3], 2, kvx_write(&c, &w, NULL));
}

/* Scales that are read: code x scale x tensor_scale on the way out, and the same divided on the way in. */
static void test_read_scales(void) {
  static const float per_head[H] = {2.0f, 0.5f}, twice = 2.0f;
  kvx_cache_t c = make_cache(KVX_DTYPE_F8_E4M3);
  c.k.granularity = KVX_SCALE_GRANULARITY_PER_HEAD;
  c.k.scale = array(per_head, sizeof per_head, KVX_DTYPE_F32, 1, AXES(H), NULL);
  c.k.tensor_scale = c.v.tensor_scale = &twice;
  poison();
  for (int i = 0; i < T * H * D; i++)
    ((float*)k_io)[i] = (float)(1 + i % 15) * per_head[i / D % H] * 2, ((float*)v_io)[i] = (float)(1 + i % 15) * 2;
  for (int i = 0; i < T * H * D; i++)
    if (where[i / (H * D)] >= 0)
      put_number((char*)k_want + where[i / (H * D)] * H * D + i % (H * D), KVX_DTYPE_F8_E4M3, (float)(1 + i % 15));
  memcpy(v_want, k_want, BYTES);
  const kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  CHECK_OK(kvx_write(&c, &w, NULL));
  CHECK_CACHE();
  float k_row[H * D], v_row[H * D];
  memcpy(k_row, (float*)k_io + 5 * H * D, sizeof k_row),
      memcpy(v_row, (float*)v_io + 5 * H * D, sizeof v_row); /* slot 3 */
  static const int64_t four[S] = {0, 4};
  kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  g.table.seq_lens = array(four, sizeof four, KVX_DTYPE_S64, 1, AXES(S), NULL);
  CHECK_OK(kvx_gather(&c, &g, NULL));
  CHECK_BYTES((float*)k_io + (L + 3) * H * D, k_row, sizeof k_row);
  CHECK_BYTES((float*)v_io + (L + 3) * H * D, v_row, sizeof v_row);
  kvx_cache_t plain = make_cache(KVX_DTYPE_F32);
  plain.k.granularity = KVX_SCALE_GRANULARITY_PER_HEAD;
  plain.k.scale = c.k.scale;
  CHECK_INVALID(kvx_validate_cache(&plain)); /* f32 takes no scales */
  REFUSES(c.k.granularity, 7, kvx_validate_cache(&c));
  REFUSES(c.k.granularity, KVX_SCALE_GRANULARITY_NONE,
          kvx_validate_cache(&c)); /* scales, and no word how to use them */
  REFUSES(c.k.group_size, 4, kvx_validate_cache(&c));
}

/* ------------------------------------------------------------------ tables and packed output */

/* A cache whose element says where it stands. */
static kvx_cache_t make_numbered(void) {
  for (int i = 0; i < NB * BS * H * D; i++) ((float*)k_cache)[i] = (float)i, ((float*)v_cache)[i] = (float)(-i);
  return make_cache(KVX_DTYPE_F32);
}

static void expect_rows(int64_t k_row, int64_t v_row, int64_t block, int64_t offset) {
  for (int i = 0; i < H * D; i++) {
    ((float*)k_expect)[k_row * H * D + i] = block < 0 ? 0.0f : (float)((block * BS + offset) * H * D + i);
    ((float*)v_expect)[v_row * H * D + i] = block < 0 ? 0.0f : (float)(-((block * BS + offset) * H * D + i));
  }
}
static void expect_row(int64_t row, int64_t block, int64_t offset) { expect_rows(row, row, block, offset); }

static kvx_array_t index_array(void* buffer, kvx_dtype_t dtype, int count, const int64_t* values) {
  for (int i = 0; i < count; i++) put_number((char*)buffer + i * dtype_bytes(dtype), dtype, (float)values[i]);
  return array(buffer, (uint64_t)(count * dtype_bytes(dtype)), dtype, 1, AXES(count), NULL);
}

static void test_page_csr(void) {
  static int64_t page_ids[8], pages[4], last[3], rows[4];
  static const int64_t length[3] = {6, 0, 4}, block[3][2] = {{4, 1}, {0, 0}, {3, 0}};
  const kvx_cache_t c = make_numbered();
  kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  const kvx_table_t packed = g.table;
  for (int n = 0; n < 2; n++) {
    const kvx_dtype_t dtype = n ? KVX_DTYPE_S64 : KVX_DTYPE_S32;
    check_case = n ? "S64" : "S32";
    g.table.format = KVX_BLOCK_TABLE_PAGE_CSR;
    g.table.indices = index_array(page_ids, dtype, 4, AXES(1 << 30, 4, 1, 3)); /* the first page belongs to no one */
    g.table.indptr = index_array(pages, dtype, 4, AXES(1, 3, 3, 4));
    g.table.last_page_len =
        index_array(last, dtype, 3, AXES(2, 0, 4)); /* the middle sequence has no page, so no last one */
    memset(&g.table.seq_lens, 0, sizeof g.table.seq_lens);
    g.k = array(k_io, BYTES, KVX_DTYPE_F32, 3, AXES(3 * 7, H, D), NULL);
    g.v = array(v_io, BYTES, KVX_DTYPE_F32, 3, AXES(3 * 7, H, D), NULL);
    memset(&g.cu_seqlens, 0, sizeof g.cu_seqlens);
    poison_output();
    for (int s = 0; s < 3; s++)
      for (int pos = 0; pos < 7; pos++) expect_row(s * 7 + pos, pos < length[s] ? block[s][pos / BS] : -1, pos % BS);
    CHECK_OK(kvx_validate_gather(&c, &g));
    CHECK_OK(kvx_gather(&c, &g, NULL));
    CHECK_OUTPUT();
    /* Packed: sequences touch, and a row that no sequence has stays as it is. */
    g.k.shape[0] = g.v.shape[0] = 11;
    g.cu_seqlens = index_array(rows, dtype, 4, AXES(0, 6, 6, 10));
    poison_output();
    for (int row = 0; row < 10; row++)
      expect_row(row, row < 6 ? block[0][row / BS] : 3, (row < 6 ? row : row - 6) % BS);
    CHECK_OK(kvx_validate_gather(&c, &g));
    CHECK_OK(kvx_gather(&c, &g, NULL));
    CHECK_OUTPUT();
    /* More rows than tokens: the rest of the sequence is zero. Fewer: it is cut. */
    g.cu_seqlens = index_array(rows, dtype, 4, AXES(0, 7, 8, 11));
    poison_output();
    for (int row = 0; row < 11; row++)
      expect_row(row, row < 6 ? block[0][row / BS] : row < 8 ? -1 : 3, (row < 6 ? row : row - 8) % BS);
    CHECK_OK(kvx_gather(&c, &g, NULL));
    CHECK_OUTPUT();
    /* No rows at all. */
    g.k.shape[0] = g.v.shape[0] = 0;
    g.cu_seqlens = index_array(rows, dtype, 4, AXES(0, 0, 0, 0));
    poison_output();
    CHECK_OK(kvx_gather(&c, &g, NULL));
    CHECK_OUTPUT();
    g.k.shape[0] = g.v.shape[0] = 11;
    /* Ranges that are none. */
    static const int64_t wrong[][4] = {{0, 8, 8, 8}, {0, 6, 5, 10}, {-1, 5, 6, 10}, {0, 6, 6, 12}};
    for (int i = 0; i < 4; i++) {
      g.cu_seqlens = index_array(rows, dtype, 4, wrong[i]);
      poison_output();
      CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
      CHECK_OUTPUT();
    }
    g.cu_seqlens = index_array(rows, dtype, 4, AXES(0, 6, 6, 10));
    REFUSES(g.cu_seqlens.shape[0], 3, kvx_gather(&c, &g, NULL));
    REFUSES(g.cu_seqlens.dtype, KVX_DTYPE_F32, kvx_gather(&c, &g, NULL));
    REFUSES(g.v.shape[0], 10, kvx_gather(&c, &g, NULL));                  /* k has 11 rows */
    REFUSES(g.table.seq_lens, packed.seq_lens, kvx_gather(&c, &g, NULL)); /* two answers to one question */
    REFUSES(g.table.last_page_len.shape[0], 2, kvx_gather(&c, &g, NULL));
    REFUSES(g.table.last_page_len.data, NULL, kvx_gather(&c, &g, NULL));
    REFUSES(g.table.indptr.data, NULL, kvx_gather(&c, &g, NULL));
    REFUSES(g.table.beam_width, 2, kvx_gather(&c, &g, NULL));
    index_array(last, dtype, 3, AXES(BS + 1, 0, 4)); /* more tokens than a page has */
    CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
    index_array(last, dtype, 3, AXES(0, 0, 4));
    CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
    index_array(last, dtype, 3, AXES(2, 0, 4));
    index_array(pages, dtype, 4, AXES(1, 3, 2, 4)); /* a sequence of minus one page */
    CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
    index_array(pages, dtype, 4, AXES(1, 3, 3, 4));
    CHECK_OK(kvx_gather(&c, &g, NULL));
    g.table.indices.shape[0] = 3; /* the last page is past the ids */
    CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
  }
  check_case = "";
}

/* A table that is a window of a larger one, and slots that are every other entry. */
static void test_strided_tables(void) {
  static const int32_t wide[] = {7777, 2, -1, 4, 7777, 0, -1, -1, 7777};
  const kvx_cache_t c = make_numbered();
  kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  g.table.indices = array(wide + 1, sizeof wide - 4, KVX_DTYPE_S32, 2, AXES(S, M), AXES(4, 2));
  g.v.stride[0] = (L + 2) * H * D; /* and output sequences with two rows between them */
  poison_output();
  for (int s = 0; s < S; s++)
    for (int pos = 0; pos < L; pos++)
      expect_rows(s * L + pos, s * (L + 2) + pos, pos < lens[s] ? ids[s * M + pos / BS] : -1, pos % BS);
  CHECK_OK(kvx_gather(&c, &g, NULL));
  CHECK_OUTPUT();
  static const int32_t spaced[] = {0, 99, 5, 99, -1, 99, 7, 99, 8, 99, 19};
  kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  w.slots = array(spaced, sizeof spaced, KVX_DTYPE_S32, 1, AXES(T), AXES(2));
  w.k.stride[0] = w.v.stride[0] = 0; /* one row for every token: reading it twice harms no one */
  for (int i = 0; i < H * D; i++) ((float*)k_io)[i] = (float)(1000 + i), ((float*)v_io)[i] = (float)(2000 + i);
  memcpy(k_want, k_cache, BYTES), memcpy(v_want, v_cache, BYTES);
  for (int t = 0; t < T; t++)
    if (spaced[2 * t] >= 0)
      memcpy((float*)k_want + spaced[2 * t] * H * D, k_io, H * D * 4),
          memcpy((float*)v_want + spaced[2 * t] * H * D, v_io, H * D * 4);
  CHECK_OK(kvx_write(&c, &w, NULL));
  CHECK_CACHE();
  REFUSES(w.slots.shape[0], T + 1, kvx_write(&c, &w, NULL));
  REFUSES(w.slots.data_bytes, sizeof spaced - 1, kvx_write(&c, &w, NULL));
}

/* Pools alone: no data pointers, each pool with its own bound, the table without a sequence axis. */
static void test_pools(void) {
  static float primary[4][BS * H * D], secondary[2][BS * H * D];
  static const int32_t second = -2147483647 - 1;
  static int32_t index[S * 2][2][1] = {{{3}, {0}}, {{second | 1}, {-1}}, {{0}, {1}}, {{2}, {second | 0}}};
  for (int i = 0; i < BS * H * D; i++) {
    for (int b = 0; b < 4; b++) primary[b][i] = (float)(b * 1000 + i);
    for (int b = 0; b < 2; b++) secondary[b][i] = (float)(-b * 1000 - i - 1);
  }
  kvx_cache_t c = make_cache(KVX_DTYPE_F32);
  c.num_blocks = 4;
  c.k = make_plane(NULL, KVX_DTYPE_F32, KVX_LAYOUT_BLOCK_NHD, 4, AXES(4, BS, H, D), NULL);
  c.v = c.k;
  c.pool_primary = primary, c.pool_secondary = secondary;
  c.primary_bytes = sizeof primary, c.secondary_bytes = sizeof secondary;
  c.bytes_per_block = sizeof primary[0];
  c.secondary_blocks = 2;
  static const int64_t four[S] = {4, 3};
  kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  g.max_seq_len = 4;
  g.k = array(k_io, BYTES, KVX_DTYPE_F32, 4, AXES(S * 2, 4, H, D), NULL);
  g.v = array(v_io, BYTES, KVX_DTYPE_F32, 3, AXES(S * 2 * 4, H, D), NULL);
  g.table.format = KVX_BLOCK_TABLE_KV_OFFSETS;
  g.table.beam_width = 2;
  g.table.indices = array(index, sizeof index, KVX_DTYPE_S32, 3, AXES(S * 2, 2, 1), NULL);
  g.table.seq_lens = array(four, sizeof four, KVX_DTYPE_S64, 1, AXES(S), NULL);
  for (int form = 0; form < 2; form++) {
    poison_output();
    for (int row = 0; row < S * 2 * 4; row++)
      for (int plane = 0; plane < 2; plane++)
        for (int i = 0; i < H * D; i++) {
          const int32_t id = index[row / 4][plane][0];
          const float* block = id < 0 ? secondary[(id & 0x7fffffff) % 2] : primary[id];
          ((float*)(plane ? v_expect : k_expect))[row * H * D + i] =
              id == -1 || row % 4 >= four[row / 8] ? 0.0f : block[row % 4 * H * D + i];
        }
    CHECK_OK(kvx_gather(&c, &g, NULL));
    CHECK_OUTPUT();
    g.table.indices =
        array(index, sizeof index, KVX_DTYPE_S32, 4, AXES(S, 2, 2, 1), NULL); /* the same, said with a sequence axis */
  }
  index[3][1][0] = second | 2; /* a block of the primary pool's bound, past the secondary's */
  CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
  index[3][1][0] = second;
  REFUSES(c.primary_bytes, sizeof primary - 1, kvx_gather(&c, &g, NULL));
  REFUSES(c.secondary_bytes, sizeof secondary - 1, kvx_gather(&c, &g, NULL));
  REFUSES(c.secondary_blocks, -1, kvx_gather(&c, &g, NULL));
  REFUSES(c.bytes_per_block, sizeof primary[0] - 4, kvx_gather(&c, &g, NULL));
  REFUSES(g.table.beam_width, 1, kvx_gather(&c, &g, NULL));
  REFUSES(g.table.format, KVX_BLOCK_TABLE_PACKED, kvx_gather(&c, &g, NULL)); /* pools belong to KV_OFFSETS */
  const kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  CHECK_INVALID(kvx_write(&c, &w, NULL)); /* slots name blocks of k.data and v.data, and there are none */
}

/* ------------------------------------------------------------------ amax */

static kvx_amax_args_t make_amax(kvx_scale_granularity_t granularity, float* out, uint32_t ndim, const int64_t* shape) {
  kvx_amax_args_t a;
  memset(&a, 0, sizeof a);
  a.version = KVX_ABI_VERSION;
  a.struct_bytes = sizeof a;
  a.x = array(k_io, BYTES, KVX_DTYPE_F32, 3, AXES(T, H, D), NULL);
  a.slots = array(where, sizeof where, KVX_DTYPE_S64, 1, AXES(T), NULL);
  a.invalid_slot = -1;
  a.amax = array(out, NB * H * 4, KVX_DTYPE_F32, ndim, shape, NULL);
  a.block_size = BS;
  a.granularity = granularity;
  a.memory = KVX_MEMORY_HOST;
  a.device = -1;
  return a;
}

static void test_amax(void) {
  float* x = (float*)k_io;
  float out[NB * H], want[NB * H];
  for (int i = 0; i < T * H * D; i++) x[i] = (float)(i % 2 ? i : -i);
  const float nan = power_of_two(128) - power_of_two(128), infinity = power_of_two(128);
  x[95] = nan, x[94] = -infinity; /* the last two: they do not count, so 93 is the largest */

  memset(out, 0, sizeof out);
  kvx_amax_args_t a = make_amax(KVX_SCALE_GRANULARITY_PER_TENSOR, out, 0, AXES(0));
  CHECK_OK(kvx_amax(&a, NULL));
  CHECK(out[0] == 93);
  out[0] = 500;
  CHECK_OK(kvx_amax(&a, NULL));
  CHECK(out[0] == 500 && out[1] == 0); /* in and out: the larger stays */

  memset(out, 0, sizeof out);
  a = make_amax(KVX_SCALE_GRANULARITY_PER_HEAD, out, 1, AXES(H));
  CHECK_OK(kvx_amax(&a, NULL));
  CHECK(out[0] == 87 && out[1] == 93);

  for (int i = 0; i < NB * H; i++) out[i] = want[i] = 20;
  a = make_amax(KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD, out, 2, AXES(NB, H));
  for (int i = 0; i < T * H * D - 2; i++)
    if (where[i / (H * D)] >= 0 && want[where[i / (H * D)] / BS * H + i / D % H] < (float)i)
      want[where[i / (H * D)] / BS * H + i / D % H] = (float)i;
  CHECK_OK(kvx_amax(&a, NULL));
  CHECK_BYTES(out, want, sizeof out);

  for (int i = 0; i < NB * H; i++) out[i] = 0;
  a = make_amax(KVX_SCALE_GRANULARITY_PER_BLOCK, out, 1, AXES(NB));
  a.amax.stride[0] = 2; /* every other entry */
  CHECK_OK(kvx_amax(&a, NULL));
  for (int b = 0; b < NB; b++) {
    float best = 0;
    for (int i = 0; i < T * H * D - 2; i++)
      if (where[i / (H * D)] >= 0 && where[i / (H * D)] / BS == b) best = (float)i;
    CHECK(out[2 * b] == best);
  }
  CHECK(out[1] == 0 && out[3] == 0);
  a.slots.data_bytes = a.x.data_bytes = 0; /* unknown is not checked */
  CHECK_OK(kvx_amax(&a, NULL));

  memset(out, 0, sizeof out), memset(want, 0, sizeof want);
  a = make_amax(KVX_SCALE_GRANULARITY_PER_BLOCK, out, 1, AXES(3)); /* slots to 11 only */
  CHECK_STATUS(kvx_amax(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_BYTES(out, want, sizeof out);
  a = make_amax(KVX_SCALE_GRANULARITY_PER_BLOCK, out, 1, AXES(NB));
  a.invalid_slot = 19;
  a.x.stride[1] = 0, a.x.stride[2] = 3; /* any strides */
  CHECK_OK(kvx_amax(&a, NULL));
  CHECK(out[4] == 0);
  a = make_amax(KVX_SCALE_GRANULARITY_PER_HEAD, out, 1, AXES(H));
  a.x.shape[0] = 0, a.x.data = NULL;
  memset(out, 0, sizeof out);
  CHECK_OK(kvx_amax(&a, NULL));
  CHECK_BYTES(out, want, sizeof out);

  a = make_amax(KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD, out, 2, AXES(NB, H));
  REFUSES(a.struct_bytes, sizeof a - 8, kvx_amax(&a, NULL));
  REFUSES(a.flags, 1, kvx_amax(&a, NULL));
  REFUSES(a.granularity, KVX_SCALE_GRANULARITY_NONE, kvx_amax(&a, NULL));
  REFUSES(a.granularity, KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD, kvx_amax(&a, NULL));
  REFUSES(a.granularity, KVX_SCALE_GRANULARITY_PER_HEAD, kvx_amax(&a, NULL)); /* amax has two axes */
  REFUSES(a.amax.shape[1], H + 1, kvx_amax(&a, NULL));
  REFUSES(a.amax.dtype, KVX_DTYPE_F16, kvx_amax(&a, NULL));
  REFUSES(a.amax.data, NULL, kvx_amax(&a, NULL));
  REFUSES(a.amax.data_bytes, NB * H * 4 - 1, kvx_amax(&a, NULL));
  REFUSES(a.block_size, 0, kvx_amax(&a, NULL));
  REFUSES(a.slots.data, NULL, kvx_amax(&a, NULL));
  REFUSES(a.slots.shape[0], T - 1, kvx_amax(&a, NULL));
  REFUSES(a.x.dtype, KVX_DTYPE_S8, kvx_amax(&a, NULL));
  REFUSES(a.x.data_bytes, T * H * D * 4 - 1, kvx_amax(&a, NULL));
  REFUSES(a.memory, KVX_MEMORY_UNKNOWN, kvx_amax(&a, NULL));
}

/* ------------------------------------------------------------------ range, memory, empty, alignment */

static void test_out_of_range(void) {
  static const int32_t bad[T] = {1, 2, 3, 4, 5, NB * BS};
  kvx_cache_t c = make_cache(KVX_DTYPE_F32);
  kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  uint64_t errors = 0;
  w.slots = array(bad, sizeof bad, KVX_DTYPE_S32, 1, AXES(T), NULL);
  w.errors = &errors;
  poison();
  CHECK_OK(kvx_validate_write(&c, &w)); /* validation reads no slot */
  CHECK_STATUS(kvx_write(&c, &w, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_ERROR_HAS("slot_mapping[5] is 20");
  CHECK_CACHE();
  CHECK_INT(errors, 0); /* counted on the device, returned on the host */
  w.invalid_slot = NB * BS;
  CHECK_OK(kvx_write(&c, &w, NULL));
  static const int32_t bad_ids[S * M] = {2, 4, NB, 0};
  kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  g.table.indices = array(bad_ids, sizeof bad_ids, KVX_DTYPE_S32, 2, AXES(S, M), NULL);
  poison_output();
  CHECK_STATUS(kvx_gather(&c, &g, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_OUTPUT();
}

static void test_memory(void) {
  kvx_build_info_t info;
  memset(&info, 0, sizeof info);
  info.struct_bytes = sizeof info;
  CHECK_OK(kvx_build_info(&info));
  kvx_cache_t c = make_cache(KVX_DTYPE_F32);
  const kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  const kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  static float out[1];
  kvx_amax_args_t a = make_amax(KVX_SCALE_GRANULARITY_PER_TENSOR, out, 0, AXES(0));
  poison();
  for (int memory = -1; memory < 5; memory += memory == 0 ? 4 : 1) {
    REFUSES(c.memory, memory, kvx_validate_cache(&c));
    REFUSES(c.memory, memory, kvx_write(&c, &w, NULL));
    REFUSES(c.memory, memory, kvx_gather(&c, &g, NULL));
    REFUSES(a.memory, memory, kvx_amax(&a, NULL));
  }
  for (int memory = KVX_MEMORY_DEVICE; memory <= KVX_MEMORY_UNIFIED && info.cuda_devices == 0; memory++) {
    c.memory = a.memory = memory;
    const kvx_status_t got[] = {kvx_write(&c, &w, NULL), kvx_gather(&c, &g, NULL), kvx_amax(&a, NULL)};
    for (int i = 0; i < 3; i++) CHECK(info.has_cuda ? got[i] != KVX_STATUS_OK : got[i] == KVX_STATUS_UNSUPPORTED);
    CHECK(kvx_last_error()[0] != 0);
  }
  CHECK_CACHE();
}

static void test_empty_and_unaligned(void) {
  kvx_cache_t c = make_cache(KVX_DTYPE_F32);
  kvx_write_args_t w = make_write(&c, KVX_DTYPE_F32);
  w.k.shape[0] = w.v.shape[0] = w.slots.shape[0] = 0;
  w.k.data = w.v.data = w.slots.data = NULL;
  poison();
  CHECK_OK(kvx_write(&c, &w, NULL));
  CHECK_CACHE();
  kvx_gather_args_t g = make_gather(&c, KVX_DTYPE_F32);
  g.k.shape[0] = g.v.shape[0] = g.table.indices.shape[0] = g.table.seq_lens.shape[0] = 0;
  g.k.data = g.v.data = g.table.indices.data = g.table.seq_lens.data = NULL;
  CHECK_OK(kvx_gather(&c, &g, NULL));
  g.max_seq_len = g.v.shape[1] = 0; /* no sequence, so no rows to count either */
  CHECK_OK(kvx_gather(&c, &g, NULL));

  w = make_write(&c, KVX_DTYPE_F32);
  g = make_gather(&c, KVX_DTYPE_F32);
  REFUSES(c.k.data.data, (char*)k_cache + 2, kvx_validate_cache(&c));
  REFUSES(w.v.data, (char*)v_io + 1, kvx_write(&c, &w, NULL));
  REFUSES(w.slots.data, (char*)(uintptr_t)where + 4, kvx_write(&c, &w, NULL));
  REFUSES(g.k.data, (char*)k_io + 3, kvx_gather(&c, &g, NULL));
  REFUSES(g.table.indices.data, (char*)(uintptr_t)ids + 2, kvx_gather(&c, &g, NULL));
  /* 4 bytes past a boundary of 16 or more: the element is aligned, and that is enough. */
  fill_rows(KVX_DTYPE_F32, D, D);
  memmove((char*)k_io + 4, k_io, T * H * D * 4), memmove((char*)v_io + 4, v_io, T * H * D * 4);
  c.k.data.data = (char*)k_cache + 4, c.v.data.data = (char*)v_cache + 4;
  w.k.data = (char*)k_io + 4, w.v.data = (char*)v_io + 4;
  c.k.data.data_bytes = c.v.data.data_bytes = w.k.data_bytes = w.v.data_bytes = BYTES - 4;
  for (int t = 0; t < T; t++)
    for (int i = 0; i < H * D && where[t] >= 0; i++) {
      ((float*)k_want)[1 + where[t] * H * D + i] = number(0, t, i / D, i % D);
      ((float*)v_want)[1 + where[t] * H * D + i] = number(1, t, i / D, i % D);
    }
  CHECK_OK(kvx_write(&c, &w, NULL));
  CHECK_CACHE();
}

int main(void) {
  test_headers();
  test_words();
  test_k_unlike_v();
  test_fused();
  test_token_head_scales();
  test_groups();
  test_read_scales();
  test_page_csr();
  test_strided_tables();
  test_pools();
  test_amax();
  test_out_of_range();
  test_memory();
  test_empty_and_unaligned();
  return check_report();
}
