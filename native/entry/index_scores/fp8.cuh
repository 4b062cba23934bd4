// index_scores of e4m3 queries on e4m3 keys of 128 elements and one f32 scale, on Hopper: products on tensor cores as
// the bytes are.
//
// A warp has the copy engine bring tiles of 256 keys, page by page, and the queries of a group of tokens; two
// warpgroups multiply, 128 keys each: keys down, heads across. Three warps more fill in -inf. The grid is as large as
// the device, so that a graph may replay any step.
#pragma once
#include "entry/index_scores/load.cuh"
#include "tiles/tensor_map.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

constexpr int kIndexThreads = 384;

struct IndexFp8Args {
  IndexArgs index;
  CUtensorMap keys, queries;
  int32_t box;  // keys of a copy: all of a page, or a part of it that divides a tile
};

struct IndexFp8 {
  static constexpr int kKeyBytes = kIndexDim + 4, kStages = 4, kTileBytes = kIndexKeys * kIndexDim,
                       kQueryBytes = kIndexHeads * kIndexDim, kGroupBytes = kIndexTokens * kQueryBytes;
  using Keys = tiles::Ring<kStages, kTileBytes>;
  using Queries = tiles::Ring<2, kGroupBytes>;
  static constexpr int kQueriesAt = kStages * kTileBytes, kScalesAt = kQueriesAt + 2 * kGroupBytes,
                       kWeightsAt = kScalesAt + kStages * kIndexKeys * 4;
  static constexpr int kTilesAt = kWeightsAt + 2 * kIndexTokens * kIndexHeads * 4,
                       kBarriersAt = kTilesAt + kStages * int(sizeof(IndexTile));
  static constexpr int kBytes = kBarriersAt + Keys::kBarrierBytes + Queries::kBarrierBytes,
                       kSharedBytes = kBytes + 1024;  // to align it
  static_assert(kBarriersAt % 8 == 0 && kSharedBytes <= 227 * 1024, "one block of threads an SM");

  const IndexFp8Args& a;
  char* shared;
  uint32_t at;

  __device__ __forceinline__ Keys keys() const { return Keys{at, at + kBarriersAt}; }
  __device__ __forceinline__ Queries queries() const {
    return Queries{at + kQueriesAt, at + kBarriersAt + Keys::kBarrierBytes};
  }
  __device__ __forceinline__ IndexTile* tile_of(const Keys& ring) const {
    return reinterpret_cast<IndexTile*>(shared + kTilesAt) + ring.stage();
  }
  __device__ __forceinline__ const float* scales_of(const Keys& ring) const {
    return reinterpret_cast<const float*>(shared + kScalesAt) + ring.stage() * kIndexKeys;
  }
  __device__ __forceinline__ const float* weights_of(const Queries& ring) const {
    return reinterpret_cast<const float*>(shared + kWeightsAt) + ring.stage() * kIndexTokens * kIndexHeads;
  }

  // Rows of heads that are not there: zeros, once.
  __device__ __forceinline__ void clear_queries() const {
    const int from = a.index.p.num_heads * kIndexDim / 16, chunks = kQueryBytes / 16 - from;
    for (int i = threadIdx.x; i < chunks * 2 * kIndexTokens; i += kIndexThreads)
      tiles::store_shared_16(at + kQueriesAt + i / chunks * kQueryBytes + (from + i % chunks) * 16,
                             make_uint4(0, 0, 0, 0));
    tiles::show_to_multiplications();
  }

  __device__ __forceinline__ void load_queries(Queries& ring, const IndexUnit& u) const {
    const IndexScoresParams& p = a.index.p;
    const int lane = threadIdx.x % 32;
    ring.wait_free();
    if (tiles::is_elected()) {
      tiles::arrive_and_expect(ring.full(), u.num_tokens * p.num_heads * kIndexDim);
      for (int i = 0; i < u.num_tokens; i++)
        tiles::copy_box(ring.tile() + i * kQueryBytes, a.queries, 0, 0, 0, u.token + i, ring.full());
    }
    __syncwarp();
    const uint32_t to = tiles::shared_address(weights_of(ring));
    for (int i = lane; i < u.num_tokens * kIndexHeads; i += 32) {
      const int head = i % kIndexHeads;
      const bool is_there = head < p.num_heads;
      tiles::copy_4(to + i * 4,
                    p.weights + (u.token + i / kIndexHeads) * p.weight_token + (is_there ? head : 0) * p.weight_head,
                    is_there ? 4 : 0);
    }
    ring.arrive_full_when_copied();
    ring.next();
  }

  __device__ __forceinline__ void copy_keys(const Keys& ring, int box_index, int32_t page, uint32_t row) const {
    const RowPages& k = a.index.p.keys;
    tiles::copy_box(ring.tile() + box_index * a.box * kIndexDim, a.keys, 0, 0, int32_t(row), page, ring.full());
    tiles::copy_run(tiles::shared_address(scales_of(ring) + box_index * a.box),
                    k.data + page * k.page + int64_t(k.rows) * kIndexDim + row * 4, a.box * 4, ring.full());
  }

  // Two warpgroups, 128 keys each as two times 64.
  __device__ __forceinline__ void multiply() const {
    const int half = threadIdx.x / 128 - 1, lane = threadIdx.x % 32, t = lane % 4;
    const int own =
        half * 128 + threadIdx.x / 32 % 4 * 16 + lane / 4 + 8 * (t & 1);  // the row whose sum this thread ends up with
    const int box_shift = 31 - __clz(a.box);
    Keys key_ring = keys();
    Queries query_ring = queries();
    while (true) {
      key_ring.wait_full();
      const IndexTile tile = *tile_of(key_ring);
      if (tile.num_tokens == 0) return;
      if (tile.is_first) query_ring.wait_full();
      const uint64_t key_matrix = tiles::matrix_descriptor(key_ring.tile() + half * 128 * kIndexDim, 16, 1024),
                     query_matrix = tiles::matrix_descriptor(query_ring.tile(), 16, 1024);
      const float* weights = weights_of(query_ring) + 2 * t;
      const float scale[2] = {scales_of(key_ring)[own], scales_of(key_ring)[own + 64]};
      float sums[2][32];
      const auto start = [&](int m, int i) {
        tiles::hold(sums[m]);
        tiles::begin_multiplications();
#pragma unroll
        for (int k = 0; k < kIndexDim / 32; k++)
          tiles::Warpgroup<tiles::E4m3Numbers, 64>::multiply(sums[m], key_matrix + m * (64 * kIndexDim / 16) + 2 * k,
                                                             query_matrix + i * (kQueryBytes / 16) + 2 * k, k > 0);
        tiles::commit_multiplications();
      };
      const auto finish = [&](int m, int i) {
        store_score(a.index, tile, i, own + 64 * m, box_shift, sum_heads(sums[m], weights + i * kIndexHeads), scale[m]);
      };
#pragma unroll 1
      for (int i = 0; i < tile.num_tokens; i++) {
        // The second half is multiplied while the first is summed up, and the other warpgroup's while the second is.
        start(0, i), start(1, i);
        tiles::wait_multiplications<1>();
        tiles::hold(sums[0]);
        finish(0, i);
        tiles::wait_multiplications<0>();
        tiles::hold(sums[1]);
        finish(1, i);
      }
      __syncwarp();
      key_ring.give_back(lane == 0);
      if (tile.is_last) {
        __syncwarp();
        query_ring.give_back(lane == 0);
      }
    }
  }
};

__global__ void __launch_bounds__(kIndexThreads, 1) index_scores_fp8(const __grid_constant__ IndexFp8Args a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  char* shared = raw + (1024 - (tiles::shared_address(raw) & 1023)) % 1024;
  const IndexFp8 s{a, shared, tiles::shared_address(shared)};
  if (threadIdx.x == 0) {
    s.keys().init(1, 8 * tiles::arrivals_of(32));
    s.queries().init(1 + 32, 8 * tiles::arrivals_of(32));
    tiles::show_barriers();
    tiles::prefetch_map(a.keys), tiles::prefetch_map(a.queries);
  }
  if (a.index.p.num_heads < kIndexHeads) s.clear_queries();
  __syncthreads();
  let_next_start();
  wait_for_previous();
  if (threadIdx.x < 32) load_tiles(s, s.queries());
  else if (threadIdx.x < 128) fill_hidden(a.index);
  else s.multiply();
#endif
}

}  // namespace cuda
}  // namespace kvx
