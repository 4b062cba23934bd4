// Attention for any format, layout and table, on the tensor cores of every architecture: rows of up to 512 elements.
//
// A block of threads has up to kRows query rows of a KV head, and walks over tiles of tokens. A row is copied once for
// all of them, eight elements a thread, a tile ahead of its use, and becomes bf16 parts in shared memory
// (attention/any/unit.cuh): products of parts are added up in f32, as many as the query's type can tell from the exact
// ones. Few rows a sequence are shared out over the device by a plan (attention/cuda/plan.cuh), and `combine` adds up
// what several blocks have; of many rows a block has its own, and all tokens that they see.
//
// A tile goes: keys to shared memory | scores | weights; values to where the keys were | sums. Between these all
// threads meet.
#pragma once
#include "attention/any/load.cuh"

namespace kvx {
namespace cuda {

constexpr int kAnyThreads = 256, kAnyWarps = kAnyThreads / 32;

// Blocks of threads of an SM: what registers are there for.
constexpr int any_blocks(int dims, int rows, int parts) {
  return parts == 3 ? (rows == 16 ? 2 : 1) : rows == 16 && dims <= 128 ? 3 : 2;
}

template <int kDims_, int kRows_, int kParts_> struct AnyConfig {
  static constexpr int kDims = kDims_, kRows = kRows_,
                       kParts = kParts_;              // most elements of V's rows, query rows, parts of a number
  static constexpr int kOther = kParts == 3 ? 3 : 2;  // parts of queries and of weights
  static constexpr int kBlocks = any_blocks(kDims, kRows, kParts);
  static constexpr int kOutTiles = kDims / 16 / kAnyWarps, kColumnTiles = kRows / 8, kPerColumn = kAnyThreads / kRows;
};

template <class C> struct Any : AnyLoads<C::kParts, kAnyThreads> {
  using Loads = AnyLoads<C::kParts, kAnyThreads>;
  using Loads::a, Loads::shared, Loads::at, Loads::thread, Loads::warp, Loads::lane, Loads::w, Loads::rows,
      Loads::tile_at, Loads::row_scale;
  const int g, t;
  float out[C::kOutTiles][C::kColumnTiles][4];
  // Of the column whose softmax this thread has a part of.
  const int column, sub;
  int32_t limit, low;
  float most, sum;

  __device__ __forceinline__ Any(const AnyArgs& args, char* memory)
      : Loads(args, memory), g(lane / 4), t(lane % 4), column(thread / C::kPerColumn), sub(thread % C::kPerColumn) {}

  __device__ __forceinline__ float* scores() const { return reinterpret_cast<float*>(shared + a.scores_at); }
  __device__ __forceinline__ int score_step() const { return a.tokens + 4; }
  __device__ __forceinline__ float* stats() const {
    return scores() + C::kRows * score_step();
  }  // shrink[rows], then (most, sum)[rows]
  __device__ __forceinline__ uint32_t query_at(int part, uint32_t row, uint32_t chunk) const {
    return at + a.query_at + (part * C::kRows + row) * a.row_bytes + ((chunk ^ (row & 7)) << 4);
  }
  // Rows of 128 bytes, whatever the tile has.
  __device__ __forceinline__ uint32_t weight_at(int part, uint32_t row, uint32_t chunk) const {
    return at + a.weights_at + (part * C::kRows + row) * 128 + ((chunk ^ (row & 7)) << 4);
  }
  // ---- queries

  __device__ __forceinline__ void begin() {
    const int32_t group = a.d.group;
    const int64_t first = queries_of(a.d, w.seq).first;
    const int units = a.plane[0].units;
    for (int i = thread; i < C::kRows * units; i += kAnyThreads) {
      const int r = i / units, unit = i - r * units;
      float x[kUnit] = {};
      if (r < w.rows) {
        const int32_t row = w.first_row + r, token = row / group;
        const char* from =
            a.d.q.data + (first + token) * a.d.q.token + (int64_t(w.head) * group + row - token * group) * a.d.q.head;
#pragma unroll
        for (int e = 0; e < kUnit; e++)
          if (unit * kUnit + e < a.d.dims[0]) x[e] = load_float(from + (unit * kUnit + e) * a.d.q.dim, a.d.q.dtype);
      }
      store_parts<C::kOther>(query_at(0, r, unit), C::kRows * a.row_bytes, x);
    }
    const int32_t token = (w.first_row + column) / group;
    limit = column >= w.rows ? 0 : a.d.is_causal ? w.length - w.queries + 1 + token : w.length;
    low = a.d.window > 0 ? int32_t(limit - a.d.window) : 0;
    most = -INFINITY, sum = 0.f;
    for (int i = thread; i < C::kOther * C::kRows * 8; i += kAnyThreads)
      tiles::store_shared_16(at + a.weights_at + i * 16, make_uint4(0, 0, 0, 0));
    if (thread < C::kRows) stats()[thread] = 0.f;
#pragma unroll
    for (int m = 0; m < C::kOutTiles; m++)
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) out[m][n][i] = 0.f;
    __syncthreads();
  }

  // ---- a tile

  // Products of parts that count: the smallest are left out. Of f32, `small` apart from `large`: adding up cuts off
  // what is under the largest.
  static __device__ __forceinline__ void multiply(float (&large)[4], float (&small)[4],
                                                  const uint32_t (&x)[C::kParts][4], const uint32_t (&y)[C::kOther][2],
                                                  int y_parts) {
#pragma unroll
    for (int i = 0; i < C::kParts; i++)
#pragma unroll
      for (int j = 0; j < C::kOther; j++)
        if (i + j < (C::kParts == 1 ? C::kOther : C::kParts) && j < y_parts)
          tiles::Bf16Numbers::multiply(C::kParts == 3 && i + j ? small : large, x[i], y[j]);
  }
  // Fragments of all parts, of 8 rows by 16 elements from chunk `chunk`.
  template <class At> static __device__ __forceinline__ void load_other(uint32_t (&y)[C::kOther][2], int lane,
                                                                        uint32_t row, uint32_t chunk, At&& place) {
    uint32_t x[4];
    const int matrix = lane / 8;
    tiles::load_matrices(x, place(matrix / 2, row + lane % 8, chunk + matrix % 2));
    y[0][0] = x[0], y[0][1] = x[1], y[1][0] = x[2], y[1][1] = x[3];
    if constexpr (C::kOther == 3) {
      tiles::load_matrices(x, place(2, row + lane % 8, chunk + matrix % 2));
      y[2][0] = x[0], y[2][1] = x[1];
    }
  }

  __device__ __forceinline__ void score() const {
    const int token_tiles = a.tokens / 16, steps = a.plane[0].units / 2, matrix = lane / 8;
    for (int pair = warp; pair < token_tiles * C::kColumnTiles; pair += kAnyWarps) {
      const int m = pair % token_tiles, n = pair / token_tiles;
      if (n * 8 >= w.rows) break;
      float large[4] = {0.f, 0.f, 0.f, 0.f}, small[4] = {0.f, 0.f, 0.f, 0.f};
      constexpr int kAtOnce = C::kParts == 1 ? 4 : 2;  // all are loaded before the first is multiplied
#pragma unroll 1
      for (int k = 0; k < steps; k += kAtOnce) {
        uint32_t keys[kAtOnce][C::kParts][4], queries[kAtOnce][C::kOther][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          const int of = min(k + i, steps - 1);
#pragma unroll
          for (int part = 0; part < C::kParts; part++)
            tiles::load_matrices(keys[i][part],
                                 tile_at(part, m * 16 + (matrix & 1) * 8 + lane % 8, of * 2 + matrix / 2));
          load_other(queries[i], lane, n * 8, of * 2,
                     [&](int part, uint32_t row, uint32_t chunk) { return query_at(part, row, chunk); });
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++)
          if (k + i < steps) multiply(large, small, keys[i], queries[i], a.query_parts);
      }
      float* to = scores() + (n * 8 + 2 * t) * score_step() + m * 16 + g;
      to[0] = large[0] + small[0], to[score_step()] = large[1] + small[1], to[8] = large[2] + small[2],
      to[score_step() + 8] = large[3] + small[3];
    }
  }

  __device__ __forceinline__ void soften(int32_t tile, int buffer) {
    constexpr int kMostPairs = kMostAnyTokens / 2 / C::kPerColumn;
    if (warp * 32 / C::kPerColumn >= w.rows)
      return;  // none of the warp's columns is there; their weights are zeros from the start
    const int pairs = a.tokens / 2 / C::kPerColumn;
    const int32_t first = w.first + tile * a.tokens;
    const float factor = a.d.scale * 1.44269504f, cap = a.d.soft_cap * 1.44269504f;
    float s[kMostPairs][2], largest = most;
    if (column < w.rows) {
#pragma unroll
      for (int i = 0; i < kMostPairs; i++) {
        if (i >= pairs) break;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int token = 2 * (sub + i * C::kPerColumn) + e;
          const AnyRow& row = rows(buffer)[token];
          float x = scores()[column * score_step() + token] * factor * row_scale(buffer, 0, token);
          if (a.d.soft_cap > 0.f) x = cap * tanhf(x / cap);
          if (!row.at[0] || first + token >= limit || first + token < low) x = -INFINITY;
          s[i][e] = x, largest = fmaxf(largest, x);
        }
      }
    }
#pragma unroll
    for (int hop = 1; hop < C::kPerColumn; hop *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, hop));
    const float base = largest == -INFINITY ? 0.f : largest, shrink = tiles::exp2_fast(most - base);
    sum *= shrink, most = largest;
    if (sub == 0) stats()[column] = shrink;
#pragma unroll
    for (int i = 0; i < kMostPairs; i++) {
      if (i >= pairs) break;
      float x[2] = {0.f, 0.f};
      const int token = 2 * (sub + i * C::kPerColumn);
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (column < w.rows) {
          const float weight = tiles::exp2_fast(s[i][e] - base);
          sum += weight;
          x[e] = weight * row_scale(buffer, 1, token + e);
        }
#pragma unroll
      for (int part = 0; part < C::kOther; part++) {
        const uint32_t pair = tiles::Bf16Numbers::pack(x[0], x[1]);
        x[0] -= __uint_as_float(pair << 16), x[1] -= __uint_as_float(pair & 0xffff0000u);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(weight_at(part, column, token / 8) + token % 8 * 2), "r"(pair)
                     : "memory");
      }
    }
  }

  __device__ __forceinline__ void add_values() {
    const int steps = a.tokens / 16, value_tiles = a.plane[1].units / 2, matrix = lane / 8;
#pragma unroll
    for (int m = 0; m < C::kOutTiles; m++) {
      const int of = m * kAnyWarps + warp;
      if (of >= value_tiles) break;
      float large[C::kColumnTiles][4] = {}, small[C::kColumnTiles][4] = {};
#pragma unroll 1
      for (int k = 0; k < steps; k += 2) {  // steps are even
        uint32_t values[2][C::kParts][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
          for (int part = 0; part < C::kParts; part++)
            tiles::load_matrices_turned(
                values[i][part], tile_at(part, (k + i) * 16 + (matrix / 2) * 8 + lane % 8, of * 2 + (matrix & 1)));
#pragma unroll
        for (int n = 0; n < C::kColumnTiles; n++) {
          if (n * 8 >= w.rows) break;
          uint32_t weights[2][C::kOther][2];
#pragma unroll
          for (int i = 0; i < 2; i++)
            load_other(weights[i], lane, n * 8, (k + i) * 2,
                       [&](int part, uint32_t row, uint32_t chunk) { return weight_at(part, row, chunk); });
#pragma unroll
          for (int i = 0; i < 2; i++) multiply(large[n], small[n], values[i], weights[i], C::kOther);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kColumnTiles; n++) {
        const float2 shrink = *reinterpret_cast<const float2*>(stats() + n * 8 + 2 * t);
#pragma unroll
        for (int i = 0; i < 4; i++)
          out[m][n][i] = __fmaf_rn(out[m][n][i], i % 2 ? shrink.y : shrink.x, large[n][i] + small[n][i]);
      }
    }
  }

  // ---- results

  // Of all columns: the largest score and the sum of weights, for those who hold their values. All threads meet.
  __device__ __forceinline__ float2* settle() {
#pragma unroll
    for (int hop = 1; hop < C::kPerColumn; hop *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, hop);
    float2* of_columns = reinterpret_cast<float2*>(stats() + C::kRows);
    if (sub == 0) of_columns[column] = make_float2(most, sum);
    __syncthreads();
    return of_columns;
  }
  template <class Put> __device__ __forceinline__ void each_value(Put&& put) const {
#pragma unroll
    for (int n = 0; n < C::kColumnTiles; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int c = n * 8 + 2 * t + e;
        if (c >= w.rows) continue;
#pragma unroll
        for (int m = 0; m < C::kOutTiles; m++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int dim = (m * kAnyWarps + warp) * 16 + half * 8 + g;
            if (dim < a.d.dims[1]) put(c, dim, out[m][n][2 * half + e]);
          }
      }
  }

  __device__ __forceinline__ void store() {
    float2* of_columns = settle();
    const int64_t first = queries_of(a.d, w.seq).first;
    const auto token_of = [&](int c) { return (w.first_row + c) / a.d.group; };
    const auto head_of = [&](int c) { return w.head * a.d.group + (w.first_row + c) - token_of(c) * a.d.group; };
    if (sub == 0 && column < w.rows) {
      const float2 x = of_columns[column];
      of_columns[column].x = finish(a.d, first + token_of(column), head_of(column), x.x, x.y, 1.f, true);
    }
    __syncthreads();
    each_value([&](int c, int dim, float x) {
      char* row = a.d.out.data + (first + token_of(c)) * a.d.out.token + int64_t(head_of(c)) * a.d.out.head;
      write(a.d.out, row, dim, x * of_columns[c].x);
    });
  }

  __device__ __forceinline__ void store_part(int worker, bool is_first_item) {
    const float2* of_columns = settle();
    float* mine = reinterpret_cast<float*>(a.d.workspace + a.d.plan.partial_at +
                                           (2 * int64_t(worker) + (is_first_item ? 0 : 1)) * a.d.plan.partial_bytes);
    const int width = a.d.dims[1] + 2;
    if (sub == 0 && column < w.rows)
      mine[column * width] = of_columns[column].x, mine[column * width + 1] = of_columns[column].y;
    each_value([&](int c, int dim, float x) { mine[c * width + 2 + dim] = x; });
  }
};

// A sequence's work where few rows are shared out by a plan.
__device__ __forceinline__ AnyWork split_work(const AnyArgs& a, int32_t seq, int32_t head, int32_t length) {
  AnyWork w = {};
  const SeqQueries queries = queries_of(a.d, seq);
  w.seq = seq, w.head = head, w.rows = rows_of(a.d, queries), w.queries = queries.count, w.length = length;
  const SeqRange range = seq_range(length, w.queries, a.d.window, a.d.is_causal, a.tokens);
  w.begin = range.begin, w.end = range.end, w.num_tiles = range.num_tiles, w.first = range.begin / a.tokens * a.tokens;
  w.counts = a.d.rows.kv.errors && head == 0;
  return w;
}

template <class C>
__global__ void __launch_bounds__(kAnyThreads, C::kBlocks) attend_any(const __grid_constant__ AnyArgs a) {
  extern __shared__ __align__(128) char shared[];
  wait_for_previous();
  if (a.is_split) let_next_start();  // what adds up parts is then there when this ends
  Any<C> any(a, shared);
  int32_t count, worker = 0;  // tiles, and who has them
  AnyWork next;               // what the next tile belongs to
  int32_t next_tile = 0;
  if (a.is_split) {
    const WorkerStart start =
        load_now<WorkerStart>(a.d.workspace + a.d.plan.start_at + blockIdx.x * int64_t(sizeof(WorkerStart)));
    if (start.count == 0) return;
    count = start.count, worker = start.worker;
    next = split_work(a, start.seq, start.head, start.length), next_tile = start.tile;
  } else {
    next = own_work<C::kRows>(a, blockIdx.x);
    if (next.seq < 0) return;
    count = next.num_tiles;
  }
  // To the next tile; whoever steps knows that tiles are left. Of a plan, sequences without rows of ours have none.
  const auto step = [&]() {
    if (++next_tile < next.num_tiles) return;
    next_tile = 0;
    int32_t seq = next.seq, head = next.head + a.d.plan.lines;
    if (head < a.d.num_kv_heads) {
      next.head = head, next.counts = false;
      return;
    }
    head -= a.d.num_kv_heads;
    while (++seq < a.d.num_seqs && a.d.cu_seqlens && rows_of(a.d, queries_of(a.d, seq)) == 0) {}
    if (seq < a.d.num_seqs) next = split_work(a, seq, head, clamped_length(a.d.rows.kv, seq, a.d.max_seq_len));
  };
  any.w = next;
  int32_t tile = next_tile;
  any.begin();
  any.place(next, next_tile, any.ask(next, next_tile, true), 0);
  __syncthreads();
  __shared__ AnyWork after;  // of the tile after this one: seldom asked for, and no register's worth
  int32_t asked = -1;
  bool is_first_item = true;
  // Half a tile at a time, its keys, then its values; what is copied is whole tiles. The first half has nothing to work
  // on yet.
#pragma unroll 1
  for (int32_t half = -1; half < 2 * count; half++) {
    const int32_t i = half >> 1;
    const int plane = half & 1, buffer = i & 1;
    const bool is_start = half < 0, has_next = i + 1 < count;
    if (!is_start) any.convert_plane(plane, buffer);
    if (!is_start && plane == 0) {
      if (any.thread == 0) after = next;
      if (has_next) any.place(next, next_tile, asked, buffer ^ 1);
    }
    __syncthreads();
    if (is_start || (plane == 0 && has_next)) {
#pragma unroll 1
      for (int of = 0; of < 2; of++) any.copy_plane(of, buffer ^ 1);
      any.copy_scales(next.head, buffer ^ 1);
    }
    if (is_start || plane == 0) {
      if (i + 2 < count) step();
      asked = any.ask(next, next_tile, i + 2 < count);
    }
    if (is_start) {
      tiles::wait_copies<0>();
      __syncthreads();
    } else if (plane == 0) {
      any.score();
      __syncthreads();
      any.soften(tile, buffer);
    } else {
      any.add_values();
      tiles::wait_copies<0>();
      __syncthreads();
      const bool item_ends = tile + 1 == any.w.num_tiles;
      if (item_ends || !has_next) {
        if (tile <= i && item_ends) any.store();  // begun and ended here
        else any.store_part(worker, is_first_item);
        is_first_item = false;
        if (has_next) {
          __syncthreads();
          any.w = after;
          any.begin();
        }
      }
      tile = item_ends ? 0 : tile + 1;
    }
  }
}

}  // namespace cuda
}  // namespace kvx
