// Attention over latent caches (MLA) on Hopper: 64 query rows against tiles of 64 keys. A key is 512 elements of latent
// and 64 of rotary part; the latent is the value too, and is read out of the same shared memory.
//
// A query row is one head of one token. Four warpgroups have a job each, and hand tiles on through barriers:
//
//   load     rows through the block table into two stages; FP8 rows become f16 on the way
//   soften   scores, and the weights they become (64 x 64, left in shared memory) while the values of the tile before
//            are added
//   add, 2x  weights by values, 256 of the 512 columns each, sums in registers
//
// Sequences with few query rows (decode) are split over the whole device by a plan, as in attention/cuda/plan.cuh, and
// their parts added up by a second launch; the others have a block of threads for every 64 rows.
#pragma once
#include "attention/latent/add.cuh"
#include "attention/latent/load.cuh"
#include "attention/latent/load_fp8.cuh"
#include "attention/latent/softmax.cuh"

namespace kvx {
namespace cuda {

template <bool kIsFp8>
__global__ void __launch_bounds__(LatentConfig::kThreads, 1) attend_latent(const __grid_constant__ LatentArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  const LatentTile<kIsFp8> tile{a, shared, tiles::shared_address(shared)};
  const LatentItem* found = a.is_split ? nullptr : reinterpret_cast<const LatentItem*>(shared + LatentConfig::kFoundAt);
  // What needs nothing of earlier launches is done while they end.
  if (threadIdx.x == 0 && a.box_shift >= 0) tiles::prefetch_map(a.maps[0]), tiles::prefetch_map(a.maps[1]);
  if (threadIdx.x == 32) tile.init_barriers();
  __syncthreads();
  wait_for_previous();
  if (found) {
    if (threadIdx.x < 32) {
      const LatentItem item = find_latent_item(a, blockIdx.x);
      if (threadIdx.x == 0) *reinterpret_cast<LatentItem*>(shared + LatentConfig::kFoundAt) = item;
    }
    __syncthreads();
    if (found->seq < 0) return;
  }
  // Places in shared memory that do not depend on the role's number are constants, and take no register.
  LatentWalk* walks = reinterpret_cast<LatentWalk*>(shared + LatentConfig::kWalksAt);
  const int role = threadIdx.x / 128;
  if (role_thread() == 0) walks[role].begin(a, found);
  const auto next = [&](LatentWalk& walk, int barrier) {
    tiles::meet(barrier, 128);
    if (role_thread() == 0) walk.next(a);
    tiles::meet(barrier, 128);
    return __any_sync(0xffffffffu, walk.item.seq >= 0) != 0;  // a branch of the whole warp, as the compiler sees it
  };
  if (role == 0) {
    tiles::give_registers<kIsFp8 ? 96 : 40>();
    typename std::conditional<kIsFp8, LatentLoadFp8, LatentLoad>::type p{tile};
    while (next(walks[0], 4)) p.load(walks[0].item);
    tiles::wait_copies<0>();
  } else if (role == 1) {
    tiles::give_registers<kIsFp8 ? 64 : 120>();
    LatentSoften<kIsFp8> p{tile};
    while (next(walks[1], 5)) p.soften(walks[1].item);
    if (a.is_split) let_next_start();
  } else {
    tiles::take_registers<176>();
    LatentAdd<kIsFp8> p{tile};
    while (next(walks[role], 4 + role)) p.add(walks[role].item, role - 2);
  }
#endif
}

}  // namespace cuda
}  // namespace kvx
