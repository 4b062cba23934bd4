#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_latent(const DecodeShape& shape) {
  return choose_columns<tiles::Bf16Rows, DecodeTile<kLatentDim, kRopeDim, 4, true>, NO_SCALES>(shape);
}

}  // namespace cuda
}  // namespace kvx
