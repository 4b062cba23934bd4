#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_f16(const DecodeShape& shape, bool own) {
  return own ? choose_decode<tiles::F16Rows, NO_SCALES, true>(shape) : choose_decode<tiles::F16Rows, NO_SCALES>(shape);
}

}  // namespace cuda
}  // namespace kvx
