// One file an element type makes its kernels (attention/decode/bf16.cu, ...), so that they compile side by side.
#pragma once
#include "attention/cuda/attention.cuh"
#include "attention/decode/combine.cuh"
#include "attention/decode/decode.cuh"

namespace kvx {
namespace cuda {

struct DecodeChoice {
  kvx_status_t (*start)(const DecodeArgs&, int blocks, int workers, void* stream);
  int tile_tokens, columns, workers, worker_bytes;  // most workers of a block of threads, and shared memory each needs
};

// Elements of a row of K and of V, and query rows of a sequence.
struct DecodeShape {
  int64_t key_dims, value_dims, rows;
  bool is_odd;  // rows or scales that DecodeConfig::kTakesOdd is for
  int64_t most_dims() const { return key_dims > value_dims ? key_dims : value_dims; }
};

// Tiles of one warp take rows of up to 128 elements, those of teams (wide) up to 512; what of a tile is past the end of
// rows is not read.
constexpr int64_t kMostNarrowDims = 128, kMostWideDims = 512;
// `own`: every sequence has a cache of its own. Quantised and wide ones run on the general kernel: as many kernels
// again would serve few.
DecodeChoice choose_decode_bf16(const DecodeShape& shape, bool own);
DecodeChoice choose_decode_f16(const DecodeShape& shape, bool own);
// `scales` are ONE_SCALE, or ROW_SCALES, which takes one a head or tensor as well, as e5m2 and int4 have it.
DecodeChoice choose_decode_e4m3(const DecodeShape& shape, ScaleKind scales);
DecodeChoice choose_decode_e5m2(const DecodeShape& shape);
DecodeChoice choose_decode_s8(const DecodeShape& shape, ScaleKind scales);
DecodeChoice choose_decode_bf16_in_parts(const DecodeShape& shape);  // queries in f16
// Queries in f32, narrow and wide, up to half of kMostRows, over elements of that type. Others have no kernels for
// them.
bool choose_decode_under_f32(const DecodeShape& shape, int dtype, DecodeChoice* choice);
DecodeChoice choose_decode_s4(const DecodeShape& shape, ScaleKind scales);  // ROW_SCALES, or GROUP_SCALES: f16 of 32
DecodeChoice choose_decode_nvfp4(const DecodeShape& shape);
DecodeChoice choose_decode_mxfp4(const DecodeShape& shape);
DecodeChoice choose_decode_mxfp8(const DecodeShape& shape);
DecodeChoice choose_decode_latent(const DecodeShape& shape);  // 512 + 64 elements, bf16
DecodeChoice choose_wide_decode_bf16(const DecodeShape& shape);
DecodeChoice choose_wide_decode_bf16_in_parts(const DecodeShape& shape);
DecodeChoice choose_wide_decode_f16(const DecodeShape& shape);
DecodeChoice choose_wide_decode_e4m3(const DecodeShape& shape, ScaleKind scales);
DecodeChoice choose_wide_decode_e5m2(const DecodeShape& shape);
DecodeChoice choose_wide_decode_s8(const DecodeShape& shape, ScaleKind scales);
DecodeChoice choose_wide_decode_s4(const DecodeShape& shape, ScaleKind scales);
DecodeChoice choose_wide_decode_nvfp4(const DecodeShape& shape);
DecodeChoice choose_wide_decode_mxfp4(const DecodeShape& shape);
DecodeChoice choose_wide_decode_mxfp8(const DecodeShape& shape);

// Odd rows have kernels of eight columns too where those are faster by a fifth or more: of 4 bits (under scales of 32
// elements they are never odd), and of 8 bits in tiles of 256, which end with their scale where it is inline.
template <class Rows, class Tile, ScaleKind kScales> constexpr bool kHasOddKernel =
    (Rows::kBits == 4 && Rows::kScaleDims != 32 && Tile::kKeyDims <= 256) ||
    (Rows::kBits == 8 && Tile::kKeyDims == 256 && kScales == ROW_SCALES);

template <class C>
kvx_status_t launch_decode(const DecodeArgs& args, int blocks, int workers, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&decode<C>), workers * C::kWorkerBytes));
  KVX_TRY(launch_early_with("attention_decode", decode<C>, dim3(unsigned(blocks)),
                            dim3(unsigned(workers) * C::kTeam * 32), workers * C::kWorkerBytes, stream, args));
  return launch_combine(args, C::kScales == ONE_SCALE || (C::kScales == ROW_SCALES && args.has_one_scale[1]), stream);
}

template <class Rows, class Tile, int kColumns, ScaleKind kScales, bool kOwnCaches, bool kTakesOdd = false> DecodeChoice
decode_choice() {
  using C = DecodeConfig<Rows, Tile, kColumns, kScales, kOwnCaches, kTakesOdd>;
  return DecodeChoice{&launch_decode<C>, C::kTokens, kColumns, C::kWorkers, C::kWorkerBytes};
}

template <class Rows, class Tile, ScaleKind kScales, bool kOwnCaches = false> DecodeChoice choose_columns(
    const DecodeShape& shape) {
  // Scales of either kind are asked for in kernels for odd rows (load.cuh), so e5m2 has ROW_SCALES there alone.
  constexpr ScaleKind kOfMany = std::is_same<Rows, tiles::E5m2Rows>::value ? ROW_SCALES : kScales;
  if constexpr (kHasOddKernel<Rows, Tile, kScales>)
    if (shape.is_odd && shape.rows <= 8) return decode_choice<Rows, Tile, 8, kScales, kOwnCaches, true>();
  return shape.rows <= 8 && !shape.is_odd ? decode_choice<Rows, Tile, 8, kScales, kOwnCaches>()
                                          : decode_choice<Rows, Tile, 16, kOfMany, kOwnCaches>();
}

// Of blocks in one buffer, 16-bit rows have tiles of 80 and 96 too.
template <class Rows, ScaleKind kScales, bool kOwnCaches = false> DecodeChoice choose_decode(const DecodeShape& shape) {
  const int64_t dims = shape.most_dims();
  if constexpr (Rows::kBits == 16 && !kOwnCaches) {
    if (dims > 64 && dims <= 80) return choose_columns<Rows, DecodeTile<80, 80, 1>, kScales>(shape);
    if (dims > 80 && dims <= 96) return choose_columns<Rows, DecodeTile<96, 96, 1>, kScales>(shape);
  }
  return dims <= 64 ? choose_columns<Rows, DecodeTile<64, 64, 1>, kScales, kOwnCaches>(shape)
                    : choose_columns<Rows, DecodeTile<128, 128, 1>, kScales, kOwnCaches>(shape);
}

// Rows of 4 bits and those with scales along them have no tiles of 192: slices of 64 would take more instructions a
// byte than the rest of 256 costs.
template <class Rows, ScaleKind kScales> DecodeChoice choose_wide_decode(const DecodeShape& shape) {
  const int64_t dims = shape.most_dims();
  if constexpr (Rows::kBits > 4 && kScales != GROUP_SCALES)
    if (dims <= 192)
      return shape.value_dims <= 128 ? choose_columns<Rows, DecodeTile<192, 128, 2>, kScales>(shape)
                                     : choose_columns<Rows, DecodeTile<192, 192, 3>, kScales>(shape);
  return dims <= 256 ? choose_columns<Rows, DecodeTile<256, 256, 2>, kScales>(shape)
                     : choose_columns<Rows, DecodeTile<512, 512, 4>, kScales>(shape);
}

}  // namespace cuda
}  // namespace kvx
