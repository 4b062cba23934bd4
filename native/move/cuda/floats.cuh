// Floats that become floats of another type: by chunks of 16 where rows are whole on both sides, by tiles where they
// lie across.
#pragma once
#include "move/cuda/cells.cuh"

namespace kvx {
namespace cuda {

// From floats S to floats D.
template <int S, int D>
__global__ void __launch_bounds__(kThreads, 4) convert_float_chunks(const __grid_constant__ CellArgs a) {
  constexpr int U = 2;
  const DeviceCell& job = a.job[0];
  wait_for_previous();
  CellColumn c;
  if (!find_column(a, job, &c) || c.idle) return;
  for (uint32_t begin = c.lane; begin < c.tokens; begin += U * job.tokens_each) {
    RawChunk<S> raw[U] = {};
#pragma unroll
    for (int u = 0; u < U; u++) {
      const uint32_t token = begin + u * job.tokens_each;
      if (token < c.tokens) raw[u] = load_raw<S>(c.from + uint64_t(token) * job.token_stride[SRC]);
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      const uint32_t token = begin + u * job.tokens_each;
      if (token >= c.tokens) continue;
      float x[kChunk];
#pragma unroll
      for (int i = 0; i < kChunk; i++) x[i] = element(raw[u], i);
      store_chunk<D>(c.to + uint64_t(token) * job.token_stride[DST], x);
    }
  }
}

template <int D> __device__ __forceinline__ void store_float(char* p, float x) {
  if constexpr (D == KVX_DTYPE_F32) *reinterpret_cast<float*>(p) = one_nan(x);
  else if constexpr (D == KVX_DTYPE_BF16) *reinterpret_cast<uint16_t*>(p) = uint16_t(pack_bf16(x, 0.f));
  else *reinterpret_cast<uint16_t*>(p) = uint16_t(pack_f16(x, 0.f));
}

template <int S> __device__ __forceinline__ float load_float(const char* p) {
  if constexpr (S == KVX_DTYPE_F32) return load_once<float>(p);
  else if constexpr (S == KVX_DTYPE_BF16) return __uint_as_float(uint32_t(load_once<uint16_t>(p)) << 16);
  else return __half2float(__ushort_as_half(load_once<uint16_t>(p)));
}

constexpr uint32_t kTileSide = 64;
using FloatTile = float[kTileSide][kTileSide + 1];

// rows x dims elements, of which those of a dim are side by side. By 16 bytes where `width` allows it.
template <int S>
__device__ __forceinline__ void load_tile(FloatTile& tile, const char* from, int64_t dim_stride, uint32_t rows,
                                          uint32_t dims, int width) {
  constexpr uint32_t kBytes = element_bits<S> / 8, kWide = 16 / kBytes, kLanes = kTileSide / kWide,
                     kStep = kThreads / kLanes;
  if (width >= 16 && rows % kWide == 0) {
    const uint32_t r = threadIdx.x % kLanes * kWide, first = threadIdx.x / kLanes;
    from += first * dim_stride + r * kBytes;
    uint4 raw[kTileSide / kStep] = {};
#pragma unroll
    for (uint32_t i = 0; i < kTileSide / kStep; i++, from += kStep * dim_stride)
      if (first + i * kStep < dims && r < rows) raw[i] = load_once<uint4>(from);
#pragma unroll
    for (uint32_t i = 0; i < kTileSide / kStep; i++) {
      const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
      for (uint32_t e = 0; e < kWide; e++) tile[first + i * kStep][r + e] = element_of<S>(words, e);
    }
    return;
  }
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (uint32_t i = 0; i < kTileSide / 8; i++) {
    const uint32_t d = warp + 8 * i;
#pragma unroll
    for (uint32_t j = 0; j < kTileSide / 32; j++) {
      const uint32_t r = lane + 32 * j;
      if (d < dims && r < rows) tile[d][r] = load_float<S>(from + int64_t(d) * dim_stride + r * kBytes);
    }
  }
}

// The same elements, of which those of a row are side by side now.
template <int D>
__device__ __forceinline__ void store_tile(const FloatTile& tile, char* to, uint32_t row_stride, uint32_t rows,
                                           uint32_t dims, int width) {
  constexpr uint32_t kBytes = element_bits<D> / 8, kWide = 16 / kBytes, kLanes = kTileSide / kWide,
                     kStep = kThreads / kLanes;
  if (width >= 16 && dims % kWide == 0) {
    const uint32_t d = threadIdx.x % kLanes * kWide, first = threadIdx.x / kLanes;
    to += uint64_t(first) * row_stride + d * kBytes;
#pragma unroll
    for (uint32_t i = 0; i < kTileSide / kStep; i++, to += uint64_t(kStep) * row_stride) {
      const uint32_t r = first + i * kStep;
      if (r >= rows || d >= dims) continue;
      uint32_t words[4];
#pragma unroll
      for (uint32_t w = 0; w < 4; w++) {
        if constexpr (D == KVX_DTYPE_F32) words[w] = __float_as_uint(one_nan(tile[d + w][r]));
        else words[w] = pack_pair<D>(tile[d + 2 * w][r], tile[d + 2 * w + 1][r]);
      }
      store_once(to, make_uint4(words[0], words[1], words[2], words[3]));
    }
    return;
  }
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (uint32_t i = 0; i < kTileSide / 8; i++) {
    const uint32_t r = warp + 8 * i;
#pragma unroll
    for (uint32_t j = 0; j < kTileSide / 32; j++) {
      const uint32_t d = lane + 32 * j;
      if (d < dims && r < rows) store_float<D>(to + uint64_t(r) * row_stride + d * kBytes, tile[d][r]);
    }
  }
}

// From floats S to floats D where rows lie across: along a row elements of the destination are side by side, those of
// the source along the digit that stands in `token`. Tiles of both are turned in shared memory.
template <int S, int D>
__global__ void __launch_bounds__(kThreads) convert_float_tiles(const __grid_constant__ CellArgs a) {
  __shared__ FloatTile tile;
  const DeviceCell& job = a.job[0];
  wait_for_previous();
  const uint32_t index = blockIdx.x - job.first, unit = job.per_unit.divide(index),
                 rest = index - unit * job.per_unit.d;
  Here here = find_unit(a.tables, job.place, unit, ALL_UNITS, threadIdx.x == 0 && rest == 0);
  if (here.tokens == 0) return;
  const uint32_t item = job.column_tiles.divide(rest), part = rest - item * job.column_tiles.d,
                 across = job.columns.divide(part), along = part - across * job.columns.d;
  Sum sum = {};
  add_digits(job, 0, job.num_digits, item, &sum);
  if (sum.token >= here.tokens) return;
  move_on(a.tables, job.place, sum.byte, sum.step, &here);
  const uint32_t rows = min(kTileSide, job.token.size.d - across * kTileSide),
                 dims = min(kTileSide, uint32_t(job.head_dim) - along * kTileSide);
  constexpr int kSrcBytes = element_bits<S> / 8, kDstBytes = element_bits<D> / 8;
  const char* from =
      here.at[SRC] + uint64_t(across) * kTileSide * kSrcBytes + int64_t(along) * kTileSide * job.row[SRC].dim_inner;
  char* to =
      here.at[DST] + int64_t(across) * kTileSide * job.token_stride[DST] + uint64_t(along) * kTileSide * kDstBytes;
  load_tile<S>(tile, from, job.row[SRC].dim_inner, rows, dims, job.width[SRC]);
  __syncthreads();
  store_tile<D>(tile, to, job.token_stride[DST], rows, dims, job.width[DST]);
}

}  // namespace cuda
}  // namespace kvx
