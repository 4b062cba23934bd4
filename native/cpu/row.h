// One (token, head) row between the caller's memory and a cell, with its scales. Shared by write.cpp and gather.cpp.
#pragma once
#include "cpu/rows.h"
#include "format.h"
#include "params.h"

namespace kvx {
namespace cpu {

using namespace common;

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greatest(int64_t a, int64_t b) { return a > b ? a : b; }

inline int element_bytes(int dtype) { return dtype_bits(dtype) / 8; }

// Bytes of n elements that stand side by side.
inline int64_t span_bytes(int dtype, int64_t n) { return n * dtype_bits(dtype) / 8; }

inline bool has_dense_pieces(const PlaneParams& p) {
  return dtype_bits(p.dtype) == 4 || p.dim_lo == element_bytes(p.dtype);
}

inline char* element_at(const PlaneParams& p, char* cell, int64_t d) {
  const int64_t in = d % p.pack;
  return cell + (d / p.pack) * p.dim_hi + (dtype_bits(p.dtype) == 4 ? in / 2 : in * p.dim_lo);
}

struct ScaleAt {
  int64_t block, offset, head;  // of the cell
  int64_t token;                // of the batch, for scales that come with tokens
};

inline char* scale_at(const ScaleParams& s, const ScaleAt& at, int64_t group) {
  return s.data + at.block * s.block + at.offset * s.token + at.head * s.head + group * s.group;
}

// The factor elements of this group are stored under, as a reader will see it.
inline float read_scale(const ScaleParams& s, const ScaleAt& at, int64_t group) {
  if (s.mode == SCALE_NONE) return 1.0f;
  const float tensor = s.tensor_scale ? *s.tensor_scale : 1.0f;
  return s.data ? load_scale(scale_at(s, at, group), s.dtype) * tensor : tensor;
}

// Like read_scale, after storing the scale when it comes with the token or from the row.
inline float settle_scale(const ScaleParams& s, const ScaleAt& at, int64_t group, int dtype, float amax) {
  if (s.mode <= SCALE_READ) return read_scale(s, at, group);
  const float tensor = s.tensor_scale ? *s.tensor_scale : 1.0f;
  const float scale = s.mode == SCALE_GIVEN
                          ? *reinterpret_cast<const float*>(s.given + at.token * s.given_token +
                                                            at.head * s.given_head + group * s.given_group)
                          : scale_from_amax(amax, dtype, s.dtype, tensor);
  store_scale(scale_at(s, at, group), s.dtype, scale);
  return read_scale(s, at, group);
}

void write_row(const RowTable& ops, const PlaneParams& plane, const RowsParams& rows, char* cell, const char* src,
               const ScaleAt& at);
void gather_row(const RowTable& ops, const PlaneParams& plane, const RowsParams& rows, char* dst, char* cell,
                const ScaleAt& at);
void zero_row(const RowsParams& rows, char* dst, int64_t head_dim);

}  // namespace cpu
}  // namespace kvx
