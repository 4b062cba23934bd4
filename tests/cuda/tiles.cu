// The tile headers, a launcher each test of test_tiles.py: a few threads do one thing with a header and hand back what
// came out. What should have come out is computed there, without them. Where fragments lie
// is written here from PTX's manual.
#include <cuda_runtime.h>

#include <cstdarg>
#include <cstdio>

#include "tiles/barrier.cuh"
#include "tiles/block_rows.cuh"
#include "tiles/elements.cuh"
#include "tiles/group_ring.cuh"
#include "tiles/map_filler.cuh"
#include "tiles/row_filler.cuh"
#include "tiles/tensor_map.h"
#include "tiles/wgmma.cuh"

// The library's sentence behind a failed call goes to where a test shows it.
kvx_status_t kvx::fail(kvx_status_t status, const char* text, ...) {
  va_list values;
  va_start(values, text);
  std::vfprintf(stderr, text, values);
  va_end(values);
  std::fputc('\n', stderr);
  return status;
}

using namespace kvx::cuda;
using namespace kvx::cuda::tiles;

// A table and the steps of two planes; test_tiles.py has the same struct.
struct Table {
  const void *indices, *indptr;
  const int64_t* bases[2];
  int64_t row_stride, index_stride, num_indices, max_blocks, block_size, num_blocks;
  int32_t format, index_bytes, indptr_bytes, is_packed_32;
  uint32_t block[2], token[2], head[2];
};

namespace {

int finish() {
  const cudaError_t launched = cudaGetLastError(), ran = cudaDeviceSynchronize();
  return launched != cudaSuccess ? launched : ran;
}

// ---- block_rows.cuh

RowFinder make_finder(const Table& t) {
  RowFinder f = {};
  f.kv.table.indices = t.indices, f.kv.table.indptr = t.indptr, f.kv.table.row_stride = t.row_stride,
  f.kv.table.index_stride = t.index_stride;
  f.kv.table.num_indices = t.num_indices, f.kv.table.max_blocks = t.max_blocks, f.kv.table.beam_width = 1;
  f.kv.table.format = t.format, f.kv.table.index_bytes = t.index_bytes, f.kv.table.indptr_bytes = t.indptr_bytes;
  f.kv.block_size = t.block_size, f.kv.num_blocks = t.num_blocks;
  f.block_size = make_fast_divider(t.block_size), f.is_packed_32 = t.is_packed_32 != 0;
  for (int i = 0; i < 2; i++)
    f.block[i] = t.block[i], f.token[i] = t.token[i], f.head[i] = t.head[i], f.kv.bases[i] = t.bases[i];
  return f;
}

// queries: (seq, position, end, head) each; out: (id asked for, token of the block,
// block, K's offset, V's offset) each.
__global__ void find_rows_kernel(RowFinder f, const int4* queries, int32_t (*out)[5], int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  const int4 query = queries[i];
  const RowAsked asked = ask_row(f, query.x, query.y, 0, query.z);
  const RowPlace place = place_row(f, asked, query.w);
  out[i][0] = asked.id, out[i][1] = int32_t(asked.inside), out[i][2] = place.block;
  out[i][3] = int32_t(place.offset[0]), out[i][4] = int32_t(place.offset[1]);
}

// out: (id, K's address, V's address) each sequence.
__global__ void find_caches_kernel(RowFinder f, const char* none, int64_t (*out)[3]) {
  const OwnCache cache = find_own_cache(f, threadIdx.x, none);
  out[threadIdx.x][0] = cache.id, out[threadIdx.x][1] = reinterpret_cast<int64_t>(cache.data[0]),
  out[threadIdx.x][2] = reinterpret_cast<int64_t>(cache.data[1]);
}

// ---- elements.cuh

template <int kRowBytes> __global__ void swizzle_kernel(int32_t* out) {
  out[blockIdx.x * blockDim.x + threadIdx.x] = int32_t(Swizzle<kRowBytes>::at(blockIdx.x, threadIdx.x));
}

// One warp: scores[token][n] = K . queries[n], and out[dim][n] = sum over tokens of V * weights[n]; K and V are the
// same 32 rows.
constexpr int kTokens = 32;
template <class Rows, int kRowBytes> __global__ void multiply_rows_kernel(const char* rows, const float* queries,
                                                                          const float* weights, float* scores,
                                                                          float* out) {
  using Numbers = typename Rows::Numbers;
  constexpr int kDims = kRowBytes * 8 / Rows::kBits, kChunks = kRowBytes / 16, kFragments = Rows::kGroupDims / 16;
  __shared__ __align__(128) char tile[kTokens * kRowBytes];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const uint32_t at = shared_address(tile);
  for (int i = lane; i < kTokens * kChunks; i += 32)
    copy_16(at + Swizzle<kRowBytes>::at(i / kChunks, i % kChunks), rows + i * 16);
  commit_copies();
  wait_copies<0>();
  __syncwarp();
  for (int m = 0; m < kTokens / 16; m++) {
    float sum[4] = {};
    for (int group = 0; group < kDims / Rows::kGroupDims; group++) {
      uint32_t a[kFragments][4];
      Rows::template load_k<kRowBytes>(a, at, m, group, lane);
      for (int f = 0; f < kFragments; f++) {
        const float* query = queries + g * kDims + group * Rows::kGroupDims;
        const uint32_t b[2] = {Numbers::pack(query[Rows::query_dim(f, 0, t)], query[Rows::query_dim(f, 1, t)]),
                               Numbers::pack(query[Rows::query_dim(f, 2, t)], query[Rows::query_dim(f, 3, t)])};
        Numbers::multiply(sum, a[f], b);
      }
    }
    for (int i = 0; i < 4; i++) scores[(m * 16 + i / 2 * 8 + g) * 8 + 2 * t + i % 2] = sum[i];
  }
  for (int group = 0; group < kDims / Rows::kGroupDims; group++) {
    float sum[kFragments][4] = {};
    for (int k = 0; k < kTokens / 16; k++) {
      uint32_t a[kFragments][4];
      Rows::template load_v<kRowBytes>(a, at, k, group, lane);
      const float* weight = weights + g * kTokens + k * 16 + 2 * t;
      const uint32_t b[2] = {Numbers::pack(weight[0], weight[1]), Numbers::pack(weight[8], weight[9])};
      for (int f = 0; f < kFragments; f++) Numbers::multiply(sum[f], a[f], b);
    }
    for (int f = 0; f < kFragments; f++)
      for (int i = 0; i < 4; i++)
        out[(group * Rows::kGroupDims + Rows::value_dim(f, i / 2, g)) * 8 + 2 * t + i % 2] = sum[f][i];
  }
}

template <class Rows> int multiply_rows_of(int row_bytes, const char* rows, const float* queries, const float* weights,
                                           float* scores, float* out) {
  if (row_bytes == 64) multiply_rows_kernel<Rows, 64><<<1, 32>>>(rows, queries, weights, scores, out);
  else if (row_bytes == 128) multiply_rows_kernel<Rows, 128><<<1, 32>>>(rows, queries, weights, scores, out);
  else if (row_bytes == 256) multiply_rows_kernel<Rows, 256><<<1, 32>>>(rows, queries, weights, scores, out);
  else return cudaErrorInvalidValue;
  return finish();
}

// A word of four codes a thread; out: its bytes 0 1, 2 3, 0 2, 1 3.
template <class Convert> __global__ void convert_kernel(const uint32_t* words, uint4* out) {
  const uint32_t x = Convert::prepare(words[threadIdx.x]);
  out[threadIdx.x] = make_uint4(Convert::template pair<0, 1>(x), Convert::template pair<2, 3>(x),
                                Convert::template pair<0, 2>(x), Convert::template pair<1, 3>(x));
}

// ---- ptx.cuh

// out: bytes 0 1 and 2 3 of a word of e4m3 codes.
__global__ void e4m3_kernel(const uint32_t* words, uint2* out) {
  out[threadIdx.x] = make_uint2(e4m3_to_f16(words[threadIdx.x]), e4m3_high_to_f16(words[threadIdx.x]));
}

// out: bytes 3 1 and 2 2 of a word of int8 codes.
__global__ void s8_kernel(const uint32_t* words, uint2* out) {
  const uint32_t flipped = words[threadIdx.x] ^ 0x80808080u;
  out[threadIdx.x] = make_uint2(s8_to_f16(flipped, 0x4143), s8_to_f16(flipped, 0x4242));
}

// Lane i copies bytes[i] of chunk i, then all of it, then the first 4 bytes or none; out: [3][32] chunks, of 0xff where
// nothing was put.
__global__ void copy_kernel(const uint4* from, const int* bytes, uint4* out) {
  __shared__ uint4 to[3][32];
  const int lane = threadIdx.x;
  for (auto& part : to) part[lane] = make_uint4(~0u, ~0u, ~0u, ~0u);
  __syncwarp();
  copy_16(shared_address(&to[0][lane]), from + lane, bytes[lane]);
  if (bytes[lane]) copy_16(shared_address(&to[1][lane]), from + lane);
  copy_4(shared_address(&to[2][lane]), from + lane, min(bytes[lane], 4));
  commit_copies();
  wait_copies<0>();
  for (int i = 0; i < 3; i++) out[i * 32 + lane] = to[i][lane];
}

// Four 8x8 matrices; out: what load_matrices, load_matrices_turned and turn_matrix after
// load_matrices give, [3][4][32] words.
__global__ void matrices_kernel(const uint4* matrices, uint32_t (*out)[4][32]) {
  __shared__ uint4 rows[32];
  const int lane = threadIdx.x;
  rows[lane] = matrices[lane];
  __syncwarp();
  uint32_t plain[4], turned[4];
  load_matrices(plain, shared_address(&rows[lane]));
  load_matrices_turned(turned, shared_address(&rows[lane]));
  for (int i = 0; i < 4; i++)
    out[0][i][lane] = plain[i], out[1][i][lane] = turned[i], out[2][i][lane] = turn_matrix(plain[i]);
}

// ---- barrier.cuh

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A launch that stands still fails, and does not hold the device: the last thread of a block watches until all others
// are done.
struct Watch {
  int* running;
  __device__ void begin() const {
    if (threadIdx.x == 0) *running = int(blockDim.x) - 1;
    __syncthreads();
  }
  __device__ void done() const { atomicSub(running, 1); }
  __device__ void until_done() const {
    const long long begun = clock64();
    while (atomicAdd(running, 0) > 0)
      if (clock64() - begun > 20000000000) __trap();
  }
};
#endif

// One half of the threads loads, the other reads: steps follow each other through three stages. Each side is the slow
// one in turn, so that the ring runs full and runs empty. `wrong` counts phases that were over too early, or not when
// they should be.
constexpr int kSide = 64;
__global__ void ring_kernel(const char* from, char* to, int steps, int* wrong) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kStages = 3, kStageBytes = kSide * 16;
  __shared__ __align__(128) char stages[kStages][kStageBytes];
  __shared__ uint64_t barriers[2][kStages];
  __shared__ int running;
  const auto full = [&](int stage) { return shared_address(&barriers[0][stage]); };
  const auto free = [&](int stage) { return shared_address(&barriers[1][stage]); };
  const int thread = threadIdx.x % kSide, side = threadIdx.x / kSide;
  const Watch watch{&running};
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; s++) init_barrier(full(s), kSide), init_barrier(free(s), kSide);
  }
  watch.begin();
  if (side == 2) return watch.until_done();
  for (int i = 0; i < steps; i++) {
    const int stage = i % kStages, parity = i / kStages & 1;
    if (i / 8 % 2 == side) __nanosleep(2000);
    if (side == 0) {
      wait(free(stage), parity ^ 1);
      copy_16(shared_address(stages[stage]) + thread * 16, from + i * kStageBytes + thread * 16, 16);
      arrive_when_copied(full(stage));
    } else {
      wait(full(stage), parity);
      // This phase of `full` is over and the next cannot be; that of `free` cannot be before this thread arrives, and
      // the one before it is.
      if (!is_over(full(stage), parity) || is_over(full(stage), parity ^ 1) || is_over(free(stage), parity) ||
          !is_over(free(stage), parity ^ 1))
        atomicAdd(wrong, 1);
      const int other = (thread + 37) % kSide;  // what another thread loaded
      const uint4 x = load_shared_16(shared_address(stages[stage]) + other * 16);
      *reinterpret_cast<uint4*>(to + i * kStageBytes + other * 16) = x;
      arrive(free(stage));
    }
  }
  wait_copies<0>();
  watch.done();
#endif
}

// ---- ring.cuh

// One half of the threads has tiles in registers, changed on the way, and the other reads what another thread had. Two
// of those who read give a stage back. Each side is the slow one in turn.
template <int kStages> __global__ void feed_kernel(const uint4* from, uint4* to, int steps) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Stages = Ring<kStages, kSide * 16>;
  __shared__ __align__(128) char stages[kStages * kSide * 16];
  __shared__ uint64_t barriers[Stages::kBarrierBytes / 8];
  __shared__ int running;
  const int thread = threadIdx.x % kSide, side = threadIdx.x / kSide, other = (thread + 37) % kSide;
  Stages ring{shared_address(stages), shared_address(barriers)};
  const Watch watch{&running};
  if (threadIdx.x == 0) ring.init(kSide, 2), show_barriers();
  watch.begin();
  if (side == 2) return watch.until_done();
  for (int i = 0; i < steps; i++) {
    if (i / 8 % 2 == side) __nanosleep(2000);
    if (side == 0) {
      uint4 x = from[i * kSide + thread];
      x.y ^= x.x, x.w += x.z;
      ring.fill([&](uint32_t tile) { store_shared_16(tile + thread * 16, x); });
    } else {
      ring.wait_full();
      to[i * kSide + other] = load_shared_16(ring.tile() + other * 16);
      meet(1, kSide);  // all have read
      ring.give_back(thread == 5 || thread == 40);
    }
  }
  watch.done();
#endif
}

// ---- group_ring.cuh

// One warp copies a tile a step and reads what another lane has copied. Some lanes come late, others at every step.
template <int kStages> __global__ void group_kernel(const uint4* from, uint4* to, int steps) {
  __shared__ __align__(128) char stages[kStages * 32 * 16];
  GroupRing<kStages, 32 * 16> ring(stages);
  const int lane = threadIdx.x, other = (lane + 13) % 32;
  int filled = 0;
  const auto fill_next = [&]() {
    if (lane % 4 == filled % 4) __nanosleep(1000);
    if (filled < steps) copy_16(ring.tile_at(ring.filling) + lane * 16, from + filled * 32 + lane);
    ring.end_fill();
    filled++;
  };
  for (int i = 0; i < kStages - 1; i++) fill_next();
  for (int i = 0; i < steps; i++) {
    ring.wait_full();
    fill_next();
    if (lane % 8 == i % 8) __nanosleep(1000);
    to[i * 32 + other] = reinterpret_cast<const uint4*>(ring.tile(ring.reading))[other];
    ring.give_back();
  }
}

// ---- row_filler.cuh and map_filler.cuh

struct FillArgs {
  CUtensorMap maps[2];
  RowFinder finder;
  const char* data[2];
  TileRange range;
  uint32_t box;     // 0: rows are copied
  uint32_t chunks;  // of a row; a tile may have more
};

// Tiles of a sequence, K and V: filled by a warpgroup, or by some of its warps and the copy engine, read by another
// warpgroup. Stages hold NaN at first. tiles: [tile][K, V], bytes as they lie in shared memory; valid: [tile].
template <int kRowBytes> __global__ void fill_kernel(const __grid_constant__ FillArgs a, uint4* tiles, uint4* valid) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Rings = KvRings<kRowBytes, 2>;
  extern __shared__ char raw[];
  char* shared = raw + (1024 - (shared_address(raw) & 1023)) % 1024;
  const uint32_t at = shared_address(shared);
  __shared__ int running;
  const Watch watch{&running};
  for (int i = threadIdx.x; i < Rings::kOffsetsAt / 16; i += blockDim.x)
    store_shared_16(at + i * 16, make_uint4(~0u, ~0u, ~0u, ~0u));
  show_to_multiplications();  // before the copy engine writes there
  typename Rings::Ring keys = Rings::keys(at), values = Rings::values(at);
  if (threadIdx.x == 0) {
    const int fills = a.box ? MapFiller<Rings>::kArrivals : RowFiller<Rings>::kArrivals;
    keys.init(fills, 1), values.init(fills, 1);
    show_barriers();
  }
  watch.begin();
  const int side = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (side == 2) return watch.until_done();
  if (side == 0 && a.box) {
    if (thread < MapFiller<Rings>::kWarps * 32) {
      MapFiller<Rings> filler{a.maps, a.finder, a.data, a.box, {a.chunks, a.chunks}, shared, at, uint32_t(thread) / 32};
      filler.begin();
      filler.start(a.range);
      for (int i = 0; i < a.range.num_tiles; i++) {
        if (i / 4 % 2 == 0) __nanosleep(5000);
        filler.fill_next();
      }
    }
  } else if (side == 0) {
    RowFiller<Rings> filler{a.finder, a.data, {a.chunks, a.chunks}, shared, at, 1};
    filler.begin();
    filler.start(a.range);
    for (int i = 0; i < a.range.num_tiles; i++) {
      if (i / 4 % 2 == 0) __nanosleep(5000);
      filler.fill_next();
    }
    filler.finish();
  } else {
    constexpr int kChunks = Rings::kTileBytes / 16;
    for (int i = 0; i < a.range.num_tiles; i++) {
      if (i / 4 % 2 == 1) __nanosleep(5000);
      for (int plane = 0; plane < 2; plane++) {
        typename Rings::Ring& ring = plane ? values : keys;
        ring.wait_full();
        for (int j = thread; j < kChunks; j += 128)
          tiles[(i * 2 + plane) * kChunks + j] = load_shared_16(ring.tile() + j * 16);
        if (plane == 0 && thread == 0) valid[i] = *Rings::valid(shared, i);
        show_to_multiplications();  // what was read here is the copy engine's next
        meet(2, 128);
        ring.give_back(thread == 0);
      }
    }
  }
  watch.done();
#endif
}

template <int kRowBytes> int fill_of(const FillArgs& args, uint4* tiles, uint4* valid) {
  constexpr int kBytes = KvRings<kRowBytes, 2>::kBytes + 1024;
  const cudaError_t error =
      cudaFuncSetAttribute(fill_kernel<kRowBytes>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  fill_kernel<kRowBytes><<<1, 257, kBytes>>>(args, tiles, valid);
  return finish();
}

// ---- tensor_map.h and tensor_map.cuh

bool make_map(CUtensorMap* map, const Table& t, int plane, char* data, int num_heads, int row_bytes) {
  kvx::PlaneParams p = {};
  p.data = data, p.block = int64_t(t.block[plane]) * 16, p.token = int64_t(t.token[plane]) * 16,
  p.head = int64_t(t.head[plane]) * 16;
  p.dtype = KVX_DTYPE_BF16, p.head_dim = row_bytes / 2, p.is_dense = 1;
  const MappedPlane mapped{&p, num_heads, t.block_size, t.num_blocks};
  return fits_tensor_map(mapped) && make_tensor_map(map, mapped) == KVX_STATUS_OK;
}

struct BoxArgs {
  CUtensorMap map;
  int tokens;
};

// A box a block of threads, from (dim, head, token, block); out: [box][128 rows] of 128 bytes as they lie in shared
// memory, 0xff where nothing came.
__global__ void box_kernel(const __grid_constant__ BoxArgs a, const int4* from, uint4 (*out)[128 * 8]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ __align__(1024) uint4 rows[128 * 8];
  __shared__ uint64_t barrier;
  for (int i = threadIdx.x; i < 128 * 8; i += 32) rows[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  show_to_multiplications();
  if (threadIdx.x == 0) init_barrier(shared_address(&barrier), 1), show_barriers();
  __syncwarp();
  if (is_elected()) {
    const int4 at = from[blockIdx.x];
    prefetch_map(a.map);
    expect_bytes(shared_address(&barrier), a.tokens * 128);
    copy_box(shared_address(rows), a.map, at.x, at.y, at.z, at.w, shared_address(&barrier));
    arrive(shared_address(&barrier));
  }
  __syncwarp();
  wait(shared_address(&barrier), 0);
  for (int i = threadIdx.x; i < 128 * 8; i += 32) out[blockIdx.x][i] = load_shared_16(shared_address(rows + i));
#endif
}

// ---- barrier.cuh: meetings

// Two warps take turns to change 32 numbers: whose turn it was comes to the meeting
// without waiting, the other waits there.
__global__ void meeting_kernel(int* out, int steps) {
  __shared__ int number[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp == 0) number[lane] = lane;
  for (int i = 0; i < steps; i++) {
    if (i % 2 == warp) {
      number[lane ^ 1] = number[lane ^ 1] * 3 % 1021 + i;
      pass(1 + i % 2, 64);
    } else {
      meet(1 + i % 2, 64);
    }
  }
  __syncthreads();
  if (warp == 0) out[lane] = number[lane];
}

// ---- wgmma.cuh: D = C + A * B, with A [64, depth] and D [64, kColumns]

// Dense rows of kParts * 128 bytes as descriptors have them: all rows' first 128 bytes, then all rows' next.
template <int kRows, int kParts> __device__ void load_tile(uint32_t to, const char* from) {
  for (int i = threadIdx.x; i < kRows * kParts * 8; i += blockDim.x) {
    const int row = i / (kParts * 8), chunk = i % (kParts * 8);
    copy_16(to + chunk / 8 * kRows * 128 + Swizzle<128>::at(row, chunk % 8), from + i * 16);
  }
}
// Where number i of a thread's share of D lies in [64, kColumns].
template <int kColumns> __device__ int place_of(int i) {
  return (threadIdx.x / 32 * 16 + i / 2 % 2 * 8 + threadIdx.x % 32 / 4) * kColumns + i / 4 * 8 + threadIdx.x % 4 * 2 +
         i % 2;
}

// B is [kColumns, 128], so that D = C + A * B^T. `adds` 0: C must not matter.
template <class Numbers, int kColumns> __global__ void multiply_kernel(const char* a, const char* b, const float* c,
                                                                       float* d, int adds) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(1024) char tiles[(64 + kColumns) * 256];
  const uint32_t a_at = shared_address(tiles), b_at = a_at + 64 * 256;
  load_tile<64, 2>(a_at, a), load_tile<kColumns, 2>(b_at, b);
  commit_copies();
  wait_copies<0>();
  show_to_multiplications();
  __syncthreads();
  float sums[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; i++) sums[i] = c[place_of<kColumns>(i)];
  hold(sums);
  begin_multiplications();
#pragma unroll
  for (int k = 0; k < 8; k++)
    Warpgroup<Numbers, kColumns>::multiply(sums, matrix_descriptor(a_at + k / 4 * 64 * 128 + k % 4 * 32, 16, 1024),
                                           matrix_descriptor(b_at + k / 4 * kColumns * 128 + k % 4 * 32, 16, 1024),
                                           adds || k > 0);
  commit_multiplications();
  wait_multiplications<0>();
  hold(sums);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i++) d[place_of<kColumns>(i)] = sums[i];
#endif
}

// A is [64, 64] and goes to registers; B is [64, kColumns].
template <class Numbers, int kColumns> __global__ void multiply_turned_kernel(const char* a, const char* b,
                                                                              const float* c, float* d) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(1024) char tile[64 * kColumns * 2];
  load_tile<64, kColumns / 64>(shared_address(tile), b);
  commit_copies();
  wait_copies<0>();
  show_to_multiplications();
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  uint32_t mine[4][4];
  float sums[kColumns / 2];
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      mine[k][i] = *reinterpret_cast<const uint32_t*>(a + ((row + i % 2 * 8) * 64 + k * 16 + i / 2 * 8 + column) * 2);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i++) sums[i] = c[place_of<kColumns>(i)];
  hold(sums);
  begin_multiplications();
#pragma unroll
  for (int k = 0; k < 4; k++)
    Warpgroup<Numbers, kColumns>::multiply_turned(
        sums, mine[k], matrix_descriptor(shared_address(tile) + k * 16 * 128, 64 * 128, 1024));
  commit_multiplications();
  wait_multiplications<0>();
  hold(sums);
#pragma unroll
  for (int i = 0; i < kColumns / 2; i++) d[place_of<kColumns>(i)] = sums[i];
#endif
}

template <class Numbers> int multiply_of(int columns, bool is_turned, const char* a, const char* b, const float* c,
                                         float* d, int adds) {
  if (columns == 64 && is_turned) multiply_turned_kernel<Numbers, 64><<<1, 128>>>(a, b, c, d);
  else if (columns == 64) multiply_kernel<Numbers, 64><<<1, 128>>>(a, b, c, d, adds);
  else if (columns == 128 && is_turned) multiply_turned_kernel<Numbers, 128><<<1, 128>>>(a, b, c, d);
  else if (columns == 128) multiply_kernel<Numbers, 128><<<1, 128>>>(a, b, c, d, adds);
  else return cudaErrorInvalidValue;
  return finish();
}

}  // namespace

// All return a cudaError_t, of the launch or of the kernel, which is over by then.
extern "C" {

const char* error_text(int error) { return cudaGetErrorString(cudaError_t(error)); }
int find_rows(const Table* table, const int4* queries, int32_t (*out)[5], int count) {
  find_rows_kernel<<<(count + 127) / 128, 128>>>(make_finder(*table), queries, out, count);
  return finish();
}
int find_caches(const Table* table, const char* none, int64_t (*out)[3], int num_seqs) {
  find_caches_kernel<<<1, num_seqs>>>(make_finder(*table), none, out);
  return finish();
}
int swizzle(int row_bytes, int rows, int32_t* out) {
  if (row_bytes == 64) swizzle_kernel<64><<<rows, 4>>>(out);
  else if (row_bytes == 128) swizzle_kernel<128><<<rows, 8>>>(out);
  else if (row_bytes == 256) swizzle_kernel<256><<<rows, 16>>>(out);
  else if (row_bytes == 1152) swizzle_kernel<1152><<<rows, 72>>>(out);
  else return cudaErrorInvalidValue;
  return finish();
}
// `kind`: 0 bf16, 1 f16, 2 e4m3, 3 s8; the same below.
int multiply_rows(int kind, int row_bytes, const char* rows, const float* queries, const float* weights, float* scores,
                  float* out) {
  if (kind == 0) return multiply_rows_of<Bf16Rows>(row_bytes, rows, queries, weights, scores, out);
  if (kind == 1) return multiply_rows_of<F16Rows>(row_bytes, rows, queries, weights, scores, out);
  if (kind == 2) return multiply_rows_of<E4m3Rows>(row_bytes, rows, queries, weights, scores, out);
  return multiply_rows_of<S8Rows>(row_bytes, rows, queries, weights, scores, out);
}
int convert(int kind, const uint32_t* words, uint4* out, int count) {
  if (kind == 2) convert_kernel<ConvertE4m3><<<1, count>>>(words, out);
  else convert_kernel<ConvertS8><<<1, count>>>(words, out);
  return finish();
}
int convert_plain(int kind, const uint32_t* words, uint2* out, int count) {
  if (kind == 2) e4m3_kernel<<<1, count>>>(words, out);
  else s8_kernel<<<1, count>>>(words, out);
  return finish();
}
int copy_chunks(const uint4* from, const int* bytes, uint4* out) {
  copy_kernel<<<1, 32>>>(from, bytes, out);
  return finish();
}
int load_all_matrices(const uint4* matrices, uint32_t (*out)[4][32]) {
  matrices_kernel<<<1, 32>>>(matrices, out);
  return finish();
}
int ring(const char* from, char* to, int steps, int* wrong) {
  ring_kernel<<<1, 2 * kSide + 1>>>(from, to, steps, wrong);
  return finish();
}
int feed(int stages, const uint4* from, uint4* to, int steps) {
  constexpr int kThreads = 2 * kSide + 1;
  if (stages == 1) feed_kernel<1><<<1, kThreads>>>(from, to, steps);
  else if (stages == 2) feed_kernel<2><<<1, kThreads>>>(from, to, steps);
  else if (stages == 3) feed_kernel<3><<<1, kThreads>>>(from, to, steps);
  else if (stages == 4) feed_kernel<4><<<1, kThreads>>>(from, to, steps);
  else return cudaErrorInvalidValue;
  return finish();
}
int feed_groups(int stages, const uint4* from, uint4* to, int steps) {
  if (stages == 2) group_kernel<2><<<1, 32>>>(from, to, steps);
  else if (stages == 3) group_kernel<3><<<1, 32>>>(from, to, steps);
  else if (stages == 4) group_kernel<4><<<1, 32>>>(from, to, steps);
  else return cudaErrorInvalidValue;
  return finish();
}
// `data`: addresses of K and V, and `range` a TileRange, both on the host. `uses_maps` 0: rows are copied. Tiles have
// rows of 128 or 256 bytes, whichever `row_bytes` fit in.
int fill_rings(const Table* table, char* const* data, int num_heads, int row_bytes, int uses_maps,
               const TileRange* range, uint4* tiles, uint4* valid) {
  FillArgs args = {};
  args.finder = make_finder(*table), args.range = *range, args.chunks = uint32_t(row_bytes) / 16;
  for (int i = 0; i < 2; i++) {
    args.data[i] = data[i];
    if (uses_maps && !make_map(&args.maps[i], *table, i, data[i], num_heads, row_bytes)) return cudaErrorInvalidValue;
  }
  if (uses_maps) args.box = uint32_t(box_tokens(table->block_size));
  return row_bytes <= 128 ? fill_of<128>(args, tiles, valid) : fill_of<256>(args, tiles, valid);
}
// Boxes of plane 0.
int copy_boxes(const Table* table, char* data, int num_heads, int row_bytes, const int4* from, uint4 (*out)[128 * 8],
               int count) {
  BoxArgs args = {};
  if (!make_map(&args.map, *table, 0, data, num_heads, row_bytes)) return cudaErrorInvalidValue;
  args.tokens = int(box_tokens(table->block_size));
  box_kernel<<<count, 32>>>(args, from, out);
  return finish();
}
// Whether a tensor map can be made of plane 0: no device is needed.
int fits_map(const Table* table, int num_heads, int head_dim, int is_dense, int is_bytes) {
  kvx::PlaneParams p = {};
  p.dtype = is_bytes ? KVX_DTYPE_F8_E4M3 : KVX_DTYPE_BF16;
  p.block = int64_t(table->block[0]) * 16, p.token = int64_t(table->token[0]) * 16,
  p.head = int64_t(table->head[0]) * 16, p.head_dim = head_dim, p.is_dense = is_dense;
  return fits_tensor_map(MappedPlane{&p, num_heads, table->block_size, table->num_blocks});
}
int meeting(int* out, int steps) {
  meeting_kernel<<<1, 64>>>(out, steps);
  return finish();
}
int multiply(int kind, int columns, int is_turned, const char* a, const char* b, const float* c, float* d, int adds) {
  return kind == 0 ? multiply_of<Bf16Numbers>(columns, is_turned, a, b, c, d, adds)
                   : multiply_of<F16Numbers>(columns, is_turned, a, b, c, d, adds);
}

}  // extern "C"
