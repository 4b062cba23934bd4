// compress on the host. First the entries that close, each alone: their tokens are read where they are, in the step or
// in the state. Then the state takes what stays open. kvx/ops/entry/tail.py is the definition.
#include <math.h>
#include <string.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cpu/carry.h"
#include "entry/cpu/hybrid_rows.h"
#include "run.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kChannels = 64;  // together: scores of 128 tokens then fill a first level
constexpr int64_t kThreadElements = 16 << 10;
enum Window { BEFORE, OVL, CUR };  // of a state with overlap; without, its only window is CUR

// exp of n numbers that are 0 or less, within 2 ulp; under 2^-126 it is 0. A loop that the compiler vectorises, which
// it does not with expf. NaN stays.
void exp_row(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const float a = x[i] < -104.0f ? -104.0f : x[i];
    const float shifted = a * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: its last bits are the whole number
    const float whole = shifted - 12582912.0f;
    const float r = (a - whole * 0.693359375f) - whole * -2.12194440e-4f;  // ln 2 in two parts
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const uint32_t power = (bits_of(shifted) - 0x4b400000u + 127u) << 23;
    x[i] = float_of(pick(a < -87.0f, 0u, bits_of(y * float_of(power))));
  }
}

// A token's kv and score of one part: in the state, or a row of the step.
struct Source {
  const float* kept;  // kv, and dim floats on its score; NULL: of the step
  int64_t token, part, place;
};

class Worker {
 public:
  Worker(const CompressParams& p, const RowTable& ops)
      : p_(p), ops_(ops), finisher_(ops, p.finish, p.dim, p.has_hadamard), entry_(size_t(p.dim)) {}

  // Window `number` of a request is whole: pool, finish, code.
  void close(const StepRun& run, int64_t number, RowPlace to) {
    if (p_.is_running) {
      running(run, number, entry_.data(), nullptr);
    } else {
      sources_.clear();
      if (p_.has_overlap) add_sources(run, number - 1, 0);
      add_sources(run, number, p_.parts - 1);
      pool(nullptr, entry_.data(), nullptr);
    }
    finisher_.run(entry_.data(), number * p_.ratio);
    encode_row(ops_, p_.entries, to, entry_.data());
  }

  // What the next step needs. All entries of the run are made.
  void keep(const StepRun& run) {
    float* state = state_of(run.slot);
    const int64_t first = run.start / p_.ratio, open = (run.last() + 1) / p_.ratio, left = (run.last() + 1) % p_.ratio;
    if (p_.is_running) {
      if (left) return running(run, open, state + 2 * p_.dim, state);
      std::fill_n(state, p_.dim, -INFINITY);
      memset(state + p_.dim, 0, size_t(2 * p_.dim) * 4);
      return;
    }
    if (p_.has_overlap && open > first) {
      sources_.clear();
      add_sources(run, open - 1, 0);
      for (int64_t i = 0; i < p_.ratio; i++)
        copy_source(sources_[size_t(i)], window_of(state, BEFORE) + i * 2 * p_.dim);
    }
    for (int64_t part = 0; part < p_.parts; part++) {
      float* window = window_of(state, part == p_.parts - 1 ? CUR : OVL);
      const int64_t done = open == first ? run.start % p_.ratio : 0;  // places that stay
      for (int64_t i = done; i < p_.ratio; i++) {
        float* to = window + i * 2 * p_.dim;
        if (i < left) {
          copy_source(Source{nullptr, run.begin + open * p_.ratio + i - run.start, part, i}, to);
        } else {
          memset(to, 0, size_t(p_.dim) * 4);
          std::fill_n(to + p_.dim, p_.dim, -INFINITY);
        }
      }
    }
  }

 private:
  float* state_of(int64_t slot) const {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(p_.state) + slot * p_.state_slot);
  }
  float* window_of(float* state, Window w) const { return state + (p_.has_overlap ? w : 0) * p_.ratio * 2 * p_.dim; }

  // The tokens of window `number`: those of an earlier step are in the state.
  void add_sources(const StepRun& run, int64_t number, int64_t part) {
    const int64_t first = run.start / p_.ratio;
    float* state = state_of(run.slot);
    const float* window = window_of(state, number < first ? BEFORE : part == p_.parts - 1 ? CUR : OVL);
    for (int64_t i = 0; i < p_.ratio; i++) {
      const int64_t position = number * p_.ratio + i;
      sources_.push_back(position < run.start ? Source{window + i * 2 * p_.dim, 0, part, i}
                                              : Source{nullptr, run.begin + position - run.start, part, i});
    }
  }

  void load(const Source& s, const RowsParams& rows, int64_t channel, int64_t n, float* to) const {
    load_row(ops_, rows, s.token, 0, s.part * p_.dim + channel, n, to);
  }

  void load_score(const Source& s, int64_t channel, int64_t n, float* to) const {
    if (s.kept) {
      memcpy(to, s.kept + p_.dim + channel, size_t(n) * 4);
      return;
    }
    load(s, p_.score, channel, n, to);
    if (!p_.bias) return;
    const float* bias = p_.bias + (s.place * p_.parts + s.part) * p_.dim + channel;
    for (int64_t c = 0; c < n; c++) to[c] += bias[c];
  }

  void copy_source(const Source& s, float* to) const {
    if (s.kept) {
      memmove(to, s.kept, size_t(2 * p_.dim) * 4);
      return;
    }
    load(s, p_.kv, 0, p_.dim, to);
    load_score(s, 0, p_.dim, to + p_.dim);
  }

  // Tokens of the step that fall into window `number`, on top of what the state has of it. To `mean`, and to `state`
  // where it is given.
  void running(const StepRun& run, int64_t number, float* mean, float* state) {
    sources_.clear();
    const int64_t begin = greatest(run.start, number * p_.ratio), end = least(run.last() + 1, (number + 1) * p_.ratio);
    for (int64_t at = begin; at < end; at++)
      sources_.push_back(Source{nullptr, run.begin + at - run.start, 0, at % p_.ratio});
    pool(number == run.start / p_.ratio ? state_of(run.slot) : nullptr, mean, state);
  }

  // Means of sources_, on top of `before` [largest score, sum of weights, mean]. `mean` and `state` may be in `before`.
  void pool(const float* before, float* mean, float* state) {
    const int64_t count = int64_t(sources_.size());
    scores_.resize(size_t(count * kChannels));
    for (int64_t channel = 0; channel < p_.dim; channel += kChannels) {
      const int64_t n = least(kChannels, p_.dim - channel);
      float top[kChannels], total[kChannels], sum[kChannels], kv[kChannels];
      for (int64_t c = 0; c < n; c++) top[c] = before ? before[channel + c] : -INFINITY;
      for (int64_t i = 0; i < count; i++) {
        float* score = scores_.data() + i * kChannels;
        load_score(sources_[size_t(i)], channel, n, score);
        for (int64_t c = 0; c < n; c++) top[c] = score[c] > top[c] ? score[c] : top[c];
      }
      for (int64_t c = 0; c < n; c++) total[c] = before ? before[channel + c] - top[c] : -INFINITY;
      exp_row(total, n);
      for (int64_t c = 0; c < n; c++) total[c] = before ? before[p_.dim + channel + c] * total[c] : 0.0f;
      for (int64_t c = 0; c < n; c++) sum[c] = before ? before[2 * p_.dim + channel + c] * total[c] : 0.0f;
      for (int64_t i = 0; i < count; i++) {
        float* score = scores_.data() + i * kChannels;
        for (int64_t c = 0; c < n; c++) score[c] -= top[c];
        exp_row(score, n);
        if (sources_[size_t(i)].kept) memcpy(kv, sources_[size_t(i)].kept + channel, size_t(n) * 4);
        else load(sources_[size_t(i)], p_.kv, channel, n, kv);
        for (int64_t c = 0; c < n; c++) total[c] += score[c], sum[c] += score[c] * kv[c];
      }
      for (int64_t c = 0; c < n; c++) mean[channel + c] = sum[c] / total[c];
      if (state) memcpy(state + channel, top, size_t(n) * 4), memcpy(state + p_.dim + channel, total, size_t(n) * 4);
    }
  }

  const CompressParams& p_;
  const RowTable& ops_;
  Finisher finisher_;
  std::vector<float> entry_, scores_;
  std::vector<Source> sources_;
};

struct Closing {
  int64_t run, number, page;
};

// Entries that are written, after every place has been looked at.
kvx_status_t find_closing(const CompressParams& p, const std::vector<StepRun>& runs, std::vector<Closing>* out) {
  for (size_t r = 0; r < runs.size(); r++) {
    const StepRun& run = runs[r];
    const int64_t end = (run.last() + 1) / p.ratio;
    int64_t first = run.start / p.ratio;
    if (first == end) continue;
    KVX_TRY(check_turn(p.finish.cos, p.finish.num_positions, (end - 1) * p.ratio));
    if (p.num_shared) first = greatest(first, p.num_shared[run.slot] / p.ratio);
    KVX_TRY(check_entries(p.table, p.entries, run.slot, first, end));
    for (; first < end; first++) {
      const int64_t page = entry_page(p.table, run.slot, first / p.entries.rows);
      if (page >= 0) out->push_back(Closing{int64_t(r), first, page});
    }
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t compress(const CompressParams& p) {
  const std::vector<StepRun> runs = step_runs(p.step);
  std::vector<Closing> closing;
  KVX_TRY(find_closing(p, runs, &closing));
  const RowTable& ops = best_rows();
  const int64_t num_closing = int64_t(closing.size()), num_runs = int64_t(runs.size());
  const int64_t work = (num_closing * p.ratio * p.parts + num_runs) * p.dim;
  Carry carry;
#pragma omp parallel if (work >= kThreadElements)
  {
    std::optional<Worker> worker;
    carry([&] { worker.emplace(p, ops); });
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_closing; i++) {
      const Closing& c = closing[size_t(i)];
      carry([&] {
        worker->close(runs[size_t(c.run)], c.number, row_place(p.entries, c.page, c.number % p.entries.rows));
      });
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_runs; i++) carry([&] { worker->keep(runs[size_t(i)]); });
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
