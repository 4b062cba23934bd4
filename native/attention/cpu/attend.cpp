// Compiled once per instruction set: KVX_ISA is plain, dotprod, avx2 or avx512 (CMakeLists.txt sets it and the flags),
// here with fused multiply-add: attention promises an error, not bits. Written with the compiler's vectors; what it
// does not see by itself is said in a few intrinsics. What newer instructions of x86 bring is added to the table of
// avx512 (attend_vnni.cpp, attend_bf16.cpp, attend_amx.cpp).
#ifndef KVX_ISA
#define KVX_ISA plain
#endif
#include "attention/cpu/attend_loops.h"

namespace kvx {
namespace KVX_ISA {
namespace {

// ---- scores

// P positions against R rows: scores [P, 4].
template <class T, int R, int P>
inline void score_block(const char* const* at, int64_t offset, int64_t dim, Asking<P> asking, const float* scale,
                        const float* q, float* scores) {
  constexpr int kStep = W * T::kParts;
  const char* row[P];
#pragma GCC unroll 4
  for (int i = 0; i < P; i++) row[i] = at[i] + offset;
  Vec sum[P][R] = {};
  for (int64_t d = 0; d < dim; d += kStep) {
    asking.template step<P * kStep * T::kBytes, kStep>();
    Vec x[P][T::kParts];
#pragma GCC unroll 4
    for (int i = 0; i < P; i++) {
      const typename T::Raw raw = T::read(row[i] + d * T::kBytes);
#pragma GCC unroll 4
      for (int part = 0; part < T::kParts; part++) x[i][part] = T::part(raw, part);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      Vec y[T::kParts];
#pragma GCC unroll 4
      for (int part = 0; part < T::kParts; part++) y[part] = load<Vec>(q + r * dim + d + part * W);
#pragma GCC unroll 4
      for (int part = 0; part < T::kParts; part++)
#pragma GCC unroll 4
        for (int i = 0; i < P; i++) sum[i][r] += x[i][part] * y[part];
    }
  }
  store_scores(sum, scale, scores);
}

#if defined(__aarch64__)
#include "attention/cpu/attend_neon.h"
#endif

template <class T>
void scores(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  constexpr int P = T::kParts > 2 ? kPositions / 2 : kPositions;
#if defined(__aarch64__)
  if constexpr (Neon<T>::kIs)
    if (scores_neon<T>(k, next ? *next : k, s)) return;
#endif
  each_block(k, P, [&](int64_t t, int64_t head) {
    const Asking<P> asking(next ? *next : k, t, head, k.dim);  // asking for what is here costs little
    const float* scale = k.scale ? k.scale + head * cpu::kTile + t : nullptr;
    each_run(s, head, [&](int64_t state, auto rows) {
      score_block<T, rows, P>(k.at + t, head * k.head, k.dim, asking, scale, s.q + state * kLanes * k.dim,
                              s.scores + (state * cpu::kTile + t) * kLanes);
    });
  });
}

// ---- values

// P positions into R rows of sums, which are read and written once: out [R, dim]. A position's parts are made while the
// one before it is multiplied.
template <class T, int R, int P>
inline void sum_block(const char* const* at, int64_t offset, int64_t dim, Asking<P> asking, const float* scale,
                      const float* weights, float* out) {
  constexpr int C = T::kParts, kStep = W * C;
  const char* row[P];
  Weights w[P];
#pragma GCC unroll 8
  for (int i = 0; i < P; i++) {
    row[i] = at[i] + offset;
    const Quad four = load<Quad>(weights + i * kLanes);
    w[i] = scale ? four * scale[i] : four;
  }
  typename T::Raw raw = T::read(row[0]);
  Vec x[C];
#pragma GCC unroll 4
  for (int c = 0; c < C; c++) x[c] = T::part(raw, c);
  for (int64_t d = 0; d < dim; d += kStep) {
    asking.template step<P * kStep * T::kBytes, kStep>();
    const int64_t after = d + kStep < dim ? d + kStep : 0;
    Vec sum[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) sum[r][c] = load<Vec>(out + r * dim + d + c * W);
#pragma GCC unroll 8
    for (int i = 0; i < P; i++) {
      raw = T::read(i + 1 < P ? row[i + 1 < P ? i + 1 : 0] + d * T::kBytes : row[0] + after * T::kBytes);
      Vec ahead[C];
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        add_weighted<0>(sum[0][c], x[c], w[i]);
        if (R > 1) add_weighted<1>(sum[R > 1 ? 1 : 0][c], x[c], w[i]);
        if (R > 2)
          add_weighted<2>(sum[R > 2 ? 2 : 0][c], x[c], w[i]), add_weighted<3>(sum[R > 2 ? 3 : 0][c], x[c], w[i]);
        ahead[c] = T::part(raw, c);
      }
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) x[c] = ahead[c];
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) store(out + r * dim + d + c * W, sum[r][c]);
  }
}

template <class T>
void sums_of(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s, const cpu::Softmax* softmax) {
  constexpr int P = 8;
  shrink(s, v.heads, v.dim, softmax);
  const auto block = [&](auto positions, int64_t from, int64_t head) {
    const Asking<positions> asking(next ? *next : v, from, head, v.dim);
    const float* scale = v.scale ? v.scale + head * cpu::kTile + from : nullptr;
    each_run(s, head, [&](int64_t state, auto rows) {
      sum_block<T, rows, positions>(v.at + from, head * v.head, v.dim, asking, scale,
                                    s.scores + (state * cpu::kTile + from) * kLanes, s.out + state * kLanes * v.dim);
    });
  };
  const auto one = [&](int64_t t, int64_t head) { block(std::integral_constant<int, 1>(), t, head); };
#if defined(__aarch64__)
  if constexpr (Neon<T>::kIs)
    if (sums_neon<T>(v, next ? *next : v, s, one)) return;
#endif
  each_block(v, P, [&](int64_t t, int64_t head) {
    if (t + P <= v.count) return block(std::integral_constant<int, P>(), t, head);
    for (; t < v.count; t++) one(t, head);
  });
}

// C vectors of every position, v [count, dim], into R rows of sums, which stay in registers.
template <int R, int C>
inline void sum_chunk(const float* v, int64_t count, int64_t dim, const float* weights, const float* keep, float* out) {
  Vec sum[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sum[r][c] = load<Vec>(out + r * dim + c * W) * splat(keep[r]);
  for (int64_t t = 0; t < count; t++, v += dim) {
    const Weights w = load<Quad>(weights + t * kLanes);
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      const Vec x = load<Vec>(v + c * W);
      sum[0][c] = weighted<0>(sum[0][c], x, w);
      if (R > 1) sum[R > 1 ? 1 : 0][c] = weighted<1>(sum[R > 1 ? 1 : 0][c], x, w);
      if (R > 2) sum[R > 2 ? 2 : 0][c] = weighted<2>(sum[R > 2 ? 2 : 0][c], x, w);
      if (R > 2) sum[R > 2 ? 3 : 0][c] = weighted<3>(sum[R > 2 ? 3 : 0][c], x, w);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * dim + c * W, sum[r][c]);
}

void values_f32(const float* v, int64_t count, int64_t dim, const char* const*, float*, const char* const*,
                const cpu::TileStates& s, const cpu::Softmax* softmax) {
  each_run(s, 0, [&](int64_t state, auto rows) {
    const float *weights = s.scores + state * cpu::kTile * kLanes, *keep = softmax[state].keep;
    float* out = s.out + state * kLanes * dim;
    int64_t d = 0;
    for (; d + kVectors * W <= dim; d += kVectors * W)
      sum_chunk<rows, kVectors>(v + d, count, dim, weights, keep, out + d);
    for (; d < dim; d += W) sum_chunk<rows, 1>(v + d, count, dim, weights, keep, out + d);
  });
}

#if defined(__ARM_FEATURE_DOTPROD)
#include "attention/cpu/attend_s8.h"
#endif
#if defined(__AVX512F__)
#include "attention/cpu/attend_groups.h"
#endif

#include "attention/cpu/attend_widen.h"

// ---- softmax

// 2^x for x <= 128, NaN for NaN, 0 from 2^-126 down. 2^f for |f| <= 1/2 is Taylor's series to f^6 with its coefficients
// nudged (Remez): 1 ulp.
template <class V, class I>
inline V exp2_of(V x) {
  const V magic = 12582912.0f - V{};  // 1.5 * 2^23: adding it rounds to an integer, which stands in the low bits
  const V shifted = x + magic, f = x - (shifted - magic);
  V p = 1.535336188319500e-4f - V{};
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  const I power = (I(shifted) - 0x4b400000 + 127) << 23;
  return V(I(p * V(power)) & ~I(x < -126.0f));
}

float exp2_one(float x) { return exp2_of<Quad, IQuad>(splat4(x))[0]; }

// cap * tanh(x / cap), by exp2; near 0, where that would lose its digits, by tanh's series to the seventh power. Its
// absolute error is what counts in a score, and that is a few 2^-24 of the cap, and of the score.
inline Quad capped(Quad x, float cap) {
  const float log2e = 1.44269504088896341f;
  const Quad part = x * (1 / cap), y = part * (2 * log2e), square = part * part;
  const Quad t = exp2_of<Quad, IQuad>(y > 60.0f ? splat4(60.0f) : y);
  const Quad series = part * (1 + square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315))));
  return (square < 0.0625f ? series : (t - 1.0f) / (t + 1.0f)) * (cap * log2e);
}

template <class V>
inline V larger(V a, V b) {  // NaN is passed over here and comes back through exp2
#if defined(__aarch64__)
  return V(vmaxnmq_f32(float32x4_t(a), float32x4_t(b)));
#else
  return b > a ? b : a;
#endif
}

void weigh(cpu::Softmax* s, float* scores, int64_t first, int64_t count, const cpu::ScoreRule& rule) {
  const Quad none = splat4(-INFINITY), before = load<Quad>(s->most);
  const IQuad low = load<IQuad>(s->low), last = load<IQuad>(s->last);
  const int64_t whole = (count + 3) / 4 * 4;
  int64_t t = 0;
  if (rule.cap == 0 && !rule.is_masked)  // sixteen at a time
    for (; t + 4 <= count && rule.scale != 1; t += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 16; i += W) store(scores + t * kLanes + i, load<Vec>(scores + t * kLanes + i) * rule.scale);
  if (rule.scale != 1 || rule.cap != 0 || rule.is_masked)
    for (; t < count; t++) {
      Quad x = load<Quad>(scores + t * kLanes) * rule.scale;
      if (rule.cap != 0) x = capped(x, rule.cap);
      const IQuad pos = int32_t(first + t) - IQuad{};
      IQuad seen = (pos >= low) & (pos <= last);
      if (rule.there) seen &= rule.there[t];
      store(scores + t * kLanes, rule.is_masked ? (seen ? x : none) : x);
    }
  for (t = count; t < whole; t++) store(scores + t * kLanes, none);
  constexpr int kTogether = 16 / W;  // four positions: each step waits for the one before
  Vec mosts[kTogether];
  for (Vec& x : mosts) x = splat(-INFINITY);
  for (t = 0; t < whole; t += 4)
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; i++) mosts[i] = larger(mosts[i], load<Vec>(scores + t * kLanes + i * W));
  Quad four[4];
  memcpy(four, mosts, sizeof four);
  const Quad most = larger(larger(larger(four[0], four[1]), larger(four[2], four[3])), before);
  const Quad base =
      most == none ? splat4(0) : most;  // nothing seen: -inf - 0 gives weight 0, where -inf - -inf would be NaN
  Quad wide[W / kLanes];
  for (Quad& part : wide) part = base;
  const Vec bases = load<Vec>(wide);
  Vec total = {};
  for (int64_t i = 0; i < whole * kLanes; i += 16) {
    Vec p[kTogether];
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; j++) p[j] = exp2_of<Vec, IVec>(load<Vec>(scores + i + j * W) - bases);
#pragma GCC unroll 4
    for (int j = 0; j < kTogether; j++) store(scores + i + j * W, p[j]), total += p[j];
  }
  const Quad keep = exp2_of<Quad, IQuad>(before - base);
  store(s->keep, keep);
  store(s->sum, load<Quad>(s->sum) * keep + quarter(total));
  store(s->most, most);
}

}  // namespace
}  // namespace KVX_ISA

namespace cpu {
#define KVX_JOIN2(a, b) a##b
#define KVX_JOIN(a, b) KVX_JOIN2(a, b)
using namespace KVX_ISA;

// int8: how its queries, scores and sums are made.
#if defined(__ARM_FEATURE_DOTPROD)
constexpr auto kPackS8 = &pack_s8;
constexpr auto kScoresS8 = &dots_s8;
constexpr auto kSumsS8 = &sums_s8;
using LiftS8 = Exact;
#else
constexpr void (*kPackS8)(float*, int64_t, int) = nullptr;
#if defined(__AVX2__) || defined(__aarch64__)
constexpr auto kScoresS8 = &scores<S8>;
constexpr auto kSumsS8 = &sums_of<S8>;
using LiftS8 = S8;
#endif
#endif

const AttendTable KVX_JOIN(attend_, KVX_ISA) = {
#if defined(__aarch64__)
    {nullptr, &scores<F16>, &scores<BF16>, &scores<F32>, &scores<E4M3>, &scores<E5M2>, nullptr, nullptr, nullptr,
     nullptr, nullptr, kScoresS8},
    {nullptr, &sums_of<F16>, &sums_of<BF16>, &sums_of<F32>, &sums_of<E4M3>, &sums_of<E5M2>, nullptr, nullptr, nullptr,
     nullptr, nullptr, kSumsS8},
    {1, 2 * W, 2 * W, 2 * W, 4 * W, 4 * W, 1, 1, 1, 1, 1, 4 * W},
    {1, 1, 1, 1, E4M3::kLiftIn, E5M2::kLiftIn, 1, 1, 1, 1, 1, LiftS8::kLiftIn},
    {1, 1, 1, 1, E4M3::kLiftOut, E5M2::kLiftOut, 1, 1, 1, 1, 1, LiftS8::kLiftOut},
    {nullptr, &widen<F16>, &widen<BF16>, &widen_f32, &widen_fp8<E4M3, KVX_DTYPE_F8_E4M3>,
     &widen_fp8<E5M2, KVX_DTYPE_F8_E5M2>, nullptr, nullptr, nullptr, nullptr, nullptr, &widen_s8, &widen_nibbles<kS4>,
     &widen_nibbles<kE2M1>},
    {nullptr, nullptr, nullptr, nullptr, &widen_groups<&widen_fp8<E4M3, KVX_DTYPE_F8_E4M3>, 8>,
     &widen_groups<&widen_fp8<E5M2, KVX_DTYPE_F8_E5M2>, 8>, nullptr, nullptr, nullptr, nullptr, nullptr,
     &widen_groups<&widen_s8, 8>, &widen_groups<&widen_nibbles<kS4>, 4>, &widen_groups<&widen_nibbles<kE2M1>, 4>},
#elif defined(__AVX2__)
    {nullptr, &scores<F16>, &scores<BF16>, &scores<F32>, &scores<E4M3>, &scores<E5M2>, nullptr, nullptr, nullptr,
     nullptr, nullptr, kScoresS8},
    {nullptr, &sums_of<F16>, &sums_of<BF16>, &sums_of<F32>, &sums_of<E4M3>, &sums_of<E5M2>, nullptr, nullptr, nullptr,
     nullptr, nullptr, kSumsS8},
    {1, 2 * W, 2 * W, W, 2 * W, 2 * W, 1, 1, 1, 1, 1, W},
    {1, 1, 1, 1, E4M3::kLiftIn, E5M2::kLiftIn, 1, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, E4M3::kLiftOut, E5M2::kLiftOut, 1, 1, 1, 1, 1, 1},
    {nullptr, &widen<F16>, &widen<BF16>, &widen_f32, &widen_fp8<E4M3>, &widen_fp8<E5M2>, nullptr, nullptr, nullptr,
     nullptr, nullptr, &widen_s8, &widen_nibbles<kS4>, &widen_nibbles<kE2M1>},
    {nullptr, nullptr, nullptr, nullptr, &widen_groups<&widen_fp8<E4M3>, 8>, &widen_groups<&widen_fp8<E5M2>, 8>,
     nullptr, nullptr, nullptr, nullptr, nullptr, &widen_groups<&widen_s8, 8>, &widen_groups<&widen_nibbles<kS4>, 4>,
     &widen_groups<&widen_nibbles<kE2M1>, 4>},
#else
    {nullptr, nullptr, &scores<BF16>, &scores<F32>},
    {nullptr, nullptr, &sums_of<BF16>, &sums_of<F32>},
    {1, 1, 2 * W, W, 1, 1, 1, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
    {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
    {nullptr, nullptr, &widen<BF16>, &widen_f32, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
     &widen_s8},
    {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
     &widen_groups<&widen_s8, 8>},
#endif
    &has_nan,
    &weigh,
    &exp2_one,
    {nullptr, nullptr, nullptr, &values_f32},
    kPackS8,
#if defined(__ARM_FEATURE_DOTPROD)
    {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
     &unpack_s4, &unpack_e2m1},
    KVX_DTYPE_S8,
    {},
#else
    {},
    KVX_DTYPE_INVALID,
    {},
#endif
    nullptr,
    nullptr,
    nullptr,
    nullptr,
#if defined(__AVX512F__)
    {{}, {}, {}, {}, fp8_loops<E4M3, false>(), fp8_loops<E5M2, false>()},
    {{},
     {},
     {},
     {},
     fp8_loops<E4M3, true>(),
     fp8_loops<E5M2, true>(),
     {},
     {},
     {},
     {},
     {},
     {},
     nibble_loops<kS4, false>(),
     nibble_loops<kE2M1, false>()},
    nibble_loops<kS4, true>(),
#else
    {},
    {},
    {},
#endif
};

}  // namespace cpu
}  // namespace kvx
