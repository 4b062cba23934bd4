// Latent attention's third role: weights times values, sums in registers, and what becomes of them.
#pragma once
#include "attention/latent/results.cuh"
#include "attention/latent/tile.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

template <bool kIsFp8> struct LatentAdd : LatentTile<kIsFp8> {
  using Tile = LatentTile<kIsFp8>;
  using C = LatentConfig;
  using Numbers = typename Tile::Numbers;
  using Tile::a, Tile::at, Tile::shared, Tile::count, Tile::keys, Tile::part_of_keys, Tile::kParts, Tile::weights,
      Tile::scored, Tile::show_keys;

  // Columns [128 * half, 128 * half + 128) of each half of the latents.

  __device__ __forceinline__ void add(const LatentItem& w, int half) {
    const int thread = int(role_thread()), lane = thread % 32, g = lane / 4;
    float out[2][64], base[2] = {0.f, 0.f}, sum[2] = {0.f, 0.f}, unit = 1.f;
#pragma unroll
    for (int i = 0; i < 128; i++) out[i / 64][i % 64] = 0.f;
    for (int i = 0, n = w.num_tiles; i < n; i++, count++) {
#pragma unroll
      for (int q = 0; q < kParts; q++) part_of_keys(q).wait_full();
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
#pragma unroll
        for (int k = 0; k < 128; k++) out[k / 64][k % 64] *= k / 2 % 2 ? shrink.y : shrink.x;
      }
      const uint64_t values = tiles::matrix_descriptor(tiles::for_all_lanes(keys().tile() + half * 2 * C::kColumnBytes),
                                                       C::kColumnBytes, 1024);
#pragma unroll
      for (int q = 0; q < 2; q++) {
        if (kParts == 2 && q == 1 && i + 1 < n) tiles::wait(scored(), (count + 1) & 1);
        tiles::hold(out[q]);
        tiles::begin_multiplications();
#pragma unroll
        for (int k = 0; k < 4; k++)
          tiles::Warpgroup<Numbers, 128>::multiply_turned(
              out[q], p[k], values + uint32_t((k * 16 * 128 + q * 4 * C::kColumnBytes) >> 4));
        tiles::commit_multiplications();
        if (kParts == 1 && q == 0) continue;  // both at once
        tiles::wait_multiplications<0>();
        if (kParts == 1) tiles::hold(out[0]);
        tiles::hold(out[q]);
        part_of_keys(kParts == 2 ? q : 0).give_back(lane == 0);
      }
    }
    if (kIsFp8) {
#pragma unroll
      for (int k = 0; k < 128; k++) out[k / 64][k % 64] *= unit;
    }
    store(w, half, out, base, sum);
  }

  // What of the item's sums is there: to its part, or to rows of the output.
  __device__ __forceinline__ void store(const LatentItem& w, int half, const float (&x)[2][64], const float (&base)[2],
                                        const float (&sum)[2]) const {
    const int thread = int(role_thread()), g = thread % 32 / 4, t = thread % 4;
    const int32_t first = w.first_row + thread / 32 * 16, rows = w.rows;
    if (__any_sync(0xffffffffu, first >= rows)) return;
    if (w.part >= 0) {
      const LatentPart part = LatentPart::at(a, w.part);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int r = thread / 32 * 16 + g + 8 * h;
        if (w.first_row + r >= rows) continue;
        float* to = part.row(r) + half * 128 + 2 * t;
#pragma unroll
        for (int n = 0; n < 32; n++)
          __stcg(reinterpret_cast<float2*>(to + n / 16 * 256 + n % 16 * 8),
                 make_float2(x[n / 16][4 * (n % 16) + 2 * h], x[n / 16][4 * (n % 16) + 2 * h + 1]));
        if (half == 0 && t == 0) part.stats[r] = make_float2(base[h], sum[h]);
      }
      return;
    }
    LatentOut out[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
      out[h] = latent_out(a, w.first_query, first + g + 8 * h, rows, base[h], sum[h], half == 0 && t == 0);
#pragma unroll
    for (int q = 0; q < 2; q++) store_groups(a, out, q * 256 + half * 128, t, x[q]);
  }
};

}  // namespace cuda
}  // namespace kvx
