#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_wide_decode_f16(const DecodeShape& shape) {
  return choose_wide_decode<tiles::F16Rows, NO_SCALES>(shape);
}

}  // namespace cuda
}  // namespace kvx
