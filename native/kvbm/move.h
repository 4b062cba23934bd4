// What abi.cpp asks for, already checked. move.cu and batch.cu do it; absent.cpp stands in for both without CUDA.
// Results are cudaError_t as int, so that nothing here needs a CUDA header.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "../../include/kvbm_kernels.h"

namespace kvbm {

// A piece is what one chunk holds: bytes of one (block, layer, outer). Piece p of a side starts at
//   table[p / per] + p % per * step
// so that a table of chunks has per 1, and a table of whole blocks per nl*no.
struct Side {
  const void* const* table;  // the device reads it
  uint64_t per, step;        // pieces under one pointer; bytes from one to the next
};

// Pieces that are one run of bytes on both sides.
struct Copy {
  Side side[2];  // from, to
  uint64_t num_pieces, piece_bytes;
};

// Pieces of rows, which stand in one order at the chunk and in another at the universal block. Row (i, j) of a piece
// starts i*outer + j*inner bytes after the piece does. `inner_rows` is how many j there are; j runs fastest.
struct Permute {
  Side side[2];  // from, to
  uint64_t num_pieces, piece_bytes, row_bytes, inner_rows;
  uint64_t outer[2], inner[2];
};

struct Batch {
  const void* const* src;  // the host reads both
  void* const* dst;
  size_t bytes, count;
};

int copy(const Copy& c, kvbm_stream_t stream);
int permute(const Permute& p, kvbm_stream_t stream);
int memcpy_loop(const Batch& b, kvbm_stream_t stream);   // cudaMemcpyAsync, one by one
int memcpy_batch(const Batch& b, kvbm_stream_t stream);  // cudaMemcpyBatchAsync, or 801

extern const bool kHasBatch, kIsStub;

}  // namespace kvbm
