#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_e4m3(const DecodeShape& shape, ScaleKind scales) {
  return scales == ROW_SCALES ? choose_decode<tiles::E4m3Rows, ROW_SCALES>(shape)
                              : choose_decode<tiles::E4m3Rows, ONE_SCALE>(shape);
}

}  // namespace cuda
}  // namespace kvx
