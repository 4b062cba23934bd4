// Which products a block of threads of index_scores has: tiles of 256 keys by groups of up to four tokens, shared out
// evenly.
//
// A unit is a tile and a group. Units of a sequence are counted as if all its groups saw as many tiles as the last;
// those that do not are passed over. A block takes two shares of all units, one from the front and its mirror image
// from the back: where groups see more and more, as in a prompt from its start, each
// block has as much to do as the others.
#pragma once
#include "entry/index_scores/index_scores.cuh"

namespace kvx {
namespace cuda {

constexpr int kIndexKeys = 256, kIndexTokens = 4;

struct IndexUnit {
  int32_t slot, tile;
  int32_t token, num_tokens, position;  // of the group's first
  bool is_first, is_last;               // of this group's tiles, here
  bool counts;                          // pages outside of the pool: the last group sees all of them
};

struct IndexSequence {
  int32_t slot, begin, count, start, tiles;
  __device__ __forceinline__ int32_t groups() const { return (count + kIndexTokens - 1) / kIndexTokens; }
  __device__ __forceinline__ int64_t units() const { return int64_t(groups()) * tiles; }
};

__device__ __forceinline__ int32_t tiles_at(const IndexArgs& a, int32_t position) {
  return (visible_entries(a, position) + kIndexKeys - 1) / kIndexKeys;
}

__device__ __forceinline__ IndexSequence index_sequence(const IndexArgs& a, int32_t seq, bool counts) {
  IndexSequence s = {-1, 0, 0, 0, 0};
  if (seq >= a.p.step.num_seqs) return s;
  const StepToken t = open_sequence(a.p.step, seq);
  if (t.is_bad && counts && a.p.errors) atomicAdd(a.p.errors, 1ull);
  if (t.seq < 0 || t.end <= t.begin) return s;
  return IndexSequence{t.slot, t.begin, t.end - t.begin, t.start, tiles_at(a, t.start + t.end - t.begin - 1)};
}

// Calls take(unit) for each unit of this block. By a warp: 32 sequences are looked at in a go.
template <class Take> __device__ __forceinline__ void walk_units(const IndexArgs& a, Take take) {
  const int lane = threadIdx.x % 32;
  const int32_t num_seqs = a.p.step.num_seqs;
  int64_t total = 0;
  for (int32_t base = 0; base < num_seqs; base += 32) total += index_sequence(a, base + lane, blockIdx.x == 0).units();
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
  const int64_t shares = 2 * int64_t(gridDim.x);
#pragma unroll 1
  for (int half = 0; half < 2; half++) {
    const int64_t share = half == 0 ? blockIdx.x : shares - 1 - blockIdx.x;
    const int64_t from = total * share / shares, to = total * (share + 1) / shares;
    int64_t before = 0;  // units of sequences before `base`
#pragma unroll 1
    for (int32_t base = 0; base < num_seqs && before < to; base += 32) {
      const IndexSequence own = index_sequence(a, base + lane, false);
      int64_t sum = own.units();
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int64_t other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      const int64_t first = before + sum - own.units(), own_lo = max(from - first, int64_t(0)),
                    own_hi = min(to - first, own.units());
      before += __shfl_sync(0xffffffffu, sum, 31);
      unsigned left = __ballot_sync(0xffffffffu, own_lo < own_hi);
#pragma unroll 1
      for (; left; left &= left - 1) {
        const int s = __ffs(int(left)) - 1;
        const auto of = [&](int32_t x) { return __shfl_sync(0xffffffffu, x, s); };
        const IndexSequence seq = {of(own.slot), of(own.begin), of(own.count), of(own.start), of(own.tiles)};
        const int64_t hi = __shfl_sync(0xffffffffu, own_hi, s);
#pragma unroll 1
        for (int64_t unit = __shfl_sync(0xffffffffu, own_lo, s); unit < hi;) {
          const int32_t group = int32_t(unit / seq.tiles), tile = int32_t(unit - int64_t(group) * seq.tiles),
                        skip = group * kIndexTokens;
          const int32_t tokens = min(kIndexTokens, seq.count - skip);
          const int32_t end = int32_t(min(int64_t(tiles_at(a, seq.start + skip + tokens - 1)), tile + hi - unit));
#pragma unroll 1
          for (int32_t i = tile; i < end; i++)
            take(IndexUnit{seq.slot, i, seq.begin + skip, tokens, seq.start + skip, i == tile, i == end - 1,
                           group == seq.groups() - 1});
          unit += seq.tiles - tile;
        }
      }
    }
  }
}

// The first column of a token's scores that no unit writes.
__device__ __forceinline__ int64_t columns_of_units(const IndexArgs& a, const StepToken& t, int32_t token) {
  if (t.seq < 0) return 0;
  const int32_t last = min(t.end, t.begin + (token - t.begin) / kIndexTokens * kIndexTokens + kIndexTokens) - 1;
  return int64_t(tiles_at(a, t.position(last))) * kIndexKeys;
}

}  // namespace cuda
}  // namespace kvx
