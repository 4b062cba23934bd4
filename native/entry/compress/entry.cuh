// The entry of a window that closes: its place in the pages, and the finish of its pooled row by one warp. Left to the
// kernels: what is pooled (entry/compress/tokens.cuh, entry/compress/running.cuh).
#pragma once
#include "cuda/columns.cuh"
#include "entry/compress/tail.cuh"
#include "entry/cuda/encode_index.cuh"

namespace kvx {
namespace cuda {

constexpr int kTokenThreads = 128, kTokenWarps = kTokenThreads / 32, kRunThreads = 256, kRunWarps = kRunThreads / 32;

struct PoolArgs {
  CompressParams p;
  FastDivider ratio, rows;  // tokens of a window; entries of a page
  AnyRow any;
  LaneFormat format;
  int32_t least_code;
  int32_t row_floats;    // of an entry in shared memory
  uint32_t edge_blocks;  // tokens: blocks that have edges, before those inside
  uint32_t windows;      // tokens: units of a block inside; running: pairs of windows, before the sequences
  uint32_t wide_warps;   // running: warps side by side along channels, a power of two; the others share out tokens
  uint32_t cluster;      // running: blocks that share the channels of a window, a power of two
};

// The value that every lane of a warp has, where the compiler cannot know that it is one.
__device__ __forceinline__ uint32_t all_lanes(uint32_t x) { return __reduce_max_sync(0xffffffffu, x); }

// ---- entries

__device__ __forceinline__ bool is_sound(const StepToken& t) {
  return t.seq >= 0 && t.start <= kMaxCount - (t.end - t.begin);
}

// A sequence that is not as it should be counts once.
__device__ __forceinline__ void count_bad(const PoolArgs& a, bool is_bad, bool counts) {
  if (is_bad && counts && a.p.errors) atomicAdd(a.p.errors, 1ull);
}

// What is read to find entry `number`. Nothing waits for it until settle_entry.
struct EntryRead {
  int32_t id, shared;
};

__device__ __forceinline__ EntryRead read_entry(const PoolArgs& a, int32_t slot, uint32_t number) {
  const CompressParams& p = a.p;
  const uint32_t page = a.rows.divide(number);
  EntryRead r{-1, 0};
  if (page < uint32_t(p.table.columns))
    r.id = __ldg(reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.table.pages) + slot * p.table.row) +
                 page);
  if (p.num_shared) r.shared = __ldg(p.num_shared + slot);
  return r;
}

// Where entry `number` goes; data NULL: it is there already, has no page, or is outside, which the one thread that
// `counts` adds up.
__device__ __forceinline__ RowAt settle_entry(const PoolArgs& a, const EntryRead& r, uint32_t number, bool counts) {
  const CompressParams& p = a.p;
  const uint32_t at = number * a.ratio.d, page = a.rows.divide(number);
  // Whole windows: at is a multiple of the ratio, and so is less than the shared tokens' windows where it is a window
  // less than them.
  if (p.num_shared && int64_t(at) + p.ratio <= r.shared) return RowAt{nullptr, nullptr};
  const bool is_bad = (p.finish.cos && at >= p.finish.num_positions) || page >= uint32_t(p.table.columns) ||
                      r.id >= p.entries.num_pages;
  count_bad(a, is_bad, counts);
  return is_bad || r.id < 0 ? RowAt{nullptr, nullptr} : row_at(p.entries, r.id, int32_t(number - page * a.rows.d));
}

__device__ __forceinline__ RowAt find_entry(const PoolArgs& a, int32_t slot, uint32_t number, bool counts) {
  return settle_entry(a, read_entry(a, slot, number), number, counts);
}

// Which finish a kernel has: code that it does not need is far to jump over.
enum Finish { FINISH_ANY, FINISH_LANES, FINISH_INDEX };

// By one warp, of a pooled row in shared memory.
template <Finish How> __device__ __forceinline__ void finish_entry(const PoolArgs& a, const RowAt& to, uint32_t number,
                                                                   float* row) {
  const CompressParams& p = a.p;
  const int32_t at = int32_t(number * a.ratio.d);
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (How == FINISH_INDEX) {
    const float4 v = *reinterpret_cast<const float4*>(row + kIndexLane * lane);
    float x[kIndexLane] = {v.x, v.y, v.z, v.w};
    finish_index(p.finish, a.any.hadamard, lane, at, x);
    store_index(p.entries, to, lane, x);
  } else if (How == FINISH_ANY && a.format == LANES_NONE) {
    finish_any(p.finish, a.any, p.dim, at, row, row + (p.dim + 3) / 4 * 4);
    store_any(p.entries, to, row);
  } else {
    const Turn turn = load_turn(p.finish, lane, at);
    float x[kChunk], w[kChunk] = {};
    if (p.finish.weight) load_weight(p.finish, lane, w);
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(row + i / kPiece * 256 + kPiece * lane + i % kPiece);
      x[i] = v.x, x[i + 1] = v.y, x[i + 2] = v.z, x[i + 3] = v.w;
    }
    finish_lanes(p.finish, lane, w, turn, x);
    if (a.format == LANES_V4_BF16) store_lanes<LANES_V4_BF16>(to, lane, a.least_code, x);
    else if (a.format == LANES_V4) store_lanes<LANES_V4>(to, lane, a.least_code, x);
    else if (a.format == LANES_BF16) store_lanes<LANES_BF16>(to, lane, a.least_code, x);
    else store_lanes<LANES_F32>(to, lane, a.least_code, x);
  }
}

// What finish_entry will read comes nearer, by one warp, while tokens are pooled.
__device__ __forceinline__ void fetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ void fetch_finish(const PoolArgs& a, uint32_t number) {
  const FinishParams& f = a.p.finish;
  const uint32_t lane = threadIdx.x % 32, at = number * a.ratio.d;
  if (f.weight && lane * 128 < uint32_t(a.p.dim) * (f.weight_dtype == KVX_DTYPE_F32 ? 4 : 2))
    fetch_line(f.weight + lane * 128);
  if (f.cos && lane < 2 && at < f.num_positions)
    fetch_line(reinterpret_cast<const char*>(lane ? f.sin : f.cos) + int64_t(at) * f.table_row);
}

}  // namespace cuda
}  // namespace kvx
