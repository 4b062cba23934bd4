// Merging partial attention: what its kernels are given. Strides in bytes.
//
//   m = max(lse of the parts, sink); w = exp(lse - m)
//   out = sum(w * out) / (sum(w) + exp(sink - m)); lse = m + log(sum(w))
//
// Parts whose lse is -inf are not read. Products and sums are rounded one by one, in the order of the parts.
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

struct MergeParams {
  RowsParams parts;  // [P, T, H, D]
  int64_t part;      // from part to part
  const char* lses;  // f32 [P, T, H]
  int64_t lses_part, lses_token, lses_head;
  RowsParams out;  // [T, H, D]
  char* lse;       // f32 [T, H]; NULL = not wanted
  int64_t lse_token, lse_head;
  const char* sinks;  // f32 [H]; NULL = none
  int64_t sink_stride;
  int64_t num_parts, num_tokens, num_heads, head_dim;
  int32_t device;
};

kvx_status_t run_merge(const kvx_merge_args_t& args, void* stream);

namespace cpu {
kvx_status_t merge(const MergeParams& p);
}
namespace cuda {
KVX_ON_DEVICE(merge, MergeParams)
}

}  // namespace kvx
