// Rows of a tile, found through the block table: where each of a warp's tokens lies and whether it is there.
//
// A tile may span blocks, and start anywhere in one. The table is never read past the block of the last position, and a
// row that is behind the first, past the end, or whose block id is bad, is loaded as zeros and named in `valid`: what
// stands there (stale, even NaN) is never read.
#pragma once
#include "attention/attention.h"
#include "cuda/device.cuh"
#include "table.h"

namespace kvx {
namespace cuda {
namespace tiles {

// What finds rows: the table and the planes, in the numbers a device is quick with. Offsets count units, of 16 bytes
// unless the caller asks for less: 64 GB in 32 bits.
struct RowFinder {
  GatherParams kv;
  FastDivider block_size;
  uint32_t block[2], token[2], head[2];  // steps in units, K and V
  bool is_packed_32;                     // PACKED with 32-bit ids: the common table
};

// A row asked for: its table entry may still be on the way. Turned into a place only when it is needed, so that nobody
// waits for it.
struct RowAsked {
  int32_t id;       // as the table has it; -1 = not one of those asked for
  uint32_t inside;  // token of the block
};

struct RowPlace {
  uint32_t offset[2];  // from the plane's start, in units
  int32_t block;       // id, -1 = not there
};

// Positions in [begin, end) have rows; of others the table is not read: blocks behind a window may have been given to
// somebody else.
__device__ __forceinline__ RowAsked ask_row(const RowFinder& f, uint32_t seq, uint32_t position, uint32_t begin,
                                            uint32_t end) {
  RowAsked row = {-1, 0};
  if (position < begin || position >= end) return row;
  const uint32_t logical = f.block_size.divide(position);
  row.inside = position - logical * f.block_size.d;
  if (f.is_packed_32) {
    if (logical < f.kv.table.max_blocks)
      row.id = *reinterpret_cast<const int32_t*>(static_cast<const char*>(f.kv.table.indices) +
                                                 seq * f.kv.table.row_stride + logical * 4);
  } else {
    const BlockPlace place = find_block(f.kv, seq, position, logical, 0);
    if (place.state == BLOCK_FOUND && place.id <= 0x7fffffff) row.id = int32_t(place.id);
  }
  return row;
}

// A bit for each of 32 positions from `first` that is in [begin, end).
__device__ __forceinline__ uint32_t rows_within(int32_t first, int32_t begin, int32_t end) {
  const int32_t skip = min(max(begin - first, 0), 32), left = min(max(end - first, 0), 32);
  return uint32_t((uint64_t(1) << left) - 1) & ~uint32_t((uint64_t(1) << skip) - 1);
}

__device__ __forceinline__ RowPlace place_row(const RowFinder& f, const RowAsked& row, uint32_t head) {
  if (row.id < 0 || row.id >= f.kv.num_blocks) return RowPlace{{0, 0}, -1};
  RowPlace place = {{0, 0}, row.id};
#pragma unroll
  for (int i = 0; i < 2; i++)
    place.offset[i] = uint32_t(row.id) * f.block[i] + row.inside * f.token[i] + head * f.head[i];
  return place;
}

// The cache of a sequence that has one of its own, found by a table of addresses.
struct OwnCache {
  const char* data[2];  // K, V
  int32_t id;           // of its block; -1 = there is none
};

// `none` stands in for a cache that is not there: an address that may be handed to copies of no bytes.
__device__ __forceinline__ OwnCache find_own_cache(const RowFinder& f, uint32_t seq, const char* none) {
  const int64_t id = read_index(f.kv.table.indices, int64_t(seq) * f.kv.table.row_stride, f.kv.table.index_bytes);
  OwnCache cache = {{none, none}, -1};
  if (id < 0 || id >= f.kv.num_blocks) return cache;
  const int64_t k = f.kv.bases[0][id], v = f.kv.bases[1][id];
  if (k && v) cache = OwnCache{{reinterpret_cast<const char*>(k), reinterpret_cast<const char*>(v)}, int32_t(id)};
  return cache;
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
