// amax on the host: each thread takes heads of a range of tokens; entries are raised one at a time.
#include "../run.h"
#include "../table.h"
#include "row.h"

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

}  // namespace

kvx_status_t amax(const AmaxParams& p) {
  if (p.slots)
    for (int64_t t = 0; t < p.num_tokens; t++) {
      const int64_t slot = slot_of(p, t);
      if (slot >= p.num_slots && slot != p.invalid_slot)
        return fail(KVX_STATUS_OUT_OF_RANGE, "slot_mapping[%lld] is %lld; amax covers %lld slots.", (long long)t, (long long)slot, (long long)p.num_slots);
    }
  const RowTable& ops = best_rows();
  // Heads are independent of each other, so threads over heads share no entry unless the head axis is absent.
#pragma omp parallel for schedule(static) if (p.head != 0 && p.num_tokens * p.num_heads * p.head_dim > 65536)
  for (int64_t h = 0; h < p.num_heads; h++)
    for (int64_t t = 0; t < p.num_tokens; t++) {
      int64_t block = 0;
      if (p.slots) {
        const int64_t slot = slot_of(p, t);
        if (slot < 0 || slot == p.invalid_slot) continue;
        block = slot / p.block_size;
      }
      float* entry = reinterpret_cast<float*>(p.amax + block * p.block + h * p.head);
      const float a = row_amax(ops, p, p.rows.data + t * p.rows.token + h * p.rows.head);
      if (a > *entry) *entry = a;
    }
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
