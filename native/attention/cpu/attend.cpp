// Compiled once per instruction set: KVX_ISA is plain, dotprod, avx2, avx512, avx512vnni, avx512bf16 or amx
// (CMakeLists.txt sets it and the flags), here with fused multiply-add: attention promises an error, not bits. Written
// with the compiler's vectors; what it does not see by itself is said in a few intrinsics.
#ifndef KVX_ISA
#define KVX_ISA plain
#endif
#define KVX_ISA_NAMESPACE KVX_ISA
#include "attention/cpu/attend.h"

#include <math.h>

#include <type_traits>
#include <utility>

#include "format.h"

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
using cpu::WidenRow;
#define KVX_INLINE inline __attribute__((always_inline))

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

// The weights of four rows. Where they multiply from memory, they wait there: a block has more than registers hold.
#if defined(__aarch64__)
using Weights = Quad;
#else
struct Weights {
  alignas(16) float of[kLanes];

  Weights() = default;
  Weights(Quad four) { memcpy(of, &four, sizeof of); }
  float operator[](int r) const { return of[r]; }
};
#endif

// acc + v * weights[R]
template <int R>
inline Vec weighted(Vec acc, Vec v, const Weights& weights) {
#if defined(__aarch64__)
  return Vec(vfmaq_laneq_f32(float32x4_t(acc), float32x4_t(v), float32x4_t(weights), R));
#else
  return acc + v * splat(weights[R]);
#endif
}

// The same in place, with weights that stay in registers: in assembly, since the compiler would spread each over one of
// its own.
template <int R>
inline void add_weighted(Vec& acc, Vec v, const Weights& weights) {
#if defined(__aarch64__)
  asm("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(acc) : "w"(v), "w"(weights), "i"(R));
#else
  acc = weighted<R>(acc, v, weights);
#endif
}

// Rows of one type: a raw load holds kParts vectors, in order. A part is 1 / (kLiftIn * kLiftOut) of the numbers.
struct Exact {
  static constexpr float kLiftIn = 1, kLiftOut = 1;
};
#if defined(__aarch64__)
struct F32 : Exact {
  static constexpr int kParts = 2, kBytes = 4;
  using Raw = float32x4x2_t;
  static Raw read(const char* p) { return {{load<float32x4_t>(p), load<float32x4_t>(p + 16)}}; }
  static Vec part(const Raw& raw, int i) { return Vec(raw.val[i]); }
};
struct BF16 : Exact {  // by interleaving with zeros: both pipes of a core do that, only one shifts
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = uint16x8_t;
  static Raw read(const char* p) { return load<Raw>(p); }
  static Vec part(Raw raw, int i) { return Vec(i ? vzip2q_u16(vdupq_n_u16(0), raw) : vzip1q_u16(vdupq_n_u16(0), raw)); }
};
struct F16 : Exact {
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = float16x8_t;
  static Raw read(const char* p) { return load<Raw>(p); }
  static Vec part(Raw raw, int i) { return Vec(i ? vcvt_high_f32_f16(raw) : vcvt_f32_f16(vget_low_f16(raw))); }
};

// Bytes become f32 by a look-up that puts them, a low and a high one, in their places in four words: conversions and
// widening go through one pipe, at a half and at one a cycle, look-ups through both. The exponent this leaves out is
// the lift.
struct Bytes {
  static constexpr int kParts = 4, kBytes = 1;
  using Raw = uint8x16x2_t;
  template <int kLow>
  static Vec place(const Raw& raw, int i) {
    uint8_t at[16];
    for (int j = 0; j < 16; j++) at[j] = uint8_t(j % 4 == kLow ? 4 * i + j / 4 : j % 4 == 3 ? 16 + 4 * i + j / 4 : 255);
    return Vec(vqtbl2q_u8(raw, load<uint8x16_t>(at)));
  }
};
struct S8 : Bytes {  // the magnitude from bit 8 of a subnormal, and the sign: the number times 2^-141
  static constexpr float kLiftIn = 0x1p70f, kLiftOut = 0x1p71f;
  static Raw read(const char* p) {
    const int8x16_t c = load<int8x16_t>(p);
    return {{vreinterpretq_u8_s8(vabsq_s8(c)), vandq_u8(vreinterpretq_u8_s8(c), vdupq_n_u8(0x80))}};
  }
  static Vec part(const Raw& raw, int i) { return place<1>(raw, i); }
};
struct E4M3
    : Bytes {  // exponent and mantissa in f32's places: the number times 2^-120, subnormal or not. NaN comes out as 480
  static constexpr float kLiftIn = 0x1p60f, kLiftOut = 0x1p60f;
  static Raw read(const char* p) {
    const int8x16_t c = load<int8x16_t>(p);
    return {{vreinterpretq_u8_s8(vshlq_n_s8(c, 4)), vandq_u8(vreinterpretq_u8_s8(vshrq_n_s8(c, 4)), vdupq_n_u8(0x87))}};
  }
  static Vec part(const Raw& raw, int i) { return place<2>(raw, i); }
};
struct E5M2 : Bytes {  // the same, times 2^-112. Infinities and NaN come out as numbers from 65536 on
  static constexpr float kLiftIn = 0x1p56f, kLiftOut = 0x1p56f;
  static Raw read(const char* p) {
    const int8x16_t c = load<int8x16_t>(p);
    return {{vreinterpretq_u8_s8(vshlq_n_s8(c, 5)), vandq_u8(vreinterpretq_u8_s8(vshrq_n_s8(c, 3)), vdupq_n_u8(0x8f))}};
  }
  static Vec part(const Raw& raw, int i) { return place<2>(raw, i); }
};
#else
struct F32 : Exact {
  static constexpr int kParts = 1, kBytes = 4;
  using Raw = Vec;
  static Raw read(const char* p) { return load<Raw>(p); }
  static Vec part(Raw raw, int) { return raw; }
};
struct Halves {
  typedef uint16_t Half __attribute__((vector_size(2 * W)));
  Half half[2];

  // In two loads: of one, gcc stores both halves to memory and loads them again.
  static Halves read(const void* p) { return {{load<Half>(p), load<Half>(static_cast<const char*>(p) + 2 * W)}}; }
};
struct BF16 : Exact {
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = Halves;
  static Raw read(const char* p) { return Halves::read(p); }
  static Vec part(const Raw& raw, int i) {
#if defined(__AVX512F__)  // what gcc makes of a conversion of vectors takes five instructions
    return Vec(_mm512_slli_epi32(_mm512_cvtepu16_epi32(__m256i(raw.half[i])), 16));
#else
    return Vec(__builtin_convertvector(raw.half[i], UVec) << 16);
#endif
  }
};
#endif
// Numbers of four bits are exact in bf16: its lower and its upper byte, by code. 0 to 7 and -8 to -1; 0 .5 1 1.5 2 3 4
// 6 with either sign.
struct Nibbles {
  uint8_t low[16], high[16];
};
constexpr Nibbles kS4 = {{0, 0x80, 0, 0x40, 0x80, 0xa0, 0xc0, 0xe0, 0, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0, 0x80},
                         {0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf}};
constexpr Nibbles kE2M1 = {
    {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0},
    {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0}};

#if defined(__AVX2__)
#include "attention/cpu/attend_avx.h"
#endif
#if defined(__AVX512F__)
#include "attention/cpu/attend_avx512.h"
#endif

// Into the second level: the rows of a head lie a power of two apart and would throw each other out of the first.
inline void ask(const char* p) { __builtin_prefetch(p, 0, 2); }

// As many bytes of P rows asked for as P others have, a few with every step through those.
template <int P>
struct Asking {
  const char* row[P + 1];
  const char** at = row;
  const char* now;
  int64_t part, left;  // elements to go by for each row

  Asking(const cpu::TileRows& rows, int64_t t, int64_t head, int64_t dim) : part(dim / P), left(part) {
    for (int i = 0; i < P; i++) row[i] = rows.at[t + i] + head * rows.head;
    row[P] = row[P - 1], now = row[0];
  }
  template <int kBytes, int kStep>
  inline __attribute__((always_inline)) void step() {
#pragma GCC unroll 8
    for (int b = 0; b < kBytes; b += 64) ask(now + b);
    now += kBytes, left -= kStep;
    if (left <= 0) now = *++at, left = part;
  }
};

// ---- scores

// Sums of P positions against R rows, across lanes: scores [P, 4].
template <int P, int R>
KVX_INLINE void store_scores(const Vec (&sum)[P][R], const float* scale, float* scores) {
#if defined(__AVX512F__)
  const Vec four = add_lanes(sum);
  store(scores, scale ? scaled(four, scale) : four);
#else
  const Vec zero = {};
#pragma GCC unroll 4
  for (int i = 0; i < P; i++) {
    Quad s = sums(sum[i][0], R > 1 ? sum[i][R > 1 ? 1 : 0] : zero, R > 2 ? sum[i][R > 2 ? 2 : 0] : zero,
                  R > 2 ? sum[i][R > 2 ? 3 : 0] : zero);
    if (scale) s *= scale[i];
    store(scores + i * kLanes, s);
  }
#endif
}

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

// Calls f(run, its number of rows as a constant) for the runs of a head that see the tile.
template <class F>
inline void each_run(const cpu::TileStates& s, int64_t head, F&& f) {
  for (int64_t b = s.first; b < s.last; b++) {
    const int rows = b + 1 == s.fours ? s.final_rows : kLanes;
    if (rows == 1) f(head * s.fours + b, std::integral_constant<int, 1>());
    else if (rows == 2) f(head * s.fours + b, std::integral_constant<int, 2>());
    else f(head * s.fours + b, std::integral_constant<int, 4>());
  }
}

// Calls f(position, head) for blocks of positions, in the order of memory.
template <class F>
inline void each_block(const cpu::TileRows& rows, int64_t positions, F&& f) {
  const int64_t blocks = (rows.count + positions - 1) / positions;
  const int64_t outer = rows.by_head ? rows.heads : blocks, inner = rows.by_head ? blocks : rows.heads;
  for (int64_t i = 0; i < outer; i++)
    for (int64_t j = 0; j < inner; j++) f((rows.by_head ? j : i) * positions, rows.by_head ? i : j);
}

// Calls f(position, row) for rows of one head, and asks for as much of those that come next.
template <class F>
KVX_INLINE void each_packed(const cpu::TileRows& rows, int64_t head, int64_t bytes, const cpu::TileRows* next, F&& f) {
  cpu::AskAhead ahead(next, head, bytes);
  for (int64_t t = 0; t < rows.count; t++) ahead.ask(bytes), f(t, rows.at[t] + head * rows.head);
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

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include "attention/cpu/attend_bf16.h"
#endif

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

// What was summed before a tile, times what the tile makes of it: seldom anything,
// since the largest score seldom changes.
void shrink(const cpu::TileStates& s, int64_t heads, int64_t dim, const cpu::Softmax* softmax) {
  for (int64_t h = 0; h < heads; h++)
    each_run(s, h, [&](int64_t state, auto rows) {
      for (int r = 0; r < rows; r++) {
        const float keep = softmax[state].keep[r];
        float* out = s.out + (state * kLanes + r) * dim;
        for (int64_t d = 0; d < dim && keep != 1; d++) out[d] *= keep;
      }
    });
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
#elif defined(__AMX_BF16__)
#include "attention/cpu/attend_amx.h"
#include "attention/cpu/attend_amx_s8.h"
#include "attention/cpu/unpack_bf16.h"
#elif defined(__AVX512VNNI__)
#include "attention/cpu/attend_vnni.h"
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

// cap * tanh(x / cap), by exp2. Its absolute error is what counts in a score, and that is a few 2^-24 of the cap.
inline Quad capped(Quad x, float cap) {
  const float log2e = 1.44269504088896341f;
  const Quad y = x * (2 * log2e / cap);
  const Quad t = exp2_of<Quad, IQuad>(y > 60.0f ? splat4(60.0f) : y);
  return (t - 1.0f) / (t + 1.0f) * (cap * log2e);
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
#if defined(__AMX_BF16__)
    {nullptr, &sums_of<F16>, &sums_tiles, &sums_of<F32>, &sums_of<E4M3>, &sums_of<E5M2>, nullptr, nullptr, nullptr,
     nullptr, nullptr, kSumsS8},
#else
    {nullptr, &sums_of<F16>, &sums_of<BF16>, &sums_of<F32>, &sums_of<E4M3>, &sums_of<E5M2>, nullptr, nullptr, nullptr,
     nullptr, nullptr, kSumsS8},
#endif
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
#elif defined(__AMX_BF16__)
    {nullptr, nullptr, nullptr, nullptr, &unpack_bytes<kE4M3Codes, false>, &unpack_bytes<kE5M2Codes, false>, nullptr,
     nullptr, nullptr, nullptr, nullptr, &unpack_bytes<kS8Codes, true>, &unpack_nibbles<kS4>, &unpack_nibbles<kE2M1>},
    KVX_DTYPE_BF16,
    {nullptr, nullptr, nullptr, nullptr, &unpack_scaled_bytes<kE4M3Codes, false>,
     &unpack_scaled_bytes<kE5M2Codes, false>, nullptr, nullptr, nullptr, nullptr, nullptr,
     &unpack_scaled_bytes<kS8Codes, true>, &unpack_scaled_nibbles<kS4>, &unpack_scaled_nibbles<kE2M1>},
#else
    {},
    KVX_DTYPE_INVALID,
    {},
#endif
#if defined(__AMX_BF16__)
    nullptr,
    &pack_tiles,
    &dots_tiles,
    &split_row,
    {{},
     {},
     {},
     {},
     made_loops<E4M3Elements>(0x1p8f),
     made_loops<E5M2Elements>(0x1p16f),
     {},
     {},
     {},
     {},
     {},
     byte_loops<S8Elements>(1),
     byte_loops<S4Elements>(0x1p-4f),
     made_loops<NibbleElements<kE2M1>>()},
    {{},
     {},
     {},
     {},
     made_loops<ScaledE4M3>(),
     made_loops<ScaledE5M2>(),
     {},
     {},
     {},
     {},
     {},
     {},
     made_loops<ScaledNibbles<kS4>>(),
     made_loops<ScaledNibbles<kE2M1>>()},
#else
#if defined(__AVX512BF16__)
    &pack_bf16,
    nullptr,
    &dots_bf16,
    nullptr,
#else
    nullptr,
    nullptr,
    nullptr,
    nullptr,
#endif
#if defined(__AVX512F__)
    {{},
     {},
     {},
     {},
     fp8_loops<E4M3, false>(),
     fp8_loops<E5M2, false>(),
     {},
     {},
     {},
     {},
     {},
#if defined(__AVX512VNNI__)
     byte_loops<S8Bytes>(1),
     byte_loops<S4Bytes>(1),
     byte_loops<E2M1Bytes>(0.5f)},
#else
     {},
     {},
     {}},
#endif
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
#else
    {},
    {},
#endif
#endif
#if defined(__AVX512F__)
    nibble_loops<kS4, true>(),
#else
    {},
#endif
};

}  // namespace cpu
}  // namespace kvx
