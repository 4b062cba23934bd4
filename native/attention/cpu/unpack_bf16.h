// Rows of 8 and of 4 bits as bf16, exactly, for what multiplies tiles (attend_amx.h). Included by attend.cpp, in its
// namespace. A scale of a group is multiplied in, which is exact for those it takes; scales of rows multiply scores and
// weights later.

// The upper and the lower byte of the bf16 number of each code, without its sign: 128 of them.
struct Codes {
  uint8_t high[128], low[128];
};
constexpr uint16_t bf16_of(int mantissa, int exponent) {  // mantissa * 2^exponent, exactly; the mantissa up to 8 bits
  if (mantissa == 0) return 0;
  while (mantissa < 128) mantissa *= 2, exponent--;
  return uint16_t((exponent + 7 + 127) << 7 | (mantissa & 127));
}
template <class F>
constexpr Codes make_codes(F&& of) {
  Codes codes = {};
  for (int i = 0; i < 128; i++) codes.high[i] = uint8_t(of(i) >> 8), codes.low[i] = uint8_t(of(i));
  return codes;
}
constexpr uint16_t kNaN = 0x7fc0, kInfinity = 0x7f80;
constexpr Codes kE4M3Codes = make_codes([](int c) {
  const int e = c >> 3, m = c & 7;
  return c == 127 ? kNaN : e ? bf16_of(8 + m, e - 10) : bf16_of(m, -9);
});
constexpr Codes kE5M2Codes = make_codes([](int c) {
  const int e = c >> 2, m = c & 3;
  return e == 31 ? (m ? kNaN : kInfinity) : e ? bf16_of(4 + m, e - 17) : bf16_of(m, -16);
});
constexpr Codes kS8Codes = make_codes([](int c) { return bf16_of(c, 0); });  // of a magnitude

// 64 codes as bf16. What unpacklo and unpackhi take apart lane by lane comes out in order.
struct Pairs {
  __m512i half[2];
};
KVX_INLINE __m512i spread_lanes(__m512i x) {
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), x);
}
KVX_INLINE Pairs join_bytes(__m512i low, __m512i high) {
  return {{_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)}};
}
KVX_INLINE void store_halves(char* to, __m512i x, int64_t n) {  // up to 32
  if (n >= kPair) store(to, x);
  else if (n > 0) _mm512_mask_storeu_epi16(to, (__mmask32(1) << n) - 1, x);
}

template <const Codes& kCodes, bool kIsInteger>
struct ByteTable {
  const __m512i high0 = load<__m512i>(kCodes.high), high1 = load<__m512i>(kCodes.high + 64),
                low0 = load<__m512i>(kCodes.low), low1 = load<__m512i>(kCodes.low + 64), sign = _mm512_set1_epi8(-128);

  KVX_INLINE Pairs look_up(const char* row, int64_t n) const {  // the first n of 64
    const __m512i x = spread_lanes(n >= 64 ? load<__m512i>(row) : _mm512_maskz_loadu_epi8((uint64_t(1) << n) - 1, row));
    const __m512i code = kIsInteger ? _mm512_abs_epi8(x) : x;  // a look-up takes seven bits: -128 is 0 there
    __m512i high = _mm512_permutex2var_epi8(high0, code, high1);
    const __m512i low = _mm512_permutex2var_epi8(low0, code, low1);
    if constexpr (kIsInteger)
      high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(x, sign), _mm512_set1_epi8(0x43));
    return join_bytes(low, _mm512_ternarylogic_epi32(high, x, sign, 0xf8));  // high | (x & sign)
  }
};

template <const Codes& kCodes, bool kIsInteger>
void unpack_bytes(const cpu::TileRows& rows, int64_t head, int64_t bytes, char* to, int64_t stride,
                  const cpu::TileRows* next) {
  const ByteTable<kCodes, kIsInteger> table;
  each_packed(rows, head, bytes, next, [&](int64_t t, const char* row) {
    for (int64_t i = 0; i < bytes; i += 64) {
      const Pairs x = table.look_up(row + i, bytes - i);
      for (int h = 0; h < 2; h++) store_halves(to + t * stride + 2 * (i + h * kPair), x.half[h], bytes - i - h * kPair);
    }
  });
}

// 32 numbers of bf16 times 2^(code - 127), by adding to their exponents where no number leaves bf16's range.
KVX_INLINE __m512i scale_by_power(__m512i x, uint8_t code) {
  if (code >= 17 && code <= 239) {  // the least and the largest number of any type are 2^-16 and less than 2^16
    const __m512i exponent = _mm512_set1_epi16(0x7f80), bits = _mm512_and_si512(x, exponent);
    const __mmask32 is_number = _mm512_test_epi16_mask(bits, bits) & ~_mm512_cmpeq_epi16_mask(bits, exponent);
    return _mm512_mask_add_epi16(x, is_number, x, _mm512_set1_epi16(int16_t((code - 127) * 128)));
  }
  const Halves halves = load<Halves>(&x);
  const float scale = e8m0_to_f32(code);
  return __m512i(_mm512_cvtne2ps_pbh(__m512(BF16::part(halves, 1) * scale), __m512(BF16::part(halves, 0) * scale)));
}

template <const Codes& kCodes, bool kIsInteger>
void unpack_scaled_bytes(const cpu::TileRows& rows, int64_t head, int64_t n, const cpu::ByteScales& scales, char* to,
                         int64_t stride, const cpu::TileRows* next) {
  const ByteTable<kCodes, kIsInteger> table;
  each_packed(rows, head, n, next, [&](int64_t t, const char* row) {
    const uint8_t* scale = scales.at[t];
    for (int64_t i = 0; i < n; i += 64) {
      const Pairs x = table.look_up(row + i, n - i);
      for (int64_t h = 0; h < 2 && i + h * kPair < n; h++, scale += scales.group)
        store_halves(to + t * stride + 2 * (i + h * kPair), scale_by_power(x.half[h], *scale), n - i - h * kPair);
    }
  });
}

void split_row(const float* row, int64_t n, char* to) {
  for (int64_t d = 0; d < n; d += kPair) {
    Vec x[2] = {load<Vec>(row + d), load<Vec>(row + d + W)};
    store(to + d * 2, round_pair(x)), store(to + (n + d) * 2, round_pair(x));
  }
}

// Rows of 4 bits, the lower half of a byte first.
template <const Nibbles& kCodes>
void unpack_nibbles(const cpu::TileRows& rows, int64_t head, int64_t bytes, char* to, int64_t stride,
                    const cpu::TileRows* next) {
  const __m512i low_of = _mm512_broadcast_i32x4(load<__m128i>(kCodes.low)),
                high_of = _mm512_broadcast_i32x4(load<__m128i>(kCodes.high));
  each_packed(rows, head, bytes, next, [&](int64_t t, const char* row) {
    for (int64_t i = 0; i < bytes; i += 32) {
      const int64_t n = bytes - i;
      const __m512i x = _mm512_cvtepu8_epi16(n >= 32 ? load<__m256i>(row + i)
                                                     : _mm256_maskz_loadu_epi8((uint32_t(1) << n) - 1, row + i));
      const __m512i both = _mm512_or_si512(x, _mm512_slli_epi16(x, 4));
      const __m512i codes = spread_lanes(_mm512_and_si512(both, _mm512_set1_epi8(15)));
      const Pairs numbers = join_bytes(_mm512_shuffle_epi8(low_of, codes), _mm512_shuffle_epi8(high_of, codes));
      for (int h = 0; h < 2; h++) store_halves(to + t * stride + 4 * i + 64 * h, numbers.half[h], 2 * n - h * kPair);
    }
  });
}

// Every scale of a byte times every number of four bits: exact in bf16, since they have four bits and up to four.
template <const Nibbles& kCodes>
struct Products {
  alignas(64) uint16_t of[256][16];

  explicit Products(int scale_dtype) {
    for (int scale = 0; scale < 256; scale++)
      for (int code = 0; code < 16; code++) {
        const float by = scale_dtype == KVX_DTYPE_E8M0 ? e8m0_to_f32(uint8_t(scale)) : e4m3_to_f32(uint8_t(scale));
        const float number = bf16_to_f32(uint16_t(kCodes.high[code] << 8 | kCodes.low[code])) * by;
        uint32_t bits;
        memcpy(&bits, &number, 4);
        of[scale][code] = number != number ? kNaN : uint16_t(bits >> 16);
      }
  }
};

// A look-up of words in the products of two scales, sixteen each.
template <const Nibbles& kCodes>
void unpack_scaled_nibbles(const cpu::TileRows& rows, int64_t head, int64_t n, const cpu::ByteScales& scales, char* to,
                           int64_t stride, const cpu::TileRows* next) {
  static const Products<kCodes> by_e4m3(KVX_DTYPE_F8_E4M3), by_e8m0(KVX_DTYPE_E8M0);
  const auto& products = scales.dtype == KVX_DTYPE_E8M0 ? by_e8m0.of : by_e4m3.of;
  const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
  each_packed(rows, head, n / 2, next, [&](int64_t t, const char* row) {
    const uint8_t* scale = scales.at[t];
    for (int64_t d = 0; d < n; d += kPair) {
      const int64_t left = n - d;
      const __m512i x = _mm512_cvtepu8_epi32(left >= kPair ? load<__m128i>(row + d / 2)
                                                           : _mm_maskz_loadu_epi8((1u << left / 2) - 1, row + d / 2));
      const __m512i codes = _mm512_or_si512(_mm512_and_si512(x, _mm512_set1_epi32(15)),
                                            _mm512_and_si512(_mm512_slli_epi32(x, 12), _mm512_set1_epi32(0xf0000)));
      const uint16_t* first = products[*scale];
      if (scales.size == 16 && left > 16) scale += scales.group;
      const __m512i table =
          _mm512_inserti64x4(_mm512_castsi256_si512(load<__m256i>(first)), load<__m256i>(products[*scale]), 1);
      scale += scales.group;
      store_halves(to + t * stride + 2 * d, _mm512_permutexvar_epi16(_mm512_or_si512(codes, second), table), left);
    }
  });
}
