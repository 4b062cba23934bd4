// What ends a decode whose sequences were shared out. One file makes its kernels, for all that share out.
#pragma once
#include "attention/decode/args.cuh"

namespace kvx {
namespace cuda {

// `one_scale`: V has one a tensor or head, which the parts are still to be multiplied by.
kvx_status_t launch_combine(const DecodeArgs& args, bool one_scale, void* stream);

}  // namespace cuda
}  // namespace kvx
