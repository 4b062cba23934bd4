// gather on the device: the mirror of write.cu. Threads keep a column and walk over positions of one sequence.
#include "../run.h"
#include "../table.h"
#include "columns.cuh"
#include "generic.cuh"

namespace kvx {
namespace cuda {

namespace {

struct GatherColumns {
  GatherParams p;
  Columns columns;
  BlockDivider divider;
  int64_t tiles;       // position tiles per sequence
  bool counts_errors;  // the launch that holds K counts
};

struct Source {
  BlockPlace place;
  int64_t offset;
  bool is_row;  // there is an output row at all
};

// Where output position `pos` of `seq` comes from. A position past the length, or without a block, is a row of zeros.
__device__ __forceinline__ Source find_source(const GatherParams& p, const BlockDivider& divider, int64_t seq, int64_t pos, int64_t length, RowRange out, int plane) {
  Source s = {{nullptr, 0, BLOCK_NONE}, 0, pos < out.count};
  if (s.is_row && pos < length) {
    int64_t logical;
    divider.split(pos, &logical, &s.offset);
    s.place = find_block(p, seq, pos, logical, plane);
  }
  return s;
}

// One count per bad block reference, by the thread that holds the first column of K (or V, whose ids differ in KV_OFFSETS).
__device__ __forceinline__ void count_bad(const GatherColumns& a, const Source& s, int plane, bool is_first_column) {
  if (s.place.state == BLOCK_BAD && is_first_column && a.p.errors && (plane == 0 || a.p.table.format == KVX_BLOCK_TABLE_KV_OFFSETS)) atomicAdd(a.p.errors, 1ull);
}

__device__ __forceinline__ void count_sequence(const GatherColumns& a, int64_t length, RowRange out, int64_t tile) {
  if ((length < 0 || out.count < 0) && tile == 0 && threadIdx.x == 0 && threadIdx.y == 0 && blockIdx.y == 0 && a.counts_errors && a.p.errors) atomicAdd(a.p.errors, 1ull);
}

template <int Width, int U>
__global__ void __launch_bounds__(256) gather_copy(const __grid_constant__ GatherColumns a) {
  using T = typename Vec<Width>::T;
  const GatherParams& p = a.p;
  const int64_t seq = blockIdx.x / a.tiles, tile = blockIdx.x % a.tiles;
  const RowRange out = output_rows(p, seq);
  const int64_t length = sequence_length(p.table, seq, p.block_size);
  count_sequence(a, length, out, tile);
  const Column c = find_column(a.columns, int64_t(blockIdx.y) * blockDim.x + threadIdx.x, 0);
  const int64_t first = tile * U * blockDim.y + threadIdx.y;
  if (c.plane < 0 || first >= out.count) return;
  const PlaneParams& plane = p.plane[c.plane];
  T data[U];
  bool is_row[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const Source s = find_source(p, a.divider, seq, first + u * blockDim.y, length, out, c.plane);
    is_row[u] = s.is_row;
    data[u] = T{};
    if (s.place.state == BLOCK_FOUND) data[u] = load_once<T>(s.place.base + s.offset * plane.token + c.cell);
    else count_bad(a, s, c.plane, c.cell == 0);
  }
#pragma unroll
  for (int u = 0; u < U; u++)
    if (is_row[u]) store_once(output_row(p, c.plane, seq, out, first + u * blockDim.y) + c.rows, data[u]);
}

template <int C, int IO, int U>
__global__ void __launch_bounds__(256) gather_chunks(const __grid_constant__ GatherColumns a) {
  const GatherParams& p = a.p;
  const int64_t seq = blockIdx.x / a.tiles, tile = blockIdx.x % a.tiles;
  const RowRange out = output_rows(p, seq);
  const int64_t length = sequence_length(p.table, seq, p.block_size);
  count_sequence(a, length, out, tile);
  const Column c = find_column(a.columns, int64_t(blockIdx.y) * blockDim.x + threadIdx.x, kChunk);
  const int64_t first = tile * U * blockDim.y + threadIdx.y;
  if (c.plane < 0 || first >= out.count) return;
  const PlaneParams& plane = p.plane[c.plane];
  const int32_t group = c.element / plane.scale.group_size;
  float x[U][kChunk];
  bool is_row[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const Source s = find_source(p, a.divider, seq, first + u * blockDim.y, length, out, c.plane);
    is_row[u] = s.is_row;
#pragma unroll
    for (int i = 0; i < kChunk; i++) x[u][i] = 0.0f;
    if (s.place.state == BLOCK_FOUND) {
      float scale = 1.0f;
      if constexpr (is_code<C>) scale = read_scale(plane.scale, s.place.id, s.offset, c.head, group);
      decode_chunk<C>(s.place.base + s.offset * plane.token + c.cell, x[u], scale);
    } else {
      count_bad(a, s, c.plane, c.cell == 0);
    }
  }
#pragma unroll
  for (int u = 0; u < U; u++)
    if (is_row[u]) store_chunk<IO>(output_row(p, c.plane, seq, out, first + u * blockDim.y) + c.rows, x[u]);
}

__global__ void __launch_bounds__(256) gather_rows(const __grid_constant__ GatherColumns a, int plane_index) {
  const GatherParams& p = a.p;
  const PlaneParams& plane = p.plane[plane_index];
  const RowsParams& rows = p.rows[plane_index];
  const int64_t seq = blockIdx.x / a.tiles, tile = blockIdx.x % a.tiles;
  const RowRange out = output_rows(p, seq);
  const int64_t length = sequence_length(p.table, seq, p.block_size);
  count_sequence(a, length, out, tile);
  const int64_t pos = tile;
  if (pos >= out.count) return;
  const Source s = find_source(p, a.divider, seq, pos, length, out, plane_index);
  count_bad(a, s, plane_index, threadIdx.x == 0);
  char* dst = output_row(p, plane_index, seq, out, pos);
  for (int64_t head = threadIdx.x / 32; head < p.num_heads; head += blockDim.x / 32) {
    if (s.place.state == BLOCK_FOUND)
      gather_row(plane, rows, dst + head * rows.head, s.place.base + s.offset * plane.token + head * plane.head, s.place.id, s.offset, head);
    else
      zero_row(rows, dst + head * rows.head, plane.head_dim);
  }
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Launch>
kvx_status_t with_unroll(GatherColumns& a, int num_sms, Launch&& run) {
  const int64_t seqs = a.p.table.num_seqs * a.p.table.beam_width;
  const int64_t columns = a.columns.count[0] + a.columns.count[1];
  const Tile tile = make_tile(columns);
  const unsigned across = unsigned(divide_up(columns, tile.columns));
  const int64_t wide = divide_up(a.p.max_seq_len, int64_t(tile.lanes) * 4);
  const bool unroll = wide * seqs * across >= 2 * num_sms;
  a.tiles = unroll ? wide : divide_up(a.p.max_seq_len, tile.lanes);
  if (a.tiles > 0x7fffffff / seqs) return fail(KVX_STATUS_UNSUPPORTED, "%lld sequences of %lld rows are more than one launch takes.", (long long)seqs, (long long)a.p.max_seq_len);
  return run(dim3(unsigned(a.tiles * seqs), across), dim3(tile.columns, tile.lanes), unroll);
}

kvx_status_t run_copy(GatherColumns& a, int width, int num_sms, void* stream) {
  return with_unroll(a, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    switch (width) {
#define KVX_COPY(w) \
  case w: return unroll ? launch("gather_copy", gather_copy<w, 4>, grid, block, stream, a) : launch("gather_copy", gather_copy<w, 1>, grid, block, stream, a);
      KVX_COPY(16) KVX_COPY(8) KVX_COPY(4)
      default: KVX_COPY(2)
#undef KVX_COPY
    }
    return KVX_STATUS_INTERNAL_ERROR;
  });
}

template <int C, int IO>
kvx_status_t run_chunks_as(GatherColumns& a, int num_sms, void* stream) {
  return with_unroll(a, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    return unroll ? launch("gather_chunks", gather_chunks<C, IO, 4>, grid, block, stream, a) : launch("gather_chunks", gather_chunks<C, IO, 1>, grid, block, stream, a);
  });
}

kvx_status_t run_chunks(GatherColumns& a, int dtype, int io, int num_sms, void* stream) {
#define KVX_FROM(io_, c) \
  case c: return run_chunks_as<c, io_>(a, num_sms, stream);
#define KVX_TO(io_)                                                                                                                  \
  case io_:                                                                                                                          \
    switch (dtype) {                                                                                                                 \
      KVX_FROM(io_, KVX_DTYPE_F16) KVX_FROM(io_, KVX_DTYPE_BF16) KVX_FROM(io_, KVX_DTYPE_F32) KVX_FROM(io_, KVX_DTYPE_F8_E4M3)        \
      KVX_FROM(io_, KVX_DTYPE_F8_E5M2) KVX_FROM(io_, KVX_DTYPE_S8) KVX_FROM(io_, KVX_DTYPE_S4) KVX_FROM(io_, KVX_DTYPE_E2M1)          \
    }                                                                                                                                \
    break;
  switch (io) { KVX_TO(KVX_DTYPE_F16) KVX_TO(KVX_DTYPE_BF16) KVX_TO(KVX_DTYPE_F32) }
#undef KVX_TO
#undef KVX_FROM
  return fail(KVX_STATUS_INTERNAL_ERROR, "no kernel from %s to %s.", dtype_name(dtype), dtype_name(io));
}

kvx_status_t run_rows(GatherColumns& a, int plane, void* stream) {
  const int64_t seqs = a.p.table.num_seqs * a.p.table.beam_width;
  a.tiles = a.p.max_seq_len;
  if (a.tiles > 0x7fffffff / seqs) return fail(KVX_STATUS_UNSUPPORTED, "%lld sequences of %lld rows are more than one launch takes.", (long long)seqs, (long long)a.p.max_seq_len);
  return launch("gather_rows", gather_rows, dim3(unsigned(a.tiles * seqs)), dim3(256), stream, a, plane);
}

}  // namespace

kvx_status_t gather(const GatherParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.table.num_seqs == 0 || p.num_rows == 0) return KVX_STATUS_OK;
  const int sms = guard.num_sms();
  GatherColumns a{p, {}, make_divider(p.block_size), 1, true};
  // Pooled blocks start at the pools, not at the planes.
  uint64_t base[2];
  for (int i = 0; i < 2; i++)
    base[i] = p.pool[0] ? uint64_t(uintptr_t(p.pool[0])) | uint64_t(uintptr_t(p.pool[1])) | uint64_t(p.pool_stride) : uint64_t(uintptr_t(p.plane[i].data));
  for (int i = 0; i < 2; i++) base[i] |= uint64_t(p.seq_rows[i]);

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
    if (is_copy(p.plane[i], p.rows[i])) {
      const int width = copy_width(p.plane[i], p.rows[i], base[i]);
      set_copy_columns(p.plane[i], p.rows[i], p.num_heads, width, &a.columns.plane[i], &a.columns.count[i]);
      KVX_TRY(run_copy(a, width, sms, stream));
    } else if (chunks[i]) {
      for (int j = together ? 0 : i; j <= (together ? 1 : i); j++) set_chunk_columns(p.plane[j], p.rows[j], p.num_heads, &a.columns.plane[j], &a.columns.count[j]);
      KVX_TRY(run_chunks(a, p.plane[i].dtype, p.rows[i].dtype, sms, stream));
      if (together) break;
    } else {
      KVX_TRY(run_rows(a, i, stream));
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace cuda
}  // namespace kvx
