// Compiled once per instruction set: KVX_ISA is plain, avx2 or avx512 (CMakeLists.txt sets it and the flags).
#ifndef KVX_ISA
#define KVX_ISA plain
#endif
#define KVX_ISA_NAMESPACE KVX_ISA
#include "rows.h"

#include "../format.h"

#if defined(__AVX2__)
#include <immintrin.h>
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

template <int IO, int C>
void encode_row(char* dst, const char* src, int64_t n, float scale) {
  auto* s = reinterpret_cast<const typename Float<IO>::Raw*>(src);
  auto* d = reinterpret_cast<uint8_t*>(dst);
  if (scale == 1.0f) {  // x / 1 is x
    for (int64_t i = 0; i < n; i++) d[i] = Code<C>::encode(Float<IO>::load(s[i]));
  } else {
    for (int64_t i = 0; i < n; i++) d[i] = Code<C>::encode(Float<IO>::load(s[i]) / scale);
  }
}

template <int IO, int C>
void encode_nibbles(char* dst, const char* src, int64_t n, float scale) {
  auto* s = reinterpret_cast<const typename Float<IO>::Raw*>(src);
  auto* d = reinterpret_cast<uint8_t*>(dst);
  for (int64_t i = 0; i < n / 2; i++) {
    uint32_t lo = Code<C>::encode(Float<IO>::load(s[2 * i]) / scale), hi = Code<C>::encode(Float<IO>::load(s[2 * i + 1]) / scale);
    d[i] = uint8_t(lo | hi << 4);
  }
}

template <int C, int IO>
void decode_row(char* dst, const char* src, int64_t n, float scale) {
  auto* s = reinterpret_cast<const uint8_t*>(src);
  auto* d = reinterpret_cast<typename Float<IO>::Raw*>(dst);
  for (int64_t i = 0; i < n; i++) d[i] = Float<IO>::store(Code<C>::decode(s[i]) * scale);
}

template <int C, int IO>
void decode_nibbles(char* dst, const char* src, int64_t n, float scale) {
  auto* s = reinterpret_cast<const uint8_t*>(src);
  auto* d = reinterpret_cast<typename Float<IO>::Raw*>(dst);
  for (int64_t i = 0; i < n / 2; i++) {
    d[2 * i] = Float<IO>::store(Code<C>::decode(s[i] & 15) * scale);
    d[2 * i + 1] = Float<IO>::store(Code<C>::decode(s[i] >> 4) * scale);
  }
}

// Magnitudes of floats order as their bits do, so the maximum is an integer one and vectorises in any order.
template <int IO>
float amax_row(const char* src, int64_t n) {
  auto* s = reinterpret_cast<const typename Float<IO>::Raw*>(src);
  uint32_t best = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t b = bits_of(Float<IO>::load(s[i])) & 0x7fffffffu;
    b = b < 0x7f800000u ? b : 0u;
    best = b > best ? b : best;
  }
  return float_of(best);
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
  memcpy(dst, src, size_t(bytes));  // Arm cores leave write-allocate by themselves when they see a stream
#endif
}

void stream_fence() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

#define KVX_CODE_ROW(fn, io)                                                                                  \
  &fn##_row<io, KVX_DTYPE_F8_E4M3>, &fn##_row<io, KVX_DTYPE_F8_E5M2>, nullptr, nullptr, nullptr, nullptr, nullptr, \
      &fn##_row<io, KVX_DTYPE_S8>, &fn##_nibbles<io, KVX_DTYPE_S4>, &fn##_nibbles<io, KVX_DTYPE_E2M1>
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
     KVX_NO_DECODE, KVX_NO_DECODE, KVX_DECODE_TO(decode_row, KVX_DTYPE_S8), KVX_DECODE_TO(decode_nibbles, KVX_DTYPE_S4),
     KVX_DECODE_TO(decode_nibbles, KVX_DTYPE_E2M1)},
    {nullptr, &amax_row<KVX_DTYPE_F16>, &amax_row<KVX_DTYPE_BF16>, &amax_row<KVX_DTYPE_F32>},
    &stream_copy,
    &stream_fence,
};

}  // namespace cpu
}  // namespace kvx
