#include "attention/prefill/table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_prefill_bytes(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, ScaleKind scales,
                                 void* stream) {
  return scales == ROW_SCALES ? start_prefill<Bytes, ROW_SCALES>(p, args, blocks, stream)
                              : start_prefill<Bytes, ONE_SCALE>(p, args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
