// The ways attention is computed on a device, and who takes which call.
#pragma once
#include <atomic>

#include "../attention.h"
#include "device.cuh"
#include "tiles/block_rows.cuh"

namespace kvx {
namespace cuda {

// Few queries a sequence: attention_decode.cu.
bool takes_decode(const AttentionParams& p);
uint64_t decode_workspace(const AttentionParams& p, int num_sms);
kvx_status_t plan_decode(const AttentionParams& p, int num_sms, void* stream);
kvx_status_t run_decode(const AttentionParams& p, int num_sms, void* stream);

// Many queries a sequence, on Hopper: attention_prefill.cu.
bool takes_prefill(const AttentionParams& p);
kvx_status_t run_prefill(const AttentionParams& p, void* stream);
bool has_warpgroups();  // the current device is Hopper and the library has code for it

// Any shape: attention_any.cu.
kvx_status_t run_any(const AttentionParams& p, void* stream);

tiles::RowFinder make_row_finder(const AttentionParams& p);

// More than 48 KB of shared memory has to be asked for, once a kernel and device.
int max_shared_memory();  // of a block of threads, on the current device
kvx_status_t allow_shared_memory(const void* kernel, int bytes);

template <class... Params, class... Args>
kvx_status_t launch_early_with(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, void* stream, Args&&... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = can_launch_early() ? 1 : 0;
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed(name, error);
}

}  // namespace cuda
}  // namespace kvx
