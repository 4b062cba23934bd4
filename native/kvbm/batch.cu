// Copies by the copy engines, from addresses the host reads.
#include <cuda_runtime.h>

#include <new>
#include <vector>

#include "kvbm/move.h"

namespace kvbm {

// The call came with CUDA 12.8 and lost an argument in 13.0.
const bool kHasBatch = CUDART_VERSION >= 12080, kIsStub = false;

int memcpy_loop(const Batch& b, kvbm_stream_t stream) {
  for (size_t i = 0; i < b.count; i++) {
    const cudaError_t error = cudaMemcpyAsync(b.dst[i], b.src[i], b.bytes, cudaMemcpyDefault, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

#if CUDART_VERSION >= 12080
int memcpy_batch(const Batch& b, kvbm_stream_t stream) try {
  std::vector<size_t> sizes(b.count, b.bytes);
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;  // the one set of attributes holds from copy 0 on
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(b.dst, b.src, sizes.data(), b.count, &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  return cudaMemcpyBatchAsync(const_cast<void**>(b.dst), const_cast<void**>(b.src), sizes.data(), b.count, &attributes,
                              &first, 1, &failed, stream);
#endif
} catch (const std::exception&) {  // of the array: no memory, or more than an array holds
  return KVBM_OUT_OF_MEMORY;
}
#else
int memcpy_batch(const Batch&, kvbm_stream_t) { return KVBM_NOT_SUPPORTED; }
#endif

}  // namespace kvbm
