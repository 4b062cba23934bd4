// copy_blocks on the host: pairs are checked first, so that a refused call has copied nothing.
#include "move/copy_blocks.h"

#include <algorithm>
#include <vector>

#include "cpu/row.h"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadBytes = 256 << 10;

int64_t id_of(const CopyBlocksParams& p, int64_t pair, int side) {
  return read_index(p.pairs, pair * p.pair_stride + side * p.side_stride, p.index_bytes);
}

kvx_status_t check_pairs(const CopyBlocksParams& p) {
  std::vector<int64_t> sources, destinations;
  for (int64_t i = 0; i < p.num_pairs; i++) {
    const int64_t from = id_of(p, i, 0), to = id_of(p, i, 1);
    if (from < 0 || to < 0) continue;
    if (from >= p.num_blocks || to >= p.num_blocks)
      return fail(KVX_STATUS_OUT_OF_RANGE,
                  "pairs[%lld] is (%lld, %lld); the cache has %lld blocks. Nothing was copied.", (long long)i,
                  (long long)from, (long long)to, (long long)p.num_blocks);
    if (from == to) continue;
    sources.push_back(from), destinations.push_back(to);
  }
  std::sort(sources.begin(), sources.end());
  std::sort(destinations.begin(), destinations.end());
  for (size_t i = 0; i < destinations.size(); i++) {
    KVX_NEED(i == 0 || destinations[i] != destinations[i - 1], "block %lld is a destination twice.",
             (long long)destinations[i]);
    KVX_NEED(!std::binary_search(sources.begin(), sources.end(), destinations[i]),
             "block %lld is a source and a destination; copy in two calls.", (long long)destinations[i]);
  }
  return KVX_STATUS_OK;
}

void copy_box(const RowTable& ops, const BlockBox& box, int64_t from, int64_t to) {
  for (int64_t d = 0; d < box.size[3]; d++)
    for (int64_t c = 0; c < box.size[2]; c++)
      for (int64_t b = 0; b < box.size[1]; b++) {
        const int64_t at = d * box.step[3] + c * box.step[2] + b * box.step[1];
        char* dst = box.data + to * box.block + at;
        const char* src = box.data + from * box.block + at;
        for (int64_t a = 0; a < box.size[0]; a++, dst += box.step[0], src += box.step[0]) {
          if (box.run >= 64) ops.copy(dst, src, box.run);
          else
            for (int64_t i = 0; i < box.run; i++) dst[i] = src[i];
        }
      }
}

}  // namespace

kvx_status_t copy_blocks(const CopyBlocksParams& p) {
  KVX_TRY(check_pairs(p));
  const RowTable& ops = best_rows();
  int64_t bytes = 0;
  for (int i = 0; i < p.num_boxes; i++) bytes += p.num_pairs * p.box[i].run * p.box[i].count();
  const int threads = bytes < kThreadBytes ? 1 : int(least(max_threads(), p.num_pairs));
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t i = 0; i < p.num_pairs; i++) {
    const int64_t from = id_of(p, i, 0), to = id_of(p, i, 1);
    if (from < 0 || to < 0 || from == to) continue;
    for (int j = 0; j < p.num_boxes; j++) copy_box(ops, p.box[j], from, to);
  }
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
