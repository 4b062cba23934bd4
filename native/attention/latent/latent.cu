// Latent attention on Hopper: which calls it takes, how their work is shared out, and the sums of what was split.
#include "attention/latent/latent.cuh"

#include <algorithm>

#include "attention/cuda/attention.cuh"

namespace kvx {
namespace cuda {

namespace {

// One block of threads: a running sum of tiles over the sequences, then every worker's place in it.
__global__ void __launch_bounds__(kPlanThreads) plan_latent_tiles(const __grid_constant__ LatentArgs a) {
  wait_for_previous();
  int32_t* first_tile = reinterpret_cast<int32_t*>(a.workspace + a.plan.first_tile_at);
  const int32_t tiles = sum_tiles(a.num_seqs, first_tile, [&](int32_t seq) {
    int64_t first;
    const int32_t queries = latent_queries(a, seq, &first), blocks = latent_blocks(a, queries);
    return blocks ? blocks * latent_range(a, seq, queries).num_tiles : 0;
  });
  const int32_t workers = min((tiles + kLeastTiles - 1) / kLeastTiles, a.plan.max_workers);
  if (threadIdx.x == 0) *reinterpret_cast<PlanHeader*>(a.workspace) = PlanHeader{tiles, workers, 0};
  for (int32_t w = int32_t(threadIdx.x); w < workers; w += kPlanThreads) {
    const int32_t tile = int32_t((long long)w * tiles / workers);
    const int32_t low = sequence_of(first_tile, a.num_seqs, tile, 1);
    int64_t first;
    const int32_t of_block = latent_range(a, low, latent_queries(a, low, &first)).num_tiles,
                  inside = tile - first_tile[low];
    reinterpret_cast<WorkerStart*>(a.workspace + a.plan.start_at)[w] =
        WorkerStart{low, inside / of_block, inside % of_block, 0};
  }
}

// Adds up the parts of every 64 rows that several workers shared: a warp for each query row,
// parts in the order of the line.
__global__ void __launch_bounds__(128) combine_latent(const __grid_constant__ LatentArgs a, int32_t most_rows) {
  wait_for_previous();
  let_next_start();
  const int lane = threadIdx.x % 32;
  const int64_t index = int64_t(blockIdx.x) * 4 + threadIdx.x / 32;
  const int32_t seq = int32_t(index / most_rows), row = int32_t(index % most_rows);
  if (seq >= a.num_seqs) return;
  int64_t first;
  const int32_t queries = latent_queries(a, seq, &first), blocks = latent_blocks(a, queries);
  if (blocks == 0 || row >= queries * int32_t(a.heads.d)) return;
  const PlanHeader plan = *reinterpret_cast<const PlanHeader*>(a.workspace);
  const int32_t* first_tile = reinterpret_cast<const int32_t*>(a.workspace + a.plan.first_tile_at);
  const long long of_block = (first_tile[seq + 1] - first_tile[seq]) / blocks,
                  begin = first_tile[seq] + row / kLatentRows * of_block;
  const int first_worker = int(((begin + 1) * plan.workers - 1) / plan.tiles),
            last_worker = int(((begin + of_block) * plan.workers - 1) / plan.tiles);
  if (first_worker == last_worker) return;
  // The first worker came to it after other items, unless it began with it.
  const WorkerStart start = reinterpret_cast<const WorkerStart*>(a.workspace + a.plan.start_at)[first_worker];
  const int first_slot = start.seq == seq && start.head == row / kLatentRows ? 0 : 1;
  float base = -INFINITY, sum = 0.f;
  float4 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int w = first_worker; w <= last_worker; w++) {
    const float* part =
        reinterpret_cast<const float*>(a.workspace + a.plan.partial_at +
                                       (2 * int64_t(w) + (w == first_worker ? first_slot : 0)) * a.plan.partial_bytes);
    const float2 stats = __ldcg(reinterpret_cast<const float2*>(part + kLatentRows * kLatentDim) + row % kLatentRows);
    float4 y[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      y[i] = __ldcg(reinterpret_cast<const float4*>(part + row % kLatentRows * kLatentDim) + i * 32 + lane);
    if (stats.x == -INFINITY) continue;
    const float now = fmaxf(base, stats.x), old = tiles::exp2_fast(base - now), fresh = tiles::exp2_fast(stats.x - now);
    sum = sum * old + stats.y * fresh, base = now;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[i].x = x[i].x * old + y[i].x * fresh, x[i].y = x[i].y * old + y[i].y * fresh;
      x[i].z = x[i].z * old + y[i].z * fresh, x[i].w = x[i].w * old + y[i].w * fresh;
    }
  }
  const int32_t token = int32_t(a.heads.divide(row)), head = row - token * int32_t(a.heads.d);
  const float inverse = finish_row(a, first + token, head, base, sum, lane == 0);
  char* to = a.out.data + (first + token) * a.out.token + int64_t(head) * a.out.head;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int dim = 4 * (i * 32 + lane);
    store_pair(a.out.dtype, to, dim, x[i].x * inverse, x[i].y * inverse),
        store_pair(a.out.dtype, to, dim + 2, x[i].z * inverse, x[i].w * inverse);
  }
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

LatentShape latent_shape(const AttentionParams& p, int num_sms) {
  LatentShape s = {};
  s.max_workers = num_sms;
  s.first_tile_at = aligned(sizeof(PlanHeader));
  s.start_at = s.first_tile_at + aligned((p.num_seqs + 1) * 4);
  s.partial_at = s.start_at + aligned(int64_t(num_sms) * sizeof(WorkerStart));
  s.partial_bytes = aligned(kLatentRows * (kLatentDim + 2) * 4);
  s.bytes = s.partial_at + 2 * num_sms * s.partial_bytes;
  return s;
}

// Whether there may be sequences of at most, and of more than, kMostSplitRows query rows.
bool may_split(const AttentionParams& p) {
  return p.cu_seqlens != nullptr || p.query_len * p.num_heads <= kMostSplitRows;
}
bool may_not_split(const AttentionParams& p) { return p.max_query_len * p.num_heads > kMostSplitRows; }

bool fits(const RowsParams& r, int64_t unit) {
  return r.is_dense && (reinterpret_cast<uintptr_t>(r.data) | uint64_t(r.token | r.head)) % unit == 0;
}

LatentArgs make_args(const AttentionParams& p, int num_sms, bool is_split) {
  LatentArgs a = {};
  a.rows = make_row_finder(p);
  for (int i = 0; i < 2; i++) a.data[i] = p.kv.plane[i].data;
  a.q = p.q, a.out = p.out, a.lse = p.lse, a.lse_token = p.lse_token, a.lse_head = p.lse_head, a.sinks = p.sinks;
  a.cu_seqlens = p.cu_seqlens, a.cu_bytes = p.cu_bytes;
  a.num_seqs = int32_t(p.num_seqs), a.query_len = int32_t(p.query_len), a.max_seq_len = int32_t(p.max_seq_len),
  a.is_causal = p.is_causal, a.is_split = is_split;
  a.heads = make_fast_divider(p.num_heads);
  a.window = p.window, a.num_tokens = p.num_tokens, a.factor = p.scale * 1.44269504f;
  a.workspace = p.workspace, a.plan = latent_shape(p, num_sms);
  return a;
}

template <bool kIsFp8> kvx_status_t launch_latent(const LatentArgs& a, int64_t blocks, void* stream) {
  KVX_TRY(allow_shared_memory(reinterpret_cast<const void*>(&attend_latent<kIsFp8>), LatentConfig::kSharedBytes));
  return launch_early_with("attention_latent", attend_latent<kIsFp8>, dim3(unsigned(blocks)),
                           dim3(LatentConfig::kThreads), LatentConfig::kSharedBytes, stream, a);
}

}  // namespace

bool takes_latent(const AttentionParams& p) {
  const PlaneParams &latent = p.kv.plane[0], &rope = p.kv.plane[1];
  if (!has_warpgroups() || p.head_dim != kLatentDim || p.rope_dim != kRopeDim || p.scale <= 0.f || p.soft_cap > 0.f ||
      !fits_row_finder(p))
    return false;
  if (p.q.dtype != KVX_DTYPE_BF16 || rope.dtype != KVX_DTYPE_BF16 || rope.scale.data || rope.scale.tensor_scale)
    return false;
  const ScaleParams& s = latent.scale;
  if (latent.dtype == KVX_DTYPE_F8_E4M3) {
    if (!s.data || s.tensor_scale || s.dtype != KVX_DTYPE_F32 || s.group_size != 128 || s.group != 4) return false;
    if (s.data != latent.data + kRecordScalesAt || s.block != latent.block || s.token != latent.token)
      return false;  // not a record
    if (rope.data != latent.data + kRecordRopeAt || rope.block != latent.block || rope.token != latent.token)
      return false;
  } else if (latent.dtype != KVX_DTYPE_BF16 || s.data || s.tensor_scale) {
    return false;
  }
  if (!fits(p.q, 16) || !fits(p.out, p.out.dtype == KVX_DTYPE_F32 ? 8 : 4)) return false;
  const int64_t tiles = (p.max_seq_len + kLatentKeys - 1) / kLatentKeys + 1;
  return p.num_tokens * p.num_heads <= kMaxCount && p.num_seqs * tiles * (kMostSplitRows / kLatentRows) <= kMaxCount;
}

uint64_t latent_workspace(const AttentionParams& p, int num_sms) {
  return may_split(p) ? uint64_t(latent_shape(p, num_sms).bytes) : 0;
}

kvx_status_t plan_latent(const AttentionParams& p, int num_sms, void* stream) {
  if (!may_split(p)) return KVX_STATUS_OK;
  return launch_early("plan_latent_tiles", plan_latent_tiles, dim3(1), dim3(kPlanThreads), stream,
                      make_args(p, num_sms, true));
}

kvx_status_t run_latent(const AttentionParams& p, int num_sms, void* stream) {
  const bool is_fp8 = p.kv.plane[0].dtype == KVX_DTYPE_F8_E4M3;
  const auto launch = [&](const LatentArgs& a, int64_t blocks) {
    return is_fp8 ? launch_latent<true>(a, blocks, stream) : launch_latent<false>(a, blocks, stream);
  };
  if (may_split(p)) {
    const LatentArgs a = make_args(p, num_sms, true);
    KVX_TRY(launch(a, num_sms));
    const int64_t rows = std::min<int64_t>(p.max_query_len * p.num_heads, kMostSplitRows);
    KVX_TRY(launch_early("combine_latent", combine_latent, dim3(unsigned((p.num_seqs * rows + 3) / 4)), dim3(128),
                         stream, a, int32_t(rows)));
  }
  if (!may_not_split(p)) return KVX_STATUS_OK;
  // No sequence has more blocks of rows than its own, rounded up: a bound that needs no lengths.
  const int64_t blocks = p.cu_seqlens ? p.num_tokens * p.num_heads / kLatentRows + p.num_seqs
                                      : p.num_seqs * ((p.query_len * p.num_heads + kLatentRows - 1) / kLatentRows);
  return launch(make_args(p, num_sms, false), blocks);
}

}  // namespace cuda
}  // namespace kvx
