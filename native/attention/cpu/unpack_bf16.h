// Rows of 8 and of 4 bits as bf16, exactly, for what multiplies tiles (attend_amx.h). Included by attend_amx.cpp, in
// its namespace. A scale of a group is multiplied in, which is exact for those it takes; scales of rows multiply scores
// and weights later.
//
// For many query rows, the rows of a head are copied as bf16 (unpack). For a few, sixteen rows of 64 elements become
// two tiles just before these are multiplied: vectors and tiles then work at the same time.

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
constexpr uint16_t bf16_of_e4m3(int c, int lift) {  // times 2^-lift
  const int e = c >> 3, m = c & 7;
  return c == 127 ? kNaN : e ? bf16_of(8 + m, e - 10 - lift) : bf16_of(m, -9 - lift);
}
constexpr uint16_t bf16_of_e5m2(int c, int lift) {
  const int e = c >> 2, m = c & 3;
  return e == 31 ? (m ? kNaN : kInfinity) : e ? bf16_of(4 + m, e - 17 - lift) : bf16_of(m, -16 - lift);
}
constexpr Codes kE4M3Codes = make_codes([](int c) { return bf16_of_e4m3(c, 0); });
constexpr Codes kE5M2Codes = make_codes([](int c) { return bf16_of_e5m2(c, 0); });
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

// ---- a few query rows

KVX_INLINE void store_pairs(char* to, int64_t j, const Pairs& x) {
  store(to + j * 64, x.half[0]), store(to + (kSide + j) * 64, x.half[1]);
}

// What makes elements rows of tiles: make() sixteen of two tiles, at() one of them. `scale_dtype`: if they are scaled.

// fp8: sign, exponent and mantissa move to bf16's places. The upper bits of the exponent are the same for all, which
// makes numbers 2^8 times too small, and those of e5m2 2^16. Subnormal numbers, zero and what is no number are left to
// a look-up of all sixteen rows, and so are the next few sixteens: where there is one there are more. kLeast and kMost:
// the codes between them are usual.
constexpr Codes kE4M3Lifted = make_codes([](int c) { return bf16_of_e4m3(c, 8); });
constexpr Codes kE5M2Lifted = make_codes([](int c) { return bf16_of_e5m2(c, 16); });

template <int kShift, int kMask, int kLeast, int kMost>
struct Fp8Bits {
  const __m512i mask = _mm512_set1_epi16(int16_t(kMask)), least = _mm512_set1_epi8(char(2 * kLeast));
  __m512i most = {};

  KVX_INLINE void see(const char* row) {
    const __m512i x = load<__m512i>(row);
    most = _mm512_max_epu8(most, _mm512_sub_epi8(_mm512_add_epi8(x, x), least));  // without the sign
  }
  bool are_usual() const { return !_mm512_cmpgt_epu8_mask(most, _mm512_set1_epi8(char(2 * (kMost - kLeast)))); }
  static KVX_INLINE __m512i moved(const char* half) {
    return _mm512_slli_epi16(_mm512_cvtepi8_epi16(load<__m256i>(half)), kShift);
  }
};
using E4M3Bits = Fp8Bits<4, 0x87f0, 0x08, 0x7e>;
using E5M2Bits = Fp8Bits<5, 0x8fe0, 0x04, 0x7b>;

template <class Bits, const Codes& kCodes, int kBias>
struct Fp8Elements {
  static constexpr int64_t kBytes = 64;
  const ByteTable<kCodes, false> table;
  mutable int looked_up = 0;  // sixteens that will be, without another try

  explicit Fp8Elements(int) {}
  Pairs at(const Sixteen& rows, int64_t j) const { return table.look_up(rows.row(j), rows.left); }
  KVX_INLINE void make(const Sixteen& rows, char* to) const {
    const __m512i bias = _mm512_set1_epi16(int16_t(kBias));
    const bool tries = rows.left >= 64 && looked_up-- <= 0;
    Bits bits;
    for (int64_t j = 0; j < kSide && tries; j++) {
      const char* row = rows.row(j);
      const auto number = [&](const char* half) {
        return _mm512_ternarylogic_epi32(Bits::moved(half), bits.mask, bias, 0xea);  // moved & mask | bias
      };
      bits.see(row);
      store_pairs(to, j, Pairs{{number(row), number(row + 32)}});
    }
    if (tries && bits.are_usual()) return;
    if (tries) looked_up = 4;
    for (int64_t j = 0; j < kSide; j++) store_pairs(to, j, at(rows, j));
  }
};
using E4M3Elements = Fp8Elements<E4M3Bits, kE4M3Lifted, 112 << 7>;
using E5M2Elements = Fp8Elements<E5M2Bits, kE5M2Lifted, 96 << 7>;

// The same with a power of two for every 32 elements, which is added to the exponents together with the bias.
template <class Bits, const Codes& kCodes, int kBias>
struct ScaledFp8 {
  static constexpr int64_t kBytes = 64;
  const ByteTable<kCodes, false> table;
  mutable int looked_up = 0;

  explicit ScaledFp8(int) {}
  Pairs at(const Sixteen& rows, int64_t j) const {
    const uint8_t* scale = rows.scale[j];
    if (!scale) return Pairs{};
    const Pairs x = table.look_up(rows.row(j), rows.left);
    return Pairs{{scale_by_power(x.half[0], scale[rows.of[0]]), scale_by_power(x.half[1], scale[rows.of[2]])}};
  }
  KVX_INLINE void make(const Sixteen& rows, char* to) const {
    Bits bits;
    const bool tries = rows.left >= 64 && looked_up-- <= 0;
    bool is_usual = tries;
    for (int64_t j = 0; j < kSide && is_usual; j++) {
      const uint8_t* scale = rows.scale[j];
      if (!scale) {
        is_usual = false;
        break;
      }
      const char* row = rows.row(j);
      const uint8_t codes[2] = {scale[rows.of[0]], scale[rows.of[2]]};
      const auto number = [&](int h) {
        is_usual &= uint8_t(codes[h] - 17) <= 222;  // as scale_by_power
        const __m512i bias = _mm512_set1_epi16(int16_t(kBias + (codes[h] - 127) * 128));
        return _mm512_add_epi16(_mm512_and_si512(Bits::moved(row + 32 * h), bits.mask), bias);
      };
      bits.see(row);
      store_pairs(to, j, Pairs{{number(0), number(1)}});
    }
    if (is_usual && bits.are_usual()) return;
    if (tries) looked_up = 4;
    for (int64_t j = 0; j < kSide; j++) store_pairs(to, j, at(rows, j));
  }
};
using ScaledE4M3 = ScaledFp8<E4M3Bits, kE4M3Codes, 120 << 7>;
using ScaledE5M2 = ScaledFp8<E5M2Bits, kE5M2Codes, 112 << 7>;

// Sixteen bytes of codes of four bits: the lower half of each word begins with one, and has anything after it.
KVX_INLINE __m512i spread_nibbles(__m128i x) {
  return _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x000c000800040000), _mm512_cvtepu16_epi64(x));
}
inline __m128i some_nibbles(const char* row, int64_t n) {  // the first n of 32, the others zeros
  return n >= kPair ? load<__m128i>(row) : _mm_maskz_loadu_epi8(n > 0 ? (1u << n / 2) - 1 : 0, row);
}

template <const Nibbles& kCodes>
struct NibbleElements {
  static constexpr int64_t kBytes = 32;
  __m512i table;  // twice: a look-up takes five bits

  explicit NibbleElements(int) {
    uint16_t numbers[32];
    for (int i = 0; i < 32; i++) numbers[i] = uint16_t(kCodes.high[i % 16] << 8 | kCodes.low[i % 16]);
    table = load<__m512i>(numbers);
  }
  KVX_INLINE Pairs at(const Sixteen& rows, int64_t j) const {
    const auto half = [&](int64_t h) {
      return _mm512_permutexvar_epi16(spread_nibbles(some_nibbles(rows.row(j) + 16 * h, rows.left - kPair * h)), table);
    };
    return Pairs{{half(0), half(1)}};
  }
  KVX_INLINE void make(const Sixteen& rows, char* to) const {
    for (int64_t j = 0; j < kSide; j++) store_pairs(to, j, at(rows, j));
  }
};

// A look-up of words in the products of two scales, sixteen each.
template <const Nibbles& kCodes>
struct ScaledNibbles {
  static constexpr int64_t kBytes = 32;
  const uint16_t (*const products)[16];

  explicit ScaledNibbles(int scale_dtype) : products(products_of(scale_dtype)) {}
  Pairs at(const Sixteen& rows, int64_t j) const {
    const uint8_t* scale = rows.scale[j];
    if (!scale) return Pairs{};
    const char* row = rows.row(j);
    return Pairs{{number(some_nibbles(row, rows.left), scale[rows.of[0]], scale[rows.of[1]]),
                  number(some_nibbles(row + 16, rows.left - kPair), scale[rows.of[2]], scale[rows.of[3]])}};
  }
  KVX_INLINE void make(const Sixteen& rows, char* to) const {
    const int64_t* of = rows.of;
    if (rows.left >= 64 && of[1] - of[0] == 1) make_whole<16>(rows, to);
    else if (rows.left >= 64 && of[1] == of[0] && of[2] - of[0] == 1) make_whole<32>(rows, to);
    else
      for (int64_t j = 0; j < kSide; j++) store_pairs(to, j, at(rows, j));
  }

 private:
  // Rows of 64 elements whose scales, of kSize elements each, lie beside each other.
  template <int kSize>
  KVX_INLINE void make_whole(const Sixteen& rows, char* to) const {
    for (int64_t j = 0; j < kSide; j++) {
      if (!rows.scale[j]) {
        store_pairs(to, j, Pairs{});
        continue;
      }
      const uint8_t* scale = rows.scale[j] + rows.of[0];
      const __m128i low = load<__m128i>(rows.row(j)), high = load<__m128i>(rows.row(j) + 16);
      if constexpr (kSize == 16)
        store_pairs(to, j, Pairs{{number(low, scale[0], scale[1]), number(high, scale[2], scale[3])}});
      else store_pairs(to, j, Pairs{{number(low, scale[0]), number(high, scale[1])}});
    }
  }
  // Products of one scale, twice: a look-up takes five bits.
  KVX_INLINE __m512i number(__m128i codes, uint8_t scale) const {
    return _mm512_permutexvar_epi16(spread_nibbles(codes), _mm512_broadcast_i64x4(load<__m256i>(products[scale])));
  }
  KVX_INLINE __m512i number(__m128i codes, uint8_t first, uint8_t then) const {
    const __m512i second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    const __m512i table =
        _mm512_inserti64x4(_mm512_castsi256_si512(load<__m256i>(products[first])), load<__m256i>(products[then]), 1);
    return _mm512_permutexvar_epi16(_mm512_ternarylogic_epi32(spread_nibbles(codes), _mm512_set1_epi16(15), second,
                                                              0xea),  // codes & 15 | second
                                    table);
  }
  static const uint16_t (*products_of(int scale_dtype))[16] {
    static const Products<kCodes> by_e4m3(KVX_DTYPE_F8_E4M3), by_e8m0(KVX_DTYPE_E8M0);
    return scale_dtype == KVX_DTYPE_E8M0 ? by_e8m0.of : by_e4m3.of;
  }
};

inline int scale_dtype_of(const cpu::TileRows& rows) { return rows.byte_scales ? rows.byte_scales->dtype : 0; }

// Scores of N sixteens of positions: tiles 0 to N - 1. Tiles 4 and 7 are queries, 5 and 6 rows of K.
template <int N, class E>
KVX_INLINE void dot_made(const cpu::TileRows& k, const E& elements, cpu::AskAhead asking, int64_t head,
                         const uint16_t* queries, int64_t columns, int parts) {
  alignas(64) char room[N][2 * kSide * 64];
  const int64_t halves = kPair * columns, steps = k.dim / kPair;
  each_tile<N>([](auto i) { zero_tile<i>(); });
  for (int64_t block = 0; 2 * block < steps; block++) {
    const auto make = [&](int64_t i) {
      asking.ask(kSide * E::kBytes);
      elements.make(Sixteen(k, E::kBytes, i * kSide, head, block), room[i]);
    };
    const auto load_queries = [&](int part) {
      const uint16_t* at = queries + (part * steps + 2 * block) * halves;
      load_tile<4>(at, columns * 4), load_tile<7>(at + halves, columns * 4);
    };
    make(0);
    load_queries(0);
    each_tile<N>([&](auto i) {
      if constexpr (i + 1 < N) make(i + 1);
      load_tile<5>(room[i], 64), load_tile<6>(room[i] + kSide * 64, 64);
      multiply_tiles<i, 5, 4>(), multiply_tiles<i, 6, 7>();
      if (parts == 1) return;
      load_queries(1);
      multiply_tiles<i, 5, 4>(), multiply_tiles<i, 6, 7>();
      load_queries(0);
    });
  }
}

template <class E>
void dots_made(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  const E elements(scale_dtype_of(k));
  const int64_t columns = s.fours * kLanes;
  TileShapes shapes;
  shapes.set(0, 4, kSide, columns * 4), shapes.set(5, 6, kSide, 64), shapes.set(7, 7, kSide, columns * 4);
  shapes.use();
  for (int64_t head = 0; head < k.heads; head++) {
    const cpu::AskAhead asking(next, head, k.dim * E::kBytes / 64);
    const uint16_t* queries = reinterpret_cast<const uint16_t*>(s.q + head * s.fours * kLanes * k.dim);
    with_count((k.count + kSide - 1) / kSide, [&](auto tiles) {
      dot_made<tiles>(k, elements, asking, head, queries, columns, s.parts);
      store_scores<tiles>(columns, k.scale ? k.scale + head * cpu::kTile : nullptr,
                          s.scores + head * s.fours * cpu::kTile * kLanes);
    });
  }
  _tile_release();
}

// N times 64 columns from 64 * block on. Tiles 0 to 3 are sums, of both runs where there are two, 4 and 5 weights, 6
// and 7 rows of V.
template <int N, bool kTwoRuns, class E>
KVX_INLINE void sum_made(const cpu::TileRows& v, const E& elements, cpu::AskAhead& asking, const EvenOdd& weights,
                         const cpu::TileStates& s, int64_t head, int64_t block) {
  alignas(64) char room[2][N][2 * kSide * 64];
  constexpr int kRuns = kTwoRuns ? 2 : 1, kSums = 2 * N * kRuns;
  const auto make = [&](int64_t t) {
    for (int64_t i = 0; i < N && t < v.count; i++) {
      asking.ask(kSide * E::kBytes);
      elements.make(Sixteen(v, E::kBytes, t, head, block + i), room[t / kSide % 2][i]);
    }
  };
  each_tile<kSums>([](auto i) { zero_tile<i>(); });
  make(0);
  for (int64_t t = 0; t < v.count; t += kSide) {
    load_tile<4>(weights.tiles[0][t / kSide], 64);
    if constexpr (kTwoRuns) load_tile<5>(weights.tiles[1][t / kSide], 64);
    make(t + kSide);
    each_tile<2 * N>([&](auto i) {
      constexpr int kRows = 6 + i % 2;
      load_tile<kRows>(room[t / kSide % 2][i / 2] + i % 2 * kSide * 64, 64);
      multiply_tiles<i * kRuns, 4, kRows>();
      if constexpr (kTwoRuns) multiply_tiles<i * kRuns + 1, 5, kRows>();
    });
  }
  store_sums<kSums, kRuns>(v, s, head, block * 64, [&](int64_t t, int64_t first) {
    const Pairs x = elements.at(Sixteen(v, E::kBytes, t, head, first / 64), 0);
    return load<Halves>(&x.half[first / kPair % 2]);
  });
}

template <class E>
void sums_made(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s,
               const cpu::Softmax* softmax) {
  if (s.first == s.last) return;
  shrink(s, v.heads, v.dim, softmax);
  const E elements(scale_dtype_of(v));
  EvenOdd weights;
  TileShapes shapes;
  shapes.set(0, 7, kSide, 64);
  shapes.use();
  for (int64_t head = 0; head < v.heads; head++) {
    weights.read(v, s, head);
    multiply_tiles<5, 6, 7>();  // keeps tiles awake
    cpu::AskAhead asking(next, head, v.dim * E::kBytes / 64);
    const int64_t blocks = v.dim / 64;
    for (int64_t block = 0; block < blocks;)
      if (s.last - s.first > 1) sum_made<1, true>(v, elements, asking, weights, s, head, block), block++;
      else if (block + 1 < blocks) sum_made<2, false>(v, elements, asking, weights, s, head, block), block += 2;
      else sum_made<1, false>(v, elements, asking, weights, s, head, block), block++;
  }
  _tile_release();
}

template <class E>
constexpr cpu::TileLoops made_loops(float lift = 1) {
  return {&pack_tiles, &dots_made<E>, &sums_made<E>, lift};
}
