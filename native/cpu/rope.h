// One row of Q or K: RMSNorm and rotation, as append/append.h has the arithmetic. Included by rows.cpp inside its
// namespace, so that it is compiled once per instruction set; loops over floats in a scratch buffer, one width each,
// that the compiler vectorises.
#pragma once

// Sums of neighbours: n / 2 of n, a power of two.
inline void add_neighbours(float* __restrict to, const float* __restrict from, int64_t n) {
  int64_t i = 0;
#if defined(__aarch64__)  // one instruction; from the loop below the compiler makes three
  for (; i + 4 <= n / 2; i += 4) vst1q_f32(to + i, vpaddq_f32(vld1q_f32(from + 2 * i), vld1q_f32(from + 2 * i + 4)));
#endif
  for (; i < n / 2; i++) to[i] = from[2 * i] + from[2 * i + 1];
}

// Squares of eight neighbours as a tree, those sums by halves. `a` holds the squares, zeros after them up to m; `b` has
// as much room.
inline float add_up(float* __restrict a, float* __restrict b, int64_t m) {
  add_neighbours(b, a, m);
  add_neighbours(a, b, m / 2);
  add_neighbours(b, a, m / 4);
  for (int64_t half = m / 16; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++) b[i] = b[i] + b[i + half];
  return b[0];
}

// The last pass over a row: norm, rotation and rounding of n pairs, lo and hi apart, in one loop.
template <int IO, bool Norm>
inline void finish_halves(typename Float<IO>::Raw* to, const float* __restrict x, const cpu::RopeRow& p, float r) {
  const int64_t half = p.rotary / 2;
  const float* __restrict w = p.weight;
  const float* __restrict c = p.cos;
  const float* __restrict s = p.sin;
  typename Float<IO>::Raw* __restrict first = to;
  typename Float<IO>::Raw* __restrict second = to + half;
  for (int64_t i = 0; i < half; i++) {
    const float lo = Norm ? (x[i] * r) * w[i] : x[i], hi = Norm ? (x[i + half] * r) * w[i + half] : x[i + half];
    first[i] = Float<IO>::store(lo * c[i] - hi * s[i]);
    second[i] = Float<IO>::store(hi * c[i] + lo * s[i]);
  }
}

inline void rotate_neighbours(float* __restrict x, const float* __restrict c, const float* __restrict s, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float lo = x[2 * i], hi = x[2 * i + 1];
    x[2 * i] = lo * c[i] - hi * s[i];
    x[2 * i + 1] = hi * c[i] + lo * s[i];
  }
}

inline void scale_row(float* __restrict x, const float* __restrict w, float r, int64_t first, int64_t n) {
  for (int64_t i = first; i < n; i++) x[i] = (x[i] * r) * w[i];
}

template <int IO>
void rotate_row(char* dst, const char* src, const cpu::RopeRow& p) {
  using Raw = typename Float<IO>::Raw;
  float* __restrict x = p.scratch;
  const int64_t n = p.dim;
  auto* from = reinterpret_cast<const Raw*>(src);
  auto* to = reinterpret_cast<Raw*>(dst);
  for (int64_t i = 0; i < n; i++) x[i] = Float<IO>::load(from[i]);
  float r = 0;
  if (p.weight) {
    int64_t m = 8;
    while (m < n) m *= 2;
    float* __restrict squares = x + n;
    for (int64_t i = 0; i < n; i++) squares[i] = x[i] * x[i];
    for (int64_t i = n; i < m; i++) squares[i] = 0.0f;
    r = 1.0f / __builtin_sqrtf(add_up(squares, squares + m, m) * p.inverse_dim + p.eps);
  }
  int64_t done = 0;
  if (p.style == KVX_ROPE_HALF) {
    if (p.weight) finish_halves<IO, true>(to, x, p, r);
    else finish_halves<IO, false>(to, x, p, r);
    done = p.rotary;
  }
  if (p.weight) scale_row(x, p.weight, r, done, n);
  if (p.style == KVX_ROPE_INTERLEAVED) rotate_neighbours(x, p.cos, p.sin, p.rotary / 2);
  for (int64_t i = done; i < n; i++) to[i] = Float<IO>::store(x[i]);
}
