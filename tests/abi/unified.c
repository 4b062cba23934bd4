/* UNIFIED memory on a real device: one managed allocation holds cache, rows and slots; the host fills and reads it, the
 * device writes and gathers. Prints why and stops where there is no CUDA device. */
#include <dlfcn.h>
#include <stdlib.h>

#include "check.h"

enum { NB = 4, BS = 8, H = 2, D = 16, T = 11, CELLS = NB * BS * H * D, ROWS = T * H * D };

typedef struct {
  float k_cache[CELLS], v_cache[CELLS], k[ROWS], v[ROWS], k_out[ROWS], v_out[ROWS];
  int64_t slots[T];
  int32_t blocks[2], length;
} shared_t;

static void* driver;
static int call_driver(const char* name, uintptr_t a, uintptr_t b, uintptr_t c) {
  int (*f)(uintptr_t, uintptr_t, uintptr_t) = NULL;
  *(void**)&f = dlsym(driver, name);
  return f ? f(a, b, c) : -1;
}

static shared_t* allocate_managed(void) {
  void *context = NULL, *p = NULL;
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver || call_driver("cuInit", 0, 0, 0)) return NULL;
  if (call_driver("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0, 0) ||
      call_driver("cuCtxSetCurrent", (uintptr_t)context, 0, 0))
    return NULL;
  if (call_driver("cuMemAllocManaged", (uintptr_t)&p, sizeof(shared_t), 1 /* CU_MEM_ATTACH_GLOBAL */)) return NULL;
  return (shared_t*)p;
}

static kvx_array_t array(void* data, uint64_t bytes, kvx_dtype_t dtype, uint32_t ndim, const int64_t* shape) {
  kvx_array_t a;
  memset(&a, 0, sizeof a);
  a.data = data, a.data_bytes = bytes, a.ndim = ndim, a.dtype = dtype;
  for (int64_t i = (int64_t)ndim - 1, dense = 1; i >= 0; dense *= shape[i], i--)
    a.shape[i] = shape[i], a.stride[i] = dense;
  return a;
}

int main(void) {
  shared_t* s = allocate_managed();
  if (!s) {
    puts("no CUDA device: nothing to test");
    return 0;
  }
  const int64_t cells[] = {NB, BS, H, D}, rows[] = {T, H, D}, tokens[] = {T}, table[] = {1, 2}, one[] = {1};
  memset(s, 0, sizeof *s);
  for (int i = 0; i < ROWS; i++) s->k[i] = (float)i, s->v[i] = (float)-i;
  for (int t = 0; t < T; t++) s->slots[t] = t < BS ? 3 * BS + t : BS + (t - BS); /* blocks 3, then 1 */
  s->blocks[0] = 3, s->blocks[1] = 1, s->length = T;

  kvx_cache_t c;
  memset(&c, 0, sizeof c);
  c.version = KVX_ABI_VERSION, c.struct_bytes = sizeof c;
  c.num_blocks = NB, c.block_size = BS, c.num_kv_heads = H, c.k_head_dim = c.v_head_dim = D;
  c.memory = KVX_MEMORY_UNIFIED;
  c.k.layout = c.v.layout = KVX_LAYOUT_BLOCK_NHD;
  c.k.data = array(s->k_cache, sizeof s->k_cache, KVX_DTYPE_F32, 4, cells);
  c.v.data = array(s->v_cache, sizeof s->v_cache, KVX_DTYPE_F32, 4, cells);

  kvx_write_args_t w;
  memset(&w, 0, sizeof w);
  w.version = KVX_ABI_VERSION, w.struct_bytes = sizeof w, w.invalid_slot = -1;
  w.k = array(s->k, sizeof s->k, KVX_DTYPE_F32, 3, rows);
  w.v = array(s->v, sizeof s->v, KVX_DTYPE_F32, 3, rows);
  w.slots = array(s->slots, sizeof s->slots, KVX_DTYPE_S64, 1, tokens);
  CHECK_OK(kvx_write(&c, &w, NULL));

  kvx_gather_args_t g;
  memset(&g, 0, sizeof g);
  g.version = KVX_ABI_VERSION, g.struct_bytes = sizeof g, g.max_seq_len = T;
  g.k = array(s->k_out, sizeof s->k_out, KVX_DTYPE_F32, 3, rows);
  g.v = array(s->v_out, sizeof s->v_out, KVX_DTYPE_F32, 3, rows);
  g.table.struct_bytes = sizeof g.table, g.table.format = KVX_BLOCK_TABLE_PACKED;
  g.table.indices = array(s->blocks, sizeof s->blocks, KVX_DTYPE_S32, 2, table);
  g.table.seq_lens = array(&s->length, sizeof s->length, KVX_DTYPE_S32, 1, one);
  CHECK_OK(kvx_gather(&c, &g, NULL));
  CHECK_INT(call_driver("cuCtxSynchronize", 0, 0, 0), 0);

  CHECK_BYTES(s->k_out, s->k, sizeof s->k);
  CHECK_BYTES(s->v_out, s->v, sizeof s->v);
  CHECK_BYTES(s->k_cache + 3 * BS * H * D, s->k, BS * H * D * sizeof(float));
  return check_report();
}
