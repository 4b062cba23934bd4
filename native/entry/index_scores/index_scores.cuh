// index_scores' kernels: which entries a token may read, and filling the rest with -inf.
#pragma once
#include "entry/cuda/step.cuh"

namespace kvx {
namespace cuda {

struct IndexArgs {
  IndexScoresParams p;
  FastDivider ratio, rows;  // rows: of a page
};

// Entries that a token at this position may read.
__device__ __forceinline__ int32_t visible_entries(const IndexArgs& a, int32_t position) {
  return int32_t(min(a.ratio.divide(uint32_t(position) + 1), uint32_t(a.p.num_entries)));
}

__device__ __forceinline__ float* scores_of(const IndexArgs& a, int32_t token) {
  return reinterpret_cast<float*>(reinterpret_cast<char*>(a.p.scores) + token * a.p.score_token);
}

// The page of an entry, -1 where it has none. A page outside of the pool is counted once, by whom `counts` is set for.
__device__ __forceinline__ int32_t index_page(const IndexArgs& a, int32_t slot, uint32_t column, bool counts) {
  bool is_bad = false;
  const int32_t page = entry_page(a.p.table, a.p.keys, slot, int32_t(column), &is_bad);
  if (is_bad && counts && a.p.errors) atomicAdd(a.p.errors, 1ull);
  return page;
}

// Columns [from, to) of a token's scores become -inf; by a warp.
__device__ __forceinline__ void hide_entries(const IndexArgs& a, int32_t token, int64_t from, int64_t to) {
  float* row = scores_of(a, token);
  const int lane = threadIdx.x % 32;
  if ((reinterpret_cast<uintptr_t>(row) | uintptr_t(from) * 4) % 16 == 0) {
    const int64_t wide = from + (to - from) / 4 * 4;
    for (int64_t j = from + lane * 4; j < wide; j += 128)
      *reinterpret_cast<float4*>(row + j) = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    from = wide;
  }
  for (int64_t j = from + lane; j < to; j += 32) row[j] = -INFINITY;
}

}  // namespace cuda
}  // namespace kvx
