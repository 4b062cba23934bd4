// One file an element type makes its prefill kernels (attention_prefill_e4m3.cu, ...), so that they compile side by side.
#pragma once
#include "attention.cuh"
#include "attention_prefill.cuh"

namespace kvx {
namespace cuda {

kvx_status_t start_prefill_bf16(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream);
kvx_status_t start_prefill_f16(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream);
kvx_status_t start_prefill_e4m3(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, ScaleKind scales, void* stream);
kvx_status_t start_prefill_s8(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream);

template <class C>
kvx_status_t launch_prefill(const PrefillArgs& args, int64_t blocks, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&prefill<C>), C::kSharedBytes));
  return launch_early_with("attention_prefill", prefill<C>, dim3(unsigned(blocks)), dim3(C::kThreads), C::kSharedBytes, stream, args);
}

// Tiles of 128 take every head_dim above 64.
template <class Rows, ScaleKind kScales>
kvx_status_t start_prefill(const AttentionParams& p, const PrefillArgs& args, int64_t blocks, void* stream) {
  const bool caps = p.soft_cap > 0.f;
  if (p.head_dim == 64) return caps ? launch_prefill<PrefillConfig<Rows, 64, true, kScales>>(args, blocks, stream) : launch_prefill<PrefillConfig<Rows, 64, false, kScales>>(args, blocks, stream);
  return caps ? launch_prefill<PrefillConfig<Rows, 128, true, kScales>>(args, blocks, stream) : launch_prefill<PrefillConfig<Rows, 128, false, kScales>>(args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
