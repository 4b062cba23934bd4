#include "attention/any/prompt.cuh"

namespace kvx {
namespace cuda {

namespace {

template <class C> kvx_status_t launch_prompt(const AnyArgs& args, int64_t blocks, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&attend_prompt<C>), max_shared_memory()));
  return launch_early_with("attend_prompt", attend_prompt<C>, dim3(unsigned(blocks)), dim3(kPromptThreads), args.bytes,
                           stream, args);
}

template <class Numbers, int kOther> kvx_status_t start(const AnyArgs& args, int64_t blocks, void* stream) {
  const int dims = args.row_bytes / 2;  // of the tile
  if (dims == 128) return launch_prompt<PromptConfig<Numbers, 128, 32, kOther>>(args, blocks, stream);
  if constexpr (kOther == 1) {
    if (dims == 64) return launch_prompt<PromptConfig<Numbers, 64, 32, kOther>>(args, blocks, stream);
    if (args.tokens > 16) return launch_prompt<PromptConfig<Numbers, 256, 32, kOther>>(args, blocks, stream);
  }
  return launch_prompt<PromptConfig<Numbers, 256, 16, kOther>>(args, blocks, stream);
}
}  // namespace

kvx_status_t start_prompt(const AnyArgs& args, PromptKind kind, int64_t blocks, void* stream) {
  switch (kind) {
    case PROMPT_F16: return start<tiles::F16Numbers, 1>(args, blocks, stream);
    case PROMPT_PARTS: return start<tiles::Bf16Numbers, 2>(args, blocks, stream);
    default: return start<tiles::Bf16Numbers, 1>(args, blocks, stream);
  }
}

}  // namespace cuda
}  // namespace kvx
