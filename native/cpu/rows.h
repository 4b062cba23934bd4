// Row conversions: n adjacent elements to n adjacent elements. rows.cpp is compiled once per instruction set and
// best_rows() picks at run time; plain C++ loops that the compiler vectorises, the same results in each.
#pragma once
#include <stdint.h>

namespace kvx {
namespace cpu {

using EncodeRow = void (*)(char* dst, const char* src, int64_t n, float scale);  // dst = cache type, x / scale
using DecodeRow = void (*)(char* dst, const char* src, int64_t n, float scale);  // dst = IO type, x * scale
using AmaxRow = float (*)(const char* src, int64_t n);                           // largest finite |x|

// Rows of `bytes` bytes on a grid of two axes, each with its stride on either side.
struct CopyGrid {
  int64_t bytes, outer, inner;
  int64_t dst_outer, dst_inner, src_outer, src_inner;
};

// Where a grid begins on either side.
struct CopyPair {
  char* dst;
  const char* src;
};

// dst[i*dst_stride + j*bytes] = src[j*src_stride + i*bytes] for i < across, j < down:
// elements of 1, 2, 4, 8 or 16 bytes.
struct Transpose {
  int64_t bytes, across, down;  // adjacent at the source; adjacent at the destination
  int64_t dst_stride, src_stride;
};

// Rows of the content digest (move/digest.h), each in `pieces` of `bytes` bytes.
struct DigestShape {
  int64_t bytes, pieces, stride;
  bool is_scattered;  // rows do not follow each other
};

struct DigestRow {
  const char* data;
  uint64_t seed;
  uint32_t word;  // the place in the row of its first one
};

// Norm and rotation of one row (append/append.h). Everything is f32 here: weights with their offset, cos and sin of the
// row's position.
struct RopeRow {
  int64_t dim, rotary;
  const float* weight;  // NULL = no norm
  const float* cos;
  const float* sin;
  float* scratch;  // dim floats, and two rooms for dim rounded up to a power of two, 8 or more
  float eps, inverse_dim;
  int32_t style;  // kvx_rope_style_t
};

using RotateRow = void (*)(char* dst, const char* src, const RopeRow& rope);  // dst may be src

struct RowTable {
  EncodeRow encode[4][14];  // [IO dtype][cache dtype], kvx_dtype_t values; NULL where there is none
  DecodeRow decode[14][4];  // [cache dtype][IO dtype]
  AmaxRow amax[4];          // [IO dtype]
  void (*copy)(char* dst, const char* src, int64_t bytes);         // a row
  void (*stream_copy)(char* dst, const char* src, int64_t bytes);  // past the caches, for what is not read again soon
  // The same grid at many places. One call for all: between calls a core stores to its stack, sees no longer whole
  // lines only, and reads every line it is about to overwrite (measured on Neoverse: 39
  // GB/s a block a call, 52 in one).
  void (*copy_grids)(const CopyGrid& grid, const CopyPair* pairs, int64_t count, bool stream);
  void (*transpose)(const Transpose& shape, const CopyPair* pairs,
                    int64_t count);  // at many places, for the same reason
  void (*digest_rows)(const DigestShape& shape, const DigestRow* rows, int64_t count,
                      uint64_t* sums);  // added to two sums
  void (*stream_fence)();               // after the last streaming copy of a thread
  RotateRow rotate[4];                  // [IO dtype]
};

extern const RowTable rows_plain;
#if defined(__x86_64__)
extern const RowTable rows_avx2;
extern const RowTable rows_avx512;
#endif

const RowTable& best_rows();

}  // namespace cpu
}  // namespace kvx
