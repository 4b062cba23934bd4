// compress where a tail keeps its tokens: overlap and ring. A thread pools all slots of its channels.
#pragma once
#include "entry/compress/entry.cuh"

namespace kvx {
namespace cuda {

// IsFour: overlap of windows of four. An entry of an indexer takes a warp, and others a block.
template <int IO, bool IsFour, Finish How>
__global__ void __launch_bounds__(kTokenThreads, IO == KVX_DTYPE_F32 ? 4 : 5)
    pool_tokens(const __grid_constant__ PoolArgs a) {
  constexpr int W = kWide<IO>;
  constexpr bool IsWarp = How == FINISH_INDEX;
  constexpr bool IsLate =
      IsFour && IO == KVX_DTYPE_F32;  // an entry's page is settled after pooling: others have no registers for it
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
  float* row = rows;  // what the warp finishes
  if (is_edge) {
    const int32_t seq = int32_t(IsWarp ? blockIdx.x * kTokenWarps + warp : blockIdx.x);
    if (IsWarp && seq >= p.step.num_seqs) return;
    if (IsWarp) row += warp * uint32_t(a.row_floats);
    t = open_sequence(p.step, seq);
    count_bad(a, t.is_bad || (t.seq >= 0 && !is_sound(t)), me == 0);
    // The compiler is told that lanes agree, here and below: exchanges between them are then plain.
    if (!__any_sync(0xffffffffu, is_sound(t) && t.end != t.begin)) return;
    number = a.ratio.divide(uint32_t(t.start)), open = t.start - int32_t(number) * ratio,
    begin = int64_t(t.begin) - open;
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
      if (begin + ratio <= t.end && begin - (p.parts - 1) * ratio >= t.begin)
        to = find_entry(a, t.slot, number, me % 32 == 0);
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
      for (uint32_t c = me * W; c < dim; c += team * W)
        pool_slots<IO, IsFour>(p, before, current, ovl, cur, c, row + c);
      if constexpr (IsLate) to = settle_entry(a, entry, number + e, me == 0);
    } else {
#pragma unroll 1
      for (uint32_t i = 0; i < (IsWarp ? 1 : a.windows); i++) {
        const int64_t at = IsWarp ? begin : begins[i];
        if (at == kNowhere) continue;
        float* const mean = IsWarp ? row : rows + i * uint32_t(a.row_floats);
        for (uint32_t c = me * W; c < dim; c += team * W) {
          if constexpr (IsFour) pool_eight<IO>(p, at, c, mean + c);
          else
            pool_slots<IO, false>(p, RowRun{nullptr, 0}, RowRun{nullptr, 0},
                                  TokenRun{at - ratio, 0, is_overlap ? ratio : 0, 0}, TokenRun{at, 0, ratio, own}, c,
                                  mean + c);
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

}  // namespace cuda
}  // namespace kvx
