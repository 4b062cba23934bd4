// Attention of many queries a sequence, on Hopper: blocks of 128 query rows against tiles of 128 keys, or of 64 where
// values are wider than 128.
//
// A query row is one head of one token; rows of all heads that share a KV head stand in one block (GQA packed), so that
// its keys and values are loaded once for all of them. One warpgroup loads (rows through the block table, zeros where
// nothing stands), two multiply, 64 rows each: while the tensor cores add a tile's values, the softmax of the next
// tile's scores is computed. Whole blocks go through the copy engine where tensor maps can tell of them
// (tiles/map_filler.cuh), else rows are copied (tiles/row_filler.cuh); eight-bit rows become f16 on their way
// (attention/prefill/bytes.cuh). Rows that are no tile's width run in the next tile: columns of Q, K and V past them
// are zeros, and those of the result are not stored. Of 512 elements a warpgroup has registers for half the values of
// 64 rows: blocks are 64 query rows then, both warpgroups multiply all of their keys, and
// each adds up one half of the values.
#pragma once
#include <type_traits>

#include "attention/cuda/plan.cuh"
#include "attention/prefill/bytes.cuh"
#include "tiles/elements.cuh"
#include "tiles/map_filler.cuh"
#include "tiles/row_filler.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

struct PrefillArgs {
  CUtensorMap maps[2];  // K, V; the copy engine wants them on multiples of 64 bytes
  int32_t box;          // tokens of a map's box; 0 = there are no maps, rows are copied
  tiles::RowFinder rows;
  const char* data[2];
  int32_t dims[2],
      row_chunks[2];  // of K (and Q) and of V (and results); chunks of 16 bytes that a row of the cache has
  RowsParams q, out;
  char* lse;
  int64_t lse_token, lse_head;
  const float* sinks;
  const void* cu_seqlens;
  int32_t cu_bytes;
  int32_t num_seqs, num_kv_heads, query_len, max_seq_len, skip_rows;
  FastDivider group;
  int64_t window, num_tokens;
  float scale, soft_cap;
  int32_t is_causal;
  ScaleParams scales[2];
  int32_t stores_16;  // results begin on multiples of 16 bytes
};

// Widths of a tile's rows, in elements, and how many keys it has: what two stages of it leave room for, and registers
// for their scores.
template <int kKeyDims_, int kValueDims_, int kKeys_, int kStages_ = 2,
          bool kSplitsValues_ = false> struct PrefillTile {
  static constexpr int kKeyDims = kKeyDims_, kValueDims = kValueDims_, kKeys = kKeys_, kStages = kStages_;
  static constexpr bool kSplitsValues =
      kSplitsValues_;  // the two warpgroups have the same rows, and half of their values each
};

template <class Rows_, class Tile, bool kCaps_, ScaleKind kScales_> struct PrefillConfig {
  using Rows = Rows_;
  using Numbers = typename Rows::Numbers;
  static constexpr ScaleKind kScales = kScales_;
  static constexpr bool kIsBytes = Rows::kBytes == 1, kIsF16 = std::is_same<Numbers, tiles::F16Numbers>::value;
  static constexpr bool kCaps = kCaps_;  // scores are capped: its registers are not there otherwise
  static constexpr int kKeyDims = Tile::kKeyDims, kValueDims = Tile::kValueDims, kKeys = Tile::kKeys,
                       kStages = Tile::kStages;
  static constexpr bool kSplitsValues = Tile::kSplitsValues;
  static constexpr int kRows = kSplitsValues ? 64 : 128,
                       kOutDims = kSplitsValues ? kValueDims / 2 : kValueDims;  // of a warpgroup's results
  using Rings = tiles::KvRings<kKeyDims * 2, kStages, kKeys, kValueDims * 2>;
  static constexpr int kColumnBytes = Rings::kColumnBytes,
                       kQueryColumnBytes = kRows * 128;  // of K or V, and of Q: 64 elements of a tile's rows
  static constexpr int kQueryAt = 0, kRingsAt = kRows * kKeyDims * 2, kWorkAt = kRingsAt + Rings::kBytes;
  // Where f16 is multiplied: what a query row was divided by. Eight-bit rows alone: [4 tiles] of scales, a pair of
  // keys' K and logarithms of V together, then the inverses of V; raw bytes of K and V, which of wide rows lie in the
  // stages themselves.
  static constexpr int kGrowAt = kWorkAt + 64, kScalesAt = kGrowAt + (kIsF16 ? kRows * 4 : 0),
                       kScaleBytes = kScales == ROW_SCALES ? kKeys * 12 : 0;
  static constexpr int kRawAt = kScalesAt + 4 * kScaleBytes,
                       kRawBytes = kIsBytes && kKeyDims <= 128 ? kKeys * kKeyDims : 0;
  static constexpr int kSharedBytes = kRawAt + 2 * kRawBytes + 1024;  // 1024: to begin on a multiple of it
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a block of threads");
  static_assert(!kIsBytes || kKeyDims == kValueDims, "eight-bit tiles are as wide as each other");
  static constexpr int kThreads = 384, kLoadRegisters = 40, kMultiplyRegisters = 232;
};

// Which rows of which sequence a block of threads has.
struct PrefillWork : tiles::TileRange {
  int32_t first_row, rows, queries;  // rows: of the sequence
  int64_t first_query;
};

// Sequences in order; in each, the rows that see most come first, so that what is left at the end is short.
template <class C> __device__ __forceinline__ PrefillWork find_work(const PrefillArgs& a, uint32_t index) {
  PrefillWork w = {};
  w.seq = -1;
  const int lane = threadIdx.x % 32;
  for (int32_t from = 0; from < a.num_seqs; from += 32) {
    const int32_t seq = from + lane;
    uint32_t mine = 0;
    int32_t queries = 0;
    int64_t begins = 0, length = 0;  // of every lane's sequence: one wait for memory, not two
    if (seq < a.num_seqs) {
      queries = query_length(a.cu_seqlens, a.cu_bytes, a.query_len, seq);
      length = sequence_length(a.rows.kv.table, seq, a.rows.kv.block_size);
      begins =
          a.cu_seqlens ? read_index(a.cu_seqlens, int64_t(seq) * a.cu_bytes, a.cu_bytes) : int64_t(seq) * a.query_len;
      if (queries < 0 || begins < 0 || queries > a.num_tokens - begins || int64_t(queries) * a.group.d <= a.skip_rows)
        queries = 0;
      mine = uint32_t((int64_t(queries) * a.group.d + C::kRows - 1) / C::kRows) * a.num_kv_heads;
    }
    uint32_t sum = mine;
    for (int hop = 1; hop < 32; hop *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, hop);
      if (lane >= hop) sum += other;
    }
    const uint32_t found = __ballot_sync(0xffffffffu, index < sum);
    if (found == 0) {
      index -= __shfl_sync(0xffffffffu, sum, 31);
      continue;
    }
    const int at = __ffs(int(found)) - 1;
    const uint32_t inside = index - (__shfl_sync(0xffffffffu, sum, at) - __shfl_sync(0xffffffffu, mine, at)),
                   blocks = __shfl_sync(0xffffffffu, mine, at) / a.num_kv_heads;
    w.seq = from + at, w.queries = __shfl_sync(0xffffffffu, queries, at);
    w.head = int32_t(inside % a.num_kv_heads);
    w.first_row = int32_t(blocks - 1 - inside / a.num_kv_heads) * C::kRows;
    w.rows = w.queries * int32_t(a.group.d);
    w.first_query = __shfl_sync(0xffffffffu, begins, at);
    w.length = __shfl_sync(0xffffffffu, int32_t(length < 0 ? 0 : length > a.max_seq_len ? a.max_seq_len : length), at);
    const int32_t last_row = min(w.first_row + C::kRows, w.rows) - 1;
    int32_t end = w.length, first = 0;
    if (a.is_causal) end = w.length - w.queries + 1 + int32_t(a.group.divide(last_row));
    if (a.window > 0)
      first = int32_t(max(int64_t(0), (a.is_causal ? int64_t(w.length) - w.queries + 1 + a.group.divide(w.first_row)
                                                   : int64_t(w.length)) -
                                          a.window));
    w.begin = first, w.first_tile = first / C::kKeys;
    w.num_tiles = end > 0 ? (end + C::kKeys - 1) / C::kKeys - w.first_tile : 0;
    return w;
  }
  return w;
}

template <class C> struct Prefill {
  using Config = C;
  using Numbers = typename C::Numbers;
  using Rings = typename C::Rings;
  const PrefillArgs& a;
  const PrefillWork& w;
  char* shared;
  uint32_t at;

  __device__ __forceinline__ char* rings() const { return shared + C::kRingsAt; }
  static __device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
    return Rings::chunk_at(row, chunk);
  }
  static __device__ __forceinline__ uint32_t query_at(uint32_t row, uint32_t chunk) {
    return C::kQueryAt + (chunk / 8) * C::kQueryColumnBytes + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
  }

  __device__ __forceinline__ const char* query_row(uint32_t row) const {
    const uint32_t token = a.group.divide(row), head = w.head * a.group.d + row - token * a.group.d;
    return a.q.data + (w.first_query + token) * a.q.token + int64_t(head) * a.q.head;
  }

  // Half h of this thread's results, to a row of 16-bit elements. Four lanes have two of every eight elements each;
  // they exchange them so that one store of each is eight, and of all lanes whole sectors: a quarter of the stores.
  __device__ __forceinline__ void store_16(const float (&out)[C::kOutDims / 2], int h, float inverse, int t,
                                           int dims_from, char* row) const {
#pragma unroll
    for (int m = 0; m < C::kOutDims / 32; m++) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float lo = out[16 * m + 4 * i + 2 * h] * inverse, hi = out[16 * m + 4 * i + 2 * h + 1] * inverse;
        x[i] = a.out.dtype == KVX_DTYPE_BF16 ? tiles::Bf16Numbers::pack(lo, hi) : tiles::F16Numbers::pack(lo, hi);
      }
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (i & bit) continue;
          const uint32_t got = __shfl_xor_sync(0xffffffffu, t & bit ? x[i] : x[i | bit], bit);
          (t & bit ? x[i] : x[i | bit]) = got;
        }
      const int dim = dims_from + 32 * m + 8 * t;
      if (row && dim < a.dims[1]) *reinterpret_cast<uint4*>(row + dim * 2) = make_uint4(x[0], x[1], x[2], x[3]);
    }
  }

  // The loading warpgroup; where the copy engine does the work, as many of its warps as ask for it.
  __device__ __forceinline__ void load() {
    if (a.box > 0) {
      if (threadIdx.x >= tiles::MapFiller<Rings>::kWarps * 32) return;
      tiles::MapFiller<Rings> filler{a.maps,  a.rows,           a.data,
                                     w,       uint32_t(a.box),  {uint32_t(a.row_chunks[0]), uint32_t(a.row_chunks[1])},
                                     rings(), at + C::kRingsAt, threadIdx.x / 32};
      filler.begin();
      for (int i = 0; i < w.num_tiles; i++) filler.fill_next();
    } else {
      tiles::RowFiller<Rings> filler{
          a.rows, a.data, w, {uint32_t(a.row_chunks[0]), uint32_t(a.row_chunks[1])}, rings(), at + C::kRingsAt, 1};
      filler.begin();
      for (int i = 0; i < w.num_tiles; i++) filler.fill_next();
      filler.finish();
    }
  }

  // Rows of this thread's scores: r0 = 16 * warp + g and r0 + 8 of its warpgroup's 64.
  __device__ __forceinline__ void multiply() {
    constexpr int kSteps = C::kKeyDims / 16, kKeySteps = C::kKeys / 16, kOut = C::kOutDims / 2;
    using Scores = tiles::Warpgroup<Numbers, C::kKeys>;
    using Out = tiles::Warpgroup<Numbers, C::kOutDims>;
    const int thread = threadIdx.x - 128, group = thread / 128, warp = thread % 128 / 32, lane = thread % 32,
              g = lane / 4, t = lane % 4;
    const int rows_from = C::kSplitsValues ? 0 : group * 64,
              dims_from = C::kSplitsValues ? group * C::kOutDims : 0;  // of this warpgroup
    float of_head = 1.f;                                               // K's one scale
    if constexpr (C::kIsBytes) of_head = scale_of(a.scales[0], w.head, C::kScales == ONE_SCALE);
    const bool fits_queries = C::kIsBytes || (C::kIsF16 && !C::kSplitsValues && a.q.dtype == KVX_DTYPE_BF16);
    if (fits_queries) {
      if constexpr (C::kIsF16 && !C::kSplitsValues) load_f16_queries(*this, C::kScales == ONE_SCALE && of_head < 0.f);
    } else if constexpr (!C::kIsBytes) {
      constexpr int kChunks = C::kKeyDims / 8;
#pragma unroll 4
      for (int j = 0; j < C::kRows * kChunks / 256; j++) {
        const uint32_t i = j * 256 + thread, r = i / kChunks, chunk = i % kChunks, row = w.first_row + r;
        const bool is_there = int32_t(row) < w.rows && int32_t(chunk * 8) < a.dims[0];
        const char* from = is_there ? query_row(row) + chunk * 16 : a.q.data;
        tiles::copy_16(at + query_at(r, chunk), from, is_there ? 16 : 0);
      }
      tiles::commit_copies();
      tiles::wait_copies<0>();
    }
    tiles::show_to_multiplications();
    tiles::meet(2, 256);
    const int first_row = w.first_row + rows_from + warp * 16 + g;
    int32_t limit[2], low[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int32_t row = first_row + 8 * h;
      limit[h] = row >= w.rows ? 0 : a.is_causal ? w.length - w.queries + 1 + int32_t(a.group.divide(row)) : w.length;
      low[h] = a.window > 0 ? int32_t(limit[h] - a.window) : 0;
    }
    // The warpgroup's least limit and largest low: tiles between them need no mask.
    const int32_t group_first = w.first_row + rows_from, group_last = min(group_first + 63, w.rows - 1);
    const int32_t least_limit =
        a.is_causal ? w.length - w.queries + 1 + int32_t(a.group.divide(group_first)) : w.length;
    const int32_t most_low =
        a.window > 0 ? int32_t((a.is_causal ? w.length - w.queries + 1 + int32_t(a.group.divide(max(group_last, 0)))
                                            : w.length) -
                               a.window)
                     : 0;
    float scale[2] = {a.scale, a.scale}, factor[2];  // of a row's scores; factor: of what is softened, log2(e) included
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (C::kIsF16 && fits_queries) {
        const float grow = reinterpret_cast<const float*>(shared + C::kGrowAt)[rows_from + warp * 16 + g + 8 * h];
        scale[h] *= (C::kScales == ONE_SCALE ? fabsf(of_head) : of_head) * grow;
      }
      factor[h] = C::kCaps ? 1.44269504f : scale[h] * 1.44269504f;
      if (C::kIsBytes && factor[h] == 0.f) factor[h] = 1e-37f;  // a head of zeros: not 0 * infinity
    }

    float out[kOut], s[C::kKeys / 2], most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.f, 0.f};
    uint32_t p[kKeySteps][4];
#pragma unroll
    for (int i = 0; i < kOut; i++) out[i] = 0.f;
    const uint32_t query = at + C::kQueryAt + rows_from * 128;
    typename Rings::Ring keys = Rings::keys(at + C::kRingsAt);
    typename Rings::ValueRing values = Rings::values(at + C::kRingsAt);
    const bool arrives = thread % 128 == 0;  // one of two that give a stage back
    // Copies of rows are shown to multiplications here; other fillers have done so.
    const auto wait_full = [&](const auto& ring) {
      ring.wait_full();
      if (!C::kIsBytes && a.box == 0) tiles::show_to_multiplications();
    };

    // Descriptors count 16 bytes in their low bits: stepping through a tile is one addition.
    const uint64_t query_matrix = tiles::matrix_descriptor(query, 16, 1024),
                   key_matrix = tiles::matrix_descriptor(keys.stages, 16, 1024);
    const uint64_t value_matrix =
        tiles::matrix_descriptor(values.stages + dims_from / 64 * C::kColumnBytes, C::kColumnBytes, 1024);
    const auto multiply_keys = [&]() {
      const uint64_t from = key_matrix + keys.stage() * uint32_t(Rings::kTileBytes >> 4);
#pragma unroll(kSteps <= 16 ? kSteps : 8)  // more would all have their descriptors in registers
      for (int k = 0; k < kSteps; k++) {
        const uint32_t of_query = ((k / 4) * C::kQueryColumnBytes + (k % 4) * 32) >> 4,
                       of_key = ((k / 4) * C::kColumnBytes + (k % 4) * 32) >> 4;
        Scores::multiply(s, query_matrix + of_query, from + of_key, k > 0);
      }
      tiles::commit_multiplications();
    };
    const auto multiply_values = [&]() {
      const uint64_t from = value_matrix + values.stage() * uint32_t(Rings::kValueTileBytes >> 4);
#pragma unroll
      for (int k = 0; k < kKeySteps; k++) Out::multiply_turned(out, p[k], from + uint32_t(k * 16 * 128 >> 4));
      tiles::commit_multiplications();
    };
    // Scores to weights in place; returns what earlier sums are multiplied by.
    const auto soften = [&](int i, float(&shrink)[2]) {
      const int32_t first = (w.first_tile + i) * C::kKeys;
      const float* scales = reinterpret_cast<const float*>(shared + C::kScalesAt + i % 4 * C::kScaleBytes);
      if constexpr (C::kCaps && C::kScales != ROW_SCALES) {
        const float in = scale[0] / a.soft_cap, in_8 = C::kIsF16 ? scale[1] / a.soft_cap : in;  // of row r0 + 8
#pragma unroll
        for (int k = 0; k < C::kKeys / 2; k++) s[k] = a.soft_cap * tanhf(s[k] * (k / 2 % 2 ? in_8 : in));
      }
      // With a scale a row, scores are what weights are powers of: factor and V's scale are in them.
      if constexpr (C::kScales == ROW_SCALES) {
#pragma unroll
        for (int n = 0; n < C::kKeys / 8; n++) {
          const float4 pair = reinterpret_cast<const float4*>(scales)[4 * n + t];
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              float& x = s[4 * n + 2 * h + e];
              x *= e ? pair.y : pair.x;
              if (C::kCaps) x = a.soft_cap * tanhf(x * (scale[h] / a.soft_cap));
              x = __fmaf_rn(x, factor[h], e ? pair.w : pair.z);
            }
        }
      }
      const uint4 valid = *Rings::valid(rings(), i);
      if (first + C::kKeys > least_limit || first < most_low || !Rings::is_full(valid)) {
        const uint32_t words[4] = {valid.x, valid.y, valid.z, valid.w};
        if (a.rows.kv.errors && w.head == 0 && thread == 0) {  // positions whose block is none
          uint32_t missing = 0;
          for (int k = 0; k < C::kKeys / 32; k++)
            missing += __popc(tiles::rows_within(first + 32 * k, w.begin, w.length) & ~words[k]);
          if (missing) atomicAdd(a.rows.kv.errors, (unsigned long long)missing);
        }
#pragma unroll
        for (int n = 0; n < C::kKeys / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int32_t key = 8 * n + 2 * t + e;
            const bool is_valid = words[n / 4] >> (key % 32) & 1;
#pragma unroll
            for (int h = 0; h < 2; h++)
              if (!is_valid || first + key >= limit[h] || first + key < low[h]) s[4 * n + 2 * h + e] = -INFINITY;
          }
      }
      // Four chains a row: one of 32 dependent steps would take longer than the multiplications it hides behind.
      float tops[2][4], totals[2][4];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 4; c++) tops[h][c] = fmaxf(s[4 * c + 2 * h], s[4 * c + 2 * h + 1]), totals[h][c] = 0.f;
#pragma unroll
      for (int n = 4; n < C::kKeys / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          tops[h][n % 4] = fmaxf(tops[h][n % 4], fmaxf(s[4 * n + 2 * h], s[4 * n + 2 * h + 1]));
      float base[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float largest = fmaxf(fmaxf(fmaxf(tops[h][0], tops[h][1]), fmaxf(tops[h][2], tops[h][3])), most[h]);
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        base[h] = largest == -INFINITY ? 0.f : C::kScales == ROW_SCALES ? largest : largest * factor[h];
        shrink[h] =
            tiles::exp2_fast(C::kScales == ROW_SCALES ? most[h] - base[h] : __fmaf_rn(most[h], factor[h], -base[h]));
        most[h] = largest;
      }
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; n++) {
        float2 without;  // V's scale
        if constexpr (C::kScales == ROW_SCALES)
          without = reinterpret_cast<const float2*>(scales + 2 * C::kKeys)[4 * n + t];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& x = s[4 * n + 2 * h + e];
            float& total = totals[h][n % 2 * 2 + e];
            if constexpr (C::kScales == ROW_SCALES) {
              x = tiles::exp2_fast(x - base[h]);
              total = __fmaf_rn(x, e ? without.y : without.x, total);
            } else {
              x = tiles::exp2_fast(__fmaf_rn(x, factor[h], -base[h]));
              total += x;
            }
          }
      }
#pragma unroll
      for (int h = 0; h < 2; h++)
        sum[h] = __fmaf_rn(sum[h], shrink[h], (totals[h][0] + totals[h][1]) + (totals[h][2] + totals[h][3]));
    };
    const auto pack = [&]() {
#pragma unroll
      for (int k = 0; k < kKeySteps; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = Numbers::pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    };

    if (w.num_tiles > 0) {
      float shrink[2];
      wait_full(keys);
      tiles::begin_multiplications();
      multiply_keys();
      tiles::wait_multiplications<0>();
      tiles::hold(s);
      keys.give_back(arrives);
      soften(0, shrink);
      pack();
      if (group == 1) tiles::pass(3, 256);
      for (int i = 1; i < w.num_tiles; i++) {  // keys are a tile ahead of values
        wait_full(keys);
        tiles::hold(s), tiles::hold(out);
        tiles::meet(3 + group, 256);  // the two take turns: one multiplies while the other softens
        tiles::begin_multiplications();
        multiply_keys();
        wait_full(values);
        multiply_values();
        if (group == 0 || i + 1 < w.num_tiles) tiles::pass(4 - group, 256);
        tiles::wait_multiplications<1>();
        tiles::hold(s);
        keys.give_back(arrives);
        soften(i, shrink);
        // Softened before the wait, not after: that is the overlap. A sum is never negative; that it might be, and be
        // stored, keeps the assembler from waiting first (13.0 moves the wait up to where registers suit it).
        tiles::store_if_negative(at + C::kWorkAt, sum[0] + sum[1]);
        tiles::wait_multiplications<0>();
        tiles::hold(out);
        values.give_back(arrives);
        if (__any_sync(0xffffffffu,
                       shrink[0] != 1.f || shrink[1] != 1.f)) {  // seldom, once the largest scores were met
#pragma unroll
          for (int k = 0; k < kOut; k++) out[k] *= shrink[k / 2 % 2];
        }
        pack();
      }
      wait_full(values);
      tiles::hold(out);
      tiles::begin_multiplications();
      multiply_values();
      tiles::wait_multiplications<0>();
      tiles::hold(out);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
      const int32_t row = first_row + 8 * h;
      const bool is_there = row < w.rows;
      const int32_t token = int32_t(a.group.divide(row)),
                    head = w.head * int32_t(a.group.d) + row - token * int32_t(a.group.d);
      const int64_t query_token = w.first_query + token;
      float total = sum[h];
      const float largest = C::kScales == ROW_SCALES ? most[h] : most[h] * factor[h];
      if (t == 0 && dims_from == 0 && a.lse && is_there)
        *reinterpret_cast<float*>(a.lse + query_token * a.lse_token + head * a.lse_head) =
            total > 0.f ? (largest + log2f(total)) * 0.69314718f : -INFINITY;
      if (a.sinks && total > 0.f) total += tiles::exp2_fast(a.sinks[head] * 1.44269504f - largest);
      const float inverse =
          total > 0.f ? (C::kIsBytes ? scale_of(a.scales[1], w.head, C::kScales == ONE_SCALE) : 1.f) / total : 0.f;
      char* to = a.out.data + query_token * a.out.token + int64_t(head) * a.out.head;
      if (a.stores_16 && a.out.dtype != KVX_DTYPE_F32) {
        store_16(out, h, inverse, t, dims_from, is_there ? to : nullptr);
        continue;
      }
      if (!is_there) continue;
#pragma unroll
      for (int n = 0; n < C::kOutDims / 8; n++) {
        if (dims_from + 8 * n >= a.dims[1]) break;
        const float x = out[4 * n + 2 * h] * inverse, y = out[4 * n + 2 * h + 1] * inverse;
        const int dim = dims_from + 8 * n + 2 * t;
        if (a.out.dtype == KVX_DTYPE_F32)
          reinterpret_cast<float*>(to)[dim] = x, reinterpret_cast<float*>(to)[dim + 1] = y;
        else
          *reinterpret_cast<uint32_t*>(to + dim * 2) =
              a.out.dtype == KVX_DTYPE_BF16 ? tiles::Bf16Numbers::pack(x, y) : tiles::F16Numbers::pack(x, y);
      }
    }
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill(const __grid_constant__ PrefillArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  char* shared = raw + (1024 - (tiles::shared_address(raw) & 1023)) % 1024;
  const uint32_t at = tiles::shared_address(shared);
  __shared__ PrefillWork work;
  wait_for_previous();
  if (threadIdx.x < 32) {
    const PrefillWork found = find_work<C>(a, blockIdx.x);
    if (threadIdx.x == 0) work = found;
  }
  if (threadIdx.x == 32) {
    const int fills = !C::kIsBytes && a.box > 0 ? tiles::MapFiller<typename C::Rings>::kArrivals : 128;
    C::Rings::keys(at + C::kRingsAt).init(fills, 2 * tiles::arrivals_of(128));
    C::Rings::values(at + C::kRingsAt).init(fills, 2 * tiles::arrivals_of(128));
    tiles::show_barriers();
  }
  __syncthreads();
  if (work.seq < 0) return;
  Prefill<C> p{a, work, shared, at};
  if (threadIdx.x < 128) {
    tiles::give_registers<C::kLoadRegisters>();
    if constexpr (C::kIsBytes) PrefillBytes<Prefill<C>>{p}.load();
    else p.load();
  } else {
    tiles::take_registers<C::kMultiplyRegisters>();
    p.multiply();
  }
#endif
}

}  // namespace cuda
}  // namespace kvx
