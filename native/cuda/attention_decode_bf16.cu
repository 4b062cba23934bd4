#include "attention_decode_table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_bf16(int64_t head_dim, int64_t rows, bool own) {
  return own ? choose_decode<tiles::Bf16Rows, NO_SCALES, true>(head_dim, rows) : choose_decode<tiles::Bf16Rows, NO_SCALES>(head_dim, rows);
}

}  // namespace cuda
}  // namespace kvx
