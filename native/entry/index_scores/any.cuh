// index_scores of any queries on any keys: 64 keys of a token in a go, widened to f32 in
// shared memory 32 elements at a time.
#pragma once
#include "entry/index_scores/index_scores.cuh"

namespace kvx {
namespace cuda {

constexpr int kAnyKeys = 64, kAnyHeads = 64, kAnyDims = 32, kAnyThreads = 256;

__device__ __forceinline__ float query_element(const RowsParams& q, int32_t token, int32_t head, int32_t d) {
  const char* at = q.data + token * q.token + head * q.head + d * q.dim;
  return q.dtype == KVX_DTYPE_F8_E4M3 ? e4m3_to_f32(*reinterpret_cast<const uint8_t*>(at)) : load_float(at, q.dtype);
}

// A thread has keys `lane` and `lane + 32`, and eight heads: its warp's.
__global__ void __launch_bounds__(kAnyThreads) index_scores_any(const __grid_constant__ IndexArgs a) {
  __shared__ float keys[kAnyKeys][kAnyDims + 1], queries[kAnyHeads][kAnyDims], parts[kAnyThreads / 32][kAnyKeys];
  __shared__ int32_t pages[kAnyKeys];
  const IndexScoresParams& p = a.p;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  wait_for_previous();
  if (blockIdx.x == 0 && blockIdx.y == 0 && p.errors)
    for (int32_t seq = thread; seq < p.step.num_seqs; seq += kAnyThreads)
      if (open_sequence(p.step, seq).is_bad) atomicAdd(p.errors, 1ull);
  for (int32_t token = blockIdx.y; token < p.step.num_tokens; token += gridDim.y) {
    const StepToken s = find_token(p.step, token);
    const int32_t visible = s.seq < 0 ? 0 : visible_entries(a, s.position(token));
    float* row = scores_of(a, token);
    for (int64_t first = int64_t(blockIdx.x) * kAnyKeys; first < p.num_entries;
         first += int64_t(gridDim.x) * kAnyKeys) {
      const int64_t own = first + thread;
      if (first >= visible) {
        if (thread < kAnyKeys && own < p.num_entries) row[own] = -INFINITY;
        continue;
      }
      if (thread < kAnyKeys) {
        const uint32_t column = a.rows.divide(uint32_t(own));
        // The last token of a sequence sees all of its pages.
        pages[thread] = own < visible
                            ? index_page(a, s.slot, column, token == s.end - 1 && own == int64_t(column) * p.keys.rows)
                            : -1;
      }
      float score[2] = {0.f, 0.f};
      for (int32_t base = 0; base < p.num_heads; base += kAnyHeads) {
        float product[8][2] = {};
        for (int32_t dim = 0; dim < p.keys.dim; dim += kAnyDims) {
          __syncthreads();
          const int32_t d = dim + lane;
          for (int i = warp; i < kAnyKeys; i += kAnyThreads / 32) {
            const int32_t page = pages[i];
            const uint32_t in_page = uint32_t(first + i) - a.rows.divide(uint32_t(first + i)) * a.rows.d;
            keys[i][lane] = page >= 0 && d < p.keys.dim ? row_element(p.keys, page, int32_t(in_page), d) : 0.f;
          }
          for (int i = warp; i < kAnyHeads; i += kAnyThreads / 32)
            queries[i][lane] = base + i < p.num_heads && d < p.keys.dim ? query_element(p.q, token, base + i, d) : 0.f;
          __syncthreads();
#pragma unroll 4
          for (int j = 0; j < kAnyDims; j++) {
            const float k0 = keys[lane][j], k1 = keys[lane + 32][j];
#pragma unroll
            for (int i = 0; i < 8; i++) {
              const float q = queries[warp * 8 + i][j];
              product[i][0] = __fmaf_rn(q, k0, product[i][0]), product[i][1] = __fmaf_rn(q, k1, product[i][1]);
            }
          }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const int32_t head = base + warp * 8 + i;
          if (head >= p.num_heads) continue;
          const float w = *reinterpret_cast<const float*>(p.weights + token * p.weight_token + head * p.weight_head);
#pragma unroll
          for (int j = 0; j < 2; j++)
            score[j] = __fmaf_rn(w, product[i][j] < 0.f ? 0.f : product[i][j], score[j]);  // NaN stays
        }
      }
      parts[warp][lane] = score[0], parts[warp][lane + 32] = score[1];
      __syncthreads();
      if (thread < kAnyKeys && own < p.num_entries) {
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < kAnyThreads / 32; i++) sum += parts[i][thread];
        row[own] = pages[thread] < 0 ? -INFINITY : sum;
      }
      __syncthreads();  // `pages` and `parts` are written anew
    }
  }
}

}  // namespace cuda
}  // namespace kvx
