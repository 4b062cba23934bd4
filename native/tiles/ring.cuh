// A ring of tiles in shared memory: some threads fill a stage while others read another.
//
// A stage has two barriers: "full", its tile is there, and "free", all who read it are done. Each side walks through
// the stages with a Ring of its own, which counts tiles; stage and phase follow from the count, so that neither can be
// a lap off.
//
//   fill:  wait_free, write tile(), show it to multiplications, arrive_full, next
//          (or fill: all around what the caller writes)
//   read:  wait_full, read tile(), give_back
//
// Who fills is the caller's: rows through a block table (row_filler.cuh), the copy engine (map_filler.cuh), or what
// comes out of registers.
#pragma once
#include "tiles/barrier.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

template <int kStages_, int kTileBytes_> struct Ring {
  static constexpr int kStages = kStages_, kTileBytes = kTileBytes_, kBarrierBytes = 2 * kStages * 8;
  uint32_t stages, barriers;  // shared addresses
  uint32_t step = 0;          // tiles this side is done with

  __device__ __forceinline__ uint32_t stage() const { return step % kStages; }
  __device__ __forceinline__ uint32_t parity() const { return step / kStages & 1; }
  __device__ __forceinline__ uint32_t tile() const { return stages + stage() * kTileBytes; }
  __device__ __forceinline__ uint32_t full() const { return barriers + stage() * 8; }
  __device__ __forceinline__ uint32_t free() const { return barriers + (kStages + stage()) * 8; }

  // By one thread, before any other comes by. `fills` and `reads`: how many arrivals make a stage full, and free.
  __device__ __forceinline__ void init(int fills, int reads) const {
#pragma unroll
    for (int s = 0; s < kStages; s++)
      init_barrier(barriers + s * 8, fills), init_barrier(barriers + (kStages + s) * 8, reads);
  }

  __device__ __forceinline__ void next() { step++; }

  // Stages are free at first: the phase before a barrier's first counts as over.
  __device__ __forceinline__ void wait_free() const { wait(free(), parity() ^ 1); }
  __device__ __forceinline__ bool is_free() const { return is_over(free(), parity() ^ 1); }
  __device__ __forceinline__ void arrive_full() const { arrive(full()); }
  __device__ __forceinline__ void arrive_full_when_copied() const { arrive_when_copied(full()); }
  // A tile from outside: `write(tile)` puts this thread's part of it there with ordinary stores.
  template <class Write> __device__ __forceinline__ void fill(Write write) {
    wait_free();
    write(tile());
    show_to_multiplications();
    arrive_full();
    next();
  }

  __device__ __forceinline__ void wait_full() const { wait(full(), parity()); }
  __device__ __forceinline__ bool is_full() const { return is_over(full(), parity()); }
  // `arrives`: this thread does so for those it has met with. All who read step on.
  __device__ __forceinline__ void give_back(bool arrives) {
    arrive_for_all(free(), arrives);
    next();
  }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
