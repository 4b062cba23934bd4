// Norm and rotation of a row held by neighbouring lanes, sixteen elements each. append/append.h has the arithmetic.
//
// A lane holds two pieces of eight elements, a and b. Where halves rotate, a comes from the first half of the rotating
// part and b from the second, so that a pair meets in one lane; elsewhere a and b are neighbours:
//
//   half, rotary 64 of 128      lane   0    1    2    3  |  4      5      6      7
//                               a      0    1    2    3  |  8      10     12     14      pieces of eight
//                               b      4    5    6    7  |  9      11     13     15
#pragma once
#include "append/append.h"
#include "cuda/chunk.cuh"

namespace kvx {
namespace cuda {

constexpr int kPiece = 8;

// Which pieces a lane holds, and which lane holds a piece.
struct PieceMap {
  uint32_t paired;  // lanes that hold pairs of halves: rotary / 16 (half), 0 (else)
  uint32_t pieces;  // of a row: dim / 8

  __device__ __forceinline__ uint32_t a(uint32_t lane) const { return lane < paired ? lane : 2 * lane; }
  __device__ __forceinline__ uint32_t b(uint32_t lane) const { return lane < paired ? lane + paired : 2 * lane + 1; }
  __device__ __forceinline__ bool is_idle(uint32_t lane) const { return 2 * lane >= pieces; }
  __device__ __forceinline__ uint32_t lane_of(uint32_t piece) const {
    return piece < paired ? piece : piece < 2 * paired ? piece - paired : piece / 2;
  }
  __device__ __forceinline__ bool is_b(uint32_t piece) const {
    return piece < 2 * paired ? piece >= paired : piece & 1;
  }
};

__device__ __forceinline__ float add_squares(const float* x) {
  float s[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; i++) s[i] = __fmul_rn(x[i], x[i]);
  return __fadd_rn(__fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3])),
                   __fadd_rn(__fadd_rn(s[4], s[5]), __fadd_rn(s[6], s[7])));
}

// The sum of a row's squares from its pieces' sums, by halves: lane l starts with pieces l and l + lanes. Every lane of
// the warp comes here. `is_ordered`: a and b are those pieces already.
__device__ __forceinline__ float sum_row(float a, float b, const PieceMap& map, uint32_t lane, uint32_t lanes,
                                         bool is_ordered) {
  if (!is_ordered) {
    const uint32_t first = lane, second = lane + lanes;
    const float first_a = __shfl_sync(0xffffffffu, a, int(map.lane_of(first)), int(lanes)),
                first_b = __shfl_sync(0xffffffffu, b, int(map.lane_of(first)), int(lanes));
    const float second_a = __shfl_sync(0xffffffffu, a, int(map.lane_of(second)), int(lanes)),
                second_b = __shfl_sync(0xffffffffu, b, int(map.lane_of(second)), int(lanes));
    a = first < map.pieces ? (map.is_b(first) ? first_b : first_a) : 0.0f;
    b = second < map.pieces ? (map.is_b(second) ? second_b : second_a) : 0.0f;
  }
  float sum = __fadd_rn(a, b);
#pragma unroll
  for (int hop = 16; hop > 0; hop /= 2) {
    if (hop < int(lanes)) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, hop));
  }
  return sum;
}

// 1 / sqrt(mean + eps)
__device__ __forceinline__ float norm_factor(float sum, float inverse_dim, float eps) {
  return __frcp_rn(__fsqrt_rn(__fadd_rn(__fmul_rn(sum, inverse_dim), eps)));
}

__device__ __forceinline__ void rotate_pair(float* lo, float* hi, float c, float s) {
  const float a = *lo, b = *hi;
  *lo = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
  *hi = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
}

// Eight numbers, widened. 16-byte aligned.
__device__ __forceinline__ void load_eight(const char* p, int dtype, float* x) {
  if (dtype == KVX_DTYPE_F32) {
    const float4 lo = __ldg(reinterpret_cast<const float4*>(p)), hi = __ldg(reinterpret_cast<const float4*>(p + 16));
    x[0] = lo.x, x[1] = lo.y, x[2] = lo.z, x[3] = lo.w, x[4] = hi.x, x[5] = hi.y, x[6] = hi.z, x[7] = hi.w;
    return;
  }
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < kPiece; i++) {
    if (dtype == KVX_DTYPE_BF16) x[i] = __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
    else x[i] = __half2float(__ushort_as_half(uint16_t(i % 2 ? w[i / 2] >> 16 : w[i / 2])));
  }
}

// ---- pieces of IO rows, as loaded. A chunk is piece a, then piece b.

template <int IO> constexpr int piece_bytes = chunk_bytes<IO> / 2;
template <int IO> constexpr uint32_t element_bytes = element_bits<IO> / 8;

template <int IO> __device__ __forceinline__ RawChunk<IO> load_pieces(const char* a, const char* b) {
  RawChunk<IO> r;
  constexpr int n = piece_bytes<IO> / 16;
#pragma unroll
  for (int i = 0; i < 2 * n; i++) {
    const uint4 v = load_once<uint4>(i < n ? a + 16 * i : b + 16 * (i - n));
    r.w[4 * i] = v.x, r.w[4 * i + 1] = v.y, r.w[4 * i + 2] = v.z, r.w[4 * i + 3] = v.w;
  }
  return r;
}

template <int IO> __device__ __forceinline__ void store_pieces(char* a, char* b, const RawChunk<IO>& r) {
  constexpr int n = piece_bytes<IO> / 16;
#pragma unroll
  for (int i = 0; i < 2 * n; i++)
    store_once(i < n ? a + 16 * i : b + 16 * (i - n),
               make_uint4(r.w[4 * i], r.w[4 * i + 1], r.w[4 * i + 2], r.w[4 * i + 3]));
}

template <int IO> __device__ __forceinline__ RawChunk<IO> round_chunk(const float (&x)[kChunk]) {
  RawChunk<IO> r;
#pragma unroll
  for (int i = 0; i < chunk_bytes<IO> / 4; i++) {
    if constexpr (IO == KVX_DTYPE_F32) r.w[i] = __float_as_uint(one_nan(x[i]));
    else if constexpr (IO == KVX_DTYPE_BF16) r.w[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    else r.w[i] = pack_f16(x[2 * i], x[2 * i + 1]);
  }
  return r;
}

// Pieces back in the order of the row: lane l gets pieces 2l and 2l + 1. Every lane of the warp comes here.
template <int IO> __device__ __forceinline__ RawChunk<IO> in_order(const RawChunk<IO>& r, const PieceMap& map,
                                                                   uint32_t lane, uint32_t lanes) {
  constexpr int n = piece_bytes<IO> / 4;
  RawChunk<IO> out;
#pragma unroll
  for (int side = 0; side < 2; side++) {
    const uint32_t piece = min(2 * lane + side, map.pieces - 1);
    const int from = int(map.lane_of(piece));
    const bool is_b = map.is_b(piece);
#pragma unroll
    for (int i = 0; i < n; i++) {
      const uint32_t a = __shfl_sync(0xffffffffu, r.w[i], from, int(lanes)),
                     b = __shfl_sync(0xffffffffu, r.w[n + i], from, int(lanes));
      out.w[side * n + i] = is_b ? b : a;
    }
  }
  return out;
}

}  // namespace cuda
}  // namespace kvx
