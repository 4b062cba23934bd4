// Latent attention's third role: weights times values, sums in registers, and what becomes of them.
#pragma once
#include "attention/latent/results.cuh"
#include "attention/latent/tile.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

// One of two: it adds up columns 0, 1, 3 and 4 of 64 values each, or 2, 5, 6 and 7. So both have as many in all, of
// which three columns are of a tile's first part.
template <bool kIsFp8, int kHalf> struct LatentAdd : LatentTile<kIsFp8> {
  using Tile = LatentTile<kIsFp8>;
  using C = typename Tile::C;
  using Numbers = typename Tile::Numbers;
  using Tile::a, Tile::at, Tile::shared, Tile::count, Tile::first, Tile::second, Tile::weights, Tile::scored,
      Tile::show_keys;

  static constexpr int kFirst = kHalf ? 2 : 0, kSecond = kHalf ? 5 : 3;  // columns that the sums begin with
  static constexpr int kFew = kHalf ? 1 : 2, kMany = 4 - kFew;           // columns there are
  float few[kFew * 32], many[kMany * 32];

  // Weights by columns of values, begun.
  template <int N> static __device__ __forceinline__ void begin_adding(float (&out)[N], const uint32_t (&p)[4][4],
                                                                       uint32_t columns) {
    const uint64_t values = tiles::matrix_descriptor(tiles::for_all_lanes(columns), C::kColumnBytes, 1024);
    tiles::hold(out);
    tiles::begin_multiplications();
#pragma unroll
    for (int k = 0; k < 4; k++)
      tiles::Warpgroup<Numbers, 2 * N>::multiply_turned(out, p[k], values + uint32_t((k * 16 * 128) >> 4));
    tiles::commit_multiplications();
  }
  template <int N> static __device__ __forceinline__ void end_adding(float (&out)[N]) {
    tiles::wait_multiplications<0>();
    tiles::hold(out);
  }
  template <class Do> __device__ __forceinline__ void for_all_sums(Do&& change) {
#pragma unroll
    for (int k = 0; k < kFew * 32; k++) change(few[k], k / 2 % 2);
#pragma unroll
    for (int k = 0; k < kMany * 32; k++) change(many[k], k / 2 % 2);
  }
  // Of row r0 or r0 + 8, from the thread's first element on.
  template <int N> static __device__ __forceinline__ void store_part(float* to, int h, const float (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N / 4; n++)
      __stcg(reinterpret_cast<float2*>(to + 8 * n), make_float2(x[4 * n + 2 * h], x[4 * n + 2 * h + 1]));
  }

  __device__ __forceinline__ void add(const LatentItem& w) {
    const int thread = int(role_thread()), lane = thread % 32, g = lane / 4;
    float base[2] = {0.f, 0.f}, sum[2] = {0.f, 0.f}, unit = 1.f;
    for_all_sums([](float& x, int) { x = 0.f; });
    for (int i = 0, n = w.num_tiles; i < n; i++, count++) {
      first().wait_full();
      if constexpr (C::kParts == 2) second().wait_full();
      weights().wait_full();
      show_keys();
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
        if (kIsFp8) unit = *reinterpret_cast<const float*>(shared + C::kUnitAt);
      }
      __syncwarp();
      weights().give_back(lane == 0);
      if (__any_sync(0xffffffffu, shrink.x != 1.f || shrink.y != 1.f)) {  // seldom, once the largest scores were met
        for_all_sums([&](float& x, int second_row) { x *= second_row ? shrink.y : shrink.x; });
      }
      if constexpr (C::kParts == 2) {
        begin_adding(many, p, second().tile() + (kSecond - C::kFirstColumns) * C::kColumnBytes);
        end_adding(many);
        second().give_back(lane == 0);
        if (i + 1 < n) tiles::wait(scored(), (count + 1) & 1);
        begin_adding(few, p, first().tile() + kFirst * C::kColumnBytes);
      } else {
        begin_adding(many, p, first().tile() + kSecond * C::kColumnBytes);
        begin_adding(few, p, first().tile() + kFirst * C::kColumnBytes);
        end_adding(many);
      }
      end_adding(few);
      first().give_back(lane == 0);
    }
    if (kIsFp8) for_all_sums([&](float& x, int) { x *= unit; });
    store(w, base, sum);
  }

  // What of the item's sums is there: to its part, or to rows of the output.
  __device__ __forceinline__ void store(const LatentItem& w, const float (&base)[2], const float (&sum)[2]) const {
    const int thread = int(role_thread()), g = thread % 32 / 4, t = thread % 4;
    const int32_t first = w.first_row + thread / 32 * 16, rows = w.rows;
    if (__any_sync(0xffffffffu, first >= rows)) return;
    if (w.part >= 0) {
      const LatentPart part = LatentPart::at(a, w.part);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int r = thread / 32 * 16 + g + 8 * h;
        if (w.first_row + r >= rows) continue;
        store_part(part.row(r) + kFirst * 64 + 2 * t, h, few);
        store_part(part.row(r) + kSecond * 64 + 2 * t, h, many);
        if (kHalf == 0 && t == 0) part.stats[r] = make_float2(base[h], sum[h]);
      }
      return;
    }
    LatentOut out[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
      out[h] = latent_out(a, w.first_query, first + g + 8 * h, rows, base[h], sum[h], kHalf == 0 && t == 0);
    store_groups(a, out, kFirst * 64, t, few);
    store_groups(a, out, kSecond * 64, t, many);
  }
};

}  // namespace cuda
}  // namespace kvx
