// attention_sparse for what no fast kernel takes: a block of threads for each head of a token.
#include "attention/sparse/any.h"

#include <algorithm>

#include "attention/cuda/attention.cuh"
#include "attention/sparse/head.cuh"

namespace kvx {
namespace cuda {

namespace {

__global__ void __launch_bounds__(kHeadThreads) attend_sparse_any(const __grid_constant__ SparseArgs a) {
  extern __shared__ float numbers[];
  __shared__ SparseItem item;
  wait_for_previous();
  if (threadIdx.x < 32) {
    SparseItem w =
        sparse_item(a, int32_t(blockIdx.x), int32_t(blockIdx.y));  // y is the head: its errors count at head 0
    if (threadIdx.x == 0) item = w;
  }
  __syncthreads();
  const SparseItem w = item;
  const int32_t head = int32_t(blockIdx.y);
  const float2 stats = attend_head(a, w, head, 0, w.slot < 0 ? 0 : w.num_keys, numbers, head == 0);
  write_head(a.p, w, head, stats, numbers + a.p.dim);
}

}  // namespace

kvx_status_t attention_sparse_any(const SparseParams& p, void* stream) {
  if (p.num_heads > 65535) return fail(KVX_STATUS_UNSUPPORTED, "%d heads are more than one launch takes.", p.num_heads);
  const int bytes = 4 * sparse_head_floats(p.dim);
  if (bytes > max_shared_memory())
    return fail(KVX_STATUS_UNSUPPORTED, "rows of %d elements need %d bytes of shared memory; this device has %d.",
                p.dim, bytes, max_shared_memory());
  SparseArgs a = {};
  a.p = p;
  a.window_rows = make_fast_divider(p.window.rows), a.entry_rows = make_fast_divider(std::max(1, p.entries.rows)),
  a.fresh_rows = make_fast_divider(std::max(1, p.fresh.rows));
  a.head_groups = a.splits = make_fast_divider(1), a.ratio = make_fast_divider(p.ratio);
  if (bytes > 48 * 1024) KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&attend_sparse_any), bytes));
  return launch_early_with("attend_sparse_any", attend_sparse_any,
                           dim3(unsigned(p.step.num_tokens), unsigned(p.num_heads)), dim3(kHeadThreads), bytes, stream,
                           a);
}

}  // namespace cuda
}  // namespace kvx
