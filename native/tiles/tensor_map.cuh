// Hopper's copy engine: one thread asks for a box of a plane that a tensor map describes, and the bytes arrive at a
// barrier.
//
// The map is made on the host (tensor_map.h): a paged plane as [block][token of it][head][dim], a box 64 elements of
// one head of some tokens of one block. A box lands as rows of 128 bytes, swizzled as Swizzle<128> and descriptors of
// multiplications have it. What is outside of the plane is written as zeros, and not read.
#pragma once
#include <cuda.h>

#include "tiles/barrier.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

// The map has to be in a __grid_constant__ parameter, or in global memory that the host wrote.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// So many bytes more have to arrive before the phase is over. Comes before the copies; arriving is apart.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// One thread. `to`: a multiple of 1024, so that row 0 of the box is row 0 of the swizzle.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int32_t dim, int32_t head, int32_t token,
                                         int32_t block, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(dim), "r"(head), "r"(token), "r"(block)
      : "memory");
}

// The other way, out of shared memory that has been shown to the engine; what is outside of the plane is not written.
// Boxes end in groups, which a thread commits and waits for: that they were read, or that they are written.
__device__ __forceinline__ void store_box(const CUtensorMap& map, uint32_t from, int32_t dim, int32_t head,
                                          int32_t token) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(dim), "r"(head), "r"(token), "r"(0)
               : "memory");
}
__device__ __forceinline__ void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_boxes_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_boxes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// True in one lane, always the same one. The assembler knows that it is one: instructions of the copy engine are not
// looped over the warp.
__device__ __forceinline__ bool is_elected() {
  uint32_t is_me;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is_me));
  return is_me;
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
