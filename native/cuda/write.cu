// write on the device. Three kernels: bytes as they are, chunks with a cast or a quantisation, and one row a warp for the rest.
#include "../run.h"
#include "../table.h"
#include "columns.cuh"
#include "generic.cuh"

namespace kvx {
namespace cuda {

namespace {

struct WriteColumns {
  WriteParams p;
  Columns columns;
  BlockDivider divider;
  bool counts_errors;  // one launch of a call counts, so that a bad slot counts once
};

enum SlotState { SLOT_GOOD, SLOT_SKIPPED, SLOT_BAD };

__device__ __forceinline__ SlotState find_slot(const WriteParams& p, const BlockDivider& divider, int64_t token, int64_t* block, int64_t* offset) {
  if (token >= p.num_tokens) return SLOT_SKIPPED;
  const int64_t slot = read_index(p.slots, token * p.slot_stride, p.slot_bytes);
  if (slot < 0 || slot == p.invalid_slot) return SLOT_SKIPPED;
  if (slot >= p.num_slots) return SLOT_BAD;
  divider.split(slot, block, offset);
  return SLOT_GOOD;
}

// U tokens a thread: their loads are all in flight before the first slot is needed.
template <int Width, int U>
__global__ void __launch_bounds__(256) write_copy(const __grid_constant__ WriteColumns a) {
  using T = typename Vec<Width>::T;
  const WriteParams& p = a.p;
  const Column c = find_column(a.columns, int64_t(blockIdx.y) * blockDim.x + threadIdx.x, 0);
  if (c.plane < 0) return;
  const PlaneParams& plane = p.plane[c.plane];
  const RowsParams& rows = p.rows[c.plane];
  const int64_t first = (int64_t(blockIdx.x) * U) * blockDim.y + threadIdx.y;
  T data[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int64_t token = first + u * blockDim.y;
    if (token < p.num_tokens) data[u] = load_once<T>(rows.data + token * rows.token + c.rows);
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    int64_t block, offset;
    const SlotState state = find_slot(p, a.divider, first + u * blockDim.y, &block, &offset);
    if (state == SLOT_GOOD) store_once(plane.data + block * plane.block + offset * plane.token + c.cell, data[u]);
    else if (state == SLOT_BAD && a.counts_errors && p.errors && c.plane == 0 && c.cell == 0) atomicAdd(p.errors, 1ull);
  }
}

template <int IO, int C, int U>
__global__ void __launch_bounds__(256) write_chunks(const __grid_constant__ WriteColumns a) {
  const WriteParams& p = a.p;
  Column c = find_column(a.columns, int64_t(blockIdx.y) * blockDim.x + threadIdx.x, kChunk);
  const bool idle = c.plane < 0;  // stays for the shuffles
  if (idle) c.plane = a.columns.count[0] ? 0 : 1;
  const PlaneParams& plane = p.plane[c.plane];
  const RowsParams& rows = p.rows[c.plane];
  const ScaleParams& s = plane.scale;
  const int64_t first = (int64_t(blockIdx.x) * U) * blockDim.y + threadIdx.y;
  const int32_t group = c.element / s.group_size;
  const bool owns = c.element % s.group_size == 0;
  float x[U][kChunk];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int64_t token = first + u * blockDim.y;
    if (token < p.num_tokens && !idle) load_chunk<IO>(rows.data + token * rows.token + c.rows, x[u]);
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int64_t token = first + u * blockDim.y;
    int64_t block = 0, offset = 0;
    const SlotState state = find_slot(p, a.divider, token, &block, &offset);
    float scale = 1.0f;
    if constexpr (is_code<C>) {
      float amax = 0;
      if (s.mode == SCALE_COMPUTED) {
        if (token < p.num_tokens && !idle) amax = chunk_amax(x[u]);
        for (int step = s.group_size / kChunk / 2; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
      }
      if (state == SLOT_GOOD && !idle) scale = settle_scale(s, C, token, block, offset, c.head, group, amax, owns);
    }
    if (idle) continue;
    if (state == SLOT_GOOD) encode_chunk<C>(plane.data + block * plane.block + offset * plane.token + c.cell, x[u], Divider(scale));
    else if (state == SLOT_BAD && a.counts_errors && p.errors && c.plane == 0 && c.cell == 0) atomicAdd(p.errors, 1ull);
  }
}

__global__ void __launch_bounds__(256) write_rows(const __grid_constant__ WriteColumns a, int plane_index) {
  const WriteParams& p = a.p;
  const PlaneParams& plane = p.plane[plane_index];
  const RowsParams& rows = p.rows[plane_index];
  const int64_t num_rows = p.num_tokens * p.num_heads, step = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; row < num_rows; row += step) {
    const int64_t token = row / p.num_heads, head = row % p.num_heads;
    int64_t block, offset;
    const SlotState state = find_slot(p, a.divider, token, &block, &offset);
    if (state == SLOT_GOOD)
      write_row(plane, rows, plane.data + block * plane.block + offset * plane.token + head * plane.head, rows.data + token * rows.token + head * rows.head, token, block,
                offset, head);
    else if (state == SLOT_BAD && a.counts_errors && p.errors && plane_index == 0 && head == 0 && threadIdx.x % 32 == 0) atomicAdd(p.errors, 1ull);
  }
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Four tokens a thread where there are enough to fill the device that way, else one: a small batch wants every SM.
template <class Launch>
kvx_status_t with_unroll(const WriteColumns& a, int num_sms, Launch&& run) {
  const int64_t columns = a.columns.count[0] + a.columns.count[1];
  const Tile tile = make_tile(columns);
  const unsigned across = unsigned(divide_up(columns, tile.columns));
  const int64_t wide = divide_up(a.p.num_tokens, int64_t(tile.lanes) * 4);
  const bool unroll = wide * across >= 2 * num_sms;
  const int64_t grid = unroll ? wide : divide_up(a.p.num_tokens, tile.lanes);
  if (grid > 0x7fffffff) return fail(KVX_STATUS_UNSUPPORTED, "%lld tokens are more than one launch takes.", (long long)a.p.num_tokens);
  return run(dim3(unsigned(grid), across), dim3(tile.columns, tile.lanes), unroll);
}

kvx_status_t run_copy(const WriteColumns& a, int width, int num_sms, void* stream) {
  return with_unroll(a, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    switch (width) {
#define KVX_COPY(w) \
  case w: return unroll ? launch("write_copy", write_copy<w, 4>, grid, block, stream, a) : launch("write_copy", write_copy<w, 1>, grid, block, stream, a);
      KVX_COPY(16) KVX_COPY(8) KVX_COPY(4)
#undef KVX_COPY
      default: return launch("write_copy", write_copy<2, 1>, dim3(unsigned(divide_up(a.p.num_tokens, block.y)), grid.y), block, stream, a);
    }
  });
}

template <int IO, int C>
kvx_status_t run_chunks_as(const WriteColumns& a, int num_sms, void* stream) {
  return with_unroll(a, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    return unroll ? launch("write_chunks", write_chunks<IO, C, 4>, grid, block, stream, a) : launch("write_chunks", write_chunks<IO, C, 1>, grid, block, stream, a);
  });
}

// The table of fast instantiations: every IO type into every cache type.
kvx_status_t run_chunks(const WriteColumns& a, int io, int dtype, int num_sms, void* stream) {
#define KVX_TO(io_, c) \
  case c: return run_chunks_as<io_, c>(a, num_sms, stream);
#define KVX_FROM(io_)                                                                                                            \
  case io_:                                                                                                                      \
    switch (dtype) {                                                                                                             \
      KVX_TO(io_, KVX_DTYPE_F16) KVX_TO(io_, KVX_DTYPE_BF16) KVX_TO(io_, KVX_DTYPE_F32) KVX_TO(io_, KVX_DTYPE_F8_E4M3)            \
      KVX_TO(io_, KVX_DTYPE_F8_E5M2) KVX_TO(io_, KVX_DTYPE_S8) KVX_TO(io_, KVX_DTYPE_S4) KVX_TO(io_, KVX_DTYPE_E2M1)              \
    }                                                                                                                            \
    break;
  switch (io) { KVX_FROM(KVX_DTYPE_F16) KVX_FROM(KVX_DTYPE_BF16) KVX_FROM(KVX_DTYPE_F32) }
#undef KVX_FROM
#undef KVX_TO
  return fail(KVX_STATUS_INTERNAL_ERROR, "no kernel from %s to %s.", dtype_name(io), dtype_name(dtype));
}

kvx_status_t run_rows(const WriteColumns& a, int plane, int num_sms, void* stream) {
  const int64_t warps = a.p.num_tokens * a.p.num_heads;
  const int64_t blocks = divide_up(warps, 8), most = int64_t(num_sms) * 32;
  return launch("write_rows", write_rows, dim3(unsigned(blocks < most ? blocks : most)), dim3(256), stream, a, plane);
}

}  // namespace

kvx_status_t write(const WriteParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0) return KVX_STATUS_OK;
  const int sms = guard.num_sms();
  WriteColumns a{p, {}, make_divider(p.block_size), true};
  const uint64_t base[2] = {uint64_t(uintptr_t(p.plane[0].data)), uint64_t(uintptr_t(p.plane[1].data))};

  // K and V together when one kernel serves both.
  if (is_copy(p.plane[0], p.rows[0]) && is_copy(p.plane[1], p.rows[1])) {
    const int wk = copy_width(p.plane[0], p.rows[0], base[0]), wv = copy_width(p.plane[1], p.rows[1], base[1]);
    const int width = wk < wv ? wk : wv;
    for (int i = 0; i < 2; i++) set_copy_columns(p.plane[i], p.rows[i], p.num_heads, width, &a.columns.plane[i], &a.columns.count[i]);
    return run_copy(a, width, sms, stream);
  }
  const bool chunks[2] = {fits_chunks(p.plane[0], p.rows[0], base[0]), fits_chunks(p.plane[1], p.rows[1], base[1])};
  const bool together = chunks[0] && chunks[1] && p.plane[0].dtype == p.plane[1].dtype && p.rows[0].dtype == p.rows[1].dtype;
  for (int i = 0; i < 2; i++) {
    a.columns = Columns{};
    a.counts_errors = i == 0;
    for (int j = together ? 0 : i; j <= (together ? 1 : i); j++) set_chunk_columns(p.plane[j], p.rows[j], p.num_heads, &a.columns.plane[j], &a.columns.count[j]);
    const Tile tile = make_tile(a.columns.count[0] + a.columns.count[1]);
    const bool shuffles = (p.plane[i].scale.mode != SCALE_COMPUTED || fits_shuffle(p.plane[i], tile)) &&
                          (!together || p.plane[1].scale.mode != SCALE_COMPUTED || fits_shuffle(p.plane[1], tile));
    if (is_copy(p.plane[i], p.rows[i])) {
      const int width = copy_width(p.plane[i], p.rows[i], base[i]);
      a.columns = Columns{};
      set_copy_columns(p.plane[i], p.rows[i], p.num_heads, width, &a.columns.plane[i], &a.columns.count[i]);
      KVX_TRY(run_copy(a, width, sms, stream));
    } else if (chunks[i] && shuffles) {
      KVX_TRY(run_chunks(a, p.rows[i].dtype, p.plane[i].dtype, sms, stream));
      if (together) break;
    } else {
      KVX_TRY(run_rows(a, i, sms, stream));
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace cuda
}  // namespace kvx
