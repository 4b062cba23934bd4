// append_swa on the host: a token a time, to its row of a window or of the step's workspace.
#include <vector>

#include "cpu/carry.h"
#include "entry/cpu/hybrid_rows.h"
#include "run.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadElements = 16 << 10;  // below, waking threads costs more than they bring

struct Placed {
  int32_t token, slot;
  int64_t position;
};

kvx_status_t place_tokens(const AppendSwaParams& p, std::vector<Placed>* out) {
  for (const StepRun& run : step_runs(p.step)) {
    KVX_TRY(check_turn(p.finish.cos, p.finish.num_positions, run.last()));
    // Of tokens that share a row the last is kept.
    const int64_t first = p.positions ? greatest(run.begin, int64_t(run.end) - p.window.rows) : run.begin;
    for (int64_t t = first; t < run.end; t++) out->push_back(Placed{int32_t(t), run.slot, run.position(t)});
  }
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t append_swa(const AppendSwaParams& p) {
  std::vector<Placed> tokens;
  KVX_TRY(place_tokens(p, &tokens));
  const RowTable& ops = best_rows();
  const int64_t count = int64_t(tokens.size()), rows = p.window.rows;
  Carry carry;
  const int threads = count * p.window.dim < kThreadElements ? 1 : int(least(max_threads(), count));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int i = 0; i < threads; i++) {
    carry([&] {
      Finisher finisher(ops, p.finish, p.window.dim, false);
      std::vector<float> x(size_t(p.window.dim));
      for (int64_t n = count * i / threads; n < count * (i + 1) / threads; n++) {
        const Placed& t = tokens[size_t(n)];
        load_row(ops, p.x, t.token, 0, 0, p.window.dim, x.data());
        finisher.run(x.data(), t.position);
        const int64_t page = p.positions ? t.slot : t.token / rows,
                      row = p.positions ? t.position % rows : t.token % rows;
        encode_row(ops, p.window, row_place(p.window, page, row), x.data());
        if (p.positions) p.positions[page * rows + row] = int32_t(t.position);
      }
    });
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
