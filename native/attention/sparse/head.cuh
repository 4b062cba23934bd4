// One head of sparse attention over a range of its token's keys, by 128 threads, for rows of any format and numbers of
// any size.
#pragma once
#include "attention/sparse/item.cuh"
#include "tiles/barrier.cuh"

namespace kvx {
namespace cuda {

constexpr int kHeadThreads = 128, kHeadKeys = 32;  // keys at a time

__host__ __device__ constexpr int sparse_head_floats(int dim) {
  return 2 * dim + kHeadKeys;
}  // shared memory: q, sums, scores

struct KeyAt {
  const RowPages* rows;  // NULL: no such key
  int64_t page;
  int32_t row;
};

__device__ __forceinline__ KeyAt find_key(const SparseArgs& a, const SparseItem& w, int32_t key, bool counts) {
  const SparseParams& p = a.p;
  KeyAsked k;
  if (const int32_t* at = number_at(a, w, key, &k)) k.number = __ldg(at);
  if (const int32_t* at = page_at(a, w, &k)) k.loaded = __ldg(at);
  look_at_page(a, &k, counts);
  uint32_t row = 0;
  if (k.kind == KEY_ENTRY) {
    page_and_row(a.entry_rows, k.number, &row);
    return KeyAt{&p.entries, k.loaded, int32_t(row)};
  }
  if (k.kind == KEY_FRESH) {
    const int64_t page = page_and_row(a.fresh_rows, w.begin + k.number - w.start, &row);
    return KeyAt{&p.fresh, page, int32_t(row)};
  }
  page_and_row(a.window_rows, k.number, &row);
  return KeyAt{k.kind == KEY_WINDOW ? &p.window : nullptr, w.slot, int32_t(row)};
}

// base and sum of the head's weights, in powers of two; sums of values are left in numbers[dim, 2 * dim). The threads
// meet at barrier 1.
__device__ inline float2 attend_head(const SparseArgs& a, const SparseItem& w, int32_t head, int32_t first_key,
                                     int32_t end_key, float* numbers, bool counts) {
  const SparseParams& p = a.p;
  const int thread = threadIdx.x % kHeadThreads, lane = thread % 32, warp = thread / 32, dim = p.dim;
  float *q = numbers, *out = q + dim, *scores = out + dim;
  const char* from = p.q.data + w.token * p.q.token + int64_t(head) * p.q.head;
  tiles::meet(1, kHeadThreads);
  for (int d = thread; d < dim; d += kHeadThreads) q[d] = load_float(from + d * p.q.dim, p.q.dtype), out[d] = 0.f;
  float base = -INFINITY, sum = 0.f;
  for (int32_t first = first_key; first < end_key; first += kHeadKeys) {
    tiles::meet(1, kHeadThreads);
    for (int j = warp; j < kHeadKeys; j += kHeadThreads / 32) {
      KeyAt at{nullptr, 0, 0};
      if (first + j < end_key) at = find_key(a, w, first + j, lane == 0 && counts);
      float dot = 0.f;
      if (at.rows)
        for (int d = lane; d < dim; d += 32) dot = __fmaf_rn(q[d], row_element(*at.rows, at.page, at.row, d), dot);
#pragma unroll
      for (int hop = 16; hop > 0; hop /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, hop);
      if (lane == 0) scores[j] = at.rows ? dot * p.scale * 1.44269504f : -INFINITY;
    }
    tiles::meet(1, kHeadThreads);
    float top = scores[lane];
#pragma unroll
    for (int hop = 16; hop > 0; hop /= 2) {
      const float other = __shfl_xor_sync(0xffffffffu, top, hop);
      top = top > other || top != top ? top : other;  // NaN stays
    }
    if (top == -INFINITY) continue;
    const float now = top > base || top != top ? top : base, shrink = exp2f(base - now);
    base = now, sum *= shrink;
    for (int d = thread; d < dim; d += kHeadThreads) out[d] *= shrink;
    for (int j = 0; j < kHeadKeys; j++) {
      if (scores[j] == -INFINITY) continue;
      const float weight = exp2f(scores[j] - base);
      const KeyAt at = find_key(a, w, first + j, false);
      sum += weight;
      if (at.rows)
        for (int d = thread; d < dim; d += kHeadThreads)
          out[d] = __fmaf_rn(weight, row_element(*at.rows, at.page, at.row, d), out[d]);
    }
  }
  tiles::meet(1, kHeadThreads);
  return make_float2(base, sum);
}

// The head's output and LSE from its sums.
__device__ inline void write_head(const SparseParams& p, const SparseItem& w, int32_t head, float2 stats,
                                  const float* out) {
  const int thread = threadIdx.x % kHeadThreads;
  const float inverse = finish_head(p, w.token, head, stats.x, stats.y, sink_of(p, head), thread == 0);
  char* to = p.out.data + w.token * p.out.token + int64_t(head) * p.out.head;
  for (int d = 2 * thread; d < p.dim; d += 2 * kHeadThreads) {  // rows have an even number of elements
    float x = out[d] * inverse, y = out[d + 1] * inverse;
    if (w.slot >= 0) turn_back(p, w.position, d, &x, &y);
    store_float(to + d * p.out.dim, p.out.dtype, x), store_float(to + (d + 1) * p.out.dim, p.out.dtype, y);
  }
}

}  // namespace cuda
}  // namespace kvx
