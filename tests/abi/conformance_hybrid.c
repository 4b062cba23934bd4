/* The calls of section 23 from C: small rows whose numbers are exact, so that little is left to rounding, and arguments
 * that are refused with a sentence. */
#include <math.h>

#include "check.h"

enum { D = 8, ROWS = 4, SLOTS = 2, T = 6, H = 2, RATIO = 2, COLUMNS = 2, PAGES = 4 };

static kvx_array_t array(void* data, uint64_t bytes, kvx_dtype_t dtype, uint32_t ndim, int64_t a, int64_t b, int64_t c,
                         int64_t d, int64_t e) {
  const int64_t shape[5] = {a, b, c, d, e};
  kvx_array_t out;
  memset(&out, 0, sizeof out);
  out.data = data, out.data_bytes = bytes, out.ndim = ndim, out.dtype = dtype;
  for (int64_t i = (int64_t)ndim - 1, dense = 1; i >= 0; dense *= shape[i], i--)
    out.shape[i] = shape[i], out.stride[i] = dense;
  return out;
}

#define VECTOR(x, dtype, n) array(x, sizeof(x), dtype, 1, n, 0, 0, 0, 0)
#define MATRIX(x, dtype, n, m) array(x, sizeof(x), dtype, 2, n, m, 0, 0, 0)

/* Rows of f32: a page is [rows][D]. */
static kvx_rows_t plain_rows(void* pages, uint64_t bytes, int64_t num_pages, int64_t rows) {
  kvx_rows_t r;
  memset(&r, 0, sizeof r);
  r.pages = array(pages, bytes, KVX_DTYPE_U8, 2, num_pages, rows * D * 4, 0, 0, 0);
  r.rows = rows, r.dim = D, r.dtype = KVX_DTYPE_F32;
  return r;
}

static int32_t slots[3], cu_seqlens[4], starts[3];

static kvx_step_t step_of(int num_seqs) {
  kvx_step_t s;
  s.slots = array(slots, sizeof slots, KVX_DTYPE_S32, 1, num_seqs, 0, 0, 0, 0);
  s.cu_seqlens = array(cu_seqlens, sizeof cu_seqlens, KVX_DTYPE_S32, 1, num_seqs + 1, 0, 0, 0, 0);
  s.starts = array(starts, sizeof starts, KVX_DTYPE_S32, 1, num_seqs, 0, 0, 0, 0);
  return s;
}

/* One sequence of `tokens` tokens. */
static kvx_step_t one_sequence(int32_t slot, int32_t tokens, int32_t start) {
  slots[0] = slot, cu_seqlens[0] = 0, cu_seqlens[1] = tokens, starts[0] = start;
  return step_of(1);
}

/* Position 3 is a quarter turn, the others none. */
static float cosines[8][2], sines[8][2];

static void fill_turns(void) {
  for (int p = 0; p < 8; p++)
    for (int i = 0; i < 2; i++) cosines[p][i] = p != 3, sines[p][i] = p == 3;
}

#define HEAD(a)                                                                             \
  (memset(&(a), 0, sizeof(a)), (a).version = KVX_ABI_VERSION, (a).struct_bytes = sizeof(a), \
   (a).memory = KVX_MEMORY_HOST, (a).device = -1)

/* What every struct of arguments refuses. */
#define REFUSES_HEADS(a, call)                       \
  do {                                               \
    REFUSES((a).struct_bytes, 8, call);              \
    REFUSES((a).flags, 64, call);                    \
    REFUSES((a).reserved[1], 1, call);               \
    REFUSES((a).memory, 77, call);                   \
    (a).version = (KVX_ABI_VERSION_MAJOR + 1) << 16; \
    CHECK_STATUS(call, KVX_STATUS_INCOMPATIBLE);     \
    (a).version = KVX_ABI_VERSION;                   \
  } while (0)

/* ------------------------------------------------------------------ append_swa */

static float x[T][D], window[SLOTS][ROWS][D];
static int32_t positions[SLOTS][ROWS];

static kvx_append_swa_args_t append_args(void) {
  kvx_append_swa_args_t a;
  HEAD(a);
  for (int t = 0; t < T; t++)
    for (int d = 0; d < D; d++) x[t][d] = (float)(10 * t + d + 1);
  memset(window, 0, sizeof window), memset(positions, 0xff, sizeof positions);
  a.window = plain_rows(window, sizeof window, SLOTS, ROWS);
  a.positions = MATRIX(positions, KVX_DTYPE_S32, SLOTS, ROWS);
  a.x = MATRIX(x, KVX_DTYPE_F32, T, D);
  slots[0] = 1, slots[1] = -1, starts[0] = 2, starts[1] = 0;
  cu_seqlens[0] = 0, cu_seqlens[1] = 5, cu_seqlens[2] = 6;
  a.step = step_of(2);
  return a;
}

static void test_append_swa(void) {
  /* Five tokens at positions 2 to 6 in a window of four: the last four stay. The second sequence is skipped. */
  kvx_append_swa_args_t a = append_args();
  CHECK_OK(kvx_append_swa(&a, NULL));
  for (int p = 3; p <= 6; p++) {
    CHECK_BYTES(window[1][p % ROWS], x[p - 2], sizeof x[0]);
    CHECK_INT(positions[1][p % ROWS], p);
  }
  for (int r = 0; r < ROWS; r++) CHECK(window[0][r][0] == 0 && positions[0][r] == -1);

  /* The last four elements of position 3 turn: pairs (2i, 2i + 1). */
  a = append_args();
  fill_turns();
  a.finish.cos = MATRIX(cosines, KVX_DTYPE_F32, 8, 2), a.finish.sin = MATRIX(sines, KVX_DTYPE_F32, 8, 2);
  CHECK_OK(kvx_append_swa(&a, NULL));
  CHECK_BYTES(window[1][3], x[1], 4 * sizeof(float));
  CHECK(window[1][3][4] == -x[1][5] && window[1][3][5] == x[1][4] && window[1][3][6] == -x[1][7] &&
        window[1][3][7] == x[1][6]);
  CHECK_BYTES(window[1][0], x[2], sizeof x[0]);
  REFUSES(a.finish.sin.ndim, 0, kvx_append_swa(&a, NULL));
  CHECK_ERROR_HAS("together");
  REFUSES(a.finish.cos.shape[1], 5, kvx_append_swa(&a, NULL));
  a.finish.cos.shape[0] = a.finish.sin.shape[0] = 6; /* position 6 has no row */
  CHECK_STATUS(kvx_append_swa(&a, NULL), KVX_STATUS_OUT_OF_RANGE);

  /* A norm: every element 2 has a mean square of 4, so r is 1/2. */
  float weight[D];
  a = append_args();
  for (int d = 0; d < D; d++) weight[d] = (float)(d + 1), x[0][d] = 2;
  a.finish.weight = VECTOR(weight, KVX_DTYPE_F32, D);
  a.step = one_sequence(0, 1, 1);
  CHECK_OK(kvx_append_swa(&a, NULL));
  CHECK_BYTES(window[0][1], weight, sizeof weight);
  REFUSES(a.finish.weight.shape[0], D - 1, kvx_append_swa(&a, NULL));
  REFUSES(a.finish.eps, -1.0f, kvx_append_swa(&a, NULL));

  /* Without positions rows are the step's own, by token. */
  a = append_args();
  memset(&a.positions, 0, sizeof a.positions);
  CHECK_OK(kvx_append_swa(&a, NULL));
  CHECK_BYTES(window, x, 5 * sizeof x[0]);
  CHECK(window[1][1][0] == 0 && positions[1][0] == -1);
}

/* Four e4m3 in groups of two, four bf16, two powers of two and two zeros: 12 bytes and 4. */
static void test_coded_rows(void) {
  uint8_t pages[SLOTS][ROWS * 16 + 8], want[12];
  kvx_append_swa_args_t a = append_args();
  memset(pages, 0xee, sizeof pages);
  a.window.pages = array(pages, sizeof pages, KVX_DTYPE_U8, 2, SLOTS, sizeof pages[0], 0, 0, 0);
  a.window.rope_dim = 4, a.window.group = 2, a.window.scale_bytes = 4;
  a.window.dtype = KVX_DTYPE_F8_E4M3, a.window.scale_dtype = KVX_DTYPE_E8M0, a.window.least_amax = 1e-4f,
  a.window.flags = KVX_ROWS_ROUND_FIRST;
  const float row[D] = {1, -2, 0, 0, 3, 4, 5, -6};
  memcpy(x[0], row, sizeof row);
  a.step = one_sequence(1, 1, 2);
  CHECK_OK(kvx_append_swa(&a, NULL));
  /* 2 / 448 is raised to 2^-7; zeros have the scale of 1e-4: 2^-22. */
  put_number(want, KVX_DTYPE_F8_E4M3, 128), put_number(want + 1, KVX_DTYPE_F8_E4M3, -256), want[2] = want[3] = 0;
  for (int i = 0; i < 4; i++) put_number(want + 4 + 2 * i, KVX_DTYPE_BF16, row[4 + i]);
  CHECK_BYTES(pages[1] + 2 * 12, want, 12);
  const uint8_t scales[4] = {120, 105, 0, 0};
  CHECK_BYTES(pages[1] + ROWS * 12 + 2 * 4, scales, 4);
  CHECK_INT(pages[1][0], 0xee);
  CHECK_INT(pages[1][ROWS * 16], 0xee); /* padding */
  REFUSES(a.window.group, 3, kvx_append_swa(&a, NULL));
  REFUSES(a.window.scale_bytes, 1, kvx_append_swa(&a, NULL));
  REFUSES(a.window.scale_dtype, KVX_DTYPE_S32, kvx_append_swa(&a, NULL));
  REFUSES(a.window.flags, 8, kvx_append_swa(&a, NULL));
  REFUSES(a.window.rows, 5, kvx_append_swa(&a, NULL)); /* a page has no room */
  CHECK_ERROR_HAS("a page has 72 bytes");
  REFUSES(a.window.pages.stride[0], 60, kvx_append_swa(&a, NULL));               /* pages overlap */
  REFUSES(a.window.pages.data, (void*)(pages[0] + 1), kvx_append_swa(&a, NULL)); /* bf16 at odd bytes */
}

static void refuse_append(void) {
  kvx_append_swa_args_t a = append_args();
  CHECK_INVALID(kvx_append_swa(NULL, NULL));
  REFUSES_HEADS(a, kvx_append_swa(&a, NULL));
  REFUSES(a.window.pages.ndim, 1, kvx_append_swa(&a, NULL));
  REFUSES(a.window.pages.data, NULL, kvx_append_swa(&a, NULL));
  REFUSES(a.window.pages.data_bytes, sizeof window - 1, kvx_append_swa(&a, NULL));
  REFUSES(a.window.rows, 0, kvx_append_swa(&a, NULL));
  REFUSES(a.window.rows, INT64_MAX, kvx_append_swa(&a, NULL));
  REFUSES(a.window.dim, D + 2, kvx_append_swa(&a, NULL));
  REFUSES(a.window.dim, INT64_MAX, kvx_append_swa(&a, NULL));
  REFUSES(a.window.rope_dim, D, kvx_append_swa(&a, NULL));
  REFUSES(a.window.dtype, KVX_DTYPE_S64, kvx_append_swa(&a, NULL));
  REFUSES(a.window.group, 2, kvx_append_swa(&a, NULL)); /* f32 has no groups */
  REFUSES(a.window.reserved[0], 1, kvx_append_swa(&a, NULL));
  REFUSES(a.positions.shape[1], ROWS - 1, kvx_append_swa(&a, NULL));
  REFUSES(a.positions.dtype, KVX_DTYPE_S64, kvx_append_swa(&a, NULL));
  REFUSES(a.x.dtype, KVX_DTYPE_F8_E4M3, kvx_append_swa(&a, NULL));
  REFUSES(a.x.shape[1], D - 1, kvx_append_swa(&a, NULL));
  REFUSES(a.x.shape[0], T + 1, kvx_append_swa(&a, NULL)); /* past data_bytes */
  REFUSES(a.step.slots.dtype, KVX_DTYPE_S64, kvx_append_swa(&a, NULL));
  REFUSES(a.step.cu_seqlens.shape[0], 2, kvx_append_swa(&a, NULL));
  CHECK_ERROR_HAS("step.cu_seqlens");
  REFUSES(a.step.starts.stride[0], 2, kvx_append_swa(&a, NULL));
  memset(window, 0, sizeof window);
  slots[0] = SLOTS;
  CHECK_STATUS(kvx_append_swa(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  slots[0] = 1, starts[0] = -1;
  CHECK_STATUS(kvx_append_swa(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  starts[0] = INT32_MAX - 1;
  CHECK_STATUS(kvx_append_swa(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  starts[0] = 2, cu_seqlens[2] = T + 1;
  CHECK_STATUS(kvx_append_swa(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  cu_seqlens[2] = 4;
  CHECK_STATUS(kvx_append_swa(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_ERROR_HAS("Nothing was written");
  for (int i = 0; i < SLOTS * ROWS; i++) CHECK(window[i / ROWS][i % ROWS][0] == 0);
}

/* ------------------------------------------------------------------ compress */

static float state[SLOTS * 3 * RATIO * 2 * D], kv[T][2 * D], score[T][2 * D], entries[PAGES][2][D];
static int32_t table[SLOTS][COLUMNS], num_shared[SLOTS];

static kvx_compress_args_t compress_args(uint64_t flags) {
  kvx_compress_args_t a;
  const int64_t width = flags & KVX_COMPRESS_OVERLAP ? 2 * D : D;
  HEAD(a);
  a.flags = flags, a.ratio = RATIO;
  memset(kv, 0, sizeof kv), memset(score, 0, sizeof score), memset(entries, 0, sizeof entries);
  for (int t = 0; t < T; t++)
    for (int d = 0; d < width; d++) (&kv[0][0])[t * width + d] = (float)(1 << t) + (d >= D ? 1000.0f : 0.0f);
  for (size_t i = 0; i < sizeof state / 4; i++) state[i] = 0;
  if (flags & KVX_COMPRESS_RUNNING) {
    for (int s = 0; s < SLOTS; s++)
      for (int d = 0; d < D; d++) state[s * 3 * D + d] = -INFINITY;
    a.state = array(state, sizeof state, KVX_DTYPE_F32, 3, SLOTS, 3, D, 0, 0);
  } else {
    const int windows = flags & KVX_COMPRESS_OVERLAP ? 3 : 1;
    for (int i = 0; i < SLOTS * windows * RATIO; i++)
      for (int d = 0; d < D; d++) state[(i * 2 + 1) * D + d] = -INFINITY;
    a.state = array(state, sizeof state, KVX_DTYPE_F32, 5, SLOTS, windows, RATIO, 2, D);
  }
  a.kv = array(kv, sizeof kv, KVX_DTYPE_F32, 2, T, width, 0, 0, 0),
  a.score = array(score, sizeof score, KVX_DTYPE_F32, 2, T, width, 0, 0, 0);
  a.entries = plain_rows(entries, sizeof entries, PAGES, 2);
  table[0][0] = 0, table[0][1] = 1, table[1][0] = 3, table[1][1] = 2;
  a.block_table = MATRIX(table, KVX_DTYPE_S32, SLOTS, COLUMNS);
  a.step = one_sequence(1, 5, 0);
  return a;
}

static void test_compress(void) {
  const uint64_t kinds[3] = {0, KVX_COMPRESS_RUNNING, KVX_COMPRESS_OVERLAP};
  for (int k = 0; k < 3; k++) {
    /* Equal scores: an entry is the mean of its tokens, 1 2 | 4 8 | 16; with overlap of what the two before gave as
     * well. */
    const float add = k == 2 ? 1000 : 0, want[2] = {1.5f + add, k == 2 ? (1 + 2 + 2 * 1000 + 4 + 8) / 4.0f : 6};
    kvx_compress_args_t a = compress_args(kinds[k]);
    check_case = k == 0 ? "ring" : k == 1 ? "running" : "overlap";
    CHECK_OK(kvx_compress(&a, NULL));
    CHECK(entries[3][0][0] == want[0] && entries[3][0][D - 1] == want[0]);
    CHECK(entries[3][1][0] == want[1] && entries[3][1][D - 1] == want[1]);
    CHECK(entries[2][0][0] == 0 && entries[0][0][0] == 0);

    /* The sixth token closes the window that stayed open: its fellow, 16, is in the state. */
    memset(entries, 0, sizeof entries);
    a.kv.shape[0] = a.score.shape[0] = 1;
    a.step = one_sequence(1, 1, 5);
    CHECK_OK(kvx_compress(&a, NULL));
    CHECK(entries[2][0][0] == (k == 2 ? (4 + 8 + 16 + 1 + 2 * 1000) / 4.0f : 8.5f));
    CHECK(entries[3][0][0] == 0);

    /* Pages a request does not have, and entries that are shared, are not written; the state goes on. */
    a = compress_args(kinds[k]);
    table[1][0] = -1;
    CHECK_OK(kvx_compress(&a, NULL));
    for (int p = 0; p < PAGES; p++) CHECK(entries[p][0][0] == 0);
    a = compress_args(kinds[k]);
    num_shared[1] = 2;
    a.num_shared = VECTOR(num_shared, KVX_DTYPE_S32, SLOTS);
    CHECK_OK(kvx_compress(&a, NULL));
    CHECK(entries[3][0][0] == 0 && entries[3][1][0] == want[1]);
    REFUSES(a.num_shared.shape[0], 1, kvx_compress(&a, NULL));
  }
  check_case = "";

  /* A bias by place: with -inf on the second of two, the first is the mean. */
  float bias[RATIO][D];
  kvx_compress_args_t a = compress_args(0);
  for (int d = 0; d < D; d++) bias[0][d] = 0, bias[1][d] = -INFINITY;
  a.bias = MATRIX(bias, KVX_DTYPE_F32, RATIO, D);
  CHECK_OK(kvx_compress(&a, NULL));
  CHECK(entries[3][0][0] == 1 && entries[3][1][0] == 4);
  REFUSES(a.bias.shape[0], 1, kvx_compress(&a, NULL));

  /* Eight equal elements, rotated, are one: 8 * 1.5 / sqrt(8). */
  a = compress_args(KVX_COMPRESS_HADAMARD);
  CHECK_OK(kvx_compress(&a, NULL));
  CHECK(fabsf(entries[3][0][0] - 1.5f * sqrtf(8)) < 1e-5f);
  for (int d = 1; d < D; d++) CHECK(entries[3][0][d] == 0);
}

static void refuse_compress(void) {
  kvx_compress_args_t a = compress_args(0);
  CHECK_INVALID(kvx_compress(NULL, NULL));
  REFUSES_HEADS(a, kvx_compress(&a, NULL));
  REFUSES(a.flags, KVX_COMPRESS_OVERLAP | KVX_COMPRESS_RUNNING, kvx_compress(&a, NULL));
  CHECK_ERROR_HAS("OVERLAP or RUNNING");
  REFUSES(a.flags, KVX_COMPRESS_RUNNING, kvx_compress(&a, NULL)); /* another state */
  REFUSES(a.ratio, 0, kvx_compress(&a, NULL));
  REFUSES(a.ratio, INT64_MAX, kvx_compress(&a, NULL));
  REFUSES(a.state.dtype, KVX_DTYPE_BF16, kvx_compress(&a, NULL));
  REFUSES(a.state.shape[2], 1, kvx_compress(&a, NULL));
  REFUSES(a.state.data, NULL, kvx_compress(&a, NULL));
  REFUSES(a.kv.shape[1], 2 * D, kvx_compress(&a, NULL));
  REFUSES(a.kv.dtype, KVX_DTYPE_F8_E4M3, kvx_compress(&a, NULL));
  REFUSES(a.score.shape[0], T - 1, kvx_compress(&a, NULL));
  REFUSES(a.block_table.shape[0], 1, kvx_compress(&a, NULL));
  REFUSES(a.block_table.dtype, KVX_DTYPE_S64, kvx_compress(&a, NULL));
  REFUSES(a.entries.pages.ndim, 0, kvx_compress(&a, NULL));
  REFUSES(a.step.starts.data, NULL, kvx_compress(&a, NULL));
  table[1][0] = PAGES;
  CHECK_STATUS(kvx_compress(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  table[1][0] = 3, starts[0] = 2 * COLUMNS * RATIO; /* entries past the table */
  CHECK_STATUS(kvx_compress(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
  for (int p = 0; p < PAGES; p++) CHECK(entries[p][0][0] == 0);
}

/* ------------------------------------------------------------------ index_scores and topk */

static float q[T][H][D], weights[T][H], scores[T][4];
static int32_t indices[T][3], lengths[T];

static kvx_index_scores_args_t scores_args(void) {
  kvx_index_scores_args_t a;
  HEAD(a);
  for (int t = 0; t < T; t++)
    for (int h = 0; h < H; h++) {
      weights[t][h] = h ? 0.5f : 2.0f;
      for (int d = 0; d < D; d++) q[t][h][d] = h ? -1.0f : 1.0f;
    }
  for (int i = 0; i < PAGES * 2; i++)
    for (int d = 0; d < D; d++)
      (&entries[0][0][0])[i * D + d] = (float)(i % 2 ? -i : i); /* page p has rows 2p and -(2p + 1) */
  a.q = array(q, sizeof q, KVX_DTYPE_F32, 3, T, H, D, 0, 0), a.weights = MATRIX(weights, KVX_DTYPE_F32, T, H);
  a.keys = plain_rows(entries, sizeof entries, PAGES, 2);
  table[0][0] = 0, table[0][1] = 1, table[1][0] = 3, table[1][1] = 2;
  a.block_table = MATRIX(table, KVX_DTYPE_S32, SLOTS, COLUMNS);
  memset(scores, 0, sizeof scores);
  a.scores = MATRIX(scores, KVX_DTYPE_F32, T, 4);
  a.ratio = RATIO;
  a.step = one_sequence(1, 5, 2);
  return a;
}

static void test_index_scores(void) {
  /* A positive key speaks to head 0 (weight 2), a negative one to head 1 (weight 1/2). Position p reads (p + 1) / 2
   * entries. */
  const float want[4] = {2.0f * 6 * D, 0.5f * 7 * D, 2.0f * 4 * D, 0.5f * 5 * D};
  kvx_index_scores_args_t a = scores_args();
  CHECK_OK(kvx_index_scores(&a, NULL));
  for (int t = 0; t < T; t++)
    for (int j = 0; j < 4; j++)
      CHECK(scores[t][j] == (t < 5 && j < (2 + t + 1) / RATIO ? want[j] : -INFINITY)); /* token 5 is nobody's */
  table[1][0] = -1;
  CHECK_OK(kvx_index_scores(&a, NULL));
  CHECK(scores[4][0] == -INFINITY && scores[4][1] == -INFINITY && scores[4][2] == want[2]);

  /* e4m3 queries. */
  uint8_t q8[T][H][D];
  for (int i = 0; i < T * H * D; i++) put_number((uint8_t*)q8 + i, KVX_DTYPE_F8_E4M3, (&q[0][0][0])[i]);
  a = scores_args();
  a.q = array(q8, sizeof q8, KVX_DTYPE_F8_E4M3, 3, T, H, D, 0, 0);
  CHECK_OK(kvx_index_scores(&a, NULL));
  CHECK(scores[4][0] == want[0] && scores[4][1] == want[1]);

  a = scores_args();
  CHECK_INVALID(kvx_index_scores(NULL, NULL));
  REFUSES_HEADS(a, kvx_index_scores(&a, NULL));
  REFUSES(a.ratio, 0, kvx_index_scores(&a, NULL));
  REFUSES(a.q.ndim, 2, kvx_index_scores(&a, NULL));
  REFUSES(a.q.dtype, KVX_DTYPE_S32, kvx_index_scores(&a, NULL));
  REFUSES(a.weights.dtype, KVX_DTYPE_BF16, kvx_index_scores(&a, NULL));
  REFUSES(a.weights.shape[1], 1, kvx_index_scores(&a, NULL));
  REFUSES(a.scores.shape[0], T - 1, kvx_index_scores(&a, NULL));
  REFUSES(a.scores.stride[0], 0, kvx_index_scores(&a, NULL));
  REFUSES(a.scores.data, NULL, kvx_index_scores(&a, NULL));
  REFUSES(a.keys.dim, 2 * D, kvx_index_scores(&a, NULL));
  REFUSES(a.block_table.ndim, 1, kvx_index_scores(&a, NULL));
  table[1][1] = PAGES;
  CHECK_STATUS(kvx_index_scores(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
}

static void test_topk(void) {
  kvx_topk_args_t a;
  uint64_t bytes = 1;
  HEAD(a);
  for (int t = 0; t < T; t++)
    for (int j = 0; j < 4; j++) scores[t][j] = (float)(j == 3 ? 1 : j);
  scores[1][2] = NAN, scores[2][0] = scores[2][1] = scores[2][2] = scores[2][3] = -INFINITY, scores[3][0] = INFINITY;
  a.scores = MATRIX(scores, KVX_DTYPE_F32, T, 4);
  a.indices = MATRIX(indices, KVX_DTYPE_S32, T, 3);
  CHECK_OK(kvx_topk_workspace(&a, &bytes));
  CHECK_INT(bytes, 0);
  CHECK_OK(kvx_topk(&a, NULL));
  const int32_t want[4][3] = {{2, 1, 3}, {1, 3, 0}, {-1, -1, -1}, {0, 2, 1}}; /* ties to the lower index; NaN is none */
  CHECK_BYTES(indices, want, sizeof want);
  for (int t = 0; t < T; t++) lengths[t] = t - 1;
  a.lengths = VECTOR(lengths, KVX_DTYPE_S32, T);
  CHECK_OK(kvx_topk(&a, NULL));
  const int32_t cut[2][3] = {{2, 1, 0}, {2, 1, 3}}; /* tokens 4 and 5: three scores, and all */
  CHECK_BYTES(indices[4], cut, sizeof cut);
  CHECK(indices[0][0] == -1 && indices[1][0] == -1 && indices[3][0] == 0 && indices[3][1] == 1 && indices[3][2] == -1);

  CHECK_INVALID(kvx_topk(NULL, NULL));
  CHECK_INVALID(kvx_topk_workspace(&a, NULL));
  REFUSES_HEADS(a, kvx_topk(&a, NULL));
  REFUSES(a.scores.dtype, KVX_DTYPE_BF16, kvx_topk(&a, NULL));
  REFUSES(a.scores.stride[1], 2, kvx_topk(&a, NULL));
  REFUSES(a.indices.shape[0], T - 1, kvx_topk(&a, NULL));
  REFUSES(a.indices.shape[1], 0, kvx_topk(&a, NULL));
  REFUSES(a.indices.dtype, KVX_DTYPE_S64, kvx_topk(&a, NULL));
  REFUSES(a.indices.data, NULL, kvx_topk(&a, NULL));
  REFUSES(a.indices.data_bytes, sizeof indices - 1, kvx_topk(&a, NULL));
  REFUSES(a.indices.stride[0], 1, kvx_topk(&a, NULL));
  REFUSES(a.lengths.shape[0], 1, kvx_topk(&a, NULL));
}

/* ------------------------------------------------------------------ attention_sparse */

static float out[T][H][D], lse[T][H], sinks[H];
static int32_t selected[T][2];

static kvx_attention_sparse_args_t sparse_args(void) {
  kvx_attention_sparse_args_t a;
  kvx_append_swa_args_t filled = append_args(); /* slot 1 has positions 3 to 6, which are x[1] to x[4] */
  CHECK_OK(kvx_append_swa(&filled, NULL));
  HEAD(a);
  memset(q, 0, sizeof q), memset(out, 0x55, sizeof out), memset(lse, 0x55, sizeof lse);
  for (int i = 0; i < PAGES * 2; i++)
    for (int d = 0; d < D; d++) (&entries[0][0][0])[i * D + d] = (float)(100 * i + 100);
  a.q = array(q, sizeof q, KVX_DTYPE_F32, 3, T, H, D, 0, 0),
  a.out = array(out, sizeof out, KVX_DTYPE_F32, 3, T, H, D, 0, 0);
  a.lse = MATRIX(lse, KVX_DTYPE_F32, T, H);
  a.window = plain_rows(window, sizeof window, SLOTS, ROWS),
  a.positions = MATRIX(positions, KVX_DTYPE_S32, SLOTS, ROWS);
  a.window_tokens = 1, a.scale = 0.5f, a.ratio = 1;
  a.step = one_sequence(1, 1, 6);
  return a;
}

static int near(float got, float want) { return fabsf(got - want) <= 1e-5f * fabsf(want); }

static void test_attention_sparse(void) {
  /* One row is seen: out is that row whatever the query, and lse its score. */
  kvx_attention_sparse_args_t a = sparse_args();
  uint64_t bytes = 1;
  for (int d = 0; d < D; d++) q[0][1][d] = 1;
  CHECK_OK(kvx_attention_sparse_workspace(&a, &bytes));
  CHECK_INT(bytes, 0);
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  float sum = 0;
  for (int d = 0; d < D; d++) CHECK(out[0][0][d] == x[4][d] && out[0][1][d] == x[4][d]), sum += x[4][d];
  CHECK(fabsf(lse[0][0]) < 1e-6f && near(lse[0][1], 0.5f * sum));
  for (int t = 1; t < T; t++) CHECK(out[t][0][0] == 0 && lse[t][H - 1] == -INFINITY); /* tokens of no sequence */

  /* A query of zeros weighs all alike: two of the window, a sink as heavy as one, and selected entries. */
  a = sparse_args();
  a.window_tokens = 2;
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(near(out[0][0][0], (x[3][0] + x[4][0]) / 2) && near(lse[0][0], logf(2)));
  sinks[0] = 0, sinks[1] = -INFINITY;
  a.sinks = VECTOR(sinks, KVX_DTYPE_F32, H);
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(near(out[0][0][0], (x[3][0] + x[4][0]) / 3) && near(out[0][1][0], (x[3][0] + x[4][0]) / 2) &&
        near(lse[0][0], logf(2)));
  memset(&a.sinks, 0, sizeof a.sinks);
  table[1][0] = 3, table[1][1] = 2;
  a.entries = plain_rows(entries, sizeof entries, PAGES, 2),
  a.block_table = MATRIX(table, KVX_DTYPE_S32, SLOTS, COLUMNS);
  a.ratio = 2; /* position 6 reads entries 0, 1 and 2: rows 6, 7 and 4 of the pool */
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(near(out[0][0][0], (x[3][0] + x[4][0] + 700 + 800 + 500) / 5) && near(lse[0][0], logf(5)));
  selected[0][0] = 2, selected[0][1] = -1;
  a.selected = MATRIX(selected, KVX_DTYPE_S32, T, 2);
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(near(out[0][0][0], (x[3][0] + x[4][0] + 500) / 3));
  selected[0][0] = 3; /* not complete at position 6: not read */
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(near(out[0][0][0], (x[3][0] + x[4][0]) / 2));

  /* Position 3 is a quarter turn, which out is turned back by. */
  a = sparse_args();
  fill_turns();
  a.cos = MATRIX(cosines, KVX_DTYPE_F32, 8, 2), a.sin = MATRIX(sines, KVX_DTYPE_F32, 8, 2);
  a.step = one_sequence(1, 1, 3);
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(out[0][0][3] == x[1][3] && out[0][0][4] == x[1][5] && out[0][0][5] == -x[1][4]);

  /* Rows of the step's own tokens: positions 7 and 8, of a window of two. */
  float fresh[2][D];
  for (int i = 0; i < 2 * D; i++) (&fresh[0][0])[i] = (float)(1000 + i);
  a = sparse_args();
  a.window_tokens = 2;
  a.fresh = plain_rows(fresh, sizeof fresh, 1, 2);
  a.q.shape[0] = a.out.shape[0] = a.lse.shape[0] = 2;
  a.step = one_sequence(1, 2, 7);
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(near(out[0][0][0], (x[4][0] + 1000) / 2) && near(out[1][0][0], (1000 + 1000 + D) / 2.0f));

  /* Nothing is seen: the window has no such position. */
  a = sparse_args();
  a.step = one_sequence(0, 1, 6);
  CHECK_OK(kvx_attention_sparse(&a, NULL));
  CHECK(out[0][0][0] == 0 && lse[0][0] == -INFINITY);
}

static void refuse_sparse(void) {
  kvx_attention_sparse_args_t a = sparse_args();
  a.entries = plain_rows(entries, sizeof entries, PAGES, 2),
  a.block_table = MATRIX(table, KVX_DTYPE_S32, SLOTS, COLUMNS), a.ratio = 2;
  a.selected = MATRIX(selected, KVX_DTYPE_S32, T, 2);
  CHECK_INVALID(kvx_attention_sparse(NULL, NULL));
  CHECK_INVALID(kvx_attention_sparse_workspace(&a, NULL));
  REFUSES_HEADS(a, kvx_attention_sparse(&a, NULL));
  REFUSES(a.q.ndim, 2, kvx_attention_sparse(&a, NULL));
  REFUSES(a.q.dtype, KVX_DTYPE_F8_E4M3, kvx_attention_sparse(&a, NULL));
  REFUSES(a.out.shape[0], T - 1, kvx_attention_sparse(&a, NULL));
  REFUSES(a.out.stride[0], 0, kvx_attention_sparse(&a, NULL));
  REFUSES(a.lse.dtype, KVX_DTYPE_BF16, kvx_attention_sparse(&a, NULL));
  REFUSES(a.positions.shape[0], 1, kvx_attention_sparse(&a, NULL));
  REFUSES(a.window_tokens, 0, kvx_attention_sparse(&a, NULL));
  REFUSES(a.window_tokens, ROWS + 1, kvx_attention_sparse(&a, NULL)); /* more than the window has rows */
  CHECK_ERROR_HAS("a window of 5 tokens");
  REFUSES(a.entries.dim, D / 2, kvx_attention_sparse(&a, NULL));
  REFUSES(a.entries.pages.ndim, 0, kvx_attention_sparse(&a, NULL)); /* selected without entries */
  REFUSES(a.selected.shape[0], T - 1, kvx_attention_sparse(&a, NULL));
  REFUSES(a.selected.dtype, KVX_DTYPE_S64, kvx_attention_sparse(&a, NULL));
  REFUSES(a.block_table.shape[0], 1, kvx_attention_sparse(&a, NULL));
  REFUSES(a.ratio, 0, kvx_attention_sparse(&a, NULL));
  a.cos = MATRIX(cosines, KVX_DTYPE_F32, 8, 2);
  CHECK_INVALID(kvx_attention_sparse(&a, NULL)); /* no sin */
  a.cos.ndim = 0;
  a.sinks = VECTOR(sinks, KVX_DTYPE_F32, H);
  REFUSES(a.sinks.shape[0], 1, kvx_attention_sparse(&a, NULL));
  table[1][0] = PAGES;
  CHECK_STATUS(kvx_attention_sparse(&a, NULL), KVX_STATUS_OUT_OF_RANGE);
}

int main(void) {
  test_append_swa();
  test_coded_rows();
  refuse_append();
  test_compress();
  refuse_compress();
  test_index_scores();
  test_topk();
  test_attention_sparse();
  refuse_sparse();
  return check_report();
}
