// copy_blocks on the device: one launch for K, V and their scales. A thread keeps its place in the block and copies it
// for a pair.
#include "move/copy_blocks.h"

#include "cuda/columns.cuh"
#include "table.h"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 256;

struct BoxArgs {
  char* data;
  int64_t block, step[BlockBox::kAxes];
  FastDivider words, size[BlockBox::kAxes - 1];  // words of a run; the last axis is what is left
  uint32_t count;                                // words of a block
  int32_t width;                                 // bytes of a word
};

struct CopyBlocksArgs {
  BoxArgs box[4];
  const void* pairs;
  int64_t pair_stride, side_stride, num_pairs, num_blocks;
  unsigned long long* errors;
  int32_t num_boxes, index_bytes;
};

template <class T> __device__ __forceinline__ void copy_word(char* dst, const char* src) {
  store_once(dst, load_once<T>(src));
}

__global__ void __launch_bounds__(kThreads) copy_block_words(const __grid_constant__ CopyBlocksArgs a) {
  uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  wait_for_previous();
  for (int64_t pair = blockIdx.y; pair < a.num_pairs; pair += gridDim.y) {
    const int64_t from = read_index(a.pairs, pair * a.pair_stride, a.index_bytes),
                  to = read_index(a.pairs, pair * a.pair_stride + a.side_stride, a.index_bytes);
    const bool is_past = from >= a.num_blocks || to >= a.num_blocks;
    if (from < 0 || to < 0 || from == to) continue;
    if (is_past) {
      if (a.errors && blockIdx.x == 0 && threadIdx.x == 0) atomicAdd(a.errors, 1ull);
      continue;
    }
    uint32_t at = index;
    for (int i = 0; i < a.num_boxes; i++) {
      const BoxArgs& box = a.box[i];
      if (at >= box.count) {
        at -= box.count;
        continue;
      }
      uint32_t rest = box.words.divide(at);
      int64_t offset = int64_t(at - rest * box.words.d) * box.width;
#pragma unroll
      for (int axis = 0; axis < BlockBox::kAxes - 1; axis++) {
        const uint32_t next = box.size[axis].divide(rest);
        offset += int64_t(rest - next * box.size[axis].d) * box.step[axis];
        rest = next;
      }
      offset += int64_t(rest) * box.step[BlockBox::kAxes - 1];
      const char* src = box.data + from * box.block + offset;
      char* dst = box.data + to * box.block + offset;
      switch (box.width) {
        case 16: copy_word<uint4>(dst, src); break;
        case 8: copy_word<uint2>(dst, src); break;
        case 4: copy_word<uint32_t>(dst, src); break;
        case 2: copy_word<uint16_t>(dst, src); break;
        default: copy_word<uint8_t>(dst, src); break;
      }
      break;
    }
  }
}

}  // namespace

kvx_status_t copy_blocks(const CopyBlocksParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_pairs == 0) return KVX_STATUS_OK;
  CopyBlocksArgs a{{},           p.pairs,  p.pair_stride, p.side_stride, p.num_pairs,
                   p.num_blocks, p.errors, p.num_boxes,   p.index_bytes};
  int64_t words = 0;
  for (int i = 0; i < p.num_boxes; i++) {
    const BlockBox& box = p.box[i];
    uint64_t bits = uint64_t(uintptr_t(box.data)) | uint64_t(box.block) | uint64_t(box.run);
    for (int64_t step : box.step) bits |= uint64_t(step);
    const int width = common_alignment(bits);
    const int64_t count = box.run / width * box.count();
    BoxArgs& b = a.box[i];
    b = BoxArgs{box.data,
                box.block,
                {box.step[0], box.step[1], box.step[2], box.step[3]},
                make_fast_divider(box.run / width),
                {make_fast_divider(box.size[0]), make_fast_divider(box.size[1]), make_fast_divider(box.size[2])},
                uint32_t(count),
                width};
    words += count;
    if (words > kMaxCount)
      return fail(KVX_STATUS_UNSUPPORTED, "a block has %lld words, more than one launch takes.", (long long)words);
  }
  const dim3 grid(unsigned(divide_up(words, kThreads)), unsigned(p.num_pairs < 65535 ? p.num_pairs : 65535), 1),
      block(kThreads, 1, 1);
  return launch_early("copy_block_words", copy_block_words, grid, block, stream, a);
}

}  // namespace cuda
}  // namespace kvx
