// bf16 K by the instruction that adds products of pairs of bf16 numbers to f32 sums: nothing is widened.
//
// A query that came as bf16 is one such number and one that came as f16 the sum of two, exactly; one of f32 would take
// three, and as many instructions as widening does. The instruction takes subnormal numbers, below 2^-126, for zero: a
// score moves by less than dim * 2^-126 times the largest query or key, far below the rounding of any sum that counts.
//
// V has no use for it: its pairs would be two positions, whose rows had to be interleaved in two steps a vector, as
// many as widen it by shifts, and weights would need three parts.
#define KVX_ISA avx512bf16
#include "attention/cpu/attend_loops.h"

namespace kvx {
namespace avx512bf16 {
namespace {

void pack_bf16(float* q, int64_t n, int) {
  for (int64_t d = 0; d < n; d += 2 * W) {
    const Vec low = load<Vec>(q + d), high = load<Vec>(q + d + W);
    const __m512bh first = _mm512_cvtne2ps_pbh(__m512(high), __m512(low));
    const Halves back = load<Halves>(&first);
    Vec rest[2] = {low - BF16::part(back, 0), high - BF16::part(back, 1)};
    for (Vec& x : rest) x = Vec(IVec(x) & IVec(x == x));  // infinity has no second part
    store(q + d, first), store(q + d + W, _mm512_cvtne2ps_pbh(__m512(rest[1]), __m512(rest[0])));
  }
}

template <int R, int P, bool kTwoParts>
inline void dot_block(const char* const* at, int64_t offset, int64_t dim, Asking<P> asking, const float* q,
                      float* scores) {
  constexpr int kStep = 2 * W;
  Vec sum[P][R] = {};
  for (int64_t d = 0; d < dim; d += kStep) {
    asking.template step<P * kStep * 2, kStep>();
    __m512bh x[P];
#pragma GCC unroll 4
    for (int i = 0; i < P; i++) x[i] = load<__m512bh>(at[i] + offset + d * 2);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int part = 0; part <= int(kTwoParts); part++) {
        const __m512bh y = load<__m512bh>(q + r * dim + d + part * W);
#pragma GCC unroll 4
        for (int i = 0; i < P; i++) sum[i][r] = Vec(_mm512_dpbf16_ps(__m512(sum[i][r]), x[i], y));
      }
  }
  store_scores(sum, nullptr, scores);
}

void dots_bf16(const cpu::TileRows& k, const cpu::TileRows* next, const cpu::TileStates& s) {
  constexpr int P = kPositions;
  each_block(k, P, [&](int64_t t, int64_t head) {
    const Asking<P> asking(next ? *next : k, t, head, k.dim);
    each_run(s, head, [&](int64_t state, auto rows) {
      const float* q = s.q + state * kLanes * k.dim;
      float* to = s.scores + (state * cpu::kTile + t) * kLanes;
      if (s.parts == 2) dot_block<rows, P, true>(k.at + t, head * k.head, k.dim, asking, q, to);
      else dot_block<rows, P, false>(k.at + t, head * k.head, k.dim, asking, q, to);
    });
  });
}

}  // namespace
}  // namespace avx512bf16

namespace cpu {

using namespace avx512bf16;

void add_bf16(AttendTable* table) { table->pack = &pack_bf16, table->dots = &dots_bf16; }

}  // namespace cpu
}  // namespace kvx
