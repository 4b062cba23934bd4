// index_scores on the device: which kernel takes a call.
#include <algorithm>

#include "attention/cuda/attention.cuh"
#include "entry/index_scores/any.cuh"
#include "entry/index_scores/bf16.cuh"
#include "entry/index_scores/fp8.cuh"
#include "tiles/tensor_map.h"

namespace kvx {
namespace cuda {

namespace {

IndexArgs make_args(const IndexScoresParams& p) {
  return IndexArgs{p, make_fast_divider(p.ratio), make_fast_divider(p.keys.rows)};
}

// Rows of 128 bytes as the copy engine is told of them: `rows` of each of `count` places.
PlaneParams rows_of_128(char* data, int64_t place, int64_t row) {
  PlaneParams plane = {};
  plane.data = data, plane.block = place, plane.token = row, plane.head = kIndexDim, plane.dim_lo = 2;
  plane.head_dim = plane.pack = kIndexDim / 2, plane.dtype = KVX_DTYPE_BF16, plane.is_dense = 1;
  return plane;
}

// Heads stand for the tokens of a block, and tokens for blocks. False: the engine cannot be told, or will not be.
bool make_fp8_args(const IndexScoresParams& p, IndexFp8Args* a) {
  const RowPages& k = p.keys;
  if (!has_warpgroups() || p.q.dtype != KVX_DTYPE_F8_E4M3 || !p.q.is_dense || k.dtype != KVX_DTYPE_F8_E4M3 ||
      k.scale_dtype != KVX_DTYPE_F32)
    return false;
  if (k.dim != kIndexDim || k.coded != kIndexDim || k.group != kIndexDim || k.scale_bytes != 4 || k.num_pages == 0)
    return false;
  if (p.num_heads > kIndexHeads || box_tokens(p.num_heads) != p.num_heads) return false;
  const PlaneParams keys = rows_of_128(k.data, k.page, kIndexDim), queries = rows_of_128(p.q.data, p.q.token, p.q.head);
  const MappedPlane maps[2] = {{&keys, 1, k.rows, k.num_pages}, {&queries, 1, p.num_heads, p.step.num_tokens}};
  if (!fits_tensor_map(maps[0]) || !fits_tensor_map(maps[1]) || k.page % 16) return false;
  a->index = make_args(p), a->box = int32_t(box_tokens(k.rows));
  return make_tensor_map(&a->keys, maps[0]) == KVX_STATUS_OK && make_tensor_map(&a->queries, maps[1]) == KVX_STATUS_OK;
}

// Queries that are exact in bf16, in rows of whole 8 bytes (4 of e4m3); pages whose parts the
// copy engine takes as they stand.
bool takes_bf16(const IndexScoresParams& p) {
  const RowPages& k = p.keys;
  const int64_t unit = p.q.dtype == KVX_DTYPE_BF16 ? 8 : 4;
  if (!has_warpgroups() || (p.q.dtype != KVX_DTYPE_BF16 && p.q.dtype != KVX_DTYPE_F8_E4M3) || !p.q.is_dense ||
      p.num_heads > kIndexHeads)
    return false;
  if ((reinterpret_cast<uintptr_t>(p.q.data) | uint64_t(p.q.token) | uint64_t(p.q.head)) % unit) return false;
  return k.dim == kIndexDim && k.coded == kIndexDim && box_tokens(k.rows) > 0 &&
         (reinterpret_cast<uintptr_t>(k.data) | uint64_t(k.page)) % 16 == 0;
}

template <class Widen> bool fits(const RowPages& k) {
  return k.dtype == Widen::kDtype && k.group == Widen::kElements && k.scale_dtype == Widen::kScale &&
         k.scale_bytes == Widen::kScaleBytes;
}

template <class Widen> kvx_status_t start(const IndexScoresParams& p, int num_sms, void* stream) {
  const IndexBf16Args a{make_args(p), int32_t(box_tokens(p.keys.rows))};
  constexpr int kBytes = IndexBf16<Widen>::kSharedBytes;
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(index_scores_bf16<Widen>), kBytes));
  return launch_early_with("index_scores_bf16", index_scores_bf16<Widen>, dim3(unsigned(num_sms)), dim3(kWidenThreads),
                           kBytes, stream, a);
}

}  // namespace

kvx_status_t index_scores(const IndexScoresParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.step.num_tokens == 0 || p.num_entries == 0) return KVX_STATUS_OK;
  IndexFp8Args fast;
  if (make_fp8_args(p, &fast)) {
    KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(index_scores_fp8), IndexFp8::kSharedBytes));
    return launch_early_with("index_scores_fp8", index_scores_fp8, dim3(unsigned(guard.num_sms())), dim3(kIndexThreads),
                             IndexFp8::kSharedBytes, stream, fast);
  }
  if (takes_bf16(p)) {
    using Mxfp4 = WidenE2m1<32, KVX_DTYPE_E8M0>;
    using Nvfp4 = WidenE2m1<16, KVX_DTYPE_F8_E4M3>;
    if (fits<Mxfp4>(p.keys)) return start<Mxfp4>(p, guard.num_sms(), stream);
    if (fits<Nvfp4>(p.keys)) return start<Nvfp4>(p, guard.num_sms(), stream);
    if (fits<WidenE4m3>(p.keys)) return start<WidenE4m3>(p, guard.num_sms(), stream);
    if (fits<WidenBf16>(p.keys)) return start<WidenBf16>(p, guard.num_sms(), stream);
  }
  const dim3 grid(unsigned(std::min((p.num_entries + kAnyKeys - 1) / kAnyKeys, int64_t(1) << 16)),
                  unsigned(std::min(p.step.num_tokens, int64_t(65535))));
  return launch_early("index_scores_any", index_scores_any, grid, dim3(kAnyThreads), stream, make_args(p));
}

}  // namespace cuda
}  // namespace kvx
