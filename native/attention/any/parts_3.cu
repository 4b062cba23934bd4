#include "attention/any/table.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_any_3(const AnyArgs& args, int rows, int64_t blocks, void* stream) {
  return start_any<3>(args, rows, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
