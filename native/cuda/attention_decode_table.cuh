// One file an element type makes its kernels (attention_decode_bf16.cu, ...), so that they compile side by side.
#pragma once
#include "attention.cuh"
#include "attention_decode.cuh"

namespace kvx {
namespace cuda {

struct DecodeChoice {
  kvx_status_t (*start)(const DecodeArgs&, int blocks, int warps, void* stream);
  int tile_tokens, columns, warps, warp_bytes;  // most warps of a block, and shared memory each needs
};

// `own`: every sequence has a cache of its own. Quantised ones run on the general kernel: as many kernels again would serve few.
DecodeChoice choose_decode_bf16(int64_t head_dim, int64_t rows, bool own);
DecodeChoice choose_decode_f16(int64_t head_dim, int64_t rows, bool own);
DecodeChoice choose_decode_e4m3(int64_t head_dim, int64_t rows, ScaleKind scales);
DecodeChoice choose_decode_s8(int64_t head_dim, int64_t rows);

template <class C>
kvx_status_t launch_decode(const DecodeArgs& args, int blocks, int warps, void* stream) {
  static_assert(C::kSharedBytes <= 227 * 1024, "shared memory of a block of threads");
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&decode<C>), warps * C::Ring::kBytes));
  KVX_TRY(launch_early_with("attention_decode", decode<C>, dim3(unsigned(blocks)), dim3(unsigned(warps) * 32), warps * C::Ring::kBytes, stream, args));
  const int64_t rows = int64_t(args.num_seqs) * args.num_kv_heads * args.plan.rows;
  return launch_early("attention_combine", combine<C::kHeadDim>, dim3(unsigned((rows + 3) / 4)), dim3(128), stream, args, C::kScales == ONE_SCALE);
}

template <class Rows, int kHeadDim, int kColumns, ScaleKind kScales, bool kOwnCaches> DecodeChoice decode_choice() {
  using C = DecodeConfig<Rows, kHeadDim, kColumns, kScales, kOwnCaches>;
  return DecodeChoice{&launch_decode<C>, C::kTokens, kColumns, C::kWarps, C::Ring::kBytes};
}

template <class Rows, int kHeadDim, ScaleKind kScales, bool kOwnCaches> DecodeChoice choose_columns(int64_t rows) {
  return rows <= 8 ? decode_choice<Rows, kHeadDim, 8, kScales, kOwnCaches>() : decode_choice<Rows, kHeadDim, 16, kScales, kOwnCaches>();
}

// Of blocks in one buffer, 16-bit rows have kernels for 80 and 96 too (decodes_dim).
template <class Rows, ScaleKind kScales, bool kOwnCaches = false> DecodeChoice choose_decode(int64_t head_dim, int64_t rows) {
  if constexpr (Rows::kBytes == 2 && !kOwnCaches) {
    if (head_dim == 80) return choose_columns<Rows, 80, kScales, kOwnCaches>(rows);
    if (head_dim == 96) return choose_columns<Rows, 96, kScales, kOwnCaches>(rows);
  }
  return head_dim == 64 ? choose_columns<Rows, 64, kScales, kOwnCaches>(rows) : choose_columns<Rows, 128, kScales, kOwnCaches>(rows);
}
inline bool decodes_dim(int64_t head_dim, bool is_16_bit, bool own) { return head_dim == 64 || head_dim == 128 || (is_16_bit && !own && (head_dim == 80 || head_dim == 96)); }

}  // namespace cuda
}  // namespace kvx
