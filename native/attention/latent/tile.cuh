// A tile of latent attention in shared memory: two stages of keys, the queries, weights,
// and the barriers between the roles.
#pragma once
#include <type_traits>

#include "attention/latent/items.cuh"
#include "tiles/ring.cuh"

namespace kvx {
namespace cuda {

struct LatentConfig {
  static constexpr int kThreads = 512;
  static constexpr int kColumnBytes = kLatentKeys * 128;  // 64 elements of 64 rows, as multiplications want them
  static constexpr int kColumns = (kLatentDim + kRopeDim) / 64, kTileBytes = kColumns * kColumnBytes;
  using Keys = tiles::Ring<2, kTileBytes>;
  using Weights = tiles::Ring<1, kLatentRows * kLatentKeys * 2>;  // [4][128 threads] of 16 bytes
  // Shared memory:
  static constexpr int kQueryAt = 0;
  static constexpr int kStagesAt = kQueryAt + kTileBytes;
  static constexpr int kWeightsAt = kStagesAt + Keys::kStages * kTileBytes;
  static constexpr int kShrinkAt =
      kWeightsAt + Weights::kTileBytes;  // what sums are multiplied by before the tile, [64 rows]
  static constexpr int kStatsAt = kShrinkAt + kLatentRows * 4;  // base and sum of the item's rows
  static constexpr int kOffsetsAt =
      kStatsAt + kLatentRows * 8;  // [stages][latent, rotary][64 keys]; FP8: four scales of each key
  static constexpr int kValidAt = kOffsetsAt + Keys::kStages * 2 * kLatentKeys * 4;  // [4 tiles], a bit a key
  static constexpr int kGrowAt = kValidAt + 4 * 8;             // FP8: what a row's scores are multiplied by
  static constexpr int kShiftsAt = kGrowAt + kLatentRows * 4;  // FP8: [4 tiles]
  static constexpr int kLargestAt = kShiftsAt + 4 * 4;         // FP8: [2 tiles][4 warps], the largest scales
  static constexpr int kUnitAt = kLargestAt + 8 * 4;           // FP8: unit of the item's sums
  static constexpr int kBarriersAt = kUnitAt + 16;             // [2 halves of a tile]
  static constexpr int kWeightsBarriersAt = kBarriersAt + 2 * Keys::kBarrierBytes,
                       kArrivedAt = kWeightsBarriersAt + Weights::kBarrierBytes,
                       kScoredAt = kArrivedAt + Keys::kStages * 8;
  static constexpr int kFoundAt = kScoredAt + 8;
  static constexpr int kWalksAt = kFoundAt + int(sizeof(LatentItem));  // [4 roles]
  static constexpr int kSharedBytes = kWalksAt + 4 * int(sizeof(LatentWalk));
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a block of threads");
};

// What the roles share: shared memory, a ring of keys (which are values too), one of weights, and the count of tiles
// that both follow.
//
//   keys     `load` fills; `soften` and both of `add` wait until a tile is full, and `add` gives it back: it comes
//            after `soften`. 16-bit tiles are filled and given back in halves, latents 0..255 and the rest, each with
//            barriers of its own: one is loaded again while the other is still multiplied
//   weights  `soften` fills, both of `add` read
//   scored   `soften` has the scores of a tile: `add` keeps the second half of the tile before for the time of the
//            softmax, when nobody else has work for the tensor cores. FP8: not used, its stages are free too late
template <bool kIsFp8> struct LatentTile {
  using C = LatentConfig;
  using Numbers = typename std::conditional<kIsFp8, tiles::F16Numbers, tiles::Bf16Numbers>::type;  // latents, weights
  const LatentArgs& a;
  char* shared;
  uint32_t at;
  uint32_t count = 0;  // tiles so far: stages and phases follow from it

  static constexpr int kParts = kIsFp8 ? 1 : 2;  // of a tile: its halves, or all of it

  // Rings at a tile, by its number: made where they are used, since a count of their own would be a register each.
  __device__ __forceinline__ C::Keys keys(uint32_t tile, int part = 0) const {
    return C::Keys{at + C::kStagesAt, at + C::kBarriersAt + part * C::Keys::kBarrierBytes, tile};
  }
  __device__ __forceinline__ C::Keys keys() const { return keys(count); }
  __device__ __forceinline__ C::Keys part_of_keys(int part) const { return keys(count, part); }
  __device__ __forceinline__ C::Weights weights() const {
    return C::Weights{at + C::kWeightsAt, at + C::kWeightsBarriersAt, count};
  }
  // Before a tile that is full is multiplied. What the copy engine wrote needs no showing, and who writes some rows of
  // a few tiles, or widens them, shows them itself; tiles that are all copied in rows are shown by who reads them, so
  // that who copies does not wait.
  __device__ __forceinline__ void show_keys() const {
    if (!kIsFp8 && a.box_shift < 0) tiles::show_to_multiplications();
  }
  // FP8: a stage's raw bytes are there.
  __device__ __forceinline__ uint32_t arrived(uint32_t tile) const {
    return at + C::kArrivedAt + keys(tile).stage() * 8;
  }
  static __device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
    return (chunk / 8) * C::kColumnBytes + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
  }

  __device__ __forceinline__ uint32_t scored() const { return at + C::kScoredAt; }
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < kParts; i++) part_of_keys(i).init(128, 8 * tiles::arrivals_of(32));
    weights().init(128, 8 * tiles::arrivals_of(32));
    tiles::init_barrier(scored(), 4 * tiles::arrivals_of(32));
    for (int s = 0; s < C::Keys::kStages; s++) tiles::init_barrier(arrived(s), 4);
    tiles::show_barriers();
  }

  // FP8 latents become f16, which has the digits (an element times its scale keeps 11 bits) but not the range: a tile's
  // latents are held in units of 2^(kUnit + shift), and so is its rotary part. `shift` is 0 where the tile's largest
  // scale is in [2^-12, 1), as that of normed latents is (amax of 0.1 to 448, and a hundred times less beside them).
  // Who loads finds it, who multiplies reads it.
  static constexpr int kUnit = -6;
  static __device__ __forceinline__ float power_of_two(int e) {
    return __uint_as_float(uint32_t(min(max(e, -126), 127) + 127) << 23);
  }
  __device__ __forceinline__ int* shift_of(uint32_t tile) const {
    return reinterpret_cast<int*>(shared + C::kShiftsAt) + tile % 4;
  }
};

}  // namespace cuda
}  // namespace kvx
