#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_bf16_in_parts(const DecodeShape& shape) {
  return choose_decode<tiles::Bf16RowsInParts, NO_SCALES>(shape);
}

}  // namespace cuda
}  // namespace kvx
