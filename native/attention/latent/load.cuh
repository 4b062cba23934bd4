// Latent attention's loading role, 16-bit rows: through the block table into a stage.
//
// Whole tiles of a cache that the copy engine can be told of are a copy a block and column, asked for by one thread a
// warp. Tiles in which a sequence begins or ends, or whose blocks are not all there, and other caches, are copied 16
// bytes at a time by all threads: rows that are not there become zeros.
#pragma once
#include "attention/latent/tile.cuh"

namespace kvx {
namespace cuda {

struct LatentLoad : LatentTile<false> {
  static constexpr uint32_t kNoRow = 0xffffffffu;

  // What of an item is loaded, in registers: it is asked for in every tile.
  struct Span {
    uint32_t seq, begin, length;

    __device__ __forceinline__ bool has_all(uint32_t tile) const {
      return tile * kLatentKeys >= begin && (tile + 1) * kLatentKeys <= length;
    }
  };

  // Of a tile to be copied in boxes, a lane's box; of others, the thread's row. Past the item's end rows are asked for,
  // and not used.
  __device__ __forceinline__ tiles::RowAsked ask(const Span& w, uint32_t tile) const {
    const bool is_boxes = a.box_shift >= 0 && w.has_all(tile);
    const uint32_t row = is_boxes ? role_thread() % 32 << a.box_shift : role_thread() % kLatentKeys;
    return tiles::ask_row(a.rows, w.seq, tile * kLatentKeys + row, w.begin, row < kLatentKeys ? w.length : 0);
  }

  // ---- by boxes. Warp v has column v of a half's four, and the last the rotary part too.

  __device__ __forceinline__ void copy_boxes(const tiles::RowAsked& mine) const {
    const uint32_t thread = role_thread(), warp = thread / 32, stage = keys().tile(), num_boxes = 64u >> a.box_shift;
    if (thread == 0) *reinterpret_cast<uint2*>(shared + C::kValidAt + count % 4 * 8) = make_uint2(~0u, ~0u);
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      const uint32_t full = part_of_keys(part).full(), column = part * 4 + warp;
      part_of_keys(part).wait_free();
      if (thread == 0) {  // for all: the others' bytes are counted too
        tiles::expect_bytes(full, (4 + part) * C::kColumnBytes);
        tiles::arrive_times(full, 128);
      }
#pragma unroll 1
      for (uint32_t i = 0; i < num_boxes; i++) {
        const int32_t block = __shfl_sync(0xffffffffu, mine.id, i),
                      token = __shfl_sync(0xffffffffu, int32_t(mine.inside), i);
        if (!tiles::is_elected()) continue;
        const uint32_t to = stage + (i << a.box_shift) * 128;
        tiles::copy_box(to + column * C::kColumnBytes, a.maps[0], column * 64, 0, token, block, full);
        if (part == 1 && warp == 3)
          tiles::copy_box(to + kLatentDim / 64 * C::kColumnBytes, a.maps[1], 0, 0, token, block, full);
      }
    }
  }

  // ---- by rows. Thread t finds row t % 64 of a tile, and copies chunks t % 16 + 16 m of a half's rows t / 16 + 8 j
  // (of the rotary part: chunk t % 8 of rows t / 8 + 16 j). Rows that differ by whole eights have the same swizzle, and
  // offsets stand in the order a thread takes them: a copy is little more than one instruction.

  __device__ __forceinline__ uint32_t* offsets() const {
    return reinterpret_cast<uint32_t*>(shared + C::kOffsetsAt) + count % 2 * 2 * kLatentKeys;
  }
  // Offsets of the tile to shared memory, and which rows are there (four places: who reads them may be two tiles
  // behind). The role's threads meet here.
  __device__ __forceinline__ void find(const tiles::RowAsked& mine) const {
    const uint32_t thread = role_thread(), row = thread % 64;
    const tiles::RowPlace place = tiles::place_row(a.rows, mine, 0);
    const bool is_there = place.block >= 0;
    const uint32_t there = __ballot_sync(0xffffffffu, is_there);
    if (thread < 64) offsets()[row % 8 * 8 + row / 8] = is_there ? place.offset[0] : kNoRow;
    else offsets()[kLatentKeys + row % 16 * 4 + row / 16] = is_there ? place.offset[1] : kNoRow;
    if (thread == 0 || thread == 32)
      reinterpret_cast<uint32_t*>(shared + C::kValidAt)[count % 4 * 2 + thread / 32] = there;
    tiles::meet(1, 128);
  }

  template <bool kIsFull> __device__ __forceinline__ void copy_half(int part) const {
    const uint32_t thread = role_thread(),
                   to = keys().tile() + chunk_at(thread / 16, thread % 16) + part * 4 * C::kColumnBytes;
    const char* data = a.data[0] + thread % 16 * 16 + part * kLatentDim;
    const uint4* mine = reinterpret_cast<const uint4*>(offsets() + thread / 16 * 8);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 four = mine[h];
      const uint32_t offset[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const bool is_there = kIsFull || offset[j] != kNoRow;
        const char* from = data + (is_there ? uint64_t(offset[j]) * 16 : 0);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          if (kIsFull) tiles::copy_16(to + m * 2 * C::kColumnBytes + (4 * h + j) * 1024, from + m * 256);
          else tiles::copy_16(to + m * 2 * C::kColumnBytes + (4 * h + j) * 1024, from + m * 256, is_there ? 16 : 0);
        }
      }
    }
  }
  __device__ __forceinline__ void copy_rope() const {
    const uint32_t thread = role_thread();
    const uint32_t to = keys().tile() + chunk_at(thread / 8, kLatentDim / 8 + thread % 8);
    const uint4 four = *reinterpret_cast<const uint4*>(offsets() + kLatentKeys + thread / 8 * 4);
    const uint32_t offset[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
      tiles::copy_16(to + j * 16 * 128,
                     a.data[1] + thread % 8 * 16 + (offset[j] == kNoRow ? 0 : uint64_t(offset[j]) * 16),
                     offset[j] == kNoRow ? 0 : 16);
  }
  __device__ __forceinline__ void copy_rows() const {
    const uint2 valid = *reinterpret_cast<const uint2*>(shared + C::kValidAt + count % 4 * 8);
    const bool is_full = (valid.x & valid.y) == 0xffffffffu;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      part_of_keys(part).wait_free();
      if (is_full) copy_half<true>(part);
      else copy_half<false>(part);
      if (part == 1) copy_rope();
      if (a.box_shift < 0) {
        part_of_keys(part).arrive_full_when_copied();
        continue;
      }
      tiles::commit_copies();
      tiles::wait_copies<0>();
      tiles::show_to_multiplications();
      part_of_keys(part).arrive_full();
    }
  }

  __device__ __forceinline__ void load(const LatentItem& item) {
    const Span w = {uint32_t(item.seq), uint32_t(item.begin), uint32_t(item.length)};
    const uint32_t first = item.first_tile, end = first + item.num_tiles;
    tiles::RowAsked asked = ask(w, first);
    for (uint32_t tile = first; tile < end; tile++, count++) {
      tiles::RowAsked mine = asked;
      bool is_boxes = a.box_shift >= 0 && w.has_all(tile);
      if (is_boxes) {
        const bool is_one = role_thread() % 32 << a.box_shift < kLatentKeys;
        is_boxes = __all_sync(0xffffffffu, !is_one || (mine.id >= 0 && mine.id < a.rows.kv.num_blocks));
        if (!is_boxes)
          mine = tiles::ask_row(a.rows, w.seq, tile * kLatentKeys + role_thread() % kLatentKeys, w.begin, w.length);
      }
      asked = ask(w, tile + 1);
      if (is_boxes) {
        copy_boxes(mine);
      } else {
        find(mine);
        copy_rows();
      }
    }
  }
};

}  // namespace cuda
}  // namespace kvx
