/* The calls of section 21 from C, on host memory: a paged decode, one by addresses and a latent one, beside a loop that
 * does what the text says, in doubles, and descriptors that are refused. */
#include <math.h>

#include "check.h"

enum { NB = 5, BS = 4, H = 2, HQ = 6, D = 8, DV = 12, S = 3, M = 3, RANK = 16, ROPE = 4 };

static float q[S][HQ][RANK + ROPE], out[S][HQ][RANK], lse[S][HQ], sinks[HQ];
static float k_cache[NB][BS][H][D], v_cache[NB][BS][H][DV];
static float latent_cache[NB][BS][RANK + ROPE]; /* one tensor: a row is latent, then rotary part */
static int32_t table[S][M], lens[S];

static kvx_array_t array(void* data, uint64_t bytes, kvx_dtype_t dtype, uint32_t ndim, int64_t a, int64_t b, int64_t c,
                         int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  kvx_array_t made;
  memset(&made, 0, sizeof made);
  made.data = data, made.data_bytes = bytes, made.ndim = ndim, made.dtype = dtype;
  for (int64_t i = (int64_t)ndim - 1, dense = 1; i >= 0; dense *= shape[i], i--)
    made.shape[i] = shape[i], made.stride[i] = dense;
  return made;
}

static kvx_cache_t make_cache(void) {
  kvx_cache_t c;
  memset(&c, 0, sizeof c);
  c.version = KVX_ABI_VERSION, c.struct_bytes = sizeof c;
  c.num_blocks = NB, c.block_size = BS, c.num_kv_heads = H, c.k_head_dim = D, c.v_head_dim = DV;
  c.memory = KVX_MEMORY_HOST;
  c.k.layout = c.v.layout = KVX_LAYOUT_BLOCK_NHD;
  c.k.data = array(k_cache, sizeof k_cache, KVX_DTYPE_F32, 4, NB, BS, H, D);
  c.v.data = array(v_cache, sizeof v_cache, KVX_DTYPE_F32, 4, NB, BS, H, DV);
  return c;
}

static kvx_cache_t make_latent_cache(void) { /* two views of one buffer, section 4.4 */
  kvx_cache_t c = make_cache();
  c.num_kv_heads = 1, c.k_head_dim = RANK, c.v_head_dim = ROPE;
  c.k.data = array(latent_cache, sizeof latent_cache, KVX_DTYPE_F32, 4, NB, BS, 1, RANK);
  c.v.data =
      array(&latent_cache[0][0][RANK], sizeof latent_cache - RANK * sizeof(float), KVX_DTYPE_F32, 4, NB, BS, 1, ROPE);
  for (int i = 0; i < 2; i++) {
    kvx_array_t* a = i ? &c.v.data : &c.k.data;
    a->stride[0] = BS * (RANK + ROPE), a->stride[1] = a->stride[2] = RANK + ROPE;
  }
  return c;
}

static kvx_attention_args_t make_args(int64_t query_dim, int64_t value_dim) {
  kvx_attention_args_t a;
  memset(&a, 0, sizeof a);
  a.version = KVX_ABI_VERSION, a.struct_bytes = sizeof a;
  a.flags = KVX_ATTENTION_CAUSAL;
  a.q = array(q, sizeof q, KVX_DTYPE_F32, 3, S, HQ, query_dim, 0);
  a.q.stride[0] = HQ * (RANK + ROPE), a.q.stride[1] = RANK + ROPE;
  a.out = array(out, sizeof out, KVX_DTYPE_F32, 3, S, HQ, value_dim, 0);
  a.out.stride[0] = HQ * RANK, a.out.stride[1] = RANK;
  a.lse = array(lse, sizeof lse, KVX_DTYPE_F32, 2, S, HQ, 0, 0);
  a.table.struct_bytes = sizeof a.table;
  a.table.format = KVX_BLOCK_TABLE_PACKED;
  a.table.indices = array(table, sizeof table, KVX_DTYPE_S32, 2, S, M, 0, 0);
  a.table.seq_lens = array(lens, sizeof lens, KVX_DTYPE_S32, 1, S, 0, 0, 0);
  a.softmax_scale = 0.25f;
  return a;
}

static float number(int* state) { /* -1 .. 1, the same on every machine */
  *state = (int)(((unsigned)*state * 1103515245u + 12345u) & 0x7fffffffu);
  return (float)(*state >> 8) / (float)(1 << 22) - 1.0f;
}

static void fill(void) {
  int state = 7;
  float* const places[] = {&q[0][0][0], &k_cache[0][0][0][0], &v_cache[0][0][0][0], &latent_cache[0][0][0], sinks};
  const size_t counts[] = {sizeof q / 4, sizeof k_cache / 4, sizeof v_cache / 4, sizeof latent_cache / 4, HQ};
  const int32_t ids[S][M] = {{3, 0, 99}, {1, 99, -1}, {99, 99, 99}}; /* entries past a length may hold anything */
  for (int n = 0; n < 5; n++)
    for (size_t i = 0; i < counts[n]; i++) places[n][i] = number(&state);
  memcpy(table, ids, sizeof ids);
  lens[0] = 7, lens[1] = 1, lens[2] = 0;
  for (int b = 0; b < NB; b++) /* rows past a length are poison */
    for (int t = 0; t < BS; t++) {
      const int used = b == 3 || (b == 0 && t < 3) || (b == 1 && t == 0);
      if (used) continue;
      for (int i = 0; i < H * D; i++) (&k_cache[b][t][0][0])[i] = NAN;
      for (int i = 0; i < H * DV; i++) (&v_cache[b][t][0][0])[i] = NAN;
      for (int i = 0; i < RANK + ROPE; i++) latent_cache[b][t][i] = NAN;
    }
  memset(out, 0x55, sizeof out), memset(lse, 0x55, sizeof lse);
}

/* Row (s, h) beside the loop; a latent row is its own value. */
static void check_row(int s, int h, int is_latent, int window, const float* sink) {
  const int dim = is_latent ? RANK + ROPE : D, value_dim = is_latent ? RANK : DV, kv_head = h / (HQ / H);
  const int first = window && lens[s] > window ? lens[s] - window : 0;
  double most = -INFINITY, sum = 0, total, sums[RANK] = {0}, score[M * BS];
  for (int p = first; p < lens[s]; p++) {
    const int b = table[s][p / BS], t = p % BS;
    const float* key = is_latent ? latent_cache[b][t] : k_cache[b][t][kv_head];
    score[p] = 0;
    for (int i = 0; i < dim; i++) score[p] += 0.25 * q[s][h][i] * key[i];
    if (score[p] > most) most = score[p];
  }
  for (int p = first; p < lens[s]; p++) {
    const int b = table[s][p / BS], t = p % BS;
    const float* value = is_latent ? latent_cache[b][t] : v_cache[b][t][kv_head];
    sum += exp(score[p] - most);
    for (int i = 0; i < value_dim; i++) sums[i] += exp(score[p] - most) * value[i];
  }
  total = sum + (sink && sum > 0 ? exp(*sink - most) : 0);
  for (int i = 0; i < value_dim; i++) CHECK(fabs(out[s][h][i] - (sum > 0 ? sums[i] / total : 0)) < 1e-6);
  if (sum > 0) CHECK(fabs(lse[s][h] - (most + log(sum))) < 1e-6);
  else CHECK(lse[s][h] == -INFINITY);
}

static void check_all(int is_latent, int window, int has_sinks) {
  for (int s = 0; s < S; s++)
    for (int h = 0; h < HQ; h++) check_row(s, h, is_latent, window, has_sinks ? &sinks[h] : NULL);
}

static void test_call(const char* name, int is_latent) {
  kvx_cache_t c = is_latent ? make_latent_cache() : make_cache();
  kvx_attention_args_t a = is_latent ? make_args(RANK + ROPE, RANK) : make_args(D, DV);
  uint64_t bytes = 1;
  check_case = name;
  if (is_latent) a.flags |= KVX_ATTENTION_LATENT;
  fill();
  CHECK_OK(kvx_attention_workspace(&c, &a, &bytes));
  CHECK_INT(bytes, 0); /* the host needs none */
  CHECK_OK(kvx_attention_plan(&c, &a, NULL));
  CHECK_OK(kvx_attention(&c, &a, NULL));
  check_all(is_latent, 0, 0);
  if (!is_latent) CHECK_INT(memcmp(&out[0][0][DV], "\x55\x55\x55\x55", 4), 0); /* past the row */
  a.sinks = array(sinks, sizeof sinks, KVX_DTYPE_F32, 1, HQ, 0, 0, 0);
  a.window = 3;
  CHECK_OK(kvx_attention(&c, &a, NULL));
  check_all(is_latent, 3, 1);
  a.flags |= KVX_ATTENTION_FP8_PRODUCTS; /* allowed, and nothing that a host does */
  CHECK_OK(kvx_attention(&c, &a, NULL));
  check_all(is_latent, 3, 1);
  a.flags &= ~(uint64_t)KVX_ATTENTION_FP8_PRODUCTS;
  a.lse.data = NULL; /* not wanted */
  CHECK_OK(kvx_attention(&c, &a, NULL));

  REFUSES(a.struct_bytes, 8, kvx_attention(&c, &a, NULL));
  REFUSES(a.flags, 16, kvx_attention(&c, &a, NULL));
  REFUSES(a.reserved[0], 1, kvx_attention(&c, &a, NULL));
  REFUSES(a.flags, a.flags ^ KVX_ATTENTION_LATENT, kvx_attention(&c, &a, NULL)); /* shapes of the other kind */
  REFUSES(a.q.shape[2], is_latent ? RANK : D - 1, kvx_attention(&c, &a, NULL));
  REFUSES(a.out.shape[2], is_latent ? ROPE : D, kvx_attention(&c, &a, NULL));
  REFUSES(a.out.shape[1], HQ - 1, kvx_attention(&c, &a, NULL));
  REFUSES(a.out.stride[0], 1, kvx_attention(&c, &a, NULL));
  REFUSES(a.sinks.shape[0], HQ - 1, kvx_attention(&c, &a, NULL));
  REFUSES(a.softmax_scale, 0.0f, kvx_attention(&c, &a, NULL));
  REFUSES(a.soft_cap, -1.0f, kvx_attention(&c, &a, NULL));
  REFUSES(a.window, -1, kvx_attention(&c, &a, NULL));
  REFUSES(a.table.indices.dtype, KVX_DTYPE_F32, kvx_attention(&c, &a, NULL));
  CHECK_INVALID(kvx_attention(&c, NULL, NULL));
  CHECK_INVALID(kvx_attention(NULL, &a, NULL));
  a.version = 2u << 16;
  CHECK_STATUS(kvx_attention(&c, &a, NULL), KVX_STATUS_INCOMPATIBLE);
  a.version = KVX_ABI_VERSION;
  fill();
  table[0][1] = NB; /* positions 4 to 6, which the query sees */
  CHECK_STATUS(kvx_attention(&c, &a, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_ERROR_HAS("block_table of sequence 0");
  CHECK_INT(memcmp(out, "\x55\x55\x55\x55", 4), 0); /* nothing was written */
  table[0][1] = 0, lens[1] = -1;
  CHECK_STATUS(kvx_attention(&c, &a, NULL), KVX_STATUS_OUT_OF_RANGE);
}

static void test_latent_has_one_head(void) {
  kvx_cache_t c = make_cache();
  kvx_attention_args_t a = make_args(D + DV, D);
  check_case = "two heads";
  a.flags |= KVX_ATTENTION_LATENT;
  fill();
  CHECK_INVALID(kvx_attention(&c, &a, NULL));
  CHECK_ERROR_HAS("2 KV heads; a latent cache has one");
}

/* Blocks that are buffers of their own: the same blocks, by their addresses. */
static void test_pointers(void) {
  kvx_cache_t c = make_cache();
  kvx_attention_args_t a = make_args(D, DV);
  int64_t k_at[NB], v_at[NB];
  check_case = "pointers";
  fill();
  for (int b = 0; b < NB; b++) k_at[b] = (int64_t)(intptr_t)k_cache[b], v_at[b] = (int64_t)(intptr_t)v_cache[b];
  c.k.data.data = c.v.data.data = NULL, c.k.data.data_bytes = c.v.data.data_bytes = 0;
  CHECK_INVALID(kvx_attention(&c, &a, NULL)); /* no data, and no addresses */
  a.k_pointers = k_at, a.v_pointers = v_at;
  CHECK_OK(kvx_attention_plan(&c, &a, NULL));
  CHECK_OK(kvx_attention(&c, &a, NULL));
  check_all(0, 0, 0);
  REFUSES(a.v_pointers, NULL, kvx_attention(&c, &a, NULL));
  REFUSES(c.k.data.data, k_cache, kvx_attention(&c, &a, NULL));
  REFUSES(c.v.flags, KVX_PLANE_FLAG_SCALE_INLINE, kvx_attention(&c, &a, NULL));
  v_at[0] = 0; /* positions 4 to 6 of sequence 0 */
  CHECK_STATUS(kvx_attention(&c, &a, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_ERROR_HAS("each with an address");
}

/* Latent caches lie in one buffer. */
static void test_latent_has_no_pointers(void) {
  static const int64_t at[NB];
  kvx_cache_t c = make_latent_cache();
  kvx_attention_args_t a = make_args(RANK + ROPE, RANK);
  check_case = "latent pointers";
  a.flags |= KVX_ATTENTION_LATENT;
  a.k_pointers = a.v_pointers = at;
  c.k.data.data = c.v.data.data = NULL, c.k.data.data_bytes = c.v.data.data_bytes = 0;
  fill();
  CHECK_INVALID(kvx_attention(&c, &a, NULL));
  CHECK_ERROR_HAS("LATENT beside k_pointers");
}

int main(void) {
  test_call("paged", 0);
  test_call("latent", 1);
  test_latent_has_one_head();
  test_pointers();
  test_latent_has_no_pointers();
  return check_report();
}
