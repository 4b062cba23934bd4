// attention_sparse on the host. Rows a token reads, of its window and of entries, are made f32 a tile at a time and
// serve all its heads, as keys and as values; the loops are attend.h's, the softmax is online. Few tokens with many
// rows are cut into spans.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "attention/cpu/attend.h"
#include "cpu/carry.h"
#include "entry/cpu/hybrid_rows.h"
#include "run.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kHeadsTogether = 64;  // with their sums and a tile they fill half a second level
constexpr int64_t kTileRows = 32;
constexpr int64_t kLeastSpan = 256;       // rows worth a unit of their own
constexpr int64_t kThreadWork = 1 << 14;  // heads times rows: below, waking threads costs more than they bring

// Candidates [begin, end) of a token for heads [head, head + count). Candidates are the positions of its window, then
// its entries.
struct Unit {
  int64_t run, token;
  int64_t head, count;
  int64_t begin, end;
  int64_t partial;  // index of its first partial row; -1: the result is whole
};

bool is_same_group(const Unit& a, const Unit& b) { return a.token == b.token && a.head == b.head; }

// What a token may read.
class Candidates {
 public:
  Candidates(const SparseParams& p, const StepRun& run, int64_t token) : p_(p), run_(run), token_(token) {
    const int64_t at = run.position(token);
    low_ = greatest(0, at - p.window_tokens + 1);
    num_window_ = at + 1 - low_;
    if (p.entries.data) num_seen_ = (at + 1) / p.ratio;
    num_entries_ = p.selected && p.entries.data ? p.num_selected : num_seen_;
  }

  int64_t count() const { return num_window_ + num_entries_; }

  // Candidate i, decoded; false: it is not there.
  bool read(const RowTable& ops, int64_t i, float* to) const {
    return i < num_window_ ? read_window(ops, low_ + i, to) : read_entry(ops, i - num_window_, to);
  }

 private:
  bool read_window(const RowTable& ops, int64_t position, float* to) const {
    if (p_.fresh.data && position >= run_.start) {
      const int64_t row = run_.begin + position - run_.start;
      decode_row(ops, p_.fresh, row_place(p_.fresh, row / p_.fresh.rows, row % p_.fresh.rows), to);
      return true;
    }
    const int64_t row = position % p_.window.rows;
    if (p_.positions[int64_t(run_.slot) * p_.window.rows + row] != position) return false;
    decode_row(ops, p_.window, row_place(p_.window, run_.slot, row), to);
    return true;
  }

  bool read_entry(const RowTable& ops, int64_t i, float* to) const {
    const int64_t entry = p_.selected ? reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p_.selected) +
                                                                         token_ * p_.selected_token)[i]
                                      : i;
    if (entry < 0 || entry >= num_seen_) return false;
    const int64_t page = entry_page(p_.table, run_.slot, entry / p_.entries.rows);
    if (page < 0) return false;
    decode_row(ops, p_.entries, row_place(p_.entries, page, entry % p_.entries.rows), to);
    return true;
  }

  const SparseParams& p_;
  const StepRun& run_;
  const int64_t token_;
  int64_t low_, num_window_, num_seen_ = 0, num_entries_ = 0;
};

int64_t partial_floats(const SparseParams& p) { return p.dim + 2; }  // most, sum, values

class Worker {
 public:
  Worker(const SparseParams& p, const RowTable& ops, const AttendTable& loops)
      : p_(p),
        ops_(ops),
        loops_(loops),
        step_(loops.step(KVX_DTYPE_F32)),
        dim_((p.dim + step_ - 1) / step_ * step_),
        tile_(size_t(kTileRows * dim_)),
        row_(size_t(dim_)) {
    for (int64_t i = 0; i < kTileRows + kRoom; i++)
      at_[i] = reinterpret_cast<const char*>(tile_.data() + i % kTileRows * dim_);
  }

  void attend(const StepRun& run, const Unit& u, float* partials) {
    const int64_t fours = (u.count + kLanes - 1) / kLanes;
    open(u, fours);
    const int final_rows = int(u.count - (fours - 1) * kLanes);
    const TileStates states{fours, 0, fours, final_rows == 3 ? 4 : final_rows, q_.data(), scores_.data(), out_.data()};
    const Candidates rows(p_, run, u.token);
    for (int64_t i = u.begin; i < u.end;) {
      int64_t count = 0;
      for (; i < u.end && count < kTileRows; i++) count += rows.read(ops_, i, tile_.data() + count * dim_);
      if (count) add_tile(states, count);
    }
    for (int64_t i = 0; i < u.count; i++) {
      const Softmax& s = softmax_[size_t(i / kLanes)];
      const float most = s.most[i % kLanes], sum = s.sum[i % kLanes];
      if (u.partial < 0) {
        finish(run, u.token, u.head + i, most, sum, out_.data() + i * dim_);
      } else {
        float* to = partials + (u.partial + i) * partial_floats(p_);
        to[0] = most, to[1] = sum;
        memcpy(to + 2, out_.data() + i * dim_, size_t(p_.dim) * 4);
      }
    }
  }

  // Spans [first, last) of the same heads into one result.
  void merge(const StepRun& run, const Unit* first, const Unit* last, const float* partials) {
    out_.resize(size_t(dim_));
    for (int64_t i = 0; i < first->count; i++) {
      float most = -INFINITY, sum = 0;
      for (const Unit* u = first; u < last; u++) most = fmaxf(most, partials[(u->partial + i) * partial_floats(p_)]);
      std::fill(out_.begin(), out_.end(), 0.0f);
      for (const Unit* u = first; u < last; u++) {
        const float* part = partials + (u->partial + i) * partial_floats(p_);
        if (part[1] == 0) continue;  // saw nothing
        const float keep = loops_.exp2(part[0] - most);
        sum += part[1] * keep;
        for (int64_t d = 0; d < p_.dim; d++) out_[size_t(d)] += part[2 + d] * keep;
      }
      finish(run, first->token, first->head + i, most, sum, out_.data());
    }
  }

 private:
  void open(const Unit& u, int64_t fours) {
    q_.assign(size_t(fours * kLanes * dim_), 0.0f);
    out_.assign(size_t(fours * kLanes * dim_), 0.0f);
    scores_.resize(size_t(fours * kTile * kLanes));
    softmax_.assign(size_t(fours), Softmax{});
    for (Softmax& s : softmax_)
      for (float& most : s.most) most = -INFINITY;
    for (int64_t i = 0; i < u.count; i++) load_row(ops_, p_.q, u.token, u.head + i, 0, p_.dim, q_.data() + i * dim_);
  }

  void add_tile(const TileStates& states, int64_t count) {
    loops_.scores[KVX_DTYPE_F32](TileRows{at_, count, dim_, 1, 0, true}, nullptr, states);
    const ScoreRule rule{p_.scale * kLog2e, 0, false, nullptr};
    for (int64_t f = 0; f < states.fours; f++)
      loops_.weigh(&softmax_[size_t(f)], scores_.data() + f * kTile * kLanes, 0, count, rule);
    loops_.values[KVX_DTYPE_F32](tile_.data(), count, dim_, nullptr, nullptr, nullptr, states, softmax_.data());
  }

  // Takes a row's softmax to its end: divides, brings the sink in, turns back, stores out and lse.
  void finish(const StepRun& run, int64_t token, int64_t head, float most, float sum, const float* values) {
    const SoftmaxEnd end = end_softmax(loops_, most, sum, p_.sinks ? p_.sinks + head : nullptr);
    for (int64_t d = 0; d < p_.dim; d++) row_[size_t(d)] = values[d] * end.factor;
    if (p_.cos) turn_row(row_.data(), p_.dim, p_.rope_dim, p_.cos, p_.sin, run.position(token) * p_.table_row, true);
    store_row(ops_, p_.out, token, head, p_.dim, row_.data());
    if (p_.lse) *reinterpret_cast<float*>(p_.lse + token * p_.lse_token + head * p_.lse_head) = end.lse;
  }

  const SparseParams& p_;
  const RowTable& ops_;
  const AttendTable& loops_;
  const int64_t step_, dim_;
  std::vector<float> tile_, row_, q_, out_, scores_;
  std::vector<Softmax> softmax_;
  const char* at_[kTileRows + kRoom];
};

kvx_status_t check_runs(const SparseParams& p, const std::vector<StepRun>& runs) {
  for (const StepRun& run : runs) {
    KVX_TRY(check_turn(p.cos, p.num_positions, run.last()));
    if (p.entries.data) KVX_TRY(check_entries(p.table, p.entries, run.slot, 0, (run.last() + 1) / p.ratio));
  }
  return KVX_STATUS_OK;
}

// Heads of a token, cut into spans of about the same work, several a thread. `partials`
// becomes the number of partial rows.
std::vector<Unit> make_units(const SparseParams& p, const std::vector<StepRun>& runs, int64_t* work,
                             int64_t* partials) {
  *work = *partials = 0;
  for (const StepRun& run : runs)
    for (int64_t t = run.begin; t < run.end; t++) *work += Candidates(p, run, t).count() * p.num_heads;
  const int64_t share = greatest(1, *work / (8 * max_threads()));
  std::vector<Unit> units;
  for (size_t r = 0; r < runs.size(); r++)
    for (int64_t t = runs[r].begin; t < runs[r].end; t++) {
      const int64_t length = Candidates(p, runs[r], t).count();
      for (int64_t head = 0; head < p.num_heads; head += kHeadsTogether) {
        Unit u{int64_t(r), t, head, least(kHeadsTogether, p.num_heads - head), 0, length, -1};
        const int64_t spans = greatest(1, least(length / kLeastSpan, length * u.count / share)),
                      span = (length + spans - 1) / spans;
        for (int64_t begin = 0; begin < length; begin += span) {
          u.begin = begin, u.end = least(length, begin + span);
          if (span < length) u.partial = *partials, *partials += u.count;
          units.push_back(u);
        }
      }
    }
  return units;
}

// Tokens of no sequence: 0 and -inf. What is not of a run is, in order of tokens, between runs and behind them.
void clear_others(const SparseParams& p, const RowTable& ops, const std::vector<StepRun>& runs) {
  const std::vector<float> zeros(size_t(p.dim), 0.0f);
  int64_t token = 0;
  const auto clear_until = [&](int64_t end) {
    for (; token < end; token++)
      for (int64_t h = 0; h < p.num_heads; h++) {
        store_row(ops, p.out, token, h, p.dim, zeros.data());
        if (p.lse) *reinterpret_cast<float*>(p.lse + token * p.lse_token + h * p.lse_head) = -INFINITY;
      }
  };
  for (const StepRun& run : runs) clear_until(run.begin), token = run.end;
  clear_until(p.step.num_tokens);
}

}  // namespace

kvx_status_t attention_sparse(const SparseParams& p) {
  const std::vector<StepRun> runs = step_runs(p.step);
  KVX_TRY(check_runs(p, runs));
  const RowTable& ops = best_rows();
  const AttendTable& loops = best_attend();
  int64_t work, partial_rows;
  const std::vector<Unit> units = make_units(p, runs, &work, &partial_rows);
  std::vector<float> partials(size_t(partial_rows * partial_floats(p)));
  const int64_t count = int64_t(units.size());
  clear_others(p, ops, runs);
  Carry carry;
#pragma omp parallel if (work >= kThreadWork)
  {
    std::optional<Worker> worker;
    carry([&] { worker.emplace(p, ops, loops); });
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++)
      carry([&] { worker->attend(runs[size_t(units[size_t(i)].run)], units[size_t(i)], partials.data()); });
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; i++) {
      const Unit& u = units[size_t(i)];
      if (u.partial < 0 || (i > 0 && is_same_group(units[size_t(i - 1)], u)))
        continue;  // whole already, or not the first of its spans
      int64_t end = i + 1;
      while (end < count && is_same_group(u, units[size_t(end)])) end++;
      carry([&] { worker->merge(runs[size_t(u.run)], &u, units.data() + end, partials.data()); });
    }
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
