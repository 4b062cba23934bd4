// int8 rows, and 4-bit numbers as int8, by the instruction that adds four products of bytes to a 32-bit sum (VNNI).
// For up to two fours of query rows that came as bf16 or f16, whose digits attend_avx512.h makes.
//
// The instruction takes bytes without a sign on one side: elements have a bias there, and what it comes to, the bias
// times the sum of a row's digits, is known when they are made and taken away from sums in the end.
#define KVX_ISA avx512vnni
#include "attention/cpu/attend_loops.h"

namespace kvx {
namespace avx512vnni {
namespace {

constexpr int64_t kBlock = 64;     // elements of a row at a time
constexpr int64_t kPiece = 512;    // elements whose products 32 bits hold, whatever they are
constexpr int64_t kColumns = 128;  // of V that are interleaved at a time: of 64 positions, a quarter of a first level

// 64 elements of a row from element `first` on, with a bias. kIsWhole: rows end with such a block; else what is past
// their end is a number too.
struct S8Bytes {
  static constexpr int kBias = 128;
  static constexpr int64_t kBytes = 64;

  template <bool kIsWhole>
  KVX_INLINE __m512i at(const char* row, int64_t first, int64_t width) const {
    const int64_t left = width - first;
    const __mmask64 mask = left >= 64 ? ~__mmask64(0) : (__mmask64(1) << left) - 1;
    return _mm512_xor_si512(kIsWhole ? load<__m512i>(row + first) : _mm512_maskz_loadu_epi8(mask, row + first),
                            _mm512_set1_epi8(-128));
  }
};
// Numbers of four bits, the lower half of a byte first.
template <int kOffset, const int8_t (&kNumbers)[16]>
struct NibbleBytes {
  static constexpr int kBias = kOffset;
  static constexpr int64_t kBytes = 32;
  __m512i numbers;

  NibbleBytes() {
    uint8_t biased[16];
    for (int i = 0; i < 16; i++) biased[i] = uint8_t(kNumbers[i] + kOffset);
    numbers = _mm512_broadcast_i32x4(load<__m128i>(biased));
  }
  template <bool kIsWhole>
  KVX_INLINE __m512i at(const char* row, int64_t first, int64_t width) const {
    const int64_t left = (width - first + 1) / 2;
    const __mmask32 mask = left >= 32 ? ~__mmask32(0) : (__mmask32(1) << left) - 1;
    row += first / 2;
    const __m512i x = _mm512_cvtepu8_epi16(kIsWhole ? load<__m256i>(row) : _mm256_maskz_loadu_epi8(mask, row));
    const __m512i codes = _mm512_ternarylogic_epi32(x, _mm512_slli_epi16(x, 4), _mm512_set1_epi8(15), 0xa8);
    return _mm512_shuffle_epi8(numbers, codes);  // of (x | x << 4) & 15
  }
};
constexpr int8_t kS4Numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
constexpr int8_t kE2M1Doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
using S4Bytes = NibbleBytes<8, kS4Numbers>;
using E2M1Bytes = NibbleBytes<12, kE2M1Doubled>;

// ---- scores

// Queries of a head as digits: [fours, 4, digit, dim] bytes, the upper digit first. Then the factors of their rows and,
// for every piece of a row, the sums of its integers: [fours, 4] and [pieces, fours, 4].
struct PackedQueries {
  int8_t* digits;
  float* factors;
  int32_t* sums;
  int64_t rows, dim;

  PackedQueries(float* to, int64_t fours, int64_t dims)
      : digits(reinterpret_cast<int8_t*>(to)),
        factors(to + fours * kLanes * dims / 2),
        sums(reinterpret_cast<int32_t*>(factors + fours * kLanes)),
        rows(fours * kLanes),
        dim(dims) {}
};

void pack_digits(const float* q, int64_t fours, int64_t dim, int, float* to) {
  const PackedQueries packed(to, fours, dim);
  for (int64_t row = 0; row < packed.rows; row++) {
    const float* from = q + row * dim;
    Vec most = {};
    for (int64_t d = 0; d < dim; d += W) most = larger_magnitude(most, load<Vec>(from + d));
    for (int i = 1; i < W; i++) most = larger_magnitude(most, splat(most[i]));
    const Fixed<Vec> fixed(splat(most[0]));
    packed.factors[row] = fixed.back[0];
    int8_t* digits = packed.digits + row * 2 * dim;
    for (int64_t piece = 0; piece * kPiece < dim; piece++) {
      IVec sum = {};
      for (int64_t d = piece * kPiece; d < dim && d < (piece + 1) * kPiece; d += W) {
        const Integers x(load<Vec>(from + d) * fixed.first * fixed.second);
        sum += IVec(x.whole);
        store(digits + d, x.upper()), store(digits + dim + d, x.lower());
      }
      packed.sums[piece * packed.rows + row] = _mm512_reduce_add_epi32(__m512i(sum));
    }
  }
}

// Four positions against R rows, of elements [first, last): sums of products, [position, 4].
template <int R, bool kIsWhole, class E>
KVX_INLINE UVec dot_piece(const E& elements, const char* const (&at)[4], int64_t width, int64_t first, int64_t last,
                          const int8_t* q, int64_t dim) {
  UVec sum[4][R] = {};  // they may go past 32 bits and come back
#pragma GCC unroll 2
  for (int digit = 0; digit < 2; digit++) {
    for (int64_t d = first; d < last; d += kBlock) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) x[i] = elements.template at<kIsWhole>(at[i], d, width);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const __m512i y = load<__m512i>(q + (2 * r + digit) * dim + d);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[i][r] = UVec(_mm512_dpbusd_epi32(__m512i(sum[i][r]), x[i], y));
      }
    }
    if (digit == 1) break;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) sum[i][r] <<= 8;
  }
  return add_lanes(sum);
}

// All positions of one head against R rows from `row` on.
template <int R, bool kIsWhole, class E>
inline void dot_bytes(const E& elements, const cpu::TileRows& k, cpu::AskAhead asking, int64_t head,
                      const PackedQueries& queries, int64_t row, float* scores) {
  const int64_t dim = k.dim, offset = head * k.head;
  const int8_t* q = queries.digits + row * 2 * dim;
  const float* scale = k.scale ? k.scale + head * cpu::kTile : nullptr;
  const Vec factor = Vec(_mm512_broadcast_f32x4(load<__m128>(queries.factors + row)));
  for (int64_t t = 0; t < k.count; t += 4) {
    asking.ask(4 * dim * E::kBytes / kBlock);
    const char* const at[4] = {k.at[t] + offset, k.at[t + 1] + offset, k.at[t + 2] + offset, k.at[t + 3] + offset};
    Vec total = {};
    int64_t piece = 0;
    do {
      const int64_t first = piece * kPiece, last = first + kPiece < dim ? first + kPiece : dim;
      const __m512i sums = _mm512_broadcast_i32x4(load<__m128i>(queries.sums + piece * queries.rows + row));
      const UVec sum = dot_piece<R, kIsWhole>(elements, at, k.width, first, last, q, dim) - UVec(sums) * E::kBias;
      total += Vec(_mm512_cvtepi32_ps(__m512i(sum)));
    } while (++piece * kPiece < dim);
    total *= factor;
    store(scores + t * kLanes, scale ? scaled(total, scale + t) : total);
  }
}

template <class E>
void dots_bytes(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  const E elements;
  for (int64_t head = 0; head < k.heads; head++) {
    const PackedQueries queries(const_cast<float*>(s.q) + head * s.fours * kLanes * k.dim, s.fours, k.dim);
    each_run(s, head, [&](int64_t state, auto rows) {
      const int64_t run = state - head * s.fours;
      const cpu::AskAhead asking(run == s.first ? next : nullptr, head, k.dim * E::kBytes / kBlock);
      float* scores = s.scores + state * cpu::kTile * kLanes;
      if (k.width == k.dim) dot_bytes<rows, true>(elements, k, asking, head, queries, run * kLanes, scores);
      else dot_bytes<rows, false>(elements, k, asking, head, queries, run * kLanes, scores);
    });
  }
}

// ---- values

// The weights of four rows at a tile's positions, times scales, as digits: [digit, positions / 4, row, 4 positions].
struct WeightDigits {
  alignas(64) int8_t digits[2][cpu::kTile * kLanes];
  alignas(16) float back[kLanes];
  alignas(16) int32_t sum[kLanes];  // of integers

  void read(const float* weights, const float* scale, int64_t count) {
    const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    Vec w[cpu::kTile / 4], most = {};
    const int64_t fours = (count + 3) / 4;
    for (int64_t i = 0; i < fours; i++) {
      w[i] = weights_of(weights + i * W, scale ? scale + 4 * i : nullptr, count - 4 * i);
      most = larger_magnitude(most, w[i]);
    }
    most = larger_magnitude(most, Vec(_mm512_shuffle_f32x4(__m512(most), __m512(most), 0x39)));
    most = larger_magnitude(most, Vec(_mm512_shuffle_f32x4(__m512(most), __m512(most), 0x4e)));
    const Fixed<Vec> fixed(most);
    IVec total = {};
    for (int64_t i = 0; i < fours; i++) {
      const Integers x(Vec(_mm512_permutexvar_epi32(by_row, __m512i(w[i] * fixed.first * fixed.second))));
      total += IVec(x.whole);
      store(digits[0] + i * W, x.upper()), store(digits[1] + i * W, x.lower());
    }
    store(back, _mm512_castps512_ps128(__m512(fixed.back)));
    // A lane of 128 bits is a row here.
    const IVec two = total + IVec(_mm512_shuffle_epi32(__m512i(total), _MM_PERM_ENUM(0x4e)));
    const IVec all = two + IVec(_mm512_shuffle_epi32(__m512i(two), _MM_PERM_ENUM(0xb1)));
    for (int r = 0; r < kLanes; r++) sum[r] = all[4 * r];
  }
};

// 64 columns of a tile's rows, from [positions / 4, ...] with `stride` bytes between fours, into R rows of sums.
template <int R>
KVX_INLINE void sum_bytes(const char* v, int64_t stride, int64_t fours, const WeightDigits& weights, int bias,
                          float* out, int64_t dim) {
  IVec sum[R][4] = {};
#pragma GCC unroll 2
  for (int digit = 0; digit < 2; digit++) {
    const char* from = v;
    const int8_t* by = weights.digits[digit];
    for (int64_t i = 0; i < fours; i++, from += stride, by += W) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) x[c] = load<__m512i>(from + 64 * c);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++) {
        const __m512i w = _mm512_set1_epi32(load<int32_t>(by + 4 * r));
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) sum[r][c] = IVec(_mm512_dpbusd_epi32(__m512i(sum[r][c]), x[c], w));
      }
    }
    if (digit == 1) break;
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) sum[r][c] <<= 8;
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) x[c] = __m512i(sum[r][c] - weights.sum[r] * bias);
    turn_lanes(x);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      float* to = out + r * dim + c * W;
      store(to, load<Vec>(to) + Vec(_mm512_cvtepi32_ps(x[c])) * weights.back[r]);
    }
  }
}

// `width` columns of a tile's rows with those of four positions beside each other: [positions / 4, width / 64, 256].
template <bool kIsWhole, class E>
KVX_INLINE void make_columns(const E& elements, const cpu::TileRows& v, cpu::AskAhead& asking, int64_t head,
                             int64_t first, int64_t width, char* to) {
  const int64_t offset = head * v.head;
  for (int64_t t = 0; t < v.count; t += 4) {
    const char* const at[4] = {v.at[t] + offset, v.at[t + 1] + offset, v.at[t + 2] + offset, v.at[t + 3] + offset};
    asking.ask(4 * width * E::kBytes / kBlock);
    for (int64_t d = first; d < first + width; d += kBlock, to += 4 * kBlock) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) x[i] = elements.template at<kIsWhole>(at[i], d, v.width);
      interleave_four(x);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) store(to + i * 64, x[i]);
    }
  }
}

template <class E>
void sums_bytes(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s,
                const cpu::Softmax* softmax) {
  shrink(s, v.heads, v.dim, softmax);
  const E elements;
  alignas(64) char columns[cpu::kTile * kColumns];
  WeightDigits weights;
  for (int64_t head = 0; head < v.heads; head++) {
    cpu::AskAhead asking(next, head, v.dim * E::kBytes / kBlock);
    for (int64_t first = 0; first < v.dim; first += kColumns) {
      const int64_t width = v.dim - first < kColumns ? v.dim - first : kColumns;
      if (v.width == v.dim) make_columns<true>(elements, v, asking, head, first, width, columns);
      else make_columns<false>(elements, v, asking, head, first, width, columns);
      each_run(s, head, [&](int64_t state, auto rows) {
        const float* scale = v.scale ? v.scale + head * cpu::kTile : nullptr;
        if (first == 0 || s.last - s.first > 1) weights.read(s.scores + state * cpu::kTile * kLanes, scale, v.count);
        for (int64_t d = 0; d < width; d += kBlock)
          sum_bytes<rows>(columns + 4 * d, 4 * width, (v.count + 3) / 4, weights, E::kBias,
                          s.out + state * kLanes * v.dim + first + d, v.dim);
      });
    }
  }
}

template <class E>
constexpr cpu::TileLoops byte_loops(float lift) {
  return {&pack_digits, &dots_bytes<E>, &sums_bytes<E>, lift};
}

}  // namespace
}  // namespace avx512vnni

namespace cpu {

using namespace avx512vnni;

void add_vnni(AttendTable* table) {
  table->few[KVX_DTYPE_S8] = byte_loops<S8Bytes>(1);
  table->few[KVX_DTYPE_S4] = byte_loops<S4Bytes>(1);
  table->few[KVX_DTYPE_E2M1] = byte_loops<E2M1Bytes>(0.5f);
}

}  // namespace cpu
}  // namespace kvx
