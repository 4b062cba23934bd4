// The content digest on the host: every run of every unit, shared out over threads.
#include "../digest.h"

#include <string.h>

#include "convert_unit.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadRuns = 512;

struct Sums {
  uint64_t first = 0, second = 0;
};

void add_run(const char* data, int64_t bytes, uint64_t coordinate, RowKey key, Sums* sums) {
  const uint64_t start = (coordinate & ((uint64_t(1) << kRowBits) - 1)) / 8 * kGolden;
  uint64_t a = key.first + start, b = key.second + start, first = 0, second = 0;
  int64_t i = 0;
  for (; i + 8 <= bytes; i += 8, a += kGolden, b += kGolden) {
    uint64_t word;
    memcpy(&word, data + i, 8);
    first += word_term(word, a), second += word_term(word, b);
  }
  if (i < bytes) {
    uint64_t word = 0;
    memcpy(&word, data + i, size_t(bytes - i));
    first += word_term(word, a), second += word_term(word, b);
  }
  sums->first += first, sums->second += second;
}

}  // namespace

void digest(const Bound& bound, uint64_t out[2]) {
  const BlockTables& t = bound.tables;
  const int64_t units = t.num_seqs * t.units_per_seq;
  uint64_t first = 0, second = 0;
  for (const Job& job : bound.jobs) {
    int64_t outer = 1;
    for (int i = 0; i < job.num_digits; i++) outer *= job.digit[i].size;
    const int64_t items = units * outer;
#pragma omp parallel for schedule(static) reduction(+ : first, second) if (items >= kThreadRuns)
    for (int64_t item = 0; item < items; item++) {
      const int64_t u = item / outer;
      const Unit unit = find_unit(t, u);
      int64_t rest = item % outer, token = 0, byte = 0, buffer = 0, coordinate = job.offset[DST];
      for (int i = 0; i < job.num_digits; i++) {
        const Digit& d = job.digit[i];
        const int64_t n = rest % d.size;
        rest /= d.size;
        token += n * d.token, byte += n * d.stride[SRC], buffer += n * d.step[SRC], coordinate += n * d.stride[DST];
      }
      if (token >= unit.tokens) continue;
      char* base = job.base[SRC];
      if (!base) base = bound.buffers[SRC][size_t(job.buffer[SRC] + unit.block[SRC] * job.block_step[SRC] + buffer)] + job.offset[SRC];
      Sums sums;
      const RowKey key = row_key(uint64_t(coordinate), uint64_t(u / t.units_per_seq), uint64_t(u % t.units_per_seq * t.unit_tokens + token));
      add_run(base + unit.block[SRC] * job.block[SRC] + byte, job.run, uint64_t(coordinate), key, &sums);
      first += sums.first, second += sums.second;
    }
  }
  out[0] += first, out[1] += second;
}

}  // namespace cpu
}  // namespace kvx
