// The content digest on the host: every run of every unit, shared out over threads.
#include "../digest.h"

#include <string.h>

#include "convert_unit.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadRuns = 512;

void add_run(const RowTable& ops, const char* data, int64_t bytes, uint64_t coordinate, RowKey key, uint64_t* sums) {
  const uint64_t start = (coordinate & ((uint64_t(1) << kRowBits) - 1)) / 8 * kGolden;
  const int64_t words = bytes / 8;
  ops.digest_words(data, words, key.first + start, key.second + start, sums);
  if (bytes % 8 == 0) return;
  uint64_t word = 0;
  memcpy(&word, data + 8 * words, size_t(bytes % 8));
  const uint64_t moved = start + uint64_t(words) * kGolden;
  sums[0] += word_term(word, key.first + moved), sums[1] += word_term(word, key.second + moved);
}

}  // namespace

// Items are all digits but the first, which is walked without a division: those cost more than a row's sums.
void digest(const Bound& bound, uint64_t out[2]) {
  const RowTable& ops = best_rows();
  const BlockTables& t = bound.tables;
  const int64_t units = t.num_seqs * t.units_per_seq;
  uint64_t first = 0, second = 0;
  for (const Job& job : bound.jobs) {
    const Digit walked = job.num_digits ? job.digit[0] : Digit{1, {0, 0}, 0, {0, 0}};
    int64_t outer = 1;
    for (int i = 1; i < job.num_digits; i++) outer *= job.digit[i].size;
    const int64_t items = units * outer;
#pragma omp parallel for schedule(static) reduction(+ : first, second) if (items * walked.size >= kThreadRuns)
    for (int64_t item = 0; item < items; item++) {
      const int64_t u = item / outer;
      const Unit unit = find_unit(t, u);
      if (!unit.tokens) continue;
      int64_t rest = item - u * outer, token = 0, byte = 0, buffer = 0, coordinate = job.offset[DST];
      for (int i = 1; i < job.num_digits; i++) {
        const Digit& d = job.digit[i];
        const int64_t q = rest / d.size, n = rest - q * d.size;
        rest = q;
        token += n * d.token, byte += n * d.stride[SRC], buffer += n * d.step[SRC], coordinate += n * d.stride[DST];
      }
      const uint64_t seq = uint64_t(u / t.units_per_seq), position = uint64_t(u % t.units_per_seq * t.unit_tokens);
      uint64_t sums[2] = {0, 0};
      for (int64_t n = 0; n < walked.size && token < unit.tokens; n++) {
        char* base = job.base[SRC];
        if (!base) base = bound.buffers[SRC][size_t(job.buffer[SRC] + unit.block[SRC] * job.block_step[SRC] + buffer)] + job.offset[SRC];
        add_run(ops, base + unit.block[SRC] * job.block[SRC] + byte, job.run, uint64_t(coordinate), row_key(uint64_t(coordinate), seq, position + uint64_t(token)), sums);
        token += walked.token, byte += walked.stride[SRC], buffer += walked.step[SRC], coordinate += walked.stride[DST];
      }
      first += sums[0], second += sums[1];
    }
  }
  out[0] += first, out[1] += second;
}

}  // namespace cpu
}  // namespace kvx
