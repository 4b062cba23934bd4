// Compiled once per instruction set: KVX_ISA is plain, avx2 or avx512 (CMakeLists.txt sets it and the flags).
#ifndef KVX_ISA
#define KVX_ISA plain
#endif
#define KVX_ISA_NAMESPACE KVX_ISA
#include "rows.h"

#include <utility>

#include "../digest.h"
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
inline void turn_tile(typename Lanes<T>::Vector (&rows)[Lanes<T>::n], const char* src, int64_t src_stride) {
  constexpr int n = Lanes<T>::n;
  typename Lanes<T>::Vector next[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; i++) memcpy(&rows[i], src + i * src_stride, 16);
#pragma GCC unroll 4
  for (int round = 1; round < n; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n / 2; i++) interleave<T>(rows[i], rows[i + n / 2], &next[2 * i], &next[2 * i + 1], std::make_integer_sequence<int, n>());
#pragma GCC unroll 16
    for (int i = 0; i < n; i++) rows[i] = next[i];
  }
}

// Two tiles side by side along the destination, in registers: what leaves is 32 bytes of each row, or whole lines where rows of 32
// bytes follow each other.
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

// The next place's source, asked for a share at a time while this one is turned: its rows are far apart, so nobody else does, and
// all at once would stall.
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
    for (int64_t i = 0; i < across; i += n) turn_two<T>(dst + i * t.dst_stride + j * size, t.dst_stride, src + j * t.src_stride + i * size, t.src_stride);
  }
  for (; j < down; j += n)
    for (int64_t i = 0; i < across; i += n) {
      typename Lanes<T>::Vector rows[n];
      turn_tile<T>(rows, src + j * t.src_stride + i * size, t.src_stride);
      for (int k = 0; k < n; k++) memcpy(dst + (i + k) * t.dst_stride + j * size, &rows[k], 16);
    }
  if (across == t.across && down == t.down) return;
  for (int64_t i = 0; i < t.across; i++)
    for (int64_t j = i < across ? down : 0; j < t.down; j++) memcpy(dst + i * t.dst_stride + j * size, src + j * t.src_stride + i * size, sizeof(T));
}

// 16-byte elements need no turning: a line of the destination is four of them.
inline void transpose_16(const cpu::Transpose& t, char* dst, const char* src, Ahead ahead) {
  const int64_t down = t.down / 4 * 4;
  for (int64_t i = 0; i < t.across; i++) {
    ahead.ask(i + 1, t.across);
    int64_t j = 0;
    for (; j < down; j += 4) {
      const char* from = src + j * t.src_stride + i * 16;
      char* to = dst + i * t.dst_stride + j * 16;
#if defined(__aarch64__)
      const auto* p = reinterpret_cast<const uint8_t*>(from);
      const uint8x16x4_t line = {vld1q_u8(p), vld1q_u8(p + t.src_stride), vld1q_u8(p + 2 * t.src_stride), vld1q_u8(p + 3 * t.src_stride)};
      vst1q_u8_x4(reinterpret_cast<uint8_t*>(to), line);
#else
      for (int64_t k = 0; k < 4; k++) memcpy(to + 16 * k, from + k * t.src_stride, 16);
#endif
    }
    for (; j < t.down; j++) memcpy(dst + i * t.dst_stride + j * 16, src + j * t.src_stride + i * 16, 16);
  }
}

// A function for each size: all in one would leave the loops without registers.
template <class One>
__attribute__((noinline)) void transpose_all(const cpu::Transpose t, const cpu::CopyPair* pairs, int64_t count, One one) {
  for (int64_t n = 0; n < count; n++) one(t, pairs[n].dst, pairs[n].src, Ahead{n + 1 < count ? pairs[n + 1].src : nullptr, t.src_stride, t.down, t.across * t.bytes});
}

void transpose(const cpu::Transpose& t, const cpu::CopyPair* pairs, int64_t count) {
  auto with = [&](auto one) { transpose_all(t, pairs, count, one); };
  switch (t.bytes) {
    case 1: return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) { transpose_one<uint8_t>(s, dst, src, ahead); });
    case 2: return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) { transpose_one<uint16_t>(s, dst, src, ahead); });
    case 4: return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) { transpose_one<uint32_t>(s, dst, src, ahead); });
    case 8: return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) { transpose_one<uint64_t>(s, dst, src, ahead); });
    default: return with([](const cpu::Transpose& s, char* dst, const char* src, Ahead ahead) { transpose_16(s, dst, src, ahead); });
  }
}

void digest_words(const char* data, int64_t words, uint64_t first_key, uint64_t second_key, uint64_t* sums) {
  int64_t i = 0;
#if defined(__aarch64__)
  // A sum of 32-bit lanes adds both halves of a word to both halves of its key.
  uint64x2_t a = {first_key, first_key + kGolden}, b = {second_key, second_key + kGolden}, first = vdupq_n_u64(0), second = first;
  const uint64x2_t step = vdupq_n_u64(2 * kGolden);
  for (; i + 2 <= words; i += 2) {
    const uint32x4_t w = vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(data + 8 * i)));
    const uint64x2_t x = vreinterpretq_u64_u32(vaddq_u32(w, vreinterpretq_u32_u64(a))), y = vreinterpretq_u64_u32(vaddq_u32(w, vreinterpretq_u32_u64(b)));
    first = vmlal_u32(first, vmovn_u64(x), vshrn_n_u64(x, 32));
    second = vmlal_u32(second, vmovn_u64(y), vshrn_n_u64(y, 32));
    a = vaddq_u64(a, step), b = vaddq_u64(b, step);
  }
  sums[0] += vaddvq_u64(first), sums[1] += vaddvq_u64(second);
#elif defined(__AVX2__)
  const auto keys = [](uint64_t k) { return _mm256_set_epi64x(int64_t(k + 3 * kGolden), int64_t(k + 2 * kGolden), int64_t(k + kGolden), int64_t(k)); };
  __m256i a = keys(first_key), b = keys(second_key), first = _mm256_setzero_si256(), second = first;
  const __m256i step = _mm256_set1_epi64x(int64_t(4 * kGolden));
  for (; i + 4 <= words; i += 4) {
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 8 * i)), x = _mm256_add_epi32(w, a), y = _mm256_add_epi32(w, b);
    first = _mm256_add_epi64(first, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
    second = _mm256_add_epi64(second, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
    a = _mm256_add_epi64(a, step), b = _mm256_add_epi64(b, step);
  }
  alignas(32) uint64_t lanes[2][4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[0]), first), _mm256_store_si256(reinterpret_cast<__m256i*>(lanes[1]), second);
  for (int k = 0; k < 2; k++) sums[k] += lanes[k][0] + lanes[k][1] + lanes[k][2] + lanes[k][3];
#endif
  for (; i < words; i++) {
    uint64_t word;
    memcpy(&word, data + 8 * i, 8);
    sums[0] += word_term(word, first_key + uint64_t(i) * kGolden), sums[1] += word_term(word, second_key + uint64_t(i) * kGolden);
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
    &digest_words,
    &stream_fence,
};

}  // namespace cpu
}  // namespace kvx
