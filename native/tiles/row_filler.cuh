// A warpgroup that fills K's ring and V's with rows it finds itself: the block table is asked a tile ahead, rows are
// copied 16 bytes at a time.
//
// Thread t finds row t of a tile for all, then every thread copies a chunk of every eighth (or sixteenth) row, of wide
// rows one in each part of 256 (or 128) bytes. One warp a scheduler has to keep up with two or three that multiply, so
// a copy is two instructions: offsets lie in the order a thread takes them, four to a load, and its rows differ by
// whole groups of eight, which leaves the swizzle alone. Copies arrive on their own, so who multiplies shows them to
// multiplications first.
#pragma once
#include "tiles/block_rows.cuh"
#include "tiles/kv_rings.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

template <class Rings> struct RowFiller {
  static constexpr int kThreads = 128, kArrivals = kThreads;  // a tile, on the full side
  static constexpr int kChunks = Rings::kRowBytes % 256 || Rings::kValueRowBytes % 256 ? 8 : 16;  // of a part
  static constexpr int kRowsAtOnce = kThreads / kChunks, kMine = Rings::kRows / kRowsAtOnce,
                       kPartBytes = kChunks / 8 * Rings::kColumnBytes;
  static_assert(kRowsAtOnce % 8 == 0 && kMine % 4 == 0,
                "a thread's rows are alike to the swizzle, and offsets are read by four");
  const RowFinder& finder;
  const char* const (&data)[2];  // K, V
  uint32_t chunks[2];            // of 16 bytes that a row has, of K and of V: the tile's others are zeros
  char* rings;
  uint32_t at;  // of the rings, as a shared address
  int meeting;  // where the threads meet: 1..15
  typename Rings::Ring keys = Rings::keys(at);
  typename Rings::ValueRing values = Rings::values(at);
  const TileRange* range = nullptr;
  uint32_t tile = 0;         // of the range: the next one
  RowAsked asked = {-1, 0};  // of it

  static __device__ __forceinline__ uint32_t own_thread() { return threadIdx.x % kThreads; }
  __device__ __forceinline__ void ask() {
    const bool is_there = int32_t(tile) < range->num_tiles && own_thread() < uint32_t(Rings::kRows);
    asked = ask_row(finder, range->seq, (range->first_tile + tile) * Rings::kRows + own_thread(), range->begin,
                    is_there ? range->length : 0);
  }

  __device__ __forceinline__ void begin() { clear<0>(keys), clear<1>(values); }

  // The tiles that are filled next. `of` is read until its last one is.
  __device__ __forceinline__ void start(const TileRange& of) {
    range = &of, tile = 0;
    ask();
  }

  // Chunks past the end of rows: zeros once, in every stage, where no row is copied later. They are copies, so that the
  // first tile that is called full has them.
  template <int kPlane, class Ring> __device__ __forceinline__ void clear(const Ring& ring) const {
    const uint32_t chunk = own_thread() % kChunks, place = ring.stages + Rings::chunk_at(own_thread() / kChunks, chunk);
    constexpr int kParts = (kPlane ? Rings::kValueRowBytes : Rings::kRowBytes) / 16 / kChunks;
    for (uint32_t part = 0; part < uint32_t(kParts); part++) {
      if (part * kChunks + chunk < chunks[kPlane]) continue;
#pragma unroll 1
      for (uint32_t row = 0; row < Rings::kRows; row += kRowsAtOnce)
        for (int s = 0; s < Rings::kStages; s++)
          copy_16(place + s * Ring::kTileBytes + part * kPartBytes + row * 128, data[kPlane], 0);
    }
  }

  template <int kPlane, class Ring> __device__ __forceinline__ void fill(Ring& ring, const uint32_t* offsets,
                                                                         bool is_full) const {
    const uint32_t chunk = own_thread() % kChunks, sub = own_thread() / kChunks;
    ring.wait_free();
    const uint32_t to = ring.tile() + Rings::chunk_at(sub, chunk);
    constexpr int kParts = (kPlane ? Rings::kValueRowBytes : Rings::kRowBytes) / 16 / kChunks;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const char* from = data[kPlane] + (part * kChunks + chunk) * 16;
      if (part * kChunks + chunk < chunks[kPlane])
        Rings::template copy_rows<kMine, kRowsAtOnce * 128>(to + part * kPartBytes, from,
                                                            offsets + kPlane * Rings::kRows + sub * kMine, is_full);
    }
    ring.arrive_full_when_copied();
    ring.next();
  }

  // The next tile: its rows are found and on their way when this returns.
  __device__ __forceinline__ void fill_next() {
    const uint32_t thread = own_thread();
    const uint32_t place =
        thread % kRowsAtOnce * kMine + thread / kRowsAtOnce;  // where the thread that copies this row looks
    uint32_t* offsets = Rings::offsets(rings, keys.step);
    uint4* valid = Rings::valid(rings, keys.step);
    const RowPlace row = place_row(finder, asked, range->head);
    const uint32_t there = __ballot_sync(0xffffffffu, row.block >= 0);
    if (thread < uint32_t(Rings::kRows))
      offsets[place] = row.block >= 0 ? row.offset[0] : Rings::kNoRow,
      offsets[Rings::kRows + place] = row.block >= 0 ? row.offset[1] : Rings::kNoRow;
    if (thread % 32 == 0)
      reinterpret_cast<uint32_t*>(valid)[thread / 32] = thread < uint32_t(Rings::kRows) ? there : ~0u;
    meet(meeting, kThreads);
    tile++;
    ask();
    const bool is_full = Rings::is_full(*valid);
    fill<0>(keys, offsets, is_full), fill<1>(values, offsets, is_full);
  }

  // No thread may leave while its copies are under way.
  __device__ __forceinline__ void finish() { wait_copies<0>(); }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
