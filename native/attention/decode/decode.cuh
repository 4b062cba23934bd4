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
#include "attention/decode/sums.cuh"
#include "tiles/barrier.cuh"

namespace kvx {
namespace cuda {

template <class C> struct Decode : DecodeSums<C> {
  using Sums = DecodeSums<C>;
  using Loads = DecodeLoads<C>;
  using Loads::a, Loads::kRowsPerLane, Loads::lane, Loads::member, Loads::ring;
  using Sums::g, Sums::t, Sums::query, Sums::out, Sums::most, Sums::sum, Sums::value_bias, Sums::value_scale;
  using Sums::kBoost, Sums::kRise, Sums::kHasBias, Sums::kHasRests, Sums::kRest, Sums::kIsF16, Sums::kParts;
  using Sums::kKeyTiles, Sums::kValueTiles, Sums::kColumnTiles;
  using Sums::pack_and_leave, Sums::power_of_two;
  using Rows = typename C::Rows;
  using Numbers = typename Rows::Numbers;
  using Groups = typename C::Groups;
  static constexpr int kKeyGroups = C::kScoreDims / Rows::kGroupDims, kValueGroups = C::kOutDims / Rows::kGroupDims,
                       kFragments = Rows::kGroupDims / 16, kTokenTiles = C::kTokens / 16;
  // Scales that join the exponents of weights: of rows, and the largest of a row's groups. What is left of groups' is
  // at most 1, and weights are that much larger to begin with (kBoost): f16 goes down to 2^-24.
  static constexpr bool kJoinsScales = C::kScales == ROW_SCALES || Rows::kScaleDims == 32;
  // Under queries in f32, a scale's power of two alone joins the exponent, exactly: the rest of it multiplies weights.
  static constexpr bool kJoinsPowers = Rows::kHasRests && C::kScales == ROW_SCALES;

  const int team;     // this worker's number in the block
  float4* places;     // where the team adds up scores
  void* prepared;     // this warp's scales of groups, as they are multiplied
  uint32_t turn = 0;  // which of the team's places is next

  // Of a column's scores: softmax scale, K's scale, what the query was divided by; log2(e) included.
  float factor[kColumnTiles][2];
  float query_bias[kColumnTiles][2];  // kHasBias: of scores
  int32_t limit[kColumnTiles][2], low[kColumnTiles][2], least_limit, most_low;

  __device__ __forceinline__ Decode(const DecodeArgs& args, char* shared, int of_team, int of_member)
      : Sums(args, shared, of_member),
        team(of_team),
        places(static_cast<float4*>(tiles::kept_address(shared + C::kTeam * C::Ring::kBytes))),
        prepared(reinterpret_cast<char*>(places) + C::kPlaces * C::kPlaceBytes + of_member * Groups::kPreparedBytes) {}

  __device__ __forceinline__ void begin(const Cursor& c) {
    const SeqQueries queries = queries_of(a, c.seq);
    const int32_t rows = rows_of(a, queries);
    float grow_all = 1.f;
    if constexpr (kHasRests) grow_all = this->load_f32_query(c, queries, rows);
    else this->load_query(c, queries, rows);
    if constexpr (kParts == 2 && !kHasRests) this->split_query();
    const float scale = a.scale * 1.44269504f * Rows::kUnit * scale_of(a.scales[0], c.head, has_one_scale(0));
    value_scale = scale_of(a.scales[1], c.head, has_one_scale(1));
#pragma unroll
    for (int n = 0; n < kColumnTiles; n++) {
      float grow = grow_all;
      if constexpr (kIsF16 && !kHasRests)
        if (Rows::kBits <= 8 || a.q.dtype == KVX_DTYPE_BF16) grow = this->fit_query(n);
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
  __device__ __forceinline__ bool has_one_scale(int plane) const {
    return C::kScales == ONE_SCALE || (C::kScales == ROW_SCALES && Loads::kTakesOdd && a.has_one_scale[plane]);
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
    if (__any_sync(0xffffffffu, rises)) this->set_bases(largest);
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
