// index_scores of bf16 queries on keys of 128 elements that are exact in bf16, on Hopper: keys come as bytes and are
// widened on their way into registers, from where warpgroups multiply them with the queries in shared memory.
//
// A warp has the copy engine bring tiles of 256 keys as they are; four warpgroups widen and multiply, 64 keys each: one
// multiplies while another widens. They also fetch the queries of a group of tokens, in the
// order that keys are widened in.
#pragma once
#include "entry/index_scores/load.cuh"
#include "entry/index_scores/widen.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

constexpr int kWidenThreads = 640, kWidenMultiply = 512;

struct IndexBf16Args {
  IndexArgs index;
  int32_t box;  // keys of a copy: all of a page, or a part of it that divides a tile
};

// D[64 x 64] += A[64 x 16] * B[16 x 64] of bf16; A in registers, B in shared memory and
// K-major. `adds` 0 starts from nothing.
__device__ __forceinline__ void multiply_bf16(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint64_t b, int adds) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
      "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, "
      "%35}, %36, p, 1, 1, 0; }\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(adds));
}

template <class Widen> struct IndexBf16 {
  static constexpr int kKeyBytes = Widen::kRowBytes + Widen::kScaleBytes, kTileBytes = kIndexKeys * Widen::kRowBytes,
                       kStages = kTileBytes <= 16384   ? 6
                                 : kTileBytes <= 32768 ? 4
                                                       : 2;
  using Keys = tiles::Ring<kStages, kTileBytes>;
  // A token's queries are two columns of 128 bytes: all heads' first 64 elements, then their last.
  static constexpr int kColumnBytes = kIndexHeads * 128, kQueryBytes = 2 * kColumnBytes,
                       kQueriesAt = kStages * kTileBytes, kScalesAt = kQueriesAt + kIndexTokens * kQueryBytes;
  static constexpr int kWeightsAt = kScalesAt + kStages * kIndexKeys * Widen::kScaleBytes,
                       kTilesAt = kWeightsAt + kIndexTokens * kIndexHeads * 4;
  static constexpr int kBarriersAt = kTilesAt + kStages * int(sizeof(IndexTile)),
                       kSharedBytes = kBarriersAt + Keys::kBarrierBytes + 1024;  // to align it
  static_assert(kBarriersAt % 8 == 0 && kSharedBytes <= 227 * 1024, "one block of threads an SM");

  const IndexBf16Args& a;
  char* shared;
  uint32_t at;

  __device__ __forceinline__ Keys keys() const { return Keys{at, at + kBarriersAt}; }
  __device__ __forceinline__ IndexTile* tile_of(const Keys& ring) const {
    return reinterpret_cast<IndexTile*>(shared + kTilesAt) + ring.stage();
  }
  __device__ __forceinline__ char* scales_of(const Keys& ring) const {
    return shared + kScalesAt + ring.stage() * kIndexKeys * Widen::kScaleBytes;
  }

  struct None {};
  __device__ __forceinline__ void load_queries(None, const IndexUnit&) const {}
  __device__ __forceinline__ void copy_keys(const Keys& ring, int box_index, int32_t page, uint32_t row) const {
    const RowPages& k = a.index.p.keys;
    const char* from = k.data + page * k.page;
    tiles::copy_run(ring.tile() + box_index * a.box * Widen::kRowBytes, from + int64_t(row) * Widen::kRowBytes,
                    a.box * Widen::kRowBytes, ring.full());
    if (Widen::kScaleBytes) {
      tiles::copy_run(tiles::shared_address(scales_of(ring) + box_index * a.box * Widen::kScaleBytes),
                      from + int64_t(k.rows) * Widen::kRowBytes + int64_t(row) * Widen::kScaleBytes,
                      a.box * Widen::kScaleBytes, ring.full());
    }
  }

  // Four elements of a head's row, as bf16.
  __device__ __forceinline__ uint2 query_at(int32_t token, int32_t head, int32_t d) const {
    const RowsParams& q = a.index.p.q;
    if (head >= a.index.p.num_heads) return make_uint2(0, 0);
    const char* from = q.data + token * q.token + head * q.head;
    if (q.dtype == KVX_DTYPE_BF16) return *reinterpret_cast<const uint2*>(from + d * 2);
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(from + d);
    uint32_t x[4];
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = __float_as_uint(e4m3_to_f32(uint8_t(codes >> 8 * i)));
    return make_uint2(x[0] >> 16 | (x[1] & 0xffff0000u), x[2] >> 16 | (x[3] & 0xffff0000u));
  }

  // All who multiply. Eight threads a head, in two columns; neighbours write to other banks.
  __device__ __forceinline__ void fetch_queries(const IndexTile& tile) const {
    const IndexScoresParams& p = a.index.p;
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;"
                 : "=r"(thread));  // addresses are found anew for each group: kept, they would crowd out products
    thread -= 128;
    const int t = thread % 4, head = thread / 4 % kIndexHeads, column = thread / 256;
    tiles::meet(1, kWidenMultiply);  // products with the queries before are done
    for (int i = 0; i < tile.num_tokens; i++) {
      char* to = shared + kQueriesAt + i * kQueryBytes + column * kColumnBytes + head * 128 + 4 * t;
      uint2 x[4];
#pragma unroll
      for (int s = 0; s < 4; s++) x[s] = query_at(tile.token + i, head, 32 * t + 4 * (4 * column + s));
#pragma unroll
      for (int s = 0; s < 4; s++) {
        *reinterpret_cast<uint32_t*>(to + (((2 * s) ^ (head % 8)) << 4)) = x[s].x;
        *reinterpret_cast<uint32_t*>(to + (((2 * s + 1) ^ (head % 8)) << 4)) = x[s].y;
      }
    }
    float* weights = reinterpret_cast<float*>(shared + kWeightsAt);
    if (thread < tile.num_tokens * kIndexHeads) {
      const int i = thread / kIndexHeads, h = thread % kIndexHeads;
      weights[thread] =
          h < p.num_heads
              ? *reinterpret_cast<const float*>(p.weights + (tile.token + i) * p.weight_token + h * p.weight_head)
              : 0.f;
    }
    tiles::show_to_multiplications();
    tiles::meet(1, kWidenMultiply);
  }

  __device__ __forceinline__ void multiply() const {
    const int lane = threadIdx.x % 32, t = lane % 4,
              first = (threadIdx.x / 128 - 1) * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int box_shift = 31 - __clz(a.box);
    const float* weights = reinterpret_cast<const float*>(shared + kWeightsAt) + 2 * t;
    const uint64_t query_matrix = tiles::matrix_descriptor(at + kQueriesAt, 16, 1024);
    Keys ring = keys();
    while (true) {
      ring.wait_full();
      const IndexTile tile = *tile_of(ring);
      if (tile.num_tokens == 0) return;
      if (tile.is_first) fetch_queries(tile);
      uint32_t low[16], high[16];  // rows `first` and `first + 8`
      const char* scales = scales_of(ring) + first * Widen::kScaleBytes;
      const float low_scale = Widen::widen(low, ring.tile() + first * Widen::kRowBytes, scales, t);
      const float high_scale =
          Widen::widen(high, ring.tile() + (first + 8) * Widen::kRowBytes, scales + 8 * Widen::kScaleBytes, t);
      __syncwarp();
      ring.give_back(lane == 0);
#pragma unroll 1
      for (int i = 0; i < tile.num_tokens; i++) {
        float products[32];
        tiles::begin_multiplications();
#pragma unroll
        for (int s = 0; s < 8; s++)
          multiply_bf16(products, low[2 * s], high[2 * s], low[2 * s + 1], high[2 * s + 1],
                        query_matrix + i * (kQueryBytes / 16) + s / 4 * (kColumnBytes / 16) + s % 4 * 2, s > 0);
        tiles::commit_multiplications();
        tiles::wait_multiplications<0>();
        tiles::hold(products);
        store_score(a.index, tile, i, first + 8 * (t & 1), box_shift, sum_heads(products, weights + i * kIndexHeads),
                    t & 1 ? high_scale : low_scale);
      }
    }
  }
};

template <class Widen> __global__ void __launch_bounds__(kWidenThreads, 1)
    index_scores_bf16(const __grid_constant__ IndexBf16Args a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Kernel = IndexBf16<Widen>;
  extern __shared__ char raw[];
  char* shared = raw + (1024 - (tiles::shared_address(raw) & 1023)) % 1024;
  const Kernel s{a, shared, tiles::shared_address(shared)};
  if (threadIdx.x == 0) {
    s.keys().init(1, 16 * tiles::arrivals_of(32));
    tiles::show_barriers();
  }
  __syncthreads();
  let_next_start();
  wait_for_previous();
  if (threadIdx.x < 32) load_tiles(s, typename Kernel::None{});
  else if (threadIdx.x < 128) fill_hidden(a.index);
  else s.multiply();
#endif
}

}  // namespace cuda
}  // namespace kvx
