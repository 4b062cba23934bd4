#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

namespace {

template <class Rows, ScaleKind kScales> DecodeChoice choose(const DecodeShape& shape) {
  using Under = tiles::UnderF32<Rows>;
  const int64_t dims = shape.most_dims();
  return dims <= kMostNarrowDims ? decode_choice<Under, DecodeTile<128, 128, 1>, 16, kScales, false>()
         : dims <= 256           ? decode_choice<Under, DecodeTile<256, 256, 2>, 16, kScales, false>()
                                 : decode_choice<Under, DecodeTile<512, 512, 4>, 16, kScales, false>();
}

}  // namespace

bool choose_decode_under_f32(const DecodeShape& shape, int dtype, DecodeChoice* choice) {
  switch (dtype) {
    case KVX_DTYPE_BF16: *choice = choose<tiles::Bf16RowsInParts, NO_SCALES>(shape); return true;
    case KVX_DTYPE_F16: *choice = choose<tiles::F16Rows, NO_SCALES>(shape); return true;
    case KVX_DTYPE_F8_E4M3: *choice = choose<tiles::E4m3Rows, ROW_SCALES>(shape); return true;
    case KVX_DTYPE_S8: *choice = choose<tiles::S8Rows, ROW_SCALES>(shape); return true;
    default: return false;
  }
}

}  // namespace cuda
}  // namespace kvx
