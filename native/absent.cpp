// Stands in for every *.cu in a build without nvcc.
#include "append/append.h"
#include "attention/attention.h"
#include "attention/merge.h"
#include "entry/hybrid.h"
#include "move/convert.h"
#include "move/copy_blocks.h"
#include "run.h"

namespace kvx {
namespace cuda {

namespace {
kvx_status_t absent() {
  return fail(KVX_STATUS_UNSUPPORTED,
              "the cache is in device memory, and this libkvx was built without CUDA. Install nvcc (or set CUDA_HOME) "
              "and rebuild.");
}
}  // namespace

kvx_status_t write(const WriteParams&, void*) { return absent(); }
kvx_status_t gather(const GatherParams&, void*) { return absent(); }
kvx_status_t amax(const AmaxParams&, void*) { return absent(); }
kvx_status_t prepare_convert(Bound*) { return absent(); }
kvx_status_t convert(const Bound&, void*) { return absent(); }
kvx_status_t digest(Bound*, uint64_t*, void*) { return absent(); }
uint64_t attention_workspace(const AttentionParams&) { return 0; }
kvx_status_t plan_attention(const AttentionParams&, void*) { return absent(); }
kvx_status_t attention(const AttentionParams&, void*) { return absent(); }
kvx_status_t append(const AppendParams&, void*) { return absent(); }
kvx_status_t merge(const MergeParams&, void*) { return absent(); }
kvx_status_t copy_blocks(const CopyBlocksParams&, void*) { return absent(); }
kvx_status_t append_swa(const AppendSwaParams&, void*) { return absent(); }
kvx_status_t compress(const CompressParams&, void*) { return absent(); }
kvx_status_t index_scores(const IndexScoresParams&, void*) { return absent(); }
uint64_t topk_workspace(const TopkParams&) { return 0; }
kvx_status_t topk(const TopkParams&, void*) { return absent(); }
uint64_t sparse_workspace(const SparseParams&) { return 0; }
kvx_status_t attention_sparse(const SparseParams&, void*) { return absent(); }
void describe(kvx_build_info_t* info) { info->cuda_archs = ""; }

}  // namespace cuda
}  // namespace kvx
