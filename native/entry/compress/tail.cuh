// Tails that keep tokens (overlap and ring), channels of one thread: what an entry pools of them and of a step's
// tokens, and what is kept for the next step. Left to compress.cu: which windows close, and what becomes of means.
#pragma once
#include "entry/compress/pool.cuh"

namespace kvx {
namespace cuda {

// Tokens at places [row, end) of a window, the one at place 0 being `token` (which need not be there), or rows [0, end)
// of a tail.
struct TokenRun {
  int64_t token;
  int32_t row, end;
  uint32_t part;  // column at which the projection starts
};

struct RowRun {
  const float* rows;
  int32_t count;
};

template <int IO, bool IsFour> __device__ __forceinline__ void pool_slots(const CompressParams& p, const RowRun& rows_a,
                                                                          const RowRun& rows_b, const TokenRun& a,
                                                                          const TokenRun& b, uint32_t c, float* mean) {
  constexpr int W = kWide<IO>;
  Pool m[W];
#pragma unroll
  for (int i = 0; i < W; i++) m[i] = empty_pool();
  if constexpr (IsFour) {
    if (rows_a.count + rows_b.count) {  // both are on their way at once
      const auto ra = load_rows<W>(rows_a.rows, p.dim, 0, rows_a.count, c),
                 rb = load_rows<W>(rows_b.rows, p.dim, 0, rows_b.count, c);
      add_slots(m, ra), add_slots(m, rb);
    }
  } else {
#pragma unroll 1
    for (int side = 0; side < 2; side++) {
      const RowRun r = side ? rows_b : rows_a;
      for (int32_t i = 0; i < r.count; i += kBatch) add_slots(m, load_rows<W>(r.rows, p.dim, i, r.count - i, c));
    }
  }
#pragma unroll 1
  for (int side = 0; side < 2; side++) {
    const TokenRun r = side ? b : a;
#pragma unroll 1
    for (int32_t i = r.row; i < r.end; i += kBatch) {
      const auto t = load_tokens<IO, kBatch>(p, r.token + i, 0, r.end - i, r.part + c);
      add_slots(m, slots_of<IO>(p, t, 0, i, 0, r.end - i, r.part + c));
    }
  }
  put_means(mean, m);
}

// Both projections of a token into place `row` of the open window, `token` -1: of none. A place at a time: a step of
// one token has little more to do, and short code is soon there.
template <int IO> __device__ __forceinline__ void keep_token(const CompressParams& p, float* window, int64_t token,
                                                             int32_t row, uint32_t c) {
  constexpr int W = kWide<IO>;
  const int64_t size = int64_t(p.ratio) * 2 * p.dim;  // from the first projection's places to the second's
  float kv[2][W], score[2][W];
#pragma unroll
  for (int part = 0; part < 2; part++) {
#pragma unroll
    for (int i = 0; i < W; i++) kv[part][i] = 0.0f, score[part][i] = minus_infinity();
  }
  if (token >= 0) {
    Part<IO> kvs[2], scores[2];
    float bias[2][W] = {};
#pragma unroll
    for (int part = 0; part < 2; part++) {
      kvs[part] = load_part<IO>(p.kv, part_at<IO>(p.kv, token, part * p.dim + c)),
      scores[part] = load_part<IO>(p.score, part_at<IO>(p.score, token, part * p.dim + c));
      if (p.bias) load_floats(p.bias + (2 * row + part) * p.dim + c, bias[part]);
    }
#pragma unroll
    for (int part = 0; part < 2; part++) {
      widen<IO>(kvs[part], kv[part]), widen<IO>(scores[part], score[part]);
      if (p.bias) {
#pragma unroll
        for (int i = 0; i < W; i++) score[part][i] = __fadd_rn(score[part][i], bias[part][i]);
      }
    }
  }
  float* at = window + 2 * row * p.dim + c;
#pragma unroll
  for (int part = 0; part < 2; part++, at += size) store_floats(at, kv[part]), store_floats(at + p.dim, score[part]);
}

// The tail for the next step: places of the window before (overlap) and of the open one, by parts. What was the open
// window may become the one before, and is read first.
template <int IO, bool IsFour> __device__ __forceinline__ void keep_tail(const CompressParams& p, float* state,
                                                                         int64_t begin, int32_t open, int32_t closed,
                                                                         int32_t left, uint32_t c) {
  constexpr int W = kWide<IO>;
  const int64_t size = int64_t(p.ratio) * 2 * p.dim,
                at = begin + int64_t(closed) * p.ratio - open;  // `at`: the token at place 0 of the open window
  const int32_t old = closed == 1 ? open : 0, kept = closed ? 0 : open;
  const bool is_overlap = p.parts == 2;
  const uint32_t own = uint32_t(p.parts - 1) * p.dim;
  float* const window = state + (is_overlap ? 2 * size : 0);
  for (int32_t i = 0; i < (IsFour ? kBatch : p.ratio); i += kBatch) {
    const int32_t rest = IsFour ? kBatch : p.ratio - i;
    if (is_overlap && closed) {
      const auto last = load_tokens<IO, kBatch>(p, at - p.ratio + i, old - i, rest, c);
      store_rows(state, p.dim, i, 0, old - i, c, load_rows<W>(state + size, p.dim, i, old - i, c));
      store_rows(state, p.dim, i, old - i, rest, c, slots_of<IO>(p, last, 0, i, old - i, rest, c));
    }
    if constexpr (IsFour) {
#pragma unroll 1
      for (int32_t row = kept; row < kBatch; row++) keep_token<IO>(p, state + size, row < left ? at + row : -1, row, c);
    } else {
      const auto cur = load_tokens<IO, kBatch>(p, at + i, kept - i, left - i, own + c);
      if (is_overlap) {
        const auto ovl = load_tokens<IO, kBatch>(p, at + i, kept - i, left - i, c);
        store_rows(state + size, p.dim, i, kept - i, rest, c, slots_of<IO>(p, ovl, 0, i, kept - i, left - i, c));
      }
      store_rows(window, p.dim, i, kept - i, rest, c, slots_of<IO>(p, cur, 0, i, kept - i, left - i, own + c));
    }
  }
}

// Of a window of four whose eight slots are all tokens of this step, `begin` the first of its own.
template <int IO> __device__ __forceinline__ void pool_eight(const CompressParams& p, int64_t begin, uint32_t c,
                                                             float* mean) {
  constexpr int W = kWide<IO>, kSlots = 8;
  constexpr uint32_t kSize = IO == KVX_DTYPE_F32 ? 4 : 2;
  const uint32_t own = uint32_t(p.dim) * kSize;
  const char *kv = p.kv.data + (begin - 4) * p.kv.token + c * kSize,
             *score = p.score.data + (begin - 4) * p.score.token + c * kSize;
  Part<IO> kvs[kSlots], scores[kSlots];
#pragma unroll
  for (int b = 0; b < kSlots; b++) {  // all on their way at once
    scores[b].v = load_once<decltype(Part<IO>::v)>(score + (b < 4 ? 0u : own));
    kvs[b].v = load_once<decltype(Part<IO>::v)>(kv + (b < 4 ? 0u : own));
    kv += p.kv.token, score += p.score.token;
  }
  float s[kSlots][W];
#pragma unroll
  for (int b = 0; b < kSlots; b++) widen<IO>(scores[b], s[b]);
  if (p.bias) {
    const float* bias = p.bias + c;
#pragma unroll
    for (int b = 0; b < kSlots; b++) {
      float x[W];
      load_floats(bias + (2 * (b % 4) + b / 4) * p.dim, x);
#pragma unroll
      for (int i = 0; i < W; i++) s[b][i] = __fadd_rn(s[b][i], x[i]);
    }
  }
  Pool m[W];
#pragma unroll
  for (int i = 0; i < W; i++) m[i] = empty_pool();
  add_parts<IO, kSlots, true>(m, kvs, s);
  put_means(mean, m);
}

}  // namespace cuda
}  // namespace kvx
