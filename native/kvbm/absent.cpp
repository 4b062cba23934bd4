// Stands in for move.cu and batch.cu in a build without nvcc. What has work to do says so by its result; nothing ends
// the process.
#include "kvbm/move.h"

namespace kvbm {

const bool kHasBatch = false, kIsStub = true;

int copy(const Copy&, kvbm_stream_t) { return KVBM_NOT_SUPPORTED; }
int permute(const Permute&, kvbm_stream_t) { return KVBM_NOT_SUPPORTED; }
int memcpy_loop(const Batch&, kvbm_stream_t) { return KVBM_NOT_SUPPORTED; }
int memcpy_batch(const Batch&, kvbm_stream_t) { return KVBM_NOT_SUPPORTED; }

}  // namespace kvbm
