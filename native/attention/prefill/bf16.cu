#include "attention/prefill/table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_prefill_bf16(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) {
  return start_prefill<tiles::Bf16Rows, NO_SCALES>(p, args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
