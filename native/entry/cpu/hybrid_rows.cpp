// One row of a hybrid cache on the host. Loops over numbers are rows.h's, which are
// compiled for the machine's widest vectors.
#include "entry/cpu/hybrid_rows.h"

#include <math.h>
#include <string.h>

namespace kvx {
namespace cpu {

namespace {

const char* bytes(const float* p) { return reinterpret_cast<const char*>(p); }

int scale_step(const RowPages& r) { return r.scale_dtype == KVX_DTYPE_F32 ? 4 : 1; }

// Ties to the smaller magnitude, and no -0.
uint8_t e2m1_down(float x) {
  const float a = fabsf(x);
  const unsigned code = (a > 0.25f) + (a > 0.75f) + (a > 1.25f) + (a > 1.75f) + (a > 2.5f) + (a > 3.5f) + (a > 5.0f);
  return uint8_t(code | (x < 0 && code ? 8u : 0u));
}

float settle_scale(const RowPages& r, float amax, char* to) {
  float scale = (amax < r.least_amax ? r.least_amax : amax) / dtype_qmax(r.dtype);
  if (scale < r.least_scale) scale = r.least_scale;
  if (r.has_power_scale) {
    char power;
    store_scale(&power, KVX_DTYPE_E8M0, scale);
    scale = load_scale(&power, KVX_DTYPE_E8M0);
  }
  store_scale(to, r.scale_dtype, scale);
  return load_scale(to, r.scale_dtype);
}

void hadamard(float* x, int64_t dim, float factor) {
  for (int64_t width = 1; width < dim; width *= 2)
    for (int64_t i = 0; i < dim; i += 2 * width) {
      float* __restrict lo = x + i;
      float* __restrict hi = x + i + width;
      for (int64_t j = 0; j < width; j++) {
        const float a = lo[j], b = hi[j];
        lo[j] = a + b, hi[j] = a - b;
      }
    }
  for (int64_t i = 0; i < dim; i++) x[i] *= factor;
}

}  // namespace

void encode_row(const RowTable& ops, const RowPages& r, RowPlace to, float* x) {
  if (r.rounds_first)
    for (int64_t i = 0; i < r.dim; i++) x[i] = bf16_to_f32(f32_to_bf16(x[i]));
  const int64_t step = scale_step(r);
  if (r.group == 0) ops.encode[KVX_DTYPE_F32][r.dtype](to.data, bytes(x), r.coded, 1.0f);
  for (int64_t g = 0; g < r.num_groups; g++) {
    const float* tile = x + g * r.group;
    char* codes = to.data + span_bytes(r.dtype, g * r.group);
    const float scale = settle_scale(r, ops.amax[KVX_DTYPE_F32](bytes(tile), r.group), to.scales + g * step);
    if (!r.ties_down) ops.encode[KVX_DTYPE_F32][r.dtype](codes, bytes(tile), r.group, scale);
    else
      for (int64_t i = 0; i < r.group; i += 2)
        codes[i / 2] = char(e2m1_down(tile[i] / scale) | e2m1_down(tile[i + 1] / scale) << 4);
  }
  if (r.group) memset(to.scales + r.num_groups * step, 0, size_t(r.scale_bytes - r.num_groups * step));
  if (r.rope_dim)
    ops.encode[KVX_DTYPE_F32][KVX_DTYPE_BF16](to.data + r.coded_bytes, bytes(x + r.coded), r.rope_dim, 1.0f);
}

void decode_row(const RowTable& ops, const RowPages& r, RowPlace from, float* to) {
  char* out = reinterpret_cast<char*>(to);
  if (r.group == 0) ops.decode[r.dtype][KVX_DTYPE_F32](out, from.data, r.coded, 1.0f);
  for (int64_t g = 0; g < r.num_groups; g++)
    ops.decode[r.dtype][KVX_DTYPE_F32](out + g * r.group * 4, from.data + span_bytes(r.dtype, g * r.group), r.group,
                                       load_scale(from.scales + g * scale_step(r), r.scale_dtype));
  if (r.rope_dim)
    ops.decode[KVX_DTYPE_BF16][KVX_DTYPE_F32](out + r.coded * 4, from.data + r.coded_bytes, r.rope_dim, 1.0f);
}

void load_row(const RowTable& ops, const RowsParams& rows, int64_t token, int64_t head, int64_t first, int64_t n,
              float* to) {
  const char* src = rows.data + token * rows.token + head * rows.head + first * rows.dim;
  if (rows.is_dense) ops.decode[rows.dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(to), src, n, 1.0f);
  else
    for (int64_t d = 0; d < n; d++)
      to[d] = rows.dtype == KVX_DTYPE_F8_E4M3 ? e4m3_to_f32(uint8_t(src[d * rows.dim]))
                                              : load_float(src + d * rows.dim, rows.dtype);
}

void store_row(const RowTable& ops, const RowsParams& rows, int64_t token, int64_t head, int64_t n, const float* from) {
  char* dst = rows.data + token * rows.token + head * rows.head;
  if (rows.is_dense) ops.encode[KVX_DTYPE_F32][rows.dtype](dst, bytes(from), n, 1.0f);
  else
    for (int64_t d = 0; d < n; d++) store_float(dst + d * rows.dim, rows.dtype, from[d]);
}

void turn_row(float* x, int64_t dim, int64_t rope_dim, const float* cos, const float* sin, int64_t at, bool back) {
  cos = reinterpret_cast<const float*>(bytes(cos) + at), sin = reinterpret_cast<const float*>(bytes(sin) + at);
  float* pair = x + dim - rope_dim;
  for (int64_t i = 0; i < rope_dim / 2; i++) {
    const float lo = pair[2 * i], hi = pair[2 * i + 1], c = cos[i], s = back ? -sin[i] : sin[i];
    pair[2 * i] = lo * c - hi * s;
    pair[2 * i + 1] = hi * c + lo * s;
  }
}

Finisher::Finisher(const RowTable& ops, const FinishParams& p, int64_t dim, bool has_hadamard)
    : ops_(ops), p_(p), dim_(dim), factor_(has_hadamard ? float(pow(double(dim), -0.5)) : 0.0f) {
  if (!p.weight) return;
  int64_t room = 8;
  while (room < dim) room *= 2;
  scratch_.resize(size_t(dim + 2 * room));
  weight_.resize(size_t(dim));
  ops.encode[p.weight_dtype][KVX_DTYPE_F32](reinterpret_cast<char*>(weight_.data()), p.weight, dim, 1.0f);
}

void Finisher::run(float* x, int64_t position) {
  if (p_.weight) {
    const RopeRow norm{dim_, 0, weight_.data(), nullptr, nullptr, scratch_.data(), p_.eps, p_.inverse_dim, 0};
    ops_.rotate[KVX_DTYPE_F32](reinterpret_cast<char*>(x), bytes(x), norm);
  }
  if (p_.cos) turn_row(x, dim_, p_.rope_dim, p_.cos, p_.sin, position * p_.table_row, false);
  if (factor_ != 0) hadamard(x, dim_, factor_);
}

std::vector<StepRun> step_runs(const StepParams& s) {
  std::vector<StepRun> runs;
  for (int32_t i = 0; i < s.num_seqs; i++)
    if (s.slots[i] >= 0 && s.cu_seqlens[i + 1] > s.cu_seqlens[i])
      runs.push_back(StepRun{s.slots[i], s.cu_seqlens[i], s.cu_seqlens[i + 1], s.starts[i]});
  return runs;
}

kvx_status_t check_entries(const EntryTable& t, const RowPages& rows, int64_t slot, int64_t first, int64_t count) {
  if (count > int64_t(t.columns) * rows.rows)
    return fail(KVX_STATUS_OUT_OF_RANGE, "entry %lld of slot %lld: its table has %d pages of %d. Nothing was written.",
                (long long)(count - 1), (long long)slot, t.columns, rows.rows);
  for (int64_t column = first / rows.rows; first < count && column <= (count - 1) / rows.rows; column++)
    if (entry_page(t, slot, column) >= rows.num_pages)
      return fail(KVX_STATUS_OUT_OF_RANGE,
                  "block_table[%lld, %lld] is %lld; there are %lld pages. Nothing was written.", (long long)slot,
                  (long long)column, (long long)entry_page(t, slot, column), (long long)rows.num_pages);
  return KVX_STATUS_OK;
}

kvx_status_t check_turn(const float* cos, int64_t num_positions, int64_t last) {
  if (cos && last >= num_positions)
    return fail(KVX_STATUS_OUT_OF_RANGE, "position %lld: cos and sin have %lld rows. Nothing was written.",
                (long long)last, (long long)num_positions);
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
