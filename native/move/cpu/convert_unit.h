// The unit of a conversion: some tokens of a block on either side. Shared by convert.cpp and cells.cpp.
#pragma once
#include "cpu/row.h"
#include "move/convert.h"
#include "table.h"

namespace kvx {
namespace cpu {

struct Unit {
  int64_t block[2], start[2];  // block ids, and the token of the block the unit starts at
  int64_t tokens;              // 0: nothing to do
};

inline Unit find_unit(const BlockTables& t, int64_t index) {
  const int64_t seq = index / t.units_per_seq, token = index % t.units_per_seq * t.unit_tokens;
  Unit u = {};
  u.tokens = t.unit_tokens;
  if (t.seq_lens)
    u.tokens = greatest(0, least(u.tokens, read_index(t.seq_lens, seq * t.len_stride, t.len_bytes) - token));
  for (int w = 0; w < 2 && u.tokens; w++) {
    u.block[w] =
        read_index(t.ids[w], seq * t.row_stride[w] + token / t.block_size[w] * t.index_stride[w], t.index_bytes[w]);
    u.start[w] = token % t.block_size[w];
    if (u.block[w] < 0) u.tokens = 0;
  }
  return u;
}

void convert_cells(const Bound& bound, const BlockTables& blocks);

}  // namespace cpu
}  // namespace kvx
