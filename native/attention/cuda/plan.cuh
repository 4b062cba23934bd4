// How a step's work is shared out: every worker (a warp) gets as many tiles as any other, whatever the lengths.
//
// Every KV head has a line of tiles, sequence by sequence; a sequence without query rows of ours (query_rows) has none.
// All lines are cut alike: share s is tiles [s * tiles / shares, (s + 1) * tiles / shares) of each, and worker s *
// lines + l has it of line l. So the warps of a block read all heads of the same tokens together, which lie together: a
// token's scales are one sector for eight heads. Where there is less work than workers, it is spread over all blocks of
// threads: one multiprocessor reads no more than its part of memory's speed. Where heads would leave too many workers
// idle, a line has several: heads l, l + lines, ..., head by head in each sequence. A (sequence, head) that several
// workers share leaves parts in the workspace, which a second, small launch adds up in the order of the line: results
// do not depend on who was first.
//
//   workspace: first_tile[num_seqs + 1] | items[num_seqs * line_heads] | start[workers] | parts[2 * workers]
#pragma once
#include "attention/attention.h"
#include "cuda/device.cuh"
#include "table.h"

namespace kvx {
namespace cuda {

constexpr int kLeastTiles = 4;  // of a worker: fewer would cost more to add up than they save
constexpr int kManyParts = 8;   // of a (sequence, head), on average: as many as a warp adds up at once

// Of a warp, in the order of the launch: all it has to know before it asks for its first rows.
struct WorkerStart {
  int32_t seq, head, tile;  // of the first tile; `tile` of the (seq, head)
  int32_t length;           // of the sequence, so that nobody has to ask for it first
  int32_t count;            // of tiles; 0: there is no work for it
  int32_t worker;           // share * lines + line: where its parts are
  int32_t reserved[2];
};

// A (sequence, head) of every line, for who adds its parts up: the shares that have one, and which of the first share's
// two it is. The first share came to it after other items, unless it began with it.
struct PlanItem {
  int32_t first_share, last_share, first_slot, reserved;
};

struct PlanShape {
  int64_t first_tile_at, start_at, item_at, partial_at, bytes;
  int64_t partial_bytes;                     // of one: [rows, v_head_dim] f32 and [rows, 2] f32 (largest score, sum)
  int32_t max_workers, blocks, rows, lines;  // blocks: of threads; each has as many workers
};

// Positions of a sequence that any of its queries sees: [first, end), in tiles from first / kTokens on.
struct SeqRange {  // positions [begin, end) are seen, in tiles of which the first is the one that `begin` stands in
  int32_t begin, num_tiles, end;
};

struct PlanArgs {
  GatherParams kv;  // lengths
  const void* cu_seqlens;
  int32_t cu_bytes;
  int32_t num_seqs, line_heads, group, tile_tokens, query_len, max_seq_len;  // line_heads: KV heads of a line
  int64_t window, num_tokens;
  int32_t is_causal;
  char* workspace;
  PlanShape shape;
};

// A sequence's queries: the number of its first one in q, and how many. cu_seqlens may point outside q.
struct SeqQueries {
  int64_t first;
  int32_t count;
};
template <class Args> __device__ __forceinline__ SeqQueries queries_of(const Args& a, int32_t seq) {
  if (!a.cu_seqlens) return SeqQueries{int64_t(seq) * a.query_len, a.query_len};
  const int64_t at = int64_t(seq) * a.cu_bytes, first = read_index(a.cu_seqlens, at, a.cu_bytes);
  return SeqQueries{first, int32_t(read_index(a.cu_seqlens, at + a.cu_bytes, a.cu_bytes) - first)};
}

// Their rows, for a kernel that takes up to `most`; 0 where there are more, or where they are outside q.
__device__ __forceinline__ int32_t query_rows(const SeqQueries& q, int64_t num_tokens, int32_t group, int32_t most) {
  return q.first >= 0 && q.count >= 0 && q.count <= num_tokens - q.first && int64_t(q.count) * group <= most
             ? q.count * group
             : 0;
}

__device__ __forceinline__ int32_t clamped_length(const GatherParams& kv, int32_t seq, int32_t max_seq_len) {
  const int64_t length = sequence_length(kv.table, seq, kv.block_size);
  return length < 0 ? 0 : length > max_seq_len ? max_seq_len : int32_t(length);
}

__device__ __forceinline__ SeqRange seq_range(int32_t length, int32_t query_len, int64_t window, bool is_causal,
                                              int32_t tile_tokens) {
  int64_t first = 0;
  if (window > 0)
    first = int64_t(length) - (is_causal ? query_len : 1) - window + 1;  // the first query's first position
  if (first < 0) first = 0;
  SeqRange r;
  r.begin = int32_t(first);
  r.end = length;
  r.num_tiles = (r.end + tile_tokens - 1) / tile_tokens - r.begin / tile_tokens;
  if (r.num_tiles < 1) r.num_tiles = 1;  // somebody has to write the empty result
  return r;
}

// A piece of a plan, asked for here and not where it is first used.
template <class T> __device__ __forceinline__ T load_now(const char* from) {
  static_assert(sizeof(T) % 16 == 0, "whole loads");
  union {
    uint32_t words[sizeof(T) / 4];
    T x;
  } u;
#pragma unroll
  for (int i = 0; i < int(sizeof(T) / 16); i++)
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(u.words[4 * i]), "=r"(u.words[4 * i + 1]), "=r"(u.words[4 * i + 2]), "=r"(u.words[4 * i + 3])
                 : "l"(from + 16 * i));
  return u.x;
}

constexpr int kPlanThreads = 1024;

// Running sums of tiles over the sequences, by one block of kPlanThreads threads: first_tile[seq], and after the last
// their total, which every thread gets.
template <class TilesOf> __device__ __forceinline__ int32_t sum_tiles(int32_t num_seqs, int32_t* first_tile,
                                                                      TilesOf&& tiles_of) {
  __shared__ int32_t sums[kPlanThreads / 32], base;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) base = 0;
  __syncthreads();
  for (int32_t from = 0; from < num_seqs; from += kPlanThreads) {
    const int32_t seq = from + int32_t(threadIdx.x), tiles = seq < num_seqs ? tiles_of(seq) : 0;
    int32_t sum = tiles;
    for (int hop = 1; hop < 32; hop *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, sum, hop);
      if (lane >= hop) sum += other;
    }
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    if (warp == 0) {
      int32_t s = sums[lane];
      for (int hop = 1; hop < 32; hop *= 2) {
        const int32_t other = __shfl_up_sync(0xffffffffu, s, hop);
        if (lane >= hop) s += other;
      }
      sums[lane] = s;
    }
    __syncthreads();
    if (seq < num_seqs) first_tile[seq] = base + (warp ? sums[warp - 1] : 0) + sum - tiles;
    const int32_t all = sums[kPlanThreads / 32 - 1];
    __syncthreads();
    if (threadIdx.x == 0) base += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) first_tile[num_seqs] = base;
  __syncthreads();
  return base;
}

// The last sequence that begins at or before a tile: one that has tiles.
__device__ __forceinline__ int32_t sequence_of(const int32_t* first_tile, int32_t num_seqs, long long tile,
                                               int32_t line_heads) {
  int32_t low = 0, high = num_seqs;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if ((long long)first_tile[middle] * line_heads <= tile) low = middle;
    else high = middle;
  }
  return low;
}

PlanShape plan_shape(const AttentionParams& p, int rows, int blocks, int workers_each);
kvx_status_t launch_plan(const AttentionParams& p, const PlanShape& shape, int tile_tokens, void* stream);

}  // namespace cuda
}  // namespace kvx
