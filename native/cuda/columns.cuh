// Columns: how the fast kernels of write and gather share out a token. A column is one access wide (16 bytes of a copy, or a
// chunk of 8 elements); a thread keeps its column and walks over tokens, so that addresses inside the row are computed once.
#pragma once
#include "chunk.cuh"

namespace kvx {
namespace cuda {

// One plane as columns: head, then position in the head.
struct ColumnPlane {
  int64_t cell_head, cell_piece, rows_head;  // byte strides: head and piece in the cache, head in the caller's rows
  int32_t per_head;                          // columns per head
  int32_t per_piece;                         // columns per piece of a split dim (= per_head when whole)
  int32_t cell_bytes, rows_bytes;            // bytes of one column on each side
};

struct Columns {
  ColumnPlane plane[2];
  int32_t count[2];  // columns of K and of V; 0 leaves a plane out
};

struct Column {
  int plane;              // 0 or 1, or -1: this thread has none
  int64_t cell, rows;     // byte offset inside a token on each side
  int32_t head, element;  // first element in the head (chunks only)
};

__device__ __forceinline__ Column find_column(const Columns& c, int64_t index, int elements) {
  Column out = {-1, 0, 0, 0, 0};
  if (index >= c.count[0] + c.count[1]) return out;
  out.plane = index >= c.count[0];
  const ColumnPlane& p = c.plane[out.plane];
  const int32_t i = int32_t(index) - (out.plane ? c.count[0] : 0);
  const int32_t in_head = i % p.per_head;
  out.head = i / p.per_head;
  out.element = in_head * elements;
  out.cell = out.head * p.cell_head + (in_head / p.per_piece) * p.cell_piece + int64_t(in_head % p.per_piece) * p.cell_bytes;
  out.rows = out.head * p.rows_head + int64_t(in_head) * p.rows_bytes;
  return out;
}

inline bool has_dense_pieces(const PlaneParams& p) {
  const int bits = dtype_bits(p.dtype);
  return bits == 4 || p.dim_lo == bits / 8;
}

// Bytes moved as they are: same type on both sides, elements side by side.
inline bool is_copy(const PlaneParams& p, const RowsParams& r) { return p.dtype == r.dtype && has_dense_pieces(p) && r.is_dense; }

// The widest access a copy of this plane allows.
inline int copy_width(const PlaneParams& p, const RowsParams& r, uint64_t more) {
  const uint64_t size = dtype_bits(p.dtype) / 8;
  return common_alignment(more | uint64_t(p.block) | uint64_t(p.token) | uint64_t(p.head) | uint64_t(p.dim_hi) | uint64_t(r.token) | uint64_t(r.head) |
                          uint64_t(uintptr_t(r.data)) | uint64_t(p.pack) * size | uint64_t(p.head_dim) * size);
}

inline void set_copy_columns(const PlaneParams& p, const RowsParams& r, int64_t heads, int width, ColumnPlane* out, int32_t* count) {
  const int size = dtype_bits(p.dtype) / 8;
  *out = ColumnPlane{p.head, p.dim_hi, r.head, p.head_dim * size / width, p.pack * size / width, width, width};
  *count = int32_t(heads * out->per_head);
}

// Chunks of 8 elements with a cast or a quantisation between.
inline bool fits_chunks(const PlaneParams& p, const RowsParams& r, uint64_t more) {
  const int bits = dtype_bits(p.dtype);
  if (!has_dense_pieces(p) || !r.is_dense || p.head_dim % kChunk || p.pack % kChunk || p.scale.group_size % kChunk) return false;
  const uint64_t cell = more | uint64_t(p.block) | uint64_t(p.token) | uint64_t(p.head) | uint64_t(p.dim_hi);
  const uint64_t rows = uint64_t(r.token) | uint64_t(r.head) | uint64_t(uintptr_t(r.data));
  const int need = bits >= 16 ? 16 : bits;  // a chunk of 8-bit codes is 8 bytes, of 4-bit ones 4
  return common_alignment(cell) >= need && common_alignment(rows) >= 16;
}

inline void set_chunk_columns(const PlaneParams& p, const RowsParams& r, int64_t heads, ColumnPlane* out, int32_t* count) {
  *out = ColumnPlane{p.head, p.dim_hi, r.head, p.head_dim / kChunk, p.pack / kChunk, dtype_bits(p.dtype), dtype_bits(r.dtype)};
  *count = int32_t(heads * out->per_head);
}

// Lanes that share a scale sit side by side in one warp.
inline bool fits_shuffle(const PlaneParams& p, Tile tile) {
  const int lanes = p.scale.group_size / kChunk;
  return (lanes & (lanes - 1)) == 0 && lanes <= 32 && tile.columns % unsigned(lanes) == 0 && tile.columns * tile.lanes % 32 == 0;
}

}  // namespace cuda
}  // namespace kvx
