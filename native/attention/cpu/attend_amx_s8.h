// int8 rows, and 4-bit integers as int8, by AMX, which multiplies tiles of bytes: sixteen rows of 64. Included by
// attend_amx.cpp, in its namespace. For up to two fours of query rows that came as bf16 or f16.
//
// Queries and softmax weights are integers of two digits (attend_avx512.h).

template <int kSum, int kLeft, int kRight>
KVX_INLINE void multiply_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

// Queries of a head, [fours, 4, dim], as right tiles: [dim / 64, 16, fours, digit, 4, 4 bytes], the upper digit first.
// Then the factors of their rows, [fours, 4].
inline float* factors_of(float* packed, int64_t fours, int64_t dim) { return packed + fours * kLanes * dim / 2; }

void pack_digits(const float* q, int64_t fours, int64_t dim, int, float* to) {
  int8_t* tiles = reinterpret_cast<int8_t*>(to);
  for (int64_t row = 0; row < fours * kLanes; row++) {
    const float* from = q + row * dim;
    Vec most = {};
    for (int64_t d = 0; d < dim; d += W) most = larger_magnitude(most, load<Vec>(from + d));
    for (int64_t i = 1; i < W; i++) most = larger_magnitude(most, splat(most[i]));
    const Fixed<Vec> fixed(splat(most[0]));
    factors_of(to, fours, dim)[row] = fixed.back[0];
    for (int64_t d = 0; d < dim; d += W) {
      const Integers x(load<Vec>(from + d) * fixed.first * fixed.second);
      uint32_t upper[4], lower[4];
      store(upper, x.upper()), store(lower, x.lower());
      for (int64_t i = 0; i < 4; i++) {
        int8_t* at = tiles + ((d / 4 + i) * fours + row / kLanes) * 2 * kSide + row % kLanes * 4;
        store(at, upper[i]), store(at + kSide, lower[i]);
      }
    }
  }
}

// 64 elements of a row as int8.
struct S8Elements {
  static constexpr int64_t kBytes = 64;
  static constexpr bool kLie = true;

  KVX_INLINE __m512i at(const Sixteen& rows, int64_t j) const {
    const __mmask64 mask = rows.left >= 64 ? ~__mmask64(0) : (__mmask64(1) << rows.left) - 1;
    return _mm512_maskz_loadu_epi8(mask, rows.row(j));
  }
};
// Integers of 4 bits in the upper halves of bytes: sixteen times what they are.
struct S4Elements {
  static constexpr int64_t kBytes = 32;
  static constexpr bool kLie = false;

  KVX_INLINE __m512i at(const Sixteen& rows, int64_t j) const {
    const __m512i shifts = _mm512_set1_epi64(0x1814100c0804003c);
    const __mmask32 mask = rows.left >= 64 ? ~__mmask32(0) : (__mmask32(1) << rows.left / 2) - 1;
    const __m512i x = _mm512_cvtepu32_epi64(_mm256_maskz_loadu_epi8(mask, rows.row(j)));
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(shifts, x), _mm512_set1_epi8(char(0xf0)));
  }
};

// Where tiles of sixteen positions are loaded from: the cache, or room that they are made in.
template <class E>
struct TileSource {
  const cpu::TileRows& rows;
  const Strides& strides;
  const E elements = {};

  bool lies(int64_t t, int64_t block) const {
    return E::kLie && strides.of[t / kSide] && (block + 1) * 64 <= rows.width;
  }
  KVX_INLINE void make(int64_t t, int64_t head, int64_t block, char* room) const {
    if (lies(t, block)) return;
    const Sixteen from(rows, E::kBytes, t, head, block);
    for (int64_t j = 0; j < kSide; j++) store(room + j * 64, elements.at(from, j));
  }
  template <int T>
  KVX_INLINE void load(int64_t t, int64_t head, int64_t block, const char* room) const {
    if (lies(t, block)) load_tile<T>(rows.at[t] + head * rows.head + block * 64, strides.of[t / kSide]);
    else load_tile<T>(room, 64);
  }
};

// Scores of four positions: products are [position, run, digit, 4].
template <int kRuns>
KVX_INLINE void join_digits(const int32_t* product, const float* factors, const float* scale, float* scores) {
  const auto read = [&](int i) { return load<__m512i>(product + i * W); };
  const auto lanes = [](__m512i a, __m512i b, auto odd) { return _mm512_shuffle_i64x2(a, b, odd ? 0xdd : 0x88); };
  const auto number = [](__m512i x) { return Vec(_mm512_cvtepi32_ps(x)); };
  constexpr std::integral_constant<int, 0> even = {};
  constexpr std::integral_constant<int, 1> odd = {};
#pragma GCC unroll 2
  for (int run = 0; run < kRuns; run++) {
    __m512i upper, lower;
    if constexpr (kRuns == 1) {
      upper = lanes(read(0), read(1), even), lower = lanes(read(0), read(1), odd);
    } else {  // of two positions, both runs' upper digits, then both lower ones'
      const __m512i u0 = lanes(read(0), read(1), even), u1 = lanes(read(2), read(3), even);
      const __m512i l0 = lanes(read(0), read(1), odd), l1 = lanes(read(2), read(3), odd);
      upper = run ? lanes(u0, u1, odd) : lanes(u0, u1, even), lower = run ? lanes(l0, l1, odd) : lanes(l0, l1, even);
    }
    const Vec factor = Vec(_mm512_broadcast_f32x4(load<__m128>(factors + run * kLanes)));
    const Vec x = (number(upper) * 256.0f + number(lower)) * factor;
    store(scores + run * cpu::kTile * kLanes, scale ? scaled(x, scale) : x);
  }
}

// Tiles 0 to 3 are products, 4 queries, 5 and 6 rows of K.
template <class E, int N, int kRuns>
KVX_INLINE void dot_bytes(const TileSource<E>& k, cpu::AskAhead asking, int64_t head, const cpu::TileStates& s) {
  alignas(64) char room[N][kSide * 64];
  alignas(64) int32_t product[kSide * 8 * kRuns];
  const int64_t dim = k.rows.dim;
  float* packed = const_cast<float*>(s.q) + head * kRuns * kLanes * dim;
  each_tile<N>([](auto i) { zero_tile<i>(); });
  for (int64_t block = 0; block * 64 < dim; block++) {
    load_tile<4>(reinterpret_cast<const char*>(packed) + block * kSide * 32 * kRuns, 32 * kRuns);
    asking.ask(kSide * E::kBytes);
    k.make(0, head, block, room[0]);
    each_tile<N>([&](auto i) {
      if constexpr (i + 1 < N) asking.ask(kSide * E::kBytes), k.make((i + 1) * kSide, head, block, room[i + 1]);
      k.template load<5 + i % 2>(i * kSide, head, block, room[i]);
      multiply_bytes<i, 5 + i % 2, 4>();
    });
  }
  const float *factors = factors_of(packed, kRuns, dim), *scale = k.rows.scale;
  float* scores = s.scores + head * kRuns * cpu::kTile * kLanes;
  each_tile<N>([&](auto i) {
    store_tile<i>(product, 32 * kRuns);
    for (int64_t t = 0; t < kSide; t += 4)
      join_digits<kRuns>(product + t * 8 * kRuns, factors, scale ? scale + head * cpu::kTile + i * kSide + t : nullptr,
                         scores + (i * kSide + t) * kLanes);
  });
}

template <class E>
void dots_bytes(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  const Strides strides(k);
  const TileSource<E> source{k, strides};
  TileShapes shapes;
  shapes.set(0, 4, kSide, 32 * s.fours), shapes.set(5, 6, kSide, 64);
  shapes.use();
  for (int64_t head = 0; head < k.heads; head++)
    with_count((k.count + kSide - 1) / kSide, [&](auto tiles) {
      const cpu::AskAhead asking(next, head, k.dim * E::kBytes / 64);
      if (s.fours == 1) dot_bytes<E, tiles, 1>(source, asking, head, s);
      else dot_bytes<E, tiles, 2>(source, asking, head, s);
    });
  _tile_release();
}

// ---- values

// The left tiles of up to two runs: a tile has the upper digits of four rows' weights at 64 positions, then the lower.
struct FixedWeights {
  alignas(64) int8_t tiles[2][2][kLanes][cpu::kTile];
  float back[2][kLanes];

  void read(const cpu::TileRows& v, const cpu::TileStates& s, int64_t head) {
    const float* scale = v.scale ? v.scale + head * cpu::kTile : nullptr;
    const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int64_t run = s.first; run < s.last; run++) {
      const float* weights = s.scores + (head * s.fours + run) * cpu::kTile * kLanes;
      Vec w[cpu::kTile / 4], most = {};
#pragma GCC unroll 4
      for (int64_t i = 0; i < cpu::kTile / 4; i++) {
        w[i] = weights_of(weights + i * W, scale ? scale + 4 * i : nullptr, v.count - 4 * i);
        most = larger_magnitude(most, w[i]);
      }
      most = larger_magnitude(most, Vec(_mm512_shuffle_f32x4(__m512(most), __m512(most), 0x39)));
      most = larger_magnitude(most, Vec(_mm512_shuffle_f32x4(__m512(most), __m512(most), 0x4e)));
      const Fixed<Vec> fixed(most);
      memcpy(back[run - s.first], &fixed.back, sizeof back[0]);
      auto& tile = tiles[run - s.first];
      for (int64_t t = 0; t < cpu::kTile; t += kSide) {
        __m512i x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
          x[i] = _mm512_permutexvar_epi32(by_row, Integers(w[t / 4 + i] * fixed.first * fixed.second).digits);
        turn_lanes(x);
#pragma GCC unroll 4
        for (int r = 0; r < kLanes; r++) {
          store(tile[0][r] + t, _mm512_cvtepi32_epi8(_mm512_srli_epi32(x[r], 8)));
          store(tile[1][r] + t, _mm512_cvtepi32_epi8(x[r]));
        }
      }
    }
  }
};

// 64 columns of a head's rows as four right tiles: tile i has columns 16 * lane + 4 * i and the three after them, of
// four lanes, and a row of it four positions of each.
template <class E>
KVX_INLINE void make_columns(const cpu::TileRows& v, const E& elements, cpu::AskAhead& asking, int64_t head,
                             int64_t block, char* to) {
  for (int64_t t = 0; t < v.count; t += kSide) {
    const Sixteen rows(v, E::kBytes, t, head, block);
    asking.ask(kSide * E::kBytes);
    multiply_bytes<7, 4, 5>();  // keeps tiles awake
    for (int64_t j = 0; j < kSide; j += 4) {
      __m512i x[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) x[i] = elements.at(rows, j + i);
      interleave_four(x);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) store(to + i * kSide * 64 + (t + j) / 4 * 64, x[i]);
    }
  }
}

// Products of 64 columns, four tiles [digit, row, column], into four rows of sums.
inline void add_products(const int32_t (*product)[8 * kSide], const float* back, float* out, int64_t dim) {
#pragma GCC unroll 4
  for (int r = 0; r < kLanes; r++) {
    __m512i x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const auto number = [&](int digit) {
        return Vec(_mm512_cvtepi32_ps(load<__m512i>(product[i] + (digit * kLanes + r) * kSide)));
      };
      x[i] = __m512i((number(0) * 256.0f + number(1)) * back[r]);
    }
    turn_lanes(x);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      float* to = out + r * dim + i * W;
      store(to, load<Vec>(to) + Vec(x[i]));
    }
  }
}

// Tiles 0 to 3 are products, 4 weights, 5 and 6 values.
template <class E>
void sums_bytes(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s,
                const cpu::Softmax* softmax) {
  if (s.first == s.last) return;
  shrink(s, v.heads, v.dim, softmax);
  const E elements;
  const int64_t fours = (v.count + 3) / 4;  // of positions
  alignas(64) char columns[4][kSide * 64];
  alignas(64) int32_t product[4][8 * kSide];
  FixedWeights weights;
  TileShapes shapes;
  shapes.set(0, 3, 8, 64), shapes.set(4, 4, 8, fours * 4), shapes.set(5, 6, fours, 64), shapes.set(7, 7, 8, 64);
  shapes.use();
  for (int64_t head = 0; head < v.heads; head++) {
    weights.read(v, s, head);
    cpu::AskAhead asking(next, head, v.dim * E::kBytes / 64);
    for (int64_t block = 0; block * 64 < v.dim; block++) {
      make_columns(v, elements, asking, head, block, columns[0]);
      for (int64_t run = s.first; run < s.last; run++) {
        load_tile<4>(weights.tiles[run - s.first], cpu::kTile);
        each_tile<4>([&](auto i) {
          zero_tile<i>();
          load_tile<5 + i % 2>(columns[i], 64);
          multiply_bytes<i, 4, 5 + i % 2>();
        });
        each_tile<4>([&](auto i) { store_tile<i>(product[i], 64); });
        add_products(product, weights.back[run - s.first], s.out + (head * s.fours + run) * kLanes * v.dim + block * 64,
                     v.dim);
      }
    }
  }
  _tile_release();
}

template <class E>
constexpr cpu::TileLoops byte_loops(float lift) {
  return {&pack_digits, &dots_bytes<E>, &sums_bytes<E>, lift};
}
