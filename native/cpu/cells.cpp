// Rows that change their format, on the host: each is read by the source's format and written by the destination's, with the
// row functions of write and gather.
#include <algorithm>

#include "../convert.h"
#include "convert_unit.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadRows = 256;

PlaneParams plane_of(const RowSide& side, int64_t head_dim, ScaleMode mode) {
  const kvx_plan_format_t& f = side.format;
  PlaneParams p = {};
  p.dim_hi = f.dim_outer, p.dim_lo = f.dim_inner, p.pack = int32_t(f.pack), p.head_dim = int32_t(head_dim), p.dtype = f.dtype;
  p.is_dense = f.pack == head_dim && (dtype_bits(f.dtype) == 4 || f.dim_inner == element_bytes(f.dtype));
  p.scale.dtype = f.scale_dtype, p.scale.group_size = int32_t(f.group_size), p.scale.num_groups = int32_t(head_dim / f.group_size), p.scale.group = f.scale_group;
  p.scale.mode = f.granularity ? mode : SCALE_NONE;
  return p;
}

bool is_by_block(const kvx_plan_format_t& f) {
  return f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK || f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
}

struct Cells {
  const Bound& bound;
  const CellJob& job;
  int64_t outer;  // rows of a unit

  // Row `n` of a unit: its address on each side, its scales, its layer's tensor scales. False when its token is not there.
  bool find(const Unit& unit, int64_t n, char* at[2], char* scale[2], const float* tensor[2]) const {
    int64_t token = 0, layer = 0, byte[2] = {0, 0}, buffer[2] = {0, 0}, moved[2] = {0, 0};
    for (int i = 0; i < job.num_digits; i++) {
      const CellDigit& d = job.digit[i];
      const int64_t x = n % d.size;
      n /= d.size;
      token += x * d.token, layer += x * d.layer;
      for (int w = 0; w < 2; w++) byte[w] += x * d.stride[w], buffer[w] += x * d.step[w], moved[w] += x * d.scale[w];
    }
    if (token >= unit.tokens) return false;
    for (int w = 0; w < 2; w++) {
      const RowSide& side = job.side[w];
      at[w] = bound.buffers[w][size_t(job.buffer[w] + unit.block[w] * job.block_step[w] + buffer[w])] + job.offset[w] + unit.block[w] * job.block[w] +
              unit.start[w] / job.split[w] * job.outer[w] + unit.start[w] % job.split[w] * job.inner[w] + byte[w];
      scale[w] = side.format.is_inline ? at[w] + side.format.scale_offset
                                       : side.scales + (side.scales ? unit.block[w] * side.format.scale_block + unit.start[w] * side.format.scale_token + moved[w] : 0);
      tensor[w] = side.tensor ? side.tensor + layer : nullptr;
    }
    return true;
  }
};

// The row's values in f32, or as they stand where they are floats side by side.
const char* read_row(const RowTable& ops, PlaneParams* p, char* cell, char* scale, const float* tensor, std::vector<float>* values, RowsParams* rows) {
  if (!is_quantised(p->dtype) && p->is_dense) {
    *rows = RowsParams{cell, 0, 0, element_bytes(p->dtype), p->dtype, 1};
    return cell;
  }
  p->scale.data = scale, p->scale.tensor_scale = tensor;
  *rows = RowsParams{reinterpret_cast<char*>(values->data()), 0, 0, 4, KVX_DTYPE_F32, 1};
  gather_row(ops, *p, *rows, rows->data, cell, ScaleAt{});
  return rows->data;
}

// Visits every row of a job that is there, by all threads: visit(destination plane, its cell, rows, values). Without `reads`,
// rows and values are left out.
template <class Visit>
void walk(const Bound& bound, const CellJob& job, bool reads, Visit&& visit) {
  const RowTable& ops = best_rows();
  Cells cells{bound, job, 1};
  for (int i = 0; i < job.num_digits; i++) cells.outer *= job.digit[i].size;
  const int64_t items = bound.tables.num_seqs * bound.tables.units_per_seq * cells.outer;
  const int granularity = job.side[DST].format.granularity;
  const bool finds = granularity == KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD || granularity == KVX_SCALE_GRANULARITY_PER_GROUP;
#pragma omp parallel if (items >= kThreadRows)
  {
    std::vector<float> values(static_cast<size_t>(job.head_dim));
    PlaneParams src = plane_of(job.side[SRC], job.head_dim, SCALE_READ), dst = plane_of(job.side[DST], job.head_dim, finds ? SCALE_COMPUTED : SCALE_READ);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      const Unit unit = find_unit(bound.tables, item / cells.outer);
      char *at[2], *scale[2];
      const float* tensor[2];
      if (!unit.tokens || !cells.find(unit, item % cells.outer, at, scale, tensor)) continue;
      RowsParams rows = {};
      const char* row = reads ? read_row(ops, &src, at[SRC], scale[SRC], tensor[SRC], &values, &rows) : nullptr;
      dst.scale.data = scale[DST], dst.scale.tensor_scale = tensor[DST];
      visit(dst, at[DST], rows, row);
    }
  }
}

// Scales that belong to blocks stand for many rows, of several jobs where shards meet. Until the last row was seen they hold the
// largest magnitude, marked by the sign that no scale has.
constexpr uint32_t kMark = 0x80000000u;

void find_block_scales(const Bound& bound) {
  const RowTable& ops = best_rows();
  auto each = [&](bool reads, auto&& visit) {
    for (const CellJob& job : bound.cell_jobs)
      if (is_by_block(job.side[DST].format)) walk(bound, job, reads, visit);
  };
  each(false, [](const PlaneParams& dst, char*, const RowsParams&, const char*) { __atomic_store_n(reinterpret_cast<uint32_t*>(dst.scale.data), kMark, __ATOMIC_RELAXED); });
  each(true, [&](const PlaneParams& dst, char*, const RowsParams& rows, const char* row) {
    const uint32_t mine = bits_of(ops.amax[rows.dtype](row, dst.head_dim)) | kMark;  // magnitudes order as their bits do
    uint32_t* most = reinterpret_cast<uint32_t*>(dst.scale.data);
    uint32_t seen = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (seen < mine && !__atomic_compare_exchange_n(most, &seen, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  });
  each(false, [](const PlaneParams& dst, char*, const RowsParams&, const char*) {
    uint32_t* place = reinterpret_cast<uint32_t*>(dst.scale.data);
    uint32_t seen = __atomic_load_n(place, __ATOMIC_RELAXED);
    if (!(seen & kMark)) return;
    const uint32_t made = bits_of(scale_from_amax(float_of(seen & ~kMark), dst.dtype, dst.scale.dtype, 1.0f));
    __atomic_compare_exchange_n(place, &seen, made, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  });
}

}  // namespace

void convert_cells(const Bound& bound) {
  const RowTable& ops = best_rows();
  find_block_scales(bound);
  for (const CellJob& job : bound.cell_jobs)
    walk(bound, job, true, [&](const PlaneParams& dst, char* cell, const RowsParams& rows, const char* row) { write_row(ops, dst, rows, cell, row, ScaleAt{}); });
}

}  // namespace cpu
}  // namespace kvx
