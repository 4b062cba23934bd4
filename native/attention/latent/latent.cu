// Latent attention on Hopper: which calls it takes, how their work is shared out, and the sums of what was split.
#include "attention/latent/latent.cuh"

#include <algorithm>

#include "attention/cuda/attention.cuh"
#include "tiles/tensor_map.h"

namespace kvx {
namespace cuda {

namespace {

// How many workers share the tiles. Where all sequences are as long, workers with whole ones have no parts to add up:
// worth it as long as none has kPartTiles more than an equal share. By all threads of the block.
__device__ __forceinline__ int32_t count_workers(const LatentArgs& a, const int32_t* first_tile, int32_t tiles) {
  constexpr int kPartTiles = 4;
  const int32_t most = a.plan.max_workers / a.together, all = min((tiles + kLeastTiles - 1) / kLeastTiles, most);
  bool is_same = true;
  for (int32_t seq = int32_t(threadIdx.x); seq < a.num_seqs; seq += kPlanThreads)
    is_same &= first_tile[seq + 1] - first_tile[seq] == first_tile[1];
  if (!__syncthreads_and(is_same) || tiles == 0) return all;
  int64_t first;
  const int32_t of_one = latent_range(a, 0, latent_queries(a, 0, &first)).num_tiles, ones = tiles / of_one,
                each = (ones + most - 1) / most;
  return ones % each == 0 && each * of_one <= tiles / most + kPartTiles ? ones / each : all;
}

// One block of threads: a running sum of tiles over the sequences, then every worker's place in it.
__global__ void __launch_bounds__(kPlanThreads) plan_latent_tiles(const __grid_constant__ LatentArgs a) {
  wait_for_previous();
  int32_t* first_tile = reinterpret_cast<int32_t*>(a.workspace + a.plan.first_tile_at);
  const int32_t tiles = sum_tiles(a.num_seqs, first_tile, [&](int32_t seq) {
    int64_t first;
    const int32_t queries = latent_queries(a, seq, &first), groups = latent_groups(a, queries);
    return groups ? groups * latent_range(a, seq, queries).num_tiles : 0;
  });
  const int32_t workers = count_workers(a, first_tile, tiles);
  bool is_cut = false;
  // Those without a share have to know it: what a plan before this one left to them is still there.
  for (int32_t w = int32_t(threadIdx.x); w < a.plan.max_workers; w += kPlanThreads) {
    LatentStart start = {};
    if (w < workers) {
      const int32_t tile = int32_t((long long)w * tiles / workers), end = int32_t((w + 1ll) * tiles / workers);
      const int32_t seq = sequence_of(first_tile, a.num_seqs, tile, 1);
      int64_t first;
      const int32_t queries = latent_queries(a, seq, &first), length = clamped_length(a.rows.kv, seq, a.max_seq_len),
                    of_group = seq_range(length, queries, a.window, a.is_causal, kLatentKeys).num_tiles,
                    inside = tile - first_tile[seq];
      start = {seq, inside / of_group, inside % of_group, end - tile, int32_t(first), queries, length, 0};
      is_cut |= start.tile > 0;
    }
    reinterpret_cast<LatentStart*>(a.workspace + a.plan.start_at)[w] = start;
  }
  is_cut = __syncthreads_or(is_cut) != 0;
  if (threadIdx.x == 0) *reinterpret_cast<LatentHeader*>(a.workspace) = LatentHeader{tiles, workers, is_cut};
}

// Adds up the parts of every 64 rows that several workers shared, in the order of the line: a query row is one warp's,
// or that of kWarps where there are so few rows that one warp's reads would take as long as the attention itself: four
// with a quarter of its columns each, and of fewer rows yet four such teams, with every fourth part each.
template <int kWarps>
__global__ void __launch_bounds__(kWarps < 4 ? 128 : kWarps * 32)
    combine_latent(const __grid_constant__ LatentArgs a, int32_t most_rows) {
  constexpr int kQuarters = kWarps < 4 ? 1 : 4, kTeams = kWarps / kQuarters,
                kFours = 4 / kQuarters;  // a lane's, of four columns each
  let_next_start();
  // The plan and the sequences' ends are older than the launch before this one, which lets this one start only after it
  // has waited for them (attend_latent): they are read ahead of its end. Nobody leaves before that: whoever comes after
  // waits for this launch alone.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quarter = warp % kQuarters,
            team = warp / kQuarters % kTeams;
  const int64_t index = (int64_t(blockIdx.x) * (blockDim.x / 32) + warp) / kWarps;
  const int32_t seq = int32_t(index / most_rows), row = int32_t(index % most_rows);
  const int32_t block = row / kLatentRows, group = block / a.together, member = block % a.together;
  int64_t first = 0;
  const int32_t queries = seq < a.num_seqs ? latent_queries(a, seq, &first) : 0, groups = latent_groups(a, queries);
  int first_worker = 0, last_worker = 0, first_slot = 0;
  const LatentHeader plan = load_now<LatentHeader>(a.workspace);
  if (plan.is_cut && groups > 0 && row < queries * int32_t(a.heads.d)) {
    const int32_t* first_tile = reinterpret_cast<const int32_t*>(a.workspace + a.plan.first_tile_at);
    const long long from = __ldcg(first_tile + seq), of_group = (__ldcg(first_tile + seq + 1) - from) / groups,
                    begin = from + group * of_group;
    first_worker = int(((begin + 1) * plan.workers - 1) / plan.tiles),
    last_worker = int(((begin + of_group) * plan.workers - 1) / plan.tiles);
    // The first worker came to it after other items, unless it began with it.
    const LatentStart start =
        load_now<LatentStart>(a.workspace + a.plan.start_at + first_worker * int64_t(sizeof(LatentStart)));
    first_slot = start.seq == seq && start.group == group ? 0 : 1;
  }
  wait_for_previous();
  if (first_worker >= last_worker) return;  // one worker had it alone, or there is none
  const auto part_of = [&](int w) {
    return LatentPart::at(a, 2 * (int64_t(w) * a.together + member) + (w == first_worker ? first_slot : 0));
  };
  float base = -INFINITY, sum = 0.f;
  float4 x[kFours];
#pragma unroll
  for (int i = 0; i < kFours; i++) x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int from = first_worker; from <= last_worker; from += 32) {  // a lane has a part's base and sum
    const bool is_there = from + lane <= last_worker;
    const float2 mine = is_there ? __ldcg(part_of(from + lane).stats + row % kLatentRows) : make_float2(-INFINITY, 0.f);
    float now = fmaxf(base, mine.x);
    for (int hop = 1; hop < 32; hop *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, hop));
    if (__all_sync(0xffffffffu, mine.y == 0.f)) continue;  // nothing was seen
    const float at = now == -INFINITY ? 0.f : now;         // of sums that are NaN
    const float old = tiles::exp2_fast(base - at), factor = tiles::exp2_fast(mine.x - at);
    float fresh = mine.y * factor;
    for (int hop = 1; hop < 32; hop *= 2) fresh += __shfl_xor_sync(0xffffffffu, fresh, hop);
    sum = sum * old + fresh, base = now;
#pragma unroll
    for (int i = 0; i < kFours; i++) x[i].x *= old, x[i].y *= old, x[i].z *= old, x[i].w *= old;
    const int num_parts = min(32, last_worker + 1 - from);
#pragma unroll 8 / kFours + 2
    for (int k = team; k < num_parts; k += kTeams) {
      const float by = __shfl_sync(0xffffffffu, factor, k);
      const float4* part = reinterpret_cast<const float4*>(part_of(from + k).row(row % kLatentRows));
#pragma unroll
      for (int i = 0; i < kFours; i++) {
        const float4 y = __ldcg(part + (quarter * kFours + i) * 32 + lane);
        if (by > 0.f) x[i].x += y.x * by, x[i].y += y.y * by, x[i].z += y.z * by, x[i].w += y.w * by;
      }
    }
  }
  if constexpr (kTeams > 1) {  // all warps of the block are the row's, and have the same base
    __shared__ float4 others[kTeams - 1][kQuarters][32];
    static_assert(kFours == 1, "a quarter of the columns");
    if (team) others[team - 1][quarter][lane] = x[0];
    __syncthreads();
    if (team) return;
#pragma unroll
    for (int i = 0; i < kTeams - 1; i++) {
      const float4 y = others[i][quarter][lane];
      x[0].x += y.x, x[0].y += y.y, x[0].z += y.z, x[0].w += y.w;
    }
  }
  const LatentOut out = latent_out(a, first, row, row + 1, base, sum, lane == 0 && quarter == 0);
#pragma unroll
  for (int i = 0; i < kFours; i++) {
    const int dim = 4 * ((quarter * kFours + i) * 32 + lane);
    store_pair(a.out.dtype, out.to, dim, x[i].x * out.by, x[i].y * out.by),
        store_pair(a.out.dtype, out.to, dim + 2, x[i].z * out.by, x[i].w * out.by);
  }
}

int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

LatentShape latent_shape(const AttentionParams& p, int num_sms) {
  LatentShape s = {};
  s.max_workers = num_sms;
  s.first_tile_at = aligned(sizeof(LatentHeader));
  s.start_at = s.first_tile_at + aligned((p.num_seqs + 1) * 4);
  s.partial_at = s.start_at + aligned(int64_t(num_sms) * sizeof(LatentStart));
  s.partial_bytes = aligned(LatentPart::kBytes);
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

// Two, where every query has an even number of blocks of 64 rows. By the heads alone: a plan serves calls with
// cu_seqlens and without.
int workers_together(const AttentionParams& p) { return p.num_heads % (2 * kLatentRows) == 0 ? 2 : 1; }

LatentArgs make_args(const AttentionParams& p, int num_sms, bool is_split) {
  LatentArgs a = {};
  a.rows = make_row_finder(p);
  for (int i = 0; i < 2; i++) a.data[i] = p.kv.plane[i].data;
  a.q = p.q, a.out = p.out, a.lse = p.lse, a.lse_token = p.lse_token, a.lse_head = p.lse_head, a.sinks = p.sinks;
  a.cu_seqlens = p.cu_seqlens, a.cu_bytes = p.cu_bytes;
  a.num_seqs = int32_t(p.num_seqs), a.query_len = int32_t(p.query_len), a.max_seq_len = int32_t(p.max_seq_len),
  a.is_causal = p.is_causal, a.is_split = is_split, a.together = workers_together(p);
  a.stores_16 = fits(p.out, 16);
  a.heads = make_fast_divider(p.num_heads);
  a.window = p.window, a.num_tokens = p.num_tokens, a.factor = p.scale * 1.44269504f;
  a.workspace = p.workspace, a.plan = latent_shape(p, num_sms);
  return a;
}

// For whole tiles to go through the copy engine. A ragged table may have a token's neighbours in other blocks. A driver
// that refuses a map is no reason to fail: rows of any cache can be copied.
void make_maps(const AttentionParams& p, LatentArgs* a) {
  a->box_shift = -1;
  const int64_t format = p.kv.table.format;
  if (p.kv.plane[0].dtype != KVX_DTYPE_BF16 || (format != KVX_BLOCK_TABLE_PACKED && format != KVX_BLOCK_TABLE_PAGE_CSR))
    return;
  for (int i = 0; i < 2; i++) {
    const MappedPlane plane{&p.kv.plane[i], 1, p.kv.block_size, p.kv.num_blocks, kLatentKeys};
    if (!fits_tensor_map(plane) || make_tensor_map(&a->maps[i], plane) != KVX_STATUS_OK) return;
  }
  for (int64_t box = box_tokens(p.kv.block_size, kLatentKeys); box > 0; box /= 2) a->box_shift++;
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
    LatentArgs a = make_args(p, num_sms, true);
    make_maps(p, &a);
    KVX_TRY(launch(a, num_sms));
    const int64_t rows = std::min<int64_t>(p.max_query_len * p.num_heads, kMostSplitRows);
    const int64_t all = p.num_seqs * rows;
    if (all <= num_sms)
      KVX_TRY(
          launch_early("combine_latent", combine_latent<16>, dim3(unsigned(all)), dim3(512), stream, a, int32_t(rows)));
    else if (all <= 16 * num_sms)
      KVX_TRY(
          launch_early("combine_latent", combine_latent<4>, dim3(unsigned(all)), dim3(128), stream, a, int32_t(rows)));
    else
      KVX_TRY(launch_early("combine_latent", combine_latent<1>, dim3(unsigned((all + 3) / 4)), dim3(128), stream, a,
                           int32_t(rows)));
  }
  if (!may_not_split(p)) return KVX_STATUS_OK;
  // No sequence has more blocks of rows than its own, rounded up: a bound that needs no lengths.
  const int64_t blocks = p.cu_seqlens ? p.num_tokens * p.num_heads / kLatentRows + p.num_seqs
                                      : p.num_seqs * ((p.query_len * p.num_heads + kLatentRows - 1) / kLatentRows);
  LatentArgs a = make_args(p, num_sms, false);
  make_maps(p, &a);
  return launch(a, blocks);
}

}  // namespace cuda
}  // namespace kvx
