/* Five tokens into a paged cache and out again, in plain C and host memory.
 * One sequence lives in blocks 6 and 1 of an f32 cache, as an allocator would scatter it. */
#include <stdio.h>
#include <string.h>

#include "kvx_abi.h"

enum { NUM_BLOCKS = 8, BLOCK_SIZE = 4, HEADS = 2, HEAD_DIM = 4, TOKENS = 5 };

/* The library owns nothing: the caller keeps every buffer, and the descriptors point into them. */
static float k_cache[NUM_BLOCKS][BLOCK_SIZE][HEADS][HEAD_DIM], v_cache[NUM_BLOCKS][BLOCK_SIZE][HEADS][HEAD_DIM];
static float k[TOKENS][HEADS][HEAD_DIM], v[TOKENS][HEADS][HEAD_DIM], k_out[TOKENS][HEADS][HEAD_DIM],
    v_out[TOKENS][HEADS][HEAD_DIM];

/* A dense array. data_bytes lets the library refuse a shape that reaches past the buffer. */
static kvx_array_t dense(void* data, uint64_t data_bytes, kvx_dtype_t dtype, uint32_t ndim, const int64_t* shape) {
  kvx_array_t a;
  int64_t stride = 1;
  memset(&a, 0, sizeof a); /* zero first, so that fields of later versions read as absent */
  a.data = data;
  a.data_bytes = data_bytes;
  a.dtype = dtype;
  a.ndim = ndim;
  for (uint32_t i = ndim; i-- > 0; stride *= shape[i]) {
    a.shape[i] = shape[i];
    a.stride[i] = stride;
  }
  return a;
}

static int failed(const char* call, kvx_status_t status) {
  if (status != KVX_STATUS_OK)
    fprintf(stderr, "%s returned %s\n  %s\n", call, kvx_status_text(status), kvx_last_error());
  return status != KVX_STATUS_OK;
}

int main(void) {
  const int64_t cache_shape[] = {NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM}, row_shape[] = {TOKENS, HEADS, HEAD_DIM};
  kvx_cache_t cache;
  memset(&cache, 0, sizeof cache);
  cache.version = KVX_ABI_VERSION;
  cache.struct_bytes = sizeof cache;
  cache.num_blocks = NUM_BLOCKS, cache.block_size = BLOCK_SIZE, cache.num_kv_heads = HEADS;
  cache.k_head_dim = cache.v_head_dim = HEAD_DIM; /* two fields, since MLA has them unequal */
  cache.memory = KVX_MEMORY_HOST;
  cache.k.data = dense(k_cache, sizeof k_cache, KVX_DTYPE_F32, 4, cache_shape);
  cache.v.data = dense(v_cache, sizeof v_cache, KVX_DTYPE_F32, 4, cache_shape);
  cache.k.layout = cache.v.layout = KVX_LAYOUT_BLOCK_NHD;
  if (failed("kvx_check_version", kvx_check_version(KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR))) return 1;
  if (failed("kvx_validate_cache", kvx_validate_cache(&cache))) return 1;

  for (int t = 0; t < TOKENS; t++)
    for (int h = 0; h < HEADS; h++)
      for (int d = 0; d < HEAD_DIM; d++) k[t][h][d] = (float)(100 * t + 10 * h + d), v[t][h][d] = -k[t][h][d];
  /* A slot is block * BLOCK_SIZE + offset. Four tokens fill block 6, the fifth begins block 1. */
  int64_t blocks[] = {6, 1}, slots[TOKENS];
  for (int t = 0; t < TOKENS; t++) slots[t] = blocks[t / BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE;

  const int64_t slots_shape[] = {TOKENS};
  kvx_write_args_t write;
  memset(&write, 0, sizeof write);
  write.version = KVX_ABI_VERSION;
  write.struct_bytes = sizeof write;
  write.k = dense(k, sizeof k, KVX_DTYPE_F32, 3, row_shape);
  write.v = dense(v, sizeof v, KVX_DTYPE_F32, 3, row_shape);
  write.slots = dense(slots, sizeof slots, KVX_DTYPE_S64, 1, slots_shape);
  write.invalid_slot = -1; /* zero would make slot 0 the one that is skipped */
  if (failed("kvx_write", kvx_write(&cache, &write, NULL))) return 1;
  printf("wrote %d tokens to slots", TOKENS);
  for (int t = 0; t < TOKENS; t++) printf(" %d", (int)slots[t]);

  int64_t seq_lens[] = {TOKENS};
  const int64_t table_shape[] = {1, 2}, lens_shape[] = {1};
  kvx_gather_args_t gather;
  memset(&gather, 0, sizeof gather);
  gather.version = KVX_ABI_VERSION;
  gather.struct_bytes = sizeof gather;
  gather.k = dense(k_out, sizeof k_out, KVX_DTYPE_F32, 3, row_shape);
  gather.v = dense(v_out, sizeof v_out, KVX_DTYPE_F32, 3, row_shape);
  gather.table.struct_bytes = sizeof gather.table;
  gather.table.format = KVX_BLOCK_TABLE_PACKED;
  gather.table.indices = dense(blocks, sizeof blocks, KVX_DTYPE_S64, 2, table_shape);
  gather.table.seq_lens = dense(seq_lens, sizeof seq_lens, KVX_DTYPE_S64, 1, lens_shape);
  gather.max_seq_len = TOKENS;
  if (failed("kvx_gather", kvx_gather(&cache, &gather, NULL))) return 1;

  /* Same type on both sides, so the bytes come back as they went in. */
  const int same = memcmp(k, k_out, sizeof k) == 0 && memcmp(v, v_out, sizeof v) == 0;
  printf("\ngathered %d tokens from blocks %d and %d: %s\n", TOKENS, (int)blocks[0], (int)blocks[1],
         same ? "the same bytes" : "DIFFERENT bytes");
  return same ? 0 : 1;
}
