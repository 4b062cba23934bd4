// The kernels of each backend, by op, and the one place that picks between them (abi.cpp).
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

// Lower, check memory, run. The entry points of both ABI generations end here.
kvx_status_t run_write(const kvx_cache_t& cache, const kvx_write_args_t& args, void* stream);
kvx_status_t run_gather(const kvx_cache_t& cache, const kvx_gather_args_t& args, void* stream);

namespace cpu {
kvx_status_t write(const WriteParams& p);
kvx_status_t gather(const GatherParams& p);
kvx_status_t amax(const AmaxParams& p);
const char* simd_name();
int max_threads();
}  // namespace cpu

// Without CUDA, absent.cpp stands in: every call returns UNSUPPORTED with a sentence.
namespace cuda {
KVX_ON_DEVICE(write, WriteParams)
KVX_ON_DEVICE(gather, GatherParams)
KVX_ON_DEVICE(amax, AmaxParams)
void describe(kvx_build_info_t* info);
}  // namespace cuda

}  // namespace kvx
