// Attention over latent caches (MLA) on Hopper: 64 query rows against tiles of 64 keys. A key is 512 elements of latent
// and 64 of rotary part; the latent is the value too, and is read out of the same shared memory.
//
// A query row is one head of one token. Four warpgroups have a job each, and hand tiles on through barriers:
//
//   load     rows through the block table into two stages; FP8 rows become f16 on the way
//   soften   scores, and the weights they become (64 x 64, left in shared memory) while the values of the tile before
//            are added
//   add, 2x  weights by values, half of the latents each, sums in registers
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
__global__ void __launch_bounds__(LatentConfig<kIsFp8>::kThreads, 1)
    attend_latent(const __grid_constant__ LatentArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  const LatentTile<kIsFp8> tile{a, shared, tiles::shared_address(shared)};
  wait_for_previous();
  if (a.is_split && int(blockIdx.x) / a.together >= reinterpret_cast<const PlanHeader*>(a.workspace)->workers) return;
  if (threadIdx.x == 32) tile.init_barriers();
  __syncthreads();
  const int role = threadIdx.x / 128;
  // The branch is one of the whole warp, as the compiler sees it.
  const auto is_item = [](const LatentItem& item) { return __any_sync(0xffffffffu, item.seq >= 0) != 0; };
  if (role == 0) {
    tiles::give_registers<kIsFp8 ? 96 : 40>();
    typename std::conditional<kIsFp8, LatentLoadFp8, LatentLoad>::type p{tile};
    // The last warp finds the next item while this one is loaded.
    const bool finds = threadIdx.x == 96;
    LatentWalk walk;
    if (a.is_split) {
      if (finds) {
        walk.begin(a);
        p.put_item(walk.next(a), 0);
      }
    } else if (threadIdx.x >= 96) {
      const LatentItem item = find_latent_item(a, blockIdx.x);
      if (finds) p.put_item(item, 0);
    }
    for (;;) {
      const LatentItem& item = p.next_item();
      if (!is_item(item)) break;
      if (finds) p.put_item(a.is_split ? walk.next(a) : no_item(), p.items);
      __syncwarp();
      p.load(item);
    }
    tiles::wait_copies<0>();
  } else if (role == 1) {
    tiles::give_registers<kIsFp8 ? 64 : 120>();
    LatentSoften<kIsFp8> p{tile};
    for (;;) {
      const LatentItem& item = p.next_item();
      if (!is_item(item)) break;
      p.soften(item);
    }
    if (a.is_split) let_next_start();
  } else {
    tiles::take_registers<176>();
    const auto add_all = [&](auto p) {
      for (;;) {
        const LatentItem& item = p.next_item();
        if (!is_item(item)) break;
        p.add(item);
      }
    };
    if (role == 2) add_all(LatentAdd<kIsFp8, 0>{tile});
    else add_all(LatentAdd<kIsFp8, 1>{tile});
  }
#endif
}

}  // namespace cuda
}  // namespace kvx
