// How a step's work is shared out: every worker (a warp) gets as many tiles as any other, whatever the lengths.
//
// Tiles of all sequences and KV heads stand in one line, head by head, sequence by sequence; worker w takes tiles
// [w * tiles / workers, (w + 1) * tiles / workers). A (sequence, head) that several workers share leaves parts in the workspace,
// which a second, small launch adds up in the order of the line: results do not depend on who was first.
//
//   workspace: header | first_tile[num_seqs + 1] | start[workers] | parts[2 * workers]
#pragma once
#include "../attention.h"
#include "../table.h"
#include "device.cuh"

namespace kvx {
namespace cuda {

constexpr int kLeastTiles = 4;  // of a worker: fewer would cost more to add up than they save

struct PlanHeader {
  long long tiles;
  int32_t workers;
  int32_t reserved;
};

struct WorkerStart {
  int32_t seq, head, tile;  // tile of the (seq, head)
  int32_t reserved;
};

struct PlanShape {
  int64_t first_tile_at, start_at, partial_at, bytes;
  int64_t partial_bytes;  // of one: [rows, v_head_dim] f32 and [rows, 2] f32 (largest score, sum)
  int32_t max_workers, rows;
};

// Positions of a sequence that any of its queries sees: [first, end), in tiles from first / kTokens on.
struct SeqRange {
  int32_t first_tile, num_tiles, end;
};

struct PlanArgs {
  GatherParams kv;       // lengths
  const void* cu_seqlens;
  int32_t cu_bytes;
  int32_t num_seqs, num_kv_heads, tile_tokens, query_len, max_seq_len;
  int64_t window;
  int32_t is_causal, max_workers;
  char* workspace;
  PlanShape shape;
};

__device__ __forceinline__ int32_t query_length(const void* cu, int bytes, int32_t all, int32_t seq) {
  if (!cu) return all;
  return int32_t(read_index(cu, int64_t(seq + 1) * bytes, bytes) - read_index(cu, int64_t(seq) * bytes, bytes));
}

__device__ __forceinline__ SeqRange seq_range(const GatherParams& kv, int32_t seq, int32_t query_len, int64_t window, bool is_causal, int32_t max_seq_len, int32_t tile_tokens) {
  int64_t length = sequence_length(kv.table, seq, kv.block_size);
  if (length < 0 || length > max_seq_len) length = length < 0 ? 0 : max_seq_len;
  int64_t first = 0;
  if (window > 0) first = length - (is_causal ? query_len : 1) - window + 1;  // the first query's first position
  if (first < 0) first = 0;
  SeqRange r;
  r.first_tile = int32_t(first) / tile_tokens;
  r.end = int32_t(length);
  r.num_tiles = (r.end + tile_tokens - 1) / tile_tokens - r.first_tile;
  if (r.num_tiles < 1) r.num_tiles = 1;  // somebody has to write the empty result
  return r;
}

PlanShape plan_shape(const AttentionParams& p, int rows, int workers);
kvx_status_t launch_plan(const AttentionParams& p, const PlanShape& shape, int tile_tokens, void* stream);

}  // namespace cuda
}  // namespace kvx
