// What AVX-512's loops share: sums across lanes, weights, and numbers in fixed point. Included by attend_loops.h, in
// its namespace.
//
// Queries and softmax weights that multiply int8 become integers of 16 bits, times a factor a row: two signed bytes,
// digits to the base 256. Sums of products are exact; what is rounded is a query, by about 2^-16 of the largest of its
// row, and a weight, by as much of the largest of its tile (as attend_s8.h does for Arm).

// The sums of four vectors within each 128 bits: lane r of every four is of x[r].
template <class V>
KVX_INLINE V add_within(V a, V b, V c, V d) {
  const __m512 ab = __m512(V(_mm512_unpacklo_ps(__m512(a), __m512(b))) + V(_mm512_unpackhi_ps(__m512(a), __m512(b)))),
               cd = __m512(V(_mm512_unpacklo_ps(__m512(c), __m512(d))) + V(_mm512_unpackhi_ps(__m512(c), __m512(d))));
  return V(_mm512_unpacklo_pd(__m512d(ab), __m512d(cd))) + V(_mm512_unpackhi_pd(__m512d(ab), __m512d(cd)));
}
// 128 bits of a twice, then of b twice: sums of two.
template <class V>
KVX_INLINE V add_pairs(V a, V b) {
  return V(_mm512_shuffle_f32x4(__m512(a), __m512(b), 0x88)) + V(_mm512_shuffle_f32x4(__m512(a), __m512(b), 0xdd));
}

// The sum of each of four positions' vectors against R rows, as scores lie: [position, 4]. Vectors of f32 or of
// integers. Turned and added, they take a third of the steps that sixteen sums would.
template <int R, class V>
KVX_INLINE V add_lanes(const V (&x)[4][R]) {
  if constexpr (R == 4) {
    V of[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) of[i] = add_within(x[i][0], x[i][1], x[i][2], x[i][3]);
    return add_pairs(add_pairs(of[0], of[1]), add_pairs(of[2], of[3]));
  } else {  // number 2 * position + row of each 256 bits, or number `position` of each 128
    const V some = R == 2 ? add_pairs(add_within(x[0][0], x[0][R - 1], x[1][0], x[1][R - 1]),
                                      add_within(x[2][0], x[2][R - 1], x[3][0], x[3][R - 1]))
                          : add_within(x[0][0], x[1][0], x[2][0], x[3][0]);
    const V all = R == 2 ? add_pairs(some, some) : add_pairs(add_pairs(some, some), add_pairs(some, some));
    const __m512i from = R == 2 ? _mm512_setr_epi32(0, 1, 0, 0, 2, 3, 0, 0, 4, 5, 0, 0, 6, 7, 0, 0)
                                : _mm512_setr_epi32(0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0);
    return V(_mm512_maskz_permutexvar_ps(R == 2 ? 0x3333 : 0x1111, from, __m512(all)));
  }
}

// Four positions of a run: sixteen numbers, times the scales of positions.
KVX_INLINE Vec scaled(Vec four, const float* scale) {
  const __m512i by_position = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return four * Vec(_mm512_permutexvar_ps(by_position, _mm512_castps128_ps512(load<__m128>(scale))));
}

// Weights of four rows at four positions, times scales; zeros from `count` on.
KVX_INLINE Vec weights_of(const float* weights, const float* scale, int64_t count) {
  const unsigned seen = count >= 4 ? 4 : count <= 0 ? 0 : unsigned(count);
  const __mmask16 mask = __mmask16((1u << (4 * seen)) - 1);
  const Vec w = Vec(_mm512_maskz_loadu_ps(mask, weights));
  return scale ? Vec(_mm512_maskz_mov_ps(mask, __m512(scaled(w, scale)))) : w;
}

// Lanes of 128 bits: i of vector j becomes j of vector i.
KVX_INLINE void turn_lanes(__m512i (&x)[4]) {
  const __m512i a = _mm512_shuffle_i64x2(x[0], x[1], 0x44), b = _mm512_shuffle_i64x2(x[2], x[3], 0x44),
                c = _mm512_shuffle_i64x2(x[0], x[1], 0xee), d = _mm512_shuffle_i64x2(x[2], x[3], 0xee);
  x[0] = _mm512_shuffle_i64x2(a, b, 0x88), x[1] = _mm512_shuffle_i64x2(a, b, 0xdd);
  x[2] = _mm512_shuffle_i64x2(c, d, 0x88), x[3] = _mm512_shuffle_i64x2(c, d, 0xdd);
}

// Numbers of rows whose largest magnitudes are `most`, times `first` times `second`, are those integers; `back` makes
// them numbers again. Two factors: one would be infinite where all are small.
template <class V>
struct Fixed {
  static constexpr float kMost = 127 * 256;  // nearly what the digits hold: rounding may go past
  V first, second, back;

  explicit Fixed(V most) {
    const V one = 1.0f - V{}, zero = {};
    first = most < 0x1p-60f ? one * 0x1p100f : one;
    const V lifted = most * first;
    second = lifted > 0 ? kMost / lifted : zero;
    back = most / kMost + (most - most);  // NaN, for infinity too: so is what comes of it
  }
};

// Sixteen numbers as integers whose bytes 0 and 1 are their digits; what is above them is anything.
KVX_INLINE __m512i digits_of(__m512i whole) {
  const __m512i bias = _mm512_set1_epi32(0x8080);
  return _mm512_xor_si512(_mm512_add_epi32(whole, bias), bias);
}
struct Integers {
  __m512i whole, digits;

  // NaN is 0: what it is multiplied by in the end is NaN too, and its sums stay small.
  KVX_INLINE explicit Integers(Vec fixed)
      : whole(_mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(__m512(fixed), __m512(fixed), _CMP_ORD_Q), __m512(fixed))),
        digits(digits_of(whole)) {}
  KVX_INLINE __m128i upper() const { return _mm512_cvtepi32_epi8(_mm512_srli_epi32(digits, 8)); }
  KVX_INLINE __m128i lower() const { return _mm512_cvtepi32_epi8(digits); }
};

// The largest magnitude; NaN stays.
KVX_INLINE Vec larger_magnitude(Vec most, Vec x) {
  const Vec magnitude = Vec(IVec(x) & 0x7fffffff);
  return magnitude > most || magnitude != magnitude ? magnitude : most;
}

// 64 bytes of four positions: those of four neighbouring columns of a lane come together, four positions of each.
KVX_INLINE void interleave_four(__m512i (&x)[4]) {
  const __m512i ab0 = _mm512_unpacklo_epi8(x[0], x[1]), ab1 = _mm512_unpackhi_epi8(x[0], x[1]),
                cd0 = _mm512_unpacklo_epi8(x[2], x[3]), cd1 = _mm512_unpackhi_epi8(x[2], x[3]);
  x[0] = _mm512_unpacklo_epi16(ab0, cd0), x[1] = _mm512_unpackhi_epi16(ab0, cd0);
  x[2] = _mm512_unpacklo_epi16(ab1, cd1), x[3] = _mm512_unpackhi_epi16(ab1, cd1);
}
