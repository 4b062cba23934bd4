// What a decode kernel is made for: the widths of its tiles, its types, and how a block's shared memory is shared out.
#pragma once
#include "attention/decode/args.cuh"
#include "attention/decode/groups.cuh"
#include "tiles/group_ring.cuh"

namespace kvx {
namespace cuda {

// Widths of a tile's rows in the two planes, in elements, and how many warps share them. Of a latent cache the first
// plane is the latent, key and value at once, and the second the rotary part, which only keys have.
template <int kKeyDims_, int kValueDims_, int kTeam_, bool kIsLatent_ = false> struct DecodeTile {
  static constexpr int kKeyDims = kKeyDims_, kValueDims = kValueDims_, kTeam = kTeam_;
  static constexpr bool kIsLatent = kIsLatent_;
  static_assert(kKeyDims % (16 * kTeam) == 0 && kValueDims % (16 * kTeam) == 0, "slices of whole multiplications");
};

template <class Rows_, class Tile_, int kColumns_, ScaleKind kScales_, bool kOwnCaches_,
          bool kTakesOdd_ = false> struct DecodeConfig {
  using Rows = Rows_;
  using Tile = Tile_;
  static constexpr int kTeam = Tile::kTeam, kKeyDims = Tile::kKeyDims / kTeam,
                       kValueDims = Tile::kValueDims / kTeam;  // of a warp's slice
  static constexpr bool kIsLatent = Tile::kIsLatent;
  // What of a slice queries are multiplied with, and weights.
  static constexpr int kScoreDims = kIsLatent ? kKeyDims + kValueDims : kKeyDims,
                       kOutDims = kIsLatent ? kKeyDims : kValueDims;
  static constexpr int kColumns = kColumns_;  // query rows, 8 or 16
  static constexpr ScaleKind kScales = kScales_;
  static constexpr bool kOwnCaches =
      kOwnCaches_;  // every sequence has a buffer, found by a table of addresses; else blocks of one buffer
  // Rows at multiples of fewer than 16 bytes, scales of f16, and one of a head beside others of rows: kernels of 16
  // columns take them, and a few of their own for fewer rows (table.cuh). What asks for them costs a short call 4 %.
  static constexpr bool kTakesOdd = kTakesOdd_ || (kColumns == 16 && !kIsLatent);
  static_assert(kKeyDims % Rows::kGroupDims == 0 && kValueDims % Rows::kGroupDims == 0, "rows of whole groups");
  static constexpr int kKeyChunks = kKeyDims * Rows::kBits / 128, kValueChunks = kValueDims * Rows::kBits / 128;
  // A row in shared memory has room for whole swizzles; what is past its chunks is not multiplied.
  static constexpr int row_bytes(int chunks) { return (chunks + 3) / 4 * 64; }
  static constexpr int kKeyRowBytes = row_bytes(kKeyChunks), kValueRowBytes = row_bytes(kValueChunks);
  static_assert(kKeyRowBytes <= 256 && kValueRowBytes <= 256, "rows of up to 256 bytes a warp");
  static constexpr int kTokens = kTeam > 1 || kKeyRowBytes > 128 ||
                                         (kKeyRowBytes == 128 && Rows::kBits == 8) || Rows::kBits == 4
                                     ? 32
                                     : 64;
  static constexpr int kKeyBytes = kTokens * kKeyRowBytes, kValueBytes = kTokens * kValueRowBytes,
                       kTileBytes = kKeyBytes + kValueBytes;
  using Groups = GroupScales<Rows, kKeyDims, kValueDims, kTokens, kTeam>;
  static_assert((kScales == GROUP_SCALES) == (Rows::kScaleDims > 0), "scales along rows are of such rows");
  static constexpr int kScaleBytes = kScales == ROW_SCALES ? 2 * kTokens * 4 : Groups::kBytes;
  // Where a team meets: the scores of each warp, and of every token what its scales come to. There are two such places,
  // so that warps meet once a tile; one, where two would leave room for a team less.
  static constexpr int kScoreBytes = kTokens * kColumns * 4,
                       kPlaceBytes = kTeam * kScoreBytes + (kScales == ROW_SCALES ? kTokens * 16 : 0);
  static constexpr int kPlaces = kTeam == 1 ? 0 : kTeam == 4 && kColumns == 16 && Rows::kBits == 8 ? 1 : 2;
  static constexpr int worker_bytes(int stages) {
    return kTeam * (tiles::GroupRing<3, kTileBytes + kScaleBytes>::bytes(stages) + Groups::kPreparedBytes) +
           kPlaces * kPlaceBytes;
  }
  // 128 KB in flight an SM, and half as much again being worked on. Rows of fewer bits take more instructions a byte:
  // more warps hide them.
  static constexpr int most_warps() {
    if (kTeam > 1) return Rows::kBits == 4 && kColumns == 16 ? 8 : 12;
    if (Rows::kBits == 4 && kColumns == 8) return kValueDims <= 64 ? 16 : 12;
    return Rows::kBits <= 8 ? 8 : 6;
  }
  static constexpr int kMostBytes = 227 * 1024, kMostWarps = most_warps();
  static constexpr int least(int x, int y) { return x < y ? x : y; }
  // Of a latent cache two: on an H200 two teams with two stages each are 16 % faster than one with four, and one fits
  // into the 99 KB that smaller GPUs have.
  static constexpr int kLeastStages = kIsLatent ? 2 : 3;
  static constexpr int kWorkers = least(kMostWarps / kTeam, kMostBytes / worker_bytes(kLeastStages));
  static constexpr int kStages = !kIsLatent && kWorkers * worker_bytes(4) <= kMostBytes ? 4 : kLeastStages;
  using Ring = tiles::GroupRing<kStages, kTileBytes + kScaleBytes>;  // of a warp; noted are the rows that are there
  static constexpr int kWorkerBytes = worker_bytes(kStages);
  static_assert(kWorkers > 0, "shared memory of a block of threads");
};

}  // namespace cuda
}  // namespace kvx
