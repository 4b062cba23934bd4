// Checks that the ops of hybrid caches share: rows in pages, steps, norm and rotation, tables of entries.
#include "entry/hybrid.h"

#include <string.h>

#include <algorithm>
#include <vector>

#include "array.h"
#include "format.h"

namespace kvx {
using namespace common;

namespace {

bool is_float(int dtype) { return dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 || dtype == KVX_DTYPE_F32; }

kvx_status_t check_ints(const char* what, const kvx_array_t& a, int64_t count) {
  KVX_NEED(a.dtype == KVX_DTYPE_S32 && a.ndim == 1 && a.shape[0] == count && (count <= 1 || a.stride[0] == 1),
           "%s is [%lld] %s with %u dimensions; it must be an adjacent [%lld] int32.", what,
           (long long)(a.ndim ? a.shape[0] : 0), dtype_name(a.dtype), a.ndim, (long long)count);
  return check_array(what, "array", a, count > 0);
}

}  // namespace

kvx_status_t lower_row_pages(const char* what, const kvx_rows_t& r, RowPages* out) {
  const kvx_array_t& a = r.pages;
  KVX_NEED(a.dtype == KVX_DTYPE_U8 && a.ndim == 2,
           "%s: pages are %s with %u dimensions; they must be uint8 [num_pages, page_bytes].", what,
           dtype_name(a.dtype), a.ndim);
  KVX_TRY(check_array(what, "pages", a, a.shape[0] > 0));
  KVX_NEED(a.shape[1] <= 1 || a.stride[1] == 1, "%s: bytes of a page are not adjacent.", what);
  KVX_NEED(r.rows > 0 && r.rows <= INT32_MAX && r.dim > 0 && r.dim <= 65536 && r.rope_dim >= 0 && r.rope_dim < r.dim,
           "%s: %lld rows a page of %lld elements, %lld of them rotary.", what, (long long)r.rows, (long long)r.dim,
           (long long)r.rope_dim);
  const int64_t coded = r.dim - r.rope_dim, bits = dtype_bits(r.dtype);
  KVX_NEED(r.dtype == KVX_DTYPE_F32 || r.dtype == KVX_DTYPE_BF16 || r.dtype == KVX_DTYPE_F8_E4M3 ||
               r.dtype == KVX_DTYPE_E2M1,
           "%s: rows are %s; they must be f32, bf16, f8_e4m3 or e2m1.", what, dtype_name(r.dtype));
  KVX_NEED(coded % 2 == 0 && r.rope_dim % 2 == 0 && r.group >= 0 &&
               (r.group == 0 ? bits >= 16 : bits <= 8 && coded % r.group == 0 && r.group % 2 == 0),
           "%s: %lld coded elements in groups of %lld; they and the rotary part are even, a group divides them, and "
           "f32 and bf16 have none.",
           what, (long long)coded, (long long)r.group);
  const bool has_scale =
      r.scale_dtype == KVX_DTYPE_E8M0 || r.scale_dtype == KVX_DTYPE_F8_E4M3 || r.scale_dtype == KVX_DTYPE_F32;
  KVX_NEED(r.group == 0 || has_scale, "%s: scales are %s; they must be e8m0, f8_e4m3 or f32.", what,
           dtype_name(r.scale_dtype));
  const int64_t scales = r.group ? coded / r.group * dtype_bits(r.scale_dtype) / 8 : 0,
                data = coded * bits / 8 + 2 * r.rope_dim;
  KVX_NEED(r.scale_bytes >= scales && r.scale_bytes <= 65536, "%s: %lld bytes of scales a row; its groups need %lld.",
           what, (long long)r.scale_bytes, (long long)scales);
  KVX_NEED(r.flags <= (KVX_ROWS_ROUND_FIRST | KVX_ROWS_POWER_SCALE | KVX_ROWS_TIES_DOWN), "%s: flags are %llu.", what,
           (unsigned long long)r.flags);
  for (uint64_t word : r.reserved) KVX_NEED(word == 0, "%s: reserved is not 0.", what);
  KVX_NEED(a.shape[1] / r.rows >= data + r.scale_bytes, "%s: a page has %lld bytes; %lld rows need %lld.", what,
           (long long)a.shape[1], (long long)r.rows, (long long)(r.rows * (data + r.scale_bytes)));
  KVX_NEED(a.shape[0] <= 1 || a.stride[0] >= a.shape[1], "%s: pages overlap: they are %lld bytes apart and have %lld.",
           what, (long long)a.stride[0], (long long)a.shape[1]);
  const int unit = r.dtype == KVX_DTYPE_F32                  ? 4
                   : r.dtype == KVX_DTYPE_BF16 || r.rope_dim ? 2
                                                             : 1,
            scale_unit = r.group && r.scale_dtype == KVX_DTYPE_F32 ? 4 : 1;
  KVX_NEED((reinterpret_cast<uintptr_t>(a.data) | uint64_t(a.stride[0])) % (scale_unit > unit ? scale_unit : unit) == 0,
           "%s: pages are not aligned to their %d-byte numbers.", what, scale_unit > unit ? scale_unit : unit);
  KVX_NEED((r.rows * data) % scale_unit == 0 && r.scale_bytes % scale_unit == 0 &&
               (coded * bits / 8) % (r.rope_dim ? 2 : 1) == 0,
           "%s: scales or the rotary part would not be aligned.", what);
  out->data = static_cast<char*>(a.data), out->page = a.stride[0], out->num_pages = a.shape[0];
  out->rows = int32_t(r.rows), out->dim = int32_t(r.dim), out->coded = int32_t(coded),
  out->rope_dim = int32_t(r.rope_dim);
  out->group = int32_t(r.group), out->num_groups = int32_t(r.group ? coded / r.group : 0);
  out->data_bytes = int32_t(data), out->coded_bytes = int32_t(coded * bits / 8),
  out->scale_bytes = int32_t(r.scale_bytes);
  out->dtype = r.dtype, out->scale_dtype = r.group ? r.scale_dtype : KVX_DTYPE_INVALID;
  out->least_amax = r.least_amax, out->least_scale = r.least_scale;
  out->rounds_first = r.flags & KVX_ROWS_ROUND_FIRST, out->has_power_scale = r.flags & KVX_ROWS_POWER_SCALE,
  out->ties_down = r.flags & KVX_ROWS_TIES_DOWN;
  return KVX_STATUS_OK;
}

kvx_status_t lower_step(const kvx_step_t& s, int64_t num_tokens, int64_t num_slots, StepParams* out) {
  const int64_t seqs = s.slots.ndim == 1 ? s.slots.shape[0] : 0;
  KVX_NEED(seqs <= INT32_MAX - 1 && num_tokens <= INT32_MAX && num_slots <= INT32_MAX,
           "%lld sequences, %lld tokens and %lld slots are more than 32 bits count.", (long long)seqs,
           (long long)num_tokens, (long long)num_slots);
  KVX_TRY(check_ints("step.slots", s.slots, seqs));
  KVX_TRY(check_ints("step.cu_seqlens", s.cu_seqlens, seqs + 1));
  KVX_TRY(check_ints("step.starts", s.starts, seqs));
  out->slots = static_cast<const int32_t*>(s.slots.data),
  out->cu_seqlens = static_cast<const int32_t*>(s.cu_seqlens.data),
  out->starts = static_cast<const int32_t*>(s.starts.data);
  out->num_seqs = int32_t(seqs), out->num_slots = int32_t(num_slots), out->num_tokens = num_tokens;
  return KVX_STATUS_OK;
}

kvx_status_t check_host_step(const StepParams& s) {
  const auto outside = [](const char* text, int32_t seq, int64_t got, int64_t bound) {
    return fail(KVX_STATUS_OUT_OF_RANGE, text, seq, (long long)got, (long long)bound);
  };
  std::vector<int64_t> seen;  // slot, sequence
  for (int32_t i = 0; i < s.num_seqs; i++) {
    const int32_t begin = s.cu_seqlens[i], end = s.cu_seqlens[i + 1];
    if (begin < 0 || end < begin || end > s.num_tokens)
      return outside("sequence %d ends at token %lld of %lld, or before it begins. Nothing was written.", i, end,
                     s.num_tokens);
    if (s.slots[i] >= s.num_slots)
      return outside("sequence %d has slot %lld; there are %lld. Nothing was written.", i, s.slots[i], s.num_slots);
    if (s.slots[i] >= 0 && (s.starts[i] < 0 || s.starts[i] > INT32_MAX - (end - begin)))
      return outside("sequence %d starts at position %lld; %lld is the last. Nothing was written.", i, s.starts[i],
                     INT32_MAX);
    if (s.slots[i] >= 0) seen.push_back(int64_t(s.slots[i]) << 32 | i);
  }
  std::sort(seen.begin(), seen.end());
  const auto twice =
      std::adjacent_find(seen.begin(), seen.end(), [](int64_t a, int64_t b) { return a >> 32 == b >> 32; });
  if (twice != seen.end())
    return outside("sequence %d has slot %lld, which is in the step before (of %lld slots). Nothing was written.",
                   int32_t(twice[1]), *twice >> 32, s.num_slots);
  return KVX_STATUS_OK;
}

kvx_status_t lower_turn(const kvx_array_t& cos, const kvx_array_t& sin, int64_t dim, const float** c, const float** s,
                        int64_t* row, int64_t* positions, int32_t* rope_dim) {
  *c = *s = nullptr, *row = *positions = 0, *rope_dim = 0;
  KVX_NEED((cos.ndim == 0) == (sin.ndim == 0), "cos and sin are given together or not at all.");
  if (cos.ndim == 0) return KVX_STATUS_OK;
  KVX_TRY(check_array("cos", "array", cos, true));
  KVX_TRY(check_array("sin", "array", sin, true));
  KVX_NEED(cos.dtype == KVX_DTYPE_F32 && sin.dtype == KVX_DTYPE_F32, "cos is %s and sin %s; both are f32.",
           dtype_name(cos.dtype), dtype_name(sin.dtype));
  const bool same = cos.ndim == 2 && sin.ndim == 2 && cos.shape[0] == sin.shape[0] && cos.shape[1] == sin.shape[1] &&
                    cos.stride[0] == sin.stride[0];
  KVX_NEED(same && cos.shape[0] > 0 && cos.shape[1] > 0 && 2 * cos.shape[1] <= dim &&
               (cos.shape[1] == 1 || (cos.stride[1] == 1 && sin.stride[1] == 1)),
           "cos and sin are alike [max_positions, rope_dim / 2], columns adjacent, and rope_dim at most %lld.",
           (long long)dim);
  *c = static_cast<const float*>(cos.data), *s = static_cast<const float*>(sin.data);
  *row = cos.stride[0] * 4, *positions = cos.shape[0], *rope_dim = int32_t(2 * cos.shape[1]);
  return KVX_STATUS_OK;
}

kvx_status_t lower_finish(const kvx_finish_t& f, int64_t dim, FinishParams* out) {
  KVX_TRY(lower_turn(f.cos, f.sin, dim, &out->cos, &out->sin, &out->table_row, &out->num_positions, &out->rope_dim));
  out->inverse_dim = 1.0f / float(dim), out->eps = f.eps;
  if (f.weight.ndim == 0) return KVX_STATUS_OK;
  KVX_NEED(is_float(f.weight.dtype) && f.weight.ndim == 1 && f.weight.shape[0] == dim &&
               (dim == 1 || f.weight.stride[0] == 1),
           "weight is [%lld] %s; it must be an adjacent [%lld] f16, bf16 or f32.", (long long)f.weight.shape[0],
           dtype_name(f.weight.dtype), (long long)dim);
  KVX_TRY(check_array("weight", "array", f.weight, true));
  KVX_NEED(f.eps >= 0, "eps is %g; it must be 0 or more.", double(f.eps));
  out->weight = static_cast<const char*>(f.weight.data), out->weight_dtype = f.weight.dtype;
  return KVX_STATUS_OK;
}

kvx_status_t lower_entry_table(const kvx_array_t& t, int64_t num_slots, EntryTable* out) {
  KVX_NEED(
      t.dtype == KVX_DTYPE_S32 && t.ndim == 2 && t.shape[0] >= num_slots && t.shape[1] <= INT32_MAX &&
          (t.shape[1] <= 1 || t.stride[1] == 1),
      "block_table is %s with %u dimensions and %lld rows; it must be int32 [slots, columns] with %lld rows or more, "
      "columns adjacent.",
      dtype_name(t.dtype), t.ndim, (long long)(t.ndim ? t.shape[0] : 0), (long long)num_slots);
  KVX_TRY(check_array("block_table", "array", t, num_slots > 0));
  out->pages = static_cast<const int32_t*>(t.data), out->row = t.stride[0] * 4, out->columns = int32_t(t.shape[1]);
  return KVX_STATUS_OK;
}

kvx_status_t lower_tokens(const char* what, const kvx_array_t& a, int64_t heads, int64_t dim, RowsParams* out) {
  KVX_NEED(a.ndim <= KVX_MAX_TENSOR_DIMS, "%s has %u dimensions; at most %d.", what, a.ndim, KVX_MAX_TENSOR_DIMS);
  const int n = int(a.ndim);
  KVX_NEED((n == 2 && heads == 1 && a.shape[1] == dim) || (n == 3 && a.shape[1] == heads && a.shape[2] == dim),
           "%s has %d dimensions and ends in %lld; it must be [num_tokens, %lld%s%.0lld].", what, n,
           (long long)(n ? a.shape[n - 1] : 0), (long long)(n == 2 || heads == 1 ? dim : heads), n == 3 ? ", " : "",
           (long long)(n == 3 ? dim : 0));
  KVX_NEED(is_float(a.dtype) || a.dtype == KVX_DTYPE_F8_E4M3, "%s is %s; it must be f16, bf16 or f32.", what,
           dtype_name(a.dtype));
  KVX_TRY(check_array(what, "array", a, a.shape[0] > 0));
  const int64_t size = dtype_bits(a.dtype) / 8;
  out->data = static_cast<char*>(a.data), out->token = a.stride[0] * size, out->head = n == 3 ? a.stride[1] * size : 0;
  out->dim = dim == 1 ? size : a.stride[n - 1] * size, out->dtype = a.dtype, out->is_dense = out->dim == size;
  return KVX_STATUS_OK;
}

}  // namespace kvx
