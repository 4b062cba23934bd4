#include "attention/prefill/table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_prefill_e5m2(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) {
  return start_prefill<tiles::E5m2Rows, ONE_SCALE>(p, args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
