// Attention's plan, made on the device once a step.
#include "attention/cuda/plan.cuh"

#include "table.h"

namespace kvx {
namespace cuda {

namespace {

// Of a line's tiles. Where there are workers enough, a (sequence, head) is cut into kManyParts on average, of two tiles
// or more. Otherwise shares are of kLeastTiles or more.
__device__ __forceinline__ int32_t count_shares(const PlanArgs& a, long long tiles, int32_t max_shares) {
  const long long items = max(1ll, (long long)a.num_seqs * a.line_heads), of_item = (tiles + items - 1) / items;
  long long each = min((long long)kLeastTiles, max(2ll, (of_item + kManyParts - 1) / kManyParts));
  if (tiles > each * max_shares) each = kLeastTiles;
  return int32_t(min((tiles + each - 1) / each, (long long)max_shares));
}

// One block of threads: a running sum of tiles over the sequences, then every share's place in it, and every item's
// shares.
__global__ void __launch_bounds__(kPlanThreads) make_plan(const __grid_constant__ PlanArgs a) {
  wait_for_previous();
  int32_t* first_tile = reinterpret_cast<int32_t*>(a.workspace + a.shape.first_tile_at);
  const int32_t base = sum_tiles(a.num_seqs, first_tile, [&](int32_t seq) {
    const SeqQueries queries = queries_of(a, seq);
    if (query_rows(queries, a.num_tokens, a.group, a.shape.rows) == 0) return 0;
    const int32_t length = clamped_length(a.kv, seq, a.max_seq_len);
    return seq_range(length, queries.count, a.window, a.is_causal, a.tile_tokens).num_tiles;
  });
  const long long tiles = (long long)base * a.line_heads;
  const int32_t lines = a.shape.lines, shares = count_shares(a, tiles, a.shape.max_workers / lines),
                blocks = a.shape.blocks, of_block = a.shape.max_workers / blocks,
                busy = (shares * lines + blocks - 1) / blocks;  // of a block's workers
  WorkerStart* start = reinterpret_cast<WorkerStart*>(a.workspace + a.shape.start_at);
  for (int32_t i = int32_t(threadIdx.x); i < a.shape.max_workers; i += kPlanThreads) {
    const int32_t block = i / of_block, worker = block * busy + i - block * of_block, share = worker / lines;
    WorkerStart s = {};
    if (i - block * of_block < busy && share < shares) {
      const long long tile = share * tiles / shares;
      const int32_t low = sequence_of(first_tile, a.num_seqs, tile, a.line_heads);
      const int32_t of_seq = first_tile[low + 1] - first_tile[low],
                    inside = int32_t(tile - (long long)first_tile[low] * a.line_heads);
      s.seq = low, s.head = inside / of_seq * lines + worker - share * lines, s.tile = inside % of_seq;
      s.length = clamped_length(a.kv, low, a.max_seq_len);
      s.count = int32_t((share + 1) * tiles / shares - tile), s.worker = worker;
    }
    start[i] = s;
  }
  PlanItem* items = reinterpret_cast<PlanItem*>(a.workspace + a.shape.item_at);
  const int64_t num_items = int64_t(a.num_seqs) * a.line_heads;
  for (int64_t i = threadIdx.x; i < num_items; i += kPlanThreads) {
    const int32_t seq = int32_t(i / a.line_heads), head = int32_t(i % a.line_heads),
                  of_seq = first_tile[seq + 1] - first_tile[seq];
    PlanItem item = {0, 0, 0, 0};
    if (of_seq) {
      const long long begin = (long long)first_tile[seq] * a.line_heads + (long long)head * of_seq;
      item.first_share = int32_t(((begin + 1) * shares - 1) / tiles),
      item.last_share = int32_t(((begin + of_seq) * shares - 1) / tiles);
      item.first_slot = item.first_share * tiles / shares == begin ? 0 : 1;
    }
    items[i] = item;
  }
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// One a KV head, unless that leaves more than one of 32 workers without a share.
int32_t lines_of(int64_t heads, int workers) {
  for (int64_t lines = heads; lines > 1; lines--)
    if (heads % lines == 0 && lines <= workers && workers % lines * 32 <= workers) return int32_t(lines);
  return 1;
}

}  // namespace

PlanShape plan_shape(const AttentionParams& p, int rows, int blocks, int workers_each) {
  PlanShape s = {};
  const int workers = blocks * workers_each;
  s.max_workers = workers, s.blocks = blocks, s.rows = rows, s.lines = lines_of(p.num_kv_heads, workers);
  s.first_tile_at = 0;
  s.item_at = s.first_tile_at + aligned((p.num_seqs + 1) * 4);
  s.start_at = s.item_at + aligned(p.num_seqs * (p.num_kv_heads / s.lines) * int64_t(sizeof(PlanItem)));
  s.partial_at = s.start_at + aligned(int64_t(workers) * sizeof(WorkerStart));
  s.partial_bytes = aligned(rows * (p.v_head_dim + 2) * 4);
  s.bytes = s.partial_at + 2 * workers * s.partial_bytes;
  return s;
}

kvx_status_t launch_plan(const AttentionParams& p, const PlanShape& shape, int tile_tokens, void* stream) {
  PlanArgs a = {};
  a.kv = p.kv;
  a.cu_seqlens = p.cu_seqlens, a.cu_bytes = p.cu_bytes;
  a.num_seqs = int32_t(p.num_seqs), a.line_heads = int32_t(p.num_kv_heads) / shape.lines, a.group = int32_t(p.group),
  a.tile_tokens = tile_tokens;
  a.query_len = int32_t(p.query_len), a.max_seq_len = int32_t(p.max_seq_len);
  a.window = p.window, a.num_tokens = p.num_tokens, a.is_causal = p.is_causal;
  a.workspace = p.workspace, a.shape = shape;
  return launch_early("make_plan", make_plan, dim3(1), dim3(kPlanThreads), stream, a);
}

}  // namespace cuda
}  // namespace kvx
