// Rows of 16-bit floats, bytes and 4-bit numbers on AVX2 and AVX-512. Included by attend_loops.h, in its namespace.

struct F16 : Exact {
  static constexpr int kParts = 2, kBytes = 2;
  using Raw = Halves;
  static Raw read(const char* p) { return Halves::read(p); }
  static Vec part(const Raw& raw, int i) {
#if defined(__AVX512F__)
    return Vec(_mm512_maskz_cvtph_ps(0xffff, __m256i(raw.half[i])));  // maskz: gcc 12 warns of its own _mm512_cvtph_ps
#else
    return Vec(_mm256_cvtph_ps(__m128i(raw.half[i])));
#endif
  }
};

struct S8 : Exact {
  static constexpr int kParts = 1, kBytes = 1;
  using Raw = Vec;
  static Raw read(const char* p) {
#if defined(__AVX512F__)
    return Vec(_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(p))));
#else
    return Vec(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))));
#endif
  }
  static Vec part(Raw raw, int) { return raw; }
};

#if defined(__AVX512F__)
KVX_INLINE Halves halves_of(__m512i x) {
  return {{Halves::Half(_mm512_castsi512_si256(x)), Halves::Half(_mm512_extracti64x4_epi64(x, 1))}};
}
#else
KVX_INLINE Halves halves_of(__m256i x) {
  return {{Halves::Half(_mm256_castsi256_si128(x)), Halves::Half(_mm256_extracti128_si256(x, 1))}};
}
#endif

// fp8 by way of f16, whose conversion takes subnormal numbers at full speed. Moved into f32's places instead, fp8's
// subnormal numbers would be f32's, and a multiplication by such a number takes a hundred cycles.
struct E4M3 {  // the number times 2^-8, but for NaN, which comes out as 480 times that unless it is kept
  static constexpr float kLiftIn = 16, kLiftOut = 16;
  static constexpr int kParts = 2, kBytes = 1;
  using Raw = Halves;
  template <bool kKeepsNan = false>
  static Raw read(const char* p) {
    // The sign stays above: bit 15, and 14, which is cleared.
#if defined(__AVX512F__)
    const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(load<__m256i>(p)), 7), most = _mm512_set1_epi16(0x3f80);
    __m512i half = _mm512_and_si512(wide, _mm512_set1_epi16(int16_t(0xbfff)));
    if constexpr (kKeepsNan)
      half = _mm512_mask_mov_epi16(half, _mm512_cmpeq_epi16_mask(_mm512_and_si512(half, most), most),
                                   _mm512_set1_epi16(0x7fff));
#else
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load<__m128i>(p)), 7), most = _mm256_set1_epi16(0x3f80);
    __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff)));
    if constexpr (kKeepsNan)
      half = _mm256_or_si256(
          half, _mm256_and_si256(_mm256_cmpeq_epi16(_mm256_and_si256(half, most), most), _mm256_set1_epi16(0x7fff)));
#endif
    return halves_of(half);
  }
  static Vec part(const Raw& raw, int i) { return F16::part(raw, i); }
};

struct E5M2 : Exact {  // f16's upper byte
  static constexpr int kParts = 2, kBytes = 1;
  using Raw = Halves;
  template <bool = true>
  static Raw read(const char* p) {
#if defined(__AVX512F__)
    const __m512i half = _mm512_slli_epi16(_mm512_cvtepu8_epi16(load<__m256i>(p)), 8);
#else
    const __m256i half = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load<__m128i>(p)), 8);
#endif
    return halves_of(half);
  }
  static Vec part(const Raw& raw, int i) { return F16::part(raw, i); }
};

// ---- rows as f32

template <class T>
KVX_INLINE void widen_fp8(float* to, const char* row, int64_t n, float scale) {
  constexpr int64_t kStep = 2 * W;
  const auto step = [scale](float* out, const char* in) {
    const typename T::Raw raw = T::template read<true>(in);
    for (int i = 0; i < 2; i++) store(out + i * W, T::part(raw, i) * (T::kLiftIn * T::kLiftOut) * scale);
  };
  int64_t d = 0;
  for (; d + kStep <= n; d += kStep) step(to + d, row + d);
  if (d == n) return;
  char rest[kStep] = {};
  float last[kStep];
  memcpy(rest, row + d, size_t(n - d));
  step(last, rest);
  memcpy(to + d, last, size_t(n - d) * 4);
}

template <const Nibbles& kCodes>
KVX_INLINE void widen_nibbles(float* to, const char* row, int64_t n, float scale) {
  const __m128i low_of = load<__m128i>(kCodes.low), high_of = load<__m128i>(kCodes.high), nibble = _mm_set1_epi8(15);
  const __m256 by = _mm256_set1_ps(scale);
  const auto eight = [&](float* out, __m128i bf16) {
    _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bf16), 16)), by));
  };
  const auto sixteen = [&](float* out, __m128i codes) {
    const __m128i low = _mm_shuffle_epi8(low_of, codes), high = _mm_shuffle_epi8(high_of, codes);
    eight(out, _mm_unpacklo_epi8(low, high)), eight(out + 8, _mm_unpackhi_epi8(low, high));
  };
  const auto split = [&](__m128i bytes, auto&& use) {  // the codes of bytes 0..7, and those of 8..15
    const __m128i even = _mm_and_si128(bytes, nibble), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
    use(_mm_unpacklo_epi8(even, odd), _mm_unpackhi_epi8(even, odd));
  };
  int64_t d = 0;
  for (; d + 32 <= n; d += 32)
    split(load<__m128i>(row + d / 2),
          [&](__m128i first, __m128i second) { sixteen(to + d, first), sixteen(to + d + 16, second); });
  if (d + 16 <= n) {  // a group of nvfp4
    split(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + d / 2)),
          [&](__m128i first, __m128i) { sixteen(to + d, first); });
    d += 16;
  }
  if (d == n) return;
  char rest[16] = {};
  float last[32];
  memcpy(rest, row + d / 2, size_t(n - d + 1) / 2);
  split(load<__m128i>(rest), [&](__m128i first, __m128i second) { sixteen(last, first), sixteen(last + 16, second); });
  memcpy(to + d, last, size_t(n - d) * 4);
}
