// What the decode kernel adds up: a column's weights and its weighted values, and where they go when an item ends.
#pragma once
#include "attention/decode/queries.cuh"

namespace kvx {
namespace cuda {

template <class C> struct DecodeSums : DecodeQueries<C> {
  using Queries = DecodeQueries<C>;
  using Queries::a, Queries::g, Queries::t, Queries::member, Queries::kColumnTiles, Queries::kHasRests, Queries::kRest;
  using Rows = typename C::Rows;
  static constexpr int kValueTiles = C::kOutDims / 16;
  static constexpr float kBoost = Rows::kScaleDims == 32 ? 11.f : 0.f;
  // Weights are relative to a column's base: the largest score there was when it was set. It is set anew, and what was
  // added up multiplied, where a score is past it by kRise: seldom, and only then lanes have to agree on the largest.
  // Weights are at most 2^(kBoost + kRise), which f16 holds.
  static constexpr float kRise = Rows::kScaleDims == 32 ? 4.f : 8.f;
  // Codes that are multiplied as what they are above the least one (tiles/elements.cuh): what that adds is taken off.
  static constexpr bool kHasBias = Rows::kBias != 0.f;

  const int value_from;  // the slice's first element in a row
  float out[kValueTiles][kColumnTiles][4];
  float most[kColumnTiles][2], sum[kColumnTiles][2];  // a column's base, and this lane's part of its sum
  float value_bias[kColumnTiles][4];                  // kHasBias: sums of weights
  float value_scale;

  __device__ __forceinline__ DecodeSums(const DecodeArgs& args, char* shared, int of_member)
      : Queries(args, shared, of_member), value_from(of_member * C::kOutDims) {}

  // A column's base becomes the largest score there was, if that is past it. `largest`: of this lane's part of a tile.
  __device__ __forceinline__ void set_bases(const float (&largest)[kColumnTiles][2]) {
    float shift[kColumnTiles][2];
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float x = fmaxf(most[n][j], largest[n][j]);
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 4));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 8));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 16));
        if (!(x > most[n][j] + kRise)) x = most[n][j];  // another column's does: each by itself
        shift[n][j] = x == most[n][j] ? 1.f : tiles::exp2_fast(most[n][j] - x);
        most[n][j] = x;
        sum[n][j] *= shift[n][j];
        if constexpr (kHasBias) value_bias[n][j] *= shift[n][j];
      }
#pragma unroll
    for (int d = 0; d < kValueTiles; d++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[d][n][i] *= shift[n][i % 2];
  }

  // What was added up becomes the sums of an item: without bias, and with what rests come to.
  __device__ __forceinline__ void finish_sums() {
    if constexpr (kHasBias)
#pragma unroll
      for (int d = 0; d < kValueTiles; d++)
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const float of_weights = value_bias[n][j] * (Rows::kBias / Rows::kUnit);
            out[d][n][j] = __fmaf_rn(out[d][n][j], 16.f, -of_weights), out[d][n][2 + j] -= of_weights;
          }
    if constexpr (kHasRests)
#pragma unroll
      for (int d = 0; d < kValueTiles; d++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[d][0][i] = __fmaf_rn(out[d][kColumnTiles - 1][i], 1.f / kRest, out[d][0][i]);
  }

  // Of a row of results, this lane's first element, and how far from it another is.
  __device__ __forceinline__ int first_dim() const { return value_from + Rows::value_dim(0, 0, g); }
  static __device__ __forceinline__ constexpr int dims_on(int d, int half) { return Rows::value_dim(d, half, 0); }

  // Result of a (sequence, head) that this worker had alone.
  __device__ __forceinline__ void store(const Cursor& c) {
    finish_sums();
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) sum_lanes(&sum[n][j]);
    const SeqQueries queries = queries_of(a, c.seq);
    const int32_t rows = rows_of(a, queries);
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int32_t column = n * 8 + 2 * t + j, token = column / a.group,
                      head = c.head * a.group + column - token * a.group;
        if (column >= rows) continue;
        const float inverse = finish(a, queries.first + token, head, most[n][j] - kBoost, sum[n][j],
                                     value_scale * Rows::kUnit, member == 0 && g == 0);
        const int64_t step = a.out.dim;
        char* row =
            a.out.data + (queries.first + token) * a.out.token + int64_t(head) * a.out.head + first_dim() * step;
        const int left = a.dims[1] - first_dim();
        // The type is asked for once: as a question of each element it would be most of a kernel's code.
        if (a.out.dtype == KVX_DTYPE_F32) {
#pragma unroll
          for (int d = 0; d < kValueTiles; d++)
#pragma unroll
            for (int half = 0; half < 2; half++)
              if (dims_on(d, half) < left)
                *reinterpret_cast<float*>(row + dims_on(d, half) * step) = out[d][n][2 * half + j] * inverse;
          continue;
        }
        const bool is_bf16 = a.out.dtype == KVX_DTYPE_BF16;
#pragma unroll
        for (int d = 0; d < kValueTiles; d++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float x = out[d][n][2 * half + j] * inverse;
            const uint16_t as_bf16 = __bfloat16_as_ushort(__float2bfloat16(x)),
                           as_f16 = __half_as_ushort(__float2half(x));
            if (dims_on(d, half) < left)
              *reinterpret_cast<uint16_t*>(row + dims_on(d, half) * step) = is_bf16 ? as_bf16 : as_f16;
          }
      }
  }

  __device__ __forceinline__ static void sum_lanes(float* x) {
    *x += __shfl_xor_sync(0xffffffffu, *x, 4);
    *x += __shfl_xor_sync(0xffffffffu, *x, 8);
    *x += __shfl_xor_sync(0xffffffffu, *x, 16);
  }

  // Part of a (sequence, head) that others have parts of: `combine` adds them up.
  __device__ __forceinline__ void store_part(const Cursor& c, int worker, bool is_first_item) {
    finish_sums();
    const int32_t rows = rows_of(a, queries_of(a, c.seq));
    float* mine = reinterpret_cast<float*>(a.workspace + a.plan.partial_at +
                                           (2 * int64_t(worker) + (is_first_item ? 0 : 1)) * a.plan.partial_bytes);
    const int width = a.dims[1] + 2, left = a.dims[1] - first_dim();
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        sum_lanes(&sum[n][j]);
        const int32_t column = n * 8 + 2 * t + j;
        if (column >= rows) continue;
        float* to = mine + column * width + 2 + first_dim();
#pragma unroll
        for (int d = 0; d < kValueTiles; d++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            if (dims_on(d, half) < left) to[dims_on(d, half)] = out[d][n][2 * half + j] * Rows::kUnit;
        if (member == 0 && g == 0) mine[column * width] = most[n][j] - kBoost, mine[column * width + 1] = sum[n][j];
      }
  }
};

}  // namespace cuda
}  // namespace kvx
