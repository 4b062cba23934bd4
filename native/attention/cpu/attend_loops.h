// What attention's loops on a CPU share: vectors, rows of each type, and walks over tiles. Included by attend.cpp and
// by the files of instruction sets that add loops of their own, each of which says its KVX_ISA first.
#pragma once
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

// What was summed before a tile, times what the tile makes of it: seldom anything,
// since the largest score seldom changes.
inline void shrink(const cpu::TileStates& s, int64_t heads, int64_t dim, const cpu::Softmax* softmax) {
  for (int64_t h = 0; h < heads; h++)
    each_run(s, h, [&](int64_t state, auto rows) {
      for (int r = 0; r < rows; r++) {
        const float keep = softmax[state].keep[r];
        float* out = s.out + (state * kLanes + r) * dim;
        for (int64_t d = 0; d < dim && keep != 1; d++) out[d] *= keep;
      }
    });
}

}  // namespace
}  // namespace KVX_ISA
}  // namespace kvx
