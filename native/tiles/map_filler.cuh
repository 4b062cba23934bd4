// Warps that fill K's ring and V's through the copy engine, one or two for each, which share its columns: a block (or a
// tile's tokens of one) is one instruction of one thread a column, and four warps ask for a tile of small blocks in a
// quarter of the time.
//
// Lane l holds the block of rows [l * box, (l + 1) * box) of the next tile, asked for a tile ahead. A block that is not
// there, by its id or past the end, is a box outside of the plane: zeros; so is what of a box is past the end of rows,
// where they are shorter than the tile's. The block that the sequence ends in has stale rows, even NaN, which must be
// zeros too, so the warps copy that one box 16 bytes at a time.
//
// Proxies. Boxes are written and multiplications read by the async proxy: a barrier is enough between them, either way.
// Who reads a stage with ordinary loads instead (ValueTurner in attention/prefill/products.cuh) fences before giving it
// back.
// The last box is written by the generic one: its writers wait for their copies and fence (show_to_multiplications)
// before the stage is called full, and that fence also stands before the engine's next write there, which follows the
// readers' giving back. A box's bytes are over when its barrier's phase is, so copies into a stage the engine filled
// earlier come after them.
#pragma once
#include "tiles/block_rows.cuh"
#include "tiles/kv_rings.cuh"
#include "tiles/tensor_map.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

template <class Rings> struct MapFiller {
  static constexpr int kWarpsEach = Rings::kColumns > 1 && Rings::kValueColumns > 1 ? 2 : 1;
  static constexpr int kWarps = 2 * kWarpsEach,
                       kArrivals = kWarpsEach * arrivals_of(32);  // arrivals a tile, on the full side
  const CUtensorMap (&maps)[2];                                   // K, V
  const RowFinder& finder;
  const char* const (&data)[2];
  uint32_t box;        // tokens: a power of two, 8..kRows, that divides blocks or is one
  uint32_t chunks[2];  // of 16 bytes that a row has, of K and of V: the tile's others are zeros
  char* rings;
  uint32_t at;    // of the rings, as a shared address
  uint32_t warp;  // of kWarps
  uint32_t plane = warp / kWarpsEach, first_column = warp % kWarpsEach,
           columns = plane ? Rings::kValueColumns : Rings::kColumns;
  uint32_t shift = 0;  // box is 1 << shift
  Ring<Rings::kStages, 0> ring{at + (plane ? Rings::kValuesAt : Rings::kKeysAt),
                               (plane ? Rings::values(at).barriers : Rings::keys(at).barriers)};
  const TileRange* range = nullptr;
  uint32_t tile = 0;         // of the range: the next one
  RowAsked asked = {-1, 0};  // of it

  __device__ __forceinline__ void ask() {
    const uint32_t row = threadIdx.x % 32 * box;
    const bool is_there = row < Rings::kRows && int32_t(tile) < range->num_tiles;
    asked = ask_row(finder, range->seq, (range->first_tile + tile) * Rings::kRows + row,
                    max(range->begin - int32_t(box) + 1, 0), is_there ? range->length : 0);
  }

  __device__ __forceinline__ void begin() {
    shift = __ffs(box) - 1;
    if (is_elected()) prefetch_map(maps[plane]);
  }

  // The tiles that are filled next. `of` is read until its last one is.
  __device__ __forceinline__ void start(const TileRange& of) {
    range = &of, tile = 0;
    ask();
  }

  __device__ __forceinline__ uint32_t tile_at() const {
    return ring.stages + ring.stage() * (plane ? Rings::kValueTileBytes : Rings::kTileBytes);
  }

  // A bit a row: its block is there (`blocks`, a bit a box), and the sequence has not ended.
  __device__ __forceinline__ uint4 valid_rows(uint32_t blocks, uint32_t rows) const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t row = i * 32 + threadIdx.x % 32;
      words[i] =
          i * 32 >= Rings::kRows ? ~0u : __ballot_sync(0xffffffffu, row < rows && (blocks >> (row >> shift) & 1));
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  // The first `rows` rows of a box's columns, zeros for the rest; there and shown to multiplications when this returns.
  __device__ __forceinline__ void copy_rows(uint32_t to, uint32_t block, uint32_t token, uint32_t rows) const {
    const uint32_t lane = threadIdx.x % 32;
    const uint64_t first = uint64_t(block) * finder.block[plane] + uint64_t(token) * finder.token[plane] +
                           uint64_t(range->head) * finder.head[plane];
#pragma unroll 1
    for (uint32_t column = first_column; column < columns; column += kWarpsEach) {
      const uint32_t chunk = column * 8 + lane % 8;
#pragma unroll 1
      for (uint32_t row = lane / 8; row < box; row += 4) {
        const bool is_there = row < rows && chunk < (plane ? chunks[1] : chunks[0]);
        copy_16(to + Rings::chunk_at(row, chunk),
                data[plane] + (first + (is_there ? chunk + row * uint64_t(finder.token[plane]) : 0)) * 16,
                is_there ? 16 : 0);
      }
    }
    commit_copies();
    wait_copies<0>();
    show_to_multiplications();
    __syncwarp();
  }

  // The next tile, on its way when this returns.
  __device__ __forceinline__ void fill_next() {
    const uint32_t lane = threadIdx.x % 32, num_boxes = Rings::kRows >> shift;
    const uint32_t rows = min(Rings::kRows, max(0, range->length - int32_t(range->first_tile + tile) * Rings::kRows));
    const int32_t block = asked.id >= 0 && asked.id < finder.kv.num_blocks ? asked.id : -1, head = range->head;
    const int32_t token =
        __shfl_sync(0xffffffffu, asked.inside, 0);  // of every box: where a tile has several, each is a block
    const uint32_t blocks = __ballot_sync(0xffffffffu, block >= 0), left = rows & (box - 1);
    uint4 valid = make_uint4(~0u, ~0u, ~0u, ~0u);
    uint32_t cut = num_boxes;  // the box the sequence ends in, if its block is there
    if (rows < Rings::kRows || blocks != (1u << num_boxes) - 1) {
      valid = valid_rows(blocks, rows);
      if (left && (blocks >> (rows >> shift) & 1)) cut = rows >> shift;
    }
    int32_t* of_box =
        reinterpret_cast<int32_t*>(Rings::offsets(rings, ring.step)) + warp * 32;  // for the thread that asks
    of_box[lane] = block;
    __syncwarp();
    ring.wait_free();
    if (is_elected()) {
      if (warp == 0) *Rings::valid(rings, ring.step) = valid;
      expect_bytes(ring.full(), (columns - first_column + kWarpsEach - 1) / kWarpsEach *
                                    (num_boxes - (cut < num_boxes)) * box * 128);
#pragma unroll 1
      for (uint32_t column = first_column; column < columns; column += kWarpsEach) {
        uint32_t to = tile_at() + column * Rings::kColumnBytes;
#pragma unroll 1
        for (uint32_t i = 0; i < num_boxes; i += 4) {
          const int4 four =
              *reinterpret_cast<const int4*>(of_box + i);  // at once: copies do not wait for them one by one
          const int32_t of_blocks[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int k = 0; k < 4; k++, to += box * 128) {
            if (i + k < num_boxes && i + k != cut)
              copy_box(to, maps[plane], column * 64, head, token, of_blocks[k], ring.full());
          }
        }
      }
    }
    __syncwarp();
    if (cut < num_boxes) copy_rows(tile_at() + cut * box * 128, __shfl_sync(0xffffffffu, block, cut), token, left);
    arrive_for_all(ring.full(), is_elected());
    ring.next();
    tile++;
    ask();
  }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
