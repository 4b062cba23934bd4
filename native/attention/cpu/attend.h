// Attention's inner loops over a tile of positions. attend.cpp is compiled once per instruction set, as rows.cpp is.
//
// Four query rows go together and are the four lanes of everything about scores: one position's scores lie side by
// side, so masks, maxima, exponentials and sums need no step across lanes. Scores are base
// 2: exp2 is what a machine has.
#pragma once
#include <math.h>
#include <stdint.h>

namespace kvx {
namespace cpu {

constexpr int kLanes = 4;  // query rows together
constexpr int kTile = 64;  // positions together, at most
constexpr int kRoom = 8;   // positions past the last that loops may look at

// Rows of K or V at the positions of a tile.
struct TileRows {
  const char* const* at;         // where the first head's row begins; kRoom more than count, all good to read
  int64_t count, dim;            // dim a multiple of the type's step, or of 64 for TileLoops
  int64_t heads, head;           // heads, and bytes from one to the next
  bool by_head;                  // heads are far apart: each is walked alone. Else whole tokens are, front to back
  const float* scale = nullptr;  // [heads, kTile]: factors of scores, or of weights; NULL = 1
  // Of int8 rows of one head: [dim / group, kTile], factors of every 16 or 32 elements. NULL = none
  const float* group_scale = nullptr;
  int64_t group = 0;
  int64_t stride = 0;  // bytes from each row to the next, where that is known to be the same for all
  // Elements of a row, up to dim: what tiles are loaded from. 0 = dim. For TileLoops: scales of groups, if there are.
  int64_t width = 0;
  const struct ByteScales* byte_scales = nullptr;
};

// Rows that will be wanted next, asked for while others are read: whole tokens, front to back, where their heads lie
// side by side, as memory is fastest. A pass for each head asks for its share of them. Inlined: gcc finds that calls
// have no effect and leaves them out, and a function made for wide instructions might be linked for a CPU without them.
struct AskAhead {
  const TileRows* next;              // NULL: none
  int64_t t = 0, head = 0, run = 1;  // where `now` is, and heads that lie without anything between them
  int64_t bytes, owed = 0;           // of a row; of what is to be asked for
  const char *now = nullptr, *end = nullptr;

  inline __attribute__((always_inline)) AskAhead(const TileRows* rows, int64_t of_head, int64_t row_bytes)
      : next(rows), bytes(row_bytes) {
    if (!next) return;
    const bool by_head = next->by_head;
    t = by_head ? 0 : of_head * next->count / next->heads;
    head = by_head ? of_head : of_head * next->count % next->heads;
    run = !by_head && next->head == bytes ? next->heads : 1;
    go();
  }
  inline __attribute__((always_inline)) void go() {
    now = next->at[t] + head * next->head, end = now + (run > 1 ? run - head : 1) * bytes;
  }
  inline __attribute__((always_inline)) void ask(int64_t n) {  // n bytes more
    if (!next) return;
    for (owed += n; owed >= 64;) {
      for (; owed >= 256 && end - now >= 256; owed -= 256, now += 256)
        for (int i = 0; i < 256; i += 64) __builtin_prefetch(now + i, 0, 2);
      for (; owed >= 64 && now < end; owed -= 64, now += 64) __builtin_prefetch(now, 0, 2);
      if (now < end) return;
      if (next->by_head || run > 1) head = run > 1 ? 0 : head, t++;
      else if (++head == next->heads) head = 0, t++;
      t = t < kTile ? t : kTile;
      go();
    }
  }
};

// Query rows: the states of one head are `fours` runs of four rows, of which [first, last) see the tile. The final run
// may have fewer than four rows.
struct TileStates {
  int64_t fours, first, last;
  int final_rows;  // 1, 2 or 4: rows of run fours - 1 that are computed
  const float* q;  // [heads, fours, 4, k dim]; for `dots`, as packed
  float* scores;   // [heads, fours, kTile, 4]: scores, then weights
  float* out;      // [heads, fours, 4, v dim]
  int parts = 1;   // of each number of packed queries
};

// Four query rows: what they may see, and their softmax so far.
struct Softmax {
  int32_t low[kLanes], last[kLanes];  // positions seen, both ends included
  float most[kLanes];                 // the largest score; -inf while nothing is seen
  float sum[kLanes];                  // of exp2(score - most)
  float keep[kLanes];                 // what the tile makes of values summed before it
};

struct ScoreRule {
  float scale;           // score = q.k * scale, in base 2 where there is no cap
  float cap;             // 0 = none; else cap * tanh(score / cap), then to base 2
  bool is_masked;        // some row does not see the whole tile
  const int32_t* there;  // [count]: 0 where the table has no block, else -1; NULL = all there
};

using WidenRow = void (*)(float* to, const char* row, int64_t n,
                          float scale);  // a row as f32, times the scale of a quantised one
using WidenGroups = void (*)(float* to, const char* row, int64_t n, const float* scales,
                             int64_t size);  // with a scale for every `size` elements

// Rows of one head in another type, `stride` bytes apart.
using Unpack = void (*)(const TileRows& rows, int64_t head, int64_t bytes, char* to, int64_t stride,
                        const TileRows* next);
// The same for rows with a scale of a byte, KVX_DTYPE_F8_E4M3 or E8M0, for every `size` elements. For TileLoops they
// may be F16.
struct ByteScales {
  const uint8_t* const* at;  // the first of each position; NULL: the row is zeros
  int64_t group, size;       // bytes from one to the next, elements under one
  int dtype;
  int64_t head = 0;                // bytes from a head's to the next one's
  const float* numbers = nullptr;  // by code, of bytes
};
using UnpackScaled = void (*)(const TileRows& rows, int64_t head, int64_t n, const ByteScales& scales, char* to,
                              int64_t stride, const TileRows* next);

// Loops for queries that came as bf16 or f16, up to two fours of rows, over rows of K and V of any type as they lie.
struct TileLoops {
  void (*pack)(const float* q, int64_t fours, int64_t dim, int parts, float* to);  // all rows of a head
  void (*dots)(const TileRows& k, const TileRows* next, const TileStates& states);
  void (*sums)(const TileRows& v, const TileRows* next, const TileStates& states, const Softmax* softmax);
  float lift;  // numbers are read this many times too small: scales are multiplied by it
};

// `next`: rows that will be wanted after these and are asked for meanwhile, a line for every line read. NULL = none.
struct AttendTable {
  // By kvx_dtype_t of rows as they lie; NULL: they have to be made f32 first.
  void (*scores[14])(const TileRows& k, const TileRows* next, const TileStates& states);
  void (*sums[14])(const TileRows& v, const TileRows* next, const TileStates& states,
                   const Softmax* softmax);  // of weights times values
  int steps[14];                             // dim of such rows is a multiple of this
  // Numbers of a type are read lift_in * lift_out times too small. Queries, or weights by their scale, are multiplied
  // by the first; scores by their scale, or sums in the end, by the second.
  float lift_in[14], lift_out[14];
  WidenRow widen[14];                                      // by kvx_dtype_t; NULL: row.h's way
  WidenGroups widen_groups[14];                            // the same
  bool (*has_nan)(int dtype, const char* row, int64_t n);  // of fp8, infinities too: `scores` and `sums` see neither
  void (*weigh)(Softmax* softmax, float* scores, int64_t first, int64_t count,
                const ScoreRule& rule);  // scores become weights
  float (*exp2)(float x);
  // The same for V of one head, f32 and close together, [count, dim]: faster, where many rows share it. By dtype, F32
  // alone; the three pointers are not used.
  void (*values[4])(const float* v, int64_t count, int64_t dim, const char* const* from, float* to,
                    const char* const* next, const TileStates& states, const Softmax* softmax);

  // What scores of int8 rows take: n numbers of a query in 2 or 3 parts, in place. NULL: they take them as they are.
  void (*pack_s8)(float* q, int64_t n, int parts);
  // Rows of few bits, of one head, as `unpacked`; by kvx_dtype_t, or NULL. As int8: those of 4 bits, e2m1's numbers
  // doubled. As bf16: those of 8 bits too, where queries are not f32.
  Unpack unpack[14];
  int unpacked;
  UnpackScaled unpack_scaled[14];  // as bf16, exactly. 4-bit rows: 16 or 32 elements a scale; 8-bit ones: 32, of E8M0

  // Scores of bf16 rows against queries that came as bf16 or f16, in parts of bf16, before any scaling. `pack` makes n
  // numbers so in place, `pack_tiles` all rows of a head, [fours, 4, dim], into as much memory. NULL: not this way.
  void (*pack)(float* q, int64_t n, int parts);
  void (*pack_tiles)(const float* q, int64_t fours, int64_t dim, int parts, float* to);
  void (*dots)(const TileRows& k, const TileRows* next, const TileStates& states);
  void (*split)(const float* row, int64_t n, char* to);  // f32 as two parts of bf16, [2, n]; with pack_tiles
  TileLoops few[14], few_scaled[14];  // by kvx_dtype_t: with up to one scale a row; with a byte for every 16 or 32
  TileLoops few_s4_by_f16;            // integers of 4 bits, with scales of f16

  int step(int dtype) const { return steps[dtype]; }
};

extern const AttendTable attend_plain;
#if defined(__aarch64__)
extern const AttendTable attend_dotprod;
#elif defined(__x86_64__)
extern const AttendTable attend_avx2;
extern const AttendTable attend_avx512;
// What instructions add to attend_avx512, one after the other.
void add_vnni(AttendTable* table);
void add_bf16(AttendTable* table);
void add_amx(AttendTable* table);
#endif

const AttendTable& best_attend();

constexpr float kLog2e = 1.44269504f, kLn2 = 0.69314718f;

// A row's softmax at its end: what its sums of values are multiplied by, and its LSE, natural and without the sink.
struct SoftmaxEnd {
  float factor, lse;
};

// Static: what is compiled for an instruction set includes this too. `most` is in powers of two; `sink` NULL: there is
// none. Nothing seen: 0, as the values are, and -inf. NaN stays.
static inline SoftmaxEnd end_softmax(const AttendTable& loops, float most, float sum, const float* sink) {
  if (sum == 0) return SoftmaxEnd{0, -INFINITY};
  float total = sum, shrink = 1;
  if (sink && sum > 0) {
    const float at = *sink * kLog2e, top = most > at ? most : at;
    shrink = loops.exp2(most - top);
    total = sum * shrink + loops.exp2(at - top);
  }
  return SoftmaxEnd{shrink / total, most * kLn2 + logf(sum)};
}

}  // namespace cpu
}  // namespace kvx
