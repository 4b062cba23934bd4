// Prompts on the tensor cores of every architecture: any format, layout and table whose elements one bf16 holds, or f16
// under queries that f16 holds, in rows of up to 256 elements.
//
// A block of threads has kRows query rows of a KV head, 16 or 32 a warp, and walks over the tokens they see. Rows of
// bf16 and f16 are copied to tiles as they are, a tile ahead of their use; others come as the general kernel's do
// (AnyLoads). A tile is multiplied in slices of kSlice tokens, whose scores and weights stay in a warp's registers.
#pragma once
#include "attention/any/table.cuh"

namespace kvx {
namespace cuda {

constexpr int kPromptWarps = kPromptThreads / 32;

// kOther: how many numbers make an element of Q, and a weight.
template <class Numbers_, int kDims_, int kSlice_, int kOther_> struct PromptConfig {
  using Numbers = Numbers_;
  static constexpr int kDims = kDims_, kSlice = kSlice_, kOther = kOther_, kRows = prompt_rows(kDims, kOther > 1),
                       kWarpRows = kRows / kPromptWarps, kM = kWarpRows / 16, kRowBytes = kDims * 2,
                       kBlocks = kDims == 64 && kOther == 1 ? 3 : 2;
};

template <class C> struct Prompt : AnyLoads<1, kPromptThreads, true> {
  using Loads = AnyLoads<1, kPromptThreads, true>;
  using Numbers = typename C::Numbers;
  static constexpr bool kIsF16 = std::is_same<Numbers, tiles::F16Numbers>::value;
  static constexpr int kValueTiles = C::kDims / 8, kKeyTiles = C::kSlice / 8;
  using Scores = float[C::kM][kKeyTiles][4];
  const int g, t;
  float out[C::kM][kValueTiles][4];
  // Of this thread's rows, g and g + 8 of each sixteen of the warp's: what is subtracted from scores, and weights.
  float base[C::kM][2], sum[C::kM][2];
  int32_t least_limit, most_limit, least_low, most_low;  // of the warp's rows

  __device__ __forceinline__ Prompt(const AnyArgs& args, char* memory)
      : Loads(args, memory), g(lane / 4), t(lane % 4) {}

  __device__ __forceinline__ uint32_t query_at(int part, uint32_t row, uint32_t chunk) const {
    return at + a.query_at + (part * C::kRows + row) * C::kRowBytes + ((chunk ^ (row & 7)) << 4);
  }
  // After the queries: what a row was divided by | scales of K's rows, of V's | which tokens of four tiles are there.
  __device__ __forceinline__ float* grow() const { return reinterpret_cast<float*>(shared + a.scores_at); }
  __device__ __forceinline__ float* row_scales(int plane) const { return grow() + C::kRows + plane * kMostAnyTokens; }
  __device__ __forceinline__ uint32_t* valid(int32_t tile) const {
    return reinterpret_cast<uint32_t*>(row_scales(2)) + tile % 4 * 2;
  }
  // Where a plane's rows of a tile begin: tiles of rows that are copied as they are take turns.
  __device__ __forceinline__ int part_of(int plane, int buffer) const { return a.is_straight * buffer * 2 + plane; }

  // ---- queries

  __device__ __forceinline__ const char* query_row(int r) const {
    const int32_t row = w.first_row + r, token = row / a.d.group;
    return a.d.q.data + (queries_of(a.d, w.seq).first + token) * a.d.q.token +
           (int64_t(w.head) * a.d.group + row - token * a.d.group) * a.d.q.head;
  }

  // A warp takes its own rows. Those that are multiplied as they are copied; of others, a lane has a unit of each.
  __device__ __forceinline__ void load_queries() {
    constexpr int kUnits = C::kDims / kUnit;
    const bool is_close =
        a.d.q.dim == 2 && ((reinterpret_cast<uintptr_t>(a.d.q.data) | uint64_t(a.d.q.token | a.d.q.head)) & 15) == 0;
    if (C::kOther == 1 && is_close && a.d.dims[0] % kUnit == 0 &&
        a.d.q.dtype == (kIsF16 ? KVX_DTYPE_F16 : KVX_DTYPE_BF16)) {
      constexpr int kAtOnce = 32 / kUnits > 1 ? 32 / kUnits : 1;
      const int unit = lane % kUnits;
#pragma unroll 4
      for (int i = lane / kUnits; i < C::kWarpRows; i += kAtOnce) {
        const int r = warp * C::kWarpRows + i;
        const bool is_there = r < w.rows && unit * kUnit < a.d.dims[0];
        tiles::copy_16(query_at(0, r, unit), is_there ? query_row(r) + unit * 16 : a.d.q.data, is_there ? 16 : 0);
        if (kIsF16 && unit == 0) grow()[r] = 1.f;
      }
      return;
    }
#pragma unroll 1
    for (int r = warp * C::kWarpRows; r < (warp + 1) * C::kWarpRows; r++) {
      float x[kUnit] = {};
      if (r < w.rows && lane < kUnits) {
        const char* from = query_row(r);
        if (is_close && (lane + 1) * kUnit <= a.d.dims[0]) {
          const uint4 raw = *reinterpret_cast<const uint4*>(from + lane * 16);
          const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
          decode_unit<16>(words, a.d.q.dtype, x);
        } else {
#pragma unroll
          for (int e = 0; e < kUnit; e++)
            if (lane * kUnit + e < a.d.dims[0]) x[e] = load_float(from + (lane * kUnit + e) * a.d.q.dim, a.d.q.dtype);
        }
      }
      if constexpr (kIsF16) {  // the digits of bf16, but not its range: divided by a power of two
        float largest = 0.f;
#pragma unroll
        for (int e = 0; e < kUnit; e++) largest = fmaxf(largest, fabsf(x[e]));
        for (int hop = 1; hop < 32; hop *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, hop));
        const int biased = int(__float_as_uint(largest) >> 23);
        const int exponent = a.d.q.dtype == KVX_DTYPE_F16 || biased == 255 ? 0 : max(biased - 127 - 8, -60);
        const float shrink = __uint_as_float(uint32_t(127 - exponent) << 23);
#pragma unroll
        for (int e = 0; e < kUnit; e++) x[e] *= shrink;
        if (lane == 0) grow()[r] = __uint_as_float(uint32_t(127 + exponent) << 23);
      }
      if (lane >= kUnits) continue;
#pragma unroll
      for (int part = 0; part < C::kOther; part++) {
        uint32_t pair[kUnit / 2];
#pragma unroll
        for (int i = 0; i < kUnit / 2; i++) pair[i] = pack_and_leave(x[2 * i], x[2 * i + 1], part + 1 < C::kOther);
        tiles::store_shared_16(query_at(part, r, lane), make_uint4(pair[0], pair[1], pair[2], pair[3]));
      }
    }
  }
  static __device__ __forceinline__ uint32_t pack_and_leave(float& x, float& y, bool leaves) {
    const uint32_t pair = Numbers::pack(x, y);
    if (leaves) x -= __uint_as_float(pair << 16), y -= __uint_as_float(pair & 0xffff0000u);  // bf16 alone
    return pair;
  }

  // Which of the block's rows is this thread's.
  __device__ __forceinline__ int row_of(int m, int h) const { return warp * C::kWarpRows + m * 16 + g + 8 * h; }
  // The first position that a row does not see.
  __device__ __forceinline__ int32_t limit_of(int r) const {
    return r >= w.rows ? 0 : a.d.is_causal ? w.length - w.queries + 1 + (w.first_row + r) / a.d.group : w.length;
  }
  // How far a query sees back, at most all of it.
  __device__ __forceinline__ int32_t window() const {
    return a.d.window > 0 && a.d.window < w.length ? int32_t(a.d.window) : w.length;
  }

  __device__ __forceinline__ void begin() {
    load_queries();
    __syncwarp();
    const int first = warp * C::kWarpRows, last = min(first + C::kWarpRows, w.rows) - 1;
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) base[m][h] = -INFINITY, sum[m][h] = 0.f;
    most_limit = last < first ? 0 : limit_of(last),
    least_limit = last == first + C::kWarpRows - 1 ? limit_of(first) : 0;
    most_low = most_limit - window(), least_low = limit_of(first) - window();
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int n = 0; n < kValueTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[m][n][i] = 0.f;
  }

  // ---- tiles

  // An address of a matrix's row; chunks 2 i on from it are at this ^ 32 i.
  static __device__ __forceinline__ uint32_t row_at(uint32_t from, uint32_t row, uint32_t chunk) {
    return from + row * C::kRowBytes + ((chunk ^ (row & 7)) << 4);
  }

  __device__ __forceinline__ void find(int32_t tile, int32_t id) const {
    place(w, tile, id, tile & 1);
    if (warp * 32 >= a.tokens) return;
    const uint32_t there = __ballot_sync(0xffffffffu, thread < a.tokens && rows(tile & 1)[thread].at[0] != nullptr);
    if (lane == 0) valid(tile)[warp] = there;
  }

  // Rows of 16 bits into a tile as they are, zeros where there is none.
  __device__ __forceinline__ void copy_straight(int plane, int buffer) const {
    constexpr int kUnits = C::kDims / kUnit, kStep = kPromptThreads / kUnits;
    const AnyPlane& p = a.plane[plane];
    const int unit = thread % kUnits, first = thread / kUnits, bytes = unit * kUnit < p.dims ? 16 : 0;
    if (unit >= p.units) return;
    const int64_t inside = unit_offset(p, unit);
    const char* const* row = &rows(buffer)[first].at[plane];
    const uint32_t tile = tile_at(part_of(plane, buffer), 0, 0);
    uint32_t to[2];  // rows take turns where fewer than eight are copied at a time
#pragma unroll
    for (int i = 0; i < 2; i++) to[i] = row_at(tile, first + i * kStep, unit);
#pragma unroll 1
    for (int r = 0; r < a.tokens; r += C::kSlice) {
      const char* begins[C::kSlice / kStep];
#pragma unroll
      for (int j = 0; j < C::kSlice / kStep; j++) begins[j] = row[j * kStep * (sizeof(AnyRow) / sizeof(char*))];
#pragma unroll
      for (int j = 0; j < C::kSlice / kStep; j++)  // of no bytes, any address will do
        tiles::copy_16(to[j % 2] + j / 2 * 2 * kStep * C::kRowBytes, begins[j] + inside, begins[j] ? bytes : 0);
      row += C::kSlice * (sizeof(AnyRow) / sizeof(char*));
      to[0] += C::kSlice * C::kRowBytes, to[1] += C::kSlice * C::kRowBytes;
    }
  }

  __device__ __forceinline__ void copy_tile(int buffer) const {
    if (a.is_straight) {
#pragma unroll
      for (int plane = 0; plane < 2; plane++) copy_straight(plane, buffer);
      tiles::commit_copies();
    } else {
#pragma unroll 1
      for (int plane = 0; plane < 2; plane++) copy_plane(plane, buffer);
      copy_scales(w.head, buffer);
    }
  }

  // Raw bytes of both planes to tiles, and what their scores and weights are multiplied by.
  __device__ __forceinline__ void convert_tile(int buffer) {
#pragma unroll 1
    for (int plane = 0; plane < 2; plane++) convert_plane(plane, buffer);
    if (a.scales_rows && thread < a.tokens)
#pragma unroll
      for (int plane = 0; plane < 2; plane++) row_scales(plane)[thread] = row_scale(buffer, plane, thread);
  }

  // ---- a slice

  // Steps go by four, which is as far as rows are filled up with zeros.
  __device__ __forceinline__ void score(Scores& s, uint32_t keys_at) const {
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int n = 0; n < kKeyTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[m][n][i] = 0.f;
    const uint32_t from = row_at(keys_at, lane / 16 * 8 + lane % 8, lane / 8 % 2),
                   of_queries = query_at(0, warp * C::kWarpRows + lane % 16, lane / 16);
    const int steps = (a.d.dims[0] + 15) / 16;
#pragma unroll
    for (int k = 0; k < C::kDims / 16; k++) {
      if (k % 4 == 0 && k >= steps) break;
      uint32_t queries[C::kM][C::kOther][4];
#pragma unroll
      for (int m = 0; m < C::kM; m++)
#pragma unroll
        for (int part = 0; part < C::kOther; part++)
          tiles::load_matrices(queries[m][part], (of_queries ^ 32 * k) + (part * C::kRows + m * 16) * C::kRowBytes);
#pragma unroll
      for (int n = 0; n < kKeyTiles / 2; n++) {
        uint32_t keys[4];
        tiles::load_matrices(keys, (from ^ 32 * k) + n * 16 * C::kRowBytes);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint32_t pair[2] = {keys[2 * half], keys[2 * half + 1]};
#pragma unroll
          for (int m = 0; m < C::kM; m++)
#pragma unroll
            for (int part = 0; part < C::kOther; part++) Numbers::multiply(s[m][2 * n + half], queries[m][part], pair);
        }
      }
    }
  }

  // Scores to weights. `first` is the slice's first position, `inside` its first token in the tile.
  __device__ __forceinline__ void soften(Scores& s, int32_t first, int inside, const uint32_t* valid_words) {
    uint32_t there[(C::kSlice + 31) / 32];
    bool is_masked = first + C::kSlice > least_limit || first < most_low;
#pragma unroll
    for (int i = 0; i < (C::kSlice + 31) / 32; i++) {
      const uint32_t whole = C::kSlice >= 32 ? ~0u : (1u << C::kSlice % 32) - 1;
      there[i] = valid_words[inside / 32 + i] & whole, is_masked = is_masked || there[i] != whole;
    }
    if (a.scales_rows) multiply_by(s, row_scales(0) + inside);
    float factor[C::kM][2];  // not 0: hidden scores are -infinity
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        factor[m][h] = fmaxf(a.d.scale * 1.44269504f * (kIsF16 ? grow()[row_of(m, h)] : 1.f), 1e-37f);
    const float cap = a.d.soft_cap * 1.44269504f;
    if (cap > 0.f)
#pragma unroll
      for (int m = 0; m < C::kM; m++)
#pragma unroll
        for (int n = 0; n < kKeyTiles; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) s[m][n][i] = cap * tanhf(s[m][n][i] * factor[m][i / 2] / cap) / factor[m][i / 2];
    if (is_masked)
#pragma unroll
      for (int m = 0; m < C::kM; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int32_t limit = limit_of(row_of(m, h)) - first, low = limit - window();
#pragma unroll
          for (int n = 0; n < kKeyTiles; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const int32_t token = n * 8 + 2 * t + e;
              if (!(there[n / 4] >> token % 32 & 1) || token >= limit || token < low) s[m][n][2 * h + e] = -INFINITY;
            }
        }
    // Weights are up to 2^8: sums seldom need to be scaled again.
    float largest[C::kM][2];
    bool moves = false;
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float most[kKeyTiles];
#pragma unroll
        for (int n = 0; n < kKeyTiles; n++) most[n] = fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]);
#pragma unroll
        for (int hop = kKeyTiles / 2; hop > 0; hop /= 2)
#pragma unroll
          for (int n = 0; n < hop; n++) most[n] = fmaxf(most[n], most[n + hop]);
        largest[m][h] = most[0];
      }
#pragma unroll
    for (int hop = 1; hop < 4; hop *= 2)
#pragma unroll
      for (int m = 0; m < C::kM; m++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          largest[m][h] = fmaxf(largest[m][h], __shfl_xor_sync(0xffffffffu, largest[m][h], hop));
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) largest[m][h] *= factor[m][h], moves = moves || largest[m][h] > base[m][h] + 8.f;
    if (__any_sync(0xffffffffu, moves)) {
#pragma unroll
      for (int m = 0; m < C::kM; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float now = largest[m][h] > base[m][h] + 8.f ? largest[m][h] : base[m][h],
                      shrink = now == -INFINITY ? 1.f : tiles::exp2_fast(base[m][h] - now);
          base[m][h] = now, sum[m][h] *= shrink;
#pragma unroll
          for (int n = 0; n < kValueTiles; n++) out[m][n][2 * h] *= shrink, out[m][n][2 * h + 1] *= shrink;
        }
    }
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float from = base[m][h] == -INFINITY ? 0.f : -base[m][h];
        float more[2];
#pragma unroll
        for (int n = 0; n < kKeyTiles; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = s[m][n][2 * h + e];
            x = tiles::exp2_fast(__fmaf_rn(x, factor[m][h], from)), more[e] = n ? more[e] + x : x;
          }
        sum[m][h] += more[0] + more[1];
      }
    if (a.scales_rows) multiply_by(s, row_scales(1) + inside);
  }
  // By what belongs to its keys.
  __device__ __forceinline__ void multiply_by(Scores& s, const float* scales) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; n++) {
      const float2 of_keys = *reinterpret_cast<const float2*>(scales + n * 8 + 2 * t);
#pragma unroll
      for (int m = 0; m < C::kM; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[m][n][i] *= i % 2 ? of_keys.y : of_keys.x;
    }
  }

  __device__ __forceinline__ void add_values(Scores& s, uint32_t values_at) {
    const uint32_t from = row_at(values_at, lane / 8 % 2 * 8 + lane % 8, lane / 16);
    const int pairs = (a.d.dims[1] + 15) / 16;
#pragma unroll
    for (int k = 0; k < kKeyTiles / 2; k++) {
      uint32_t weights[C::kM][C::kOther][4];
#pragma unroll
      for (int m = 0; m < C::kM; m++)
#pragma unroll
        for (int part = 0; part < C::kOther; part++)
#pragma unroll
          for (int i = 0; i < 4; i++) {  // rows g and g + 8 of eight keys, then of the next eight
            float* two = s[m][2 * k + i / 2] + i % 2 * 2;
            weights[m][part][i] = pack_and_leave(two[0], two[1], part + 1 < C::kOther);
          }
#pragma unroll
      for (int n = 0; n < kValueTiles / 2; n++) {
        if (n % 4 == 0 && n >= pairs) break;
        uint32_t values[4];
        tiles::load_matrices_turned(values, (from ^ 32 * n) + k * 16 * C::kRowBytes);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint32_t pair[2] = {values[2 * half], values[2 * half + 1]};
#pragma unroll
          for (int m = 0; m < C::kM; m++)
#pragma unroll
            for (int part = 0; part < C::kOther; part++)
              Numbers::multiply(out[m][2 * n + half], weights[m][part], pair);
        }
      }
    }
  }

  // What the warp's rows see of a tile.
  __device__ __forceinline__ void multiply_tile(int32_t tile) {
    const int buffer = tile & 1;
    const uint32_t keys = tile_at(part_of(0, buffer), 0, 0), values = tile_at(part_of(1, buffer), 0, 0);
#pragma unroll 1
    for (int inside = 0; inside < a.tokens; inside += C::kSlice) {
      const int32_t first = w.first + tile * a.tokens + inside;
      if (first >= most_limit || first + C::kSlice <= least_low) continue;
      Scores s;
      score(s, keys + inside * C::kRowBytes);
      soften(s, first, inside, valid(tile));
      add_values(s, values + inside * C::kRowBytes);
    }
  }

  // ---- results

  __device__ __forceinline__ void store() {
    const int64_t first = queries_of(a.d, w.seq).first;
    const bool is_f32 = a.d.out.dtype == KVX_DTYPE_F32,
               in_pairs =
                   a.d.out.dim == (is_f32 ? 4 : 2) && a.d.dims[1] % 2 == 0 &&
                   ((reinterpret_cast<uintptr_t>(a.d.out.data) | uint64_t(a.d.out.token | a.d.out.head)) & 7) == 0;
#pragma unroll
    for (int m = 0; m < C::kM; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        for (int hop = 1; hop < 4; hop *= 2) sum[m][h] += __shfl_xor_sync(0xffffffffu, sum[m][h], hop);
        const int r = row_of(m, h);
        if (r >= w.rows) continue;
        const int32_t token = (w.first_row + r) / a.d.group,
                      head = w.head * a.d.group + w.first_row + r - token * a.d.group;
        const float by = finish(a.d, first + token, head, base[m][h], sum[m][h], 1.f, t == 0);
        char* row = a.d.out.data + (first + token) * a.d.out.token + int64_t(head) * a.d.out.head;
#pragma unroll
        for (int n = 0; n < kValueTiles; n++) {
          const int dim = n * 8 + 2 * t;
          if (dim >= a.d.dims[1]) break;
          const float x = out[m][n][2 * h] * by, y = out[m][n][2 * h + 1] * by;
          if (in_pairs && is_f32) {
            *reinterpret_cast<float2*>(row + dim * 4) = make_float2(x, y);
          } else if (in_pairs) {
            *reinterpret_cast<uint32_t*>(row + dim * 2) =
                a.d.out.dtype == KVX_DTYPE_BF16 ? tiles::Bf16Numbers::pack(x, y) : tiles::F16Numbers::pack(x, y);
          } else {
            write(a.d.out, row, dim, x);
            if (dim + 1 < a.d.dims[1]) write(a.d.out, row, dim + 1, y);
          }
        }
      }
  }
};

// Tile i is multiplied while i + 1 is on its way and the rows of i + 2 are found.
template <class C> __device__ __forceinline__ void attend_rows(const AnyArgs& a, char* shared) {
  Prompt<C> m(a, shared);
  m.w = own_work<C::kRows>(a, blockIdx.x);
  if (m.w.seq < 0) return;
  const int32_t count = m.w.num_tiles;
  m.find(0, m.ask(m.w, 0, true));
  if (1 < count) m.find(1, m.ask(m.w, 1, true));
  __syncthreads();
  m.begin();
  m.copy_tile(0);
  int32_t asked = m.ask(m.w, 2, 2 < count);
#pragma unroll 1
  for (int32_t i = 0; i < count; i++) {
    tiles::wait_copies<0>();
    __syncthreads();  // the tile before this one is no longer read, the next one's rows are found
    if (!a.is_straight) m.convert_tile(i & 1);
    if (i + 1 < count) m.copy_tile((i + 1) & 1);
    if (!a.is_straight) __syncthreads();
    if (i + 2 < count) m.find(i + 2, asked), asked = m.ask(m.w, i + 3, i + 3 < count);
    m.multiply_tile(i);
  }
  m.store();
}

// Hopper has room for two tiles of 32 tokens of 256 elements: find_prompt asks for slices of 16 of it nowhere, and they
// are not compiled. Code for it alone runs on no other device.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasRoom = true;
#else
constexpr bool kHasRoom = false;
#endif

template <class C>
__global__ void __launch_bounds__(kPromptThreads, C::kBlocks) attend_prompt(const __grid_constant__ AnyArgs a) {
  extern __shared__ __align__(512) char shared[];
  wait_for_previous();
  if constexpr (!kHasRoom || C::kSlice == 32 || C::kOther > 1) attend_rows<C>(a, shared);
}

}  // namespace cuda
}  // namespace kvx
