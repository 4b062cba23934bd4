// Compiled once per instruction set: KVX_ISA is plain, avx2 or avx512 (CMakeLists.txt sets it and the flags).
#ifndef KVX_ISA
#define KVX_ISA plain
#endif
#define KVX_ISA_NAMESPACE KVX_ISA
#include "cpu/rows.h"

#include <type_traits>
#include <utility>

#include "format.h"
#include "move/digest.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvx {
namespace KVX_ISA {
namespace {

template <int T> struct Float;  // IO types
template <> struct Float<KVX_DTYPE_F16> {
  using Raw = uint16_t;
  static float load(Raw r) { return f16_to_f32(r); }
  static Raw store(float x) { return f32_to_f16(x); }
};
template <> struct Float<KVX_DTYPE_BF16> {
  using Raw = uint16_t;
  static float load(Raw r) { return bf16_to_f32(r); }
  static Raw store(float x) { return f32_to_bf16(x); }
};
template <> struct Float<KVX_DTYPE_F32> {
  using Raw = uint32_t;
  static float load(Raw r) { return float_of(r); }
  static Raw store(float x) { return bits_of(one_nan(x)); }
};

template <int T> struct Code;  // quantised types, one per byte (or nibble)
#define KVX_CODE(dtype, enc, dec)                     \
  template <> struct Code<dtype> {                    \
    static uint8_t encode(float x) { return enc(x); } \
    static float decode(uint8_t c) { return dec(c); } \
  };
KVX_CODE(KVX_DTYPE_F8_E4M3, f32_to_e4m3, e4m3_to_f32)
KVX_CODE(KVX_DTYPE_F8_E5M2, f32_to_e5m2, e5m2_to_f32)
KVX_CODE(KVX_DTYPE_S8, f32_to_s8, s8_to_f32)
KVX_CODE(KVX_DTYPE_S4, f32_to_s4, s4_to_f32)
KVX_CODE(KVX_DTYPE_E2M1, f32_to_e2m1, e2m1_to_f32)

template <int IO, int C>
void cast_row(char* dst, const char* src, int64_t n, float) {
  auto* s = reinterpret_cast<const typename Float<IO>::Raw*>(src);
  auto* d = reinterpret_cast<typename Float<C>::Raw*>(dst);
  for (int64_t i = 0; i < n; i++) d[i] = Float<C>::store(Float<IO>::load(s[i]));
}

// Work goes through short arrays, one simple loop a step: each loop then has one element width and vectorises
// everywhere, where a single loop from 16-bit floats to bytes does not. Rows go in blocks of 64, and what is left (or a
// small group of elements under one scale) in blocks of 16.
template <int IO, int N>
inline void load_block(const char* src, int64_t first, float (&x)[N], int n) {
  auto* s = reinterpret_cast<const typename Float<IO>::Raw*>(src) + first;
  uint32_t raw[N] = {};
  for (int i = 0; i < n; i++) raw[i] = s[i];
  for (int i = 0; i < N; i++) x[i] = Float<IO>::load(typename Float<IO>::Raw(raw[i]));
}

template <int IO, int N>
inline void store_block(char* dst, int64_t first, const float (&x)[N], int n) {
  auto* d = reinterpret_cast<typename Float<IO>::Raw*>(dst) + first;
  uint32_t raw[N];
  for (int i = 0; i < N; i++) raw[i] = Float<IO>::store(x[i]);
  for (int i = 0; i < n; i++) d[i] = typename Float<IO>::Raw(raw[i]);
}

template <int IO, int C, int N>
inline void encode_block(char* dst, const char* src, int64_t first, int n, float scale) {
  auto* d = reinterpret_cast<uint8_t*>(dst);
  float x[N];
  uint32_t codes[N];
  load_block<IO>(src, first, x, n);
  for (int i = 0; i < N; i++) x[i] = x[i] / scale;
  for (int i = 0; i < N; i++) codes[i] = Code<C>::encode(x[i]);
  if (C == KVX_DTYPE_S4 || C == KVX_DTYPE_E2M1) {
    for (int i = 0; i < n / 2; i++) d[first / 2 + i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
  } else {
    for (int i = 0; i < n; i++) d[first + i] = uint8_t(codes[i]);
  }
}

template <int C, int IO, int N>
inline void decode_block(char* dst, const char* src, int64_t first, int n, float scale) {
  auto* s = reinterpret_cast<const uint8_t*>(src);
  uint32_t codes[N] = {};
  float x[N];
  if (C == KVX_DTYPE_S4 || C == KVX_DTYPE_E2M1) {
    for (int i = 0; i < n / 2; i++) codes[2 * i] = s[first / 2 + i] & 15, codes[2 * i + 1] = s[first / 2 + i] >> 4;
  } else {
    for (int i = 0; i < n; i++) codes[i] = s[first + i];
  }
  for (int i = 0; i < N; i++) x[i] = Code<C>::decode(uint8_t(codes[i])) * scale;
  store_block<IO>(dst, first, x, n);
}

#if defined(__aarch64__)
#include "cpu/codes_neon.h"
#endif

template <int IO, int C>
void encode_row(char* dst, const char* src, int64_t n, float scale) {
#if defined(__aarch64__)
  if constexpr (Encoder<IO, C>::exists) return for_blocks_of_16(dst, src, n, Encoder<IO, C>{scale});
#endif
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) encode_block<IO, C, 64>(dst, src, i, 64, scale);
  for (; i + 16 <= n; i += 16) encode_block<IO, C, 16>(dst, src, i, 16, scale);
  if (i < n) encode_block<IO, C, 16>(dst, src, i, int(n - i), scale);
}

template <int C, int IO>
void decode_row(char* dst, const char* src, int64_t n, float scale) {
#if defined(__aarch64__)
  if constexpr (Decoder<C, IO>::exists)
    if (scale - scale == 0) return for_blocks_of_16(dst, src, n, Decoder<C, IO>{scale});  // finite: no NaN but a code's
#endif
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) decode_block<C, IO, 64>(dst, src, i, 64, scale);
  for (; i + 16 <= n; i += 16) decode_block<C, IO, 16>(dst, src, i, 16, scale);
  if (i < n) decode_block<C, IO, 16>(dst, src, i, int(n - i), scale);
}

#include "cpu/rope.h"

// Magnitudes of floats order as their bits do, so the maximum is an integer one and vectorises in any order. Infinities
// and NaN are seldom there: only when the largest is one of them are they left out.
template <int IO>
float amax_row(const char* src, int64_t n) {
  using Raw = typename Float<IO>::Raw;
  using Int = std::make_signed_t<Raw>;  // magnitudes are positive in it, and SSE2 has its maximum
  constexpr Int sign_off = Int(Raw(~Raw(0)) >> 1);
  constexpr Int infinity = IO == KVX_DTYPE_F32 ? Int(0x7f800000) : IO == KVX_DTYPE_BF16 ? Int(0x7f80) : Int(0x7c00);
  auto* s = reinterpret_cast<const Int*>(src);
  Int most = 0;
  for (int64_t i = 0; i < n; i++) {
    const Int m = Int(s[i] & sign_off);
    most = m > most ? m : most;
  }
  if (most >= infinity) {
    most = 0;
    for (int64_t i = 0; i < n; i++) {
      const Int m = Int(s[i] & sign_off), finite = m < infinity ? m : Int(0);
      most = finite > most ? finite : most;
    }
  }
  return Float<IO>::load(Raw(most));
}

// Rows are a few hundred bytes. libc's memcpy writes such a piece in overlapping parts, which keeps a core from seeing
// whole cache lines go by (measured on Neoverse: 17 GB/s instead of 55); a loop of 64-byte moves does not.
void copy(char* dst, const char* src, int64_t bytes) {
  if (bytes >= 4096) {
    memcpy(dst, src, size_t(bytes));
    return;
  }
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(src + i + 1024);  // rows that skip over others (K beside V) would be met cold
#if defined(__aarch64__)  // one store a line: in two halves, whether the core sees it whole depends on how the loop is
                          // placed
    vst1q_u8_x4(reinterpret_cast<uint8_t*>(dst + i), vld1q_u8_x4(reinterpret_cast<const uint8_t*>(src + i)));
#else
    memcpy(dst + i, src + i, 64);
#endif
  }
  if (i < bytes) memcpy(dst + i, src + i, size_t(bytes - i));
}

void stream_copy(char* dst, const char* src, int64_t bytes) {
#if defined(__AVX512F__)
  constexpr int64_t step = 64;
#elif defined(__AVX2__)
  constexpr int64_t step = 32;
#endif
#if defined(__AVX2__)
  int64_t head = (step - int64_t(reinterpret_cast<uintptr_t>(dst) % step)) % step;
  head = head < bytes ? head : bytes;
  memcpy(dst, src, size_t(head));
  int64_t i = head;
  for (; i + step <= bytes; i += step) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), _mm512_loadu_si512(src + i));
#else
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
#endif
  }
  memcpy(dst + i, src + i, size_t(bytes - i));
#else
  copy(dst, src, bytes);  // Arm cores leave write-allocate by themselves when they see whole lines go by
#endif
}

template <class Row>
inline void for_rows(const cpu::CopyGrid g, const cpu::CopyPair* pairs, int64_t count,
                     Row&& row) {  // g by value: a store could change a reference's fields
  for (int64_t i = 0; i < count; i++)
    for (int64_t a = 0; a < g.outer; a++)
      for (int64_t b = 0; b < g.inner; b++)
        row(pairs[i].dst + a * g.dst_outer + b * g.dst_inner, pairs[i].src + a * g.src_outer + b * g.src_inner,
            g.bytes);
}

void copy_grids(const cpu::CopyGrid& g, const cpu::CopyPair* pairs, int64_t count, bool stream) {
  const bool whole_lines = g.bytes % 64 == 0;
#if defined(__aarch64__)
  if (whole_lines && g.inner > 1 &&
      g.src_inner != g.bytes)  // rows that skip over others (K beside V) would be met cold
    return for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(src + i + 1024);
        vst1q_u8_x4(reinterpret_cast<uint8_t*>(dst + i), vld1q_u8_x4(reinterpret_cast<const uint8_t*>(src + i)));
      }
    });
  if (whole_lines)
    return for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 64)
        vst1q_u8_x4(reinterpret_cast<uint8_t*>(dst + i), vld1q_u8_x4(reinterpret_cast<const uint8_t*>(src + i)));
    });
#else
  if (whole_lines && !stream)
    return for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 64) memcpy(dst + i, src + i, 64);
    });
#endif
  if (stream)
    for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) { stream_copy(dst, src, bytes); });
  else for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) { copy(dst, src, bytes); });
}

// Square tiles of 16-byte rows: n rows of n elements, turned by log2(n) rounds of
// interleaving the two halves of the list.
template <class T> struct Lanes {
  static constexpr int n = 16 / int(sizeof(T));
  typedef T Vector __attribute__((vector_size(16)));
};

template <class T, int... I>
inline void interleave(const typename Lanes<T>::Vector a, const typename Lanes<T>::Vector b,
                       typename Lanes<T>::Vector* lo, typename Lanes<T>::Vector* hi, std::integer_sequence<int, I...>) {
  constexpr int n = Lanes<T>::n;
  typedef T Index __attribute__((vector_size(16)));
  *lo = __builtin_shuffle(a, b, Index{T(I / 2 + (I % 2 ? n : 0))...});
  *hi = __builtin_shuffle(a, b, Index{T(I / 2 + n / 2 + (I % 2 ? n : 0))...});
}

template <class T>
inline void turn_tile(typename Lanes<T>::Vector (&rows)[Lanes<T>::n], const char* src, int64_t src_stride) {
  constexpr int n = Lanes<T>::n;
  typename Lanes<T>::Vector next[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) memcpy(&rows[i], src + i * src_stride, 16);
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; i++)
      interleave<T>(rows[i], rows[i + n / 2], &next[2 * i], &next[2 * i + 1], std::make_integer_sequence<int, n>());
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) rows[i] = next[i];
  }
}

// Two tiles side by side along the destination, in registers: what leaves is 32 bytes of each row, or whole lines where
// rows of 32 bytes follow each other.
template <class T>
inline void turn_two(char* dst, int64_t dst_stride, const char* src, int64_t src_stride) {
  constexpr int n = Lanes<T>::n;
  typename Lanes<T>::Vector a[n], b[n];
  turn_tile<T>(a, src, src_stride);
  turn_tile<T>(b, src + n * src_stride, src_stride);
#pragma GCC unroll 16
  for (int i = 0; i < n; i += 2) {
    char* to = dst + i * dst_stride;
#if defined(__aarch64__)
    const uint8x16x4_t line = {uint8x16_t(a[i]), uint8x16_t(b[i]), uint8x16_t(a[i + 1]), uint8x16_t(b[i + 1])};
    if (dst_stride == 32) {
      vst1q_u8_x4(reinterpret_cast<uint8_t*>(to), line);
      continue;
    }
#endif
    memcpy(to, &a[i], 16), memcpy(to + 16, &b[i], 16);
    memcpy(to + dst_stride, &a[i + 1], 16), memcpy(to + dst_stride + 16, &b[i + 1], 16);
  }
}

// The next place's source, asked for a share at a time while this one is turned: its rows are far apart, so nobody else
// does, and all at once would stall.
struct Ahead {
  const char* src;  // NULL: nothing follows
  int64_t stride, rows, bytes, done = 0;
  void ask(int64_t part, int64_t parts) {
    if (!src) return;
    for (const int64_t end = rows * part / parts; done < end; done++)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(src + done * stride + i);
  }
};

template <class T>
inline void transpose_one(const cpu::Transpose& t, char* dst, const char* src, Ahead ahead) {
  constexpr int n = Lanes<T>::n, size = int(sizeof(T));
  const int64_t across = t.across / n * n, down = t.down / n * n;
  int64_t j = 0;
  for (; j + 2 * n <= down; j += 2 * n) {  // the rows of the source stay in registers while i walks along them
    ahead.ask(j + 2 * n, down);
    for (int64_t i = 0; i < across; i += n)
      turn_two<T>(dst + i * t.dst_stride + j * size, t.dst_stride, src + j * t.src_stride + i * size, t.src_stride);
  }
  for (; j < down; j += n)
    for (int64_t i = 0; i < across; i += n) {
      typename Lanes<T>::Vector rows[n];
      turn_tile<T>(rows, src + j * t.src_stride + i * size, t.src_stride);
      for (int k = 0; k < n; k++) memcpy(dst + (i + k) * t.dst_stride + j * size, &rows[k], 16);
    }
  if (across == t.across && down == t.down) return;
  for (int64_t i = 0; i < t.across; i++)
    for (int64_t j = i < across ? down : 0; j < t.down; j++)
      memcpy(dst + i * t.dst_stride + j * size, src + j * t.src_stride + i * size, sizeof(T));
}

#if defined(__aarch64__)
// Two-byte elements by hand, whole lines out: left to the compiler, addresses are spilled between the stores, and a
// core that sees other stores between whole lines reads every line it is about to overwrite.
//
// Eight rows of four elements become four rows of eight.
inline void turn_8x4(const char* src, int64_t stride, uint8x16_t* r0, uint8x16_t* r1, uint8x16_t* r2, uint8x16_t* r3) {
  const auto load =
      [&](int k) {  // eight bytes into a whole register: through vld1_u16 and vcombine_u16 it takes an instruction more
        uint16x8_t low;
        asm("ldr %d0, %1" : "=w"(low) : "m"(*reinterpret_cast<const uint64_t*>(src + k * stride)));
        return low;
      };
  const uint16x8_t a0 = vzip1q_u16(load(0), load(4)), a1 = vzip1q_u16(load(1), load(5)),
                   a2 = vzip1q_u16(load(2), load(6)), a3 = vzip1q_u16(load(3), load(7));
  const uint16x8_t b0 = vzip1q_u16(a0, a2), b1 = vzip2q_u16(a0, a2), b2 = vzip1q_u16(a1, a3), b3 = vzip2q_u16(a1, a3);
  *r0 = vreinterpretq_u8_u16(vzip1q_u16(b0, b2)), *r1 = vreinterpretq_u8_u16(vzip2q_u16(b0, b2));
  *r2 = vreinterpretq_u8_u16(vzip1q_u16(b1, b3)), *r3 = vreinterpretq_u8_u16(vzip2q_u16(b1, b3));
}

// Whether DC ZVA clears lines of 64 bytes here: a line cleared first is not read from memory before it is written.
inline bool can_clear_lines() {
  uint64_t id;
  asm("mrs %0, dczid_el0" : "=r"(id));
  return (id & 31) == 4;
}

// A line of each of four rows of the destination at a time, along whole rows: `across` a multiple of 4, `down` of 32.
// Four streams of lines are more than a core recognises, so each line is cleared first (measured on Neoverse N1: 54 %
// of memcpy, without 37); the source is read front to back and needs no asking ahead.
inline void transpose_lines_2(const cpu::Transpose& t, char* dst, const char* src) {
  const int64_t from_step = t.src_stride, to_step = t.dst_stride, across = t.across, down = t.down;
  const bool clear = can_clear_lines() && reinterpret_cast<uintptr_t>(dst) % 64 == 0 && to_step % 64 == 0;
  for (int64_t i = 0; i < across; i += 4) {
    const char* from = src + 2 * i;
    auto* to = reinterpret_cast<uint8_t*>(dst + i * to_step);
    for (int64_t j = 0; j < down; j += 32, from += 32 * from_step, to += 64) {
      uint8x16x4_t l0, l1, l2, l3;
      for (int k = 0; k < 4 && clear; k++) asm volatile("dc zva, %0" : : "r"(to + k * to_step) : "memory");
      turn_8x4(from, from_step, &l0.val[0], &l1.val[0], &l2.val[0], &l3.val[0]);
      turn_8x4(from + 8 * from_step, from_step, &l0.val[1], &l1.val[1], &l2.val[1], &l3.val[1]);
      turn_8x4(from + 16 * from_step, from_step, &l0.val[2], &l1.val[2], &l2.val[2], &l3.val[2]);
      turn_8x4(from + 24 * from_step, from_step, &l0.val[3], &l1.val[3], &l2.val[3], &l3.val[3]);
      vst1q_u8_x4(to, l0), vst1q_u8_x4(to + to_step, l1), vst1q_u8_x4(to + 2 * to_step, l2),
          vst1q_u8_x4(to + 3 * to_step, l3);
    }
  }
}

// Rows of 16 elements that follow each other at the destination (transposed V of 16-token blocks): two make a line.
// `across` a multiple of 4.
inline void transpose_rows_of_16(const cpu::Transpose& t, char* dst, const char* src, Ahead ahead) {
  for (int64_t i = 0; i < t.across; i += 4) {
    ahead.ask(i + 4, t.across);
    uint8x16x4_t l0, l1;
    turn_8x4(src + 2 * i, t.src_stride, &l0.val[0], &l0.val[2], &l1.val[0], &l1.val[2]);
    turn_8x4(src + 2 * i + 8 * t.src_stride, t.src_stride, &l0.val[1], &l0.val[3], &l1.val[1], &l1.val[3]);
    auto* at = reinterpret_cast<uint8_t*>(dst + 32 * i);
    vst1q_u8_x4(at, l0), vst1q_u8_x4(at + 64, l1);
  }
}
#endif

// 16-byte elements need no turning: a line of the destination is four of them. Two lines of each of its rows at a time:
// their eight rows of the source are then as many streams as a core follows.
inline void transpose_16(const cpu::Transpose& t, char* dst, const char* src, Ahead ahead) {
  constexpr int64_t kStrip = 8;
  const int64_t from_step = t.src_stride, to_step = t.dst_stride, across = t.across;
  int64_t strip = 0;
  for (; strip + kStrip <= t.down; strip += kStrip)
    for (int64_t i = 0; i < across; i++) {
      ahead.ask(strip * across + (i + 1) * kStrip, t.down * across);
      for (int64_t j = strip; j < strip + kStrip; j += 4) {
        const char* from = src + j * from_step + i * 16;
        char* to = dst + i * to_step + j * 16;
#if defined(__aarch64__)
        const auto* p = reinterpret_cast<const uint8_t*>(from);
        const uint8x16x4_t line = {vld1q_u8(p), vld1q_u8(p + from_step), vld1q_u8(p + 2 * from_step),
                                   vld1q_u8(p + 3 * from_step)};
        vst1q_u8_x4(reinterpret_cast<uint8_t*>(to), line);
#else
        for (int64_t k = 0; k < 4; k++) memcpy(to + 16 * k, from + k * from_step, 16);
#endif
      }
    }
  for (int64_t i = 0; i < across; i++)
    for (int64_t j = strip; j < t.down; j++) memcpy(dst + i * to_step + j * 16, src + j * from_step + i * 16, 16);
}

// A function for each size: all in one would leave the loops without registers.
template <class One>
__attribute__((noinline)) void transpose_all(const cpu::Transpose t, const cpu::CopyPair* pairs, int64_t count,
                                             One one) {
  for (int64_t n = 0; n < count; n++)
    one(t, pairs[n].dst, pairs[n].src,
        Ahead{n + 1 < count ? pairs[n + 1].src : nullptr, t.src_stride, t.down, t.across * t.bytes});
}

void transpose(const cpu::Transpose& t, const cpu::CopyPair* pairs, int64_t count) {
  auto with = [&](auto one) { transpose_all(t, pairs, count, one); };
#if defined(__aarch64__)
  if (t.bytes == 2 && t.across % 4 == 0 && t.down % 32 == 0)
    return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead) { transpose_lines_2(s, dst, src); });
  if (t.bytes == 2 && t.across % 4 == 0 && t.down == 16 && t.dst_stride == 32)
    return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) {
      transpose_rows_of_16(s, dst, src, ahead);
    });
#endif
  switch (t.bytes) {
    case 1:
      return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) {
        transpose_one<uint8_t>(s, dst, src, ahead);
      });
    case 2:
      return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) {
        transpose_one<uint16_t>(s, dst, src, ahead);
      });
    case 4:
      return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) {
        transpose_one<uint32_t>(s, dst, src, ahead);
      });
    case 8:
      return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) {
        transpose_one<uint64_t>(s, dst, src, ahead);
      });
    default:
      return with(
          [](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) { transpose_16(s, dst, src, ahead); });
  }
}

// Words of a row. The vector bodies keep keys as they lie beside the data, one lane a number.
struct DigestSums {
#if defined(__aarch64__)
  uint64x2_t first[2], second[2];
#elif defined(__AVX2__)
  __m256i first, second;
#endif
  uint64_t rest[2];
};

__attribute__((noinline)) void digest_rest(const char* data, int64_t bytes, const RowKey& key, uint32_t word,
                                           uint64_t* sums) {
  for (int64_t i = 0; i < bytes; i += kWordBytes, word++) {
    uint32_t numbers[4] = {};
    memcpy(numbers, data + i, size_t(bytes - i < kWordBytes ? bytes - i : kWordBytes));
    add_word(numbers, key, word, &sums[0], &sums[1]);
  }
}

#if defined(__aarch64__)
// `count` words, `stride` bytes apart.
inline void digest_words(const char* data, int64_t count, int64_t stride, const RowKey& key, uint32_t word,
                         DigestSums* sums) {
  const auto load = [](const char* p) { return vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(p))); };
  // Numbers 0 and 2 of two words meet numbers 1 and 3: keys lie as they do, and grow by four times themselves from pair
  // to pair.
  const uint32x4_t low = vreinterpretq_u32_u64(vcombine_u64(
      vcreate_u64(key.k01), vcreate_u64(key.k23)));  // not by way of memory: two stores do not forward to one load
  const uint32x4_t high = vreinterpretq_u32_u64(vcombine_u64(vcreate_u64(key.k23), vcreate_u64(key.k45)));
  const uint32_t m = 2 * word + 1;
  const uint32x4_t times = {m, m, m + 2, m + 2};
  const uint32x4_t k02 = vuzp1q_u32(low, low), k13 = vuzp2q_u32(low, low), k24 = vuzp1q_u32(high, high),
                   k35 = vuzp2q_u32(high, high);
  const uint32x4_t s02 = vshlq_n_u32(k02, 2), s13 = vshlq_n_u32(k13, 2), s24 = vshlq_n_u32(k24, 2),
                   s35 = vshlq_n_u32(k35, 2);
  uint32x4_t a02 = vmulq_u32(k02, times), a13 = vmulq_u32(k13, times), a24 = vmulq_u32(k24, times),
             a35 = vmulq_u32(k35, times);
  int64_t i = 0;
#pragma GCC unroll 8
  for (; i + 2 <= count; i += 2) {
    const uint32x4_t x = load(data + i * stride), y = load(data + (i + 1) * stride), even = vuzp1q_u32(x, y),
                     odd = vuzp2q_u32(x, y);
    const uint32x4_t x02 = vaddq_u32(even, a02), x13 = vaddq_u32(odd, a13), x24 = vaddq_u32(even, a24),
                     x35 = vaddq_u32(odd, a35);
    sums->first[0] = vmlal_u32(sums->first[0], vget_low_u32(x02), vget_low_u32(x13));
    sums->first[1] = vmlal_high_u32(sums->first[1], x02, x13);
    sums->second[0] = vmlal_u32(sums->second[0], vget_low_u32(x24), vget_low_u32(x35));
    sums->second[1] = vmlal_high_u32(sums->second[1], x24, x35);
    a02 = vaddq_u32(a02, s02), a13 = vaddq_u32(a13, s13), a24 = vaddq_u32(a24, s24), a35 = vaddq_u32(a35, s35);
  }
  if (i < count) digest_rest(data + i * stride, kWordBytes, key, word + uint32_t(i), sums->rest);
}
inline void digest_total(const DigestSums& s, uint64_t* sums) {
  sums[0] += s.rest[0] + vaddvq_u64(vaddq_u64(s.first[0], s.first[1])),
      sums[1] += s.rest[1] + vaddvq_u64(vaddq_u64(s.second[0], s.second[1]));
}
#elif defined(__AVX2__)
inline void digest_words(const char* data, int64_t count, int64_t stride, const RowKey& key, uint32_t word,
                         DigestSums* sums) {
  const auto load = [](const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); };
  const __m256i low = _mm256_broadcastsi128_si256(_mm_set_epi64x(int64_t(key.k23), int64_t(key.k01)));
  const __m256i high = _mm256_broadcastsi128_si256(_mm_set_epi64x(int64_t(key.k45), int64_t(key.k23)));
  const int m = int(2 * word + 1);
  const __m256i times = _mm256_set_m128i(_mm_set1_epi32(m + 2), _mm_set1_epi32(m));
  __m256i a = _mm256_mullo_epi32(low, times), b = _mm256_mullo_epi32(high, times);
  const __m256i a_step = _mm256_slli_epi32(low, 2),
                b_step = _mm256_slli_epi32(high, 2);  // two words on, m is four more
  int64_t i = 0;
  for (; i + 2 <= count; i += 2) {
    const __m256i words = _mm256_set_m128i(load(data + (i + 1) * stride), load(data + i * stride));
    const __m256i x = _mm256_add_epi32(words, a), y = _mm256_add_epi32(words, b);
    sums->first = _mm256_add_epi64(sums->first, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
    sums->second = _mm256_add_epi64(sums->second, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
    a = _mm256_add_epi32(a, a_step), b = _mm256_add_epi32(b, b_step);
  }
  if (i < count) digest_rest(data + i * stride, kWordBytes, key, word + uint32_t(i), sums->rest);
}
inline void digest_total(const DigestSums& s, uint64_t* sums) {
  alignas(32) uint64_t lanes[2][4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[0]), s.first),
      _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[1]), s.second);
  for (int k = 0; k < 2; k++) sums[k] += s.rest[k] + lanes[k][0] + lanes[k][1] + lanes[k][2] + lanes[k][3];
}
#else
inline void digest_words(const char* data, int64_t count, int64_t stride, const RowKey& key, uint32_t word,
                         DigestSums* sums) {
  for (int64_t i = 0; i < count; i++) digest_rest(data + i * stride, kWordBytes, key, word + uint32_t(i), sums->rest);
}
inline void digest_total(const DigestSums& s, uint64_t* sums) { sums[0] += s.rest[0], sums[1] += s.rest[1]; }
#endif

constexpr int64_t kDigestAhead = 4;

// A row's key is made while the one before is summed: its multiplications are a chain. Rows some way ahead are asked
// for: they need not follow each other (K beside V), and summing is too slow for a core to run ahead on its own.
template <class Row>
inline void for_digest_rows(const cpu::DigestShape& shape, const cpu::DigestRow* rows, int64_t count, Row&& row) {
  const int64_t bytes = shape.bytes;
  const bool is_scattered = shape.is_scattered;
  RowKey next = row_key(rows[0].seed);
  for (int64_t r = 0; r < count; r++) {
    const RowKey key = next;
    if (r + 1 < count) next = row_key(rows[r + 1].seed);
    if (is_scattered && r + kDigestAhead < count)
      for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows[r + kDigestAhead].data + i);
    row(rows[r].data, key, rows[r].word);
  }
}

// Whole rows of 128 and 256 bytes, unrolled; rows in pieces of one word; anything.
void digest_rows(const cpu::DigestShape& shape, const cpu::DigestRow* rows, int64_t count, uint64_t* sums) {
  const int64_t bytes = shape.bytes, pieces = shape.pieces, stride = shape.stride, words = bytes / kWordBytes;
  DigestSums mine = {};
  if (pieces == 1 && bytes == 256) {
    for_digest_rows(shape, rows, count, [&](const char* data, const RowKey& key, uint32_t word) {
      digest_words(data, 16, kWordBytes, key, word, &mine);
    });
  } else if (pieces == 1 && bytes == 128) {
    for_digest_rows(shape, rows, count, [&](const char* data, const RowKey& key, uint32_t word) {
      digest_words(data, 8, kWordBytes, key, word, &mine);
    });
  } else if (bytes == kWordBytes) {
    for_digest_rows(shape, rows, count, [&](const char* data, const RowKey& key, uint32_t word) {
      digest_words(data, pieces, stride, key, word, &mine);
    });
  } else {
    for_digest_rows(shape, rows, count, [&](const char* data, const RowKey& key, uint32_t word) {
      for (int64_t p = 0; p < pieces; p++) {
        const uint32_t at = word + uint32_t(p * words);
        digest_words(data + p * stride, words, kWordBytes, key, at, &mine);
        if (bytes % kWordBytes)
          digest_rest(data + p * stride + words * kWordBytes, bytes % kWordBytes, key, at + uint32_t(words), mine.rest);
      }
    });
  }
  digest_total(mine, sums);
}

void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

#define KVX_CODE_ROW(fn, io)                                                                                       \
  &fn##_row<io, KVX_DTYPE_F8_E4M3>, &fn##_row<io, KVX_DTYPE_F8_E5M2>, nullptr, nullptr, nullptr, nullptr, nullptr, \
      &fn##_row<io, KVX_DTYPE_S8>, &fn##_row<io, KVX_DTYPE_S4>, &fn##_row<io, KVX_DTYPE_E2M1>
#define KVX_ENCODE_FROM(io)                                                                            \
  {nullptr, &cast_row<io, KVX_DTYPE_F16>, &cast_row<io, KVX_DTYPE_BF16>, &cast_row<io, KVX_DTYPE_F32>, \
   KVX_CODE_ROW(encode, io)}
#define KVX_DECODE_TO(fn, c) {nullptr, &fn<c, KVX_DTYPE_F16>, &fn<c, KVX_DTYPE_BF16>, &fn<c, KVX_DTYPE_F32>}
#define KVX_NO_DECODE {nullptr, nullptr, nullptr, nullptr}

}  // namespace
}  // namespace KVX_ISA

namespace cpu {
#define KVX_JOIN2(a, b) a##b
#define KVX_JOIN(a, b) KVX_JOIN2(a, b)
using namespace KVX_ISA;

const RowTable KVX_JOIN(rows_, KVX_ISA) = {
    {{nullptr}, KVX_ENCODE_FROM(KVX_DTYPE_F16), KVX_ENCODE_FROM(KVX_DTYPE_BF16), KVX_ENCODE_FROM(KVX_DTYPE_F32)},
    {KVX_NO_DECODE, KVX_DECODE_TO(cast_row, KVX_DTYPE_F16), KVX_DECODE_TO(cast_row, KVX_DTYPE_BF16),
     KVX_DECODE_TO(cast_row, KVX_DTYPE_F32), KVX_DECODE_TO(decode_row, KVX_DTYPE_F8_E4M3),
     KVX_DECODE_TO(decode_row, KVX_DTYPE_F8_E5M2), KVX_NO_DECODE, KVX_NO_DECODE, KVX_NO_DECODE, KVX_NO_DECODE,
     KVX_NO_DECODE, KVX_DECODE_TO(decode_row, KVX_DTYPE_S8), KVX_DECODE_TO(decode_row, KVX_DTYPE_S4),
     KVX_DECODE_TO(decode_row, KVX_DTYPE_E2M1)},
    {nullptr, &amax_row<KVX_DTYPE_F16>, &amax_row<KVX_DTYPE_BF16>, &amax_row<KVX_DTYPE_F32>},
    &copy,
    &stream_copy,
    &copy_grids,
    &transpose,
    &digest_rows,
    &stream_fence,
    {nullptr, &rotate_row<KVX_DTYPE_F16>, &rotate_row<KVX_DTYPE_BF16>, &rotate_row<KVX_DTYPE_F32>},
};

}  // namespace cpu
}  // namespace kvx
