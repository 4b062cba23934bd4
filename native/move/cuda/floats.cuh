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

// From floats S to floats D where rows lie across: along a row elements of the destination are side by side, those of
// the source along the digit that stands in `token`. Tiles of both are turned in shared memory.
constexpr uint32_t kTileSide = 64;

template <int S, int D>
__global__ void __launch_bounds__(kThreads) convert_float_tiles(const __grid_constant__ CellArgs a) {
  __shared__ float tile[kTileSide][kTileSide + 1];
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
  constexpr int kSrcBytes = S == KVX_DTYPE_F32 ? 4 : 2, kDstBytes = D == KVX_DTYPE_F32 ? 4 : 2;
  const char* from =
      here.at[SRC] + uint64_t(across) * kTileSide * kSrcBytes + int64_t(along) * kTileSide * job.row[SRC].dim_inner;
  char* to =
      here.at[DST] + int64_t(across) * kTileSide * job.token_stride[DST] + uint64_t(along) * kTileSide * kDstBytes;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (uint32_t i = 0; i < kTileSide / 8; i++) {
    const uint32_t d = warp + 8 * i;
#pragma unroll
    for (uint32_t j = 0; j < kTileSide / 32; j++) {
      const uint32_t r = lane + 32 * j;
      if (d < dims && r < rows) tile[d][r] = load_float<S>(from + int64_t(d) * job.row[SRC].dim_inner + r * kSrcBytes);
    }
  }
  __syncthreads();
  const bool by_pairs = job.width[DST] >= 2 * kDstBytes;
#pragma unroll
  for (uint32_t i = 0; i < kTileSide / 8; i++) {
    const uint32_t r = warp + 8 * i, d = 2 * lane;
    if (r >= rows || d >= dims) continue;
    char* place = to + uint64_t(r) * job.token_stride[DST] + d * kDstBytes;
    const float x = tile[d][r], y = d + 1 < dims ? tile[d + 1][r] : 0.f;
    if (by_pairs && d + 1 < dims) {
      if constexpr (D == KVX_DTYPE_F32) *reinterpret_cast<float2*>(place) = make_float2(one_nan(x), one_nan(y));
      else *reinterpret_cast<uint32_t*>(place) = D == KVX_DTYPE_BF16 ? pack_bf16(x, y) : pack_f16(x, y);
    } else {
      store_float<D>(place, x);
      if (d + 1 < dims) store_float<D>(place + kDstBytes, y);
    }
  }
}

}  // namespace cuda
}  // namespace kvx
