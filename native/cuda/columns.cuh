// Columns: how the fast kernels of write and gather share out a token. A column is one access wide (up to 16 bytes of a
// copy, or a chunk of 16 elements); a thread keeps its column and walks over tokens, so that addresses inside the row
// are found once.
#pragma once
#include <initializer_list>

#include "cuda/chunk.cuh"

namespace kvx {
namespace cuda {

// One plane as columns: head, then position in the head.
struct ColumnPlane {
  char* cell;                         // first byte of the plane in the cache
  char* rows;                         // first byte of the caller's rows
  uint32_t block, token, rows_token;  // byte strides
  uint32_t cell_head, cell_piece, rows_head;
  FastDivider per_head;             // columns per head
  FastDivider per_piece;            // columns per piece of a split dim (= per_head when whole)
  uint32_t cell_bytes, rows_bytes;  // bytes of one column on each side
};

struct Columns {
  ColumnPlane plane[2];
  uint32_t count[2];  // columns of K and of V; 0 leaves a plane out
};

struct Column {
  int plane;             // 0 or 1, or -1: this thread has none
  uint64_t cell, rows;   // byte offset inside a token on each side
  uint32_t head, index;  // which head, and which column of it
};

__device__ __forceinline__ uint64_t step(uint32_t count, uint32_t stride) { return uint64_t(count) * stride; }

__device__ __forceinline__ Column find_column(const Columns& c) {
  const uint32_t index = blockIdx.y * blockDim.x + threadIdx.x;
  Column out = {-1, 0, 0, 0, 0};
  if (index >= c.count[0] + c.count[1]) return out;
  out.plane = index >= c.count[0];
  const ColumnPlane& p = c.plane[out.plane];
  const uint32_t i = out.plane ? index - c.count[0] : index;
  out.head = p.per_head.divide(i);
  out.index = i - out.head * p.per_head.d;
  const uint32_t piece = p.per_piece.divide(out.index);
  out.cell =
      step(out.head, p.cell_head) + step(piece, p.cell_piece) + (out.index - piece * p.per_piece.d) * p.cell_bytes;
  out.rows = step(out.head, p.rows_head) + out.index * p.rows_bytes;
  return out;
}

// Scales found from each row, f32, with nothing on top: the common kind of quantised cache, in 32 bits.
struct PlainScale {
  char* data;
  uint32_t block, token, head, group;

  __device__ __forceinline__ float* place(uint32_t block_id, uint32_t offset, uint32_t head_id,
                                          uint32_t group_id) const {
    return reinterpret_cast<float*>(data + step(block_id, block) + step(offset, token) + step(head_id, head) +
                                    step(group_id, group));
  }
};

inline bool is_plain(const ScaleParams& s) {
  for (int64_t stride : {s.block, s.token, s.head, s.group})
    if (stride > kMaxStride) return false;
  return s.mode == SCALE_COMPUTED && s.dtype == KVX_DTYPE_F32 && !s.tensor_scale;
}

inline PlainScale make_plain(const ScaleParams& s) {
  return PlainScale{s.data, uint32_t(s.block), uint32_t(s.token), uint32_t(s.head), uint32_t(s.group)};
}

// `amax`: bits of the largest magnitude.
template <int C> __device__ __forceinline__ float plain_scale(uint32_t amax) {
  const float found = divide_by_qmax<C>(__uint_as_float(amax));
  return found > 1e-6f ? found : 1e-6f;
}

inline bool has_dense_pieces(const PlaneParams& p) {
  const int bits = dtype_bits(p.dtype);
  return bits == 4 || p.dim_lo == bits / 8;
}

// Bytes moved as they are: same type on both sides, elements side by side.
inline bool is_copy(const PlaneParams& p, const RowsParams& r) {
  return p.dtype == r.dtype && has_dense_pieces(p) && r.is_dense;
}

inline bool fits_32(const PlaneParams& p, const RowsParams& r, int64_t heads) {
  for (int64_t stride : {p.block, p.token, p.head, p.dim_hi, r.token, r.head})
    if (stride > kMaxStride) return false;
  return heads * p.head_dim <= kMaxCount / 4;
}

inline uint64_t cell_address_bits(const PlaneParams& p) {
  return uint64_t(p.block) | uint64_t(p.token) | uint64_t(p.head) | uint64_t(p.dim_hi);
}
inline uint64_t rows_address_bits(const RowsParams& r) {
  return uint64_t(r.token) | uint64_t(r.head) | uint64_t(uintptr_t(r.data));
}

// The widest access a copy of this plane allows. `more` holds the addresses blocks start at.
inline int copy_width(const PlaneParams& p, const RowsParams& r, uint64_t more) {
  const uint64_t size = dtype_bits(p.dtype) / 8;
  return common_alignment(more | cell_address_bits(p) | rows_address_bits(r) | uint64_t(p.pack) * size |
                          uint64_t(p.head_dim) * size);
}

inline void set_columns(const PlaneParams& p, const RowsParams& r, int64_t heads, int64_t per_head, int64_t per_piece,
                        int cell_bytes, int rows_bytes, ColumnPlane* out, uint32_t* count) {
  *out = ColumnPlane{p.data,
                     r.data,
                     uint32_t(p.block),
                     uint32_t(p.token),
                     uint32_t(r.token),
                     uint32_t(p.head),
                     uint32_t(p.dim_hi),
                     uint32_t(r.head),
                     make_fast_divider(per_head),
                     make_fast_divider(per_piece),
                     uint32_t(cell_bytes),
                     uint32_t(rows_bytes)};
  *count = uint32_t(heads * per_head);
}

inline void set_copy_columns(const PlaneParams& p, const RowsParams& r, int64_t heads, int width, ColumnPlane* out,
                             uint32_t* count) {
  const int size = dtype_bits(p.dtype) / 8;
  set_columns(p, r, heads, int64_t(p.head_dim) * size / width, int64_t(p.pack) * size / width, width, width, out,
              count);
}

// Chunks of 16 elements with a cast or a quantisation between.
inline bool fits_chunks(const PlaneParams& p, const RowsParams& r, uint64_t more) {
  if (!has_dense_pieces(p) || !r.is_dense || p.head_dim % kChunk || p.pack % kChunk || p.scale.group_size % kChunk)
    return false;
  return common_alignment(more | cell_address_bits(p)) >= (dtype_bits(p.dtype) >= 16 ? 16 : 4) &&
         common_alignment(rows_address_bits(r)) >= 16;
}

inline void set_chunk_columns(const PlaneParams& p, const RowsParams& r, int64_t heads, ColumnPlane* out,
                              uint32_t* count) {
  set_columns(p, r, heads, p.head_dim / kChunk, p.pack / kChunk, kChunk * dtype_bits(p.dtype) / 8,
              kChunk * dtype_bits(r.dtype) / 8, out, count);
}

// Lanes that share a scale sit side by side in one warp.
inline bool fits_shuffle(const PlaneParams& p, Tile tile) {
  const int lanes = p.scale.group_size / kChunk;
  return (lanes & (lanes - 1)) == 0 && lanes <= 32 && tile.columns % unsigned(lanes) == 0 &&
         tile.columns * tile.lanes % 32 == 0;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace cuda
}  // namespace kvx
