// amax on the host: each thread takes a range of tokens; entries of the output are raised one at a time.
#include <vector>

#include "cpu/carry.h"
#include "cpu/row.h"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cpu {

namespace {

float row_amax(const RowTable& ops, const AmaxParams& p, const char* src) {
  if (p.rows.is_dense) return ops.amax[p.rows.dtype](src, p.head_dim);
  float best = 0;
  for (int64_t d = 0; d < p.head_dim; d++) {
    const float a = float_of(bits_of(load_float(src + d * p.rows.dim, p.rows.dtype)) & 0x7fffffffu);
    if (a < float_of(0x7f800000u) && a > best) best = a;
  }
  return best;
}

int64_t slot_of(const AmaxParams& p, int64_t token) { return read_index(p.slots, token * p.slot_stride, p.slot_bytes); }

void raise(const AmaxParams& p, int64_t block, int64_t head, float value) {
  float* entry = reinterpret_cast<float*>(p.amax + block * p.block + head * p.head);
#pragma omp critical(kvx_amax)
  if (value > *entry) *entry = value;
}

void raise_heads(const RowTable& ops, const AmaxParams& p, int64_t begin, int64_t end) {
  std::vector<float> best(p.head ? size_t(p.num_heads) : 1, 0.0f);  // one where all heads share an entry
  for (int64_t t = begin; t < end; t++)
    for (int64_t h = 0; h < p.num_heads; h++) {
      const float a = row_amax(ops, p, p.rows.data + t * p.rows.token + h * p.rows.head);
      float& most = best[p.head ? size_t(h) : 0];
      most = a > most ? a : most;
    }
  for (size_t h = 0; h < best.size(); h++) raise(p, 0, int64_t(h), best[h]);
}

void raise_blocks(const RowTable& ops, const AmaxParams& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; t++) {
    const int64_t slot = slot_of(p, t);
    if (slot < 0 || slot == p.invalid_slot) continue;
    for (int64_t h = 0; h < p.num_heads; h++)
      raise(p, slot / p.block_size, h, row_amax(ops, p, p.rows.data + t * p.rows.token + h * p.rows.head));
  }
}

}  // namespace

kvx_status_t amax(const AmaxParams& p) {
  if (p.slots)
    for (int64_t t = 0; t < p.num_tokens; t++) {
      const int64_t slot = slot_of(p, t);
      if (slot >= p.num_slots && slot != p.invalid_slot)
        return fail(KVX_STATUS_OUT_OF_RANGE, "slot_mapping[%lld] is %lld; amax covers %lld slots.", (long long)t,
                    (long long)slot, (long long)p.num_slots);
    }
  const RowTable& ops = best_rows();
  Carry carry;
  const int threads = p.num_tokens * p.num_heads * p.head_dim < 65536 ? 1 : int(least(max_threads(), p.num_tokens));
  // Threads take ranges of tokens. Without a block axis each keeps maxima of its own per head; with one, entries are
  // raised under a lock by row: rows are long, and two threads seldom meet in one block.
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++) {
    const int64_t begin = p.num_tokens * i / threads, end = p.num_tokens * (i + 1) / threads;
    carry([&] { p.slots ? raise_blocks(ops, p, begin, end) : raise_heads(ops, p, begin, end); });
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
