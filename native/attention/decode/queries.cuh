// Queries of the decode kernel: rows of one (sequence, head) as fragments, in the numbers that are multiplied.
#pragma once
#include <type_traits>

#include "attention/decode/load.cuh"

namespace kvx {
namespace cuda {

template <class C> struct DecodeQueries : DecodeLoads<C> {
  using Loads = DecodeLoads<C>;
  using Loads::a, Loads::member;
  using Rows = typename C::Rows;
  using Numbers = typename Rows::Numbers;
  static constexpr int kKeyTiles = C::kScoreDims / 16, kColumnTiles = C::kColumns / 8;
  static constexpr bool kIsF16 = std::is_same<Numbers, tiles::F16Numbers>::value;
  static constexpr int kParts = Rows::kParts;
  // Queries in f32, and their weights, have more digits than a number that is multiplied: a column has what one holds,
  // and the column eight further what that leaves over, kRest times as large.
  static constexpr bool kHasRests = Rows::kHasRests;
  static constexpr float kRest = kIsF16 ? 2048.f : 1.f;
  static_assert(!kHasRests || kColumnTiles == 2, "two columns a query row");

  const int g, t;
  const int key_from;  // the slice's first element in a row
  uint32_t query[kParts][kKeyTiles][kColumnTiles][2];

  __device__ __forceinline__ DecodeQueries(const DecodeArgs& args, char* shared, int of_member)
      : Loads(args, shared, of_member), g(Loads::lane / 4), t(Loads::lane % 4), key_from(of_member * C::kKeyDims) {}

  // Query rows of a (sequence, head) as fragments: column n = query token n / group, head n % group. All words are
  // asked for before the first is used: a worker waits once, not once a word.
  __device__ __forceinline__ void load_query(const Cursor& c, const SeqQueries& queries, int32_t rows) {
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
      const int32_t column = n * 8 + g, token = column / a.group, head = column - token * a.group;
      const char* row =
          a.q.data + (queries.first + token) * a.q.token + (int64_t(c.head) * a.group + head) * a.q.head + key_from * 2;
      const int dims = column < rows ? a.dims[0] - key_from : 0;
#pragma unroll
      for (int d = 0; d < kKeyTiles; d++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int dim = Rows::query_dim(d, 2 * i, t) + skipped(d), next = Rows::query_dim(d, 2 * i + 1, t);
          if constexpr (Rows::kBits == 4)  // pairs whose elements are apart
            query[0][d][n][i] = dim < dims
                                    ? uint32_t(__ldg(reinterpret_cast<const uint16_t*>(row + dim * 2))) |
                                          uint32_t(__ldg(reinterpret_cast<const uint16_t*>(row + next * 2))) << 16
                                    : 0u;
          else query[0][d][n][i] = dim < dims ? __ldg(reinterpret_cast<const uint32_t*>(row + dim * 2)) : 0u;
        }
    }
  }

  // Of a query over a latent cache this warp's rotary elements do not follow its latent ones: all latent ones stand
  // first.
  __device__ __forceinline__ int skipped(int fragment) const {
    return C::kIsLatent && fragment * 16 >= C::kKeyDims
               ? C::Tile::kKeyDims - C::kKeyDims - key_from + member * C::kValueDims
               : 0;
  }

  // Queries in f32: up to eight rows, a lane's column by itself and what is left of it. Returns what undoes that rows
  // are brought into f16's range.
  __device__ __forceinline__ float load_f32_query(const Cursor& c, const SeqQueries& queries, int32_t rows) {
    const int32_t token = g / a.group, head = g - token * a.group;
    const char* row =
        a.q.data + (queries.first + token) * a.q.token + (int64_t(c.head) * a.group + head) * a.q.head + key_from * 4;
    const int dims = g < rows ? a.dims[0] - key_from : 0;
    float x[kKeyTiles][2][2], largest = 0.f;
#pragma unroll
    for (int d = 0; d < kKeyTiles; d++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int dim = Rows::query_dim(d, i, t);
        x[d][i / 2][i % 2] = dim < dims ? __ldg(reinterpret_cast<const float*>(row + dim * 4)) : 0.f;
      }
    float shrink = 1.f, grow = 1.f;
    if constexpr (kIsF16) {
#pragma unroll
      for (int d = 0; d < kKeyTiles; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) largest = fmaxf(largest, fabsf(x[d][i / 2][i % 2]));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const int exponent = exponent_over_f16(largest);
      shrink = power_of_two(-exponent), grow = power_of_two(exponent);
    }
#pragma unroll
    for (int d = 0; d < kKeyTiles; d++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float pair[2] = {x[d][i][0] * shrink, x[d][i][1] * shrink};
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) {
#pragma unroll
          for (int part = 0; part < kParts; part++) query[part][d][n][i] = pack_and_leave(pair);
          pair[0] *= kRest, pair[1] *= kRest;
        }
      }
    return grow;
  }
  // A pair of numbers as they are multiplied; leaves of them what that does not hold.
  static __device__ __forceinline__ uint32_t pack_and_leave(float (&pair)[2]) {
    const uint32_t packed = Numbers::pack(pair[0], pair[1]);
    if constexpr (kIsF16) {
      const float2 held = __half22float2(*reinterpret_cast<const __half2*>(&packed));
      pair[0] -= held.x, pair[1] -= held.y;
    } else {
      pair[0] -= __uint_as_float(packed << 16), pair[1] -= __uint_as_float(packed & 0xffff0000u);
    }
    return packed;
  }
  static __device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(uint32_t(127 + exponent) << 23);
  }
  // By how many powers of two a row with that largest element is divided: 2^8 and a little is what is left of it.
  static __device__ __forceinline__ int exponent_over_f16(float largest) {
    return largest > 0.f && largest < INFINITY ? max(int(__float_as_uint(largest) >> 23) - 135, -100) : 0;
  }

  // Queries in f16 over a cache in bf16: two bf16 have all of their digits.
  __device__ __forceinline__ void split_query() {
#pragma unroll
    for (int d = 0; d < kKeyTiles; d++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&query[0][d][n][i]));
          float pair[2] = {x.x, x.y};
#pragma unroll
          for (int part = 0; part < kParts; part++) query[part][d][n][i] = pack_and_leave(pair);
        }
  }

  // Where f16 is multiplied: a column of queries into its range, by a power of two, which is exact; returns what undoes
  // it. Magnitudes order as their bits do. A NaN makes its column NaN, whatever that is multiplied by.
  __device__ __forceinline__ float fit_query(int n) {
    const bool is_bf16 = a.q.dtype == KVX_DTYPE_BF16;
    const auto pair_of = [&](uint32_t x) {
      const float2 as_f16 = __half22float2(*reinterpret_cast<const __half2*>(&x));
      return is_bf16 ? make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)) : as_f16;
    };
    uint32_t most = 0;
#pragma unroll
    for (int d = 0; d < kKeyTiles; d++)
#pragma unroll
      for (int i = 0; i < 2; i++) most = __vmaxu2(most, query[0][d][n][i] & 0x7fff7fffu);
    most = max(most >> 16, most & 0xffffu);
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 1));
    most = max(most, __shfl_xor_sync(0xffffffffu, most, 2));
    const float largest = pair_of(most).x;
    const int exponent = exponent_over_f16(largest);
    const float shrink = power_of_two(-exponent);
#pragma unroll
    for (int d = 0; d < kKeyTiles; d++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 pair = pair_of(query[0][d][n][i]);
        query[0][d][n][i] = Numbers::pack(pair.x * shrink, pair.y * shrink);
      }
    return power_of_two(exponent);
  }
};

}  // namespace cuda
}  // namespace kvx
