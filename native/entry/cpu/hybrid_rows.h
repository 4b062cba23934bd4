// One row of a hybrid cache on the host: its norm and rotation, its bytes and back, and where it stands.
// kvx/quant/rows.py and kvx/ops/entry/finish.py are the same arithmetic in torch, bit for bit.
#pragma once
#include <vector>

#include "cpu/row.h"
#include "entry/hybrid.h"

namespace kvx {
namespace cpu {

struct RowPlace {
  char* data;
  char* scales;
};

inline RowPlace row_place(const RowPages& r, int64_t page, int64_t row) {
  char* base = r.data + page * r.page;
  return RowPlace{base + row * r.data_bytes, base + int64_t(r.rows) * r.data_bytes + row * r.scale_bytes};
}

void encode_row(const RowTable& ops, const RowPages& r, RowPlace to, float* x);  // x [dim]; may be rounded in place
void decode_row(const RowTable& ops, const RowPages& r, RowPlace from, float* to);

// Elements [first, first + n) of a caller's row as f32, and a whole row back.
void load_row(const RowTable& ops, const RowsParams& rows, int64_t token, int64_t head, int64_t first, int64_t n,
              float* to);
void store_row(const RowTable& ops, const RowsParams& rows, int64_t token, int64_t head, int64_t n, const float* from);

// Pairs (2i, 2i + 1) of the last rope_dim of dim elements by a row of cos and sin, `at` bytes from their first; back:
// the other way.
void turn_row(float* x, int64_t dim, int64_t rope_dim, const float* cos, const float* sin, int64_t at, bool back);

// What a row goes through before it is coded. One for each thread: it has room to work in.
class Finisher {
 public:
  Finisher(const RowTable& ops, const FinishParams& p, int64_t dim, bool has_hadamard);
  void run(float* x, int64_t position);

 private:
  const RowTable& ops_;
  const FinishParams& p_;
  const int64_t dim_;
  const float factor_;  // of the Hadamard rotation; 0: there is none
  std::vector<float> weight_, scratch_;
};

// The sequences of a step that are there.
struct StepRun {
  int32_t slot, begin, end, start;
  int64_t position(int64_t token) const { return start + token - begin; }
  int64_t last() const { return position(end - 1); }
};

std::vector<StepRun> step_runs(const StepParams& step);

// The page of a slot's entry, negative where it has none. The entry is inside the table (check_entries).
inline int64_t entry_page(const EntryTable& t, int64_t slot, int64_t column) {
  return *reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(t.pages) + slot * t.row + column * 4);
}

// Entries [first, count) of a slot are inside the table, and their pages inside the pool.
kvx_status_t check_entries(const EntryTable& t, const RowPages& rows, int64_t slot, int64_t first, int64_t count);
// Position `last` has a row of cos and sin.
kvx_status_t check_turn(const float* cos, int64_t num_positions, int64_t last);

}  // namespace cpu
}  // namespace kvx
