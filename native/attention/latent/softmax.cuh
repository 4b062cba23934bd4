// Latent attention's second role: scores on the tensor cores, and the weights they become.
#pragma once
#include "attention/latent/tile.cuh"
#include "tiles/softmax.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

template <bool kIsFp8> struct LatentSoften : LatentTile<kIsFp8> {
  using Tile = LatentTile<kIsFp8>;
  using C = LatentConfig;
  using Numbers = typename Tile::Numbers;
  using Tile::a, Tile::at, Tile::shared, Tile::count, Tile::keys, Tile::part_of_keys, Tile::kParts, Tile::weights,
      Tile::scored, Tile::show_keys, Tile::chunk_at, Tile::kUnit, Tile::power_of_two, Tile::shift_of;

  // Rows of this thread's scores are r0 = 16 * warp + g and r0 + 8.

  struct Softmax : tiles::TileSoftmax<Numbers, !kIsFp8> {
    float factor[2];    // of scores
    int shift = -1000;  // sums of values are in units of 2^(kUnit + shift): the largest shift so far
  };

  // A warp takes 16 rows one by one, so that where a row lies is found once, and waits once for all.
  __device__ __forceinline__ void load_queries(const LatentItem& w, Softmax* x) const {
    const int thread = int(role_thread());
    constexpr int kChunks = C::kColumns * 8;
    const uint32_t lane = thread % 32, first_row = w.first_row, rows = w.rows;
    const char* first = a.q.data + w.first_query * a.q.token + lane * 16;
#pragma unroll 4
    for (uint32_t r = thread / 32 * 16; r < thread / 32 * 16 + 16; r++) {
      const bool is_there = first_row + r < rows;
      const uint32_t row = is_there ? first_row + r : 0, token = a.heads.divide(row), head = row - token * a.heads.d;
      const char* from = first + token * a.q.token + head * a.q.head;
#pragma unroll
      for (int i = 0; i < 3; i++)
        if (i < 2 || lane < kChunks - 64)
          tiles::copy_16(at + C::kQueryAt + chunk_at(r, lane + 32 * i), from + 512 * i, is_there ? 16 : 0);
    }
    tiles::commit_copies();
    tiles::wait_copies<0>();
    if constexpr (kIsFp8) {
      __syncwarp();
      fit_queries();
    }
    tiles::show_to_multiplications();
    tiles::meet(2, 128);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      x->factor[h] = a.factor;
      if (kIsFp8)
        x->factor[h] *= reinterpret_cast<const float*>(shared + C::kGrowAt)[thread / 32 * 16 + thread % 32 / 4 + 8 * h];
    }
  }
  // Queries become f16 where they stand, by a power of two that is exact; their rotary part stays bf16, in the same
  // units as the keys'. A warp has the rows it has loaded, two lanes each: l and l + 16, so that eight neighbours meet
  // in no bank.
  __device__ __forceinline__ void fit_queries() const {
    const uint32_t thread = role_thread(), r = thread / 32 * 16 + thread % 16, first = thread % 32 / 16;
    const auto low = [](uint32_t x) { return __uint_as_float(x << 16); };
    const auto high = [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); };
    float largest = 0.f;
#pragma unroll 8
    for (uint32_t c = first; c < kLatentDim / 8; c += 2) {
      const uint4 x = tiles::load_shared_16(at + C::kQueryAt + chunk_at(r, c));
      for (uint32_t word : {x.x, x.y, x.z, x.w}) largest = fmaxf(largest, fmaxf(fabsf(low(word)), fabsf(high(word))));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    const int exponent = largest > 0.f && largest < INFINITY ? min(max(ilogbf(largest) - 8, -100), 100) : 0;
    const float shrink = power_of_two(-exponent);
    // A column's chunks are all read before the first is written: nobody waits for each.
#pragma unroll 1
    for (uint32_t column = 0; column < C::kColumns; column++) {
      const bool is_rope = column >= kLatentDim / 64;
      const float by = is_rope ? shrink * power_of_two(-kUnit) : shrink;
      uint4 x[4];
#pragma unroll
      for (int k = 0; k < 4; k++)
        x[k] = tiles::load_shared_16(at + C::kQueryAt + chunk_at(r, column * 8 + 2 * k + first));
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const uint32_t in[4] = {x[k].x, x[k].y, x[k].z, x[k].w};
        uint32_t out[4];
        for (int i = 0; i < 4; i++)
          out[i] = is_rope ? tiles::Bf16Numbers::pack(low(in[i]) * by, high(in[i]) * by)
                           : Numbers::pack(low(in[i]) * by, high(in[i]) * by);
        tiles::store_shared_16(at + C::kQueryAt + chunk_at(r, column * 8 + 2 * k + first),
                               make_uint4(out[0], out[1], out[2], out[3]));
      }
    }
    if (first == 0) reinterpret_cast<float*>(shared + C::kGrowAt)[r] = power_of_two(exponent + kUnit);
  }

  // By halves of a tile, the first while the second is still loaded. Begun, not ended.
  __device__ __forceinline__ void multiply_scores(float (&s)[32]) const {
    const uint64_t queries = tiles::matrix_descriptor(tiles::for_all_lanes(at + C::kQueryAt), 16, 1024),
                   rows = tiles::matrix_descriptor(tiles::for_all_lanes(keys().tile()), 16, 1024);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      part_of_keys(part).wait_full();
      show_keys();
      tiles::hold(s);
      tiles::begin_multiplications();
      constexpr int kSteps = C::kColumns * 4;  // and of the first half: 16
#pragma unroll
      for (int k = part * 16; k < (part + 1 == kParts ? kSteps : 16); k++) {
        const uint32_t step = ((k / 4) * C::kColumnBytes + (k % 4) * 32) >> 4;
        if (k < kLatentDim / 16) tiles::Warpgroup<Numbers, 64>::multiply(s, queries + step, rows + step, k > 0);
        else tiles::Warpgroup<tiles::Bf16Numbers, 64>::multiply(s, queries + step, rows + step, 1);
      }
      tiles::commit_multiplications();
      if (part + 1 == kParts) continue;
      tiles::wait_multiplications<0>();
      tiles::hold(s);
    }
  }

  // Scores of keys that are not there, or not seen, become -inf.
  __device__ __forceinline__ void mask(float (&s)[32], const LatentItem& w, int32_t first, const uint2& valid) const {
    const int thread = int(role_thread()), g = thread % 32 / 4, t = thread % 4;
    count_bad(w, first, valid);
    const int32_t row = w.first_row + thread / 32 * 16 + g;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int32_t limit = (row + 8 * h < w.rows ? limit_of(a, w, row + 8 * h) : 0) - first,
                    low = a.window > 0 ? int32_t(limit - a.window) : -first;
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int32_t key = 8 * n + 2 * t + e;
          if (!((n < 4 ? valid.x : valid.y) >> (key % 32) & 1) || key >= limit || key < low)
            s[4 * n + 2 * h + e] = -INFINITY;
        }
    }
  }

  // Tile i's scores, whose multiplications are under way, to weights.
  __device__ __forceinline__ void soften_tile(float (&s)[32], const LatentItem& w, int i, bool is_last,
                                              Softmax* x) const {
    const int thread = int(role_thread()), t = thread % 4;
    const int32_t first = (w.first_tile + i) * kLatentKeys;
    const uint2 valid = *reinterpret_cast<const uint2*>(shared + C::kValidAt + count % 4 * 8);
    const bool is_masked =
        first + kLatentKeys > w.least_limit || first < w.most_low || (valid.x & valid.y) != 0xffffffffu;
    weights().wait_free();
    tiles::wait_multiplications<0>();
    tiles::hold(s);
    __syncwarp();
    tiles::arrive_for_all(scored(), thread % 32 == 0);
    if (is_masked) mask(s, w, first, valid);
    float shrink[2], smaller = 1.f, factor[2] = {x->factor[0], x->factor[1]};
    float of_shift = 1.f;  // what sums are multiplied by for the shift's sake
    if constexpr (kIsFp8) {
      const int shift = *shift_of(count);
      if (shift > x->shift) of_shift = power_of_two(x->shift - shift), x->shift = shift;
      smaller = power_of_two(shift - x->shift);
      for (int h = 0; h < 2; h++) factor[h] *= power_of_two(shift);
    }
    uint4 p[4];
    x->weigh_tile(s, factor, smaller, p, shrink);
    // A thread of `add` has the rows of the thread of the same number here: weights pass as they stand.
    const int row = thread / 32 * 8 + thread % 32 / 4;
#pragma unroll
    for (int k = 0; k < 4; k++) tiles::store_shared_16(weights().tile() + (k * 128 + thread) * 16, p[k]);
    if (t == 0)
      *reinterpret_cast<float2*>(shared + C::kShrinkAt + row * 8) =
          make_float2(shrink[0] * of_shift, shrink[1] * of_shift);
    if (is_last) {
      const float4 stats = x->stats();
      if (t == 0) *reinterpret_cast<float4*>(shared + C::kStatsAt + row * 16) = stats;
      if (kIsFp8 && thread == 0) *reinterpret_cast<float*>(shared + C::kUnitAt) = power_of_two(x->shift + kUnit);
    }
    weights().arrive_full();
  }

  // Positions whose block is none, once a sequence.
  __device__ __forceinline__ void count_bad(const LatentItem& w, int32_t first, const uint2& valid) const {
    if (!a.rows.kv.errors || w.first_row + kLatentRows < w.rows || role_thread() != 0) return;
    const uint32_t missing = __popc(tiles::rows_within(first, w.begin, w.length) & ~valid.x) +
                             __popc(tiles::rows_within(first + 32, w.begin, w.length) & ~valid.y);
    if (missing) atomicAdd(a.rows.kv.errors, (unsigned long long)missing);
  }

  __device__ __forceinline__ void soften(const LatentItem& w) {
    Softmax x;
    load_queries(w, &x);
    float s[32];
    for (int i = 0, n = w.num_tiles; __any_sync(0xffffffffu, i < n); i++, count++) {
      multiply_scores(s);
      soften_tile(s, w, i, i + 1 == n, &x);
    }
  }
};

}  // namespace cuda
}  // namespace kvx
