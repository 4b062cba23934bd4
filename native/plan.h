// A conversion's plan, read from bytes: what convert.cpp gives addresses to.
#pragma once
#include "convert.h"

namespace kvx {

struct Plan {
  kvx_plan_header_t header;
  std::vector<kvx_plan_box_t> boxes;
  std::vector<kvx_plan_cell_t> cells;
  std::vector<uint64_t> bytes[2];  // of every buffer
};

inline const kvx_plan_side_t& side_of(const kvx_plan_box_t& box, int which) { return which == SRC ? box.src : box.dst; }
inline const char* name_of(int which) { return which == SRC ? "source" : "destination"; }
inline const kvx_plan_format_t& format_of(const kvx_plan_cell_t& cell, int which) { return which == SRC ? cell.src : cell.dst; }

// Every number is checked: what a loaded plan says stays inside the buffers it names, whatever blocks are asked for.
kvx_status_t load(const void* data, uint64_t num_bytes, Plan* plan);

}  // namespace kvx
