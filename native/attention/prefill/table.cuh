// One file an element type makes its prefill kernels (attention/prefill/bytes.cu, ...), so
// that they compile side by side.
#pragma once
#include "attention/cuda/attention.cuh"
#include "attention/prefill/prefill.cuh"

namespace kvx {
namespace cuda {

// Rows run in the next tile. Those of more than 128 elements (wide) have kernels of their own.
using StartPrefill = kvx_status_t(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream);
using StartScaledPrefill = kvx_status_t(const AttentionParams& p, const PrefillArgs& args, int64_t blocks,
                                        ScaleKind scales, void* stream);
StartPrefill start_prefill_bf16, start_wide_prefill_bf16, start_prefill_f16, start_wide_prefill_f16;
StartScaledPrefill start_prefill_bytes, start_wide_prefill_bytes;  // eight bits, ONE_SCALE or ROW_SCALES
// Rows of up to 256 elements: int4 of ROW_SCALES, and those of GROUP_SCALES: mxfp8, and of four bits.
StartPrefill start_prefill_s4, start_prefill_mxfp8, start_prefill_nibbles;
// e4m3 by e4m3, ONE_SCALE, rows of up to 128 elements, blocks with tensor maps
kvx_status_t start_prefill_products(const PrefillArgs& args, int64_t blocks, void* stream);

template <class C>
kvx_status_t launch_prefill(const PrefillArgs& args, int64_t blocks, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&prefill<C>), C::kSharedBytes));
  return launch_early_with("attention_prefill", prefill<C>, dim3(unsigned(blocks)), dim3(C::kThreads), C::kSharedBytes,
                           stream, args);
}

template <class Rows, class Tile, ScaleKind kScales>
kvx_status_t start_prefill_tile(const PrefillArgs& args, int64_t blocks, void* stream) {
  return launch_prefill<PrefillConfig<Rows, Tile, kScales>>(args, blocks, stream);
}

constexpr int64_t kMostPrefillDims = 128, kMostWidePrefillDims = 256,
                  kMostSplitPrefillDims = 512;  // split: under queries that are multiplied as they are
inline int64_t most_dims(const AttentionParams& p) { return p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim; }
inline int64_t tile_keys(const AttentionParams& p) { return p.head_dim <= 192 && p.v_head_dim <= 128 ? 128 : 64; }
inline int64_t tile_queries(const AttentionParams& p) {
  if (most_dims(p) > kMostWidePrefillDims) return 64;
  return most_dims(p) <= 64 && dtype_bits(p.kv.plane[0].dtype) == 16 ? 192 : 128;
}

template <class Rows, ScaleKind kScales>
kvx_status_t start_prefill(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) {
  if (most_dims(p) <= 64) return start_prefill_tile<Rows, PrefillTile<64, 64, 128>, kScales>(args, blocks, stream);
  return start_prefill_tile<Rows, PrefillTile<128, 128, 128>, kScales>(args, blocks, stream);
}

template <class Rows, ScaleKind kScales>
kvx_status_t start_prefill_of_any_width(const AttentionParams& p, const PrefillArgs& args, int64_t blocks,
                                        void* stream) {
  if (most_dims(p) <= kMostPrefillDims) return start_prefill<Rows, kScales>(p, args, blocks, stream);
  return start_prefill_tile<Rows, PrefillTile<256, 256, 64>, kScales>(args, blocks, stream);
}

using SplitPrefillTile = PrefillTile<512, 512, 64, 1, true>;
template <class Rows, ScaleKind kScales>
kvx_status_t start_wide_prefill(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) {
  if constexpr (Rows::kBits == 16) {
    if (tile_keys(p) == 128) return start_prefill_tile<Rows, PrefillTile<192, 128, 128>, kScales>(args, blocks, stream);
    if (most_dims(p) > kMostWidePrefillDims)
      return start_prefill_tile<Rows, SplitPrefillTile, kScales>(args, blocks, stream);
  }
  if (most_dims(p) <= 192) return start_prefill_tile<Rows, PrefillTile<192, 192, 64>, kScales>(args, blocks, stream);
  return start_prefill_tile<Rows, PrefillTile<256, 256, 64>, kScales>(args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
