#include "attention/prefill/table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_wide_prefill_bytes(const AttentionParams& p, const PrefillArgs& args, int64_t blocks,
                                      ScaleKind scales, void* stream) {
  if (most_dims(p) > kMostWidePrefillDims)
    return start_prefill_tile<BytesAsBf16, SplitPrefillTile, ROW_SCALES>(args, blocks, stream);
  return scales == ROW_SCALES ? start_wide_prefill<Bytes, ROW_SCALES>(p, args, blocks, stream)
                              : start_wide_prefill<Bytes, ONE_SCALE>(p, args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
