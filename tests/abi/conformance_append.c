/* The calls of sections 19 and 20 from C: values that f32 holds exactly, so that nothing is left to rounding, and
 * descriptors that are refused. */
#include <math.h>

#include "check.h"

enum { NB = 3, BS = 4, H = 2, HQ = 4, D = 8, T = 3, ROWS = (HQ + 2 * H) * D };

static float qkv[T][ROWS], q_out[T][HQ][D], k_cache[NB][BS][H][D], v_cache[NB][BS][H][D], cosines[2][D / 2],
    sines[2][D / 2], weight[D];
static int64_t slots[T], pairs[2][2];
static int32_t positions[T];

static kvx_array_t array(void* data, uint64_t bytes, kvx_dtype_t dtype, uint32_t ndim, int64_t a, int64_t b, int64_t c,
                         int64_t d) {
  const int64_t shape[4] = {a, b, c, d};
  kvx_array_t out;
  memset(&out, 0, sizeof out);
  out.data = data, out.data_bytes = bytes, out.ndim = ndim, out.dtype = dtype;
  for (int64_t i = (int64_t)ndim - 1, dense = 1; i >= 0; dense *= shape[i], i--)
    out.shape[i] = shape[i], out.stride[i] = dense;
  return out;
}

static kvx_array_t heads_of(int64_t first, int64_t heads) { /* a view of the fused rows */
  kvx_array_t a = array(&qkv[0][first], sizeof qkv - (size_t)first * 4, KVX_DTYPE_F32, 3, T, heads, D, 0);
  a.stride[0] = ROWS;
  return a;
}

static kvx_cache_t make_cache(void) {
  kvx_cache_t c;
  memset(&c, 0, sizeof c);
  c.version = KVX_ABI_VERSION, c.struct_bytes = sizeof c;
  c.num_blocks = NB, c.block_size = BS, c.num_kv_heads = H, c.k_head_dim = c.v_head_dim = D;
  c.memory = KVX_MEMORY_HOST;
  c.k.layout = c.v.layout = KVX_LAYOUT_BLOCK_NHD;
  c.k.data = array(k_cache, sizeof k_cache, KVX_DTYPE_F32, 4, NB, BS, H, D);
  c.v.data = array(v_cache, sizeof v_cache, KVX_DTYPE_F32, 4, NB, BS, H, D);
  return c;
}

static kvx_norm_rope_t make_rope(void) {
  kvx_norm_rope_t n;
  memset(&n, 0, sizeof n);
  n.struct_bytes = sizeof n;
  n.style = KVX_ROPE_HALF;
  n.cos = array(cosines, sizeof cosines, KVX_DTYPE_F32, 2, 2, D / 2, 0, 0);
  n.sin = array(sines, sizeof sines, KVX_DTYPE_F32, 2, 2, D / 2, 0, 0);
  n.positions = array(positions, sizeof positions, KVX_DTYPE_S32, 1, T, 0, 0, 0);
  return n;
}

static kvx_append_args_t make_args(void) {
  kvx_append_args_t a;
  memset(&a, 0, sizeof a);
  a.version = KVX_ABI_VERSION, a.struct_bytes = sizeof a;
  a.q = heads_of(0, HQ), a.k = heads_of(HQ * D, H), a.v = heads_of((HQ + H) * D, H);
  a.q_out = array(q_out, sizeof q_out, KVX_DTYPE_F32, 3, T, HQ, D, 0);
  a.norm_rope = make_rope();
  a.slots = array(slots, sizeof slots, KVX_DTYPE_S64, 1, T, 0, 0, 0);
  a.invalid_slot = -1;
  return a;
}

static void fill(void) {
  for (int t = 0; t < T; t++)
    for (int i = 0; i < ROWS; i++) qkv[t][i] = (float)(t * ROWS + i + 1);
  for (int i = 0; i < D / 2; i++)
    cosines[0][i] = 1, sines[0][i] = 0, cosines[1][i] = 0, sines[1][i] = 1; /* none, and a quarter turn */
  slots[0] = 9, slots[1] = -1, slots[2] = 2;
  positions[0] = 1, positions[1] = 0, positions[2] = 0;
  memset(k_cache, 0, sizeof k_cache), memset(v_cache, 0, sizeof v_cache), memset(q_out, 0, sizeof q_out);
}

static void test_append(void) {
  kvx_cache_t c = make_cache();
  kvx_append_args_t a = make_args();
  fill();
  CHECK_OK(kvx_qkv_norm_rope_append(&c, &a, NULL));
  for (int h = 0; h < HQ; h++)
    for (int i = 0; i < D / 2; i++) {
      CHECK(q_out[0][h][i] == -qkv[0][h * D + i + D / 2]);
      CHECK(q_out[0][h][i + D / 2] == qkv[0][h * D + i]);
    }
  CHECK_BYTES(q_out[1], qkv[1], HQ * D * 4); /* the slot is skipped, Q is not */
  CHECK(k_cache[2][1][0][0] == -qkv[0][HQ * D + D / 2]);
  CHECK_BYTES(k_cache[0][2], &qkv[2][HQ * D], H * D * 4);
  CHECK_BYTES(v_cache[2][1], &qkv[0][(HQ + H) * D], H * D * 4);
  for (int h = 0; h < H; h++) CHECK(k_cache[1][0][h][0] == 0 && v_cache[0][0][h][0] == 0);

  /* Neighbours, no Q, and blocks behind a table of addresses. */
  int64_t k_at[NB], v_at[NB];
  for (int b = 0; b < NB; b++)
    k_at[b] = (int64_t)(intptr_t)k_cache[NB - 1 - b], v_at[b] = (int64_t)(intptr_t)v_cache[NB - 1 - b];
  fill();
  memset(&a.q, 0, sizeof a.q), memset(&a.q_out, 0, sizeof a.q_out);
  a.norm_rope.style = KVX_ROPE_INTERLEAVED;
  a.k_pointers = array(k_at, sizeof k_at, KVX_DTYPE_S64, 1, NB, 0, 0, 0),
  a.v_pointers = array(v_at, sizeof v_at, KVX_DTYPE_S64, 1, NB, 0, 0, 0);
  CHECK_INVALID(kvx_qkv_norm_rope_append(&c, &a, NULL)); /* a data pointer beside them */
  c.k.data.data = c.v.data.data = NULL;
  CHECK_OK(kvx_qkv_norm_rope_append(&c, &a, NULL));
  CHECK(k_cache[0][1][0][0] == -qkv[0][HQ * D + 1] && k_cache[0][1][0][1] == qkv[0][HQ * D]);
  CHECK_BYTES(v_cache[2][2], &qkv[2][(HQ + H) * D], H * D * 4);
  REFUSES(a.v_pointers.shape[0], NB - 1, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.v_pointers.ndim, 0, kvx_qkv_norm_rope_append(&c, &a, NULL));
}

static void test_norm(void) {
  kvx_qkv_norm_rope_args_t a;
  memset(&a, 0, sizeof a);
  a.version = KVX_ABI_VERSION, a.struct_bytes = sizeof a, a.memory = KVX_MEMORY_HOST;
  a.q = heads_of(0, HQ), a.q_out = array(q_out, sizeof q_out, KVX_DTYPE_F32, 3, T, HQ, D, 0);
  a.norm_rope.struct_bytes = sizeof a.norm_rope;
  a.norm_rope.q_weight = array(weight, sizeof weight, KVX_DTYPE_F32, 1, D, 0, 0, 0), a.norm_rope.weight_offset = 1;
  for (int t = 0; t < T; t++)
    for (int i = 0; i < HQ * D; i++) qkv[t][i] = i % 2 ? -4.0f : 4.0f; /* the root of the mean square is 4 */
  for (int i = 0; i < D; i++) weight[i] = (float)i;
  CHECK_OK(kvx_qkv_norm_rope(&a, NULL));
  for (int i = 0; i < D; i++) CHECK(q_out[1][2][i] == (i % 2 ? -1.0f : 1.0f) * (float)(i + 1));
  REFUSES(a.norm_rope.k_weight, a.norm_rope.q_weight, kvx_qkv_norm_rope(&a, NULL));
  REFUSES(a.norm_rope.q_weight.shape[0], D - 1, kvx_qkv_norm_rope(&a, NULL));
  REFUSES(a.norm_rope.eps, -1.0f, kvx_qkv_norm_rope(&a, NULL));
  REFUSES(a.norm_rope.style, 3, kvx_qkv_norm_rope(&a, NULL));
  REFUSES(a.norm_rope.style, KVX_ROPE_HALF, kvx_qkv_norm_rope(&a, NULL)); /* and no tables */
  REFUSES(a.q_out.stride[0], 1, kvx_qkv_norm_rope(&a, NULL));
  REFUSES(a.q_out.dtype, KVX_DTYPE_F16, kvx_qkv_norm_rope(&a, NULL));
  REFUSES(a.memory, 0, kvx_qkv_norm_rope(&a, NULL));
  CHECK_INVALID(kvx_qkv_norm_rope(NULL, NULL));
}

static void test_refusals(void) {
  kvx_cache_t c = make_cache();
  kvx_append_args_t a = make_args();
  fill();
  REFUSES(a.struct_bytes, 8, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.flags, 1, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.reserved[3], 1, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.norm_rope.struct_bytes, 4, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.norm_rope.reserved[1], 1, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.norm_rope.cos.shape[1], D, kvx_qkv_norm_rope_append(&c, &a, NULL)); /* twice the row */
  REFUSES(a.norm_rope.cos.stride[1], 2, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.norm_rope.cos.shape[0], 3, kvx_qkv_norm_rope_append(&c, &a, NULL)); /* past the buffer, and unlike sin */
  REFUSES(a.norm_rope.cos.data, NULL, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.norm_rope.positions.shape[0], T - 1, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.norm_rope.positions.dtype, KVX_DTYPE_F32, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.q.shape[2], D / 2, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.q.shape[0], T + 1, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.q.shape[1], 0, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.k.dtype, KVX_DTYPE_S8, kvx_qkv_norm_rope_append(&c, &a, NULL));
  REFUSES(a.slots.ndim, 2, kvx_qkv_norm_rope_append(&c, &a, NULL));
  a.version = 2u << 16;
  CHECK_STATUS(kvx_qkv_norm_rope_append(&c, &a, NULL), KVX_STATUS_INCOMPATIBLE);
  a.version = KVX_ABI_VERSION;
  positions[2] = 2;
  CHECK_STATUS(kvx_qkv_norm_rope_append(&c, &a, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_ERROR_HAS("positions[2] is 2");
  positions[2] = 0, slots[0] = NB * BS;
  CHECK_STATUS(kvx_qkv_norm_rope_append(&c, &a, NULL), KVX_STATUS_OUT_OF_RANGE);
  CHECK_ERROR_HAS("slot_mapping[0] is 12");
  CHECK(q_out[0][0][0] == 0 && k_cache[0][2][0][0] == 0); /* nothing was written */
}

static void test_merge(void) {
  static float outs[3][1][1][D], lses[3][1][1], out[1][1][D], lse[1][1], sinks[1];
  kvx_merge_args_t a;
  memset(&a, 0, sizeof a);
  a.version = KVX_ABI_VERSION, a.struct_bytes = sizeof a, a.memory = KVX_MEMORY_HOST;
  a.outs = array(outs, sizeof outs, KVX_DTYPE_F32, 4, 3, 1, 1, D),
  a.lses = array(lses, sizeof lses, KVX_DTYPE_F32, 3, 3, 1, 1, 0);
  a.out = array(out, sizeof out, KVX_DTYPE_F32, 3, 1, 1, D, 0),
  a.lse = array(lse, sizeof lse, KVX_DTYPE_F32, 2, 1, 1, 0, 0);
  for (int i = 0; i < D; i++) outs[0][0][0][i] = 2, outs[1][0][0][i] = 6, outs[2][0][0][i] = NAN;
  lses[0][0][0] = lses[1][0][0] = 3, lses[2][0][0] = -INFINITY;
  CHECK_OK(kvx_merge_attention(&a, NULL));
  CHECK(out[0][0][0] == 4 && out[0][0][D - 1] == 4);
  CHECK(fabsf(lse[0][0] - (3 + logf(2))) < 1e-6f);
  sinks[0] = 3;
  a.sinks = array(sinks, sizeof sinks, KVX_DTYPE_F32, 1, 1, 0, 0, 0);
  CHECK_OK(kvx_merge_attention(&a, NULL));
  CHECK(fabsf(out[0][0][0] - 8.0f / 3) < 1e-6f && fabsf(lse[0][0] - (3 + logf(2))) < 1e-6f);
  lses[0][0][0] = lses[1][0][0] = -INFINITY;
  CHECK_OK(kvx_merge_attention(&a, NULL));
  CHECK(out[0][0][0] == 0 && lse[0][0] == -INFINITY);
  REFUSES(a.lses.shape[0], 2, kvx_merge_attention(&a, NULL));
  REFUSES(a.lses.dtype, KVX_DTYPE_F16, kvx_merge_attention(&a, NULL));
  REFUSES(a.sinks.shape[0], 2, kvx_merge_attention(&a, NULL));
  REFUSES(a.out.shape[2], D - 1, kvx_merge_attention(&a, NULL));
  REFUSES(a.outs.shape[0], 0, kvx_merge_attention(&a, NULL));
  REFUSES(a.outs.ndim, 3, kvx_merge_attention(&a, NULL));
}

static void test_copy_blocks(void) {
  kvx_cache_t c = make_cache();
  kvx_copy_blocks_args_t a;
  memset(&a, 0, sizeof a);
  a.version = KVX_ABI_VERSION, a.struct_bytes = sizeof a;
  a.pairs = array(pairs, sizeof pairs, KVX_DTYPE_S64, 2, 2, 2, 0, 0);
  for (int i = 0; i < NB * BS * H * D; i++) (&k_cache[0][0][0][0])[i] = (float)i, (&v_cache[0][0][0][0])[i] = (float)-i;
  pairs[0][0] = 0, pairs[0][1] = 2, pairs[1][0] = -1, pairs[1][1] = 1;
  CHECK_OK(kvx_copy_blocks(&c, &a, NULL));
  CHECK_BYTES(k_cache[2], k_cache[0], sizeof k_cache[0]);
  CHECK_BYTES(v_cache[2], v_cache[0], sizeof v_cache[0]);
  CHECK(k_cache[1][0][0][0] == BS * H * D);
  pairs[1][0] = 1, pairs[1][1] = 3;
  CHECK_STATUS(kvx_copy_blocks(&c, &a, NULL), KVX_STATUS_OUT_OF_RANGE);
  pairs[1][1] = 2;
  CHECK_INVALID(kvx_copy_blocks(&c, &a, NULL)); /* a destination twice */
  pairs[1][0] = 2, pairs[1][1] = 1;
  CHECK_INVALID(kvx_copy_blocks(&c, &a, NULL)); /* a source and a destination */
  REFUSES(a.pairs.shape[1], 3, kvx_copy_blocks(&c, &a, NULL));
  REFUSES(a.pairs.dtype, KVX_DTYPE_F32, kvx_copy_blocks(&c, &a, NULL));
  REFUSES(c.k.data.data, NULL, kvx_copy_blocks(&c, &a, NULL));
}

int main(void) {
  test_append();
  test_norm();
  test_refusals();
  test_merge();
  test_copy_blocks();
  return check_report();
}
