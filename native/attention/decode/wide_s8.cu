#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_wide_decode_s8(const DecodeShape& shape, ScaleKind scales) {
  return scales == ROW_SCALES ? choose_wide_decode<tiles::S8Rows, ROW_SCALES>(shape)
                              : choose_wide_decode<tiles::S8Rows, ONE_SCALE>(shape);
}

}  // namespace cuda
}  // namespace kvx
