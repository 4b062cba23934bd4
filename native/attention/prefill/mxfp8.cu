#include "attention/prefill/table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_prefill_mxfp8(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) {
  return start_prefill_of_any_width<BytesWithScales, GROUP_SCALES>(p, args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
