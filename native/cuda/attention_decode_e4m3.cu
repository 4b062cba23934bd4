#include "attention_decode_table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_e4m3(int64_t head_dim, int64_t rows, ScaleKind scales) { return scales == ROW_SCALES ? choose_decode<tiles::E4m3Rows, ROW_SCALES>(head_dim, rows) : choose_decode<tiles::E4m3Rows, ONE_SCALE>(head_dim, rows); }

}  // namespace cuda
}  // namespace kvx
