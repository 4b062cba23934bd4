// compress where a tail is a running softmax: many tokens are pooled into one, so warps share out tokens and add their
// pools up.
#pragma once
#include "entry/compress/entry.cuh"
#include "tiles/barrier.cuh"

namespace kvx {
namespace cuda {

// ---- blocks of a cluster, which share out the channels of a window. The first of them collects the means, and
// finishes the entry.

// To say that it has started, a block need not have its memory seen.
__device__ __forceinline__ void cluster_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// By every thread of every block: the first block's barrier is to see `bytes` of means. cluster_wait() comes before the
// first of them is sent.
__device__ __forceinline__ void expect_means(uint64_t* barrier, uint32_t rank, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t at = uint32_t(__cvta_generic_to_shared(barrier));
  if (rank == 0 && threadIdx.x == 0) tiles::init_barrier(at, 1), tiles::show_barriers();
  if (rank == 0) __syncthreads();
  if (rank == 0 && threadIdx.x == 0) tiles::arrive_and_expect(at, bytes);
  cluster_start();
#endif
}
// A mean into the first block's `place`. It arrives at the barrier by its bytes, so that
// nobody's memory has to be flushed.
__device__ __forceinline__ void send_mean(float* place, uint64_t* barrier, float mean) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 to, at;\n"
      "mapa.shared::cluster.u32 to, %0, 0;\n"
      "mapa.shared::cluster.u32 at, %1, 0;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %2, [at]; }\n" ::"r"(
          uint32_t(__cvta_generic_to_shared(place))),
      "r"(uint32_t(__cvta_generic_to_shared(barrier))), "r"(__float_as_uint(mean))
      : "memory");
#endif
}
// As long as means are under way to the first block, it is there.
__device__ __forceinline__ void wait_for_means(uint64_t* barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  tiles::wait(uint32_t(__cvta_generic_to_shared(barrier)), 0);
#endif
}

constexpr uint32_t kRowChannels = 512, kRowCluster = 4;  // of rows that finish in lanes: 128 channels a block

// Tokens of one thread that are on their way at once. The next ones are asked for before these are pooled.
template <int IO> constexpr int kRunBatch = IO == 0 || IO == KVX_DTYPE_F32 ? 4 : 8;

// A load under a predicate and not behind a branch: what follows is not computed ahead of it. Where it is not there, x
// is anything.
template <int IO> __device__ __forceinline__ void load_part_if(bool is_there, const RowsParams& r, const char* at,
                                                               Part<IO>& x) {
  if constexpr (IO == 0) {
    if (is_there) x = load_part<IO>(r, at);
  } else if constexpr (IO == KVX_DTYPE_F32) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %4, 0;\n@p ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%5];\n}"
                 : "=r"(x.v.x), "=r"(x.v.y), "=r"(x.v.z), "=r"(x.v.w)
                 : "r"(int(is_there)), "l"(at));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.cs.v2.b32 {%0, %1}, [%3];\n}"
                 : "=r"(x.v.x), "=r"(x.v.y)
                 : "r"(int(is_there)), "l"(at));
  }
}

template <int IO> __device__ __forceinline__ void load_batch(bool is_there, const CompressParams& p, int64_t token,
                                                             uint32_t channel, Tokens<IO, kRunBatch<IO>>& t) {
  const char *kv = part_at<IO>(p.kv, token, channel), *score = part_at<IO>(p.score, token, channel);
#pragma unroll
  for (int b = 0; b < kRunBatch<IO>; b++, kv += p.kv.token, score += p.score.token)
    load_part_if<IO>(is_there, p.score, score, t.score[b]), load_part_if<IO>(is_there, p.kv, kv, t.kv[b]);
}

// Place of a group's pool of channel W * quad + i in `parts`: both who writes, by quads, and who reads, by channels,
// meet every bank once.
template <int W> __device__ __forceinline__ uint32_t part_place(uint32_t wide, uint32_t group, uint32_t quad,
                                                                uint32_t i) {
  return (group * W + i) * wide + ((quad + 8 * i) & (wide - 1));
}

// Tokens from `token` on, `count` of them, the first at place `row` of its window: pools of the block's channels come
// out of `parts`. Batches are dealt to groups of warps.
template <int IO> __device__ __forceinline__ void pool_run(const PoolArgs& a, int64_t token, int32_t count, int32_t row,
                                                           uint32_t channel0, Pool* parts) {
  constexpr int W = kWide<IO>, B = kRunBatch<IO>;
  const CompressParams& p = a.p;
  const uint32_t shift = __ffs(a.wide_warps) - 1, warp = threadIdx.x / 32, group = warp >> shift,
                 groups = kRunWarps >> shift;
  const uint32_t quad = (warp & (a.wide_warps - 1)) * 32 + threadIdx.x % 32, channel = channel0 + quad * W;
  Pool m[W];
#pragma unroll
  for (int i = 0; i < W; i++) m[i] = empty_pool();
  if (channel < uint32_t(p.dim)) {
    const int32_t stride = int32_t(groups) * B;
    int32_t i = int32_t(group) * B;
    Tokens<IO, B> next{};
    load_batch<IO>(i + B <= count, p, token + i, channel, next);
#pragma unroll 1
    for (; i + B <= count; i += stride) {
      const Tokens<IO, B> now = next;
      float x[B][W] = {}, s[B][W];
      if (p.bias) {
        const float* bias = p.bias + int64_t(row + i) * p.dim + channel;
#pragma unroll
        for (int b = 0; b < B; b++, bias += p.dim) load_floats(bias, x[b]);
      }
      load_batch<IO>(i + stride + B <= count, p, token + i + stride, channel, next);
#pragma unroll
      for (int b = 0; b < B; b++) {
        widen<IO>(now.score[b], s[b]);
#pragma unroll
        for (int j = 0; j < W; j++) s[b][j] = p.bias ? __fadd_rn(s[b][j], x[b][j]) : s[b][j];
      }
      add_parts<IO>(m, now.kv, s);
    }
#pragma unroll 1
    for (; i < count; i += kBatch) {  // what is left of a batch
      const auto t = load_tokens<IO, kBatch>(p, token + i, 0, count - i, channel);
      add_slots(m, slots_of<IO>(p, t, 0, row + i, 0, count - i, channel));
    }
  }
  __syncthreads();  // what was in `parts` has been read
#pragma unroll
  for (int i = 0; i < W; i++) parts[part_place<W>(a.wide_warps * 32, group, quad, i)] = m[i];
  __syncthreads();
}

// Pools of one channel by all groups, added to m: the largest score first, so that weights do not wait for each other.
template <int W> __device__ __forceinline__ void add_groups(Pool& m, const Pool* parts, uint32_t wide, uint32_t local) {
  constexpr int kMost = kRunWarps;
  const int groups = kRunThreads >> (__ffs(wide) - 1);
  Pool part[kMost];
  float top = m.top;
#pragma unroll
  for (int g = 0; g < kMost; g++) {
    part[g] = empty_pool();
    if (g < groups) part[g] = parts[part_place<W>(wide, g, local / W, local % W)];
    top = fmaxf(top, part[g].top);
  }
  const float level = level_of(top), keep = weight_of(m.top, level);
  m = Pool{top, m.sum * keep, m.total * keep};
#pragma unroll
  for (int g = 0; g < kMost; g++) {
    const float w = weight_of(part[g].top, level);
    m.sum = fmaf(part[g].sum, w, m.sum), m.total = fmaf(part[g].total, w, m.total);
  }
}

// A stretch of a sequence's tokens.
struct Run {
  int64_t token;
  int32_t count, row;   // row: place of the first in its window
  bool is_there, adds;  // adds: to the tail
};

// Of a sequence, two at most: those that close a window which the tail began, then those that stay in the tail.
struct Edge {
  Run run[2];
  uint32_t number;  // of the entry that closes

  __device__ __forceinline__ Edge(const PoolArgs& a, const StepToken& t) {
    const int32_t ratio = a.p.ratio;
    number = a.ratio.divide(uint32_t(t.start));
    const int32_t open = t.start - int32_t(number) * ratio, n = t.end - t.begin,
                  closed = int32_t(a.ratio.divide(uint32_t(open + n)));
    const int32_t left = closed ? open + n - closed * ratio : n;
    run[0] = Run{t.begin, ratio - open, open, closed && open, true};
    run[1] = Run{t.end - left, left, closed ? 0 : open, true, closed == 0 && open};
  }
};

// The window that closes among tokens [first, first + ratio), if all of it was given in this step.
__device__ __forceinline__ Run closing_run(const PoolArgs& a, const StepToken& t, int64_t first, uint32_t* number) {
  if (!is_sound(t)) return Run{};
  const uint32_t at = uint32_t(t.position(int32_t(first)));
  *number = a.ratio.divide(at);
  const int64_t token = first - (at - *number * a.ratio.d);
  return Run{token, a.p.ratio, 0, token + a.p.ratio <= t.end && token >= t.begin, false};
}

template <int IO, Finish How>
__global__ void __launch_bounds__(kRunThreads, 2) pool_running(const __grid_constant__ PoolArgs a) {
  constexpr int W = kWide<IO>;
  extern __shared__ __align__(16) float row[];
  __shared__ Pool parts[kRunThreads * W];
  __shared__ __align__(8) uint64_t barrier;
  const CompressParams& p = a.p;
  const uint32_t index = blockIdx.x >> (__ffs(a.cluster) - 1), rank = blockIdx.x & (a.cluster - 1),
                 wide = a.wide_warps * 32, dim = uint32_t(p.dim);
  wait_for_previous();
  let_next_start();

  Run run[2] = {};
  StepToken t;
  uint32_t number = 0;
  if (index < uint32_t(p.step.num_seqs)) {
    t = open_sequence(p.step, int32_t(index));
    count_bad(a, t.is_bad || (t.seq >= 0 && !is_sound(t)), rank == 0 && threadIdx.x == 0);
    if (!is_sound(t) || t.end == t.begin) return;
    const Edge edge(a, t);
    run[0] = edge.run[0], run[1] = edge.run[1], number = edge.number;
  } else {
    const int64_t first = int64_t(index - uint32_t(p.step.num_seqs)) * p.ratio;
    t = find_token(p.step, int32_t(first));
    run[0] = closing_run(a, t, first, &number);
    if (!run[0].is_there) return;
  }
  const bool closes = run[0].is_there;
  EntryRead entry{-1, 0};
  if (closes && rank == 0) {
    entry = read_entry(a, t.slot, number);
    if (threadIdx.x < 32) fetch_finish(a, number);
  }
  const bool collects = closes && a.cluster > 1;
  if (collects) expect_means(&barrier, rank, int(4 * dim));
  float* state = p.state + t.slot * (p.state_slot / 4);
  bool is_waited = !collects;
  for (uint32_t channel0 = rank * wide * W; channel0 < dim; channel0 += a.cluster * wide * W) {
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const Run r = i ? run[1] : run[0];
      if (!r.is_there) continue;
      if constexpr (How != FINISH_ANY) {
        for (uint32_t c = channel0 + threadIdx.x; r.adds && c < min(dim, channel0 + wide * W); c += kRunThreads)
          fetch_line(state + c), fetch_line(state + dim + c), fetch_line(state + 2 * dim + c);
      }
      pool_run<IO>(a, r.token, r.count, r.row, channel0, parts);
      if (!is_waited) cluster_wait(), is_waited = true;
      for (uint32_t local = threadIdx.x; local < wide * W && channel0 + local < dim; local += kRunThreads) {
        const uint32_t c = channel0 + local;
        Pool m = empty_pool();
        if (r.adds) m = Pool{state[c], state[dim + c], state[dim + c] * state[2 * dim + c]};
        add_groups<W>(m, parts, wide, local);
        const float mean = r.count ? mean_of(m) : 0.0f;
        if (i) state[c] = m.top, state[dim + c] = m.sum, state[2 * dim + c] = mean;
        else if (collects) send_mean(row + c, &barrier, mean);
        else row[c] = mean;
      }
    }
  }
  if (!is_waited) cluster_wait();
  if (!closes) return;
  if (!collects) __syncthreads();
  if (rank != 0 || threadIdx.x >= 32) return;
  if (collects) wait_for_means(&barrier);
  const RowAt to = settle_entry(a, entry, number, threadIdx.x == 0);
  if (__any_sync(0xffffffffu, to.data != nullptr)) finish_entry<How>(a, to, number, row);
}

// ---- many whole windows: two of a block, which read the same bias

template <int IO> constexpr int kPairBatch = 4;  // tokens of each window that are on their way at once

// Tokens of both windows, token[w] on; -1: there is none. Pools of the block's 128 channels come out of `parts`, the
// second window's after the first's. Batches are dealt to warps.
template <int IO> __device__ __forceinline__ void pool_pair(const PoolArgs& a, const int32_t (&token)[2],
                                                            uint32_t channel0, Pool* parts) {
  constexpr int W = kWide<IO>, B = kPairBatch<IO>;
  const CompressParams& p = a.p;
  const uint32_t group = threadIdx.x / 32, quad = threadIdx.x % 32, channel = channel0 + quad * W;
  Pool m[2][W];
#pragma unroll
  for (int w = 0; w < 2; w++) {
#pragma unroll
    for (int i = 0; i < W; i++) m[w][i] = empty_pool();
  }
#pragma unroll 1
  for (int32_t i = int32_t(group) * B; i < p.ratio; i += kRunWarps * B) {
    Tokens<IO, B> t[2];
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const char *kv = part_at<IO>(p.kv, max(0, token[w]) + i, channel),
                 *score = part_at<IO>(p.score, max(0, token[w]) + i, channel);
#pragma unroll
      for (int b = 0; b < B; b++, kv += p.kv.token, score += p.score.token)
        t[w].score[b] = load_part<IO>(p.score, score), t[w].kv[b] = load_part<IO>(p.kv, kv);
    }
    float x[B][W] = {};
    if (p.bias) {
      const float* bias = p.bias + int64_t(i) * kRowChannels + channel;
#pragma unroll
      for (int b = 0; b < B; b++) load_floats(bias + b * int(kRowChannels), x[b]);
    }
#pragma unroll
    for (int w = 0; w < 2; w++) {
      float s[B][W];
#pragma unroll
      for (int b = 0; b < B; b++) {
        widen<IO>(t[w].score[b], s[b]);
#pragma unroll
        for (int j = 0; j < W; j++) s[b][j] = p.bias ? __fadd_rn(s[b][j], x[b][j]) : s[b][j];
      }
      add_parts<IO>(m[w], t[w].kv, s);
    }
  }
#pragma unroll
  for (int w = 0; w < 2; w++) {
#pragma unroll
    for (int i = 0; i < W; i++) parts[w * kRunThreads * W + part_place<W>(32, group, quad, i)] = m[w][i];
  }
  __syncthreads();
}

// The same of one stretch, of any length.
template <int IO> __device__ __forceinline__ void pool_few(const PoolArgs& a, const Run& r, uint32_t channel0,
                                                           Pool* parts) {
  constexpr int W = kWide<IO>;
  const uint32_t group = threadIdx.x / 32, quad = threadIdx.x % 32, channel = channel0 + quad * W;
  Pool m[W];
#pragma unroll
  for (int i = 0; i < W; i++) m[i] = empty_pool();
#pragma unroll 1
  for (int32_t i = int32_t(group) * kBatch; i < r.count; i += kRunWarps * kBatch) {
    const auto t = load_tokens<IO, kBatch>(a.p, r.token + i, 0, r.count - i, channel);
    add_slots(m, slots_of<IO>(a.p, t, 0, r.row + i, 0, r.count - i, channel));
  }
  __syncthreads();  // what was in `parts` has been read
#pragma unroll
  for (int i = 0; i < W; i++) parts[part_place<W>(32, group, quad, i)] = m[i];
  __syncthreads();
}

// Whole windows by pairs, and after them the sequences' edges: those have less to do. Two blocks fit a multiprocessor,
// so that one pools while another finishes. Where only one does, clusters have to wait for each other even if there are
// no more blocks than multiprocessors, because the four of a cluster stand side by side.
template <int IO> __global__ void __launch_bounds__(kRunThreads, 2) pool_windows(const __grid_constant__ PoolArgs a) {
  constexpr int W = kWide<IO>;
  constexpr uint32_t kSlice = kRowChannels / kRowCluster;
  extern __shared__ __align__(16) float rows[];
  Pool* const parts = reinterpret_cast<Pool*>(rows + 2 * a.row_floats);
  __shared__ __align__(8) uint64_t barrier;
  const CompressParams& p = a.p;
  const uint32_t index = blockIdx.x / kRowCluster, rank = blockIdx.x % kRowCluster, channel0 = rank * kSlice,
                 warp = threadIdx.x / 32;
  wait_for_previous();
  let_next_start();

  uint32_t number = 0;  // of the entry that this warp finishes
  EntryRead entry{-1, 0};
  bool finishes = false;
  if (index < a.windows) {
    const int32_t first = int32_t(index) * 2 * p.ratio;
    int32_t token[2] = {-1, -1};
    StepToken t{-1, -1, 0, 0, 0, false};
#pragma unroll
    for (int w = 0; w < 2; w++) {
      const int32_t unit = first + w * p.ratio;
      if (unit >= p.step.num_tokens) continue;
      if (t.seq < 0 || unit >= t.end) t = find_token(p.step, unit);
      uint32_t closing = 0;
      const Run r = closing_run(a, t, unit, &closing);
      if (!r.is_there) continue;
      token[w] = int32_t(r.token);
      if (rank == 0 && warp == uint32_t(w))
        number = closing, finishes = true, entry = read_entry(a, t.slot, closing), fetch_finish(a, closing);
    }
    const int sent = int(token[0] >= 0) + int(token[1] >= 0);
    if (sent == 0) return;
    expect_means(&barrier, rank, sent * int(4 * kRowChannels));
    pool_pair<IO>(a, token, channel0, parts);
    cluster_wait();
    const uint32_t w = threadIdx.x / kSlice, local = threadIdx.x % kSlice;
    if (w < 2 && (w ? token[1] : token[0]) >= 0) {
      Pool m = empty_pool();
      add_groups<W>(m, parts + w * kRunThreads * W, 32, local);
      send_mean(rows + w * uint32_t(a.row_floats) + channel0 + local, &barrier, mean_of(m));
    }
  } else {
    const StepToken t = open_sequence(p.step, int32_t(index - a.windows));
    count_bad(a, t.is_bad || (t.seq >= 0 && !is_sound(t)), rank == 0 && threadIdx.x == 0);
    if (!is_sound(t) || t.end == t.begin) return;
    const Edge edge(a, t);
    const bool closes = edge.run[0].is_there;
    if (closes && rank == 0 && warp == 0)
      number = edge.number, finishes = true, entry = read_entry(a, t.slot, number), fetch_finish(a, number);
    if (closes) expect_means(&barrier, rank, int(4 * kRowChannels)), cluster_wait();
    float* const state = p.state + t.slot * (p.state_slot / 4) + channel0 + threadIdx.x;
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const Run r = i ? edge.run[1] : edge.run[0];
      if (!r.is_there) continue;
      pool_few<IO>(a, r, channel0, parts);
      if (threadIdx.x >= kSlice) continue;
      Pool m = empty_pool();
      if (r.adds) m = Pool{state[0], state[kRowChannels], state[kRowChannels] * state[2 * kRowChannels]};
      add_groups<W>(m, parts, 32, threadIdx.x);
      const float mean = r.count ? mean_of(m) : 0.0f;
      if (i) state[0] = m.top, state[kRowChannels] = m.sum, state[2 * kRowChannels] = mean;
      else send_mean(rows + channel0 + threadIdx.x, &barrier, mean);
    }
    if (!closes) return;
  }
  if (rank != 0 || warp >= 2) return;
  wait_for_means(&barrier);
  if (!finishes) return;
  const RowAt to = settle_entry(a, entry, number, threadIdx.x % 32 == 0);
  if (__any_sync(0xffffffffu, to.data != nullptr))
    finish_entry<FINISH_LANES>(a, to, number, rows + warp * uint32_t(a.row_floats));
}

}  // namespace cuda
}  // namespace kvx
