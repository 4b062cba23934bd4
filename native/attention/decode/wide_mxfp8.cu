#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_wide_decode_mxfp8(const DecodeShape& shape) {
  return choose_wide_decode<tiles::Mxfp8Rows, GROUP_SCALES>(shape);
}

}  // namespace cuda
}  // namespace kvx
