// Compiled once per instruction set: KVX_ISA is plain, avx2 or avx512 (CMakeLists.txt sets it and the flags), here with fused
// multiply-add: attention promises an error, not bits. Written with the compiler's vectors; what it does not see by itself is
// said in a few intrinsics.
#ifndef KVX_ISA
#define KVX_ISA plain
#endif
#define KVX_ISA_NAMESPACE KVX_ISA
#include "attend.h"

#include <math.h>

#include <type_traits>

#include "../format.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvx {
namespace KVX_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
// Accumulators live in registers: 32 of them, or 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kPositions = 4, kVectors = 4;
#else
constexpr int kPositions = 2, kVectors = 2;
#endif
using cpu::kLanes;

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t IVec __attribute__((vector_size(4 * W)));
typedef uint32_t UVec __attribute__((vector_size(4 * W)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IQuad __attribute__((vector_size(16)));

template <class T>
inline T load(const void* p) {
  T x;
  memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline void store(void* p, T x) {
  memcpy(p, &x, sizeof x);
}
inline Vec splat(float x) { return x - Vec{}; }
inline Quad splat4(float x) { return x - Quad{}; }

// Lane r: the sum of a_r. With four rows a Vec's quarters are added first.
inline Quad quarter(Vec a) {
  Quad q[W / 4];
  memcpy(q, &a, sizeof a);
  Quad sum = q[0];
  for (int i = 1; i < W / 4; i++) sum += q[i];
  return sum;
}
inline Quad sums(Vec a, Vec b, Vec c, Vec d) {
#if defined(__aarch64__)
  return Quad(vpaddq_f32(vpaddq_f32(float32x4_t(a), float32x4_t(b)), vpaddq_f32(float32x4_t(c), float32x4_t(d))));
#else
  const Quad x = quarter(a), y = quarter(b), z = quarter(c), w = quarter(d);
  const Quad xy = __builtin_shuffle(x, y, IQuad{0, 2, 4, 6}) + __builtin_shuffle(x, y, IQuad{1, 3, 5, 7});
  const Quad zw = __builtin_shuffle(z, w, IQuad{0, 2, 4, 6}) + __builtin_shuffle(z, w, IQuad{1, 3, 5, 7});
  return __builtin_shuffle(xy, zw, IQuad{0, 2, 4, 6}) + __builtin_shuffle(xy, zw, IQuad{1, 3, 5, 7});
#endif
}

// acc += v * weights[R]
template <int R>
inline Vec add_weighted(Vec acc, Vec v, Quad weights) {
#if defined(__aarch64__)
  return Vec(vfmaq_laneq_f32(float32x4_t(acc), float32x4_t(v), float32x4_t(weights), R));
#else
  return acc + v * splat(weights[R]);
#endif
}

// Rows of one type: a raw load holds kParts vectors, in order.
struct F32 {
  static constexpr int kParts = 1, kBytes = 4;
  using Raw = Vec;
  static Vec part(Raw raw, int) { return raw; }
};
#if defined(__aarch64__)
struct BF16 {  // by interleaving with zeros: both pipes of a core do that, only one shifts
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = uint16x8_t;
  static Vec part(Raw raw, int i) { return Vec(i ? vzip2q_u16(vdupq_n_u16(0), raw) : vzip1q_u16(vdupq_n_u16(0), raw)); }
};
struct F16 {
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = float16x8_t;
  static Vec part(Raw raw, int i) { return Vec(i ? vcvt_high_f32_f16(raw) : vcvt_f32_f16(vget_low_f16(raw))); }
};
#else
struct Halves {
  typedef uint16_t Half __attribute__((vector_size(2 * W)));
  Half half[2];
};
struct BF16 {
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = Halves;
  static Vec part(const Raw& raw, int i) { return Vec(__builtin_convertvector(raw.half[i], UVec) << 16); }
};
#endif
#if defined(__AVX512F__)
struct F16 {
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = Halves;
  // maskz: gcc 12 warns of its own _mm512_cvtph_ps.
  static Vec part(const Raw& raw, int i) { return Vec(_mm512_maskz_cvtph_ps(0xffff, __m256i(raw.half[i]))); }
};
#elif defined(__AVX2__)
struct F16 {
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = Halves;
  static Vec part(const Raw& raw, int i) { return Vec(_mm256_cvtph_ps(__m128i(raw.half[i]))); }
};
#endif

// Into the second level: the rows of a head lie a power of two apart and would throw each other out of the first.
inline void ask(const char* p) { __builtin_prefetch(p, 0, 2); }

// ---- scores

// kPositions positions against R rows: scores [kPositions, 4].
template <class T, int R>
inline void score_block(const char* const* at, int64_t offset, int64_t dim, const char* const* next, const float* q, float* scores) {
  constexpr int kStep = W * T::kParts, kBytes = kPositions * W * 4;  // read in a step
  const char* row[kPositions];
#pragma GCC unroll 4
  for (int i = 0; i < kPositions; i++) row[i] = at[i] + offset;
  Vec sum[kPositions][R] = {};
  int64_t d = 0;
  for (int row_asked = 0; row_asked < kPositions; row_asked++) {
    const char* asked = next[row_asked];
    const int64_t stop = row_asked + 1 == kPositions ? dim : dim * (row_asked + 1) / kPositions;
    for (; d < stop; d += kStep, asked += kBytes) {
#pragma GCC unroll 4
      for (int b = 0; b < kBytes; b += 64) ask(asked + b);
      typename T::Raw raw[kPositions];
#pragma GCC unroll 4
      for (int i = 0; i < kPositions; i++) raw[i] = load<typename T::Raw>(row[i] + d * T::kBytes);
#pragma GCC unroll 2
      for (int part = 0; part < T::kParts; part++) {
        Vec x[kPositions];
#pragma GCC unroll 4
        for (int i = 0; i < kPositions; i++) x[i] = T::part(raw[i], part);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
          const Vec y = load<Vec>(q + r * dim + d + part * W);
#pragma GCC unroll 4
          for (int i = 0; i < kPositions; i++) sum[i][r] += x[i] * y;
        }
      }
    }
  }
  const Vec zero = {};
#pragma GCC unroll 4
  for (int i = 0; i < kPositions; i++)
    store(scores + i * kLanes, sums(sum[i][0], R > 1 ? sum[i][R > 1 ? 1 : 0] : zero, R > 2 ? sum[i][R > 2 ? 2 : 0] : zero, R > 2 ? sum[i][R > 2 ? 3 : 0] : zero));
}

// Calls f(state, computed rows, whether it is the first) for the runs of a head that see the tile.
template <class F>
inline void each_run(const cpu::TileStates& s, int64_t head, F&& f) {
  for (int64_t b = s.first; b < s.last; b++) f(head * s.fours + b, b + 1 == s.fours ? s.final_rows : kLanes, b == s.first);
}

template <class T>
void scores(const cpu::TileRows& k, const char* const* next, const cpu::TileStates& s) {
  int64_t asked = 0;
  const auto block = [&](int64_t t, int64_t head) {
    each_run(s, head, [&](int64_t state, int rows, bool is_first) {
      const float* q = s.q + state * kLanes * k.dim;
      float* out = s.scores + (state * cpu::kTile + t) * kLanes;
      const char* const* ahead = next && is_first ? next + asked : k.at + t;  // asking for what is here costs nothing
      if (rows == 1) score_block<T, 1>(k.at + t, head * k.head, k.dim, ahead, q, out);
      else if (rows == 2) score_block<T, 2>(k.at + t, head * k.head, k.dim, ahead, q, out);
      else score_block<T, 4>(k.at + t, head * k.head, k.dim, ahead, q, out);
    });
    asked += kPositions;
  };
  if (k.by_head) {
    for (int64_t h = 0; h < k.heads; h++)
      for (int64_t t = 0; t < k.count; t += kPositions) block(t, h);
  } else {
    for (int64_t t = 0; t < k.count; t += kPositions)
      for (int64_t h = 0; h < k.heads; h++) block(t, h);
  }
}

// ---- values

// What goes on beside summing, a piece (a chunk's width) for every row and chunk summed, front to back: rows of another head are
// made f32, and rows of memory asked for.
struct Beside {
  const char* const* from;  // NULL: none to be made
  float* to;
  const char* const* next;  // never NULL: asking for what is here costs nothing
  int64_t row = 0, piece = 0;
};

template <class T, int R, int C, bool kMakes>
inline void value_chunk(const float* v, int64_t count, int64_t dim, Beside& beside, const float* weights, const float* keep, float* out) {
  Vec sum[R][C];
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) sum[r][c] = load<Vec>(out + r * dim + c * W) * splat(keep[r]);
  constexpr int64_t kAsked = C * W * T::kBytes < 64 ? C * W * T::kBytes : 64;  // of a row asked for, which is as long as one made
  const int64_t pieces = dim / (C * W);
  int64_t row = beside.row, piece = beside.piece;
  float* to = beside.to + (row * pieces + piece) * C * W;
  for (int64_t t = 0; t < count; row++, piece = 0) {
    const char* asked = beside.next[row] + piece * kAsked;
    const char* from = kMakes ? beside.from[row] + piece * C * W * T::kBytes : nullptr;
    const int64_t stop = t + pieces - piece < count ? t + pieces - piece : count;
    const int64_t end_piece = piece + stop - t;
    for (; t < stop; t++, asked += kAsked) {
      if (kAsked == 64 || reinterpret_cast<uintptr_t>(asked) % 64 < kAsked) ask(asked);
      const Quad w = load<Quad>(weights + t * kLanes);
      if (kMakes) {
#pragma GCC unroll 8
        for (int c = 0; c < C; c += T::kParts) {
          const typename T::Raw raw = load<typename T::Raw>(from + c * W * T::kBytes);
#pragma GCC unroll 2
          for (int part = 0; part < T::kParts; part++) store(to + (c + part) * W, T::part(raw, part));
        }
        from += C * W * T::kBytes, to += C * W;
      }
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        const Vec x = load<Vec>(v + t * dim + c * W);
        sum[0][c] = add_weighted<0>(sum[0][c], x, w);
        if (R > 1) sum[R > 1 ? 1 : 0][c] = add_weighted<1>(sum[R > 1 ? 1 : 0][c], x, w);
        if (R > 2) sum[R > 2 ? 2 : 0][c] = add_weighted<2>(sum[R > 2 ? 2 : 0][c], x, w);
        if (R > 2) sum[R > 2 ? 3 : 0][c] = add_weighted<3>(sum[R > 2 ? 3 : 0][c], x, w);
      }
    }
    if (end_piece < pieces) {  // the chunk ends inside a row
      beside.row = row, beside.piece = end_piece;
      break;
    }
    beside.row = row + 1, beside.piece = 0;
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) store(out + r * dim + c * W, sum[r][c]);
}

template <class T, int R, bool kMakes>
void value_rows(const float* v, int64_t count, int64_t dim, Beside beside, const float* weights, const float* keep, float* out) {
  constexpr int C = R == 4 ? kVectors : 2 * kVectors;
  int64_t d = 0;
  for (; d + C * W <= dim; d += C * W) value_chunk<T, R, C, kMakes>(v + d, count, dim, beside, weights, keep, out + d);
  for (; d < dim; d += W) {  // no rows are made at such widths: can_make
    beside.row = beside.piece = 0;
    value_chunk<F32, R, 1, false>(v + d, count, dim, beside, weights, keep, out + d);
  }
}

template <class T>
void values(const float* v, int64_t count, int64_t dim, const char* const* from, float* to, const char* const* next, const cpu::TileStates& s, const cpu::Softmax* softmax) {
  const char* here[cpu::kTile + 1];
  for (const char*& row : here) row = reinterpret_cast<const char*>(v);
  each_run(s, 0, [&](int64_t state, int rows, bool is_first) {
    const float *weights = s.scores + state * cpu::kTile * kLanes, *keep = softmax[state].keep;
    float* out = s.out + state * kLanes * dim;
    Beside beside{is_first ? from : nullptr, to, is_first && next ? next : here};
    const auto run = [&](auto rows_together) {
      constexpr int R = decltype(rows_together)::value;
      if (beside.from) value_rows<T, R, true>(v, count, dim, beside, weights, keep, out);
      else value_rows<F32, R, false>(v, count, dim, beside, weights, keep, out);
    };
    if (rows == 1) run(std::integral_constant<int, 1>());
    else if (rows == 2) run(std::integral_constant<int, 2>());
    else run(std::integral_constant<int, 4>());
  });
}

// ---- rows as f32

void widen_f32(float* to, const char* row, int64_t n, float) { memcpy(to, row, size_t(n) * 4); }

template <class T>
void widen(float* to, const char* row, int64_t n, float) {
  constexpr int64_t kStep = W * T::kParts;
  int64_t d = 0;
  for (; d + kStep <= n; d += kStep) {
    const typename T::Raw raw = load<typename T::Raw>(row + d * T::kBytes);
#pragma GCC unroll 2
    for (int part = 0; part < T::kParts; part++) store(to + d + part * W, T::part(raw, part));
  }
  if (d == n) return;
  char rest[kStep * T::kBytes] = {};
  memcpy(rest, row + d * T::kBytes, size_t(n - d) * T::kBytes);
  float last[kStep];
  const typename T::Raw raw = load<typename T::Raw>(rest);
  for (int part = 0; part < T::kParts; part++) store(last + part * W, T::part(raw, part));
  memcpy(to + d, last, size_t(n - d) * 4);
}

// Sixteen elements at a time; what is left over goes through a row of sixteen.
template <class F>
inline void widen_bytes(float* to, const char* row, int64_t n, F&& sixteen) {
  int64_t d = 0;
  for (; d + 16 <= n; d += 16) sixteen(to + d, row + d);
  if (d == n) return;
  char rest[16] = {};
  float last[16];
  memcpy(rest, row + d, size_t(n - d));
  sixteen(last, rest);
  memcpy(to + d, last, size_t(n - d) * 4);
}

void widen_s8(float* to, const char* row, int64_t n, float scale) {
  widen_bytes(to, row, n, [scale](float* out, const char* in) {
#if defined(__aarch64__)
    const int8x16_t c = vld1q_s8(reinterpret_cast<const int8_t*>(in));
    const auto four = [&](int32x4_t x, float* at) { vst1q_f32(at, vmulq_n_f32(vcvtq_f32_s32(x), scale)); };
    const int16x8_t low = vmovl_s8(vget_low_s8(c)), high = vmovl_high_s8(c);
    four(vmovl_s16(vget_low_s16(low)), out), four(vmovl_high_s16(low), out + 4);
    four(vmovl_s16(vget_low_s16(high)), out + 8), four(vmovl_high_s16(high), out + 12);
#else
    int32_t wide[16];  // one width a loop: each then vectorises
    for (int i = 0; i < 16; i++) wide[i] = int8_t(in[i]);
    for (int i = 0; i < 16; i++) out[i] = float(wide[i]) * scale;
#endif
  });
}

#if defined(__aarch64__)
// e4m3 moved into f16's places is the number times 2^-8, subnormal or not; only its NaN has to be seen to.
void widen_e4m3(float* to, const char* row, int64_t n, float scale) {
  widen_bytes(to, row, n, [scale](float* out, const char* in) {
    const uint8x16_t c = vld1q_u8(reinterpret_cast<const uint8_t*>(in));
    const auto eight = [&](uint8x8_t x, float* at) {
      const int16x8_t wide = vshll_n_s8(vreinterpret_s8_u8(x), 7);  // the sign stays above: bit 15, and 14, which is cleared
      const uint16x8_t half = vbicq_u16(vreinterpretq_u16_s16(wide), vdupq_n_u16(0x4000));
      const uint16x8_t nan = vceqq_u16(vandq_u16(half, vdupq_n_u16(0x3f80)), vdupq_n_u16(0x3f80));
      const float16x8_t f = vreinterpretq_f16_u16(vorrq_u16(half, vandq_u16(nan, vdupq_n_u16(0x7fff))));
      const float by = scale * 256;
      vst1q_f32(at, vmulq_n_f32(vcvt_f32_f16(vget_low_f16(f)), by)), vst1q_f32(at + 4, vmulq_n_f32(vcvt_high_f32_f16(f), by));
    };
    eight(vget_low_u8(c), out), eight(vget_high_u8(c), out + 8);
  });
}
#endif

// ---- softmax

// 2^x for x <= 128, NaN for NaN, 0 from 2^-126 down. 2^f for |f| <= 1/2 is Taylor's series to f^6 with its coefficients nudged
// (Remez): 1 ulp.
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

// cap * tanh(x / cap), by exp2. Its absolute error is what counts in a score, and that is a few 2^-24 of the cap.
inline Quad capped(Quad x, float cap) {
  const float log2e = 1.44269504088896341f;
  const Quad y = x * (2 * log2e / cap);
  const Quad t = exp2_of<Quad, IQuad>(y > 60.0f ? splat4(60.0f) : y);
  return (t - 1.0f) / (t + 1.0f) * (cap * log2e);
}

inline Quad larger(Quad a, Quad b) {  // NaN is passed over here and comes back through exp2
#if defined(__aarch64__)
  return Quad(vmaxnmq_f32(float32x4_t(a), float32x4_t(b)));
#else
  return b > a ? b : a;
#endif
}

void weigh(cpu::Softmax* s, float* scores, int64_t first, int64_t count, const cpu::ScoreRule& rule) {
  const Quad none = splat4(-INFINITY), before = load<Quad>(s->most);
  const IQuad low = load<IQuad>(s->low), last = load<IQuad>(s->last);
  Quad mosts[4] = {before, none, none, none};  // four: each step waits for the one before
  if (rule.cap == 0 && !rule.is_masked && count % 4 == 0) {
    for (int64_t t = 0; t < count; t += 4)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        const Quad x = load<Quad>(scores + (t + i) * kLanes) * rule.scale;
        store(scores + (t + i) * kLanes, x);
        mosts[i] = larger(mosts[i], x);
      }
  } else {
    for (int64_t t = 0; t < count; t++) {
      Quad x = load<Quad>(scores + t * kLanes) * rule.scale;
      if (rule.cap != 0) x = capped(x, rule.cap);
      const IQuad pos = int32_t(first + t) - IQuad{};
      IQuad seen = (pos >= low) & (pos <= last);
      if (rule.there) seen &= rule.there[t];
      x = seen ? x : none;
      store(scores + t * kLanes, x);
      mosts[0] = larger(mosts[0], x);
    }
  }
  const Quad most = larger(larger(mosts[0], mosts[1]), larger(mosts[2], mosts[3]));
  const int64_t whole = (count + 3) / 4 * 4;
  for (int64_t t = count; t < whole; t++) store(scores + t * kLanes, none);
  const Quad base = most == none ? splat4(0) : most;  // nothing seen: -inf - 0 gives weight 0, where -inf - -inf would be NaN
  Quad wide[W / kLanes];
  for (Quad& part : wide) part = base;
  const Vec bases = load<Vec>(wide);
  constexpr int kTogether = 16 / W;  // four positions: the steps of one exp2 wait for each other
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

const AttendTable KVX_JOIN(attend_, KVX_ISA) = {
    W,
#if defined(__aarch64__) || defined(__AVX2__)
    {nullptr, &scores<F16>, &scores<BF16>, &scores<F32>},
    {nullptr, &values<F16>, &values<BF16>, &values<F32>},
    2 * kVectors * W,
#else
    {nullptr, nullptr, &scores<BF16>, &scores<F32>},
    {nullptr, nullptr, &values<BF16>, &values<F32>},
    2 * kVectors * W,
#endif
    &weigh,
#if defined(__aarch64__)
    {nullptr, &widen<F16>, &widen<BF16>, &widen_f32, &widen_e4m3, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, &widen_s8},
#elif defined(__AVX2__)
    {nullptr, &widen<F16>, &widen<BF16>, &widen_f32, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, &widen_s8},
#else
    {nullptr, nullptr, &widen<BF16>, &widen_f32, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, &widen_s8},
#endif
    &exp2_one,
};

}  // namespace cpu
}  // namespace kvx
