#include "attention_decode_table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_s8(const DecodeShape& shape) { return choose_decode<tiles::S8Rows, ROW_SCALES>(shape); }

}  // namespace cuda
}  // namespace kvx
