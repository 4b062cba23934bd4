// attention_sparse on the device: which kernel takes a call, how its work is shared
// out, and the sums of what was split.
#include "attention/sparse/sparse.cuh"

#include <algorithm>

#include "attention/cuda/attention.cuh"
#include "attention/sparse/any.h"

namespace kvx {
namespace cuda {

namespace {

constexpr int kMostSplits = 16, kLeastSplitTiles = 2;

bool is_fp8_row(const RowPages& r) {
  return r.dtype == KVX_DTYPE_F8_E4M3 && r.coded == 448 && r.rope_dim == 64 && r.group == 64 &&
         r.scale_dtype == KVX_DTYPE_E8M0 && r.scale_bytes == 8;
}
bool is_bf16_row(const RowPages& r) { return r.dtype == KVX_DTYPE_BF16 && r.group == 0; }

bool is_taken(const SparseParams& p) {
  if (!has_warpgroups() || p.dim != kSparseDim || p.q.dtype != KVX_DTYPE_BF16 || p.scale <= 0.f ||
      p.rope_dim > kMostTurned)
    return false;
  const bool is_fp8 = is_fp8_row(p.window);
  for (const RowPages* r : {&p.window, &p.fresh, &p.entries}) {
    if (!r->data) continue;
    if (!(is_fp8 ? is_fp8_row(*r) : is_bf16_row(*r)) || (reinterpret_cast<uintptr_t>(r->data) | uint64_t(r->page)) % 16)
      return false;
  }
  const auto fits = [](const RowsParams& r, uint64_t unit) {
    return r.is_dense && (reinterpret_cast<uintptr_t>(r.data) | uint64_t(r.token | r.head)) % unit == 0;
  };
  return fits(p.q, 16) && fits(p.out, p.out.dtype == KVX_DTYPE_F32 ? 8 : 16);
}

int64_t num_items(const SparseParams& p) { return p.step.num_tokens * ((p.num_heads + kSparseRows - 1) / kSparseRows); }

int num_splits(const SparseParams& p, int num_sms) {
  const int64_t items = num_items(p), tiles = (p.window_tokens + p.max_entries + kSparseKeys - 1) / kSparseKeys;
  if (items == 0) return 1;
  return int(std::max<int64_t>(1, std::min({num_sms / items, tiles / kLeastSplitTiles, int64_t(kMostSplits)})));
}

// Adds up the parts of a token's head: a warp each.
__global__ void __launch_bounds__(128) combine_sparse(const __grid_constant__ SparseArgs a) {
  wait_for_previous();
  const SparseParams& p = a.p;
  const int lane = threadIdx.x % 32;
  const int64_t index = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
  const int32_t token = int32_t(index / p.num_heads), head = int32_t(index % p.num_heads);
  if (token >= p.step.num_tokens) return;
  const StepToken t = find_token(p.step, token);
  float base = -INFINITY, sum = 0.f;
  float4 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  const int64_t item = int64_t(token) * a.head_groups.d + head / kSparseRows;
  for (int s = 0; t.slot >= 0 && s < int(a.splits.d); s++) {
    const float* part = reinterpret_cast<const float*>(p.workspace + (item * a.splits.d + s) * kSparsePartBytes);
    const float2 stats = __ldcg(reinterpret_cast<const float2*>(part + kSparseRows * kSparseDim) + head % kSparseRows);
    float4 y[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      y[i] = __ldcg(reinterpret_cast<const float4*>(part + head % kSparseRows * kSparseDim) + i * 32 + lane);
    if (stats.x == -INFINITY && stats.y == 0.f) continue;
    const float now = fmaxf(base, stats.x), old = exp2f(base - now), fresh = exp2f(stats.x - now);
    sum = sum * old + stats.y * fresh, base = now;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i].x = x[i].x * old + y[i].x * fresh, x[i].y = x[i].y * old + y[i].y * fresh;
      x[i].z = x[i].z * old + y[i].z * fresh, x[i].w = x[i].w * old + y[i].w * fresh;
    }
  }
  const float inverse = finish_head(p, token, head, base, sum, sink_of(p, head), lane == 0);
  char* to = p.out.data + token * p.out.token + int64_t(head) * p.out.head;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int dim = 4 * (i * 32 + lane);
    float y[4] = {x[i].x * inverse, x[i].y * inverse, x[i].z * inverse, x[i].w * inverse};
    if (t.slot >= 0)
      turn_back(p, t.position(token), dim, &y[0], &y[1]), turn_back(p, t.position(token), dim + 2, &y[2], &y[3]);
    store_sparse_pair(p.out.dtype, to, dim, y[0], y[1]), store_sparse_pair(p.out.dtype, to, dim + 2, y[2], y[3]);
  }
}

template <bool kIsFp8> kvx_status_t launch_sparse(const SparseArgs& a, int64_t items, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&attend_sparse<kIsFp8>), SparseConfig::kSharedBytes));
  return launch_early_with("attend_sparse", attend_sparse<kIsFp8>, dim3(unsigned(items), a.splits.d),
                           dim3(SparseConfig::kThreads), SparseConfig::kSharedBytes, stream, a);
}

}  // namespace

uint64_t sparse_workspace(const SparseParams& p) {
  DeviceGuard guard(p.device);
  if (guard.status() != KVX_STATUS_OK || !is_taken(p)) return 0;
  const int splits = num_splits(p, guard.num_sms());
  return splits > 1 ? uint64_t(num_items(p) * splits * kSparsePartBytes) : 0;
}

kvx_status_t attention_sparse(const SparseParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.step.num_tokens == 0) return KVX_STATUS_OK;
  if (!is_taken(p)) return attention_sparse_any(p, stream);
  SparseArgs a = {};
  a.p = p;
  a.window_rows = make_fast_divider(p.window.rows), a.entry_rows = make_fast_divider(std::max(1, p.entries.rows)),
  a.fresh_rows = make_fast_divider(std::max(1, p.fresh.rows));
  a.head_groups = make_fast_divider((p.num_heads + kSparseRows - 1) / kSparseRows),
  a.splits = make_fast_divider(num_splits(p, guard.num_sms())), a.ratio = make_fast_divider(p.ratio),
  a.factor = p.scale * 1.44269504f;
  const int64_t items = num_items(p);
  if (items > kMaxCount || items / a.head_groups.d * p.num_heads > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld tokens of %d heads are more than one launch takes; split the batch.",
                (long long)p.step.num_tokens, p.num_heads);
  KVX_TRY(is_fp8_row(p.window) ? launch_sparse<true>(a, items, stream) : launch_sparse<false>(a, items, stream));
  if (a.splits.d == 1) return KVX_STATUS_OK;
  const int64_t warps = p.step.num_tokens * p.num_heads;
  return launch_early("combine_sparse", combine_sparse, dim3(unsigned((warps + 3) / 4)), dim3(128), stream, a);
}

}  // namespace cuda
}  // namespace kvx
