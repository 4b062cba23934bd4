// Attention by AMX, which multiplies tiles of bf16: sixteen rows of 64 bytes. Included by attend_amx.cpp, in its
// namespace.
//
// Scores: sixteen rows of K are the left tile as they lie in the cache, and queries the right one, packed once: the
// product is [position, query row], as everything about scores is. Values: weights are the left tile and V the right
// one, as it lies or, for many query rows, with the rows of two positions interleaved. Queries are bf16, or f16 in two
// parts; a weight is two parts of bf16, 2^-17 of it off at most. AMX takes subnormal numbers, below 2^-126, for zero.

constexpr int64_t kSide = 16;   // rows of a tile, and columns of f32
constexpr int64_t kPair = 32;   // numbers of bf16 in a row of a tile
constexpr int64_t kWide = 128;  // columns of V interleaved at a time: of 64 positions, a third of a first level
constexpr int64_t kTileHalves = kSide * kPair;

// Compilers do not see that the intrinsics of their headers read memory, and some leave out the stores before them:
// these say so. A tile's number is a constant.
template <int T>
KVX_INLINE void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
KVX_INLINE void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
KVX_INLINE void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int kSum, int kLeft, int kRight>
KVX_INLINE void multiply_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kLeft), "i"(kRight));
}

// The unit that multiplies tiles falls asleep after some 500 cycles without a product, and takes as many to wake up
// (measured on Sapphire Rapids). Where vectors work for longer, a product that nobody wants keeps it awake.

// Calls f(i as a constant) for i from 0 to N - 1, up to four. A product takes 52 cycles and another begins every 16:
// several sums have to be under way.
template <int N, class F>
KVX_INLINE void each_tile(F&& f) {
  f(std::integral_constant<int, 0>());
  if constexpr (N > 1) f(std::integral_constant<int, 1>());
  if constexpr (N > 2) f(std::integral_constant<int, 2>());
  if constexpr (N > 3) f(std::integral_constant<int, 3>());
}
// Calls f(n as a constant), n from 1 to 4.
template <class F>
KVX_INLINE void with_count(int64_t n, F&& f) {
  if (n >= 4) f(std::integral_constant<int, 4>());
  else if (n == 3) f(std::integral_constant<int, 3>());
  else if (n == 2) f(std::integral_constant<int, 2>());
  else f(std::integral_constant<int, 1>());
}

// Of the eight tiles, how many rows and bytes a row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int first, int last, int64_t of_rows, int64_t of_bytes) {  // of tiles from first to last
    for (int i = first; i <= last; i++) rows[i] = uint8_t(of_rows), bytes[i] = uint16_t(of_bytes);
  }
  void use() const { asm volatile("ldtilecfg %0" ::"m"(*this)); }
};
static_assert(sizeof(TileShapes) == 64, "what ldtilecfg reads");

// The next part of 32 numbers, rounded to bf16; what is left of them stays in x. A part that is infinite leaves
// nothing.
KVX_INLINE __m512i round_pair(Vec (&x)[2]) {
  const __m512bh pairs = _mm512_cvtne2ps_pbh(__m512(x[1]), __m512(x[0]));
  const Halves back = load<Halves>(&pairs);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const Vec rest = x[i] - BF16::part(back, i);
    x[i] = Vec(IVec(rest) & IVec(rest - rest == 0));
  }
  return load<__m512i>(&pairs);
}

// Query rows of one head, in groups of sixteen, the last group in fours: a group is [parts, dim / 32, 16, rows, 2].
inline int64_t group_rows(int64_t fours, int64_t group) {
  return (fours - 4 * group < 4 ? fours - 4 * group : 4) * kLanes;
}
inline int64_t group_halves(int64_t group, int64_t dim, int parts) { return group * kSide * dim * parts; }

void pack_tiles(const float* q, int64_t fours, int64_t dim, int parts, float* to) {
  for (int64_t run = 0; run < fours; run++) {
    const int64_t group = run / 4, rows = group_rows(fours, group);
    uint16_t* tiles = reinterpret_cast<uint16_t*>(to) + group_halves(group, dim, parts);
    for (int64_t d = 0; d < dim; d += kPair) {
      Vec x[kLanes][2];
      for (int r = 0; r < kLanes; r++)
        for (int i = 0; i < 2; i++) x[r][i] = load<Vec>(q + (run * kLanes + r) * dim + d + i * W);
      for (int part = 0; part < parts; part++) {
        __m512i pairs[kLanes];
        for (int r = 0; r < kLanes; r++) pairs[r] = round_pair(x[r]);
        // Words of four rows beside each other: word 4 * lane + i of each row is in lane `lane` of words[i].
        const __m512i a = _mm512_unpacklo_epi32(pairs[0], pairs[1]), b = _mm512_unpacklo_epi32(pairs[2], pairs[3]),
                      c = _mm512_unpackhi_epi32(pairs[0], pairs[1]), e = _mm512_unpackhi_epi32(pairs[2], pairs[3]);
        const __m512i words[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b), _mm512_unpacklo_epi64(c, e),
                                  _mm512_unpackhi_epi64(c, e)};
        uint16_t* tile = tiles + (part * (dim / kPair) + d / kPair) * kPair * rows + run % 4 * kLanes * 2;
        for (int i = 0; i < 4; i++) {
          __m128i lanes[4];
          memcpy(lanes, &words[i], sizeof lanes);
          for (int lane = 0; lane < 4; lane++) store(tile + (4 * lane + i) * rows * 2, lanes[lane]);
        }
      }
    }
  }
}

// Bytes from one position to the next in each sixteen of a tile; 0: they differ, or some are past the last.
struct Strides {
  int64_t of[cpu::kTile / kSide];

  explicit Strides(const cpu::TileRows& rows) {
    for (int64_t t = 0; t < rows.count; t += kSide) {
      const auto step = [&](int64_t i) { return intptr_t(rows.at[t + i]) - intptr_t(rows.at[t + i - 1]); };
      int64_t stride = t + kSide > rows.count ? 0 : rows.stride ? rows.stride : step(1);
      for (int64_t i = 2; i < kSide && stride && !rows.stride; i++)
        if (step(i) != stride) stride = 0;
      of[t / kSide] = stride;
    }
  }
};

// Sixteen positions of one head, 64 elements of each. By value: what is stored may be anything, for a compiler.
struct Sixteen {
  const char* const* at;
  int64_t offset, left;                   // of the elements in a row, and how many there are from there on
  const uint8_t* const* scale = nullptr;  // of each position, and where those of these elements are: every sixteen's
  int64_t of[4] = {};

  Sixteen(const cpu::TileRows& rows, int64_t bytes, int64_t t, int64_t head, int64_t block)
      : at(rows.at + t), offset(head * rows.head + block * bytes), left(rows.width - block * 64) {
    if (!rows.byte_scales) return;
    const cpu::ByteScales& s = *rows.byte_scales;
    const bool is_16 = s.size == 16;
    scale = s.at + t;
    const int64_t first = head * s.head + (block << (is_16 ? 2 : 1)) * s.group;
    for (int64_t i = 0; i < 4; i++)  // past the last element there may be none
      of[i] = 16 * i < left ? first + (is_16 ? i : i / 2) * s.group : first;
  }
  const char* row(int64_t j) const { return at[j] + offset; }
};

// 32 numbers of a row from `column` on, zeros past its last.
KVX_INLINE __m512i row_part(const cpu::TileRows& rows, int64_t t, int64_t head, int64_t column) {
  const int64_t left = rows.width ? rows.width - column : kPair;
  return _mm512_maskz_loadu_epi16(left >= kPair ? ~__mmask32(0) : (__mmask32(1) << left) - 1,
                                  rows.at[t] + head * rows.head + column * 2);
}
inline bool is_whole(const cpu::TileRows& rows, int64_t column) { return !rows.width || column + kPair <= rows.width; }

// Scores of N sixteens of positions: tiles 0 to N - 1. Tiles 4 and 7 are the parts of queries, 5 and 6 rows of K.
template <int N>
KVX_INLINE void dot_tiles(const cpu::TileRows& k, cpu::AskAhead asking, const Strides& strides, int64_t head,
                          const uint16_t* queries, int64_t columns, int parts) {
  alignas(64) char room[N][kSide * 64];
  const int64_t steps = k.dim / kPair;
  each_tile<N>([](auto i) { zero_tile<i>(); });
  for (int64_t step = 0; step < steps; step++) {
    const int64_t column = step * kPair;
    load_tile<4>(queries + step * kPair * columns, columns * 4);
    if (parts == 2) load_tile<7>(queries + (steps + step) * kPair * columns, columns * 4);
    each_tile<N>([&](auto i) {
      constexpr int kRows = 5 + i % 2;
      const int64_t from = i * kSide, stride = is_whole(k, column) ? strides.of[i] : 0;
      asking.ask(kSide * 64);
      for (int64_t j = 0; j < kSide && !stride; j++)
        store(room[i] + j * 64, row_part(k, from + j < k.count ? from + j : k.count - 1, head, column));
      load_tile<kRows>(stride ? k.at[from] + head * k.head + column * 2 : room[i], stride ? stride : 64);
      multiply_tiles<i, kRows, 4>();
      if (parts == 2) multiply_tiles<i, kRows, 7>();
    });
  }
}

// What is in a product [16, columns] goes to the runs its columns are of, times the scales of its positions.
inline void spread_scores(const float* product, int64_t columns, const float* scale, float* scores) {
  for (int64_t i = 0; i < kSide; i++)
    for (int64_t c = 0; c < columns; c += kLanes) {
      Quad x = load<Quad>(product + i * columns + c);
      if (scale) x *= scale[i];
      store(scores + (c * cpu::kTile + i * kLanes), x);
    }
}

// Tiles 0 to N - 1, times the scales of positions.
template <int N>
KVX_INLINE void store_scores(int64_t columns, const float* scale, float* scores) {
  alignas(64) float product[N][kSide * kSide];
  each_tile<N>([&](auto i) {  // all first: a load waits until its tile is stored
    if (columns == kLanes) store_tile<i>(scores + i * kSide * kLanes, kLanes * 4);
    else store_tile<i>(product[i], columns * 4);
  });
  for (int64_t i = 0; i < N && columns != kLanes; i++)
    spread_scores(product[i], columns, scale ? scale + i * kSide : nullptr, scores + i * kSide * kLanes);
  for (int64_t t = 0; t < N * kSide && scale && columns == kLanes; t += 4)
    store(scores + t * kLanes, scaled(load<Vec>(scores + t * kLanes), scale + t));
}

void dots_tiles(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  const Strides strides(k);
  TileShapes shapes;
  shapes.set(5, 6, kSide, 64);
  for (int64_t group = s.first / 4; group * 4 < s.last; group++) {
    const int64_t columns = group_rows(s.fours, group);
    if (shapes.bytes[4] != columns * 4) {
      shapes.set(0, 4, kSide, columns * 4), shapes.set(7, 7, kSide, columns * 4);
      shapes.use();
    }
    for (int64_t head = 0; head < k.heads; head++) {
      const uint16_t* queries = reinterpret_cast<const uint16_t*>(s.q + head * s.fours * kLanes * k.dim) +
                                group_halves(group, k.dim, s.parts);
      float* scores = s.scores + (head * s.fours + group * 4) * cpu::kTile * kLanes;
      const float* scale = k.scale ? k.scale + head * cpu::kTile : nullptr;
      with_count((k.count + kSide - 1) / kSide, [&](auto tiles) {
        const cpu::AskAhead asking(group == s.first / 4 ? next : nullptr, head, k.dim * 2);
        dot_tiles<tiles>(k, asking, strides, head, queries, columns, s.parts);
        store_scores<tiles>(columns, scale, scores);
      });
    }
  }
  _tile_release();
}

// ---- values

// 32 columns of a head's rows into some of four rows of sums, by f32: where V has infinities or NaN, since zero times
// one of them is NaN, and tiles have zeros.
template <class F>
void add_columns(const cpu::TileRows& v, int64_t head, int64_t column, const float* weights, float* out, unsigned rows,
                 F&& columns_of) {
  for (int64_t t = 0; t < v.count; t++) {
    const Halves raw = columns_of(t);
    const float scale = v.scale ? v.scale[head * cpu::kTile + t] : 1;
    for (int r = 0; r < kLanes; r++)
      for (int i = 0; i < 2 && (rows >> r & 1); i++) {
        float* to = out + r * v.dim + column + i * W;
        store(to, load<Vec>(to) + BF16::part(raw, i) * (weights[t * kLanes + r] * scale));
      }
  }
}

void add_columns(const cpu::TileRows& v, int64_t head, int64_t column, const float* weights, float* out,
                 unsigned rows = 15) {
  add_columns(v, head, column, weights, out, rows,
              [&](int64_t t) { return load<Halves>(v.at[t] + head * v.head + column * 2); });
}

// Columns of a tile's rows with those of two positions beside each other: tiles [positions / 32, columns / 16]. What is
// past the last position is zeros. False: there are infinities or NaN among them.
inline bool pair_rows(const cpu::TileRows& v, const cpu::TileRows* next, int64_t head, int64_t first, int64_t columns,
                      uint16_t* to) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  const int64_t end = (v.count + kPair - 1) / kPair * kPair;
  __m512i most[2] = {};
  for (int64_t t = 0; t < end; t += 2) {
    if (t % kSide == 0) multiply_tiles<6, 0, 4>();  // keeps tiles awake
    uint16_t* row = to + t / kPair * kPair * columns + t % kPair / 2 * kPair;
    const int64_t offset = head * v.head + first * 2;
    const char* at[2];
    for (int i = 0; i < 2; i++) at[i] = v.at[t + i < v.count ? t + i : v.count - 1] + offset;
    const __mmask32 is_there[2] = {t < v.count ? ~__mmask32(0) : 0, t + 1 < v.count ? ~__mmask32(0) : 0};
    for (int64_t d = 0; d < columns; d += kPair, row += 2 * kTileHalves) {
      if (next && is_there[1])
        for (int i = 0; i < 2; i++) ask(next->at[t + i] + head * next->head + (first + d) * 2);
      const __m512i a = _mm512_maskz_loadu_epi16(is_there[0], at[0] + d * 2),
                    b = _mm512_maskz_loadu_epi16(is_there[1], at[1] + d * 2);
      most[0] = _mm512_max_epu16(most[0], _mm512_slli_epi16(a, 1));
      most[1] = _mm512_max_epu16(most[1], _mm512_slli_epi16(b, 1));
      const __m512i lower = _mm512_unpacklo_epi16(a, b), upper = _mm512_unpackhi_epi16(a, b);
      store(row, _mm512_permutex2var_epi64(lower, low, upper));
      store(row + kTileHalves, _mm512_permutex2var_epi64(lower, high, upper));
    }
  }
  return _mm512_cmpge_epu16_mask(_mm512_max_epu16(most[0], most[1]), _mm512_set1_epi16(int16_t(0xff00))) == 0;
}

// Weights of four rows at 32 positions as two parts of bf16: rows of 64 bytes, a tile from one part to the next.
inline void split_weights(const float* weights, const float* scale, int64_t count, uint16_t* to) {
  alignas(64) static constexpr uint16_t kByRow[32] = {0, 4, 8,  12, 16, 20, 24, 28, 1, 5, 9,  13, 17, 21, 25, 29,
                                                      2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31};
  const __m512i by_row = load<__m512i>(kByRow);  // of words [position, row]
  __m512i x[2][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    Vec w[2];
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      const int64_t t = 8 * i + 4 * j;
      w[j] = weights_of(weights + t * kLanes, scale ? scale + t : nullptr, count - t);
    }
    x[0][i] = _mm512_permutexvar_epi16(by_row, round_pair(w));
    x[1][i] = _mm512_permutexvar_epi16(by_row, round_pair(w));
  }
#pragma GCC unroll 2
  for (int part = 0; part < 2; part++) {
    turn_lanes(x[part]);
#pragma GCC unroll 4
    for (int r = 0; r < kLanes; r++) store(to + part * kTileHalves + r * kPair, x[part][r]);
  }
}

// Tiles of weights of up to four groups: [group, positions / 32, part, 16, 32].
struct WeightTiles {
  static constexpr int64_t kGroups = 4, kHalves = 4 * kTileHalves;
  alignas(64) uint16_t tiles[kGroups * kHalves];

  void read(const cpu::TileRows& v, const cpu::TileStates& s, int64_t head, int64_t first, int64_t last) {
    for (int64_t run = first * 4; run < last * 4 && run < s.fours; run++)
      for (int64_t t = 0; t < v.count; t += kPair) {
        if (run % 4 == 0 && t == 0) multiply_tiles<6, 0, 4>();  // keeps tiles awake
        uint16_t* to = tiles + (run / 4 - first) * kHalves + t / kPair * 2 * kTileHalves + run % 4 * kLanes * kPair;
        const bool sees = run >= s.first && run < s.last;  // of one that does not, what lies here are no weights
        split_weights(s.scores + ((head * s.fours + run) * cpu::kTile + t) * kLanes,
                      v.scale ? v.scale + head * cpu::kTile + t : nullptr, sees ? v.count - t : 0, to);
      }
  }
};

// Sums of `columns` columns: tiles 0 to 3 are weights, 4 and 5 values, 6 and 7 sums.
inline void add_tiles(const uint16_t* weights, const uint16_t* values, int64_t columns, bool two, float* out,
                      int64_t dim) {
  load_tile<0>(weights, 64);
  load_tile<1>(weights + kTileHalves, 64);
  if (two) {
    load_tile<2>(weights + 2 * kTileHalves, 64);
    load_tile<3>(weights + 3 * kTileHalves, 64);
  }
  for (int64_t d = 0; d < columns; d += 2 * kSide) {
    const uint16_t* at = values + d / kSide * kTileHalves;
    load_tile<6>(out + d, dim * 4);
    load_tile<7>(out + d + kSide, dim * 4);
    load_tile<4>(at, 64);
    load_tile<5>(at + kTileHalves, 64);
    multiply_tiles<6, 1, 4>();
    multiply_tiles<7, 1, 5>();
    multiply_tiles<6, 0, 4>();
    multiply_tiles<7, 0, 5>();
    if (two) {
      load_tile<4>(at + kPair * columns, 64);
      load_tile<5>(at + kPair * columns + kTileHalves, 64);
      multiply_tiles<6, 3, 4>();
      multiply_tiles<7, 3, 5>();
      multiply_tiles<6, 2, 4>();
      multiply_tiles<7, 2, 5>();
    }
    store_tile<6>(out + d, dim * 4);
    store_tile<7>(out + d + kSide, dim * 4);
  }
}

// Few query rows: interleaving V would take longer than it saves. Rows of V are the right tile as they lie, sixteen
// positions of 32 columns, and the left one has each weight in four rows, as either part, for even columns or odd ones:
// beside it is a zero, for the column that it does not want.
struct EvenOdd {
  static constexpr int64_t kMostRuns = 2;
  alignas(64) uint32_t tiles[kMostRuns][cpu::kTile / kSide][kSide * kSide];  // [part and parity, row, position]

  void read(const cpu::TileRows& v, const cpu::TileStates& s, int64_t head) {
    const float* scale = v.scale ? v.scale + head * cpu::kTile : nullptr;
    for (int64_t run = s.first; run < s.last; run++)
      for (int64_t t = 0; t < v.count; t += kSide) {
        const float* weights = s.scores + ((head * s.fours + run) * cpu::kTile + t) * kLanes;
        const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        __m512i x[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const Vec w = weights_of(weights + 4 * i * kLanes, scale ? scale + t + 4 * i : nullptr, v.count - t - 4 * i);
          x[i] = _mm512_permutexvar_epi32(by_row, __m512i(w));
        }
        turn_lanes(x);
        uint32_t* tile = tiles[run - s.first][t / kSide];
#pragma GCC unroll 4
        for (int r = 0; r < kLanes; r++) {
          Vec row = Vec(x[r]);
#pragma GCC unroll 2
          for (int part = 0; part < 2; part++) {
            const __m256bh rounded = _mm512_cvtneps_pbh(__m512(row));
            const UVec even = __builtin_convertvector(load<Halves::Half>(&rounded), UVec), odd = even << 16;
            store(tile + (part * kLanes + r) * kSide, even), store(tile + ((2 + part) * kLanes + r) * kSide, odd);
            row = row - Vec(odd);
          }
        }
      }
  }
};

// The product of 32 columns, [part and parity, row, column], into four rows of sums. Returns the rows, as bits, whose
// product has NaN, and leaves them.
inline unsigned add_product(const float* product, float* out, int64_t dim) {
  const IVec low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, high = low + 8;
  unsigned left = 0;
#pragma GCC unroll 4
  for (int r = 0; r < kLanes; r++) {
    const auto part = [&](int i) { return load<Vec>(product + (i * kLanes + r) * kSide); };
    const __m512 even = __m512(part(0) + part(1)), odd = __m512(part(2) + part(3));
    if (_mm512_cmp_ps_mask(even, odd, _CMP_UNORD_Q)) {
      left |= 1u << r;
      continue;
    }
    float* to = out + r * dim;
    store(to, load<Vec>(to) + Vec(_mm512_permutex2var_ps(even, __m512i(low), odd)));
    store(to + W, load<Vec>(to + W) + Vec(_mm512_permutex2var_ps(even, __m512i(high), odd)));
  }
  return left;
}

// Tiles 0 to N - 1 into sums: 32 columns a tile, or a tile of each run. columns_of(position, column): 32 of a row.
template <int N, int kRuns, class F>
KVX_INLINE void store_sums(const cpu::TileRows& v, const cpu::TileStates& s, int64_t head, int64_t column,
                           F&& columns_of) {
  alignas(64) float product[N][kSide * kSide];
  each_tile<N>([&](auto i) { store_tile<i>(product[i], 64); });  // all first: a load waits until its tile is stored
  for (int i = 0; i < N; i++) {
    const int64_t state = head * s.fours + s.first + i % kRuns, first = column + i / kRuns * kPair;
    float* out = s.out + state * kLanes * v.dim;
    if (const unsigned left = add_product(product[i], out + first, v.dim))
      add_columns(v, head, first, s.scores + state * cpu::kTile * kLanes, out, left,
                  [&](int64_t t) { return columns_of(t, first); });
  }
}

// N times 32 columns from `column` on, of one head. Tiles 0 to 3 are sums, of both runs where there are two, 4 and 5
// weights, 6 and 7 rows of V.
template <int N, bool kTwoRuns>
KVX_INLINE void sum_columns(const cpu::TileRows& v, cpu::AskAhead& asking, const Strides& strides,
                            const EvenOdd& weights, const cpu::TileStates& s, int64_t head, int64_t column) {
  alignas(64) char room[kSide * 64];
  constexpr int kRuns = kTwoRuns ? 2 : 1, kSums = N * kRuns;
  each_tile<kSums>([](auto i) { zero_tile<i>(); });
  for (int64_t t = 0; t < v.count; t += kSide) {
    load_tile<4>(weights.tiles[0][t / kSide], 64);
    if constexpr (kTwoRuns) load_tile<5>(weights.tiles[1][t / kSide], 64);
    each_tile<N>([&](auto i) {
      constexpr int kRows = 6 + i % 2;
      const int64_t first = column + i * kPair, stride = is_whole(v, first) ? strides.of[t / kSide] : 0;
      asking.ask(kSide * 64);
      for (int64_t j = 0; j < kSide && !stride; j++)
        store(room + j * 64, t + j < v.count ? row_part(v, t + j, head, first) : __m512i{});
      load_tile<kRows>(stride ? v.at[t] + head * v.head + first * 2 : room, stride ? stride : 64);
      multiply_tiles<i * kRuns, 4, kRows>();
      if constexpr (kTwoRuns) multiply_tiles<i * kRuns + 1, 5, kRows>();
    });
  }
  store_sums<kSums, kRuns>(v, s, head, column, [&](int64_t t, int64_t first) {
    const __m512i x = row_part(v, t, head, first);
    return load<Halves>(&x);
  });
}

void sum_even_odd(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s) {
  EvenOdd weights;
  const Strides strides(v);
  TileShapes shapes;
  shapes.set(0, 7, kSide, 64);
  shapes.use();
  for (int64_t head = 0; head < v.heads; head++) {
    weights.read(v, s, head);
    multiply_tiles<5, 6, 7>();  // keeps tiles awake
    cpu::AskAhead asking(next, head, v.dim * 2);
    for (int64_t column = 0; column < v.dim;) {
      const int64_t left = (v.dim - column) / kPair;
      if (s.last - s.first == 1)
        with_count(left, [&](auto n) { sum_columns<n, false>(v, asking, strides, weights, s, head, column); }),
            column += 4 * kPair;
      else
        with_count(left < 2 ? left : 2,
                   [&](auto n) {
                     if constexpr (n <= 2) sum_columns<n, true>(v, asking, strides, weights, s, head, column);
                   }),
            column += 2 * kPair;
    }
  }
}

// Runs of rows that see nothing of the tile are left out of a group by weights of zero.
void sum_pairs(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s) {
  alignas(64) uint16_t columns[cpu::kTile * kWide];
  WeightTiles weights;
  int64_t rows = 0;  // the tiles are set up for
  const auto set_up = [&](int64_t group) {
    if (rows == group_rows(s.fours, group)) return;
    rows = group_rows(s.fours, group);
    TileShapes shapes;
    shapes.set(0, 3, rows, 64), shapes.set(4, 5, kSide, 64), shapes.set(6, 7, rows, 64);
    shapes.use();
  };
  set_up(s.first / 4);
  for (int64_t head = 0; head < v.heads; head++)
    for (int64_t from = s.first / 4, last = (s.last + 3) / 4; from < last; from += WeightTiles::kGroups) {
      const int64_t to = from + WeightTiles::kGroups < last ? from + WeightTiles::kGroups : last;
      weights.read(v, s, head, from, to);
      for (int64_t first = 0; first < v.dim; first += kWide) {
        const int64_t width = v.dim - first < kWide ? v.dim - first : kWide;
        const bool is_usual = pair_rows(v, from == s.first / 4 ? next : nullptr, head, first, width, columns);
        for (int64_t run = from * 4; !is_usual && run < to * 4; run++)
          for (int64_t d = first; d < first + width && run >= s.first && run < s.last; d += kPair)
            add_columns(v, head, d, s.scores + (head * s.fours + run) * cpu::kTile * kLanes,
                        s.out + (head * s.fours + run) * kLanes * v.dim);
        for (int64_t group = from; is_usual && group < to; group++) {
          set_up(group);
          add_tiles(weights.tiles + (group - from) * WeightTiles::kHalves, columns, width, v.count > kPair,
                    s.out + (head * s.fours + group * 4) * kLanes * v.dim + first, v.dim);
        }
      }
    }
}

void sums_tiles(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s,
                const cpu::Softmax* softmax) {
  if (s.parts == 3)  // queries of f32: weights keep their 24 bits
    return cpu::attend_avx512.sums[KVX_DTYPE_BF16](v, next, s, softmax);
  if (s.first == s.last) return;
  shrink(s, v.heads, v.dim, softmax);
  if (s.last - s.first <= EvenOdd::kMostRuns) sum_even_odd(v, next, s);
  else sum_pairs(v, next, s);
  _tile_release();
}
