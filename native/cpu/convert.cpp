// convert on the host: all units, and each job's digits beyond the two of a grid or tile, make one list of items that threads share.
#include "../convert.h"

#include <algorithm>

#include "../run.h"
#include "convert_unit.h"
#include "pending.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadBytes = 128 << 10;
constexpr int64_t kStreamBytes = 16 << 20;
constexpr int64_t kTaskBytes = 1 << 20;  // what a thread takes at a time

// Digits are shared out: the first `inner` make the grid or tile, the rest are walked.
struct Shape {
  bool is_tile;
  int inner;
  CopyGrid grid;
  Transpose tile;
  int64_t outer;  // product of the rest
};

// A run shorter than a line between axes that each side has adjacent: columns become rows.
bool find_tile(Job* job, Transpose* tile) {
  if (job->run > 16 || (job->run & (job->run - 1))) return false;
  int a = -1, b = -1;
  for (int i = 0; i < job->num_digits; i++) {
    const Digit& d = job->digit[i];
    if (d.step[0] || d.step[1] || d.token) continue;
    if (d.stride[SRC] == job->run) a = i;
    else if (d.stride[DST] == job->run) b = i;
  }
  if (a < 0 || b < 0) return false;
  std::swap(job->digit[0], job->digit[a]);
  if (b == 0) b = a;
  std::swap(job->digit[1], job->digit[b]);
  const Digit &da = job->digit[0], &db = job->digit[1];
  *tile = Transpose{job->run, da.size, db.size, da.stride[DST], db.stride[SRC]};
  return true;
}

Shape shape_of(Job* job) {
  Shape s = {};
  s.is_tile = find_tile(job, &s.tile);
  if (s.is_tile) {
    s.inner = 2;
  } else {
    // Two digits that need no lookup and no counting of tokens, in the order of the source: it is read front to back.
    auto is_plain = [](const Digit& d) { return !d.step[0] && !d.step[1] && !d.token; };
    std::stable_partition(job->digit, job->digit + job->num_digits, is_plain);
    while (s.inner < 2 && s.inner < job->num_digits && is_plain(job->digit[s.inner])) s.inner++;
    const Digit one{1, {0, 0}, 0, {0, 0}};
    const Digit &in = s.inner > 0 ? job->digit[0] : one, &out = s.inner > 1 ? job->digit[1] : one;
    s.grid = CopyGrid{job->run, out.size, in.size, out.stride[DST], in.stride[DST], out.stride[SRC], in.stride[SRC]};
  }
  s.outer = 1;
  for (int i = s.inner; i < job->num_digits; i++) s.outer *= job->digit[i].size;
  return s;
}

enum Take { WHOLE_UNITS, CUT_UNITS };

struct Walker {
  const RowTable& ops;
  const Bound& bound;
  Job job;
  Shape shape;
  Take take;

  // Items [first, last) of (unit, outer index), unit slowest.
  void operator()(int64_t first, int64_t last, bool stream) const {
    Pending pending(ops, stream);
    PendingTurns turns(ops, shape.tile);
    Unit unit = {};
    int64_t unit_index = -1;
    int64_t start[2] = {};
    for (int64_t item = first; item < last; item++) {
      const int64_t u = item / shape.outer;
      if (u != unit_index) {
        unit = find_unit(bound.tables, u), unit_index = u;
        for (int w = 0; w < 2 && unit.tokens; w++)
          start[w] = unit.block[w] * job.block[w] + unit.start[w] / job.split[w] * job.outer[w] + unit.start[w] % job.split[w] * job.inner[w];
      }
      if (!unit.tokens || (unit.tokens == bound.tables.unit_tokens) != (take == WHOLE_UNITS)) {
        item = (u + 1) * shape.outer - 1;
        continue;
      }
      int64_t rest = item % shape.outer, token = 0, byte[2] = {0, 0}, buffer[2] = {0, 0};
      for (int i = shape.inner; i < job.num_digits; i++) {
        const Digit& d = job.digit[i];
        const int64_t n = rest % d.size;
        rest /= d.size;
        token += n * d.token;
        for (int w = 0; w < 2; w++) byte[w] += n * d.stride[w], buffer[w] += n * d.step[w];
      }
      if (token >= unit.tokens) continue;
      char* at[2];
      for (int w = 0; w < 2; w++) {
        char* base = job.base[w];
        if (!base) base = bound.buffers[w][size_t(job.buffer[w] + unit.block[w] * job.block_step[w] + buffer[w])] + job.offset[w];
        at[w] = base + start[w] + byte[w];
      }
      if (shape.is_tile) turns.add(at[DST], at[SRC]);
      else pending.add(shape.grid, at[DST], at[SRC]);
    }
  }
};

}  // namespace

kvx_status_t convert(const Bound& bound) {
  const RowTable& ops = best_rows();
  const int64_t units = bound.tables.num_seqs * bound.tables.units_per_seq;
  if (units == 0) return KVX_STATUS_OK;
  convert_cells(bound);
  const size_t num_jobs = bound.jobs.size();
  for (size_t n = 0; n < num_jobs + bound.cut_jobs.size(); n++) {
    Walker walk{ops, bound, n < num_jobs ? bound.jobs[n] : bound.cut_jobs[n - num_jobs], {}, n < num_jobs ? WHOLE_UNITS : CUT_UNITS};
    walk.shape = shape_of(&walk.job);
    const int64_t items = units * walk.shape.outer;
    int64_t item_bytes = walk.job.run;
    for (int i = 0; i < walk.shape.inner; i++) item_bytes *= walk.job.digit[i].size;
    const int64_t bytes = items * item_bytes, grain = greatest(1, kTaskBytes / item_bytes), tasks = (items + grain - 1) / grain;
    const bool stream = bytes >= kStreamBytes;
#pragma omp parallel if (bytes >= kThreadBytes)
    {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < tasks; i++) walk(i * grain, least(items, (i + 1) * grain), stream);
      if (stream) ops.stream_fence();
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
