#include "cpu/row.h"

#include <string.h>

namespace kvx {
namespace cpu {

namespace {

uint8_t load_code(const PlaneParams& p, char* cell, int64_t d) {
  const uint8_t c = *reinterpret_cast<uint8_t*>(element_at(p, cell, d));
  return dtype_bits(p.dtype) == 4 ? (d % p.pack & 1 ? c >> 4 : c & 15) : c;
}

// Strided elements, one at a time: rare (a transposed V, a caller's permuted tensor), so short rather than fast.
void write_strided(const PlaneParams& p, const RowsParams& rows, char* cell, const char* src, const ScaleAt& at) {
  const int64_t size = p.scale.group_size;
  for (int64_t g = 0; g * size < p.head_dim; g++) {
    float amax = 0;
    if (p.scale.mode == SCALE_COMPUTED)
      for (int64_t d = g * size; d < (g + 1) * size; d++) {
        const float a = float_of(bits_of(load_float(src + d * rows.dim, rows.dtype)) & 0x7fffffffu);
        if (a < float_of(0x7f800000u) && a > amax) amax = a;
      }
    const float scale = settle_scale(p.scale, at, g, p.dtype, amax);
    for (int64_t d = g * size; d < (g + 1) * size; d++) {
      char* to = element_at(p, cell, d);
      const char* from = src + d * rows.dim;
      if (p.dtype == rows.dtype) {
        memcpy(to, from, size_t(element_bytes(p.dtype)));
      } else if (!is_quantised(p.dtype)) {
        store_float(to, p.dtype, load_float(from, rows.dtype));
      } else {
        const uint8_t c = encode8(load_float(from, rows.dtype) / scale, p.dtype);
        uint8_t* b = reinterpret_cast<uint8_t*>(to);
        if (dtype_bits(p.dtype) == 8) *b = c;
        else *b = d % p.pack & 1 ? uint8_t((*b & 15) | c << 4) : uint8_t((*b & 0xf0) | c);
      }
    }
  }
}

void gather_strided(const PlaneParams& p, const RowsParams& rows, char* dst, char* cell, const ScaleAt& at) {
  for (int64_t d = 0; d < p.head_dim; d++) {
    char* to = dst + d * rows.dim;
    if (p.dtype == rows.dtype) memcpy(to, element_at(p, cell, d), size_t(element_bytes(p.dtype)));
    else if (!is_quantised(p.dtype)) store_float(to, rows.dtype, load_float(element_at(p, cell, d), p.dtype));
    else
      store_float(to, rows.dtype,
                  decode8(load_code(p, cell, d), p.dtype) * read_scale(p.scale, at, d / p.scale.group_size));
  }
}

}  // namespace

void write_row(const RowTable& ops, const PlaneParams& p, const RowsParams& rows, char* cell, const char* src,
               const ScaleAt& at) {
  if (!has_dense_pieces(p) || !rows.is_dense) return write_strided(p, rows, cell, src, at);
  const int64_t size = p.scale.group_size;
  const bool copy = p.dtype == rows.dtype;
  for (int64_t g = 0; g * size < p.head_dim; g++) {
    const char* group = src + g * size * rows.dim;
    const float amax = p.scale.mode == SCALE_COMPUTED ? ops.amax[rows.dtype](group, size) : 0.0f;
    const float scale = settle_scale(p.scale, at, g, p.dtype, amax);
    for (int64_t d = g * size; d < (g + 1) * size;) {  // a piece ends with the group or with the pack
      const int64_t n = least((g + 1) * size - d, p.pack - d % p.pack);
      char* to = element_at(p, cell, d);
      if (copy) ops.copy(to, src + d * rows.dim, span_bytes(p.dtype, n));
      else ops.encode[rows.dtype][p.dtype](to, src + d * rows.dim, n, scale);
      d += n;
    }
  }
}

void gather_row(const RowTable& ops, const PlaneParams& p, const RowsParams& rows, char* dst, char* cell,
                const ScaleAt& at) {
  if (!has_dense_pieces(p) || !rows.is_dense) return gather_strided(p, rows, dst, cell, at);
  const int64_t size = p.scale.group_size;
  const bool copy = p.dtype == rows.dtype;
  for (int64_t g = 0; g * size < p.head_dim; g++) {
    const float scale = read_scale(p.scale, at, g);
    for (int64_t d = g * size; d < (g + 1) * size;) {
      const int64_t n = least((g + 1) * size - d, p.pack - d % p.pack);
      char* from = element_at(p, cell, d);
      if (copy) ops.copy(dst + d * rows.dim, from, span_bytes(p.dtype, n));
      else ops.decode[p.dtype][rows.dtype](dst + d * rows.dim, from, n, scale);
      d += n;
    }
  }
}

void zero_row(const RowsParams& rows, char* dst, int64_t head_dim) {
  if (rows.is_dense) {
    memset(dst, 0, size_t(head_dim * rows.dim));
  } else {
    for (int64_t d = 0; d < head_dim; d++) memset(dst + d * rows.dim, 0, size_t(element_bytes(rows.dtype)));
  }
}

}  // namespace cpu
}  // namespace kvx
