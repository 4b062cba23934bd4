// int8 rows by the instruction that adds four products of bytes to a 32-bit sum (SDOT). Included by attend.cpp, in its
// namespace, for cores that have it.
//
// Queries and softmax weights become integers, times a factor a row: of 16 bits where queries came as bf16 or f16, of
// 24 where they came as f32. They are D signed bytes, digits to the base 256, so that two or three instructions take
// the place of four multiplications in f32 and of widening the row. Sums of products are exact; what is rounded is a
// query, by 2^-16 or 2^-24 of the largest of its row, and a weight, by as much of the largest of its tile.

constexpr int64_t kColumns = 128;  // of V that are interleaved at a time: with 64 positions an eighth of a first level

// Four numbers, each of a row whose largest magnitude is `most`, times `first` times `second` are those integers;
// `back` makes them numbers again. Two factors: one would be infinite where all are small.
template <int D>
struct Fixed {
  static constexpr float kMost = D == 3 ? 127 * 65536 : 127 * 256;  // nearly what the digits hold: rounding may go past
  Quad first, second, back;

  explicit Fixed(Quad most) {
    first = most < 0x1p-60f ? splat4(0x1p100f) : splat4(1);
    const Quad lifted = most * first;
    second = lifted > 0 ? kMost / lifted : splat4(0);
    back = most / kMost + (most - most);  // NaN, for infinity too: so is what comes of it
  }
  // The digits of each, from -128 to 127, the lowest first; what is above them is anything.
  uint8x16_t digits(Quad x) const {
    const int32x4_t bias = vdupq_n_s32(D == 3 ? 0x808080 : 0x8080);
    int32x4_t fixed;
    if constexpr (D == 2) fixed = int32x4_t(x * first * second + 12582912.0f);  // 1.5 * 2^23: rounds as it is added
    else fixed = vcvtnq_s32_f32(float32x4_t(x * first * second));
    return vreinterpretq_u8_s32(veorq_s32(vaddq_s32(fixed, bias), bias));
  }
};

inline Quad larger_magnitude(Quad most, Quad x) {  // NaN stays
  return Quad(vmaxq_f32(float32x4_t(most), vabsq_f32(float32x4_t(x))));
}

inline void ask_near(const char* p) { __builtin_prefetch(p, 0, 3); }

// For a look-up in four vectors of digits: digit `digit` of each of the sixteen numbers.
inline uint8x16_t digits_at(int digit) {
  uint8_t at[16];
  for (int i = 0; i < 16; i++) at[i] = uint8_t(i * 4 + digit);
  return vld1q_u8(at);
}

// A query row in place: sixteen numbers become D times sixteen bytes. In the room this leaves is the row's factor.
template <int D>
inline void pack_digits(float* q, int64_t n) {
  Quad most = {};
  for (int64_t d = 0; d < n; d += 4) most = larger_magnitude(most, load<Quad>(q + d));
  const Fixed<D> fixed(splat4(vmaxvq_f32(float32x4_t(most))));
  for (int64_t d = 0; d < n; d += 16) {
    uint8x16x4_t numbers;
    for (int i = 0; i < 4; i++) numbers.val[i] = fixed.digits(load<Quad>(q + d + 4 * i));
    for (int digit = 0; digit < D; digit++) store(q + d + 4 * digit, vqtbl4q_u8(numbers, digits_at(digit)));
  }
  q[12] = fixed.back[0];
}
void pack_s8(float* q, int64_t n, int digits) { digits == 2 ? pack_digits<2>(q, n) : pack_digits<3>(q, n); }

// Rows of 4 bits, the lower half of a byte first. `split` makes two vectors of a byte's halves: each shift then serves
// sixteen elements, and a core has one pipe for shifts.
struct Halved {
  int8x16_t low, high;
};
template <class F>
inline void unpack_nibbles(char* to, const char* row, int64_t bytes, F&& split) {
  const auto some = [&](const char* from, int8_t(&out)[32]) {
    const Halved x = split(load<uint8x16_t>(from));
    store(out, vzip1q_s8(x.low, x.high)), store(out + 16, vzip2q_s8(x.low, x.high));
  };
  int64_t i = 0;
  for (; i + 16 <= bytes; i += 16) some(row + i, *reinterpret_cast<int8_t(*)[32]>(to + 2 * i));
  if (i == bytes) return;
  char rest[16] = {};
  int8_t last[32];
  memcpy(rest, row + i, size_t(bytes - i));
  some(rest, last);
  memcpy(to + 2 * i, last, size_t(2 * (bytes - i)));
}
void unpack_s4(const cpu::TileRows& rows, int64_t head, int64_t bytes, char* to, int64_t stride,
               const cpu::TileRows* next) {
  each_packed(rows, head, bytes, next, [&](int64_t t, const char* row) {
    unpack_nibbles(to + t * stride, row, bytes, [](uint8x16_t x) {
      const int8x16_t both = vreinterpretq_s8_u8(x);
      return Halved{vshrq_n_s8(vshlq_n_s8(both, 4), 4), vshrq_n_s8(both, 4)};
    });
  });
}
void unpack_e2m1(const cpu::TileRows& rows, int64_t head, int64_t bytes, char* to, int64_t stride,
                 const cpu::TileRows* next) {
  const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  const int8x16_t numbers = vld1q_s8(doubled);
  each_packed(rows, head, bytes, next, [&](int64_t t, const char* row) {
    unpack_nibbles(to + t * stride, row, bytes, [&](uint8x16_t x) {
      return Halved{vqtbl1q_s8(numbers, vandq_u8(x, vdupq_n_u8(15))), vqtbl1q_s8(numbers, vshrq_n_u8(x, 4))};
    });
  });
}

// Four positions against R query rows: scores [4, 4]. `next`: rows that are asked for meanwhile; NULL: none.
template <int R, int D>
inline void dot_block_s8(const char* const* at, const char* const* next, int64_t near, int64_t dim, const float* scale,
                         const float* q, float* scores) {
  int32x4_t sum[4][R][D] = {};
  for (int64_t d = 0; d < dim; d += 16) {
    if (next && d % 64 == 0)
      for (int i = 0; i < 4; i++) ask(next[i] + d), ask_near(at[i] + near + d);
    int8x16_t x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) x[i] = load<int8x16_t>(at[i] + d);
#pragma GCC unroll 2
    for (int r = 0; r < R; r++)
#pragma GCC unroll 3
      for (int digit = 0; digit < D; digit++) {
        const int8x16_t y = load<int8x16_t>(q + r * dim + d + 4 * digit);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[i][r][digit] = vdotq_s32(sum[i][r][digit], x[i], y);
      }
  }
  constexpr int kOther = R - 1;  // two positions of two rows in a vector; a single row is there twice
  const Quad back = {q[12], q[kOther * dim + 12], q[12], q[kOther * dim + 12]};
#pragma GCC unroll 2
  for (int i = 0; i < 4; i += 2) {
    Quad whole = {};
#pragma GCC unroll 3
    for (int digit = D - 1; digit >= 0; digit--) {
      const int32x4_t four = vpaddq_s32(vpaddq_s32(sum[i][0][digit], sum[i][kOther][digit]),
                                        vpaddq_s32(sum[i + 1][0][digit], sum[i + 1][kOther][digit]));
      whole = whole * 256.0f + Quad(vcvtq_f32_s32(four));
    }
    whole *= back;
    if (scale) whole *= Quad{scale[i], scale[i], scale[i + 1], scale[i + 1]};
    memcpy(scores + i * kLanes, &whole, 4 * R);
    memcpy(scores + (i + 1) * kLanes, reinterpret_cast<const char*>(&whole) + 8, 4 * R);
  }
}

// The same where every C times sixteen elements have a scale: group [dim / 16 / C, kTile]. Of two digits: a sum of the
// upper one's products, times 256, and of the lower one's is less than 2^22 in a lane, and made f32 as in sum_chunk_s8.
template <int R, int C>
inline void dot_groups_s8(const char* const* at, int64_t dim, const float* group, const float* q, float* scores) {
  float32x4_t sum[4][R] = {};
  const int32x4_t base = vdupq_n_s32(0x4b400000);
  for (int64_t d = 0; d < dim; d += 16 * C, group += cpu::kTile) {
    int8x16_t x[4][C];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) x[i][c] = load<int8x16_t>(at[i] + d + 16 * c);
    const float32x4_t scale = vld1q_f32(group);
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
      int32x4_t part[4] = {};
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        const int8x16_t upper = load<int8x16_t>(q + r * dim + d + 16 * c + 4);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) part[i] = vdotq_s32(part[i], x[i][c], upper);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) part[i] = vaddq_s32(vshlq_n_s32(part[i], 8), base);
#pragma GCC unroll 2
      for (int c = 0; c < C; c++) {
        const int8x16_t lower = load<int8x16_t>(q + r * dim + d + 16 * c);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) part[i] = vdotq_s32(part[i], x[i][c], lower);
      }
      const auto number = [](int32x4_t bits) { return vreinterpretq_f32_s32(bits) - 12582912.0f; };
      sum[0][r] = vfmaq_laneq_f32(sum[0][r], number(part[0]), scale, 0);
      sum[1][r] = vfmaq_laneq_f32(sum[1][r], number(part[1]), scale, 1);
      sum[2][r] = vfmaq_laneq_f32(sum[2][r], number(part[2]), scale, 2);
      sum[3][r] = vfmaq_laneq_f32(sum[3][r], number(part[3]), scale, 3);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    for (int r = 0; r < R; r++) scores[i * kLanes + r] = vaddvq_f32(sum[i][r]) * q[r * dim + 12];
}

template <int C>
inline void dots_of_groups(const cpu::TileRows& k, const cpu::TileStates& s) {
  for (int64_t t = 0; t < k.count; t += 4)
    each_run(s, 0, [&](int64_t state, auto rows) {
      constexpr int R = rows > 2 ? 2 : int(rows);
      for (int r = 0; r < rows; r += R)
        dot_groups_s8<R, C>(k.at + t, k.dim, k.group_scale + t, s.q + (state * kLanes + r) * k.dim,
                            s.scores + (state * cpu::kTile + t) * kLanes + r);
    });
}

template <int D>
inline void dots_of(const cpu::TileRows& k, const cpu::TileRows& next, const cpu::TileStates& s) {
  const int64_t near = k.by_head ? 4 * k.dim : k.head;
  each_block(k, 4, [&](int64_t t, int64_t head) {
    const char *row[4], *then[4];
    for (int i = 0; i < 4; i++) row[i] = k.at[t + i] + head * k.head, then[i] = next.at[t + i] + head * next.head;
    const float* scale = k.scale ? k.scale + head * cpu::kTile + t : nullptr;
    each_run(s, head, [&](int64_t state, auto rows) {
      constexpr int R = rows > 2 ? 2 : int(rows);
      for (int r = 0; r < rows; r += R)
        dot_block_s8<R, D>(row, r == 0 ? then : nullptr, near, k.dim, scale, s.q + (state * kLanes + r) * k.dim,
                           s.scores + (state * cpu::kTile + t) * kLanes + r);
    });
  });
}
void dots_s8(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  if (k.group_scale) return k.group == 16 ? dots_of_groups<1>(k, s) : dots_of_groups<2>(k, s);
  s.parts == 2 ? dots_of<2>(k, next ? *next : k, s) : dots_of<3>(k, next ? *next : k, s);
}

constexpr uint8_t kByRow[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};  // of [position, row]

// The weights of a tile's positions times their scales, as digits: [positions / 4, digit, row, 4].
template <int D>
struct FixedWeights {
  alignas(64) int8_t digits[cpu::kTile * D * kLanes];
  Quad back;

  void read(const float* weights, const float* scale, int64_t count) {
    Quad most = {}, w[cpu::kTile];
    for (int64_t t = 0; t < count; t++) {
      w[t] = load<Quad>(weights + t * kLanes);
      if (scale) w[t] *= scale[t];
      most = larger_magnitude(most, w[t]);
    }
    for (int64_t t = count; t % 4; t++) w[t] = Quad{};
    const Fixed<D> fixed(most);
    back = fixed.back;
    const uint8x16_t by_row = vld1q_u8(kByRow);
    int8_t* to = digits;
    for (int64_t t = 0; t < count; t += 4) {
      uint8x16_t numbers[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) numbers[i] = fixed.digits(w[t + i]);
      // Halves of words, then their bytes, are sorted apart: what is left of each is the digit [position, row].
      const auto halves = [&](auto&& take) {
        return std::pair(take(vreinterpretq_u16_u8(numbers[0]), vreinterpretq_u16_u8(numbers[1])),
                         take(vreinterpretq_u16_u8(numbers[2]), vreinterpretq_u16_u8(numbers[3])));
      };
      const auto [a, b] = halves([](uint16x8_t x, uint16x8_t y) { return vreinterpretq_u8_u16(vuzp1q_u16(x, y)); });
      store(to, vqtbl1q_u8(vuzp1q_u8(a, b), by_row)), store(to + 16, vqtbl1q_u8(vuzp2q_u8(a, b), by_row));
      if constexpr (D == 3) {
        const auto [c, d] = halves([](uint16x8_t x, uint16x8_t y) { return vreinterpretq_u8_u16(vuzp2q_u16(x, y)); });
        store(to + 32, vqtbl1q_u8(vuzp1q_u8(c, d), by_row));
      }
      to += 16 * D;
    }
  }
};

// Columns of a tile's rows with those of four positions beside each other: [positions / 4, columns, 4].
inline void interleave(const cpu::TileRows& v, const cpu::TileRows& next, int64_t head, int64_t first, int64_t columns,
                       int8_t* to) {
  for (int64_t t = 0; t < v.count; t += 4) {
    const char *row[4], *then[4];
    for (int i = 0; i < 4; i++)
      row[i] = v.at[t + i] + head * v.head + first, then[i] = next.at[t + i] + head * next.head + first;
    for (int64_t d = 0; d < columns; d += 16, to += 64) {
      if (d % 64 == 0)
        for (int i = 0; i < 4; i++) ask(then[i] + d), ask_near(row[i] + v.head + d);
      int8x16_t x[4];
      for (int i = 0; i < 4; i++) x[i] = load<int8x16_t>(row[i] + d);
      const int8x16_t even = vzip1q_s8(x[0], x[2]), odd = vzip1q_s8(x[1], x[3]);
      const int8x16_t even2 = vzip2q_s8(x[0], x[2]), odd2 = vzip2q_s8(x[1], x[3]);
      store(to, vzip1q_s8(even, odd)), store(to + 16, vzip2q_s8(even, odd));
      store(to + 32, vzip1q_s8(even2, odd2)), store(to + 48, vzip2q_s8(even2, odd2));
    }
  }
}

// C vectors of four columns of every position into R rows of sums. From one four of positions to the next are `stride`
// bytes of v.
template <int R, int C, int D>
inline void sum_chunk_s8(const int8_t* v, int64_t stride, int64_t fours, const FixedWeights<D>& weights, float* out,
                         int64_t dim) {
  // Sums begin at the bits of 1.5 * 2^23 and stay less than 2^22 from there: they are f32 already, and need no
  // conversion, which is slow.
  int32x4_t sum[R][C][D];
  for (auto& row : sum)
    for (auto& column : row)
      for (int32x4_t& digit : column) digit = vdupq_n_s32(0x4b400000);
  const int8_t* by = weights.digits;
  for (int64_t i = 0; i < fours; i++, v += stride) {
    int8x16_t x[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) x[c] = load<int8x16_t>(v + 16 * c);
#pragma GCC unroll 3
    for (int digit = 0; digit < D; digit++, by += 16) {
      const int8x16_t w = load<int8x16_t>(by);
#pragma GCC unroll 4
      for (int c = 0; c < C; c++) {
        sum[0][c][digit] = vdotq_laneq_s32(sum[0][c][digit], x[c], w, 0);
        if constexpr (R > 1) sum[1][c][digit] = vdotq_laneq_s32(sum[1][c][digit], x[c], w, 1);
        if constexpr (R > 2) sum[2][c][digit] = vdotq_laneq_s32(sum[2][c][digit], x[c], w, 2);
        if constexpr (R > 2) sum[3][c][digit] = vdotq_laneq_s32(sum[3][c][digit], x[c], w, 3);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
      Quad whole = {};
#pragma GCC unroll 3
      for (int digit = D - 1; digit >= 0; digit--) whole = whole * 256.0f + (Quad(sum[r][c][digit]) - 12582912.0f);
      float* to = out + r * dim + 4 * c;
      store(to, load<Quad>(to) + whole * weights.back[r]);
    }
}

template <int D>
inline void sums_of_digits(const cpu::TileRows& v, const cpu::TileRows& next, const cpu::TileStates& s) {
  alignas(64) int8_t columns[cpu::kTile * kColumns];
  FixedWeights<D> weights;
  for (int64_t head = 0; head < v.heads; head++)
    for (int64_t first = 0; first < v.dim; first += kColumns) {
      const int64_t width = v.dim - first < kColumns ? v.dim - first : kColumns;
      interleave(v, next, head, first, width, columns);
      each_run(s, head, [&](int64_t state, auto rows) {
        constexpr int C = rows > 1 ? 2 : 4;
        const float* scale = v.scale ? v.scale + head * cpu::kTile : nullptr;
        if (!v.group_scale) weights.read(s.scores + state * cpu::kTile * kLanes, scale, v.count);
        for (int64_t d = 0; d < width; d += 4 * C) {
          if (v.group_scale && d % v.group == 0)
            weights.read(s.scores + state * cpu::kTile * kLanes, v.group_scale + (first + d) / v.group * cpu::kTile,
                         v.count);
          sum_chunk_s8<rows, C, D>(columns + 4 * d, 4 * width, (v.count + 3) / 4, weights,
                                   s.out + state * kLanes * v.dim + first + d, v.dim);
        }
      });
    }
}
void sums_s8(const cpu::TileRows& v, const cpu::TileRows* next, const cpu::TileStates& s, const cpu::Softmax* softmax) {
  shrink(s, v.heads, v.dim, softmax);
  s.parts == 2 ? sums_of_digits<2>(v, next ? *next : v, s) : sums_of_digits<3>(v, next ? *next : v, s);
}
