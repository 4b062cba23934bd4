// Norm, rotation and append: what their kernels are given. Made and checked by append.cpp; all strides are in bytes.
//
// The arithmetic every backend keeps, in f32, each step rounded once (kvx/ops/append/norm_rope.py is the same in
// torch):
//   sum      squares of eight neighbours add up as a tree of neighbours, ((0+1)+(2+3))+((4+5)+(6+7)); those sums,
//            padded with zeros to a power of two m, add up by halves: s[i] += s[i + m/2], until one is left
//   norm     x * (1 / sqrt(sum * f32(1/head_dim) + eps)), then times (weight + weight_offset)
//   rotate   lo' = lo*c - hi*s, hi' = hi*c + lo*s; half: pairs (i, i + rotary/2), interleaved: (2i, 2i + 1)
// and rounds to the IO type at the end. More zeros than needed change nothing, so any wider
// tree of the same kind will do.
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

enum RowKind { ROW_Q = 0, ROW_K = 1, ROW_V = 2, ROW_KINDS = 3 };

struct NormRopeParams {
  const char* weight[2];  // Q, K: [head_dim], adjacent; NULL = no norm
  int32_t weight_dtype[2];
  const char* cos;  // [max_positions, rotary / 2], rows adjacent inside
  const char* sin;
  int64_t cos_row, sin_row;
  const void* positions;  // [T]
  int64_t position_stride, max_positions;
  int32_t position_bytes;  // 4 or 8
  int32_t table_dtype;     // of cos and sin
  int32_t style;           // kvx_rope_style_t
  int32_t rotary;          // elements that rotate, from the first on; 0 = none
  float eps, weight_offset;
  float inverse_dim;  // f32(1 / head_dim)

  bool changes(int kind) const { return kind != ROW_V && (style != KVX_ROPE_NONE || weight[kind] != nullptr); }
};

// Rows of Q, K and V to rows (rows_out), or Q to rows and K and V to cells (kv.plane).
struct AppendParams {
  NormRopeParams norm_rope;
  RowsParams rows[ROW_KINDS];      // in
  RowsParams rows_out[ROW_KINDS];  // out; K's and V's unread with has_cache
  int64_t heads[ROW_KINDS];        // 0 = this kind is absent
  int64_t dim[ROW_KINDS];
  bool has_cache;
  WriteParams kv;           // planes, slots; its rows are not used
  const int64_t* bases[2];  // K, V: an address a block instead of data + block * stride; NULL = one buffer
  int64_t num_tokens;
  int32_t device;
  unsigned long long* errors;
};

// Lower, check memory, run; the entry points and the door end here.
kvx_status_t run_norm_rope(const kvx_qkv_norm_rope_args_t& args, void* stream);
kvx_status_t run_append(const kvx_cache_t& cache, const kvx_append_args_t& args, void* stream);

namespace cpu {
kvx_status_t append(const AppendParams& p);
}
namespace cuda {
KVX_ON_DEVICE(append, AppendParams)
}

}  // namespace kvx
