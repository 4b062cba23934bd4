// Compiled once per instruction set: KVX_ISA is plain, avx2 or avx512 (CMakeLists.txt sets it and the flags).
#ifndef KVX_ISA
#define KVX_ISA plain
#endif
#define KVX_ISA_NAMESPACE KVX_ISA
#include "rows.h"

#include <utility>

#include "../format.h"

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

// Work goes through short arrays, one simple loop a step: each loop then has one element width and vectorises everywhere,
// where a single loop from 16-bit floats to bytes does not. Rows go in blocks of 64, and what is left (or a small group of
// elements under one scale) in blocks of 16.
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

template <int IO, int C>
void encode_row(char* dst, const char* src, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) encode_block<IO, C, 64>(dst, src, i, 64, scale);
  for (; i + 16 <= n; i += 16) encode_block<IO, C, 16>(dst, src, i, 16, scale);
  if (i < n) encode_block<IO, C, 16>(dst, src, i, int(n - i), scale);
}

template <int C, int IO>
void decode_row(char* dst, const char* src, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) decode_block<C, IO, 64>(dst, src, i, 64, scale);
  for (; i + 16 <= n; i += 16) decode_block<C, IO, 16>(dst, src, i, 16, scale);
  if (i < n) decode_block<C, IO, 16>(dst, src, i, int(n - i), scale);
}

// Magnitudes of floats order as their bits do, so the maximum is an integer one and vectorises in any order.
template <int IO>
float amax_row(const char* src, int64_t n) {
  using Raw = typename Float<IO>::Raw;
  constexpr int kLanes = 32;
  constexpr Raw sign_off = Raw(Raw(~Raw(0)) >> 1);
  constexpr Raw infinity = IO == KVX_DTYPE_F32 ? Raw(0x7f800000u) : IO == KVX_DTYPE_BF16 ? Raw(0x7f80u) : Raw(0x7c00u);
  auto* s = reinterpret_cast<const Raw*>(src);
  Raw best[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; j++) {
      const Raw magnitude = Raw(s[i + j] & sign_off), old = best[j];
      const Raw m = Raw(magnitude & Raw(-Raw(magnitude < infinity)));  // a mask, not a branch: the loop vectorises
      best[j] = m > old ? m : old;
    }
  Raw most = 0;
  for (int j = 0; j < kLanes; j++) most = best[j] > most ? best[j] : most;
  for (; i < n; i++) {
    const Raw m = Raw(s[i] & sign_off);
    if (m < infinity && m > most) most = m;
  }
  return Float<IO>::load(most);
}

// Rows are a few hundred bytes. libc's memcpy writes such a piece in overlapping parts, which keeps a core from seeing whole
// cache lines go by (measured on Neoverse: 17 GB/s instead of 55); a loop of 64-byte moves does not.
void copy(char* dst, const char* src, int64_t bytes) {
  if (bytes >= 4096) {
    memcpy(dst, src, size_t(bytes));
    return;
  }
  int64_t i = 0;
  for (; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(src + i + 1024);  // rows that skip over others (K beside V) would be met cold
#if defined(__aarch64__)  // one store a line: in two halves, whether the core sees it whole depends on how the loop is placed
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
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + i)));
#endif
  }
  memcpy(dst + i, src + i, size_t(bytes - i));
#else
  copy(dst, src, bytes);  // Arm cores leave write-allocate by themselves when they see whole lines go by
#endif
}

template <class Row>
inline void for_rows(const cpu::CopyGrid g, const cpu::CopyPair* pairs, int64_t count, Row&& row) {  // g by value: a store could change a reference's fields
  for (int64_t i = 0; i < count; i++)
    for (int64_t a = 0; a < g.outer; a++)
      for (int64_t b = 0; b < g.inner; b++) row(pairs[i].dst + a * g.dst_outer + b * g.dst_inner, pairs[i].src + a * g.src_outer + b * g.src_inner, g.bytes);
}

void copy_grids(const cpu::CopyGrid& g, const cpu::CopyPair* pairs, int64_t count, bool stream) {
  const bool whole_lines = g.bytes % 64 == 0;
#if defined(__aarch64__)
  if (whole_lines && g.inner > 1 && g.src_inner != g.bytes)  // rows that skip over others (K beside V) would be met cold
    return for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(src + i + 1024);
        vst1q_u8_x4(reinterpret_cast<uint8_t*>(dst + i), vld1q_u8_x4(reinterpret_cast<const uint8_t*>(src + i)));
      }
    });
  if (whole_lines)
    return for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 64) vst1q_u8_x4(reinterpret_cast<uint8_t*>(dst + i), vld1q_u8_x4(reinterpret_cast<const uint8_t*>(src + i)));
    });
#else
  if (whole_lines && !stream)
    return for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) {
      for (int64_t i = 0; i < bytes; i += 64) memcpy(dst + i, src + i, 64);
    });
#endif
  if (stream) for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) { stream_copy(dst, src, bytes); });
  else for_rows(g, pairs, count, [](char* dst, const char* src, int64_t bytes) { copy(dst, src, bytes); });
}

// Square tiles of 16-byte rows: n rows of n elements, turned by log2(n) rounds of interleaving the two halves of the list.
template <class T> struct Lanes {
  static constexpr int n = 16 / int(sizeof(T));
  typedef T Vector __attribute__((vector_size(16)));
};

template <class T, int... I>
inline void interleave(const typename Lanes<T>::Vector a, const typename Lanes<T>::Vector b, typename Lanes<T>::Vector* lo, typename Lanes<T>::Vector* hi,
                       std::integer_sequence<int, I...>) {
  constexpr int n = Lanes<T>::n;
  typedef T Index __attribute__((vector_size(16)));
  *lo = __builtin_shuffle(a, b, Index{T(I / 2 + (I % 2 ? n : 0))...});
  *hi = __builtin_shuffle(a, b, Index{T(I / 2 + n / 2 + (I % 2 ? n : 0))...});
}

template <class T>
inline void turn_tile(char* dst, int64_t dst_stride, const char* src, int64_t src_stride) {
  using Vector = typename Lanes<T>::Vector;
  constexpr int n = Lanes<T>::n;
  Vector rows[n], next[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) memcpy(&rows[i], src + i * src_stride, 16);
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; i++) interleave<T>(rows[i], rows[i + n / 2], &next[2 * i], &next[2 * i + 1], std::make_integer_sequence<int, n>());
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) memcpy(dst + i * dst_stride, &rows[i], 16);
}

inline void copy_line(char* dst, const char* src) {
#if defined(__aarch64__)
  vst1q_u8_x4(reinterpret_cast<uint8_t*>(dst), vld1q_u8_x4(reinterpret_cast<const uint8_t*>(src)));
#else
  memcpy(dst, src, 64);
#endif
}

// Up to four tiles side by side along the destination are turned in a small buffer and leave it in whole lines.
template <class T>
inline void turn_tiles(int tiles, char* dst, int64_t dst_stride, const char* src, int64_t src_stride) {
  constexpr int n = Lanes<T>::n;
  alignas(64) char buffer[n * 64];
  const int64_t width = tiles * 16;
  for (int t = 0; t < tiles; t++) turn_tile<T>(buffer + t * 16, width, src + t * n * src_stride, src_stride);
  if (dst_stride == width && n * width % 64 == 0) {
    for (int64_t i = 0; i < n * width; i += 64) copy_line(dst + i, buffer + i);
  } else if (tiles == 4) {
    for (int i = 0; i < n; i++) copy_line(dst + i * dst_stride, buffer + i * 64);
  } else {
    for (int i = 0; i < n; i++) memcpy(dst + i * dst_stride, buffer + i * width, size_t(width));
  }
}

template <class T>
void transpose_as(const cpu::Transpose t, char* dst, const char* src) {
  constexpr int n = Lanes<T>::n, size = int(sizeof(T));
  const int64_t across = t.across / n * n, down = t.down / n * n;
  for (int64_t i = 0; i < across; i += n)
    for (int64_t j = 0; j < down;) {
      const int tiles = int(down - j >= 4 * n ? 4 : (down - j) / n);
      turn_tiles<T>(tiles, dst + i * t.dst_stride + j * size, t.dst_stride, src + j * t.src_stride + i * size, t.src_stride);
      j += tiles * n;
    }
  for (int64_t i = 0; i < t.across; i++)
    for (int64_t j = i < across ? down : 0; j < t.down; j++) memcpy(dst + i * t.dst_stride + j * size, src + j * t.src_stride + i * size, sizeof(T));
}

// 16-byte elements need no turning: a line of the destination is four of them.
void transpose_16(const cpu::Transpose t, char* dst, const char* src) {
  for (int64_t i0 = 0; i0 < t.across; i0 += 4)  // a line of the source
    for (int64_t j = 0; j < t.down; j += 4)
      for (int64_t i = i0; i < t.across && i < i0 + 4; i++) {
        alignas(16) char line[64];
        const int64_t count = t.down - j < 4 ? t.down - j : 4;
        for (int64_t k = 0; k < count; k++) memcpy(line + 16 * k, src + (j + k) * t.src_stride + i * 16, 16);
        char* to = dst + i * t.dst_stride + j * 16;
        if (count == 4) copy_line(to, line);
        else memcpy(to, line, size_t(count * 16));
      }
}

void transpose(const cpu::Transpose& t, char* dst, const char* src) {
  switch (t.bytes) {
    case 1: return transpose_as<uint8_t>(t, dst, src);
    case 2: return transpose_as<uint16_t>(t, dst, src);
    case 4: return transpose_as<uint32_t>(t, dst, src);
    case 8: return transpose_as<uint64_t>(t, dst, src);
    default: return transpose_16(t, dst, src);
  }
}

void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

#define KVX_CODE_ROW(fn, io)                                                                                  \
  &fn##_row<io, KVX_DTYPE_F8_E4M3>, &fn##_row<io, KVX_DTYPE_F8_E5M2>, nullptr, nullptr, nullptr, nullptr, nullptr, \
      &fn##_row<io, KVX_DTYPE_S8>, &fn##_row<io, KVX_DTYPE_S4>, &fn##_row<io, KVX_DTYPE_E2M1>
#define KVX_ENCODE_FROM(io) {nullptr, &cast_row<io, KVX_DTYPE_F16>, &cast_row<io, KVX_DTYPE_BF16>, &cast_row<io, KVX_DTYPE_F32>, KVX_CODE_ROW(encode, io)}
#define KVX_DECODE_TO(fn, c) {nullptr, &fn<c, KVX_DTYPE_F16>, &fn<c, KVX_DTYPE_BF16>, &fn<c, KVX_DTYPE_F32>}
#define KVX_NO_DECODE {nullptr, nullptr, nullptr, nullptr}

}  // namespace
}  // namespace KVX_ISA

namespace cpu {
#define KVX_JOIN2(a, b) a##b
#define KVX_JOIN(a, b) KVX_JOIN2(a, b)
#define KVX_TEXT2(a) #a
#define KVX_TEXT(a) KVX_TEXT2(a)
using namespace KVX_ISA;

const RowTable KVX_JOIN(rows_, KVX_ISA) = {
    KVX_TEXT(KVX_ISA),
    {{nullptr}, KVX_ENCODE_FROM(KVX_DTYPE_F16), KVX_ENCODE_FROM(KVX_DTYPE_BF16), KVX_ENCODE_FROM(KVX_DTYPE_F32)},
    {KVX_NO_DECODE, KVX_DECODE_TO(cast_row, KVX_DTYPE_F16), KVX_DECODE_TO(cast_row, KVX_DTYPE_BF16), KVX_DECODE_TO(cast_row, KVX_DTYPE_F32),
     KVX_DECODE_TO(decode_row, KVX_DTYPE_F8_E4M3), KVX_DECODE_TO(decode_row, KVX_DTYPE_F8_E5M2), KVX_NO_DECODE, KVX_NO_DECODE, KVX_NO_DECODE,
     KVX_NO_DECODE, KVX_NO_DECODE, KVX_DECODE_TO(decode_row, KVX_DTYPE_S8), KVX_DECODE_TO(decode_row, KVX_DTYPE_S4),
     KVX_DECODE_TO(decode_row, KVX_DTYPE_E2M1)},
    {nullptr, &amax_row<KVX_DTYPE_F16>, &amax_row<KVX_DTYPE_BF16>, &amax_row<KVX_DTYPE_F32>},
    &copy,
    &stream_copy,
    &copy_grids,
    &transpose,
    &stream_fence,
};

}  // namespace cpu
}  // namespace kvx
