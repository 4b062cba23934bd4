// The seven calls of kvbm_kernels.h: numbers are checked, sizes become bytes, and move.h is asked to move them.
#include <new>
#include <vector>

#include "kvbm/move.h"

namespace kvbm {
namespace {

// 0: no such type.
size_t dtype_bytes(int dtype) {
  switch (dtype) {
    case KVBM_DTYPE_F16:
    case KVBM_DTYPE_BF16: return 2;
    case KVBM_DTYPE_F32: return 4;
    case KVBM_DTYPE_F64: return 8;
    case KVBM_DTYPE_FP8: return 1;
    default: return 0;
  }
}

template <class... Sizes> bool any_zero(Sizes... sizes) { return ((sizes == 0) || ...); }

// False where the product does not fit. Everything moved, and so every offset, is such a product.
template <class... Sizes> bool multiply(uint64_t* out, Sizes... sizes) {
  *out = 1;
  return (!__builtin_mul_overflow(*out, uint64_t(sizes), out) && ...);
}

int permute_blocks(bool to_universal, const void* const* universal, const void* const* blocks, size_t nb, size_t nh,
                   size_t nl, size_t no, size_t nt, size_t hd, int dtype, int layout, kvbm_stream_t stream) {
  const size_t element = dtype_bytes(dtype);
  if (element == 0 || (layout != KVBM_LAYOUT_NHD && layout != KVBM_LAYOUT_HND)) return KVBM_INVALID_VALUE;
  if (any_zero(nb, nh, nl, no, nt, hd)) return KVBM_SUCCESS;
  if (!universal || !blocks) return KVBM_INVALID_VALUE;
  uint64_t all;
  if (!multiply(&all, nb, nl, no, nt, nh, hd, element)) return KVBM_INVALID_VALUE;
  // HND has a head's tokens in one run, as the universal block has: one long row, and one token of it.
  const uint64_t tokens = layout == KVBM_LAYOUT_NHD ? nt : 1, row = nt / tokens * hd * element, head = tokens * row,
                 per = nl * no;
  Permute p = {};
  const int u = to_universal ? 1 : 0, c = 1 - u;
  p.side[u] = Side{universal, per, head};
  p.side[c] = Side{blocks, 1, 0};
  p.num_pieces = nb * per, p.piece_bytes = nh * head, p.row_bytes = row;
  // The order of the destination: writes fill whole lines soonest.
  p.inner_rows = to_universal ? tokens : nh;
  const uint64_t token_step[2] = {nh * row, row},
                 head_step[2] = {row, per * head};  // at the chunk, at the universal block
  for (int w = 0; w < 2; w++) {
    const int s = w == u ? 1 : 0;
    p.outer[w] = to_universal ? head_step[s] : token_step[s];
    p.inner[w] = to_universal ? token_step[s] : head_step[s];
  }
  return permute(p, stream);
}

int memcpy_by(int mode, const Batch& b, kvbm_stream_t stream) {
  // The batch call refuses the NULL stream, so it is not even asked where the loop may answer.
  if (mode == KVBM_FALLBACK_ONLY || (mode == KVBM_BATCHED_WITH_FALLBACK && !stream)) return memcpy_loop(b, stream);
  const int result = memcpy_batch(b, stream);
  const bool refused = result == KVBM_INVALID_VALUE || result == KVBM_NOT_SUPPORTED;
  return refused && mode == KVBM_BATCHED_WITH_FALLBACK ? memcpy_loop(b, stream) : result;
}

int memcpy_chunks(int mode, const void* const* blocks, void* const* operational, uint64_t count, uint64_t per,
                  uint64_t bytes, bool to_operational, kvbm_stream_t stream) try {
  std::vector<const void*> src(count);
  std::vector<void*> dst(count);
  for (uint64_t p = 0; p < count; p++) {
    char* flat = static_cast<char*>(operational[p / per]) + p % per * bytes;
    src[p] = to_operational ? blocks[p] : flat;
    dst[p] = to_operational ? flat : const_cast<void*>(blocks[p]);
  }
  return memcpy_by(mode, Batch{src.data(), dst.data(), bytes, count}, stream);
} catch (const std::exception&) {  // of the two arrays: no memory, or more than an array holds
  return KVBM_OUT_OF_MEMORY;
}

}  // namespace
}  // namespace kvbm

using namespace kvbm;

extern "C" {

int kvbm_kernels_launch_universal_from_block(void* const* universal_ptrs, const void* const* block_ptrs,
                                             size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                             int dtype, int layout, kvbm_stream_t stream) {
  return permute_blocks(true, universal_ptrs, block_ptrs, num_blocks, nh, nl, no, nt, hd, dtype, layout, stream);
}

int kvbm_kernels_launch_block_from_universal(const void* const* universal_ptrs, void* const* block_ptrs,
                                             size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd,
                                             int dtype, int layout, kvbm_stream_t stream) {
  return permute_blocks(false, universal_ptrs, block_ptrs, num_blocks, nh, nl, no, nt, hd, dtype, layout, stream);
}

int kvbm_kernels_launch_operational_copy(const void* const* block_ptrs_host, const void* const* block_ptrs_device,
                                         void* const* operational_ptrs_host, void* const* operational_ptrs_device,
                                         size_t num_blocks, size_t nl, size_t no, size_t inner, size_t elem_size,
                                         int dtype, int direction, int backend, kvbm_stream_t stream) {
  const size_t element = dtype_bytes(dtype);
  if (element == 0 || (direction != KVBM_BLOCK_TO_OPERATIONAL && direction != KVBM_OPERATIONAL_TO_BLOCK))
    return KVBM_INVALID_VALUE;
  if (any_zero(num_blocks, nl, no, inner, elem_size)) return KVBM_SUCCESS;
  const bool by_memcpy = backend == KVBM_BACKEND_MEMCPY_ASYNC || backend == KVBM_BACKEND_MEMCPY_BATCH;
  if (!block_ptrs_host || !operational_ptrs_host || (!by_memcpy && (!block_ptrs_device || !operational_ptrs_device)))
    return KVBM_INVALID_VALUE;
  uint64_t all;
  if (elem_size != element || !multiply(&all, num_blocks, nl, no, inner, element)) return KVBM_INVALID_VALUE;
  const uint64_t per = nl * no, bytes = inner * element, count = num_blocks * per;
  const bool to_operational = direction == KVBM_BLOCK_TO_OPERATIONAL;
  if (backend == KVBM_BACKEND_VECTORIZED && bytes % 8) return KVBM_NOT_SUPPORTED;
  if (!by_memcpy) {
    Copy c = {};
    c.side[to_operational ? 0 : 1] = Side{block_ptrs_device, 1, 0};
    c.side[to_operational ? 1 : 0] = Side{operational_ptrs_device, per, bytes};
    c.num_pieces = count, c.piece_bytes = bytes;
    const int result = copy(c, stream);
    if (result == KVBM_SUCCESS || backend == KVBM_BACKEND_VECTORIZED || backend == KVBM_BACKEND_KERNEL_ONLY)
      return result;
  }
  const int mode = backend == KVBM_BACKEND_MEMCPY_ASYNC ? KVBM_FALLBACK_ONLY : KVBM_BATCHED_WITH_FALLBACK;
  return memcpy_chunks(mode, block_ptrs_host, operational_ptrs_host, count, per, bytes, to_operational, stream);
}

int kvbm_kernels_launch_vectorized_copy(void** src_ptrs, void** dst_ptrs, size_t copy_size_bytes, int num_pairs,
                                        kvbm_stream_t stream) {
  if (any_zero(copy_size_bytes, num_pairs)) return KVBM_SUCCESS;
  if (num_pairs < 0 || !src_ptrs || !dst_ptrs) return KVBM_INVALID_VALUE;
  Copy c = {};
  c.side[0] = Side{src_ptrs, 1, 0}, c.side[1] = Side{dst_ptrs, 1, 0};
  c.num_pieces = uint64_t(num_pairs), c.piece_bytes = copy_size_bytes;
  return copy(c, stream);
}

int kvbm_kernels_memcpy_batch(const void* const* src_ptrs, void* const* dst_ptrs, size_t size_per_copy,
                              size_t num_copies, int mode, kvbm_stream_t stream) {
  if (mode < KVBM_BATCHED_WITH_FALLBACK || mode > KVBM_BATCH_WITHOUT_FALLBACK) return KVBM_INVALID_VALUE;
  if (any_zero(size_per_copy, num_copies)) return KVBM_SUCCESS;
  if (!src_ptrs || !dst_ptrs) return KVBM_INVALID_VALUE;
  return memcpy_by(mode, Batch{src_ptrs, dst_ptrs, size_per_copy, num_copies}, stream);
}

bool kvbm_kernels_has_memcpy_batch_async(void) { return kHasBatch; }

bool kvbm_kernels_is_stub_build(void) { return kIsStub; }

}  // extern "C"
