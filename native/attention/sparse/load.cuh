// Sparse attention's loading role, rows of bf16: 64 of the list into a stage, 16 a warp.
//
// A lane has kSlots chunks of 16 bytes on their way at any time, across tiles, to slots that it alone reads: as
// one is stored the next is asked for, and the rows of the next tile are known by then.
#pragma once
#include "attention/sparse/item.cuh"
#include "tiles/ptx.cuh"
#include "tiles/ring.cuh"

namespace kvx {
namespace cuda {

constexpr int kSparseColumnBytes = kSparseKeys * 128, kSparseTileBytes = kSparseDim / 64 * kSparseColumnBytes;
using SparseRing = tiles::Ring<2, kSparseTileBytes>;

__device__ __forceinline__ uint32_t sparse_chunk_at(uint32_t row, uint32_t chunk) {
  return (chunk / 8) * kSparseColumnBytes + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
}

// Whether a warp's sixteen rows of a tile are there, a bit a row, twice; `pair`: of two tiles.
__device__ __forceinline__ uint32_t rows_of_tile(uint32_t pair, int second) {
  return (pair >> 16 * second & 0xffffu) * 0x10001u;
}

struct SparseLoad {
  static constexpr int kSlots = 12, kSlotBytes = 128 * 16;  // of chunks on their way: 16 bytes of each thread
  static constexpr int kRawBytes = kSlots * kSlotBytes;
  static constexpr int kLoads = 32;  // chunks of a lane in a tile
  static constexpr int kSpans = 8;   // whole 128 bytes of a row
  const SparseArgs& a;
  const SparseItem& w;
  SparseRing ring;
  uint32_t* valid;  // [4 tiles][4 warps]: a bit a row, twice
  uint32_t raw;     // the slots
  uint32_t finder;  // of KeyFinder

  // Eight lanes take 128 bytes of a row (a span), four rows at a time. Lane 16 t + r knows where row r of tile t of two
  // is.
  static __device__ __forceinline__ const char* row_of(const char* rows, int second, int k, uint32_t lane) {
    const int from = second * 16 + k / kSpans * 4 + int(lane / 8);
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(rows), from));
  }
  // Chunks k and k + 1, which are of one row.
  static __device__ __forceinline__ void copy_chunks(uint32_t slot, const char* rows, int second, int k,
                                                     uint32_t lane) {
    const char* row = row_of(rows, second, k, lane);
#pragma unroll
    for (int i = 0; i < 2; i++)
      tiles::copy_16(slot + i * kSlotBytes, row + lane % 8 * 16 + (k % kSpans + i) * 128, row ? 16 : 0);
    tiles::commit_copies();
  }
  // Chunk k of this lane to the stage; `rows` is where the warp's begin. Of row r + 4 the swizzle has another bit.
  static __device__ __forceinline__ void store_chunk(uint32_t rows, int k, uint32_t lane, const uint4& x) {
    const uint32_t flip = k / kSpans % 2 * 64, step = k / kSpans * 512;
    tiles::store_shared_16(rows + (sparse_chunk_at(lane / 8, lane % 8) ^ flip) + step + k % kSpans * kSparseColumnBytes,
                           x);
  }

  __device__ __forceinline__ void load() {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, slots = raw + threadIdx.x % 128 * 16;
    KeyFinder keys(a, w, finder);
    const char *rows = keys.find().data, *later = nullptr;  // of these two tiles, and of the next two
#pragma unroll
    for (int k = 0; k < kSlots; k += 2) copy_chunks(slots + k * kSlotBytes, rows, 0, k, lane);
    uint32_t slot = slots;
    // Chunks k and k + 1 of the tile to the stage, two for the sake of what can be done while the other waits; the
    // chunks that take their slots are number `ahead` and its neighbour of the rows `from`.
    const auto pass = [&](uint32_t tile, int k, const char* from, int second, int ahead) {
      tiles::wait_copies<kSlots / 2 - 1>();
      const uint4 x = tiles::load_shared_16(slot), y = tiles::load_shared_16(slot + kSlotBytes);
      store_chunk(tile, k, lane, x), store_chunk(tile, k + 1, lane, y);
      copy_chunks(slot, from, second, ahead, lane);
      slot = slot == slots + (kSlots - 2) * kSlotBytes ? slots : slot + 2 * kSlotBytes;
    };
    for (int32_t i = 0, n = w.num_tiles; i < n; i++) {
      const int second = i % 2;
      ring.wait_free();
      const uint32_t tile = ring.tile() + warp * 16 * 128;
      const uint32_t there = rows_of_tile(__ballot_sync(0xffffffffu, rows != nullptr), second);
      if (lane == 0) valid[ring.step % 4 * 4 + warp] = there;
#pragma unroll
      for (int k = 0; k < kLoads - kSlots; k += 2) pass(tile, k, rows, second, k + kSlots);
      // The rest of this tile comes in as the next one's first chunks are asked for.
      if (second) rows = later;
      else later = keys.find().data;
#pragma unroll
      for (int k = kLoads - kSlots; k < kLoads; k += 2) pass(tile, k, rows, second ^ 1, k - (kLoads - kSlots));
      ring.arrive_full();  // who multiplies shows itself the stores: done here, that would wait for the copies under
                           // way
      ring.next();
    }
    tiles::wait_copies<0>();
  }
};

}  // namespace cuda
}  // namespace kvx
