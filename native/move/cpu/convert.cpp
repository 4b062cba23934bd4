// convert on the host: all units, and each job's digits beyond the two of a grid or tile, make one list of items that
// threads share.
#include "move/convert.h"

#include <string.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/pending.h"
#include "move/cpu/convert_unit.h"
#include "run.h"

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
  int64_t outer;       // product of the rest
  bool blocks_inside;  // blocks lie closer together than what the last digit leads to, on both sides: walk them first
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
  const Digit* last = s.inner < job->num_digits ? &job->digit[job->num_digits - 1] : nullptr;
  s.blocks_inside = last != nullptr;
  for (int w = 0; w < 2 && last; w++)
    s.blocks_inside &= job->block[w] > 0 && (last->step[w] != 0 || last->stride[w] > job->block[w]);
  return s;
}

enum Take { WHOLE_UNITS, CUT_UNITS };

// Jobs that differ only in where they lie: shards, or K and V. They are walked together, since what they read often
// shares lines (two ranks' heads of one source rank).
bool is_alike(const Job& a, const Job& b) {
  if (a.run != b.run || a.num_digits != b.num_digits) return false;
  for (int i = 0; i < a.num_digits; i++)
    if (memcmp(&a.digit[i], &b.digit[i], sizeof a.digit[i])) return false;
  for (int w = 0; w < 2; w++)
    if (a.block[w] != b.block[w] || a.split[w] != b.split[w] || a.outer[w] != b.outer[w] || a.inner[w] != b.inner[w])
      return false;
  return true;
}

struct Walker {
  const RowTable& ops;
  const Bound& bound;
  const BlockTables& blocks;
  std::vector<Job> jobs;  // alike
  Shape shape;
  Take take;
  int64_t units;

  // Items [first, last), each of all jobs: (unit, outer index) with the unit slowest,
  // or fastest where blocks lie inside.
  void operator()(int64_t first, int64_t last, bool stream) const {
    Pending pending(ops, stream);
    PendingTurns turns(ops, shape.tile);
    const Job& any = jobs[0];
    Unit unit = {};
    int64_t unit_index = -1;
    int64_t start[2] = {};
    for (int64_t item = first; item < last; item++) {
      const int64_t u = shape.blocks_inside ? item % units : item / shape.outer;
      if (u != unit_index) {
        unit = find_unit(blocks, u), unit_index = u;
        for (int w = 0; w < 2 && unit.tokens; w++)
          start[w] = unit.block[w] * any.block[w] + unit.start[w] / any.split[w] * any.outer[w] +
                     unit.start[w] % any.split[w] * any.inner[w];
      }
      if (!unit.tokens || (unit.tokens == blocks.unit_tokens) != (take == WHOLE_UNITS)) {
        if (!shape.blocks_inside) item = (u + 1) * shape.outer - 1;
        continue;
      }
      int64_t rest = shape.blocks_inside ? item / units : item % shape.outer, token = 0, byte[2] = {0, 0},
              buffer[2] = {0, 0};
      for (int i = shape.inner; i < any.num_digits; i++) {
        const Digit& d = any.digit[i];
        const int64_t n = rest % d.size;
        rest /= d.size;
        token += n * d.token;
        for (int w = 0; w < 2; w++) byte[w] += n * d.stride[w], buffer[w] += n * d.step[w];
      }
      if (token >= unit.tokens) continue;
      for (const Job& job : jobs) {
        char* at[2];
        for (int w = 0; w < 2; w++) {
          char* base = job.base[w];
          if (!base)
            base =
                bound.buffers[w][size_t(job.buffer[w] + unit.block[w] * job.block_step[w] + buffer[w])] + job.offset[w];
          at[w] = base + start[w] + byte[w];
        }
        if (shape.is_tile) turns.add(at[DST], at[SRC]);
        else pending.add(shape.grid, at[DST], at[SRC]);
      }
    }
  }
};

void walk_alike(const RowTable& ops, const Bound& bound, const BlockTables& blocks, std::vector<Job> jobs, Take take) {
  const int64_t units = blocks.num_units();
  Shape shape = {};
  for (Job& job : jobs) shape = shape_of(&job);
  const Walker walk{ops, bound, blocks, std::move(jobs), shape, take, units};
  const Job& any = walk.jobs[0];
  const int64_t items = mul_most(units, shape.outer);
  int64_t item_bytes = mul_most(any.run, int64_t(walk.jobs.size()));
  for (int i = 0; i < shape.inner; i++) item_bytes = mul_most(item_bytes, any.digit[i].size);
  const int64_t bytes = mul_most(items, item_bytes), grain = greatest(1, kTaskBytes / item_bytes),
                tasks = (items + grain - 1) / grain;
  const bool stream = bytes >= kStreamBytes;
#pragma omp parallel if (bytes >= kThreadBytes)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tasks; i++) walk(i * grain, least(items, (i + 1) * grain), stream);
    if (stream) ops.stream_fence();
  }
}

}  // namespace

kvx_status_t convert(const Bound& bound, const BlockTables& blocks) {
  const RowTable& ops = best_rows();
  if (blocks.num_units() == 0) return KVX_STATUS_OK;
  convert_cells(bound, blocks);
  for (const Take take : {WHOLE_UNITS, CUT_UNITS}) {
    if (take == CUT_UNITS && !blocks.seq_lens) break;
    const std::vector<Job>& all = take == WHOLE_UNITS ? bound.jobs : bound.cut_jobs;
    for (size_t first = 0, end; first < all.size(); first = end) {
      for (end = first + 1; end < all.size() && is_alike(all[first], all[end]);) end++;
      walk_alike(ops, bound, blocks, std::vector<Job>(all.begin() + int64_t(first), all.begin() + int64_t(end)), take);
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
