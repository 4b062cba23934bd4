// write on the device. Three kernels: bytes as they are, chunks with a cast or a quantisation, and one row a warp for
// the rest.
#include "cuda/columns.cuh"
#include "cuda/generic.cuh"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cuda {

namespace {

struct SlotParams {
  const void* slots;
  int64_t num_slots, invalid;
  unsigned long long* errors;  // counted by one launch of a call, so that a bad slot counts once
  FastDivider block_size;
  uint32_t num_tokens, stride;  // stride in bytes
  int32_t bytes;                // 4 or 8
};

struct CopyArgs {
  Columns columns;
  SlotParams slots;
};

// How a kernel comes by the scale of a chunk. FIXED: the same for every token, read once. PLAIN: found from the row;
// PLAIN_8 where eight threads share one (head_dim 128), so that the hops are known. ANY: whatever ScaleParams can say.
enum ScaleKind { SCALE_FIXED, SCALE_PLAIN, SCALE_PLAIN_8, SCALE_ANY };

struct ChunkArgs {
  Columns columns;
  SlotParams slots;
  ScaleParams scale[2];
  PlainScale plain[2];
  FastDivider group[2];  // chunks per scale
  int32_t width;         // bytes a store of codes may have
};

struct Slot {
  uint32_t block, offset;
  bool is_good, is_bad;  // neither: skipped
};

// In two steps: every load of a thread is issued before the first value is needed.
__device__ __forceinline__ int64_t load_slot(const SlotParams& p, uint32_t token) {
  return token < p.num_tokens ? read_index(p.slots, step(token, p.stride), p.bytes) : -1;
}

__device__ __forceinline__ Slot place_slot(const SlotParams& p, int64_t slot) {
  Slot s;
  s.is_good = uint64_t(slot) < uint64_t(p.num_slots) && slot != p.invalid;
  s.is_bad = slot >= p.num_slots && slot != p.invalid;
  s.block = p.block_size.divide(uint32_t(slot));
  s.offset = uint32_t(slot) - s.block * p.block_size.d;
  return s;
}

__device__ __forceinline__ void count_bad(const SlotParams& p, const Slot& s) {
  if (s.is_bad && p.errors && blockIdx.y == 0 && threadIdx.x == 0) atomicAdd(p.errors, 1ull);
}

// U tokens a thread: their loads are in flight before the first slot is needed. Measured
// on an H200: 2 is best for a copy.
template <int Width, int U>
__global__ void __launch_bounds__(256) write_copy(const __grid_constant__ CopyArgs a) {
  using T = typename Vec<Width>::T;
  const Column c = find_column(a.columns);
  wait_for_previous();
  let_next_start();
  if (c.plane < 0) return;
  const ColumnPlane& plane = a.columns.plane[c.plane];
  const uint32_t first = blockIdx.x * (U * blockDim.y) + threadIdx.y;
  const char* rows = plane.rows + c.rows;
  char* cell = plane.cell + c.cell;
  T data[U];
  int64_t slots[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const uint32_t token = first + u * blockDim.y;
    slots[u] = load_slot(a.slots, token);
    if (token < a.slots.num_tokens) data[u] = load_once<T>(rows + step(token, plane.rows_token));
  }
#pragma unroll
  for (int u = 0; u < U; u++) {
    const Slot s = place_slot(a.slots, slots[u]);
    if (s.is_good) store_once(cell + step(s.block, plane.block) + step(s.offset, plane.token), data[u]);
    else count_bad(a.slots, s);
  }
}

// The largest magnitude among the lanes that share a scale.
template <int Kind> __device__ __forceinline__ uint32_t largest(uint32_t mine, uint32_t lanes) {
  if constexpr (Kind == SCALE_PLAIN_8) {
#pragma unroll
    for (int hop = 4; hop > 0; hop /= 2) mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, hop));
  } else {
    for (uint32_t hop = lanes / 2; hop > 0; hop /= 2) mine = max(mine, __shfl_xor_sync(0xffffffffu, mine, hop));
  }
  return mine;
}

// Five blocks an SM: the kernel is bound by issuing instructions, and more warps fill the gaps between them.
template <int IO, int C, int Kind, int U>
__global__ void __launch_bounds__(256, IO == KVX_DTYPE_F32 ? 3 : 5) write_chunks(const __grid_constant__ ChunkArgs a) {
  Column c = find_column(a.columns);
  wait_for_previous();
  let_next_start();
  const bool idle = c.plane < 0;  // stays for the shuffles
  if (idle) c.plane = a.columns.count[0] ? 0 : 1;
  const ColumnPlane& plane = a.columns.plane[c.plane];
  const ScaleParams& scale = a.scale[c.plane];
  const uint32_t first = blockIdx.x * (U * blockDim.y) + threadIdx.y;
  const char* rows = plane.rows + c.rows;
  char* cell = plane.cell + c.cell;
  RawChunk<IO> raw[U] = {};
  int64_t slots[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const uint32_t token = first + u * blockDim.y;
    slots[u] = load_slot(a.slots, token);
    if (token < a.slots.num_tokens && !idle) raw[u] = load_raw<IO>(rows + step(token, plane.rows_token));
  }
  Quantiser<C> fixed(is_code<C> && Kind == SCALE_FIXED ? read_scale(scale, 0, 0, c.head, 0) : 1.0f);
#pragma unroll
  for (int u = 0; u < U; u++) {
    const uint32_t token = first + u * blockDim.y;
    const Slot s = place_slot(a.slots, slots[u]);
    count_bad(a.slots, s);
    char* place = cell + step(s.block, plane.block) + step(s.offset, plane.token);
    if constexpr (!is_code<C>) {
      if (s.is_good && !idle) cast_chunk<IO, C>(place, raw[u]);
    } else if constexpr (Kind == SCALE_FIXED) {
      if (s.is_good && !idle) encode_chunk<IO, C>(place, raw[u], magnitude_bits(raw[u]), fixed, a.width);
    } else {
      constexpr bool is_plain = Kind == SCALE_PLAIN || Kind == SCALE_PLAIN_8;
      const uint32_t lanes = Kind == SCALE_PLAIN_8 ? 8 : a.group[c.plane].d;
      const uint32_t mine = magnitude_bits(raw[u]);
      uint32_t most = mine;
      if (is_plain || scale.mode == SCALE_COMPUTED) {
        most = largest<Kind>(mine, lanes);
        // Rare: a NaN or an infinity somewhere in the warp, which does not count.
        if (__any_sync(0xffffffffu, most >= kInfinity)) most = largest<Kind>(finite_magnitude_bits(raw[u]), lanes);
      }
      if (s.is_good && !idle) {
        const uint32_t group = Kind == SCALE_PLAIN_8 ? c.index / 8 : a.group[c.plane].divide(c.index);
        const bool owns = c.index == group * lanes;
        if constexpr (is_plain) {
          const float found = plain_scale<C>(most);
          if (owns) *a.plain[c.plane].place(s.block, s.offset, c.head, group) = found;
          encode_chunk<IO, C>(place, raw[u], mine, Quantiser<C>::of_largest(found), a.width);
          continue;
        }
        const Quantiser<C> q(
            settle_scale(scale, C, token, s.block, s.offset, c.head, group, __uint_as_float(most), owns));
        encode_chunk<IO, C>(place, raw[u], mine, q, a.width);
      }
    }
  }
}

// ---- the general kernel: 64-bit throughout, any strides

struct RowArgs {
  PlaneParams plane;
  RowsParams rows;
  const void* slots;
  int64_t slot_stride, num_tokens, num_slots, invalid, num_heads;
  BlockDivider divider;
  unsigned long long* errors;
  int32_t slot_bytes;
};

__global__ void __launch_bounds__(256) write_rows(const __grid_constant__ RowArgs a) {
  const int64_t num_rows = a.num_tokens * a.num_heads, warps = int64_t(gridDim.x) * (blockDim.x / 32);
  for (int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32; row < num_rows; row += warps) {
    const int64_t token = row / a.num_heads, head = row % a.num_heads;
    const int64_t slot = read_index(a.slots, token * a.slot_stride, a.slot_bytes);
    if (slot < 0 || slot == a.invalid) continue;
    if (slot >= a.num_slots) {
      if (a.errors && head == 0 && threadIdx.x % 32 == 0) atomicAdd(a.errors, 1ull);
      continue;
    }
    int64_t block, offset;
    a.divider.split(slot, &block, &offset);
    write_row(a.plane, a.rows, a.plane.data + block * a.plane.block + offset * a.plane.token + head * a.plane.head,
              a.rows.data + token * a.rows.token + head * a.rows.head, token, block, offset, head);
  }
}

// The grid: tiles of tokens along x, columns past 256 along y. Two tokens a thread where that still fills the device.
template <class Launch>
kvx_status_t with_grid(const Columns& columns, int64_t num_tokens, int num_sms, Launch&& run) {
  const int64_t count = int64_t(columns.count[0]) + columns.count[1];
  const Tile tile = make_tile(count);
  const unsigned across = unsigned(divide_up(count, tile.columns));
  const int64_t wide = divide_up(num_tokens, int64_t(tile.lanes) * 2);
  const bool unroll = wide * across >= 4 * num_sms;
  const int64_t grid = unroll ? wide : divide_up(num_tokens, tile.lanes);
  if (grid > 0x7fffffff || across > 65535)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld tokens of %lld columns are more than one launch takes.",
                (long long)num_tokens, (long long)count);
  return run(dim3(unsigned(grid), across), dim3(tile.columns, tile.lanes), unroll);
}

kvx_status_t run_copy(const CopyArgs& a, int width, int num_sms, void* stream) {
  return with_grid(a.columns, a.slots.num_tokens, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    switch (width) {
#define KVX_COPY(w)                                                                      \
  case w:                                                                                \
    return unroll ? launch_early("write_copy", write_copy<w, 2>, grid, block, stream, a) \
                  : launch_early("write_copy", write_copy<w, 1>, grid, block, stream, a);
      KVX_COPY(16)
      KVX_COPY(8)
      KVX_COPY(4)
      default: KVX_COPY(2)
#undef KVX_COPY
    }
    return KVX_STATUS_INTERNAL_ERROR;
  });
}

// Of one token a thread and of two.
using WriteChunks = void (*)(ChunkArgs);
struct ChunkKernels {
  WriteChunks one, two;
};
template <int IO, int C, int Kind> constexpr ChunkKernels kChunkKernels = {write_chunks<IO, C, Kind, 1>,
                                                                           write_chunks<IO, C, Kind, 2>};

// The table of fast instantiations: every IO type into every cache type.
ChunkKernels find_chunks(int io, int dtype, ScaleKind kind) {
#define KVX_CAST(io_, c) \
  case c: return kChunkKernels<io_, c, SCALE_FIXED>;
#define KVX_CODE(io_, c)                                                  \
  case c:                                                                 \
    return kind == SCALE_FIXED     ? kChunkKernels<io_, c, SCALE_FIXED>   \
           : kind == SCALE_PLAIN   ? kChunkKernels<io_, c, SCALE_PLAIN>   \
           : kind == SCALE_PLAIN_8 ? kChunkKernels<io_, c, SCALE_PLAIN_8> \
                                   : kChunkKernels<io_, c, SCALE_ANY>;
#define KVX_FROM(io_)                  \
  case io_:                            \
    switch (dtype) {                   \
      KVX_CAST(io_, KVX_DTYPE_F16)     \
      KVX_CAST(io_, KVX_DTYPE_BF16)    \
      KVX_CAST(io_, KVX_DTYPE_F32)     \
      KVX_CODE(io_, KVX_DTYPE_F8_E4M3) \
      KVX_CODE(io_, KVX_DTYPE_F8_E5M2) \
      KVX_CODE(io_, KVX_DTYPE_S8)      \
      KVX_CODE(io_, KVX_DTYPE_S4)      \
      KVX_CODE(io_, KVX_DTYPE_E2M1)    \
    }                                  \
    break;
  switch (io) {
    KVX_FROM(KVX_DTYPE_F16)
    KVX_FROM(KVX_DTYPE_BF16)
    KVX_FROM(KVX_DTYPE_F32)
  }
#undef KVX_FROM
#undef KVX_CODE
#undef KVX_CAST
  return ChunkKernels{nullptr, nullptr};
}

kvx_status_t run_chunks(const ChunkArgs& a, int io, int dtype, ScaleKind kind, int num_sms, void* stream) {
  const ChunkKernels found = find_chunks(io, dtype, kind);
  if (!found.one) return fail(KVX_STATUS_INTERNAL_ERROR, "no kernel from %s to %s.", dtype_name(io), dtype_name(dtype));
  return with_grid(a.columns, a.slots.num_tokens, num_sms, [&](dim3 grid, dim3 block, bool unroll) {
    return launch_early("write_chunks", unroll ? found.two : found.one, grid, block, stream, a);
  });
}

kvx_status_t run_rows(const WriteParams& p, int plane, unsigned long long* errors, int num_sms, void* stream) {
  const RowArgs a{p.plane[plane], p.rows[plane], p.slots,
                  p.slot_stride,  p.num_tokens,  p.num_slots,
                  p.invalid_slot, p.num_heads,   make_divider(p.block_size),
                  errors,         p.slot_bytes};
  const int64_t blocks = divide_up(p.num_tokens * p.num_heads, 8), most = int64_t(num_sms) * 32;
  return launch("write_rows", write_rows, dim3(unsigned(blocks < most ? blocks : most)), dim3(256), stream, a);
}

ScaleKind kind_of(const ScaleParams& s) {
  if (s.mode <= SCALE_READ && s.block == 0 && s.token == 0) return SCALE_FIXED;
  if (!is_plain(s)) return SCALE_ANY;
  return s.group_size == 8 * kChunk ? SCALE_PLAIN_8 : SCALE_PLAIN;
}

// One plane, or both when one kernel serves them (first = 0, last = 1).
kvx_status_t write_planes(const WriteParams& p, int first, int last, unsigned long long* errors, int num_sms,
                          void* stream, bool* done) {
  *done = true;
  uint64_t base[2];
  for (int i = 0; i < 2; i++) base[i] = uint64_t(uintptr_t(p.plane[i].data));
  const bool small = p.num_tokens <= kMaxCount && p.num_slots <= kMaxCount && p.slot_stride <= kMaxStride;
  const SlotParams slots{p.slots,
                         p.num_slots,
                         p.invalid_slot,
                         errors,
                         make_fast_divider(p.block_size),
                         uint32_t(p.num_tokens),
                         uint32_t(p.slot_stride),
                         p.slot_bytes};
  bool copies = small, chunks = small;
  int width = 16;
  uint64_t cells = 0;
  for (int i = first; i <= last; i++) {
    const bool fits = fits_32(p.plane[i], p.rows[i], p.num_heads);
    copies = copies && fits && is_copy(p.plane[i], p.rows[i]);
    chunks = chunks && fits && fits_chunks(p.plane[i], p.rows[i], base[i]) &&
             p.plane[i].dtype == p.plane[first].dtype && p.rows[i].dtype == p.rows[first].dtype;
    const int w = copy_width(p.plane[i], p.rows[i], base[i]);
    width = w < width ? w : width;
    cells |= base[i] | cell_address_bits(p.plane[i]);
  }
  if (copies) {
    CopyArgs a{{}, slots};
    for (int i = first; i <= last; i++)
      set_copy_columns(p.plane[i], p.rows[i], p.num_heads, width, &a.columns.plane[i], &a.columns.count[i]);
    return run_copy(a, width, num_sms, stream);
  }
  if (chunks) {
    ChunkArgs a{{}, slots, {}, {}, {}, common_alignment(cells)};
    const ScaleKind kind =
        kind_of(p.plane[first].scale) == kind_of(p.plane[last].scale) ? kind_of(p.plane[first].scale) : SCALE_ANY;
    bool shuffles = true;
    for (int i = first; i <= last; i++) {
      set_chunk_columns(p.plane[i], p.rows[i], p.num_heads, &a.columns.plane[i], &a.columns.count[i]);
      a.scale[i] = p.plane[i].scale;
      a.group[i] = make_fast_divider(p.plane[i].scale.group_size / kChunk);
      a.plain[i] = make_plain(p.plane[i].scale);
    }
    const Tile tile = make_tile(int64_t(a.columns.count[0]) + a.columns.count[1]);
    for (int i = first; i <= last; i++)
      shuffles = shuffles && (p.plane[i].scale.mode != SCALE_COMPUTED || fits_shuffle(p.plane[i], tile));
    if (shuffles) return run_chunks(a, p.rows[first].dtype, p.plane[first].dtype, kind, num_sms, stream);
  }
  *done = first == last;
  return *done ? run_rows(p, first, errors, num_sms, stream) : KVX_STATUS_OK;
}

}  // namespace

kvx_status_t write(const WriteParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0) return KVX_STATUS_OK;
  const int sms = guard.num_sms();
  bool done;
  KVX_TRY(write_planes(p, 0, 1, p.errors, sms, stream, &done));
  if (done) return KVX_STATUS_OK;
  KVX_TRY(write_planes(p, 0, 0, p.errors, sms, stream, &done));
  return write_planes(p, 1, 1, nullptr, sms, stream, &done);  // K has counted
}

}  // namespace cuda
}  // namespace kvx
