// What both kinds of conversion need on the device: tables of blocks, addresses of buffers, and where a unit begins.
#pragma once
#include "cuda/device.cuh"
#include "cuda/staging.cuh"
#include "move/convert.h"
#include "table.h"

namespace kvx {
namespace cuda {

constexpr int kSmallBuffers = 192;  // addresses that travel with a launch: 80 layers of K and V on each side
constexpr int kSmallIds = 512;      // block ids that do

struct DeviceTables {
  const void* ids[2];  // NULL: small_ids
  int64_t row_stride[2], index_stride[2], num_blocks[2];
  const void* seq_lens;
  int64_t len_stride;
  FastDivider units_per_seq, units_per_block[2];
  uint32_t unit_tokens;
  int32_t index_bytes[2], len_bytes;
  unsigned long long* errors;
  char* const* buffers[2];  // NULL: small_buffers
  char* small_buffers[2][kSmallBuffers];
  int32_t small_ids[2][kSmallIds];
};

// Where a box lies on both sides.
struct DevicePlace {
  char* base[2];  // NULL: looked up
  int64_t offset[2], block[2], outer[2], inner[2];
  uint32_t split[2];
  int32_t buffer[2], block_step[2];
};

enum Take : int32_t { WHOLE_UNITS, CUT_UNITS, ALL_UNITS };

struct Here {
  char* at[2];  // of the unit; an offset from NULL where buffers are looked up
  int64_t block[2];
  uint32_t start[2];  // token of the block the unit begins with
  uint32_t tokens;    // 0: nothing to do here
};

__device__ __forceinline__ Here find_unit(const DeviceTables& t, const DevicePlace& place, uint32_t unit, Take take,
                                          bool counts) {
  const uint32_t seq = t.units_per_seq.divide(unit), u = unit - seq * t.units_per_seq.d;
  Here here = {};
  int64_t tokens = t.unit_tokens;
  if (t.seq_lens) {
    tokens = read_index(t.seq_lens, seq * t.len_stride, t.len_bytes) - int64_t(u) * t.unit_tokens;
    if (tokens <= 0 || (take != ALL_UNITS && (tokens < t.unit_tokens) != (take == CUT_UNITS))) return here;
  }
#pragma unroll
  for (int w = 0; w < 2; w++) {
    const uint32_t column = t.units_per_block[w].divide(u);
    const int64_t id = t.ids[w]
                           ? read_index(t.ids[w], seq * t.row_stride[w] + column * t.index_stride[w], t.index_bytes[w])
                           : t.small_ids[w][seq * uint32_t(t.row_stride[w]) + column];
    if (id < 0) return here;
    if (id >= t.num_blocks[w]) {
      if (counts && t.errors) atomicAdd(t.errors, 1ull);
      return here;
    }
    here.block[w] = id;
    here.start[w] = (u - column * t.units_per_block[w].d) * t.unit_tokens;
    const uint32_t whole = here.start[w] / place.split[w];
    here.at[w] = place.base[w] + (id * place.block[w] + whole * place.outer[w] +
                                  (here.start[w] - whole * place.split[w]) * place.inner[w]);
  }
  here.tokens = uint32_t(tokens < t.unit_tokens ? tokens : t.unit_tokens);
  return here;
}

// Adds bytes, and the buffer that `steps` leads to where buffers are looked up.
__device__ __forceinline__ void move_on(const DeviceTables& t, const DevicePlace& place, const int64_t (&byte)[2],
                                        const int32_t (&steps)[2], Here* here) {
#pragma unroll
  for (int w = 0; w < 2; w++) {
    here->at[w] += byte[w];
    if (!place.base[w]) {
      const int64_t n = place.buffer[w] + here->block[w] * place.block_step[w] + steps[w];
      here->at[w] += uintptr_t(t.buffers[w] ? t.buffers[w][n] : t.small_buffers[w][n]) + place.offset[w];
    }
  }
}

// The same of the source alone.
__device__ __forceinline__ void move_on_source(const DeviceTables& t, const DevicePlace& place, int64_t byte,
                                               int32_t steps, Here* here) {
  here->at[0] += byte;
  if (!place.base[0]) {
    const int64_t n = place.buffer[0] + here->block[0] * place.block_step[0] + steps;
    here->at[0] += uintptr_t(t.buffers[0] ? t.buffers[0][n] : t.small_buffers[0][n]) + place.offset[0];
  }
}

// ---- what is launched, and what a bound plan keeps for it

// What every launch of a run is given.
struct Run {
  const Bound& bound;
  const BlockTables& blocks;
  const DeviceTables& tables;  // the blocks and the buffers, as kernels read them
  void* stream;
};

// Made once for a bound plan: all but the blocks, and the grid that follows from how many there are.
struct LaunchBase {
  virtual ~LaunchBase() = default;
  virtual kvx_status_t check(const BlockTables& blocks) const = 0;  // whether a launch takes so many
  virtual kvx_status_t start(const Run& run) const = 0;
};

struct Residue : Resident {
  std::vector<std::unique_ptr<LaunchBase>> launches;
  DeviceTables tables;  // with the blocks the plan was bound with, if any
  Ahead buffers, blocks;
};

DevicePlace make_place(const Job& job);
// Addresses of buffers: with each launch where they fit, otherwise sent ahead.
kvx_status_t place_buffers(const Bound& bound, DeviceTables* out, Ahead* ahead);
// The blocks of a run. Ids of the host go with each launch where they fit; others, and lengths, are put into `slot`,
// whose first `bytes` are then to be sent. NULL: nothing is.
kvx_status_t place_blocks(const BlockTables& blocks, DeviceTables* out, SlotRef* slot, size_t* bytes);
kvx_status_t add_box_launches(const Bound& bound, Residue* residue);
kvx_status_t add_cell_launches(const Bound& bound, Residue* residue);

}  // namespace cuda
}  // namespace kvx
