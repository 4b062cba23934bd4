// K's ring and V's, side by side in shared memory, and what goes with them: tiles of 128 or 64 rows as warpgroups
// multiply them.
//
// A tile is columns of 128 bytes: all rows' first 128 bytes, then all rows' next, swizzled. Rows are asked for by
// TileRange, and which of a tile's rows are there stands in `valid`, a bit a row, from the moment K's tile is full. It
// has four places: those who multiply read it after they gave K's stage back. A row may end before the tile's columns
// do (head_dim 80 and 96 in tiles of 128): the tile is zeros from there on, whatever stands after the row in memory.
// V's rows may be narrower than K's.
#pragma once
#include "tiles/ring.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

// Tiles of one sequence and KV head, in order: kRows positions each, the first of tile 0 is position 0.
struct TileRange {
  int32_t seq, head, first_tile, num_tiles;
  int32_t begin, length;  // positions before `begin`, and from `length` on, are not there
};

template <int kRowBytes_, int kStages_, int kRows_ = 128, int kValueRowBytes_ = kRowBytes_> struct KvRings {
  static constexpr int kRows = kRows_, kRowBytes = kRowBytes_, kValueRowBytes = kValueRowBytes_, kStages = kStages_;
  static constexpr int kColumns = kRowBytes / 128, kValueColumns = kValueRowBytes / 128, kColumnBytes = kRows * 128;
  static constexpr int kTileBytes = kRows * kRowBytes, kValueTileBytes = kRows * kValueRowBytes;
  static_assert(kRowBytes % 128 == 0 && kValueRowBytes % 128 == 0 && (kRows == 128 || kRows == 64), "whole columns");
  using Ring = tiles::Ring<kStages, kTileBytes>;
  using ValueRing = tiles::Ring<kStages, kValueTileBytes>;
  // From the first byte of the rings, which is a multiple of 1024.
  static constexpr int kKeysAt = 0, kValuesAt = kStages * kTileBytes,
                       kOffsetsAt = kValuesAt + kStages * kValueTileBytes, kOffsetBytes = 2 * kRows * 4;
  static constexpr int kValidAt = kOffsetsAt + 2 * kOffsetBytes, kBarriersAt = kValidAt + 4 * 16,
                       kBytes = kBarriersAt + 2 * Ring::kBarrierBytes;
  static constexpr uint32_t kNoRow = 0xffffffffu;  // no offset is as large: they end below 64 GB

  static __device__ __forceinline__ Ring keys(uint32_t at) { return Ring{at + kKeysAt, at + kBarriersAt}; }
  static __device__ __forceinline__ ValueRing values(uint32_t at) {
    return ValueRing{at + kValuesAt, at + kBarriersAt + Ring::kBarrierBytes};
  }
  static __device__ __forceinline__ uint4* valid(char* rings, uint32_t tile) {
    return reinterpret_cast<uint4*>(rings + kValidAt) + tile % 4;
  }
  // What one filling thread found and another needs: [K, V][kRows] offsets of a tile's rows, in an order of the
  // filler's own, or blocks. Two places: when those of tile i + 2 are written, all who fill have met after tile i's
  // were read.
  static __device__ __forceinline__ uint32_t* offsets(char* rings, uint32_t tile) {
    return reinterpret_cast<uint32_t*>(rings + kOffsetsAt) + tile % 2 * 2 * kRows;
  }

  static __device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
    return (chunk / 8) * kColumnBytes + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
  }
  // A thread's chunk of kCount rows, kStep bytes apart in shared memory. Offsets lie in the order the rows are taken,
  // four to a load; zeros where there is no row, which a full tile need not ask.
  template <int kCount, int kStep> static __device__ __forceinline__ void copy_rows(uint32_t to, const char* from,
                                                                                    const uint32_t* offsets,
                                                                                    bool is_full) {
#pragma unroll
    for (int j = 0; j < kCount; j += 4) {
      const uint4 four = reinterpret_cast<const uint4*>(offsets)[j / 4];
      const uint32_t offset[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int k = 0; k < 4; k++) {
        if (is_full) copy_16(to + (j + k) * kStep, from + uint64_t(offset[k]) * 16);
        else
          copy_16(to + (j + k) * kStep, from + (offset[k] == kNoRow ? 0 : uint64_t(offset[k]) * 16),
                  offset[k] == kNoRow ? 0 : 16);
      }
    }
  }
  // Words of rows that a tile does not have are all ones.
  static __device__ __forceinline__ bool is_full(const uint4& valid) {
    return (valid.x & valid.y & valid.z & valid.w) == 0xffffffffu;
  }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
