// Latent attention's second role: scores on the tensor cores, and the weights they become.
#pragma once
#include "attention/latent/tile.cuh"
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

  struct Softmax {
    float base[2], sum[2];  // weights are 2^(score - base); it moves when a score is past it by 8, so that sums are
                            // seldom multiplied
    float factor[2];        // of scores
    int shift;              // sums of values are in units of 2^(kUnit + shift): the largest shift so far
  };

  __device__ __forceinline__ const char* query_row(const LatentItem& w, uint32_t row) const {
    const uint32_t token = a.heads.divide(row), head = row - token * a.heads.d;
    return a.q.data + (w.first_query + token) * a.q.token + int64_t(head) * a.q.head;
  }
  __device__ __forceinline__ void load_queries(const LatentItem& w, Softmax* x) const {
    const int thread = int(role_thread());
    constexpr int kChunks = C::kColumns * 8;
    if constexpr (kIsFp8) {
      load_f16_queries(w);
    } else {
      // A warp takes 16 rows one by one, so that where a row lies is found once.
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
    }
    tiles::show_to_multiplications();
    tiles::meet(2, 128);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      x->base[h] = -INFINITY, x->sum[h] = 0.f;
      x->factor[h] = a.factor;
      if (kIsFp8)
        x->factor[h] *= reinterpret_cast<const float*>(shared + C::kGrowAt)[thread / 32 * 16 + thread % 32 / 4 + 8 * h];
    }
    x->shift = -1000;
  }
  // Queries become f16 by a power of two that is exact, two threads a row; their rotary part stays bf16, in the same
  // units as the keys'.
  __device__ __forceinline__ void load_f16_queries(const LatentItem& w) const {
    const int thread = int(role_thread());
    const uint32_t r = thread / 2, first = thread % 2;
    const bool is_there = int32_t(w.first_row + r) < w.rows;
    const uint4* row = reinterpret_cast<const uint4*>(is_there ? query_row(w, w.first_row + r) : a.q.data);
    const auto low = [](uint32_t x) { return __uint_as_float(x << 16); };
    const auto high = [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); };
    float largest = 0.f;
#pragma unroll 8
    for (uint32_t c = first; c < kLatentDim / 8; c += 2) {
      const uint4 x = __ldg(row + c);
      for (uint32_t word : {x.x, x.y, x.z, x.w}) largest = fmaxf(largest, fmaxf(fabsf(low(word)), fabsf(high(word))));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    int exponent = largest > 0.f && largest < INFINITY ? ilogbf(largest) - 8 : 0;
    exponent = is_there ? min(max(exponent, -100), 100) : 0;
    const float shrink = is_there ? power_of_two(-exponent) : 0.f;
#pragma unroll 6
    for (uint32_t c = first; c < C::kColumns * 8; c += 2) {
      const uint4 x = __ldg(row + c);
      const uint32_t in[4] = {x.x, x.y, x.z, x.w};
      uint32_t out[4];
      const bool is_rope = c >= kLatentDim / 8;
      const float by = is_rope ? shrink * power_of_two(-kUnit) : shrink;
      for (int i = 0; i < 4; i++)
        out[i] = is_rope ? tiles::Bf16Numbers::pack(low(in[i]) * by, high(in[i]) * by)
                         : Numbers::pack(low(in[i]) * by, high(in[i]) * by);
      tiles::store_shared_16(at + C::kQueryAt + chunk_at(r, c),
                             is_there ? make_uint4(out[0], out[1], out[2], out[3]) : make_uint4(0, 0, 0, 0));
    }
    if (first == 0) reinterpret_cast<float*>(shared + C::kGrowAt)[r] = power_of_two(exponent + kUnit);
  }

  // By halves of a tile, the first while the second is still loaded.
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
      tiles::wait_multiplications<0>();
      tiles::hold(s);
    }
    __syncwarp();
    tiles::arrive_for_all(scored(), role_thread() % 32 == 0);
  }

  // Tile i's scores to weights.
  __device__ __forceinline__ void soften_tile(float (&s)[32], const LatentItem& w, int i, bool is_last,
                                              Softmax* x) const {
    const int thread = int(role_thread()), g = thread % 32 / 4, t = thread % 4;
    const int32_t first = (w.first_tile + i) * kLatentKeys;
    const uint2 valid = *reinterpret_cast<const uint2*>(shared + C::kValidAt + count % 4 * 8);
    if (first + kLatentKeys > w.least_limit || first < w.most_low || (valid.x & valid.y) != 0xffffffffu) {
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
    float shrink[2] = {1.f, 1.f}, smaller = 1.f;
    float of_shift = 1.f;  // what sums are multiplied by for the shift's sake
    float unit = 1.f;
    if constexpr (kIsFp8) {
      const int shift = *shift_of(count);
      unit = power_of_two(shift);
      if (shift > x->shift) of_shift = power_of_two(x->shift - shift), x->shift = shift;
      smaller = power_of_two(shift - x->shift);
    }
    float factor[2], top[2];  // of this thread's scores
    bool moves = false;       // true for the first score of all, -inf + 8 being -inf
#pragma unroll
    for (int h = 0; h < 2; h++) {
      factor[h] = kIsFp8 ? x->factor[h] * unit : a.factor;
      float other = -INFINITY;
      top[h] = -INFINITY;
#pragma unroll
      for (int n = 0; n < 8; n += 2)
        top[h] = fmaxf(top[h], fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1])),
        other = fmaxf(other, fmaxf(s[4 * n + 4 + 2 * h], s[4 * n + 5 + 2 * h]));
      top[h] = fmaxf(top[h], other) * factor[h];
      moves |= top[h] > x->base[h] + 8.f;
    }
    if (__any_sync(0xffffffffu, moves)) {  // seldom: a row's four threads have to agree only then
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float largest = fmaxf(top[h], __shfl_xor_sync(0xffffffffu, top[h], 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        if (largest > x->base[h] + 8.f) {
          // Above it by a rounding: scores of 10^8 do not make infinite weights.
          const float now = __fmaf_rn(fabsf(largest), 2.4e-7f, largest);
          shrink[h] = tiles::exp2_fast(x->base[h] - now);
          x->base[h] = now;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const float base = x->base[h] == -INFINITY ? 0.f : x->base[h];
      float total[2] = {0.f, 0.f};
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& p = s[4 * n + 2 * h + e];
          p = tiles::exp2_fast(__fmaf_rn(p, factor[h], -base));
          total[e] += p;
        }
      x->sum[h] = __fmaf_rn(x->sum[h], shrink[h], total[0] + total[1]);
      shrink[h] *= of_shift;
    }
    if (kIsFp8 && smaller != 1.f) {
#pragma unroll
      for (int k = 0; k < 32; k++) s[k] *= smaller;
    }
    uint4 p[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      p[k] = make_uint4(Numbers::pack(s[8 * k], s[8 * k + 1]), Numbers::pack(s[8 * k + 2], s[8 * k + 3]),
                        Numbers::pack(s[8 * k + 4], s[8 * k + 5]), Numbers::pack(s[8 * k + 6], s[8 * k + 7]));
    float stats[4];
    if (is_last) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float sum = x->sum[h] + __shfl_xor_sync(0xffffffffu, x->sum[h], 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        stats[h] = x->base[h], stats[2 + h] = sum;
      }
    }
    // A thread of `add` has the rows of the thread of the same number here: weights pass as they stand.
    weights().wait_free();
#pragma unroll
    for (int k = 0; k < 4; k++) tiles::store_shared_16(weights().tile() + (k * 128 + thread) * 16, p[k]);
    if (kIsFp8 && is_last && thread == 0)
      *reinterpret_cast<float*>(shared + C::kUnitAt) = power_of_two(x->shift + kUnit);
    if (t == 0) {
      *reinterpret_cast<float2*>(shared + C::kShrinkAt + (thread / 32 * 8 + g) * 8) = make_float2(shrink[0], shrink[1]);
      if (is_last)
        *reinterpret_cast<float4*>(shared + C::kStatsAt + (thread / 32 * 8 + g) * 16) =
            make_float4(stats[0], stats[1], stats[2], stats[3]);
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
