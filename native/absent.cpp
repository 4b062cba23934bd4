// Stands in for *.cu in a build without nvcc: what KVX_ON_DEVICE (check.h) does not say by itself.
#include "attention/attention.h"
#include "entry/hybrid.h"
#include "move/convert.h"
#include "run.h"

namespace kvx {

kvx_status_t no_cuda() {
  return fail(KVX_STATUS_UNSUPPORTED,
              "the cache is in device memory, and this libkvx was built without CUDA. Install nvcc (or set CUDA_HOME) "
              "and rebuild.");
}

namespace cuda {

kvx_status_t prepare_convert(Bound*) { return no_cuda(); }
kvx_status_t convert(const Bound&, const BlockTables&, void*) { return no_cuda(); }
kvx_status_t digest(const Bound&, const BlockTables&, uint64_t*, void*) { return no_cuda(); }
uint64_t attention_workspace(const AttentionParams&) { return 0; }
uint64_t topk_workspace(const TopkParams&) { return 0; }
uint64_t sparse_workspace(const SparseParams&) { return 0; }
void describe(kvx_build_info_t* info) { info->cuda_archs = ""; }

}  // namespace cuda
}  // namespace kvx
