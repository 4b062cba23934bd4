#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_wide_decode_s4(const DecodeShape& shape, ScaleKind scales) {
  return scales == ROW_SCALES ? choose_wide_decode<tiles::S4Rows, ROW_SCALES>(shape)
                              : choose_wide_decode<tiles::S4GroupRows, GROUP_SCALES>(shape);
}

}  // namespace cuda
}  // namespace kvx
