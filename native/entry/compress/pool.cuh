// Softmax means, four channels of each token a thread: tokens and rows of a tail as slots, and what is pooled of them.
// Left to compress.cu: which slots an entry has. Weights are powers of two by the unit for them, within two ulp: means
// are within a few of the host's.
#pragma once
#include "cuda/chunk.cuh"
#include "entry/hybrid.h"

namespace kvx {
namespace cuda {

constexpr int kBatch = 4;  // slots that are pooled at once

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// ---- tokens as loaded

template <int IO> constexpr int kWide = IO == 0 ? 1 : 4;  // channels of a thread. IO 0: any type, any strides

template <int IO> struct Part {
  uint2 v;
};  // channels of one token, as loaded
template <> struct Part<KVX_DTYPE_F32> {
  uint4 v;
};
template <> struct Part<0> {
  float v;
};

template <int IO> __device__ __forceinline__ const char* part_at(const RowsParams& r, int64_t token, uint32_t channel) {
  return r.data + token * r.token + (IO == 0 ? channel * r.dim : int64_t(channel * (IO == KVX_DTYPE_F32 ? 4u : 2u)));
}

template <int IO> __device__ __forceinline__ Part<IO> load_part(const RowsParams& r, const char* at) {
  if constexpr (IO == 0) return Part<IO>{load_float(at, r.dtype)};
  else return Part<IO>{load_once<decltype(Part<IO>::v)>(at)};
}

template <int IO> __device__ __forceinline__ void widen(const Part<IO>& part, float (&x)[kWide<IO>]) {
  if constexpr (IO == 0) {
    x[0] = part.v;
  } else if constexpr (IO == KVX_DTYPE_F32) {
    x[0] = __uint_as_float(part.v.x), x[1] = __uint_as_float(part.v.y), x[2] = __uint_as_float(part.v.z),
    x[3] = __uint_as_float(part.v.w);
  } else {
    const uint32_t w[2] = {part.v.x, part.v.y};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if constexpr (IO == KVX_DTYPE_BF16) x[i] = __uint_as_float(i % 2 ? w[i / 2] & 0xffff0000u : w[i / 2] << 16);
      else x[i] = __half2float(__ushort_as_half(uint16_t(i % 2 ? w[i / 2] >> 16 : w[i / 2])));
    }
  }
}

template <int W> __device__ __forceinline__ void load_floats(const float* p, float (&x)[W]) {
  if constexpr (W == 1) {
    x[0] = *p;
  } else {
    const float4 v = *reinterpret_cast<const float4*>(p);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
  }
}

// __stwb is a plain store that the compiler leaves whole: under conditions it would store float by float.
template <int W> __device__ __forceinline__ void store_floats(float* p, const float (&x)[W]) {
  if constexpr (W == 1) *p = x[0];
  else __stwb(reinterpret_cast<float4*>(p), make_float4(x[0], x[1], x[2], x[3]));
}

template <int IO, int B> struct Tokens {
  Part<IO> kv[B], score[B];
};

// Tokens token + [low, high), as far as a batch goes; the others are left unread.
template <int IO, int B> __device__ __forceinline__ Tokens<IO, B> load_tokens(const CompressParams& p, int64_t token,
                                                                              int32_t low, int32_t high,
                                                                              uint32_t column) {
  Tokens<IO, B> t{};
  const char *kv = part_at<IO>(p.kv, token, column), *score = part_at<IO>(p.score, token, column);
#pragma unroll
  for (int b = 0; b < B; b++, kv += p.kv.token, score += p.score.token)
    if (b >= low && b < high) t.kv[b] = load_part<IO>(p.kv, kv), t.score[b] = load_part<IO>(p.score, score);
  return t;
}

// ---- slots: those without a token are 0 and -inf, which weighs nothing

template <int W> struct Slots {
  float kv[kBatch][W], score[kBatch][W];
};

// Tokens first + [low, high) of t, with the bias of their places in the window, row + [low, high).
template <int IO, int B>
__device__ __forceinline__ Slots<kWide<IO>> slots_of(const CompressParams& p, const Tokens<IO, B>& t, int first,
                                                     int32_t row, int32_t low, int32_t high, uint32_t column) {
  constexpr int W = kWide<IO>;
  Slots<W> s;
#pragma unroll
  for (int b = 0; b < kBatch; b++) widen<IO>(t.kv[first + b], s.kv[b]), widen<IO>(t.score[first + b], s.score[b]);
  if (p.bias) {
    const float* at = p.bias + int64_t(row) * p.parts * p.dim + column;
#pragma unroll
    for (int b = 0; b < kBatch; b++, at += p.parts * p.dim) {
      float bias[W] = {};
      if (b >= low && b < high) load_floats(at, bias);
#pragma unroll
      for (int i = 0; i < W; i++) s.score[b][i] = __fadd_rn(s.score[b][i], bias[i]);
    }
  }
#pragma unroll
  for (int b = 0; b < kBatch; b++) {
#pragma unroll
    for (int i = 0; i < W; i++)
      if (b < low || b >= high) s.kv[b][i] = 0.0f, s.score[b][i] = minus_infinity();
  }
  return s;
}

// Rows row + [0, count) of a window of the state, each kv and then score.
template <int W> __device__ __forceinline__ Slots<W> load_rows(const float* window, int32_t dim, int32_t row,
                                                               int32_t count, uint32_t channel) {
  Slots<W> s;
  const float* at = window + int64_t(row) * 2 * dim + channel;
#pragma unroll
  for (int b = 0; b < kBatch; b++, at += 2 * dim) {
#pragma unroll
    for (int i = 0; i < W; i++) s.kv[b][i] = 0.0f, s.score[b][i] = minus_infinity();
    if (b < count) load_floats(at, s.kv[b]), load_floats(at + dim, s.score[b]);
  }
  return s;
}

template <int W> __device__ __forceinline__ void store_rows(float* window, int32_t dim, int32_t row, int32_t low,
                                                            int32_t high, uint32_t channel, const Slots<W>& s) {
  float* at = window + int64_t(row) * 2 * dim + channel;
#pragma unroll
  for (int b = 0; b < kBatch; b++, at += 2 * dim) {
    if (b >= low && b < high) store_floats(at, s.kv[b]), store_floats(at + dim, s.score[b]);
  }
}

// ---- means

// The largest score, the sum of weights exp(score - largest), and the sum of kv so weighed.
struct Pool {
  float top, sum, total;
};

__device__ __forceinline__ Pool empty_pool() { return Pool{minus_infinity(), 0.0f, 0.0f}; }
// A sum is 1 or more, and no more than there are slots; or 0, and then its mean is NaN.
__device__ __forceinline__ float mean_of(const Pool& m) { return __fdividef(m.total, m.sum); }
// What weights are relative to: scores of -inf alone would be subtracted from themselves.
__device__ __forceinline__ float level_of(float top) { return top == minus_infinity() ? 0.0f : top; }

constexpr float kLog2e = 1.44269504f;

__device__ __forceinline__ float exp2_of(float x) {
  float w;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(x));
  return w;
}
// exp(score - level). The difference comes first: scores may be large, and what weighs is near 0.
__device__ __forceinline__ float weight_of(float score, float level) { return exp2_of((score - level) * kLog2e); }

// N slots, `kv` as loaded and scores with their bias. IsFirst: m is empty, and only its mean is wanted.
template <int IO, int N, bool IsFirst = false> __device__ __forceinline__ void add_parts(
    Pool (&m)[kWide<IO>], const Part<IO> (&kv)[N], const float (&score)[N][kWide<IO>]) {
  constexpr int W = kWide<IO>;
  float level[W];
#pragma unroll
  for (int i = 0; i < W; i++) {
    const float before = m[i].top;
#pragma unroll
    for (int b = 0; b < N; b++) m[i].top = fmaxf(m[i].top, score[b][i]);
    level[i] = level_of(m[i].top);
    if constexpr (IsFirst) {
      level[i] *= kLog2e;
      continue;
    }
    const float keep = weight_of(before, level[i]);
    m[i].sum *= keep, m[i].total *= keep;
  }
#pragma unroll
  for (int b = 0; b < N; b++) {
    float x[W];
    widen<IO>(kv[b], x);
#pragma unroll
    for (int i = 0; i < W; i++) {
      // The rounding of a level times log2(e) is in all weights alike, and a mean is without it: what is to be added to
      // gets exact ones.
      const float w = IsFirst ? exp2_of(fmaf(score[b][i], kLog2e, -level[i])) : weight_of(score[b][i], level[i]);
      m[i].sum += w, m[i].total = fmaf(w, x[i], m[i].total);
    }
  }
}

template <int W> __device__ __forceinline__ void add_slots(Pool (&m)[W], const Slots<W>& s) {
#pragma unroll
  for (int i = 0; i < W; i++) {
    float top = m[i].top;
#pragma unroll
    for (int b = 0; b < kBatch; b++) top = fmaxf(top, s.score[b][i]);
    const float level = level_of(top), keep = weight_of(m[i].top, level);
    float sum = m[i].sum * keep, total = m[i].total * keep;
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const float w = weight_of(s.score[b][i], level);
      sum += w, total = fmaf(w, s.kv[b][i], total);
    }
    m[i] = Pool{top, sum, total};
  }
}

template <int W> __device__ __forceinline__ void put_means(float* row, const Pool (&m)[W]) {
  float x[W];
#pragma unroll
  for (int i = 0; i < W; i++) x[i] = mean_of(m[i]);
  if constexpr (W == 1) *row = x[0];
  else *reinterpret_cast<float4*>(row) = make_float4(x[0], x[1], x[2], x[3]);
}

}  // namespace cuda
}  // namespace kvx
