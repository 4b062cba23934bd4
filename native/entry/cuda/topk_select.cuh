// The k largest of many numbers, found by a block of threads: digit by digit from the top, counting those that may
// still be among them.
//
// A candidate is 64 bits: its score's, turned so that they order as unsigned numbers, then its index's complement.
// Larger is better, equal scores order by index, no two are alike, and 0 is no candidate.
#pragma once
#include "cuda/device.cuh"

namespace kvx {
namespace cuda {

constexpr int kDigitBins = 2048;

// -inf and NaN are no candidates; -0 is 0.
__device__ __forceinline__ uint64_t make_candidate(float score, uint32_t index) {
  if (!(score > -INFINITY)) return 0;
  const uint32_t bits = __float_as_uint(score + 0.f);
  return uint64_t(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | uint32_t(~index);
}
__device__ __forceinline__ int32_t index_of(uint64_t candidate) {
  return candidate ? int32_t(~uint32_t(candidate)) : -1;
}

template <int kThreads> struct TopkShared {
  uint32_t bins[kDigitBins];
  uint32_t warp_most[kThreads / 32], warp_least[kThreads / 32], warp_sums[kThreads / 32];
  uint32_t bin, above, in_bin, total;
  uint32_t num_found;
};

// The least candidate that is among the k largest. each(f) calls f(candidate) for all that this thread has; it is
// called some times. All threads come here, after s.bins were set to 0.
template <int kThreads, class Each> __device__ __forceinline__ uint64_t find_least(TopkShared<kThreads>& s, uint32_t k,
                                                                                   Each each) {
  constexpr int kBins = kDigitBins / kThreads, kWarps = kThreads / 32;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  // Each thread's best is no less than the least of these bests: where there are k threads, none below it is among the
  // k largest. What is left lies close together. Digits are those of the distance from there: they spread over the
  // bins, whatever the scores' exponents are.
  uint32_t best = 0;
  each([&](uint64_t x) { best = max(best, uint32_t(x >> 32)); });
  const uint32_t warp_most = __reduce_max_sync(0xffffffffu, best), warp_least = __reduce_min_sync(0xffffffffu, best);
  if (lane == 0) s.warp_most[warp] = warp_most, s.warp_least[warp] = warp_least;
  __syncthreads();
  const uint32_t most = __reduce_max_sync(0xffffffffu, s.warp_most[lane % kWarps]);
  const uint32_t floor = k <= kThreads ? __reduce_min_sync(0xffffffffu, s.warp_least[lane % kWarps]) : 0u;
  const uint64_t base = floor ? uint64_t(floor) << 32 : 1;
  uint64_t prefix = 0;
  int shift = 64 - __clz(int(most - floor));
#pragma unroll 1
  for (int pass = 0;; pass++) {
    const int bits = min(11, shift), below = shift - bits;
    const uint32_t mask = (1u << bits) - 1;
    uint64_t from = base;
    asm volatile("" : "+l"(from));  // distances are found anew: kept for all passes they would not fit into registers
    each([&](uint64_t x) {
      if (x >= from && (pass == 0 || (x - from) >> shift == prefix))
        atomicAdd(&s.bins[uint32_t((x - from) >> below) & mask], 1u);
    });
    __syncthreads();
    // Bins from the highest down, kBins a thread; each is set back to 0 for the next pass.
    uint32_t own[kBins], sum = 0;
#pragma unroll
    for (int i = 0; i < kBins; i++) {
      uint32_t* bin = &s.bins[kDigitBins - 1 - (thread * kBins + i)];
      own[i] = *bin, sum += own[i], *bin = 0;
    }
    uint32_t upto = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) s.warp_sums[warp] = upto;
    __syncthreads();
    uint32_t above = __reduce_add_sync(0xffffffffu, lane < warp ? s.warp_sums[lane] : 0u) + upto - sum;
    if (thread == kThreads - 1) s.total = above + sum;
    if (above < k && k <= above + sum) {
#pragma unroll
      for (int i = 0; i < kBins; i++) {
        if (above < k && k <= above + own[i])
          s.bin = kDigitBins - 1 - (thread * kBins + i), s.above = above, s.in_bin = own[i];
        above += own[i];
      }
    }
    __syncthreads();
    if (pass == 0 && s.total <= k) return base;
    k -= s.above;
    prefix = prefix << bits | s.bin;
    shift = below;
    if (s.in_bin == k || shift == 0) return base + (prefix << shift);
  }
}

// Calls put(place, candidate) for those that are not below `least`, places from 0 up in any order. All threads come
// here, after s.num_found was set to 0 and they met.
template <int kThreads, class Each, class Put> __device__ __forceinline__ void take_candidates(TopkShared<kThreads>& s,
                                                                                               uint64_t least,
                                                                                               Each each, Put put) {
  const int lane = threadIdx.x % 32;
  uint32_t count = 0;
  each([&](uint64_t x) { count += x >= least; });
  uint32_t upto = count, place = 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, upto, step);
    if (lane >= step) upto += other;
  }
  if (lane == 31 && upto) place = atomicAdd(&s.num_found, upto);
  place = __shfl_sync(0xffffffffu, place, 31) + upto - count;
  each([&](uint64_t x) {
    if (x >= least) put(place++, x);
  });
}

// Largest first; count is a power of two, 64 or more. Strides within 64 numbers stay in a warp, which then waits for
// none but itself.
template <int kThreads> __device__ __forceinline__ void sort_candidates(uint64_t* x, uint32_t count) {
  for (uint32_t size = 2; size <= count; size *= 2) {
    for (uint32_t stride = size / 2; stride > 0; stride /= 2) {
      for (uint32_t i = threadIdx.x; i < count / 2; i += kThreads) {
        const uint32_t lo = 2 * i - (i & (stride - 1)), hi = lo + stride;
        const uint64_t a = x[lo], b = x[hi];
        if ((a < b) == ((lo & size) == 0)) x[lo] = b, x[hi] = a;
      }
      if (stride > 32 || (stride == 1 && size >= 64)) __syncthreads();
      else __syncwarp();
    }
  }
}

}  // namespace cuda
}  // namespace kvx
