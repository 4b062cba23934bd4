// merge_attention on the host: a row at a time, parts added into a row of floats.
#include "attention/merge.h"

#include <math.h>
#include <string.h>

#include <vector>

#include "cpu/carry.h"
#include "cpu/row.h"
#include "run.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadBytes = 64 << 10;

float at(const char* p) { return *reinterpret_cast<const float*>(p); }

void merge_row(const RowTable& ops, const MergeParams& p, int64_t token, int64_t head, float* sum, float* part) {
  const int64_t dim = p.head_dim;
  const char* lses = p.lses + token * p.lses_token + head * p.lses_head;
  const float sink = p.sinks ? at(p.sinks + head * p.sink_stride) : -INFINITY;
  float most = sink;
  for (int64_t i = 0; i < p.num_parts; i++) most = fmaxf(most, at(lses + i * p.lses_part));
  memset(sum, 0, size_t(dim) * sizeof(float));
  float total = 0;
  for (int64_t i = 0; i < p.num_parts; i++) {
    const float lse = at(lses + i * p.lses_part);
    if (lse == -INFINITY) continue;
    const float w = expf(lse - most);
    const char* src = p.parts.data + i * p.part + token * p.parts.token + head * p.parts.head;
    if (p.parts.is_dense) ops.encode[p.parts.dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(part), src, dim, 1.0f);
    else
      for (int64_t d = 0; d < dim; d++) part[d] = load_float(src + d * p.parts.dim, p.parts.dtype);
    for (int64_t d = 0; d < dim; d++) sum[d] += w * part[d];
    total += w;
  }
  const float divisor = sink == -INFINITY ? total : total + expf(sink - most);
  if (divisor != 0)
    for (int64_t d = 0; d < dim; d++) sum[d] = sum[d] / divisor;
  char* dst = p.out.data + token * p.out.token + head * p.out.head;
  if (p.out.is_dense) ops.encode[KVX_DTYPE_F32][p.out.dtype](dst, reinterpret_cast<const char*>(sum), dim, 1.0f);
  else
    for (int64_t d = 0; d < dim; d++) store_float(dst + d * p.out.dim, p.out.dtype, sum[d]);
  if (p.lse)
    *reinterpret_cast<float*>(p.lse + token * p.lse_token + head * p.lse_head) =
        one_nan(total == 0 ? -INFINITY : most + logf(total));
}

}  // namespace

kvx_status_t merge(const MergeParams& p) {
  if (p.num_tokens == 0) return KVX_STATUS_OK;  // rows of any length are then no rows
  const RowTable& ops = best_rows();
  const int64_t rows = p.num_tokens * p.num_heads,
                bytes = rows * p.num_parts * p.head_dim * element_bytes(p.parts.dtype);
  Carry carry;
  const int threads = bytes < kThreadBytes ? 1 : int(least(max_threads(), rows));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int i = 0; i < threads; i++) {
    carry([&] {
      std::vector<float> scratch(size_t(2 * p.head_dim));
      for (int64_t row = rows * i / threads; row < rows * (i + 1) / threads; row++)
        merge_row(ops, p, row / p.num_heads, row % p.num_heads, scratch.data(), scratch.data() + p.head_dim);
    });
  }
  carry.rethrow();
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
