#include "attention_prefill_table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_prefill_s8(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) { return start_prefill<tiles::S8Rows, ROW_SCALES>(p, args, blocks, stream); }

}  // namespace cuda
}  // namespace kvx
