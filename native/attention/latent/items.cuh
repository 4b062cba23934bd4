// What a launch of latent attention works on: its arguments, items of 64 query rows, and a role's way through them.
#pragma once
#include "attention/cuda/plan.cuh"
#include "tiles/block_rows.cuh"
#include "tiles/tensor_map.cuh"

namespace kvx {
namespace cuda {

constexpr int kLatentRows = 64, kLatentKeys = 64;  // of a tile: query rows, keys
constexpr int kLatentDim = 512, kRopeDim = 64;
constexpr int kMostSplitRows = 256;  // of a sequence: with more, its blocks of rows fill the device unsplit

struct LatentShape {  // of the workspace: header | first_tile[num_seqs + 1] | start[workers] | parts[2 * workers]
  int64_t first_tile_at, start_at, partial_at, bytes;
  int64_t partial_bytes;  // of one (results.cuh)
  int32_t max_workers;
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
  *first = a.cu_seqlens ? read_index(a.cu_seqlens, int64_t(seq) * a.cu_bytes, a.cu_bytes) : int64_t(seq) * a.query_len;
  const int32_t queries = query_length(a.cu_seqlens, a.cu_bytes, a.query_len, seq);
  return queries < 0 || *first < 0 || *first + queries > a.num_tokens ? 0 : queries;
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
  int32_t seq, first_row, rows, queries, length;  // rows: of the sequence
  int32_t first_tile, num_tiles, begin;           // begin: the first position that is seen
  int32_t part;                                   // where the result goes: -1 = out, else a place in the workspace
  int32_t least_limit, most_low;                  // keys in [most_low, least_limit) are seen by every row
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

__device__ __forceinline__ LatentItem latent_item(const LatentArgs& a, int32_t seq, int32_t block) {
  LatentItem w = {};
  w.seq = seq, w.part = -1;
  w.queries = latent_queries(a, seq, &w.first_query);
  w.rows = w.queries * int32_t(a.heads.d), w.first_row = block * kLatentRows;
  const int64_t length = sequence_length(a.rows.kv.table, seq, a.rows.kv.block_size);
  w.length = int32_t(length < 0 ? 0 : length > a.max_seq_len ? a.max_seq_len : length);
  w.least_limit = limit_of(a, w, w.first_row);
  w.most_low =
      a.window > 0 ? int32_t(limit_of(a, w, max(min(w.first_row + kLatentRows, w.rows) - 1, 0)) - a.window) : 0;
  return w;
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
    LatentItem w = latent_item(a, from + which, int32_t(__shfl_sync(0xffffffffu, sum, which) - 1 - index));
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
  LatentItem item;
  int32_t at, end, seq, group, tile, part;

  __device__ __forceinline__ void begin(const LatentArgs& a, const LatentItem* found) {
    at = 0, end = 1;
    if (found) {
      item = *found;
      return;
    }
    const PlanHeader plan = *reinterpret_cast<const PlanHeader*>(a.workspace);
    const int32_t worker = int32_t(blockIdx.x) / a.together;
    at = int32_t(worker * plan.tiles / plan.workers), end = int32_t((worker + 1) * plan.tiles / plan.workers);
    const WorkerStart start = reinterpret_cast<const WorkerStart*>(a.workspace + a.plan.start_at)[worker];
    seq = start.seq, group = start.head, tile = start.tile, part = 2 * int32_t(blockIdx.x);
  }

  __device__ __forceinline__ void next(const LatentArgs& a) {
    if (at >= end) {
      item.seq = -1;
    } else if (!a.is_split) {
      at = end;
    } else {
      const int32_t member = int32_t(blockIdx.x) % a.together;
      LatentItem w = latent_item(a, seq, group * a.together + member);
      while (group >= latent_groups(a, w.queries))
        w = latent_item(a, ++seq, (group = 0) + member);  // past its last block; some have none
      const SeqRange range = latent_range(a, seq, w.queries);
      w.begin = range.begin, w.first_tile = range.begin / kLatentKeys + tile,
      w.num_tiles = min(range.num_tiles - tile, end - at);
      if (w.num_tiles < range.num_tiles) w.part = part;
      at += w.num_tiles, group++, tile = 0, part |= 1;
      item = w;
    }
  }
};

}  // namespace cuda
}  // namespace kvx
