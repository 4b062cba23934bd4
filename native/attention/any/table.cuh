// One file a number of parts makes its kernels (attention/any/parts_1.cu, ...), so that they compile side by side.
#pragma once
#include "attention/any/any.cuh"
#include "attention/cuda/attention.cuh"

namespace kvx {
namespace cuda {

constexpr int kFewRows = 16, kManyRows = 64,
              kMostManyDims = 128;  // query rows of a block; many of them leave registers for so many elements of V

constexpr int kOwnBytes = 1024;  // of shared memory that are not a tile's

kvx_status_t start_any_1(const AnyArgs& args, int rows, int64_t blocks, void* stream);
kvx_status_t start_any_2(const AnyArgs& args, int rows, int64_t blocks, void* stream);
kvx_status_t start_any_3(const AnyArgs& args, int rows, int64_t blocks, void* stream);

// Of prompts (prompt.cuh), what numbers are multiplied: bf16; f16; bf16 with queries and weights in two parts.
enum PromptKind { NO_PROMPT, PROMPT_BF16, PROMPT_F16, PROMPT_PARTS };
constexpr int kPromptThreads = 128, kMostPromptDims = 256;
// The tile that rows run in. Those in parts are rare: they have kernels of two widths.
constexpr int prompt_dims(int most, bool has_parts) { return most <= 64 && !has_parts ? 64 : most <= 128 ? 128 : 256; }
// Query rows of a block: as many as leave registers for their sums.
constexpr int prompt_rows(int dims, bool has_parts) { return dims <= 128 && !has_parts ? 128 : 64; }
kvx_status_t start_prompt(const AnyArgs& args, PromptKind kind, int64_t blocks, void* stream);

template <class C> kvx_status_t launch_any(const AnyArgs& args, int64_t blocks, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&attend_any<C>), max_shared_memory() - kOwnBytes));
  return launch_early_with("attend_any", attend_any<C>, dim3(unsigned(blocks)), dim3(kAnyThreads), args.bytes, stream,
                           args);
}

template <int kParts> kvx_status_t start_any(const AnyArgs& args, int rows, int64_t blocks, void* stream) {
  if (rows == kManyRows) return launch_any<AnyConfig<kMostManyDims, kManyRows, kParts>>(args, blocks, stream);
  return args.d.dims[1] <= 128 ? launch_any<AnyConfig<128, kFewRows, kParts>>(args, blocks, stream)
                               : launch_any<AnyConfig<kMostAnyDims, kFewRows, kParts>>(args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
