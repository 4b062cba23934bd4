#include "attention/prefill/products.cuh"

#include "attention/prefill/table.cuh"

namespace kvx {
namespace cuda {

namespace {

template <class C> kvx_status_t launch(const PrefillArgs& args, int64_t blocks, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&prefill_products<C>), C::kSharedBytes));
  return launch_early_with("attention_prefill", prefill_products<C>, dim3(unsigned(blocks)), dim3(C::kThreads),
                           C::kSharedBytes, stream, args);
}

}  // namespace

kvx_status_t start_prefill_products(const PrefillArgs& args, int64_t blocks, void* stream) {
  return args.soft_cap > 0.f ? launch<ProductsConfig<true>>(args, blocks, stream)
                             : launch<ProductsConfig<false>>(args, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
