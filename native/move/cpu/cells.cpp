// Rows that change their format, on the host: each is read by the source's format and written by the destination's,
// with the row functions of write and gather.
#include <string.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/carry.h"
#include "move/convert.h"
#include "move/cpu/convert_unit.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadRows = 256;

PlaneParams plane_of(const RowSide& side, int64_t head_dim, ScaleMode mode) {
  const kvx_plan_format_t& f = side.format;
  PlaneParams p = {};
  p.dim_hi = f.dim_outer, p.dim_lo = f.dim_inner, p.pack = int32_t(f.pack), p.head_dim = int32_t(head_dim),
  p.dtype = f.dtype;
  p.is_dense = f.pack == head_dim && (dtype_bits(f.dtype) == 4 || f.dim_inner == element_bytes(f.dtype));
  p.scale.dtype = f.scale_dtype, p.scale.group_size = int32_t(f.group_size),
  p.scale.num_groups = int32_t(head_dim / f.group_size), p.scale.group = f.scale_group;
  p.scale.mode = f.granularity ? mode : SCALE_NONE;
  return p;
}

bool is_by_block(const kvx_plan_format_t& f) {
  return f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK || f.granularity == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
}

// A row that changes its format: its planes, with their scales, and its cells.
struct Row {
  PlaneParams plane[2];
  char* cell[2];
};

// The rows of a job in the order of the source, which is then read front to back: buffers last.
CellJob in_source_order(CellJob job) {
  const auto place = [](const CellDigit& d) {
    return std::make_pair(d.step[SRC] != 0 || d.step[DST] != 0, d.stride[SRC]);
  };
  std::stable_sort(job.digit, job.digit + job.num_digits,
                   [&](const CellDigit& a, const CellDigit& b) { return place(a) < place(b); });
  return job;
}

// Rows one digit apart, `run` of them, from row `n` of a unit on; then the rest of its digits.
struct Cells {
  const Bound& bound;
  const CellJob job;
  CellDigit run;
  int first_digit;  // of the rest
  int64_t outer;    // runs of a unit

  Cells(const Bound& b, const CellJob& any)
      : bound(b), job(in_source_order(any)), run{1, {0, 0}, {0, 0}, 0, 0, {0, 0}}, first_digit(0), outer(1) {
    if (job.num_digits && !job.digit[0].step[SRC] && !job.digit[0].step[DST]) run = job.digit[0], first_digit = 1;
    for (int i = first_digit; i < job.num_digits; i++) outer *= job.digit[i].size;
  }

  // Puts run `n` of a unit into `row`; returns how many of its rows are there.
  int64_t find(const Unit& unit, int64_t n, Row* row) const {
    int64_t token = 0, layer = 0, byte[2] = {0, 0}, buffer[2] = {0, 0}, moved[2] = {0, 0};
    for (int i = first_digit; i < job.num_digits; i++) {
      const CellDigit& d = job.digit[i];
      const int64_t x = n % d.size;
      n /= d.size;
      token += x * d.token, layer += x * d.layer;
      for (int w = 0; w < 2; w++) byte[w] += x * d.stride[w], buffer[w] += x * d.step[w], moved[w] += x * d.scale[w];
    }
    if (token >= unit.tokens) return 0;
    for (int w = 0; w < 2; w++) {
      const RowSide& side = job.side[w];
      row->cell[w] = bound.buffers[w][size_t(job.buffer[w] + unit.block[w] * job.block_step[w] + buffer[w])] +
                     job.offset[w] + unit.block[w] * job.block[w] + unit.start[w] / job.split[w] * job.outer[w] +
                     unit.start[w] % job.split[w] * job.inner[w] + byte[w];
      row->plane[w].scale.data = side.format.is_inline ? row->cell[w] + side.format.scale_offset
                                 : side.scales         ? side.scales + unit.block[w] * side.format.scale_block +
                                                     unit.start[w] * side.format.scale_token + moved[w]
                                               : nullptr;
      row->plane[w].scale.tensor_scale = side.tensor ? side.tensor + layer : nullptr;
    }
    return run.token ? least(run.size, (unit.tokens - token + run.token - 1) / run.token) : run.size;
  }
  void step(Row* row) const {
    for (int w = 0; w < 2; w++) {
      ScaleParams& s = row->plane[w].scale;
      row->cell[w] += run.stride[w];
      if (s.data) s.data += job.side[w].format.is_inline ? run.stride[w] : run.scale[w];
      if (s.tensor_scale) s.tensor_scale += run.layer;
    }
  }
};

RowsParams dense_rows(char* data, int dtype) { return RowsParams{data, 0, 0, element_bytes(dtype), dtype, 1}; }

// The source's values as they stand where they are floats side by side, or in f32.
RowsParams read_row(const RowTable& ops, const Row& row, float* values) {
  const PlaneParams& src = row.plane[SRC];
  if (!is_quantised(src.dtype) && src.is_dense) return dense_rows(row.cell[SRC], src.dtype);
  const RowsParams rows = dense_rows(reinterpret_cast<char*>(values), KVX_DTYPE_F32);
  gather_row(ops, src, rows, rows.data, row.cell[SRC], ScaleAt{});
  return rows;
}

void convert_row(const RowTable& ops, const Row& row, float* values) {
  const PlaneParams &src = row.plane[SRC], &dst = row.plane[DST];
  if (!is_quantised(dst.dtype) && dst.is_dense && src.dtype != dst.dtype) {  // straight into the cell
    gather_row(ops, src, dense_rows(row.cell[DST], dst.dtype), row.cell[DST], row.cell[SRC], ScaleAt{});
  } else {
    const RowsParams rows = read_row(ops, row, values);
    write_row(ops, dst, rows, row.cell[DST], rows.data, ScaleAt{});
  }
}

constexpr int64_t kTile = 16;  // rows that are read together where they lie across

// Floats that lie side by side from row to row, and apart along a row: tiles of them are turned on the way.
bool lies_across(const Cells& cells) {
  const RowSide& src = cells.job.side[SRC];
  return !src.format.granularity && !is_quantised(src.format.dtype) && src.format.pack == cells.job.head_dim &&
         src.format.dim_inner != element_bytes(src.format.dtype) &&
         cells.run.stride[SRC] == element_bytes(src.format.dtype);
}

// `count` rows from this one on, at most kTile: their elements into `values`, then each into its cell.
void convert_tile(const RowTable& ops, const Cells& cells, Row* row, int64_t count, float* values) {
  const PlaneParams& src = row->plane[SRC];
  const int64_t dims = src.head_dim;
  float across[kTile];
  for (int64_t d = 0; d < dims; d++) {
    const char* from = row->cell[SRC] + d * src.dim_lo;
    if (src.dtype == KVX_DTYPE_F32) memcpy(across, from, size_t(count) * 4);
    else ops.decode[src.dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(across), from, count, 1.0f);
    for (int64_t i = 0; i < count; i++) values[i * dims + d] = across[i];
  }
  for (int64_t i = 0; i < count; i++, cells.step(row)) {
    const RowsParams rows = dense_rows(reinterpret_cast<char*>(values + i * dims), KVX_DTYPE_F32);
    write_row(ops, row->plane[DST], rows, row->cell[DST], rows.data, ScaleAt{});
  }
}

// Rows whole on both sides, codes on one, under a scale for each or for more: most of what is converted. Their places
// are known from row to row, and what is written next is asked for meanwhile: rows of a run are far apart where they
// go.
bool has_simple_rows(const Row& row) {
  const PlaneParams &src = row.plane[SRC], &dst = row.plane[DST];
  const PlaneParams& coded = is_quantised(dst.dtype) ? dst : src;
  return is_quantised(src.dtype) != is_quantised(dst.dtype) && src.is_dense && dst.is_dense &&
         coded.scale.num_groups == 1;
}

void convert_simple_rows(const RowTable& ops, const Cells& cells, Row* row, int64_t count) {
  const bool encodes = is_quantised(row->plane[DST].dtype);
  const PlaneParams& plain = row->plane[encodes ? SRC : DST];
  PlaneParams& coded = row->plane[encodes ? DST : SRC];
  const int64_t dims = coded.head_dim, bytes = span_bytes(row->plane[DST].dtype, dims),
                ahead = 4 * cells.run.stride[DST];
  const auto convert = encodes ? ops.encode[plain.dtype][coded.dtype] : ops.decode[coded.dtype][plain.dtype];
  const bool finds = coded.scale.mode == SCALE_COMPUTED;
  for (int64_t i = 0; i < count; i++, cells.step(row)) {
    if (i + 4 < count)
      for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(row->cell[DST] + ahead + b, 1);
    const float amax = finds ? ops.amax[plain.dtype](row->cell[SRC], dims) : 0.0f;
    convert(row->cell[DST], row->cell[SRC], dims, settle_scale(coded.scale, ScaleAt{}, 0, coded.dtype, amax));
  }
}

// Visits every run of rows of a job, as far as they are there, by all threads: visit(cells, first row, rows, room for
// their values).
template <class Visit>
void walk(const Bound& bound, const BlockTables& blocks, const CellJob& job, Visit&& visit) {
  const Cells cells(bound, job);
  const int64_t items = blocks.num_units() * cells.outer;
  const int granularity = job.side[DST].format.granularity;
  const bool finds =
      granularity == KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD || granularity == KVX_SCALE_GRANULARITY_PER_GROUP;
  Carry carry;
#pragma omp parallel if (items * cells.run.size >= kThreadRows)
  {
    std::vector<float> values;
    carry([&] { values.resize(size_t(job.head_dim * (lies_across(cells) ? kTile : 1))); });
    Row row = {};
    row.plane[SRC] = plane_of(job.side[SRC], job.head_dim, SCALE_READ),
    row.plane[DST] = plane_of(job.side[DST], job.head_dim, finds ? SCALE_COMPUTED : SCALE_READ);
#pragma omp for schedule(static)
    for (int64_t item = 0; item < items; item++) {
      carry([&] {
        const Unit unit = find_unit(blocks, item / cells.outer);
        const int64_t count = unit.tokens ? cells.find(unit, item % cells.outer, &row) : 0;
        visit(cells, &row, count, values.data());
      });
    }
  }
  carry.rethrow();
}

template <class Visit>
void each_row(const Bound& bound, const BlockTables& blocks, const CellJob& job, Visit&& visit) {
  walk(bound, blocks, job, [&](const Cells& cells, Row* row, int64_t count, float* values) {
    for (int64_t i = 0; i < count; i++, cells.step(row)) visit(*row, values);
  });
}

// Scales that belong to blocks stand for many rows, of several jobs where shards meet. Until the last row was seen they
// hold the largest magnitude, marked by the sign that no scale has.
constexpr uint32_t kMark = 0x80000000u;

void find_block_scales(const Bound& bound, const BlockTables& blocks) {
  const RowTable& ops = best_rows();
  auto each = [&](auto&& visit) {
    for (const CellJob& job : bound.cell_jobs)
      if (is_by_block(job.side[DST].format)) each_row(bound, blocks, job, visit);
  };
  auto scale_of = [](const Row& row) { return reinterpret_cast<uint32_t*>(row.plane[DST].scale.data); };
  each([&](const Row& row, float*) { __atomic_store_n(scale_of(row), kMark, __ATOMIC_RELAXED); });
  each([&](const Row& row, float* values) {
    const RowsParams rows = read_row(ops, row, values);
    const uint32_t mine =
        bits_of(ops.amax[rows.dtype](rows.data, row.plane[DST].head_dim)) | kMark;  // magnitudes order as their bits do
    uint32_t* most = scale_of(row);
    uint32_t seen = __atomic_load_n(most, __ATOMIC_RELAXED);
    while (seen < mine && !__atomic_compare_exchange_n(most, &seen, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
  });
  each([&](const Row& row, float*) {
    const PlaneParams& dst = row.plane[DST];
    uint32_t seen = __atomic_load_n(scale_of(row), __ATOMIC_RELAXED);
    if (!(seen & kMark)) return;
    const uint32_t made = bits_of(scale_from_amax(float_of(seen & ~kMark), dst.dtype, dst.scale.dtype, 1.0f));
    __atomic_compare_exchange_n(scale_of(row), &seen, made, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  });
}

}  // namespace

void convert_cells(const Bound& bound, const BlockTables& blocks) {
  const RowTable& ops = best_rows();
  find_block_scales(bound, blocks);
  for (const CellJob& job : bound.cell_jobs)
    walk(bound, blocks, job, [&](const Cells& cells, Row* row, int64_t count, float* values) {
      if (has_simple_rows(*row)) return convert_simple_rows(ops, cells, row, count);
      const int64_t most = lies_across(cells) ? kTile : 1;
      for (int64_t i = 0; i < count; i += most) {
        if (most > 1) convert_tile(ops, cells, row, least(most, count - i), values);
        else convert_row(ops, *row, values), cells.step(row);
      }
    });
}

}  // namespace cpu
}  // namespace kvx
