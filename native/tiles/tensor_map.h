// Tensor maps of paged planes: what Hopper's copy engine has to be told once, so that
// a block is an instruction (tiles/tensor_map.cuh).
#pragma once
#include <cuda.h>
#include <stdint.h>

#include "check.h"
#include "params.h"

namespace kvx {
namespace cuda {

// A plane of 16- or 8-bit elements and the geometry that goes with it. A pair of bytes counts as one element here.
struct MappedPlane {
  const PlaneParams* plane;
  int64_t num_heads, block_size, num_blocks;
  int64_t tile_rows = 128;  // of tiles that are whole boxes: 128 or 64
};

// Rows of queries or results, of 16-bit elements, [token][head][dim]: a box is `group` heads, of as many tokens as make
// box_rows.
struct MappedRows {
  const RowsParams* rows;
  int64_t head_dim, num_heads, num_tokens, group, box_rows;
};

// Tokens of a box: whole blocks, or a tile's tokens of larger ones; tiles are then whole boxes. 0 = blocks that do not
// divide so, or that are smaller than the eight rows a swizzle repeats after.
inline int64_t box_tokens(int64_t block_size, int64_t tile_rows = 128) {
  if (block_size >= tile_rows) return block_size % tile_rows == 0 ? tile_rows : 0;
  return block_size >= 8 && tile_rows % block_size == 0 ? block_size : 0;
}

// Whether the engine can be told of the plane: dense rows of whole 16 bytes, strides that are multiples of them and
// below 2^40.
bool fits_tensor_map(const MappedPlane& p);

// [block][token][head][dim] with a box of 64 elements, one head, box_tokens, one block; swizzled over 128 bytes, zeros
// outside: also past the end of rows, where they are no whole 64s.
kvx_status_t make_tensor_map(CUtensorMap* map, const MappedPlane& p);

// Likewise, a box of 64 elements of group heads; what box_rows is no multiple of does not fit.
bool fits_tensor_map(const MappedRows& p);
kvx_status_t make_tensor_map(CUtensorMap* map, const MappedRows& p);

}  // namespace cuda
}  // namespace kvx
