// Attention over a window and chosen entries on Hopper: 64 heads of a token against tiles of 64 keys of 512 elements,
// which are values too.
//
// Four warpgroups have a job each, and hand tiles on through barriers, as in attention/latent/latent.cuh:
//
//   load     rows of the list into two stages (attention/sparse/load.cuh), FP8 rows as f16 (load_fp8.cuh)
//   soften   scores, and the weights they become (64 x 64, left in shared memory) while the values of the tile before
//            are added
//   add, 2x  weights by values, 256 of the 512 columns each, sums in registers
//
// Where tokens are few, the keys of one are split over blocks of threads, and a second launch adds up their parts.
#pragma once
#include <type_traits>

#include "attention/sparse/head.cuh"
#include "attention/sparse/load_fp8.cuh"
#include "tiles/softmax.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

constexpr int kMostTurned = 64;  // elements of the output that are turned back: its last

struct SparseConfig {
  static constexpr int kThreads = 512;
  static constexpr int kQueryAt = 0;
  static constexpr int kStagesAt = kQueryAt + kSparseTileBytes;
  static constexpr int kWeightsAt = kStagesAt + SparseRing::kStages * kSparseTileBytes;  // [4][128 threads] of 16 bytes
  static constexpr int kShrinkAt =
      kWeightsAt + kSparseRows * kSparseKeys * 2;  // what sums are multiplied by before the tile, [64 rows]
  static constexpr int kStatsAt = kShrinkAt + kSparseRows * 4;  // base and sum of the rows
  static constexpr int kValidAt = kStatsAt + kSparseRows * 8;   // [4 tiles][4 warps], a bit a key, twice
  static constexpr int kBarriersAt = kValidAt + 4 * 4 * 4;      // of the ring, then weights full and free
  static constexpr int kGrowAt = kShrinkAt;  // FP8: what a row's scores are multiplied by; read by its warp at first
  static constexpr int kWideAt = kBarriersAt + SparseRing::kBarrierBytes + 2 * 8;  // FP8: whether some row did not fit
  static constexpr int kItemAt = kWideAt + 16;
  static constexpr int kRawAt = (kItemAt + int(sizeof(SparseItem)) + 15) / 16 * 16;
  static constexpr int kFinderAt = kRawAt + SparseLoad::kRawBytes;
  static_assert(SparseLoad::kRawBytes == SparseLoadFp8::kRawBytes, "either is followed by the finder's slots");
  static constexpr int kSharedBytes = kFinderAt + 128 * (KeyFinder::kSlotBytes + 8);
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a block of threads");
};

__device__ __forceinline__ void store_sparse_pair(int dtype, char* row, int dim, float x, float y) {
  if (dtype == KVX_DTYPE_F32) *reinterpret_cast<float2*>(row + dim * 4) = make_float2(x, y);
  else
    *reinterpret_cast<uint32_t*>(row + dim * 2) =
        dtype == KVX_DTYPE_BF16 ? tiles::Bf16Numbers::pack(x, y) : tiles::F16Numbers::pack(x, y);
}

template <bool kIsFp8> struct SparseTile {
  using C = SparseConfig;
  using Numbers =
      typename std::conditional<kIsFp8, tiles::F16Numbers, tiles::Bf16Numbers>::type;  // keys, queries, weights
  using Multiply = tiles::Warpgroup<Numbers, 64>;
  using Add = tiles::Warpgroup<Numbers, 128>;
  static constexpr int kQueriesMeet = 3;  // where those who wrote the queries pass, and who multiplies them waits
  static constexpr float kUnit = kIsFp8 ? 1.f / (1 << SparseLoadFp8::kUnit) : 1.f;  // of keys in the stages
  const SparseArgs& a;
  const SparseItem& w;
  char* shared;
  uint32_t at;
  SparseRing ring;

  __device__ __forceinline__ uint32_t weights_full() const { return at + C::kBarriersAt + SparseRing::kBarrierBytes; }
  __device__ __forceinline__ uint32_t weights_free() const { return weights_full() + 8; }

  __device__ __forceinline__ void init_barriers() const {
    ring.init(128, 8 * tiles::arrivals_of(32));
    tiles::init_barrier(weights_full(), 128), tiles::init_barrier(weights_free(), 8 * tiles::arrivals_of(32));
    tiles::show_barriers();
  }

  // ---- queries, by those who add and have nothing to do yet: half a row of 512 at a time, eight rows a warp

  __device__ __forceinline__ uint32_t query_at(uint32_t row, int half) const {
    return at + C::kQueryAt + sparse_chunk_at(threadIdx.x % 256 / 32 * 8 + row, half * 32 + threadIdx.x % 32);
  }
  // On their way when this returns. Which token and heads these are does not depend on what the item is found to be.
  __device__ __forceinline__ void ask_queries() const {
    const uint32_t token = a.head_groups.divide(blockIdx.x),
                   first_head = (blockIdx.x - token * a.head_groups.d) * kSparseRows + threadIdx.x % 256 / 32 * 8;
    const char* row = a.p.q.data + token * a.p.q.token + first_head * a.p.q.head + threadIdx.x % 32 * 16;
#pragma unroll
    for (uint32_t r = 0; r < 8; r++, row += a.p.q.head) {
      const bool is_there = int32_t(first_head + r) < a.p.num_heads;
      for (int half = 0; half < 2; half++) tiles::copy_16(query_at(r, half), row + half * 512, is_there ? 16 : 0);
    }
    tiles::commit_copies();
  }
  // A lane looks at what it asked for itself. As f16 by a power of two that is exact, which the row's scores are
  // multiplied by again.
  __device__ __forceinline__ void finish_queries() const {
    tiles::wait_copies<0>();
    if constexpr (kIsFp8) {
#pragma unroll 2
      for (uint32_t r = 0; r < 8; r++) {
        uint4 x[2] = {tiles::load_shared_16(query_at(r, 0)), tiles::load_shared_16(query_at(r, 1))};
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
          most = __vmaxu2(__vmaxu2(__vmaxu2(x[i].x & 0x7fff7fffu, x[i].y & 0x7fff7fffu),
                                   __vmaxu2(x[i].z & 0x7fff7fffu, x[i].w & 0x7fff7fffu)),
                          most);
        most = __reduce_max_sync(0xffffffffu, max(most >> 16, most & 0xffffu)) >> 7;  // the exponent, 127 more
        const int exponent = most > 0 && most < 255 ? min(max(int(most) - 127 - 8, -100), 119) : 0;
        const float shrink = __uint_as_float(uint32_t(127 - exponent) << 23);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const auto narrow = [&](uint32_t w) {
            return Numbers::pack(__uint_as_float(w << 16) * shrink, __uint_as_float(w & 0xffff0000u) * shrink);
          };
          tiles::store_shared_16(query_at(r, i),
                                 make_uint4(narrow(x[i].x), narrow(x[i].y), narrow(x[i].z), narrow(x[i].w)));
        }
        if (threadIdx.x % 32 == 0)
          reinterpret_cast<float*>(shared + C::kGrowAt)[threadIdx.x % 256 / 32 * 8 + r] =
              __uint_as_float(uint32_t(127 + exponent) << 23) * kUnit;
      }
    }
    tiles::show_to_multiplications();
  }

  // ---- soften. Rows of a thread's scores are r0 = 16 * warp + lane / 4 and r0 + 8.

  __device__ __forceinline__ void multiply_scores(float (&s)[32]) const {
    const uint64_t queries = tiles::matrix_descriptor(tiles::for_all_lanes(at + C::kQueryAt), 16, 1024),
                   keys = tiles::matrix_descriptor(tiles::for_all_lanes(ring.tile()), 16, 1024);
    ring.wait_full();
    tiles::show_to_multiplications();
    tiles::hold(s);
    tiles::begin_multiplications();
#pragma unroll
    for (int k = 0; k < kSparseDim / 16; k++) {
      const uint32_t step = ((k / 4) * kSparseColumnBytes + (k % 4) * 32) >> 4;
      Multiply::multiply(s, queries + step, keys + step, k > 0);
    }
    tiles::commit_multiplications();
    tiles::wait_multiplications<0>();
    tiles::hold(s);
  }

  __device__ __forceinline__ void mask(float (&s)[32]) const {
    const uint4 valid = *reinterpret_cast<const uint4*>(shared + C::kValidAt + ring.step % 4 * 16);
    if ((valid.x & valid.y & valid.z & valid.w) == 0xffffffffu) return;
    const uint32_t word[4] = {valid.x, valid.y, valid.z, valid.w};
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        if (word[n / 2] >> (n % 2 * 8 + 2 * t + e) & 1) continue;
        s[4 * n + e] = s[4 * n + 2 + e] = -INFINITY;
      }
  }

  __device__ __forceinline__ void soften() {
    tiles::meet(kQueriesMeet, 384);
    const int thread = threadIdx.x % 128, g = thread % 32 / 4, t = thread % 4;
    tiles::TileSoftmax<Numbers, false> softmax;
    float s[32], factors[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
      factors[h] = kIsFp8 ? a.factor * reinterpret_cast<const float*>(shared + C::kGrowAt)[thread / 32 * 16 + g + 8 * h]
                          : a.factor;
    __syncwarp();
    for (int32_t i = 0, n = w.num_tiles; i < n; i++) {
      multiply_scores(s);
      mask(s);
      float shrink[2];
      uint4 weights[4];
      softmax.weigh_tile(s, factors, 1.f, weights, shrink);
      // A thread of `add` has the rows of the thread of the same number here: weights pass as they stand.
      tiles::wait(weights_free(), (ring.step & 1) ^ 1);
#pragma unroll
      for (int k = 0; k < 4; k++) tiles::store_shared_16(at + C::kWeightsAt + (k * 128 + thread) * 16, weights[k]);
      if (t == 0)
        *reinterpret_cast<float2*>(shared + C::kShrinkAt + (thread / 32 * 8 + g) * 8) =
            make_float2(shrink[0], shrink[1]);
      if (i + 1 == n) {
        const float4 stats = softmax.stats();
        if (t == 0) *reinterpret_cast<float4*>(shared + C::kStatsAt + (thread / 32 * 8 + g) * 16) = stats;
      }
      tiles::arrive(weights_full());
      ring.next();
    }
  }

  // ---- add: columns [256 * half, 256 * half + 256)

  __device__ __forceinline__ void add(int half) {
    const int thread = threadIdx.x % 128, lane = thread % 32, g = lane / 4, t = lane % 4;
    float out[2][64], base[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f}, sinks[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int32_t head = w.first_head + thread / 32 * 16 + g + 8 * h;
      if (head < a.p.num_heads) sinks[h] = sink_of(a.p, head);
    }
#pragma unroll
    for (int i = 0; i < 128; i++) out[i / 64][i % 64] = 0.f;
    for (int32_t i = 0, n = w.num_tiles; i < n; i++) {
      ring.wait_full();
      tiles::wait(weights_full(), ring.step & 1);
      tiles::show_to_multiplications();
      uint32_t p[4][4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint4 x = *reinterpret_cast<const uint4*>(shared + C::kWeightsAt + (k * 128 + thread) * 16);
        p[k][0] = x.x, p[k][1] = x.y, p[k][2] = x.z, p[k][3] = x.w;
      }
      const float2 shrink = *reinterpret_cast<const float2*>(shared + C::kShrinkAt + (thread / 32 * 8 + g) * 8);
      if (i + 1 == n) {
        const float4 stats = *reinterpret_cast<const float4*>(shared + C::kStatsAt + (thread / 32 * 8 + g) * 16);
        base[0] = stats.x, base[1] = stats.y, sum[0] = stats.z, sum[1] = stats.w;
      }
      __syncwarp();
      tiles::arrive_for_all(weights_free(), lane == 0);
      if (__any_sync(0xffffffffu, shrink.x != 1.f || shrink.y != 1.f)) {  // seldom, once the largest scores were met
#pragma unroll
        for (int k = 0; k < 128; k++) out[k / 64][k % 64] *= k / 2 % 2 ? shrink.y : shrink.x;
      }
      const uint64_t values = tiles::matrix_descriptor(
          tiles::for_all_lanes(ring.tile() + half * 4 * kSparseColumnBytes), kSparseColumnBytes, 1024);
      tiles::hold(out[0]), tiles::hold(out[1]);
      tiles::begin_multiplications();
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int q = 0; q < 2; q++)
          Add::multiply_turned(out[q], p[k], values + uint32_t((k * 16 * 128 + q * 2 * kSparseColumnBytes) >> 4));
      tiles::commit_multiplications();
      tiles::wait_multiplications<0>();
      tiles::hold(out[0]), tiles::hold(out[1]);
      ring.give_back(lane == 0);
    }
    const int32_t r0 = thread / 32 * 16 + g, position = w.position;
    if (kIsFp8 && *reinterpret_cast<volatile uint32_t*>(shared + C::kWideAt)) {
      if (half == 0) compute_anew();
      return;
    }
    if (a.splits.d > 1) {
      write_part(out, r0, half, t, base, sum);
      return;
    }
    // Written so that a way through it is short: it is fetched once, and all of that is waited for.
    const bool is_there[2] = {w.first_head + r0 < a.p.num_heads, w.first_head + r0 + 8 < a.p.num_heads};
    float inverse[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
      inverse[h] = is_there[h] ? finish_head(a.p, w.token, w.first_head + r0 + 8 * h, base[h], sum[h], sinks[h],
                                             half == 0 && t == 0) *
                                     kUnit
                               : 0.f;
#pragma unroll
    for (int k = 0; k < 128; k++) out[k / 64][k % 64] *= inverse[k / 2 % 2];
    if (half == 1 && a.p.cos && position < a.p.num_positions) {
#pragma unroll
      for (int n = 0; n < 32; n++) {
        if (n < 32 - kMostTurned / 8) continue;
        turn_back(a.p, position, 256 + 8 * n + 2 * t, &out[n / 16][4 * (n % 16)], &out[n / 16][4 * (n % 16) + 1]);
        turn_back(a.p, position, 256 + 8 * n + 2 * t, &out[n / 16][4 * (n % 16) + 2], &out[n / 16][4 * (n % 16) + 3]);
      }
    }
    char* to = a.p.out.data + w.token * a.p.out.token + int64_t(w.first_head) * a.p.out.head;
    if (a.p.out.dtype == KVX_DTYPE_F32) {
      to += (half * 256 + 2 * t) * 4 + r0 * a.p.out.head;
#pragma unroll
      for (int h = 0; h < 2; h++, to += 8 * a.p.out.head) {
        if (!is_there[h]) break;
#pragma unroll
        for (int n = 0; n < 32; n++)
          *reinterpret_cast<float2*>(to + n * 32) =
              make_float2(out[n / 16][4 * (n % 16) + 2 * h], out[n / 16][4 * (n % 16) + 2 * h + 1]);
      }
      return;
    }
    // By way of the queries' room, which nobody reads any more: pairs there, whole rows from there.
    const bool is_bf16 = a.p.out.dtype == KVX_DTYPE_BF16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int n = 0; n < 32; n++) {
        const float x = out[n / 16][4 * (n % 16) + 2 * h], y = out[n / 16][4 * (n % 16) + 2 * h + 1];
        const uint32_t pair = is_bf16 ? tiles::Bf16Numbers::pack(x, y) : tiles::F16Numbers::pack(x, y);
        asm volatile(
            "st.shared.b32 [%0], %1;" ::"r"(at + C::kQueryAt + sparse_chunk_at(r0 + 8 * h, half * 32 + n) + t * 4),
            "r"(pair)
            : "memory");
      }
    }
    __syncwarp();
    const int32_t first = thread / 32 * 16, rows = min(16, a.p.num_heads - w.first_head - first);
    to += first * a.p.out.head + half * 512 + lane * 16;
#pragma unroll 4
    for (int32_t r = 0; r < rows; r++)
      *reinterpret_cast<uint4*>(to + r * a.p.out.head) =
          tiles::load_shared_16(at + C::kQueryAt + sparse_chunk_at(first + r, half * 32 + lane));
  }
  __device__ __forceinline__ void write_part(const float (&out)[2][64], int32_t r0, int half, int t,
                                             const float (&base)[2], const float (&sum)[2]) const {
    float* part =
        reinterpret_cast<float*>(a.p.workspace + (int64_t(blockIdx.x) * a.splits.d + blockIdx.y) * kSparsePartBytes);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int32_t r = r0 + 8 * h;
      if (half == 0 && t == 0)
        *reinterpret_cast<float2*>(part + kSparseRows * kSparseDim + 2 * r) = make_float2(base[h], sum[h]);
      float* to = part + r * kSparseDim + half * 256 + 2 * t;
#pragma unroll
      for (int n = 0; n < 32; n++)
        __stcg(reinterpret_cast<float2*>(to + 8 * n),
               make_float2(out[n / 16][4 * (n % 16) + 2 * h] * kUnit, out[n / 16][4 * (n % 16) + 2 * h + 1] * kUnit));
    }
  }
  // An item with rows that f16 does not hold: head by head. The room of the queries is not needed any more.
  __device__ __forceinline__ void compute_anew() const {
    float* numbers = reinterpret_cast<float*>(shared + C::kQueryAt);
    const int32_t first = w.first_tile * kSparseKeys, end = min(w.num_keys, (w.first_tile + w.num_tiles) * kSparseKeys);
#pragma unroll 1
    for (int32_t r = 0; r < kSparseRows && w.first_head + r < a.p.num_heads; r++) {
      const float2 stats = attend_head(a, w, w.first_head + r, first, end, numbers, false);
      if (a.splits.d == 1) {
        write_head(a.p, w, w.first_head + r, stats, numbers + kSparseDim);
        continue;
      }
      float* part =
          reinterpret_cast<float*>(a.p.workspace + (int64_t(blockIdx.x) * a.splits.d + blockIdx.y) * kSparsePartBytes);
      for (int32_t d = threadIdx.x % 128; d < kSparseDim; d += 128) part[r * kSparseDim + d] = numbers[kSparseDim + d];
      if (threadIdx.x % 128 == 0) *reinterpret_cast<float2*>(part + kSparseRows * kSparseDim + 2 * r) = stats;
    }
  }
  // A token that is skipped: zeros, and LSEs of -inf.
  __device__ __forceinline__ void write_nothing() const {
    for (int32_t i = threadIdx.x; i < kSparseRows * kSparseDim / 2; i += C::kThreads) {
      const int32_t head = w.first_head + i / (kSparseDim / 2), dim = i % (kSparseDim / 2) * 2;
      if (head >= a.p.num_heads) break;
      store_sparse_pair(a.p.out.dtype, a.p.out.data + w.token * a.p.out.token + int64_t(head) * a.p.out.head, dim, 0.f,
                        0.f);
      if (dim == 0) finish_head(a.p, w.token, head, -INFINITY, 0.f, 0.f, true);
    }
  }
};

template <bool kIsFp8>
__global__ void __launch_bounds__(SparseConfig::kThreads, 1) attend_sparse(const __grid_constant__ SparseArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = SparseConfig;
  extern __shared__ __align__(1024) char shared[];
  SparseItem* item = reinterpret_cast<SparseItem*>(shared + C::kItemAt);
  const uint32_t at = tiles::shared_address(shared);
  SparseTile<kIsFp8> tile{a, *item, shared, at, SparseRing{at + C::kStagesAt, at + C::kBarriersAt}};
  wait_for_previous();
  let_next_start();
  const int role = threadIdx.x / 128;
  if (role >= 2) tile.ask_queries();
  if (threadIdx.x < 32) {
    const SparseItem found = sparse_item(a, int32_t(blockIdx.x), int32_t(blockIdx.y));
    if (threadIdx.x == 0) *item = found, *reinterpret_cast<uint32_t*>(shared + C::kWideAt) = 0;
  }
  if (threadIdx.x == 32) tile.init_barriers();
  __syncthreads();
  if (item->slot < 0) {
    if (role >= 2) tiles::wait_copies<0>();
    if (a.splits.d == 1) tile.write_nothing();  // what is split is written by the second launch
    return;
  }
  if (role == 0) {
    tiles::give_registers<88>();
    uint32_t* valid = reinterpret_cast<uint32_t*>(shared + C::kValidAt);
    if constexpr (kIsFp8)
      SparseLoadFp8{a,
                    *item,
                    tile.ring,
                    valid,
                    reinterpret_cast<uint32_t*>(shared + C::kWideAt),
                    at + C::kRawAt,
                    at + C::kFinderAt}
          .load();
    else SparseLoad{a, *item, tile.ring, valid, at + C::kRawAt, at + C::kFinderAt}.load();
  } else if (role == 1) {
    tiles::give_registers<72>();
    tile.soften();
  } else {
    tile.finish_queries();
    // racecheck does not see that what passes here comes before what waits for weights.
    if constexpr (tiles::kAllArrive) tiles::meet(SparseTile<kIsFp8>::kQueriesMeet, 384);
    else tiles::pass(SparseTile<kIsFp8>::kQueriesMeet, 384);
    tiles::take_registers<176>();
    tile.add(role - 2);
  }
#endif
}

}  // namespace cuda
}  // namespace kvx
