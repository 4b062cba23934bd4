// A ring of tiles in shared memory that one warp fills and reads itself: it waits for its own copies, a group of them a
// tile, and for nobody else.
//
//   fill:  copy to stage `filling`, end_fill                 read:  wait_full, read stage `reading`, give_back
//
// kStages - 1 tiles are filled before the first is waited for; then each step waits for one, fills one and reads one.
// Waiting counts groups, so a step that has nothing left to copy ends its fill as well. What is filled while a tile is
// read goes where the tile before it was.
//
// A few words about a tile stand apart from it, so that every tile begins a line of 128 bytes: rows that straddle lines
// arrive in more pieces, and an H200 read 5 % less a second.
#pragma once
#include "tiles/ptx.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

template <int kStages_, int kTileBytes_> struct GroupRing {
  static constexpr int kStages = kStages_, kTileBytes = kTileBytes_, kNoteBytes = 16;
  static constexpr int bytes(int stages) { return stages * kTileBytes + (stages * kNoteBytes + 127) / 128 * 128; }
  static constexpr int kBytes = bytes(kStages);
  static_assert(kTileBytes % 128 == 0, "whole lines");
  char* stages;
  uint32_t stages_at;  // as a shared address
  int filling = 0, reading = 0;

  explicit __device__ __forceinline__ GroupRing(char* at)
      : stages(static_cast<char*>(kept_address(at))), stages_at(shared_address(stages)) {}

  __device__ __forceinline__ char* tile(int stage) const { return stages + stage * kTileBytes; }
  __device__ __forceinline__ uint32_t tile_at(int stage) const { return stages_at + stage * kTileBytes; }
  __device__ __forceinline__ uint32_t* note(int stage) const {
    return reinterpret_cast<uint32_t*>(stages + kStages * kTileBytes + stage * kNoteBytes);
  }

  __device__ __forceinline__ void end_fill() {
    commit_copies();
    filling++;
  }
  // The oldest tile is there, all lanes' parts of it.
  __device__ __forceinline__ void wait_full() const {
    wait_copies<kStages - 2>();
    __syncwarp();
  }
  // No lane fills what another still reads. What was read is filled next.
  __device__ __forceinline__ void give_back() {
    __syncwarp();
    filling = reading;
    reading = reading + 1 == kStages ? 0 : reading + 1;
  }
};

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
