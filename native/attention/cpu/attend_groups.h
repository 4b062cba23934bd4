// Rows with a scale for every 16 or 32 elements, and fp8 rows, as f32 in registers, on AVX-512. Included by attend.cpp,
// in its namespace. For up to two fours of query rows: what a row takes to become f32 is then more than what multiplies
// it, and storing and reading it again would be as much once more.

constexpr int64_t kChunk = 2 * W;  // elements at a time: two vectors

// The scales of a chunk's elements. kIsF16: they are f16, else bytes, whose numbers are looked up.
template <int kSize, bool kIsF16>
KVX_INLINE Vec chunk_scales(const cpu::ByteScales& s, const uint8_t* at, int64_t first, int64_t left) {
  const auto scale = [&](int64_t i) {
    const uint8_t* p = at + (first / kSize + i) * s.group;
    if constexpr (kIsF16) return Vec(_mm512_maskz_cvtph_ps(0xffff, _mm256_set1_epi16(load<int16_t>(p))));
    else return splat(s.numbers[*p]);
  };
  if (kSize == 32 || left <= 16) return scale(0);
  // Lane i has element i or 2 * i or 2 * i + 1: see below.
  return Vec(_mm512_mask_mov_ps(__m512(scale(0)), 0xff00, __m512(scale(1))));
}

// A chunk of a row as f32, from element `first` on; `left`: how many there are. Numbers of four bits come out as the
// even elements, then the odd ones: a byte has one of each, and a look-up takes the code in the last four bits of a
// word.
template <const Nibbles& kCodes, int kSize, bool kIsF16>
struct GroupedNibbles {
  static constexpr bool kIsEvenOdd = true;
  static constexpr int64_t kBytes = kChunk / 2;
  Vec numbers;

  GroupedNibbles() {
    for (int i = 0; i < 16; i++) numbers[i] = bf16_to_f32(uint16_t(kCodes.high[i] << 8 | kCodes.low[i]));
  }
  KVX_INLINE void at(const cpu::ByteScales* s, const char* row, const uint8_t* scale, int64_t first, int64_t left,
                     Vec (&x)[2]) const {
    const __mmask16 mask = left >= kChunk ? 0xffff : __mmask16((1u << (left + 1) / 2) - 1);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, row + first / 2));
    const Vec by = chunk_scales<kSize, kIsF16>(*s, scale, first, left);
    x[0] = Vec(_mm512_permutexvar_ps(bytes, __m512(numbers))) * by;
    x[1] = Vec(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), __m512(numbers))) * by;
  }
};
// fp8, as AVX-512 reads it; with a scale for every 32 elements or none.
template <class T, bool kIsScaled>
struct Fp8Chunks {
  static constexpr bool kIsEvenOdd = false;
  static constexpr int64_t kBytes = kChunk;

  KVX_INLINE void at(const cpu::ByteScales* s, const char* row, const uint8_t* scale, int64_t first, int64_t left,
                     Vec (&x)[2]) const {
    char rest[kChunk];
    if (left < kChunk) store(rest, _mm256_maskz_loadu_epi8((__mmask32(1) << left) - 1, row + first));
    const typename T::Raw raw = T::template read<true>(left < kChunk ? rest : row + first);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) x[i] = T::part(raw, i);
    if constexpr (kIsScaled) {
      const Vec by = chunk_scales<32, false>(*s, scale, first, left);
      x[0] *= by, x[1] *= by;
    }
  }
};

// In the order elements come out in.
template <class E>
void pack_grouped(const float* q, int64_t fours, int64_t dim, int, float* to) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  for (int64_t i = 0; i < fours * kLanes * dim; i += kChunk) {
    const __m512 a = load<__m512>(q + i), b = load<__m512>(q + i + W);
    store(to + i, E::kIsEvenOdd ? _mm512_permutex2var_ps(a, even, b) : a);
    store(to + i + W, E::kIsEvenOdd ? _mm512_permutex2var_ps(a, odd, b) : b);
  }
}

// Where the chunks of a tile's rows are. kIsWhole: rows are whole chunks, and all are there.
template <class E, bool kIsWhole>
struct Chunks {
  const E& elements;
  const cpu::TileRows& rows;
  int64_t offset, scale_offset;  // of the head

  Chunks(const E& e, const cpu::TileRows& r, int64_t head)
      : elements(e), rows(r), offset(head * r.head), scale_offset(r.byte_scales ? head * r.byte_scales->head : 0) {}
  KVX_INLINE void at(int64_t t, int64_t first, Vec (&x)[2]) const {
    const cpu::ByteScales* s = rows.byte_scales;
    const uint8_t* scale = s ? s->at[t] : nullptr;
    const int64_t left = kIsWhole ? kChunk : rows.width - first;
    if (!kIsWhole && ((s && !scale) || left <= 0)) x[0] = x[1] = Vec{};
    else elements.at(s, rows.at[t] + offset, scale + scale_offset, first, left, x);
  }
};
inline bool is_whole(const cpu::TileRows& rows) {
  bool whole = rows.width == rows.dim;
  for (int64_t t = 0; t < rows.count && rows.byte_scales; t++) whole &= rows.byte_scales->at[t] != nullptr;
  return whole;
}

// All positions of one head against R rows.
template <int R, class C>
inline void dot_chunks(const C& chunks, const cpu::TileRows& k, cpu::AskAhead asking, int64_t bytes, const float* q,
                       const float* scale, float* scores) {
  for (int64_t t = 0; t < k.count; t += 4) {
    Vec sum[4][R] = {};
    asking.ask(4 * bytes);
    for (int64_t d = 0; d < k.dim; d += kChunk) {
      Vec x[4][2];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) chunks.at(t + i, d, x[i]);
#pragma GCC unroll 4
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
          const Vec y = load<Vec>(q + r * k.dim + d + part * W);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) sum[i][r] += x[i][part] * y;
        }
    }
    store_scores(sum, scale ? scale + t : nullptr, scores + t * kLanes);
  }
}

template <class E>
void dots_grouped(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  const E elements;
  const int64_t bytes = k.dim * E::kBytes / kChunk;
  const bool whole = is_whole(k);
  for (int64_t head = 0; head < k.heads; head++)
    each_run(s, head, [&](int64_t state, auto rows) {
      const cpu::AskAhead asking(state == head * s.fours + s.first ? next : nullptr, head, bytes);
      const float *q = s.q + state * kLanes * k.dim, *scale = k.scale ? k.scale + head * cpu::kTile : nullptr;
      float* scores = s.scores + state * cpu::kTile * kLanes;
      if (whole) dot_chunks<rows>(Chunks<E, true>(elements, k, head), k, asking, bytes, q, scale, scores);
      else dot_chunks<rows>(Chunks<E, false>(elements, k, head), k, asking, bytes, q, scale, scores);
    });
}

// Two chunks of columns of all positions into R rows of sums, which stay in registers.
template <int R, class C>
inline void sum_chunks(const C& chunks, const cpu::TileRows& v, cpu::AskAhead& asking, bool is_even_odd, int64_t bytes,
                       const Weights* weights, float* out, int64_t first) {
  Vec sum[R][4] = {};
  for (int64_t t = 0; t < v.count; t++) {
    Vec x[2][2];
    asking.ask(bytes);
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) chunks.at(t, first + c * kChunk, x[c]);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
      for (int c = 0; c < 4; c++) sum[r][c] += x[c / 2][c % 2] * splat(weights[t][r]);
  }
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) {
      const __m512 a = __m512(sum[r][2 * c]), b = __m512(sum[r][2 * c + 1]);
      float* to = out + r * v.dim + first + c * kChunk;
      store(to, load<Vec>(to) + Vec(is_even_odd ? _mm512_permutex2var_ps(a, low, b) : a));
      store(to + W, load<Vec>(to + W) + Vec(is_even_odd ? _mm512_permutex2var_ps(a, high, b) : b));
    }
}

template <class E>
void sums_grouped(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s,
                  const cpu::Softmax* softmax) {
  shrink(s, v.heads, v.dim, softmax);
  const E elements;
  const int64_t bytes = E::kBytes * 2;  // of two chunks
  const bool whole = is_whole(v);
  Weights weights[cpu::kTile];
  for (int64_t head = 0; head < v.heads; head++) {
    cpu::AskAhead asking(next, head, v.dim * E::kBytes / kChunk);
    each_run(s, head, [&](int64_t state, auto rows) {
      for (int64_t t = 0; t < v.count; t++) {
        const Quad four = load<Quad>(s.scores + (state * cpu::kTile + t) * kLanes);
        weights[t] = v.scale ? four * v.scale[head * cpu::kTile + t] : four;
      }
      float* out = s.out + state * kLanes * v.dim;
      for (int64_t d = 0; d < v.dim; d += 2 * kChunk)
        if (whole)
          sum_chunks<rows>(Chunks<E, true>(elements, v, head), v, asking, E::kIsEvenOdd, bytes, weights, out, d);
        else sum_chunks<rows>(Chunks<E, false>(elements, v, head), v, asking, E::kIsEvenOdd, bytes, weights, out, d);
    });
  }
}

// Of groups of 16 and of 32 elements, as the tile has them.
template <class E16, class E32 = E16>
struct ChunkLoops {
  static bool is_16(const cpu::TileRows& rows) { return rows.byte_scales && rows.byte_scales->size == 16; }
  static void dots(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
    is_16(k) ? dots_grouped<E16>(k, next, s) : dots_grouped<E32>(k, next, s);
  }
  static void sums(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s,
                   const cpu::Softmax* softmax) {
    is_16(v) ? sums_grouped<E16>(v, next, s, softmax) : sums_grouped<E32>(v, next, s, softmax);
  }
  static constexpr cpu::TileLoops loops(float lift = 1) { return {&pack_grouped<E32>, &dots, &sums, lift}; }
};
template <class T, bool kIsScaled>
constexpr cpu::TileLoops fp8_loops() {
  return ChunkLoops<Fp8Chunks<T, kIsScaled>>::loops(T::kLiftIn * T::kLiftOut);
}
template <const Nibbles& kCodes, bool kIsF16>
constexpr cpu::TileLoops nibble_loops() {
  return ChunkLoops<GroupedNibbles<kCodes, 16, kIsF16>, GroupedNibbles<kCodes, 32, kIsF16>>::loops();
}
