// Pieces moved by kernels. A block of threads takes a chunk of one piece, so that it reads the two pointers once; how
// wide it may move is seen there from the addresses, since the host cannot look into the tables.
#include "kvbm/move.h"

#include <type_traits>

#include "cuda/device.cuh"

namespace kvbm {
namespace {

using namespace kvx::cuda;

constexpr unsigned kThreads = 256, kWarp = 32;
constexpr int kVectors = 4;  // of one thread, under way at once

// A multiplication for what fits 31 bits; larger numbers are rare enough to divide.
struct PlainDivider {
  uint64_t d;
  __device__ __forceinline__ uint64_t divide(uint64_t n) const { return n / d; }
};
template <class Index> using Divider = std::conditional_t<std::is_same_v<Index, uint32_t>, FastDivider, PlainDivider>;

inline void set_divider(FastDivider* f, uint64_t d) { *f = make_fast_divider(int64_t(d)); }
inline void set_divider(PlainDivider* f, uint64_t d) { f->d = d; }

struct DeviceSide {
  const void* const* table;
  BlockDivider per;
  uint64_t step;
};

// What both kernels begin with.
struct Pieces {
  DeviceSide side[2];
  uint64_t first;  // piece of this launch's first block of threads
  uint64_t piece_bytes;
  uint32_t chunk_bytes;  // of one block of threads: threads * kVectors * 16, whatever the width
  FastDivider chunks;    // blocks of threads a piece takes
};

template <class Index> struct PermuteArgs {
  Pieces pieces;
  Divider<Index> row, inner;  // bytes of a row; rows of the inner order
  uint64_t outer_step[2], inner_step[2];
};

struct Here {
  const char* from;
  char* to;
  uint64_t begin;  // first byte of the chunk
};

__device__ __forceinline__ char* find(const DeviceSide& side, uint64_t piece) {
  int64_t pointer, rest;
  side.per.split(int64_t(piece), &pointer, &rest);
  return static_cast<char*>(const_cast<void*>(side.table[pointer])) + rest * side.step;
}

__device__ __forceinline__ Here find_chunk(const Pieces& p) {
  const uint32_t n = p.chunks.divide(blockIdx.x);
  const uint64_t piece = p.first + n;
  return Here{find(p.side[0], piece), find(p.side[1], piece), uint64_t(blockIdx.x - n * p.chunks.d) * p.chunk_bytes};
}

// The lowest bit set in any of them, at most 16: what an access to all of them may be wide.
__device__ __forceinline__ uint32_t width_of(uint32_t bits) { return (bits | 16) & (~(bits | 16) + 1); }

// ---- permute

template <int W, class Index>
__device__ __forceinline__ void permute_chunk(const PermuteArgs<Index>& a, const char* from, char* to, Index begin,
                                              Index end) {
  using T = typename Vec<W>::T;
  const Index between = blockDim.x * W;
  for (Index at = begin + threadIdx.x * W; at < end; at += kVectors * between) {
    T data[kVectors];
    char* put[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; v++) {
      const Index byte = at + v * between;
      put[v] = nullptr;
      if (byte >= end) continue;
      const Index row = a.row.divide(byte), rest = byte - row * Index(a.row.d);
      const Index i = a.inner.divide(row), j = row - i * Index(a.inner.d);
      data[v] = load_once<T>(from + (i * a.outer_step[0] + j * a.inner_step[0] + rest));
      put[v] = to + (i * a.outer_step[1] + j * a.inner_step[1] + rest);
    }
#pragma unroll
    for (int v = 0; v < kVectors; v++)
      if (put[v]) store_once(put[v], data[v]);
  }
}

template <class Index>
__global__ void __launch_bounds__(kThreads) permute_rows(const __grid_constant__ PermuteArgs<Index> a) {
  wait_for_previous();
  const Here here = find_chunk(a.pieces);
  const uint64_t end = min(here.begin + a.pieces.chunk_bytes, a.pieces.piece_bytes);
  // Steps are multiples of a row, so rows and bases decide. Chunks begin at multiples of 16.
  switch (width_of(uint32_t(uintptr_t(here.from)) | uint32_t(uintptr_t(here.to)) | uint32_t(a.row.d))) {
    case 16: return permute_chunk<16, Index>(a, here.from, here.to, Index(here.begin), Index(end));
    case 8: return permute_chunk<8, Index>(a, here.from, here.to, Index(here.begin), Index(end));
    case 4: return permute_chunk<4, Index>(a, here.from, here.to, Index(here.begin), Index(end));
    case 2: return permute_chunk<2, Index>(a, here.from, here.to, Index(here.begin), Index(end));
    default: return permute_chunk<1, Index>(a, here.from, here.to, Index(here.begin), Index(end));
  }
}

// ---- copy

template <int W>
__device__ __forceinline__ void copy_chunk(const char* from, char* to, uint64_t begin, uint64_t end) {
  using T = typename Vec<W>::T;
  const uint32_t between = blockDim.x * W;
  for (uint64_t at = begin + threadIdx.x * W; at < end; at += kVectors * between) {
    T data[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; v++)
      if (at + v * between < end) data[v] = load_once<T>(from + at + v * between);
#pragma unroll
    for (int v = 0; v < kVectors; v++)
      if (at + v * between < end) store_once(to + at + v * between, data[v]);
  }
}

// Both addresses at the same place between two multiples of W: bytes up to the first multiple, then vectors, then the
// bytes left.
__global__ void __launch_bounds__(kThreads) copy_pieces(const __grid_constant__ Pieces p) {
  wait_for_previous();
  const Here here = find_chunk(p);
  const uint32_t source = uint32_t(uintptr_t(here.from)), width = width_of(source ^ uint32_t(uintptr_t(here.to)));
  const uint64_t head = min(uint64_t((0u - source) & (width - 1)), p.piece_bytes),
                 body = (p.piece_bytes - head) & ~uint64_t(width - 1);
  if (here.begin == 0 && threadIdx.x < kWarp) {  // fewer than 16 bytes before and after: half a warp each
    const uint64_t byte = threadIdx.x < 16 ? threadIdx.x : head + body + (threadIdx.x - 16);
    if (byte < (threadIdx.x < 16 ? head : p.piece_bytes)) here.to[byte] = here.from[byte];
  }
  const char* from = here.from + head;
  char* to = here.to + head;
  const uint64_t end =
      min(here.begin + p.chunk_bytes, body);  // may be before begin, in a last chunk that the head made empty
  switch (width) {
    case 16: return copy_chunk<16>(from, to, here.begin, end);
    case 8: return copy_chunk<8>(from, to, here.begin, end);
    case 4: return copy_chunk<4>(from, to, here.begin, end);
    case 2: return copy_chunk<2>(from, to, here.begin, end);
    default: return copy_chunk<1>(from, to, here.begin, end);
  }
}

// ---- launching

// What the device would run, not what it is: wait_for_previous() is code of sm_90 and
// later, and older PTX lacks it (cuda/device.cu).
bool can_start_early() {
  constexpr int kMaxDevices = 64;
  static int ptx_of[kMaxDevices];  // 0 = not asked yet; races write the same value
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kMaxDevices) return false;
  if (ptx_of[device] == 0) {
    cudaFuncAttributes attributes = {};
    ptx_of[device] = cudaFuncGetAttributes(&attributes, copy_pieces) == cudaSuccess ? attributes.ptxVersion : -1;
  }
  return ptx_of[device] >= 90;
}

Pieces& pieces_of(Pieces& p) { return p; }
template <class Index> Pieces& pieces_of(PermuteArgs<Index>& a) { return a.pieces; }

// One launch, unless there are more chunks than a grid has blocks. `args` has its sides and whatever the kernel adds.
template <class Args> int launch_pieces(void (*kernel)(Args), Args args, const Side side[2], uint64_t num_pieces,
                                        uint64_t piece_bytes, kvbm_stream_t stream) {
  // Small pieces take fewer threads, not fewer vectors of each: it is loads under way that hide memory.
  const uint64_t vectors = (piece_bytes - 1) / 16 + 1, wanted = (vectors - 1) / kVectors + 1;
  const unsigned threads = wanted >= kThreads ? kThreads : unsigned(wanted + kWarp - 1) / kWarp * kWarp;
  Pieces& p = pieces_of(args);
  for (int w = 0; w < 2; w++) p.side[w] = DeviceSide{side[w].table, make_divider(int64_t(side[w].per)), side[w].step};
  p.piece_bytes = piece_bytes;
  p.chunk_bytes = threads * kVectors * 16;
  const uint64_t chunks = (piece_bytes - 1) / p.chunk_bytes + 1;
  if (chunks > uint64_t(kMaxCount) || side[0].per > uint64_t(kMaxCount) || side[1].per > uint64_t(kMaxCount))
    return cudaErrorInvalidValue;
  p.chunks = make_fast_divider(int64_t(chunks));

  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = can_start_early() ? 1 : 0;
  const uint64_t most = uint64_t(kMaxCount) / chunks;  // pieces of one launch
  for (p.first = 0; p.first < num_pieces; p.first += most) {
    config.gridDim = dim3(unsigned((num_pieces - p.first < most ? num_pieces - p.first : most) * chunks));
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <class Index> int launch_permute(const Permute& p, kvbm_stream_t stream) {
  PermuteArgs<Index> args = {};
  set_divider(&args.row, p.row_bytes), set_divider(&args.inner, p.inner_rows);
  for (int w = 0; w < 2; w++) args.outer_step[w] = p.outer[w], args.inner_step[w] = p.inner[w];
  return launch_pieces(permute_rows<Index>, args, p.side, p.num_pieces, p.piece_bytes, stream);
}

}  // namespace

int copy(const Copy& c, kvbm_stream_t stream) {
  return launch_pieces(copy_pieces, Pieces{}, c.side, c.num_pieces, c.piece_bytes, stream);
}

int permute(const Permute& p, kvbm_stream_t stream) {
  return p.piece_bytes <= uint64_t(kMaxCount) - kThreads * kVectors * 16 ? launch_permute<uint32_t>(p, stream)
                                                                         : launch_permute<uint64_t>(p, stream);
}

}  // namespace kvbm
