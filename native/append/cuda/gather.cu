// gather on the device: the mirror of write.cu. Threads keep a column and walk over positions of one sequence.
#include "cuda/columns.cuh"
#include "cuda/generic.cuh"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cuda {

namespace {

// A packed table and padded rows in 32 bits: what the fast kernels read of most calls.
struct PackedArgs {
  const char* indices;
  uint32_t row_stride, index_stride, max_blocks, num_blocks;
  FastDivider block_size;
};

struct GatherArgs {
  GatherParams p;
  PackedArgs packed;
  Columns columns;
  BlockDivider divider;
  FastDivider tiles;      // position tiles per sequence
  FastDivider group[2];   // chunks per scale
  int32_t width;          // bytes a load of codes may have
  bool counts_sequences;  // the launch that holds K
};

// The sequence a block of threads works on.
struct Sequence {
  uint32_t seq, first;  // `first`: position of this thread's first row
  uint32_t count;       // output rows
  int64_t length;       // tokens in the cache
  int64_t out;          // packed output: first row
  bool is_bad;          // packed output: rows outside the output
};

template <bool Packed, int U> __device__ __forceinline__ Sequence find_sequence(const GatherArgs& a) {
  Sequence s;
  s.seq = a.tiles.divide(blockIdx.x);
  const uint32_t tile = blockIdx.x - s.seq * a.tiles.d;
  s.first = tile * (U * blockDim.y) + threadIdx.y;
  const RowRange out = output_rows(a.p, s.seq);
  if constexpr (Packed) s.length = read_index(a.p.table.seq_lens, s.seq * a.p.table.len_bytes, a.p.table.len_bytes);
  else s.length = sequence_length(a.p.table, s.seq, a.p.block_size);
  s.count = out.count < 0 ? 0 : uint32_t(out.count);
  s.out = out.first;
  s.is_bad = out.count < 0;
  return s;
}

// A sequence with an impossible length or row range counts once. Called last: the length
// is then there, and nothing waited.
__device__ __forceinline__ void count_bad_sequence(const GatherArgs& a, const Sequence& s) {
  if (a.counts_sequences && a.p.errors && s.first == 0 && threadIdx.x == 0 && blockIdx.y == 0 &&
      (s.length < 0 || s.is_bad))
    atomicAdd(a.p.errors, 1ull);
}

struct Source {
  char* cell;  // first byte of the token in its block; NULL = a row of zeros
  uint32_t block, offset;
};

// Bad block ids are counted once a position: by the first column of K, and of V where it has ids of its own.
__device__ __forceinline__ void count_bad(const GatherArgs& a, const Column& c) {
  if (a.p.errors && c.head == 0 && c.index == 0 && (c.plane == 0 || a.p.table.format == KVX_BLOCK_TABLE_KV_OFFSETS))
    atomicAdd(a.p.errors, 1ull);
}

template <bool Packed> __device__ __forceinline__ Source find_source(const GatherArgs& a, const Sequence& s,
                                                                     uint32_t pos, const Column& c) {
  Source out = {nullptr, 0, 0};
  if (pos >= s.count) return out;
  const uint32_t logical = a.packed.block_size.divide(pos);
  out.offset = pos - logical * a.packed.block_size.d;
  if constexpr (Packed) {
    // The index is loaded beside the length, not after it: one wait less before the data.
    int64_t id = -1;
    if (logical < a.packed.max_blocks)
      id = read_index(a.packed.indices, step(s.seq, a.packed.row_stride) + step(logical, a.packed.index_stride),
                      a.p.table.index_bytes);
    if (int64_t(pos) >= s.length) return out;
    if (uint64_t(id) < a.packed.num_blocks) {
      const ColumnPlane& plane = a.columns.plane[c.plane];
      out.block = uint32_t(id);
      out.cell = plane.cell + step(out.block, plane.block) + step(out.offset, plane.token);
    } else {
      count_bad(a, c);
    }
  } else {
    if (int64_t(pos) >= s.length) return out;
    const BlockPlace place = find_block(a.p, s.seq, pos, logical, c.plane);
    out.block = uint32_t(place.id);
    if (place.state == BLOCK_FOUND) out.cell = place.base + step(out.offset, a.columns.plane[c.plane].token);
    else if (place.state == BLOCK_BAD) count_bad(a, c);
  }
  return out;
}

__device__ __forceinline__ char* output_at(const GatherArgs& a, const Sequence& s, const Column& c) {
  const ColumnPlane& plane = a.columns.plane[c.plane];
  return plane.rows + c.rows + (a.p.cu_seqlens ? s.out * plane.rows_token : s.seq * a.p.seq_rows[c.plane]);
}

template <int Width, bool Packed, int U>
__global__ void __launch_bounds__(256) gather_copy(const __grid_constant__ GatherArgs a) {
  using T = typename Vec<Width>::T;
  wait_for_previous();
  const Sequence s = find_sequence<Packed, U>(a);
  const Column c = find_column(a.columns);
  if (c.plane < 0 || s.first >= s.count) return count_bad_sequence(a, s);
  T data[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const Source from = find_source<Packed>(a, s, s.first + u * blockDim.y, c);
    data[u] = T{};
    if (from.cell) data[u] = load_once<T>(from.cell + c.cell);
  }
  char* to = output_at(a, s, c);
  const uint32_t stride = a.columns.plane[c.plane].rows_token;
#pragma unroll
  for (int u = 0; u < U; u++)
    if (s.first + u * blockDim.y < s.count) store_once(to + step(s.first + u * blockDim.y, stride), data[u]);
  count_bad_sequence(a, s);
}

template <int C, int IO, bool Packed, int U>
__global__ void __launch_bounds__(256) gather_chunks(const __grid_constant__ GatherArgs a) {
  wait_for_previous();
  const Sequence s = find_sequence<Packed, U>(a);
  const Column c = find_column(a.columns);
  if (c.plane < 0 || s.first >= s.count) return count_bad_sequence(a, s);
  CodeChunk<C> codes[U] = {};  // the same words as RawChunk<C> where C is no code
  float scale[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const Source from = find_source<Packed>(a, s, s.first + u * blockDim.y, c);
    scale[u] = 0.0f;
    if (from.cell == nullptr) continue;
    if constexpr (is_code<C>) {
      codes[u] = load_codes<C>(from.cell + c.cell, a.width);
      scale[u] =
          read_scale(a.p.plane[c.plane].scale, from.block, from.offset, c.head, a.group[c.plane].divide(c.index));
    } else {
      const RawChunk<C> raw = load_raw<C>(from.cell + c.cell);
#pragma unroll
      for (int i = 0; i < chunk_bytes<C> / 4; i++) codes[u].w[i] = raw.w[i];
    }
  }
  char* to = output_at(a, s, c);
  const uint32_t stride = a.columns.plane[c.plane].rows_token;
#pragma unroll
  for (int u = 0; u < U; u++) {
    const uint32_t pos = s.first + u * blockDim.y;
    if (pos >= s.count) continue;
    float x[kChunk];
    if constexpr (is_code<C>) {
      decode_codes<C>(codes[u], x);
#pragma unroll
      for (int i = 0; i < kChunk; i++) x[i] *= scale[u];  // no source: code 0 times 0
    } else {
      RawChunk<C> raw;
#pragma unroll
      for (int i = 0; i < chunk_bytes<C> / 4; i++) raw.w[i] = codes[u].w[i];
#pragma unroll
      for (int i = 0; i < kChunk; i++) x[i] = element(raw, i);
    }
    store_chunk<IO>(to + step(pos, stride), x);
  }
  count_bad_sequence(a, s);
}

__global__ void __launch_bounds__(256) gather_rows(const __grid_constant__ GatherArgs a, int plane_index) {
  const GatherParams& p = a.p;
  const PlaneParams& plane = p.plane[plane_index];
  const RowsParams& rows = p.rows[plane_index];
  const Sequence s = find_sequence<false, 1>(a);
  const int64_t pos = blockIdx.x - s.seq * a.tiles.d;
  count_bad_sequence(a, s);
  if (pos >= s.count) return;
  int64_t logical = 0, offset = 0;
  BlockPlace place = {nullptr, 0, BLOCK_NONE};
  if (pos < s.length) {
    a.divider.split(pos, &logical, &offset);
    place = find_block(p, s.seq, pos, logical, plane_index);
  }
  if (place.state == BLOCK_BAD && threadIdx.x == 0) count_bad(a, Column{plane_index, 0, 0, 0, 0});
  char* dst = output_row(p, plane_index, s.seq, RowRange{s.out, s.count}, pos);
  for (int64_t head = threadIdx.x / 32; head < p.num_heads; head += blockDim.x / 32) {
    if (place.state == BLOCK_FOUND)
      gather_row(plane, rows, dst + head * rows.head, place.base + offset * plane.token + head * plane.head, place.id,
                 offset, head);
    else zero_row(rows, dst + head * rows.head, plane.head_dim);
  }
}

kvx_status_t too_many(const GatherParams& p) {
  return fail(KVX_STATUS_UNSUPPORTED, "%lld sequences of %lld rows are more than one launch takes.",
              (long long)(p.table.num_seqs * p.table.beam_width), (long long)p.max_seq_len);
}

template <class Launch>
kvx_status_t with_grid(GatherArgs& a, int num_sms, Launch&& run) {
  const int64_t seqs = a.p.table.num_seqs * a.p.table.beam_width;
  const int64_t count = int64_t(a.columns.count[0]) + a.columns.count[1];
  const Tile tile = make_tile(count);
  const unsigned across = unsigned(divide_up(count, tile.columns));
  const int64_t wide = divide_up(a.p.max_seq_len, int64_t(tile.lanes) * 2);
  const bool unroll = wide * seqs * across >= 4 * num_sms;
  const int64_t tiles = unroll ? wide : divide_up(a.p.max_seq_len, tile.lanes);
  if (tiles > 0x7fffffff / seqs || across > 65535) return too_many(a.p);
  a.tiles = make_fast_divider(tiles);
  return run(dim3(unsigned(tiles * seqs), across), dim3(tile.columns, tile.lanes), unroll);
}

template <bool Packed>
kvx_status_t run_copy(GatherArgs& a, int width, int num_sms, void* stream) {
  return with_grid(a, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    switch (width) {
#define KVX_COPY(w)                                                                                \
  case w:                                                                                          \
    return unroll ? launch_early("gather_copy", gather_copy<w, Packed, 2>, grid, block, stream, a) \
                  : launch_early("gather_copy", gather_copy<w, Packed, 1>, grid, block, stream, a);
      KVX_COPY(16)
      KVX_COPY(8)
      KVX_COPY(4)
      default: KVX_COPY(2)
#undef KVX_COPY
    }
    return KVX_STATUS_INTERNAL_ERROR;
  });
}

template <int C, int IO>
kvx_status_t run_chunks_as(GatherArgs& a, int num_sms, void* stream) {
  const bool packed = a.p.table.format == KVX_BLOCK_TABLE_PACKED;
  return with_grid(a, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    if (!packed)
      return unroll ? launch_early("gather_chunks", gather_chunks<C, IO, false, 2>, grid, block, stream, a)
                    : launch_early("gather_chunks", gather_chunks<C, IO, false, 1>, grid, block, stream, a);
    return unroll ? launch_early("gather_chunks", gather_chunks<C, IO, true, 2>, grid, block, stream, a)
                  : launch_early("gather_chunks", gather_chunks<C, IO, true, 1>, grid, block, stream, a);
  });
}

kvx_status_t run_chunks(GatherArgs& a, int dtype, int io, int num_sms, void* stream) {
#define KVX_FROM(io_, c) \
  case c: return run_chunks_as<c, io_>(a, num_sms, stream);
#define KVX_TO(io_)                    \
  case io_:                            \
    switch (dtype) {                   \
      KVX_FROM(io_, KVX_DTYPE_F16)     \
      KVX_FROM(io_, KVX_DTYPE_BF16)    \
      KVX_FROM(io_, KVX_DTYPE_F32)     \
      KVX_FROM(io_, KVX_DTYPE_F8_E4M3) \
      KVX_FROM(io_, KVX_DTYPE_F8_E5M2) \
      KVX_FROM(io_, KVX_DTYPE_S8)      \
      KVX_FROM(io_, KVX_DTYPE_S4)      \
      KVX_FROM(io_, KVX_DTYPE_E2M1)    \
    }                                  \
    break;
  switch (io) {
    KVX_TO(KVX_DTYPE_F16)
    KVX_TO(KVX_DTYPE_BF16)
    KVX_TO(KVX_DTYPE_F32)
  }
#undef KVX_TO
#undef KVX_FROM
  return fail(KVX_STATUS_INTERNAL_ERROR, "no kernel from %s to %s.", dtype_name(dtype), dtype_name(io));
}

kvx_status_t run_rows(GatherArgs& a, int plane, void* stream) {
  const int64_t seqs = a.p.table.num_seqs * a.p.table.beam_width;
  if (a.p.max_seq_len > 0x7fffffff / seqs) return too_many(a.p);
  a.tiles = make_fast_divider(a.p.max_seq_len);
  return launch("gather_rows", gather_rows, dim3(unsigned(a.p.max_seq_len * seqs)), dim3(256), stream, a, plane);
}

// One plane, or both when one kernel serves them.
kvx_status_t gather_planes(GatherArgs& a, int first, int last, int num_sms, void* stream, bool* done) {
  const GatherParams& p = a.p;
  *done = true;
  a.columns = Columns{};
  a.counts_sequences = first == 0;
  const TableParams& t = p.table;
  const bool small = p.num_rows <= kMaxCount && p.max_seq_len <= kMaxCount && p.num_blocks <= kMaxCount &&
                     t.row_stride <= kMaxStride && t.index_stride <= kMaxStride;
  a.packed = PackedArgs{static_cast<const char*>(t.indices),
                        uint32_t(t.row_stride),
                        uint32_t(t.index_stride),
                        uint32_t(t.max_blocks < kMaxCount ? t.max_blocks : kMaxCount),
                        uint32_t(p.num_blocks),
                        make_fast_divider(p.block_size)};
  bool copies = small, chunks = small;
  int width = 16;
  uint64_t cells = 0;
  for (int i = first; i <= last; i++) {
    // Pooled blocks start at the pools, not at the planes.
    const uint64_t base =
        p.pool[0] ? uint64_t(uintptr_t(p.pool[0])) | uint64_t(uintptr_t(p.pool[1])) | uint64_t(p.pool_stride)
                  : uint64_t(uintptr_t(p.plane[i].data));
    const uint64_t rows = uint64_t(p.seq_rows[i]);
    const bool fits = fits_32(p.plane[i], p.rows[i], p.num_heads);
    copies = copies && fits && is_copy(p.plane[i], p.rows[i]);
    chunks = chunks && fits && fits_chunks(p.plane[i], p.rows[i], base) && rows % 16 == 0 &&
             p.plane[i].dtype == p.plane[first].dtype && p.rows[i].dtype == p.rows[first].dtype;
    const int w = copy_width(p.plane[i], p.rows[i], base | rows);
    width = w < width ? w : width;
    cells |= base | cell_address_bits(p.plane[i]);
  }
  if (copies) {
    for (int i = first; i <= last; i++)
      set_copy_columns(p.plane[i], p.rows[i], p.num_heads, width, &a.columns.plane[i], &a.columns.count[i]);
    return p.table.format == KVX_BLOCK_TABLE_PACKED ? run_copy<true>(a, width, num_sms, stream)
                                                    : run_copy<false>(a, width, num_sms, stream);
  }
  if (chunks) {
    a.width = common_alignment(cells);
    for (int i = first; i <= last; i++) {
      set_chunk_columns(p.plane[i], p.rows[i], p.num_heads, &a.columns.plane[i], &a.columns.count[i]);
      a.group[i] = make_fast_divider(p.plane[i].scale.group_size / kChunk);
    }
    return run_chunks(a, p.plane[first].dtype, p.rows[first].dtype, num_sms, stream);
  }
  *done = first == last;
  return *done ? run_rows(a, first, stream) : KVX_STATUS_OK;
}

}  // namespace

kvx_status_t gather(const GatherParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.table.num_seqs == 0 || p.num_rows == 0) return KVX_STATUS_OK;
  const int sms = guard.num_sms();
  GatherArgs a{p, {}, {}, make_divider(p.block_size), {}, {}, 16, true};
  bool done;
  KVX_TRY(gather_planes(a, 0, 1, sms, stream, &done));
  if (done) return KVX_STATUS_OK;
  KVX_TRY(gather_planes(a, 0, 0, sms, stream, &done));
  if (p.table.format != KVX_BLOCK_TABLE_KV_OFFSETS) a.p.errors = nullptr;  // K has counted
  return gather_planes(a, 1, 1, sms, stream, &done);
}

}  // namespace cuda
}  // namespace kvx
