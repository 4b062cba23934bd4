#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

DecodeChoice choose_decode_e5m2(const DecodeShape& shape) { return choose_decode<tiles::E5m2Rows, ONE_SCALE>(shape); }

}  // namespace cuda
}  // namespace kvx
