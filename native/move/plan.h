// A conversion's plan, read from bytes: what convert.cpp gives addresses to.
#pragma once
#include "move/convert.h"

namespace kvx {

struct Plan {
  kvx_plan_header_t header;
  std::vector<kvx_plan_box_t> boxes;
  std::vector<kvx_plan_cell_t> cells;
  std::vector<uint64_t> bytes[2];         // of every buffer
  uint64_t least_bytes[2], all_bytes[2];  // of a side's smallest buffer; of all together, at most kMaxBytes
};

inline const kvx_plan_side_t& side_of(const kvx_plan_box_t& box, int which) { return which == SRC ? box.src : box.dst; }
inline const char* name_of(int which) { return which == SRC ? "source" : "destination"; }
inline const kvx_plan_format_t& format_of(const kvx_plan_cell_t& cell, int which) {
  return which == SRC ? cell.src : cell.dst;
}

// Whether a box, over all blocks of a side, moves more than so many times the bytes the side has. A plan writes what it
// writes once, and scales that a unit's tokens share once a unit (or, in a digest, once a row): never 16 times all
// there is. One that does is work without end, in a few bytes of plan.
constexpr int64_t kMostTimes = 16;
bool moves_too_much(const Plan& plan, const kvx_plan_box_t& box, Which which);

// Every number is checked: what a loaded plan says stays inside the buffers it names, whatever blocks are asked for.
kvx_status_t load(const void* data, uint64_t num_bytes, Plan* plan);

}  // namespace kvx
