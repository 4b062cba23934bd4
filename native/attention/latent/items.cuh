// What a launch of latent attention works on: its arguments, items of 64 query rows, and a role's way through them.
#pragma once
#include "attention/cuda/plan.cuh"
#include "tiles/block_rows.cuh"
#include "tiles/tensor_map.cuh"

namespace kvx {
namespace cuda {

constexpr int kLatentRows = 64, kLatentKeys = 64;  // of a tile: query rows, keys
constexpr int kMostSplitRows = 256;  // of a sequence: with more, its blocks of rows fill the device unsplit

struct LatentHeader {
  long long tiles;  // of all sequences
  int32_t workers;  // with a share of them
  int32_t is_cut;   // some share begins inside an item, so there are parts to add up
};

// Of the workspace: header | first_tile[num_seqs + 1] | start[max_workers] | parts[2 * max_workers].
struct LatentShape {
  int64_t first_tile_at, start_at, partial_at, bytes;
  int64_t partial_bytes;  // of one (results.cuh)
  int32_t max_workers;
};

// What a worker begins with, all in one place: read one after the other, the plan's header, its start and the lengths
// would be three waits for memory before the first keys are asked for.
struct alignas(16) LatentStart {
  int32_t seq, group, tile;              // tile of the group
  int32_t num_tiles;                     // of the worker's share; 0 = it has none
  int32_t first_query, queries, length;  // of the sequence
  int32_t reserved;
};

struct LatentArgs {
  CUtensorMap maps[2];  // latents, rotary parts: of 16-bit caches whose blocks the copy engine can be told of
  int32_t box_shift;    // of such a cache: 1 << box_shift tokens are one copy; -1 = another cache
  tiles::RowFinder rows;
  const char* data[2];  // latents, rotary parts
  RowsParams q, out;
  char* lse;
  int64_t lse_token, lse_head;
  const float* sinks;
  const void* cu_seqlens;
  int32_t cu_bytes;
  int32_t num_seqs, query_len, max_seq_len, is_causal;
  int32_t together;   // so many workers take the same keys, each for its own block of rows: memory is read once for all
  int32_t stores_16;  // rows of the output begin on multiples of 16 bytes
  int32_t is_split;   // this launch takes sequences of at most kMostSplitRows rows, by the plan; else those with more
  FastDivider heads;
  int64_t window, num_tokens;
  float factor;  // softmax scale, log2(e) included
  char* workspace;
  LatentShape plan;
};

// Queries of a sequence, 0 where cu_seqlens points outside q.
__device__ __forceinline__ int32_t latent_queries(const LatentArgs& a, int32_t seq, int64_t* first) {
  const SeqQueries q = queries_of(a, seq);
  *first = q.first;
  return q.count < 0 || q.first < 0 || q.first + q.count > a.num_tokens ? 0 : q.count;
}
__device__ __forceinline__ int32_t latent_blocks(const LatentArgs& a, int32_t queries) {  // of rows, in this launch
  const int64_t rows = int64_t(queries) * a.heads.d;
  return (rows <= kMostSplitRows) == bool(a.is_split) ? int32_t((rows + kLatentRows - 1) / kLatentRows) : 0;
}
// Of blocks that workers take together.
__device__ __forceinline__ int32_t latent_groups(const LatentArgs& a, int32_t queries) {
  return (latent_blocks(a, queries) + a.together - 1) / a.together;
}
__device__ __forceinline__ SeqRange latent_range(const LatentArgs& a, int32_t seq, int32_t queries) {
  return seq_range(clamped_length(a.rows.kv, seq, a.max_seq_len), queries, a.window, a.is_causal, kLatentKeys);
}

// 64 rows of a sequence and the tiles of keys they are multiplied with.
struct LatentItem {
  int32_t seq, queries, length;          // of the sequence, as first_query is
  int32_t first_row, rows;               // rows: of the sequence
  int32_t first_tile, num_tiles, begin;  // begin: the first position that is seen
  int32_t part;                          // where the result goes: -1 = out, else a place in the workspace
  int32_t least_limit, most_low;         // keys in [most_low, least_limit) are seen by every row
  int64_t first_query;
};

// Keys before it are seen by a row.
__device__ __forceinline__ int32_t limit_of(const LatentArgs& a, const LatentItem& w, int32_t row) {
  return a.is_causal ? w.length - w.queries + 1 + int32_t(a.heads.divide(uint32_t(row))) : w.length;
}

// This thread's number in its role. Read anew wherever it is wanted: kept, it would be one more register, or worse, a
// spilled one.
__device__ __forceinline__ uint32_t role_thread() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x % 128;
}

// What an item knows of its sequence.
__device__ __forceinline__ void enter_sequence(const LatentArgs& a, int32_t seq, LatentItem* w) {
  w->seq = seq, w->queries = latent_queries(a, seq, &w->first_query);
  w->length = clamped_length(a.rows.kv, seq, a.max_seq_len);
}
// And of its rows, once the sequence is known.
__device__ __forceinline__ void enter_block(const LatentArgs& a, int32_t block, LatentItem* w) {
  w->rows = w->queries * int32_t(a.heads.d), w->first_row = block * kLatentRows, w->part = -1;
  w->least_limit = limit_of(a, *w, w->first_row);
  w->most_low =
      a.window > 0 ? int32_t(limit_of(a, *w, max(min(w->first_row + kLatentRows, w->rows) - 1, 0)) - a.window) : 0;
}

// The item of a block of threads, unsplit: sequences in order; in each, the rows that see most come first. seq -1:
// none. By a whole warp.
__device__ __forceinline__ LatentItem find_latent_item(const LatentArgs& a, uint32_t index) {
  const int lane = threadIdx.x % 32;
  for (int32_t from = 0; from < a.num_seqs; from += 32) {
    const int32_t seq = from + lane;
    int64_t first;
    const uint32_t mine = seq < a.num_seqs ? uint32_t(latent_blocks(a, latent_queries(a, seq, &first))) : 0;
    uint32_t sum = mine;
    for (int hop = 1; hop < 32; hop *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, hop);
      if (lane >= hop) sum += other;
    }
    const uint32_t found = __ballot_sync(0xffffffffu, index < sum);
    if (found == 0) {
      index -= __shfl_sync(0xffffffffu, sum, 31);
      continue;
    }
    const int which = __ffs(int(found)) - 1;
    LatentItem w = {};
    enter_sequence(a, from + which, &w);
    enter_block(a, int32_t(__shfl_sync(0xffffffffu, sum, which) - 1 - index), &w);
    const int32_t end = limit_of(a, w, min(w.first_row + kLatentRows, w.rows) - 1),
                  low = a.window > 0 ? int32_t(max(int64_t(0), w.least_limit - a.window)) : 0;
    w.begin = low, w.first_tile = low / kLatentKeys;
    w.num_tiles =
        max(1, (end + kLatentKeys - 1) / kLatentKeys - w.first_tile);  // somebody has to write the empty result
    return w;
  }
  LatentItem none = {};
  none.seq = -1;
  return none;
}

// A role's way through its items: one that was found, or every one in a worker's share of the line of tiles. It stands
// in shared memory, moved on by one thread: kept in registers it would take them from sums.
struct LatentWalk {
  LatentItem item;                  // its sequence is known from the start
  int32_t left, block, tile, part;  // tiles of the share that are left; where the next item begins, and its part

  __device__ __forceinline__ void begin(const LatentArgs& a, const LatentItem* found) {
    left = 1;
    if (found) {
      item = *found;
      return;
    }
    const int32_t index = int32_t(blockIdx.x), worker = index / a.together;
    const LatentStart start =
        load_now<LatentStart>(a.workspace + a.plan.start_at + worker * int64_t(sizeof(LatentStart)));
    item.seq = start.seq, item.queries = start.queries, item.length = start.length,
    item.first_query = start.first_query;
    left = start.num_tiles, block = (start.group - worker) * a.together + index, tile = start.tile, part = 2 * index;
  }

  __device__ __forceinline__ void next(const LatentArgs& a) {
    if (left == 0) {
      item.seq = -1;
    } else if (!a.is_split) {
      left = 0;
    } else {
      LatentItem w = item;
      // Past the sequence's last block: to the same member's place in the next one that has any. A sequence has as many
      // blocks for each of those that go together.
      for (int32_t blocks; block >= (blocks = latent_blocks(a, w.queries)); block -= blocks)
        enter_sequence(a, w.seq + 1, &w);
      enter_block(a, block, &w);
      const SeqRange range = seq_range(w.length, w.queries, a.window, a.is_causal, kLatentKeys);
      w.begin = range.begin, w.first_tile = range.begin / kLatentKeys + tile,
      w.num_tiles = min(range.num_tiles - tile, left);
      if (w.num_tiles < range.num_tiles) w.part = part;
      left -= w.num_tiles, block += a.together, tile = 0, part |= 1;
      item = w;
    }
  }
};

}  // namespace cuda
}  // namespace kvx
