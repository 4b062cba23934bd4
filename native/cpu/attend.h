// Attention's inner loops over a tile of positions. attend.cpp is compiled once per instruction set, as rows.cpp is.
//
// Four query rows go together and are the four lanes of everything about scores: one position's scores lie side by side, so
// masks, maxima, exponentials and sums need no step across lanes. Scores are base 2: exp2 is what a machine has.
#pragma once
#include <stdint.h>

namespace kvx {
namespace cpu {

constexpr int kLanes = 4;   // query rows together
constexpr int kTile = 64;   // positions together, at most

// K at the positions of a tile.
struct TileRows {
  const char* const* at;  // [count rounded up to 4]: where the first head's row begins
  int64_t count, dim;     // dim a multiple of the type's step
  int64_t heads, head;    // heads, and bytes from one to the next
  bool by_head;           // heads are far apart: each is walked alone. Else whole tokens are, front to back
};

// Query rows: the states of one head are `fours` runs of four rows, of which [first, last) see the tile. The final run may have
// fewer than four rows.
struct TileStates {
  int64_t fours, first, last;
  int final_rows;  // 1, 2 or 4: rows of run fours - 1 that are computed
  const float* q;  // [heads, fours, 4, k dim]
  float* scores;   // [heads, fours, kTile, 4]: scores, then weights
  float* out;      // [heads, fours, 4, v dim]
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

using WidenRow = void (*)(float* to, const char* row, int64_t n, float scale);  // a row as f32, times the scale of a quantised one

// `next`: rows that will be wanted after these, as many as are read, in the order they have in memory; they are asked for
// meanwhile, a line for every line read. NULL = nothing.
struct AttendTable {
  int lanes;  // f32 in a vector
  // By kvx_dtype_t of K's rows, F16, BF16, F32; NULL: they have to be made f32 first.
  void (*scores[4])(const TileRows& k, const char* const* next, const TileStates& states);
  // V of one head, f32 and close together: [count, dim]. (A head's rows in the cache can lie in as many pages as there are
  // positions, and summing walks them a few elements at a time.) Meanwhile rows of the head that follows are made so, `from`
  // to `to`: summing leaves the ports of memory idle. By dtype of those rows; F32 also when from is NULL. `softmax` is of the
  // head's runs.
  void (*values[4])(const float* v, int64_t count, int64_t dim, const char* const* from, float* to, const char* const* next, const TileStates& states, const Softmax* softmax);
  int made_step;  // dim of rows made by `values` is a multiple of this
  void (*weigh)(Softmax* softmax, float* scores, int64_t first, int64_t count, const ScoreRule& rule);  // scores become weights
  WidenRow widen[14];  // by kvx_dtype_t; NULL: row.h's way
  float (*exp2)(float x);

  int step(int dtype) const { return dtype == 3 ? lanes : 2 * lanes; }  // elements a pass takes; 3: F32
};

extern const AttendTable attend_plain;
#if defined(__x86_64__)
extern const AttendTable attend_avx2;
extern const AttendTable attend_avx512;
#endif

const AttendTable& best_attend();

}  // namespace cpu
}  // namespace kvx
