// Scores of a warpgroup's tile to weights: 64 rows by 64 keys, as multiplications leave them. Of every eight keys a
// thread has 2 t and 2 t + 1 of rows r0 = 16 * warp + g and r0 + 8; its weights are packed as the next multiplication
// takes them.
#pragma once
#include "tiles/ptx.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

// Weights are 2^(score - base). A row's base moves when a score is past it by 8, so that sums of values are seldom
// multiplied: at the first score of all, -inf + 8 being -inf, and seldom after. Whether it does is a vote; only where
// it does the four threads of a row have to agree on its largest score.
//
// kGuesses: weights are found before the vote, so that comparisons stand between the exponentials, and anew where a
// base moves. It takes registers for scores and weights at once.
template <class Numbers, bool kGuesses> struct TileSoftmax {
  float base[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};  // sum: of the thread's own weights

  // `factor`: of scores. `smaller`: of weights, but not of their sums. `shrink`: what sums so far are multiplied by.
  __device__ __forceinline__ void weigh_tile(const float (&s)[32], const float (&factor)[2], float smaller,
                                             uint4 (&weights)[4], float (&shrink)[2]) {
    float total[2], top[2];
    shrink[0] = shrink[1] = 1.f;
    if constexpr (kGuesses) weigh(s, factor, smaller, weights, total, top);
    else find_top(s, factor, top);
    const bool moves = __any_sync(0xffffffffu, top[0] > base[0] + 8.f || top[1] > base[1] + 8.f);
    if (moves) move_base(top, shrink);
    if (!kGuesses || moves) weigh(s, factor, smaller, weights, total, top);
#pragma unroll
    for (int h = 0; h < 2; h++) sum[h] = __fmaf_rn(sum[h], shrink[h], total[h]);
  }

  // Base and sum of both rows, by all of their threads.
  __device__ __forceinline__ float4 stats() const {
    float all[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      all[h] = sum[h] + __shfl_xor_sync(0xffffffffu, sum[h], 1);
      all[h] += __shfl_xor_sync(0xffffffffu, all[h], 2);
    }
    return make_float4(base[0], base[1], all[0], all[1]);
  }

 private:
  static __device__ __forceinline__ void find_top(const float (&s)[32], const float (&factor)[2], float (&top)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float some = fmaxf(s[2 * h], s[2 * h + 1]), other = fmaxf(s[4 + 2 * h], s[5 + 2 * h]);
#pragma unroll
      for (int n = 2; n < 8; n += 2)
        some = fmaxf(some, fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1])),
        other = fmaxf(other, fmaxf(s[4 * n + 4 + 2 * h], s[4 * n + 5 + 2 * h]));
      top[h] = fmaxf(some, other) * factor[h];
    }
  }

  __device__ __forceinline__ void weigh(const float (&s)[32], const float (&factor)[2], float smaller,
                                        uint4 (&weights)[4], float (&total)[2], float (&top)[2]) const {
    float minus[2], sums[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int h = 0; h < 2; h++) minus[h] = base[h] == -INFINITY ? 0.f : -base[h], top[h] = -INFINITY;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      float p[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int h = i / 2 % 2;
        p[i] = exp2_fast(__fmaf_rn(s[8 * k + i], factor[h], minus[h]));
        sums[i % 4] += p[i];
        if (i % 2) top[h] = fmaxf(top[h], fmaxf(s[8 * k + i - 1], s[8 * k + i]));
        p[i] *= smaller;
      }
      weights[k] = make_uint4(Numbers::pack(p[0], p[1]), Numbers::pack(p[2], p[3]), Numbers::pack(p[4], p[5]),
                              Numbers::pack(p[6], p[7]));
    }
#pragma unroll
    for (int h = 0; h < 2; h++) total[h] = sums[2 * h] + sums[2 * h + 1], top[h] *= factor[h];
  }

  __device__ __forceinline__ void move_base(const float (&top)[2], float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float largest = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (largest > base[h] + 8.f) {
        // Above it by a rounding: scores of 10^8 do not make infinite weights.
        const float now = __fmaf_rn(fabsf(largest), 2.4e-7f, largest);
        shrink[h] = exp2_fast(base[h] - now);
        base[h] = now;
      }
    }
  }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
