// Latent attention's loading role, 16-bit rows: through the block table into a stage, by asynchronous copies.
#pragma once
#include "attention/latent/tile.cuh"

namespace kvx {
namespace cuda {

struct LatentLoad : LatentTile<false> {
  static constexpr uint32_t kNoRow = 0xffffffffu;

  // Thread t finds row t % 64 of a tile, and copies chunks t % 16 + 16 m of a half's rows t / 16 + 8 j (of the rotary
  // part: chunk t % 8 of rows t / 8 + 16 j). Rows that differ by whole eights have the same swizzle, and offsets stand
  // in the order a thread takes them: a copy is little more than one instruction, and one warp a scheduler keeps the
  // tensor cores fed.

  // Offsets of a tile to shared memory, and which rows are there (four places: who reads them may be two tiles behind);
  // the next tile's rows are asked for. The role's threads meet here.
  __device__ __forceinline__ void find(tiles::RowAsked* asked, const LatentItem& w, uint32_t next, uint32_t length,
                                       uint32_t tile) {
    const uint32_t thread = role_thread(), row = thread % 64;
    const tiles::RowPlace place = tiles::place_row(a.rows, *asked, 0);
    const bool is_there = place.block >= 0;
    const uint32_t there = __ballot_sync(0xffffffffu, is_there);
    uint32_t* offsets = reinterpret_cast<uint32_t*>(shared + C::kOffsetsAt) + tile % 2 * 2 * kLatentKeys;
    if (thread < 64) offsets[row % 8 * 8 + row / 8] = is_there ? place.offset[0] : kNoRow;
    else offsets[kLatentKeys + row % 16 * 4 + row / 16] = is_there ? place.offset[1] : kNoRow;
    if (thread == 0 || thread == 32)
      reinterpret_cast<uint32_t*>(shared + C::kValidAt)[tile % 4 * 2 + thread / 32] = there;
    tiles::meet(1, 128);
    *asked = tiles::ask_row(a.rows, w.seq, next * kLatentKeys + row, w.begin,
                            length);  // past the item's end it is asked for, and not used
  }

  __device__ __forceinline__ const uint32_t* offsets_of(uint32_t tile) const {
    return reinterpret_cast<const uint32_t*>(shared + C::kOffsetsAt) + tile % 2 * 2 * kLatentKeys;
  }

  template <bool kIsFull> __device__ __forceinline__ void copy_rows(uint32_t stage, int part,
                                                                    const uint32_t* offsets) const {
    const uint32_t thread = role_thread(), to = stage + chunk_at(thread / 16, thread % 16) + part * 4 * C::kColumnBytes;
    const char* data = a.data[0] + thread % 16 * 16 + part * kLatentDim;
    const uint4* mine = reinterpret_cast<const uint4*>(offsets + thread / 16 * 8);
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
  __device__ __forceinline__ void copy_rope(uint32_t stage, const uint32_t* offsets) const {
    const uint32_t thread = role_thread();
    const uint32_t to = stage + chunk_at(thread / 8, kLatentDim / 8 + thread % 8);
    const uint4 four = *reinterpret_cast<const uint4*>(offsets + kLatentKeys + thread / 8 * 4);
    const uint32_t offset[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; j++)
      tiles::copy_16(to + j * 16 * 128,
                     a.data[1] + thread % 8 * 16 + (offset[j] == kNoRow ? 0 : uint64_t(offset[j]) * 16),
                     offset[j] == kNoRow ? 0 : 16);
  }
  __device__ __forceinline__ bool is_full_tile(uint32_t tile) const {
    const uint2 valid = *reinterpret_cast<const uint2*>(shared + C::kValidAt + tile % 4 * 8);
    return (valid.x & valid.y) == 0xffffffffu;
  }

  __device__ __forceinline__ void load(const LatentItem& w) {
    tiles::RowAsked asked =
        tiles::ask_row(a.rows, w.seq, uint32_t(w.first_tile * kLatentKeys + role_thread() % 64), w.begin, w.length);
    const uint32_t end = w.first_tile + w.num_tiles, length = w.length;
    for (uint32_t tile = w.first_tile; tile < end; tile++, count++) {
      find(&asked, w, tile + 1, length, count);
      const uint32_t stage = keys().tile();
      const bool is_full = is_full_tile(count);
#pragma unroll
      for (int part = 0; part < kParts; part++) {
        part_of_keys(part).wait_free();
        if (is_full) copy_rows<true>(stage, part, offsets_of(count));
        else copy_rows<false>(stage, part, offsets_of(count));
        if (part == 1) copy_rope(stage, offsets_of(count));
        part_of_keys(part).arrive_full_when_copied();
      }
    }
  }
};

}  // namespace cuda
}  // namespace kvx
