// write on the host: slots are checked first, so that an OUT_OF_RANGE call has written nothing.
#include <string.h>

#include "cpu/pending.h"
#include "cpu/row.h"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cpu {

namespace {

// Under this, starting threads costs more than it saves. Over kStreamBytes the caches would only be flushed.
constexpr int64_t kThreadBytes = 128 << 10;
constexpr int64_t kStreamBytes = 16 << 20;

int64_t slot_of(const WriteParams& p, int64_t token) {
  return read_index(p.slots, token * p.slot_stride, p.slot_bytes);
}
bool is_skipped(const WriteParams& p, int64_t slot) { return slot < 0 || slot == p.invalid_slot; }

kvx_status_t check_slots(const WriteParams& p) {
  for (int64_t t = 0; t < p.num_tokens; t++) {
    const int64_t slot = slot_of(p, t);
    if (!is_skipped(p, slot) && slot >= p.num_slots)
      return fail(KVX_STATUS_OUT_OF_RANGE, "slot_mapping[%lld] is %lld; the cache has %lld slots. Nothing was written.",
                  (long long)t, (long long)slot, (long long)p.num_slots);
  }
  return KVX_STATUS_OK;
}

// Same type on both sides and rows without holes: bytes move, in runs as long as both sides allow.
struct CopyPlan {
  bool applies;
  int64_t row_bytes;     // one head, or all heads where they stand side by side
  int64_t num_rows;      // rows per token
  bool tokens_adjacent;  // consecutive tokens continue each other on both sides
};

CopyPlan plan_copy(const WriteParams& p, int i) {
  const PlaneParams& c = p.plane[i];
  const RowsParams& r = p.rows[i];
  CopyPlan plan{};
  plan.applies = c.dtype == r.dtype && c.is_dense && r.is_dense;
  plan.row_bytes = span_bytes(c.dtype, c.head_dim);
  plan.num_rows = p.num_heads;
  if (plan.num_rows == 1 || (c.head == plan.row_bytes && r.head == plan.row_bytes)) {
    plan.row_bytes *= plan.num_rows;
    plan.num_rows = 1;
  }
  plan.tokens_adjacent = plan.num_rows == 1 && c.token == plan.row_bytes && r.token == plan.row_bytes;
  return plan;
}

// `run` tokens from `token` on, in consecutive offsets of one block.
void copy_run(Pending& pending, const WriteParams& p, int i, const CopyPlan& plan, int64_t token, int64_t block,
              int64_t offset, int64_t run) {
  const PlaneParams& c = p.plane[i];
  const RowsParams& r = p.rows[i];
  // In the order of the input, which is read once and prefetched; stores are buffered.
  const CopyGrid grid = plan.tokens_adjacent
                            ? CopyGrid{run * plan.row_bytes, 1, 1, 0, 0, 0, 0}
                            : CopyGrid{plan.row_bytes, run, plan.num_rows, c.token, c.head, r.token, r.head};
  pending.add(grid, c.data + block * c.block + offset * c.token, r.data + token * r.token);
}

void write_tokens(const RowTable& ops, const WriteParams& p, const CopyPlan plan[2], int64_t begin, int64_t end,
                  bool stream) {
  Pending pending[2] = {{ops, stream}, {ops, stream}};
  for (int64_t t = begin; t < end;) {
    const int64_t slot = slot_of(p, t);
    if (is_skipped(p, slot)) {
      t++;
      continue;
    }
    const int64_t block = slot / p.block_size, offset = slot % p.block_size;
    int64_t run = 1;
    while (t + run < end && offset + run < p.block_size && slot_of(p, t + run) == slot + run &&
           slot + run != p.invalid_slot)
      run++;
    for (int i = 0; i < 2; i++) {
      if (plan[i].applies) {
        copy_run(pending[i], p, i, plan[i], t, block, offset, run);
        continue;
      }
      const PlaneParams& c = p.plane[i];
      const RowsParams& r = p.rows[i];
      for (int64_t j = 0; j < run; j++)
        for (int64_t h = 0; h < p.num_heads; h++)
          write_row(ops, c, r, c.data + block * c.block + (offset + j) * c.token + h * c.head,
                    r.data + (t + j) * r.token + h * r.head, ScaleAt{block, offset + j, h, t + j});
    }
    t += run;
  }
  for (Pending& list : pending) list.flush();
  if (stream) ops.stream_fence();
}

}  // namespace

kvx_status_t write(const WriteParams& p) {
  KVX_TRY(check_slots(p));
  const RowTable& ops = best_rows();
  const CopyPlan plan[2] = {plan_copy(p, 0), plan_copy(p, 1)};
  const int64_t bytes =
      p.num_tokens * p.num_heads *
      (p.plane[0].head_dim * element_bytes(p.rows[0].dtype) + p.plane[1].head_dim * element_bytes(p.rows[1].dtype));
  const bool stream = bytes >= kStreamBytes;
  const int threads = bytes < kThreadBytes ? 1 : int(least(max_threads(), p.num_tokens));
  if (threads == 1) {
    write_tokens(ops, p, plan, 0, p.num_tokens, stream);
    return KVX_STATUS_OK;
  }
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; i++)
    write_tokens(ops, p, plan, p.num_tokens * i / threads, p.num_tokens * (i + 1) / threads, stream);
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
