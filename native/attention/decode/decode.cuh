// Attention of few queries a sequence (decode, and drafts of a few tokens): memory is read once, at its own speed.
//
// A warp is a worker of its own: it walks its share of tiles (attention/cuda/plan.cuh), keeps a ring of them in flight
// in its own part of shared memory (tiles/group_ring.cuh), and waits for nobody. All query rows that read one KV head
// are columns of its multiplications.
//
// Above 128 elements a row is more than a warp has registers for, and a worker is a team of warps: each has a slice of
// every row, loads it by a ring of its own and multiplies it. They meet once a tile, to add up their parts of the
// scores; from there on all have the same numbers. Rows may be shorter than a tile is wide: what is past their end is
// not read, counts as zeros, and is not stored.
#pragma once
#include <type_traits>

#include "attention/decode/load.cuh"
#include "tiles/barrier.cuh"

namespace kvx {
namespace cuda {

template <class C> struct Decode : DecodeLoads<C> {
  using Loads = DecodeLoads<C>;
  using Loads::a, Loads::kRowsPerLane, Loads::lane, Loads::member, Loads::ring;
  using Rows = typename C::Rows;
  using Numbers = typename Rows::Numbers;
  static constexpr int kKeyGroups = C::kScoreDims / Rows::kGroupDims, kValueGroups = C::kOutDims / Rows::kGroupDims,
                       kFragments = Rows::kGroupDims / 16;
  static constexpr int kKeyTiles = C::kScoreDims / 16, kValueTiles = C::kOutDims / 16, kTokenTiles = C::kTokens / 16,
                       kColumnTiles = C::kColumns / 8;
  static constexpr bool kIsF16 = std::is_same<Numbers, tiles::F16Numbers>::value;
  static constexpr int kParts = Rows::kParts;
  using Groups = typename C::Groups;
  // Scales that join the exponents of weights: of rows, and the largest of a row's groups. What is left of groups' is
  // at most 1, and weights are that much larger to begin with: f16 goes down to 2^-24.
  static constexpr bool kJoinsScales = C::kScales == ROW_SCALES || Rows::kScaleDims == 32;
  // Under queries in f32, a scale's power of two alone joins the exponent, exactly: the rest of it multiplies weights.
  static constexpr bool kJoinsPowers = Rows::kHasRests && C::kScales == ROW_SCALES;
  static constexpr float kBoost = Rows::kScaleDims == 32 ? 11.f : 0.f;
  // Weights are relative to a column's base: the largest score there was when it was set. It is set anew, and what was
  // added up multiplied, where a score is past it by kRise: seldom, and only then lanes have to agree on the largest.
  // Weights are at most 2^(kBoost + kRise), which f16 holds.
  static constexpr float kRise = Rows::kScaleDims == 32 ? 4.f : 8.f;
  // Codes that are multiplied as what they are above the least one (tiles/elements.cuh): what that adds is taken off.
  static constexpr bool kHasBias = Rows::kBias != 0.f;
  // Queries in f32, and their weights, have more digits than a number that is multiplied: a column has what one holds,
  // and the column eight further what that leaves over, kRest times as large.
  static constexpr bool kHasRests = Rows::kHasRests;
  static constexpr float kRest = kIsF16 ? 2048.f : 1.f;
  static_assert(!kHasRests || kColumnTiles == 2, "two columns a query row");

  const int team;  // this worker's number in the block
  const int g, t;
  float4* places;                  // where the team adds up scores
  void* prepared;                  // this warp's scales of groups, as they are multiplied
  uint32_t turn = 0;               // which of the team's places is next
  const int key_from, value_from;  // the slice's first element in a row

  uint32_t query[kParts][kKeyTiles][kColumnTiles][2];
  float factor[kColumnTiles]
              [2];  // of a column's scores: softmax scale, K's scale, what the query was divided by; log2(e) included
  float out[kValueTiles][kColumnTiles][4];
  float most[kColumnTiles][2],
      sum[kColumnTiles][2];                                        // a column's base, and this lane's part of its sum
  float query_bias[kColumnTiles][2], value_bias[kColumnTiles][4];  // kHasBias: of scores; sums of weights
  int32_t limit[kColumnTiles][2], low[kColumnTiles][2], least_limit, most_low;
  float value_scale;

  __device__ __forceinline__ Decode(const DecodeArgs& args, char* shared, int of_team, int of_member)
      : Loads(args, shared, of_member),
        team(of_team),
        g(lane / 4),
        t(lane % 4),
        places(static_cast<float4*>(tiles::kept_address(shared + C::kTeam * C::Ring::kBytes))),
        prepared(reinterpret_cast<char*>(places) + C::kPlaces * C::kPlaceBytes + of_member * Groups::kPreparedBytes),
        key_from(of_member * C::kKeyDims),
        value_from(of_member * C::kOutDims) {}

  __device__ __forceinline__ void begin(const Cursor& c) {
    const SeqQueries queries = queries_of(a, c.seq);
    const int32_t rows = rows_of(a, queries);
    float grow_all = 1.f;
    if constexpr (kHasRests) grow_all = load_f32_query(c, queries, rows);
    else load_query(c, queries, rows);
    if constexpr (kParts == 2 && !kHasRests) split_query();
    const float scale = a.scale * 1.44269504f * Rows::kUnit * scale_of(a.scales[0], c.head, has_one_scale(0));
    value_scale = scale_of(a.scales[1], c.head, has_one_scale(1));
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
      float grow = grow_all;
      if constexpr (kIsF16 && !kHasRests)
        if (Rows::kBits <= 8 || a.q.dtype == KVX_DTYPE_BF16) grow = fit_query(n);
      if constexpr (kHasBias) find_bias(n);
#pragma unroll
      for (int j = 0; j < 2; j++) {  // of the columns of this lane's scores
        const int32_t mine = (kHasRests ? 0 : n * 8) + 2 * t + j, of = mine / a.group;
        factor[n][j] = scale * __shfl_sync(0xffffffffu, grow, (2 * t + j) * 4);
        limit[n][j] = mine >= rows ? 0 : a.is_causal ? c.range.end - queries.count + 1 + of : c.range.end;
        low[n][j] = a.window > 0 ? int32_t(limit[n][j] - a.window) : 0;
        most[n][j] = -INFINITY, sum[n][j] = 0.f;
      }
    }
    least_limit = a.is_causal ? c.range.end - queries.count + 1 : c.range.end;
    most_low = a.window > 0 ? int32_t(c.range.end - a.window) : 0;
#pragma unroll
    for (int d = 0; d < kValueTiles; d++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[d][n][i] = 0.f;
    if constexpr (kHasBias)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) value_bias[n][i] = 0.f;
  }

  // Codes at even places of a word are multiplied 16 times too small: queries make up for it here, results of values in
  // finish_sums. And what keys' bias adds to every score.
  __device__ __forceinline__ void find_bias(int n) {
    float total = 0.f;
#pragma unroll
    for (int d = 0; d < kKeyTiles; d++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&query[0][d][n][i]));
        total += x.x + x.y;
      }
      query[0][d][n][0] = multiply_f16(query[0][d][n][0], 0x4c004c00u);
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    total *= -Rows::kBias / Rows::kUnit;
#pragma unroll
    for (int j = 0; j < 2; j++) query_bias[n][j] = __shfl_sync(0xffffffffu, total, (2 * t + j) * 4);
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

  __device__ __forceinline__ bool has_one_scale(int plane) const {
    return C::kScales == ONE_SCALE || (C::kScales == ROW_SCALES && Loads::kTakesOdd && a.has_one_scale[plane]);
  }

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

  // A team's parts of a tile's scores become their sum, the same in every warp: two are added in either order, more in
  // the order of the team. Returns what the first warp has to say of every token's scales:
  // K's, V's logarithm and its inverse.
  __device__ __forceinline__ const float4* add_up(float (&s)[kTokenTiles][kColumnTiles][4], const float* scales) {
    constexpr int kPlace = C::kScoreBytes / 16;  // of a warp
    float4* place = places + turn * (C::kPlaceBytes / 16);
    float4* all = place + lane;
    if constexpr (C::kPlaces == 1) tiles::meet(1 + team, C::kTeam * 32);  // the last tile's have been read
    else turn ^= 1;
    if (C::kScales == ROW_SCALES && member == 0) {
      const float3 of_value = joined(scales[C::kTokens + lane]);
      all[C::kTeam * kPlace] = make_float4(scales[lane], of_value.x, of_value.y, of_value.z);
    }
#pragma unroll
    for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
        all[member * kPlace + (m * kColumnTiles + n) * 32] =
            make_float4(s[m][n][0], s[m][n][1], s[m][n][2], s[m][n][3]);
    tiles::meet(1 + team, C::kTeam * 32);
#pragma unroll
    for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++) {
        const float4* part = all + (m * kColumnTiles + n) * 32;
        if constexpr (C::kTeam == 2) {
          const float4 x = part[(1 - member) * kPlace];
          s[m][n][0] += x.x, s[m][n][1] += x.y, s[m][n][2] += x.z, s[m][n][3] += x.w;
        } else {
          float4 sum = part[0];
#pragma unroll
          for (int w = 1; w < C::kTeam; w++) {
            const float4 x = part[w * kPlace];
            sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
          }
          s[m][n][0] = sum.x, s[m][n][1] = sum.y, s[m][n][2] = sum.z, s[m][n][3] = sum.w;
        }
      }
    return place + C::kTeam * kPlace;
  }
  // A scale of V: what joins the exponent, what takes that away from a weight again, and what multiplies it in V alone.
  static __device__ __forceinline__ float3 joined(float scale) {
    const float x = fmaxf(scale, 7.8886091e-31f);  // 2^-100
    if constexpr (kJoinsPowers) {
      const int exponent = min(int(__float_as_uint(x) >> 23) - 127, 126);
      const float inverse = power_of_two(-exponent);
      return make_float3(float(exponent), inverse, x * inverse);
    } else {
      return make_float3(tiles::log2_fast(x), tiles::inverse_fast(x), 1.f);
    }
  }

  // Scores where a scale is of 32 elements, two fragments: each such part is multiplied by it in f32.
  __device__ __forceinline__ void score_groups(float (&s)[kTokenTiles][kColumnTiles][4], uint32_t at) const {
#pragma unroll
    for (int m = 0; m < kTokenTiles; m++) {
      const auto low = Groups::of_keys(prepared, m * 16 + g), high = Groups::of_keys(prepared, m * 16 + 8 + g);
#pragma unroll
      for (int k = 0; k < kKeyGroups; k++) {
        uint32_t keys[kFragments][4];
        Rows::template load_k<C::kKeyRowBytes>(keys, at, m, k, lane);
#pragma unroll
        for (int pair = 0; pair < kFragments / 2; pair++) {
          const int group = k * (kFragments / 2) + pair;
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++) {
            float part[4] = {0.f, 0.f, 0.f, 0.f};
            Numbers::multiply(part, keys[2 * pair], query[0][2 * group][n]);
            Numbers::multiply(part, keys[2 * pair + 1], query[0][2 * group + 1][n]);
#pragma unroll
            for (int i = 0; i < 4; i++)
              s[m][n][i] = __fmaf_rn(part[i], i < 2 ? low.of[group] : high.of[group], s[m][n][i]);
          }
        }
      }
    }
  }

  // Values of a group of fragments times weights, which a scale of 32 elements multiplies.
  __device__ __forceinline__ void add_groups(const uint32_t (&values)[kFragments][4],
                                             const uint32_t (&weights)[kColumnTiles][2], int k, int d) {
#pragma unroll
    for (int pair = 0; pair < kFragments / 2; pair++) {
      const int group = d * (kFragments / 2) + pair;
      const uint32_t low = Groups::of_value(prepared, k * 16 + 2 * t, group),
                     high = Groups::of_value(prepared, k * 16 + 8 + 2 * t, group);
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++) {
        const uint32_t scaled[2] = {multiply_f16(weights[n][0], low), multiply_f16(weights[n][1], high)};
        Numbers::multiply(out[2 * group][n], values[2 * pair], scaled);
        Numbers::multiply(out[2 * group + 1][n], values[2 * pair + 1], scaled);
      }
    }
  }

  __device__ __forceinline__ void compute(const Cursor& c) {
    const uint32_t at = ring.tile_at(ring.reading);
    const char* stage_bytes = ring.tile(ring.reading);
    const int32_t first = (c.range.begin / C::kTokens + c.tile) * C::kTokens;
    float s[kTokenTiles][kColumnTiles][4];
#pragma unroll
    for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[m][n][i] = kHasBias ? query_bias[n][i % 2] : 0.f;
    if constexpr (Rows::kScaleDims == 32) {
      Groups::prepare(stage_bytes + C::kTileBytes, prepared, lane, member, a.scale_words, c.head);
      score_groups(s, at);
    } else {
#pragma unroll
      for (int k = 0; k < kKeyGroups; k++)
#pragma unroll
        for (int m = 0; m < kTokenTiles; m++) {
          uint32_t keys[kFragments][4];
          if constexpr (Rows::kScaleDims == 16) {
            const auto of = Groups::of_keys(stage_bytes + C::kTileBytes, m, k, g, t);
            Rows::template load_k<C::kKeyRowBytes>(keys, at, m, k, lane, of);
          } else if (C::kIsLatent && k * Rows::kGroupDims >= C::kKeyDims) {  // of the rotary part
            Rows::template load_k<C::kValueRowBytes>(keys, at + C::kKeyBytes, m, k - C::kKeyDims / Rows::kGroupDims,
                                                     lane);
          } else {
            Rows::template load_k<C::kKeyRowBytes>(keys, at, m, k, lane);
          }
#pragma unroll
          for (int f = 0; f < kFragments; f++)
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
              for (int part = 0; part < kParts; part++)
                Numbers::multiply(s[m][n], keys[f], query[part][k * kFragments + f][n]);
        }
    }
    // Scores: s[m][n][2 * h + j] is token 16 m + 8 h + g, column 8 n + 2 t + j. A warp of a team has its own `factor`.
    if constexpr (kHasRests)
#pragma unroll
      for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          s[m][0][i] = s[m][kColumnTiles - 1][i] = __fmaf_rn(s[m][kColumnTiles - 1][i], 1.f / kRest, s[m][0][i]);
#pragma unroll
    for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[m][n][i] *= factor[n][i % 2];
    // With a scale a row of V, weights are p times that scale: it joins the exponent, and `most` is over the weights.
    // The sum of the weights without it divides by it again: one exponential serves both. A
    // scale of 0 counts as a tiny one.
    float of_value[kTokenTiles][2], without[kTokenTiles][2], more[kTokenTiles][2];
    const float* scales = reinterpret_cast<const float*>(stage_bytes + C::kTileBytes);  // [K, V][token]
    const float4* of_tokens = nullptr;
    if constexpr (C::kTeam > 1) of_tokens = add_up(s, scales);
    if constexpr (Rows::kScaleDims == 32)
#pragma unroll
      for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float2 x = Groups::of_row(prepared, m * 16 + h * 8 + g);
          of_value[m][h] = x.x, without[m][h] = x.y;
        }
    if constexpr (C::kScales == ROW_SCALES)
#pragma unroll
      for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int token = m * 16 + h * 8 + g;
          float of_key;
          if constexpr (C::kTeam > 1) {
            const float4 x = of_tokens[token];
            of_key = x.x, of_value[m][h] = x.y, without[m][h] = x.z, more[m][h] = x.w;
          } else {
            const float3 x = joined(scales[C::kTokens + token]);
            of_key = scales[token], of_value[m][h] = x.x, without[m][h] = x.y, more[m][h] = x.z;
          }
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) s[m][n][2 * h + j] *= of_key;
        }
    if (a.soft_cap > 0.f) {
      const float cap = a.soft_cap * 1.44269504f, inverse = 1.f / cap;
#pragma unroll
      for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) s[m][n][i] = cap * tanhf(s[m][n][i] * inverse);
    }
    bool all_there = first + C::kTokens <= least_limit && first >= most_low;
    uint32_t valid[kRowsPerLane];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; i++) {
      valid[i] = ring.note(ring.reading)[i];
      all_there = all_there && valid[i] == 0xffffffffu;
    }
    if (!all_there) {
      if (a.rows.kv.errors && c.head == 0 && member == 0 && lane < kRowsPerLane) {  // positions whose block is none
        const uint32_t wanted = tiles::rows_within(first + lane * 32, c.range.begin, c.range.end);
        uint32_t mine = valid[0];
        if (kRowsPerLane > 1 && lane == 1) mine = valid[kRowsPerLane - 1];
        if (wanted & ~mine) atomicAdd(a.rows.kv.errors, (unsigned long long)__popc(wanted & ~mine));
      }
#pragma unroll
      for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int32_t token = m * 16 + h * 8 + g, position = first + token;
          const bool is_valid = valid[m / 2] >> (token % 32) & 1;
#pragma unroll
          for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
            for (int j = 0; j < 2; j++)
              if (!is_valid || position >= limit[n][j] || position < low[n][j]) s[m][n][2 * h + j] = -INFINITY;
        }
    }
    float largest[kColumnTiles][2];
    bool rises = false;
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        largest[n][j] = -INFINITY;
#pragma unroll
        for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            float& x = s[m][n][2 * h + j];
            if constexpr (kJoinsPowers) {
              largest[n][j] = fmaxf(largest[n][j], x + of_value[m][h]);
            } else {
              if constexpr (kJoinsScales) x += of_value[m][h];
              largest[n][j] = fmaxf(largest[n][j], x);
            }
          }
        rises = rises || largest[n][j] > most[n][j] + kRise;
      }
    if (__any_sync(0xffffffffu, rises)) set_bases(largest);
    uint32_t weights[kParts][kTokenTiles][kColumnTiles][2];
#pragma unroll
    for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
      for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float p[2];
#pragma unroll
          for (int j = 0; j < 2; j++) {
            p[j] = weight_of(s[m][n][2 * h + j], most[n][j] - (kJoinsPowers ? of_value[m][h] : 0.f));
            if constexpr (kJoinsScales) sum[n][j] = __fmaf_rn(p[j], without[m][h], sum[n][j]);
            else sum[n][j] += p[j];
            if constexpr (kJoinsPowers) p[j] *= more[m][h];
          }
#pragma unroll
          for (int part = 0; part < kParts; part++) weights[part][m][n][h] = tiles::turn_matrix(pack_and_leave(p));
        }
    if constexpr (kHasRests) find_rests(s, of_value, more, weights);
#pragma unroll
    for (int k = 0; k < kTokenTiles; k++)
#pragma unroll
      for (int d = 0; d < kValueGroups; d++) {
        uint32_t values[kFragments][4];
        if constexpr (Rows::kScaleDims == 16) {
          const auto of = Groups::of_values(stage_bytes + C::kTileBytes, k, d, g, t);
          Rows::template load_v<C::kValueRowBytes>(values, at + C::kKeyBytes, k, d, lane, of);
        } else if constexpr (C::kIsLatent) {
          Rows::template load_v<C::kKeyRowBytes>(values, at, k, d, lane);
        } else {
          Rows::template load_v<C::kValueRowBytes>(values, at + C::kKeyBytes, k, d, lane);
        }
        if constexpr (Rows::kScaleDims == 32) {
          add_groups(values, weights[0][k], k, d);
        } else {
#pragma unroll
          for (int f = 0; f < kFragments; f++)
#pragma unroll
            for (int n = 0; n < kColumnTiles; n++)
#pragma unroll
              for (int part = 0; part < kParts; part++)
                Numbers::multiply(out[d * kFragments + f][n], values[f], weights[part][k][n]);
        }
      }
    if constexpr (kHasBias) {
      const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
      for (int k = 0; k < kTokenTiles; k++)
#pragma unroll
        for (int n = 0; n < kColumnTiles; n++) Numbers::multiply(value_bias[n], ones, weights[0][k][n]);
    }
  }

  // Queries in f32: what a weight is more than the numbers that stand for it, in the column eight further.
  __device__ __forceinline__ void find_rests(const float (&s)[kTokenTiles][kColumnTiles][4],
                                             const float (&of_value)[kTokenTiles][2],
                                             const float (&more)[kTokenTiles][2],
                                             uint32_t (&weights)[kParts][kTokenTiles][kColumnTiles][2]) const {
    constexpr int kLast = kColumnTiles - 1;
#pragma unroll
    for (int m = 0; m < kTokenTiles; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float p[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          p[j] = weight_of(s[m][0][2 * h + j], most[0][j] - (kJoinsPowers ? of_value[m][h] : 0.f));
          if constexpr (kJoinsPowers) p[j] *= more[m][h];
        }
#pragma unroll
        for (int part = 0; part < kParts; part++) pack_and_leave(p);
        p[0] *= kRest, p[1] *= kRest;
#pragma unroll
        for (int part = 0; part < kParts; part++) weights[part][m][kLast][h] = tiles::turn_matrix(pack_and_leave(p));
      }
  }
  static __device__ __forceinline__ float weight_of(float score, float base) {
    return tiles::exp2_fast(score - (base == -INFINITY ? 0.f : base - kBoost));
  }

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

template <class C>
__global__ void __launch_bounds__(C::kWorkers* C::kTeam * 32, 1) decode(const __grid_constant__ DecodeArgs a) {
  extern __shared__ __align__(128) char shared[];
  wait_for_previous();
  let_next_start();  // what adds up parts is then there when this ends
  const int warp = int(threadIdx.x / 32), team = warp / C::kTeam;
  const int64_t place = int64_t(blockIdx.x) * (blockDim.x / (32 * C::kTeam)) + team;
  const WorkerStart start = load_now<WorkerStart>(a.workspace + a.plan.start_at + place * int64_t(sizeof(WorkerStart)));
  if (start.count == 0) return;
  Decode<C> d(a, shared + team * C::kWorkerBytes, team, warp - team * C::kTeam);
  d.clear();
  Cursor now{start.seq, start.head, start.tile};
  d.enter(&now, start.length, queries_of(a, now.seq).count);
  Cursor ahead = now;
  int32_t loaded = 0;
  auto asked = d.ask(ahead);
  int32_t asked_head = ahead.head;
  auto load_next = [&]() {
    if (loaded < start.count) {
      d.load(asked, asked_head, ahead.own);
      if (++loaded < start.count) {
        d.step(&ahead);
        asked = d.ask(ahead), asked_head = ahead.head;
      }
    } else {
      d.ring.end_fill();
    }
  };
  // The first rounds only load: in the same loop, so that loading, a page of code, stands in the kernel once. On an
  // H200 short calls are 0.3 us faster so, and 4-bit rows 1 to 5 %.
  constexpr int kAhead = C::Ring::kStages - 1;
  bool is_first_item = true, enters = true;
#pragma unroll 1
  for (int32_t i = -kAhead; i < start.count; i++) {
    if (i >= 0) {
      if (enters) d.begin(now), enters = false;
      d.ring.wait_full();
    }
    load_next();
    if (i < 0) continue;
    d.compute(now);
    d.ring.give_back();
    const bool item_ends = now.tile + 1 == now.range.num_tiles;
    if (item_ends || i + 1 == start.count) {
      if (item_ends && now.tile <= i) d.store(now);  // begun and ended here
      else d.store_part(now, start.worker, is_first_item);
      is_first_item = false;
      if (i + 1 < start.count) d.step(&now), enters = true;
    } else {
      now.tile++;
    }
  }
  tiles::wait_copies<0>();
}

}  // namespace cuda
}  // namespace kvx
