// What the warpgroup kernels of index_scores have in common: bringing tiles of keys, filling in -inf, and from products
// to scores.
#pragma once
#include "entry/index_scores/walk.cuh"
#include "tiles/ring.cuh"

namespace kvx {
namespace cuda {

constexpr int kIndexHeads = 64, kIndexDim = 128, kFillWarps = 3;
constexpr int64_t kFillColumns = 8192;  // that a warp fills in a go

// What goes with a tile of keys.
struct IndexTile {
  int32_t first_entry, token, num_tokens, position;  // num_tokens 0: there are no more tiles
  uint32_t there;                                    // a bit a box
  bool is_first, is_last;                            // of the group's
};

// Warp 0: lane b has box b of a tile. `s` has the rings, and copies; `queries` is its own.
template <class Kernel, class Queries> __device__ __forceinline__ void load_tiles(const Kernel& s, Queries queries) {
  const IndexArgs& a = s.a.index;
  const int lane = threadIdx.x % 32, box = s.a.box;
  typename Kernel::Keys ring = s.keys();
  IndexUnit next = {};  // its pages were asked for, and may be on their way: a table is far
  int32_t next_page = -1;
  uint32_t next_row = 0;
  const auto copy = [&] {
    if (next.is_first) s.load_queries(queries, next);
    ring.wait_free();
    const uint32_t there = __ballot_sync(0xffffffffu, next_page >= 0);
    if (lane == 0) {
      *s.tile_of(ring) = IndexTile{next.tile * kIndexKeys, next.token,  next.num_tokens, next.position, there,
                                   next.is_first,          next.is_last};
      tiles::arrive_and_expect(ring.full(), __popc(there) * box * Kernel::kKeyBytes);
    }
    __syncwarp();
    if (next_page >= 0) s.copy_keys(ring, lane, next_page, next_row);
    __syncwarp();
    ring.next();
  };
  walk_units(a, [&](const IndexUnit& u) {
    const uint32_t entry = uint32_t(u.tile) * kIndexKeys + lane * box, column = a.rows.divide(entry),
                   row = entry - column * a.rows.d;
    int32_t page = -1;
    if (lane * box < kIndexKeys && int32_t(entry) < visible_entries(a, u.position + u.num_tokens - 1))
      page = index_page(a, u.slot, column, u.counts && row == 0);
    if (next.num_tokens) copy();
    next = u, next_page = page, next_row = row;
  });
  if (next.num_tokens) copy();
  ring.wait_free();
  if (lane == 0) {
    s.tile_of(ring)->num_tokens = 0;
    ring.arrive_full();
  }
}

// Warps 1 to 3: a token's columns that no tile writes.
__device__ __forceinline__ void fill_hidden(const IndexArgs& a) {
  const int64_t parts = (a.p.num_entries + kFillColumns - 1) / kFillColumns, jobs = parts * a.p.step.num_tokens;
  for (int64_t job = int64_t(blockIdx.x) * kFillWarps + threadIdx.x / 32 - 1; job < jobs;
       job += int64_t(gridDim.x) * kFillWarps) {
    const int32_t token = int32_t(job / parts);
    const int64_t first = (job - token * parts) * kFillColumns,
                  from = columns_of_units(a, find_token(a.p.step, token), token);
    hide_entries(a, token, max(first, from), min(first + kFillColumns, a.p.num_entries));
  }
}

// Products of 64 rows by 64 heads as warpgroups have them: lane 4 g + t has columns 8 n + 2 t and 8 n + 2 t + 1 of rows
// g and g + 8. Twice the sum of weight * max(product, 0), of row g where t is even and of g + 8 where it is odd.
// `weights` starts at column 2 t.
__device__ __forceinline__ float sum_heads(const float (&products)[32], const float* weights) {
  const bool is_odd = threadIdx.x & 1;
  float low[2] = {0.f, 0.f}, high[2] = {0.f, 0.f};
#pragma unroll
  for (int n = 0; n < kIndexHeads / 8; n++) {
    const float2 w = *reinterpret_cast<const float2*>(weights + n * 8);
    const float* x = products + 4 * n;  // x + |x| is twice max(x, 0), NaN included
    low[0] = __fmaf_rn(x[0] + fabsf(x[0]), w.x, low[0]), low[1] = __fmaf_rn(x[1] + fabsf(x[1]), w.y, low[1]);
    high[0] = __fmaf_rn(x[2] + fabsf(x[2]), w.x, high[0]), high[1] = __fmaf_rn(x[3] + fabsf(x[3]), w.y, high[1]);
  }
  const float g = low[0] + low[1], g8 = high[0] + high[1];
  float sum = is_odd ? g8 : g;
  sum += __shfl_xor_sync(0xffffffffu, is_odd ? g : g8, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

// The score of token i of the group and of key `row` of the tile. Two threads of four have it; one writes.
__device__ __forceinline__ void store_score(const IndexArgs& a, const IndexTile& tile, int i, int row, int box_shift,
                                            float sum, float scale) {
  const int32_t entry = tile.first_entry + row;
  const bool is_seen = (tile.there >> (row >> box_shift) & 1) && entry < visible_entries(a, tile.position + i);
  if (threadIdx.x % 4 < 2 && entry < int32_t(a.p.num_entries))
    scores_of(a, tile.token + i)[entry] = is_seen ? sum * (0.5f * scale) : -INFINITY;
}

}  // namespace cuda
}  // namespace kvx
