// topk on the device. A block of threads finds the k best of up to 16384 scores, held in registers. Longer rows are cut
// into such chunks, whose best are candidates for the next level, until they fit one block: that one sorts them. The
// number of levels follows from shapes.
#include <algorithm>

#include "attention/cuda/attention.cuh"
#include "entry/cuda/topk_select.cuh"
#include "entry/hybrid.h"

namespace kvx {
namespace cuda {

namespace {

constexpr int kEach = 16;  // numbers of a thread
constexpr int kSmallThreads = 256, kLargeThreads = 1024;
constexpr int64_t kSmallChunk = kSmallThreads * kEach, kChunk = kLargeThreads * kEach;
constexpr int64_t kMostSorted = 8192;              // in shared memory: 64 KB
constexpr int64_t kSlabBytes = int64_t(64) << 20;  // of candidates: more rows than these take are done slab by slab
constexpr int64_t kHugeBlocks = 128;

struct TopkArgs {
  TopkParams p;
  int64_t first_row, count;  // numbers of a row at this level
  const uint64_t* from;      // candidates [rows, count]; unread at the first level
  uint64_t* to;              // candidates [rows, chunks, kept]; unread at the last level
  int32_t kept;              // of a chunk
  bool is_wide;              // rows of scores are aligned to 16 bytes
};

__device__ __forceinline__ const float* scores_of(const TopkParams& p, int64_t row) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.scores) + row * p.score_token);
}
__device__ __forceinline__ int64_t length_of(const TopkParams& p, int64_t row) {
  return p.lengths ? min(int64_t(max(__ldg(p.lengths + row), 0)), p.num_entries) : p.num_entries;
}
__device__ __forceinline__ uint32_t power_above(uint32_t count) {
  return count <= 64 ? 64 : 1u << (32 - __clz(int(count - 1)));
}

// Sorts what is in `sorted` and writes all of a row's indices. All threads come here, and have met.
template <int kThreads> __device__ __forceinline__ void finish_row(const TopkParams& p, int64_t row, uint64_t* sorted,
                                                                   uint32_t found) {
  const uint32_t count = power_above(found);
  for (uint32_t i = found + threadIdx.x; i < count; i += kThreads) sorted[i] = 0;
  __syncthreads();
  sort_candidates<kThreads>(sorted, count);
  int32_t* indices = reinterpret_cast<int32_t*>(reinterpret_cast<char*>(p.indices) + row * p.index_token);
  for (uint32_t i = threadIdx.x; i < uint32_t(p.k); i += kThreads) indices[i] = i < found ? index_of(sorted[i]) : -1;
}

template <int kThreads, bool kIsFirst, bool kIsLast>
__global__ void __launch_bounds__(kThreads) topk_chunk(const __grid_constant__ TopkArgs a) {
  __shared__ TopkShared<kThreads> s;
  extern __shared__ uint64_t sorted[];
  const uint32_t thread = threadIdx.x;
  const int64_t row = a.first_row + blockIdx.y, begin = int64_t(blockIdx.x) * kThreads * kEach;
  for (int i = thread; i < kDigitBins; i += kThreads) s.bins[i] = 0;
  if (thread == 0) s.num_found = 0;
  let_next_start();
  wait_for_previous();
  uint64_t x[kEach];
  if constexpr (kIsFirst) {
    const float* scores = scores_of(a.p, row);
    const int64_t end = length_of(a.p, row);
    if (a.is_wide) {
#pragma unroll
      for (int i = 0; i < kEach / 4; i++) {
        const int64_t at = begin + (i * kThreads + thread) * 4;
        float4 four = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (at + 4 <= end) {
          four = *reinterpret_cast<const float4*>(scores + at);
        } else {
          if (at < end) four.x = scores[at];
          if (at + 1 < end) four.y = scores[at + 1];
          if (at + 2 < end) four.z = scores[at + 2];
        }
        x[4 * i] = make_candidate(four.x, uint32_t(at)), x[4 * i + 1] = make_candidate(four.y, uint32_t(at) + 1);
        x[4 * i + 2] = make_candidate(four.z, uint32_t(at) + 2),
                  x[4 * i + 3] = make_candidate(four.w, uint32_t(at) + 3);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const int64_t at = begin + i * kThreads + thread;
        x[i] = at < end ? make_candidate(scores[at], uint32_t(at)) : 0;
      }
    }
  } else {
    const uint64_t* from = a.from + blockIdx.y * a.count;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int64_t at = begin + i * kThreads + thread;
      x[i] = at < a.count ? from[at] : 0;
    }
  }
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < kEach; i++) f(x[i]);
  };
  const uint64_t least = find_least<kThreads>(s, uint32_t(a.kept), each);
  uint64_t* to = kIsLast ? sorted : a.to + (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * a.kept;
  take_candidates<kThreads>(s, least, each, [&](uint32_t place, uint64_t candidate) { to[place] = candidate; });
  __syncthreads();
  const uint32_t found = s.num_found;
  if constexpr (kIsLast) finish_row<kThreads>(a.p, row, sorted, found);
  else
    for (uint32_t i = found + thread; i < uint32_t(a.kept); i += kThreads) to[i] = 0;
}

// More than kMostSorted of a long row: it is read again for each digit, and sorted in memory. Right, not quick.
__global__ void __launch_bounds__(kLargeThreads) topk_huge(const __grid_constant__ TopkArgs a) {
  __shared__ TopkShared<kLargeThreads> s;
  uint64_t* sorted = a.to + blockIdx.x * a.count;
  wait_for_previous();
  for (int64_t row = blockIdx.x; row < a.p.num_tokens; row += gridDim.x) {
    for (int i = threadIdx.x; i < kDigitBins; i += kLargeThreads) s.bins[i] = 0;
    if (threadIdx.x == 0) s.num_found = 0;
    __syncthreads();
    const float* scores = scores_of(a.p, row);
    const int64_t end = length_of(a.p, row);
    const auto each = [&](auto f) {
      for (int64_t base = 0; base < end; base += kLargeThreads) {
        const int64_t at = base + threadIdx.x;
        f(at < end ? make_candidate(scores[at], uint32_t(at)) : 0);
      }
    };
    const uint64_t least = find_least<kLargeThreads>(s, uint32_t(a.kept), each);
    take_candidates<kLargeThreads>(s, least, each,
                                   [&](uint32_t place, uint64_t candidate) { sorted[place] = candidate; });
    __syncthreads();
    finish_row<kLargeThreads>(a.p, row, sorted, s.num_found);
    __syncthreads();
  }
}

struct TopkShape {
  int64_t kept;      // the best of any part of a row that may matter
  int64_t count[2];  // candidates of a row after the first level and after the second; later ones reuse their places
  int64_t slab_rows;
  int64_t sorted;  // huge: places of a block
  bool is_huge;
  uint64_t bytes;
};

int64_t next_count(int64_t count, int64_t kept) { return count <= kChunk ? 0 : (count + kChunk - 1) / kChunk * kept; }

TopkShape shape_of(const TopkParams& p) {
  TopkShape s = {};
  s.kept = std::min(int64_t(p.k), p.num_entries), s.slab_rows = std::max(p.num_tokens, int64_t(1));
  s.is_huge = s.kept > kMostSorted;
  if (s.is_huge) {
    for (s.sorted = kMostSorted; s.sorted < s.kept;) s.sorted *= 2;
    s.bytes = uint64_t(std::min(p.num_tokens, kHugeBlocks) * s.sorted) * 8;
    return s;
  }
  s.count[0] = next_count(p.num_entries, s.kept), s.count[1] = next_count(s.count[0], s.kept);
  const int64_t row_bytes = (s.count[0] + s.count[1]) * 8;
  if (row_bytes) s.slab_rows = std::max(std::min(s.slab_rows, kSlabBytes / row_bytes), int64_t(1));
  s.bytes = uint64_t(s.slab_rows * row_bytes);
  s.slab_rows = std::min(s.slab_rows, int64_t(65535));  // of a grid
  return s;
}

template <int kThreads, bool kIsFirst, bool kIsLast> kvx_status_t start(const TopkArgs& a, int64_t rows, void* stream) {
  const int64_t chunk = int64_t(kThreads) * kEach, chunks = std::max((a.count + chunk - 1) / chunk, int64_t(1));
  int64_t bytes = 0;
  if (kIsLast)
    for (bytes = 64 * 8; bytes < a.kept * 8;) bytes *= 2;
  const auto kernel = topk_chunk<kThreads, kIsFirst, kIsLast>;
  if (bytes > 32 << 10) KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(kernel), int(kMostSorted * 8)));
  return launch_early_with("topk_chunk", kernel, dim3(unsigned(chunks), unsigned(rows)), dim3(kThreads), int(bytes),
                           stream, a);
}

kvx_status_t run_slab(const TopkParams& p, const TopkShape& s, int64_t first_row, int64_t rows, void* stream) {
  uint64_t* places[2] = {reinterpret_cast<uint64_t*>(p.workspace),
                         reinterpret_cast<uint64_t*>(p.workspace) + s.slab_rows * s.count[0]};
  TopkArgs a = {p,
                first_row,
                p.num_entries,
                nullptr,
                nullptr,
                int32_t(s.kept),
                (reinterpret_cast<uintptr_t>(p.scores) | uint64_t(p.score_token)) % 16 == 0};
  for (int level = 0;; level++) {
    const bool is_first = level == 0;
    if (a.count <= kSmallChunk)
      return is_first ? start<kSmallThreads, true, true>(a, rows, stream)
                      : start<kSmallThreads, false, true>(a, rows, stream);
    if (a.count <= kChunk)
      return is_first ? start<kLargeThreads, true, true>(a, rows, stream)
                      : start<kLargeThreads, false, true>(a, rows, stream);
    a.to = places[level % 2];
    KVX_TRY((is_first ? start<kLargeThreads, true, false>(a, rows, stream)
                      : start<kLargeThreads, false, false>(a, rows, stream)));
    a.from = a.to, a.count = next_count(a.count, s.kept);
  }
}

}  // namespace

uint64_t topk_workspace(const TopkParams& p) { return shape_of(p).bytes; }

kvx_status_t topk(const TopkParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0) return KVX_STATUS_OK;
  const TopkShape s = shape_of(p);
  if (s.is_huge) {
    const TopkArgs a = {p, 0, s.sorted, nullptr, reinterpret_cast<uint64_t*>(p.workspace), int32_t(s.kept), false};
    return launch_early("topk_huge", topk_huge, dim3(unsigned(std::min(p.num_tokens, kHugeBlocks))),
                        dim3(kLargeThreads), stream, a);
  }
  for (int64_t row = 0; row < p.num_tokens; row += s.slab_rows)
    KVX_TRY(run_slab(p, s, row, std::min(s.slab_rows, p.num_tokens - row), stream));
  return KVX_STATUS_OK;
}

}  // namespace cuda
}  // namespace kvx
