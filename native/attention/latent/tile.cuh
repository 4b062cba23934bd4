// A tile of latent attention in shared memory: stages of keys, queries, weights, items, and the barriers between the
// roles.
#pragma once
#include <type_traits>

#include "attention/latent/items.cuh"
#include "tiles/ring.cuh"

namespace kvx {
namespace cuda {

// 16-bit tiles are in two parts, three columns and six, each with a ring of its own. Values of the first are multiplied
// last, so it has a stage more; its queries are in registers of `soften`, which makes room for that stage. FP8: a tile
// is one part.
template <bool kIsFp8> struct LatentConfig {
  static constexpr int kThreads = 512;
  static constexpr int kColumnBytes = kLatentKeys * 128;  // 64 elements of 64 rows, as multiplications want them
  static constexpr int kColumns = (kLatentDim + kRopeDim) / 64, kTileBytes = kColumns * kColumnBytes;
  static constexpr int kParts = kIsFp8 ? 1 : 2;
  static constexpr int kHeldColumns = kIsFp8 ? 0 : 3;          // of queries, in registers
  static constexpr int kFirstColumns = kIsFp8 ? kColumns : 3;  // of a tile, in its first part
  using First = tiles::Ring<kIsFp8 ? 2 : 3, kFirstColumns * kColumnBytes>;
  using Second = tiles::Ring<kIsFp8 ? 0 : 2, (kColumns - kFirstColumns) * kColumnBytes>;
  using Weights = tiles::Ring<1, kLatentRows * kLatentKeys * 2>;  // [4][128 threads] of 16 bytes
  using Items = tiles::Ring<8, int(sizeof(LatentItem))>;          // more than tiles can be under way
  // Shared memory:
  static constexpr int kQueryAt = 0;
  static constexpr int kFirstAt = kQueryAt + (kColumns - kHeldColumns) * kColumnBytes;
  static constexpr int kSecondAt = kFirstAt + First::kStages * First::kTileBytes;
  static constexpr int kWeightsAt = kSecondAt + Second::kStages * Second::kTileBytes;
  static constexpr int kShrinkAt =
      kWeightsAt + Weights::kTileBytes;  // what sums are multiplied by before the tile, [64 rows]
  static constexpr int kStatsAt = kShrinkAt + kLatentRows * 4;  // base and sum of the item's rows
  static constexpr int kOffsetsAt =
      kStatsAt + kLatentRows * 8;  // [2 tiles][latent, rotary][64 keys]; FP8: four scales of each key
  static constexpr int kValidAt = kOffsetsAt + 2 * 2 * kLatentKeys * 4;  // [4 tiles], a bit a key
  static constexpr int kGrowAt = kValidAt + 4 * 8;                       // FP8: what a row's scores are multiplied by
  static constexpr int kShiftsAt = kGrowAt + (kIsFp8 ? kLatentRows * 4 : 0);  // FP8: [4 tiles]
  static constexpr int kLargestAt = kShiftsAt + 4 * 4;  // FP8: [2 tiles][4 warps], the largest scales
  static constexpr int kUnitAt = kLargestAt + 8 * 4;    // FP8: unit of the item's sums
  static constexpr int kFirstBarriersAt = kUnitAt + 16;
  static constexpr int kSecondBarriersAt = kFirstBarriersAt + First::kBarrierBytes,
                       kWeightsBarriersAt = kSecondBarriersAt + Second::kBarrierBytes,
                       kItemsBarriersAt = kWeightsBarriersAt + Weights::kBarrierBytes,
                       kArrivedAt = kItemsBarriersAt + Items::kBarrierBytes, kScoredAt = kArrivedAt + 2 * 8;
  static constexpr int kItemsAt = (kScoredAt + 8 + 15) / 16 * 16;
  static constexpr int kSharedBytes = kItemsAt + Items::kStages * Items::kTileBytes;
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a block of threads");
};

// What the roles share: shared memory, rings of keys (which are values too), of weights and of items, and the count of
// tiles that all follow.
//
//   keys     `load` fills; `soften` and both of `add` wait until a part is full, and `add` gives it back: it comes
//            after `soften`. A part is loaded again while the other is still multiplied
//   weights  `soften` fills, both of `add` read
//   scored   `soften` has the scores of a tile: `add` keeps the first part of the tile before for the time of the
//            softmax, when nobody else has work for the tensor cores. FP8: not used, its stages are free too late
//   items    `load` fills, one ahead of what it loads, so that nobody waits for lengths to come from memory
template <bool kIsFp8> struct LatentTile {
  using C = LatentConfig<kIsFp8>;
  using Numbers = typename std::conditional<kIsFp8, tiles::F16Numbers, tiles::Bf16Numbers>::type;  // latents, weights
  const LatentArgs& a;
  char* shared;
  uint32_t at;
  uint32_t count = 0;  // tiles so far: stages and phases follow from it
  uint32_t items = 0;  // likewise

  // Rings at a tile, by its number: made where they are used, since a count of their own would be a register each.
  __device__ __forceinline__ typename C::First first(uint32_t tile) const {
    return typename C::First{at + C::kFirstAt, at + C::kFirstBarriersAt, tile};
  }
  __device__ __forceinline__ typename C::First first() const { return first(count); }
  __device__ __forceinline__ typename C::Second second() const {
    return typename C::Second{at + C::kSecondAt, at + C::kSecondBarriersAt, count};
  }
  __device__ __forceinline__ typename C::Weights weights() const {
    return typename C::Weights{at + C::kWeightsAt, at + C::kWeightsBarriersAt, count};
  }
  __device__ __forceinline__ typename C::Items item_ring(uint32_t item) const {
    return typename C::Items{at + C::kItemsAt, at + C::kItemsBarriersAt, item};
  }
  // The next item, or none (seq -1) at the end. By a whole role.
  __device__ __forceinline__ const LatentItem& next_item() {
    const auto ring = item_ring(items++);
    ring.wait_full();
    return *reinterpret_cast<const LatentItem*>(shared + C::kItemsAt + ring.stage() * C::Items::kTileBytes);
  }
  __device__ __forceinline__ void put_item(const LatentItem& item, uint32_t number) const {
    const auto ring = item_ring(number);
    *reinterpret_cast<LatentItem*>(shared + C::kItemsAt + ring.stage() * C::Items::kTileBytes) = item;
    ring.arrive_full();
  }

  // Before a tile that is full is multiplied. What the copy engine wrote needs no showing, and who writes some rows of
  // a few tiles, or widens them, shows them itself; tiles that are all copied in rows are shown by who reads them, so
  // that who copies does not wait.
  __device__ __forceinline__ void show_keys() const {
    if (!kIsFp8 && a.box_shift < 0) tiles::show_to_multiplications();
  }
  // FP8: a stage's raw bytes are there.
  __device__ __forceinline__ uint32_t arrived(uint32_t tile) const {
    return at + C::kArrivedAt + first(tile).stage() * 8;
  }
  static __device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
    return (chunk / 8) * C::kColumnBytes + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
  }

  __device__ __forceinline__ uint32_t scored() const { return at + C::kScoredAt; }
  __device__ __forceinline__ void init_barriers() const {
    first(0).init(128, 8 * tiles::arrivals_of(32));
    if (C::kParts == 2) second().init(128, 8 * tiles::arrivals_of(32));
    weights().init(128, 8 * tiles::arrivals_of(32));
    item_ring(0).init(1, 1);
    tiles::init_barrier(scored(), 4 * tiles::arrivals_of(32));
    for (int s = 0; s < 2; s++) tiles::init_barrier(at + C::kArrivedAt + s * 8, 4);
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
