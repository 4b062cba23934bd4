// Copying whole blocks inside one cache: what its kernels are given. Strides in bytes.
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

// What one block has in one array: runs of adjacent bytes on a grid of up to four axes, the shortest step first.
struct BlockBox {
  static constexpr int kAxes = 4;
  char* data;     // block 0
  int64_t block;  // from block to block
  int64_t run;    // bytes
  int64_t size[kAxes], step[kAxes];
  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }
};

struct CopyBlocksParams {
  BlockBox box[4];  // K, V, and those of their scales that have a block axis
  int32_t num_boxes;
  int32_t index_bytes;  // 4 or 8
  const void* pairs;    // [n, 2]: source, destination
  int64_t pair_stride, side_stride;
  int64_t num_pairs, num_blocks;
  int32_t device;
  unsigned long long* errors;
};

kvx_status_t run_copy_blocks(const kvx_cache_t& cache, const kvx_copy_blocks_args_t& args, void* stream);

namespace cpu {
kvx_status_t copy_blocks(const CopyBlocksParams& p);
}
namespace cuda {
KVX_ON_DEVICE(copy_blocks, CopyBlocksParams)
}

}  // namespace kvx
