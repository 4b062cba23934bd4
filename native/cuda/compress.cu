// compress on the device, one launch a call, and the same grid for the same shapes. A block of threads (or a cluster of them) has one of
// two tasks, and a window that closes is in one of them alone:
//
//   inside   units of tokens [u * ratio, (u + 1) * ratio), one or a few: of each the window that closes among them, if all it pools was
//            given in this step
//   edge     a sequence: windows that need the tail of the step before, and then the tail for the step after. What reads a tail
//            writes it, each thread its own channels, so that no other block is waited for.
//
// A thread pools four channels; one warp then norms, rotates and codes the entry. Entries of 128 channels take a warp alone.
#include <cooperative_groups.h>

#include "columns.cuh"
#include "hybrid_index.cuh"
#include "hybrid_tail.cuh"

namespace kvx {
namespace cuda {

namespace {

constexpr int kTokenThreads = 128, kTokenWarps = kTokenThreads / 32, kRunThreads = 256, kRunWarps = kRunThreads / 32;

struct PoolArgs {
  CompressParams p;
  FastDivider ratio, rows;  // tokens of a window; entries of a page
  AnyRow any;
  LaneFormat format;
  int32_t least_code;
  int32_t row_floats;       // of an entry in shared memory
  uint32_t edge_blocks;     // tokens: blocks that have edges, before those inside
  uint32_t windows;         // tokens: units of a block inside
  uint32_t wide_warps;      // running: warps side by side along channels, a power of two; the others share out tokens
  uint32_t cluster;         // running: blocks that share the channels of a window, a power of two
};

// The value that every lane of a warp has, where the compiler cannot know that it is one.
__device__ __forceinline__ uint32_t all_lanes(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// ---- entries

__device__ __forceinline__ bool is_sound(const StepToken& t) { return t.seq >= 0 && t.start <= kMaxCount - (t.end - t.begin); }

// A sequence that is not as it should be counts once.
__device__ __forceinline__ void count_bad(const PoolArgs& a, bool is_bad, bool counts) {
  if (is_bad && counts && a.p.errors) atomicAdd(a.p.errors, 1ull);
}

// What is read to find entry `number`. Nothing waits for it until settle_entry.
struct EntryRead {
  int32_t id, shared;
};

__device__ __forceinline__ EntryRead read_entry(const PoolArgs& a, int32_t slot, uint32_t number) {
  const CompressParams& p = a.p;
  const uint32_t page = a.rows.divide(number);
  EntryRead r{-1, 0};
  if (page < uint32_t(p.table.columns)) r.id = __ldg(reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.table.pages) + slot * p.table.row) + page);
  if (p.num_shared) r.shared = __ldg(p.num_shared + slot);
  return r;
}

// Where entry `number` goes; data NULL: it is there already, has no page, or is outside, which the one thread that `counts` adds up.
__device__ __forceinline__ RowAt settle_entry(const PoolArgs& a, const EntryRead& r, uint32_t number, bool counts) {
  const CompressParams& p = a.p;
  const uint32_t at = number * a.ratio.d, page = a.rows.divide(number);
  // Whole windows: at is a multiple of the ratio, and so is less than the shared tokens' windows where it is a window less than them.
  if (p.num_shared && int64_t(at) + p.ratio <= r.shared) return RowAt{nullptr, nullptr};
  const bool is_bad = (p.finish.cos && at >= p.finish.num_positions) || page >= uint32_t(p.table.columns) || r.id >= p.entries.num_pages;
  count_bad(a, is_bad, counts);
  return is_bad || r.id < 0 ? RowAt{nullptr, nullptr} : row_at(p.entries, r.id, int32_t(number - page * a.rows.d));
}

__device__ __forceinline__ RowAt find_entry(const PoolArgs& a, int32_t slot, uint32_t number, bool counts) { return settle_entry(a, read_entry(a, slot, number), number, counts); }

// Which finish a kernel has: code that it does not need is far to jump over.
enum Finish { FINISH_ANY, FINISH_LANES, FINISH_INDEX };

// By one warp, of a pooled row in shared memory.
template <Finish How> __device__ __forceinline__ void finish_entry(const PoolArgs& a, const RowAt& to, uint32_t number, float* row) {
  const CompressParams& p = a.p;
  const int32_t at = int32_t(number * a.ratio.d);
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (How == FINISH_INDEX) {
    const float4 v = *reinterpret_cast<const float4*>(row + kIndexLane * lane);
    float x[kIndexLane] = {v.x, v.y, v.z, v.w};
    finish_index(p.finish, a.any.hadamard, lane, at, x);
    store_index(p.entries, to, lane, x);
  } else if (How == FINISH_ANY && a.format == LANES_NONE) {
    finish_any(p.finish, a.any, p.dim, at, row, row + (p.dim + 3) / 4 * 4);
    store_any(p.entries, to, row);
  } else {
    const Turn turn = load_turn(p.finish, lane, at);
    float x[kChunk], w[kChunk] = {};
    if (p.finish.weight) load_weight(p.finish, lane, w);
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(row + i / kPiece * 256 + kPiece * lane + i % kPiece);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
    finish_lanes(p.finish, lane, w, turn, x);
    if (a.format == LANES_V4_BF16) store_lanes<LANES_V4_BF16>(to, lane, a.least_code, x);
    else if (a.format == LANES_V4) store_lanes<LANES_V4>(to, lane, a.least_code, x);
    else if (a.format == LANES_BF16) store_lanes<LANES_BF16>(to, lane, a.least_code, x);
    else store_lanes<LANES_F32>(to, lane, a.least_code, x);
  }
}

// What finish_entry will read comes nearer, by one warp, while tokens are pooled.
__device__ __forceinline__ void fetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ void fetch_finish(const PoolArgs& a, uint32_t number) {
  const FinishParams& f = a.p.finish;
  const uint32_t lane = threadIdx.x % 32, at = number * a.ratio.d;
  if (f.weight && lane * 128 < uint32_t(a.p.dim) * (f.weight_dtype == KVX_DTYPE_F32 ? 4 : 2)) fetch_line(f.weight + lane * 128);
  if (f.cos && lane < 2 && at < f.num_positions) fetch_line(reinterpret_cast<const char*>(lane ? f.sin : f.cos) + int64_t(at) * f.table_row);
}

// ---- tails of tokens: overlap and ring

// IsFour: overlap of windows of four. An entry of an indexer takes a warp, and others a block.
template <int IO, bool IsFour, Finish How>
__global__ void __launch_bounds__(kTokenThreads, IO == KVX_DTYPE_F32 ? 4 : 5) pool_tokens(const __grid_constant__ PoolArgs a) {
  constexpr int W = kWide<IO>;
  constexpr bool IsWarp = How == FINISH_INDEX;
  constexpr bool IsLate = IsFour && IO == KVX_DTYPE_F32;  // an entry's page is settled after pooling: others have no registers for it
  extern __shared__ __align__(16) float rows[];
  __shared__ int64_t begins[kTokenWarps];  // of windows inside; kNowhere: nothing to pool
  constexpr int64_t kNowhere = -1;
  const CompressParams& p = a.p;
  const int32_t ratio = IsFour ? 4 : p.ratio;
  const uint32_t dim = uint32_t(p.dim), own = uint32_t(p.parts - 1) * dim;  // the projection for a token's own entry
  const uint32_t warp = threadIdx.x / 32, me = IsWarp ? threadIdx.x % 32 : threadIdx.x, team = IsWarp ? 32 : blockDim.x;
  const bool is_edge = blockIdx.x < a.edge_blocks, is_overlap = p.parts == 2;
  const auto meet = [] {
    if constexpr (IsWarp) __syncwarp();
    else __syncthreads();
  };
  wait_for_previous();
  let_next_start();

  StepToken t;
  int32_t open = 0, closed = 0, pooled = 1;
  uint32_t number = 0;
  int64_t begin = kNowhere;  // token at place 0 of the window of the first entry
  RowAt to{nullptr, nullptr};
  float* row = rows;         // what the warp finishes
  if (is_edge) {
    const int32_t seq = int32_t(IsWarp ? blockIdx.x * kTokenWarps + warp : blockIdx.x);
    if (IsWarp && seq >= p.step.num_seqs) return;
    if (IsWarp) row += warp * uint32_t(a.row_floats);
    t = open_sequence(p.step, seq);
    count_bad(a, t.is_bad || (t.seq >= 0 && !is_sound(t)), me == 0);
    // The compiler is told that lanes agree, here and below: exchanges between them are then plain.
    if (!__any_sync(0xffffffffu, is_sound(t) && t.end != t.begin)) return;
    number = a.ratio.divide(uint32_t(t.start)), open = t.start - int32_t(number) * ratio, begin = int64_t(t.begin) - open;
    closed = int32_t(a.ratio.divide(uint32_t(open + t.end - t.begin)));
    // Entries that need the old tail: the first, and in overlap the one whose window before began there.
    pooled = int32_t(all_lanes(uint32_t(min(closed, int(is_overlap) + int(open > 0)))));
  } else {
    row += warp * uint32_t(a.row_floats);
    const int64_t first = (int64_t(blockIdx.x - a.edge_blocks) * a.windows + warp) * ratio;
    t = find_token(p.step, int32_t(min(first, p.step.num_tokens - 1)));  // each warp looks for a window
    if (warp < a.windows && first < p.step.num_tokens && is_sound(t)) {
      const uint32_t at = uint32_t(t.position(int32_t(first)));
      number = a.ratio.divide(at), begin = first - (at - number * a.ratio.d);
      if (begin + ratio <= t.end && begin - (p.parts - 1) * ratio >= t.begin) to = find_entry(a, t.slot, number, me % 32 == 0);
    }
    if (!to.data) begin = kNowhere;
    if constexpr (!IsWarp) {
      if (me % 32 == 0) begins[warp] = begin;
      __syncthreads();
    }
  }
  float* const state = is_edge ? p.state + t.slot * (p.state_slot / 4) : nullptr;
  const int64_t size = int64_t(ratio) * 2 * dim;
  if constexpr (IsLate) {
    // Its first token is pooled after the tail, and often it is the only one: it comes nearer meanwhile.
    for (uint32_t c = me * W; is_edge && pooled && c < 2 * dim; c += team * W) {
      fetch_line(part_at<IO>(p.kv, t.begin, c)), fetch_line(part_at<IO>(p.score, t.begin, c));
      if (p.bias) fetch_line(p.bias + uint32_t(open) * 2 * dim + c);
    }
  }
#pragma unroll 1
  for (int32_t e = 0; e < pooled; e++) {
    if (is_edge) {
      EntryRead entry{-1, 0};
      if constexpr (IsLate) {
        entry = read_entry(a, t.slot, number + e);
        if (me < 32) fetch_finish(a, number + e);
      } else {
        to = find_entry(a, t.slot, number + e, me == 0);
      }
      const bool has_before = e > 0;  // tokens of the window before are in this step, but for those in the tail
      const RowRun before = has_before ? RowRun{state + size, open} : RowRun{state, is_overlap ? ratio : 0};
      const RowRun current = RowRun{state + own / dim * 2 * size, e ? 0 : open};
      const TokenRun ovl{begin + (e - 1) * ratio, open, has_before && is_overlap ? ratio : 0, 0};
      const TokenRun cur{begin + e * ratio, e ? 0 : open, ratio, own};
      // Whether there is a page or not: loads of the tail need not wait for that of the table.
      for (uint32_t c = me * W; c < dim; c += team * W) pool_slots<IO, IsFour>(p, before, current, ovl, cur, c, row + c);
      if constexpr (IsLate) to = settle_entry(a, entry, number + e, me == 0);
    } else {
#pragma unroll 1
      for (uint32_t i = 0; i < (IsWarp ? 1 : a.windows); i++) {
        const int64_t at = IsWarp ? begin : begins[i];
        if (at == kNowhere) continue;
        float* const mean = IsWarp ? row : rows + i * uint32_t(a.row_floats);
        for (uint32_t c = me * W; c < dim; c += team * W) {
          if constexpr (IsFour) pool_eight<IO>(p, at, c, mean + c);
          else pool_slots<IO, false>(p, RowRun{nullptr, 0}, RowRun{nullptr, 0}, TokenRun{at - ratio, 0, is_overlap ? ratio : 0, 0}, TokenRun{at, 0, ratio, own}, c, mean + c);
        }
      }
    }
    meet();
    if (__any_sync(0xffffffffu, to.data && (!is_edge || me < 32))) finish_entry<How>(a, to, number + e, row);
    if (e + 1 < pooled) meet();
  }
  if (!is_edge) return;
  const int32_t left = open + t.end - t.begin - closed * ratio;
  for (uint32_t c = me * W; c < dim; c += team * W) keep_tail<IO, IsFour>(p, state, t.begin, open, closed, left, c);
}

// ---- running tails

// Blocks of a cluster, which are one block where there are no clusters. To say that it has started, a block need not have its memory seen.
__device__ __forceinline__ void cluster_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ float* in_first_block(float* row) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return cooperative_groups::this_cluster().map_shared_rank(row, 0);
#else
  return row;
#endif
}

// Tokens of one thread that are on their way at once. The next ones are asked for before these are pooled.
template <int IO> constexpr int kRunBatch = IO == 0 || IO == KVX_DTYPE_F32 ? 4 : 8;

// A load under a predicate and not behind a branch: what follows is not computed ahead of it. Where it is not there, x is anything.
template <int IO> __device__ __forceinline__ void load_part_if(bool is_there, const RowsParams& r, const char* at, Part<IO>& x) {
  if constexpr (IO == 0) {
    if (is_there) x = load_part<IO>(r, at);
  } else if constexpr (IO == KVX_DTYPE_F32) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %4, 0;\n@p ld.global.cs.v4.b32 {%0, %1, %2, %3}, [%5];\n}" : "=r"(x.v.x), "=r"(x.v.y), "=r"(x.v.z), "=r"(x.v.w) : "r"(int(is_there)), "l"(at));
  } else {
    asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\n@p ld.global.cs.v2.b32 {%0, %1}, [%3];\n}" : "=r"(x.v.x), "=r"(x.v.y) : "r"(int(is_there)), "l"(at));
  }
}

template <int IO> __device__ __forceinline__ void load_batch(bool is_there, const CompressParams& p, int64_t token, uint32_t channel, Tokens<IO, kRunBatch<IO>>& t) {
  const char *kv = part_at<IO>(p.kv, token, channel), *score = part_at<IO>(p.score, token, channel);
#pragma unroll
  for (int b = 0; b < kRunBatch<IO>; b++, kv += p.kv.token, score += p.score.token) load_part_if<IO>(is_there, p.score, score, t.score[b]), load_part_if<IO>(is_there, p.kv, kv, t.kv[b]);
}

// Place of a group's pool of channel W * quad + i in `parts`: both who writes, by quads, and who reads, by channels, meet every bank once.
template <int W> __device__ __forceinline__ uint32_t part_place(uint32_t wide, uint32_t group, uint32_t quad, uint32_t i) { return (group * W + i) * wide + ((quad + 8 * i) & (wide - 1)); }

// Tokens from `token` on, `count` of them, the first at place `row` of its window: pools of the block's channels come out of `parts`.
// Batches are dealt to groups of warps.
template <int IO> __device__ __forceinline__ void pool_run(const PoolArgs& a, int64_t token, int32_t count, int32_t row, uint32_t channel0, Pool* parts) {
  constexpr int W = kWide<IO>, B = kRunBatch<IO>, kTurns = IO == KVX_DTYPE_F32 ? 2 : 1;
  const CompressParams& p = a.p;
  const uint32_t shift = __ffs(a.wide_warps) - 1, warp = threadIdx.x / 32, group = warp >> shift, groups = kRunWarps >> shift;
  const uint32_t quad = (warp & (a.wide_warps - 1)) * 32 + threadIdx.x % 32, channel = channel0 + quad * W;
  Pool m[W];
#pragma unroll
  for (int i = 0; i < W; i++) m[i] = empty_pool();
  if (channel < uint32_t(p.dim)) {
    const int32_t stride = int32_t(groups) * B;
    int32_t i = int32_t(group) * B;
    Tokens<IO, B> next{};
    load_batch<IO>(i + B <= count, p, token + i, channel, next);
#pragma unroll kTurns
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
  const int groups = kRunThreads >> (__ffs(wide) - 1);
  Pool part[kRunWarps];
  float top = m.top;
#pragma unroll
  for (int g = 0; g < kRunWarps; g++) {
    part[g] = empty_pool();
    if (g < groups) part[g] = parts[part_place<W>(wide, g, local / W, local % W)];
    top = fmaxf(top, part[g].top);
  }
  const float level = level_of(top), keep = weight_of(m.top, level);
  m = Pool{top, m.sum * keep, m.total * keep};
#pragma unroll
  for (int g = 0; g < kRunWarps; g++) {
    const float w = weight_of(part[g].top, level);
    m.sum = fmaf(part[g].sum, w, m.sum), m.total = fmaf(part[g].total, w, m.total);
  }
}

template <int IO, Finish How>
__global__ void __launch_bounds__(kRunThreads, 2) pool_running(const __grid_constant__ PoolArgs a) {
  constexpr int W = kWide<IO>;
  extern __shared__ __align__(16) float row[];
  __shared__ Pool parts[kRunThreads * W];
  const CompressParams& p = a.p;
  const uint32_t index = blockIdx.x >> (__ffs(a.cluster) - 1), rank = blockIdx.x & (a.cluster - 1), wide = a.wide_warps * 32, dim = uint32_t(p.dim);
  const int32_t ratio = p.ratio;
  wait_for_previous();
  let_next_start();

  // Two stretches of tokens at most: those that close a window, then those that stay in the tail.
  struct Run {
    int64_t token;
    int32_t count, row;  // row: place of the first in its window
    bool is_there, adds; // adds: to the tail
  } run[2] = {};
  StepToken t;
  uint32_t number;
  if (index < uint32_t(p.step.num_seqs)) {
    t = open_sequence(p.step, int32_t(index));
    count_bad(a, t.is_bad || (t.seq >= 0 && !is_sound(t)), rank == 0 && threadIdx.x == 0);
    if (!is_sound(t) || t.end == t.begin) return;
    number = a.ratio.divide(uint32_t(t.start));
    const int32_t open = t.start - int32_t(number) * ratio, n = t.end - t.begin, closed = int32_t(a.ratio.divide(uint32_t(open + n)));
    const int32_t left = closed ? open + n - closed * ratio : n;
    run[0] = Run{t.begin, ratio - open, open, closed && open, true};
    run[1] = Run{t.end - left, left, closed ? 0 : open, true, closed == 0 && open};
  } else {
    const int32_t first = int32_t(index - uint32_t(p.step.num_seqs)) * ratio;
    t = find_token(p.step, first);
    if (!is_sound(t)) return;
    const uint32_t at = uint32_t(t.position(first));
    number = a.ratio.divide(at);
    run[0] = Run{int64_t(first) - (at - number * a.ratio.d), ratio, 0, true, false};
    if (run[0].token + ratio > t.end || run[0].token < t.begin) return;
  }
  const bool closes = run[0].is_there;
  RowAt to{nullptr, nullptr};
  EntryRead entry{-1, 0};
  if (closes && rank == 0) {
    entry = read_entry(a, t.slot, number);
    if (threadIdx.x < 32) fetch_finish(a, number);
  }
  if (closes && a.cluster > 1) cluster_start();  // the first block has started when all have come here
  float* target = a.cluster > 1 ? in_first_block(row) : row;
  float* state = p.state + t.slot * (p.state_slot / 4);
  bool is_waited = !closes || a.cluster == 1;
  for (uint32_t channel0 = rank * wide * W; channel0 < dim; channel0 += a.cluster * wide * W) {
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      const Run r = i ? run[1] : run[0];
      if (!r.is_there) continue;
      if constexpr (How != FINISH_ANY) {
        for (uint32_t c = channel0 + threadIdx.x; r.adds && c < min(dim, channel0 + wide * W); c += kRunThreads) fetch_line(state + c), fetch_line(state + dim + c), fetch_line(state + 2 * dim + c);
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
        else target[c] = mean;
      }
    }
  }
  if (!closes) return;
  if (rank == 0) to = settle_entry(a, entry, number, threadIdx.x == 0);
  if (a.cluster > 1) {
    if (!is_waited) cluster_wait();
    cluster_arrive(), cluster_wait();
  } else {
    __syncthreads();
  }
  if (__any_sync(0xffffffffu, rank == 0 && threadIdx.x < 32 && to.data)) finish_entry<How>(a, to, number, row);
}

// ---- which kernel, and how it is laid out

template <int IO> kvx_status_t run_tokens(PoolArgs a, int num_sms, void* stream) {
  const CompressParams& p = a.p;
  const bool is_four = IO != 0 && p.has_overlap && p.ratio == 4 && a.format != LANES_NONE, is_warp = is_four && a.format == LANES_INDEX;
  if (!is_four && a.format == LANES_INDEX) a.format = LANES_NONE;
  const int64_t units = divide_up(p.step.num_tokens, p.ratio), row_bytes = 4 * int64_t(a.row_floats);
  // A block has a few units where there are enough for every multiprocessor: then all its warps finish entries.
  while (is_four && !is_warp && a.windows < uint32_t(kTokenWarps) && 2 * a.windows * row_bytes <= kPlainShared && units > int64_t(num_sms) * 2 * a.windows) a.windows *= 2;
  if (is_warp) a.windows = kTokenWarps;
  a.edge_blocks = uint32_t(is_warp ? divide_up(p.step.num_seqs, kTokenWarps) : p.step.num_seqs);
  const dim3 grid(unsigned(a.edge_blocks + divide_up(units, a.windows)), 1, 1), block(kTokenThreads, 1, 1);
  const auto kernel = !is_four ? pool_tokens<IO, false, FINISH_ANY> : is_warp ? pool_tokens<IO, IO != 0, IO != 0 ? FINISH_INDEX : FINISH_ANY> : pool_tokens<IO, IO != 0, IO != 0 ? FINISH_LANES : FINISH_ANY>;
  KVX_TRY(allow_shared(kernel, a.windows * row_bytes, 8 * kTokenWarps, p.dim));
  return launch_early_with("pool_tokens", kernel, grid, block, int(a.windows * row_bytes), stream, a);
}

template <int IO> kvx_status_t run_running(PoolArgs a, unsigned tasks, int shared, void* stream) {
  const CompressParams& p = a.p;
  if (a.format == LANES_INDEX) a.format = LANES_NONE;
  const uint32_t slices = uint32_t(divide_up(p.dim, 32 * kWide<IO>));  // warps that cover the channels
  const bool is_long = p.step.num_tokens >= 8 * int64_t(p.step.num_seqs);
  a.wide_warps = 1, a.cluster = 1;
  if (is_long) {  // tokens over warps, channels over the blocks of a cluster
    while (can_launch_early() && a.cluster < 4 && a.cluster < slices) a.cluster *= 2;
  } else {        // a token or two of each sequence: channels over warps
    while (a.wide_warps < kRunWarps && a.wide_warps < slices) a.wide_warps *= 2;
  }
  const auto kernel = IO == 0 || a.format == LANES_NONE ? pool_running<IO, FINISH_ANY> : pool_running<IO, IO == 0 ? FINISH_ANY : FINISH_LANES>;
  KVX_TRY(allow_shared(kernel, shared, sizeof(Pool) * kRunThreads * kWide<IO>, p.dim));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization, attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension, attributes[1].val.clusterDim.x = a.cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tasks * a.cluster), config.blockDim = dim3(kRunThreads), config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = attributes, config.numAttrs = a.cluster > 1 ? 2 : can_launch_early() ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, a);
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed("pool_running", error);
}

template <int IO> kvx_status_t run(const PoolArgs& a, int num_sms, void* stream) {
  const CompressParams& p = a.p;
  const int64_t tasks = p.step.num_seqs + divide_up(p.step.num_tokens, p.ratio), shared = 4 * int64_t(a.row_floats);
  if (tasks > kMaxCount / 4) return fail(KVX_STATUS_UNSUPPORTED, "%lld tokens of %d sequences are more than one launch takes; split the batch.", (long long)p.step.num_tokens, p.step.num_seqs);
  return p.is_running ? run_running<IO>(a, unsigned(tasks), int(shared), stream) : run_tokens<IO>(a, num_sms, stream);
}

}  // namespace

kvx_status_t compress(const CompressParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.step.num_tokens == 0 || p.step.num_seqs == 0) return KVX_STATUS_OK;
  PoolArgs a{p, make_fast_divider(p.ratio), make_fast_divider(p.entries.rows), any_row(p.dim, p.has_hadamard), LANES_NONE, 0, 0, 0, 1, 1, 1};
  a.row_floats = int32_t(divide_up(any_row_floats(p.dim, a.any), 4) * 4);
  if (fits_index_row(p.entries, p.finish)) a.format = LANES_INDEX;
  else if (!p.has_hadamard) a.format = lane_format(p.entries, p.finish, &a.least_code);
  const uint64_t bits = rows_address_bits(p.kv) | rows_address_bits(p.score) | uint64_t(uintptr_t(p.bias)) | uint64_t(uintptr_t(p.state));
  const bool is_wide = p.kv.is_dense && p.score.is_dense && p.kv.dtype == p.score.dtype && p.dim % 4 == 0 && common_alignment(bits) == 16;
  if (!is_wide) return run<0>(a, guard.num_sms(), stream);
  switch (p.kv.dtype) {
    case KVX_DTYPE_F16: return run<KVX_DTYPE_F16>(a, guard.num_sms(), stream);
    case KVX_DTYPE_BF16: return run<KVX_DTYPE_BF16>(a, guard.num_sms(), stream);
    default: return run<KVX_DTYPE_F32>(a, guard.num_sms(), stream);
  }
}

}  // namespace cuda
}  // namespace kvx
