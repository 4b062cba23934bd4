#include "attention_decode_table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_s8(int64_t head_dim, int64_t rows) { return choose_decode<tiles::S8Rows, ROW_SCALES>(head_dim, rows); }

}  // namespace cuda
}  // namespace kvx
