// Attention's plan, made on the device once a step.
#include "attention_plan.cuh"

#include "../table.h"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 1024;

// One block of threads: a running sum of tiles over the sequences, then every worker's place in it.
__global__ void __launch_bounds__(kThreads) make_plan(const __grid_constant__ PlanArgs a) {
  __shared__ int32_t sums[kThreads / 32], base;
  int32_t* first_tile = reinterpret_cast<int32_t*>(a.workspace + a.shape.first_tile_at);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) base = 0;
  wait_for_previous();
  __syncthreads();
  for (int32_t from = 0; from < a.num_seqs; from += kThreads) {
    const int32_t seq = from + int32_t(threadIdx.x);
    int32_t tiles = 0;
    if (seq < a.num_seqs) {
      const int32_t queries = query_length(a.cu_seqlens, a.cu_bytes, a.query_len, seq);
      tiles = seq_range(a.kv, seq, queries, a.window, a.is_causal, a.max_seq_len, a.tile_tokens).num_tiles;
    }
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
    const int32_t before = base + (warp ? sums[warp - 1] : 0) + sum - tiles;
    if (seq < a.num_seqs) first_tile[seq] = before;
    const int32_t all = sums[kThreads / 32 - 1];
    __syncthreads();
    if (threadIdx.x == 0) base += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) first_tile[a.num_seqs] = base;
  __syncthreads();
  const long long tiles = (long long)base * a.num_kv_heads;
  const long long most = (tiles + kLeastTiles - 1) / kLeastTiles;
  const int32_t workers = int32_t(most < a.max_workers ? most : a.max_workers);
  if (threadIdx.x == 0) *reinterpret_cast<PlanHeader*>(a.workspace) = PlanHeader{tiles, workers, 0};
  WorkerStart* start = reinterpret_cast<WorkerStart*>(a.workspace + a.shape.start_at);
  for (int32_t w = int32_t(threadIdx.x); w < workers; w += kThreads) {
    const long long tile = w * tiles / workers;
    int32_t low = 0, high = a.num_seqs;  // the last sequence that begins at or before it
    while (high - low > 1) {
      const int32_t middle = (low + high) / 2;
      if ((long long)first_tile[middle] * a.num_kv_heads <= tile) low = middle;
      else high = middle;
    }
    const int32_t of_seq = first_tile[low + 1] - first_tile[low], inside = int32_t(tile - (long long)first_tile[low] * a.num_kv_heads);
    start[w] = WorkerStart{low, inside / of_seq, inside % of_seq, 0};
  }
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

PlanShape plan_shape(const AttentionParams& p, int rows, int workers) {
  PlanShape s = {};
  s.max_workers = workers, s.rows = rows;
  s.first_tile_at = aligned(sizeof(PlanHeader));
  s.start_at = s.first_tile_at + aligned((p.num_seqs + 1) * 4);
  s.partial_at = s.start_at + aligned(int64_t(workers) * sizeof(WorkerStart));
  s.partial_bytes = aligned(rows * (p.v_head_dim + 2) * 4);
  s.bytes = s.partial_at + 2 * workers * s.partial_bytes;
  return s;
}

kvx_status_t launch_plan(const AttentionParams& p, const PlanShape& shape, int tile_tokens, void* stream) {
  PlanArgs a = {};
  a.kv = p.kv;
  a.cu_seqlens = p.cu_seqlens, a.cu_bytes = p.cu_bytes;
  a.num_seqs = int32_t(p.num_seqs), a.num_kv_heads = int32_t(p.num_kv_heads), a.tile_tokens = tile_tokens;
  a.query_len = int32_t(p.query_len), a.max_seq_len = int32_t(p.max_seq_len);
  a.window = p.window, a.is_causal = p.is_causal, a.max_workers = shape.max_workers;
  a.workspace = p.workspace, a.shape = shape;
  return launch_early("make_plan", make_plan, dim3(1), dim3(kThreads), stream, a);
}

}  // namespace cuda
}  // namespace kvx
