#include "attention/prefill/table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_wide_prefill_s8(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, ScaleKind scales,
                                   void* stream) {
  return scales == ROW_SCALES ? start_wide_prefill<tiles::S8Rows, ROW_SCALES>(p, args, blocks, stream)
                              : start_wide_prefill<tiles::S8Rows, ONE_SCALE>(p, args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
