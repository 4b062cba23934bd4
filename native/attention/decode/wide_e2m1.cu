#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_wide_decode_nvfp4(const DecodeShape& shape) {
  return choose_wide_decode<tiles::Nvfp4Rows, GROUP_SCALES>(shape);
}
DecodeChoice choose_wide_decode_mxfp4(const DecodeShape& shape) {
  return choose_wide_decode<tiles::Mxfp4Rows, GROUP_SCALES>(shape);
}

}  // namespace cuda
}  // namespace kvx
