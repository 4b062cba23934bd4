// The content digest on the host: every row of every unit, shared out over threads.
#include "move/digest.h"

#include "move/cpu/convert_unit.h"
#include "run.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kTaskRows = 1024;

// Rows that wait to be summed together: one call has the next row's key ready when a row ends.
class PendingRows {
 public:
  static constexpr int64_t kMost = 256;

  PendingRows(const RowTable& ops, const DigestShape& shape, int64_t step) : ops_(ops), shape_(shape), step_(step) {}

  void add(DigestRow row, const DigestRow& step, int64_t count) {
    while (count) {
      if (count_ == kMost) flush();
      const int64_t end = least(kMost, count_ + count);
      count -= end - count_;
      DigestRow* to = rows_;
      for (int64_t i = count_; i < end; i++) {
        to[i] = row;
        row.data += step_, row.seed += step.seed, row.word += step.word;
      }
      count_ = end;
    }
  }
  void flush() {
    if (count_) ops_.digest_rows(shape_, rows_, count_, sums);
    count_ = 0;
  }

  uint64_t sums[2] = {0, 0};

 private:
  const RowTable& ops_;
  const DigestShape shape_;
  const int64_t step_;  // bytes from row to row
  int64_t count_ = 0;
  DigestRow rows_[kMost];
};

}  // namespace

// Items are all digits but the first, which is walked by steps: divisions would cost more than a row's sums.
void digest(const Bound& bound, const BlockTables& t, uint64_t out[2]) {
  const RowTable& ops = best_rows();
  const int64_t units = t.num_units();
  uint64_t first = 0, second = 0;
  for (Job job : bound.jobs) {
    const Digit pieces = take_pieces(&job);
    DigestShape shape{job.run, pieces.size, pieces.stride[SRC], false};
    const bool walks = job.num_digits && !job.digit[0].step[SRC];
    const Digit walked = walks ? job.digit[0] : Digit{1, {0, 0}, 0, {0, 0}};
    shape.is_scattered = shape.pieces == 1 && walked.stride[SRC] != shape.bytes;
    const uint64_t seed_step = uint64_t(walked.stride[DST] >> kRowBits) + (uint64_t(walked.token) << kPositionBits);
    const uint32_t word_step = first_word(uint64_t(walked.stride[DST]));
    int64_t outer = 1;
    for (int i = walks; i < job.num_digits; i++) outer *= job.digit[i].size;
    const int64_t items = units * outer, grain = greatest(1, kTaskRows / walked.size),
                  tasks = (items + grain - 1) / grain;
#pragma omp parallel for schedule(static) reduction(+ : first, second) if (tasks > 1)
    for (int64_t task = 0; task < tasks; task++) {
      PendingRows pending(ops, shape, walked.stride[SRC]);
      for (int64_t item = task * grain; item < least(items, (task + 1) * grain); item++) {
        const int64_t u = item / outer;
        const Unit unit = find_unit(t, u);
        if (!unit.tokens) continue;
        int64_t rest = item - u * outer, token = 0, byte = 0, buffer = 0, coordinate = job.offset[DST];
        for (int i = walks; i < job.num_digits; i++) {
          const Digit& d = job.digit[i];
          const int64_t q = rest / d.size, n = rest - q * d.size;
          rest = q;
          token += n * d.token, byte += n * d.stride[SRC], buffer += n * d.step[SRC], coordinate += n * d.stride[DST];
        }
        char* base = job.base[SRC];
        if (!base)
          base = bound.buffers[SRC][size_t(job.buffer[SRC] + unit.block[SRC] * job.block_step[SRC] + buffer)] +
                 job.offset[SRC];
        const int64_t left = unit.tokens - token,
                      rows = !walked.token ? walked.size : least(walked.size, (left + walked.token - 1) / walked.token);
        if (left <= 0) continue;
        const uint64_t position = uint64_t(u % t.units_per_seq * t.unit_tokens + token);
        const DigestRow row{base + unit.block[SRC] * job.block[SRC] + byte,
                            row_seed(uint64_t(coordinate), uint64_t(u / t.units_per_seq), position, bound.content),
                            first_word(uint64_t(coordinate))};
        pending.add(row, DigestRow{nullptr, seed_step, word_step}, rows);
      }
      pending.flush();
      first += pending.sums[0], second += pending.sums[1];
    }
  }
  out[0] += first, out[1] += second;
}

}  // namespace cpu
}  // namespace kvx
