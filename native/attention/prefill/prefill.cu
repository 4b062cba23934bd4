// The table of prefill kernels, and which calls they take.
#include <algorithm>

#include "attention/prefill/table.cuh"
#include "tiles/tensor_map.h"

namespace kvx {
namespace cuda {

namespace {

bool fits_rows(const RowsParams& r, bool to_16) {
  const int64_t unit = to_16 ? 16 : 4;
  return r.is_dense && r.token % unit == 0 && r.head % unit == 0 && reinterpret_cast<uintptr_t>(r.data) % unit == 0;
}

// For caches of codes: scales that there are kernels for. Where elements become bf16, with scales along rows and in
// rows of more than 256 elements, queries in f16 would lose digits.
bool find_scales(const AttentionParams& p, ScaleKind* kind) {
  const PlaneParams *k = &p.kv.plane[0], *v = &p.kv.plane[1];
  const bool has_groups =
      k->dtype == KVX_DTYPE_E2M1 ? has_group_scales(p, KVX_DTYPE_F8_E4M3, 16) || has_group_scales(p, KVX_DTYPE_E8M0, 32)
      : k->dtype == KVX_DTYPE_F8_E4M3 ? has_group_scales(p, KVX_DTYPE_E8M0, 32)
                                      : k->dtype == KVX_DTYPE_S4 && has_group_scales(p, KVX_DTYPE_F16, 32);
  if (has_groups) {
    *kind = GROUP_SCALES;
    return p.q.dtype == KVX_DTYPE_BF16;
  }
  ScaleKind kinds[2];
  if (!scale_kind(k->scale, &kinds[0]) || !scale_kind(v->scale, &kinds[1])) return false;
  *kind = kinds[0] == ROW_SCALES || kinds[1] == ROW_SCALES ? ROW_SCALES : ONE_SCALE;
  if (k->dtype == KVX_DTYPE_S4) return *kind == ROW_SCALES;
  return k->dtype == KVX_DTYPE_F8_E4M3 || k->dtype == KVX_DTYPE_S8 || k->dtype == KVX_DTYPE_F8_E5M2;
}

bool is_16_bit(const PlaneParams& plane) { return plane.dtype == KVX_DTYPE_BF16 || plane.dtype == KVX_DTYPE_F16; }

// Products of e4m3 that the caller allows. Rows of up to 64 elements would fill half of their tiles: they are faster as
// f16.
bool wants_products(const AttentionParams& p) {
  ScaleKind kind;
  return p.allows_fp8 && p.kv.plane[0].dtype == KVX_DTYPE_F8_E4M3 && most_dims(p) > 64 &&
         most_dims(p) <= kMostPrefillDims && find_scales(p, &kind) && kind == ONE_SCALE;
}

// For whole blocks to go through the copy engine; box 0: they cannot, and rows are copied 16 bytes at a time. A ragged
// table may have a token's neighbours in other blocks. A driver that refuses a map is no reason to fail: rows of any
// cache can be copied.
void make_maps(const AttentionParams& p, PrefillArgs* a) {
  const int64_t format = p.kv.table.format;
  if (!(is_16_bit(p.kv.plane[0]) || wants_products(p)) ||
      (format != KVX_BLOCK_TABLE_PACKED && format != KVX_BLOCK_TABLE_PAGE_CSR))
    return;
  MappedPlane planes[2];
  for (int i = 0; i < 2; i++) {
    planes[i] = MappedPlane{&p.kv.plane[i], p.num_kv_heads, p.kv.block_size, p.kv.num_blocks, tile_keys(p)};
    if (!fits_tensor_map(planes[i])) return;
  }
  for (int i = 0; i < 2; i++)
    if (make_tensor_map(&a->maps[i], planes[i]) != KVX_STATUS_OK) return;
  a->box = int32_t(box_tokens(p.kv.block_size, tile_keys(p)));
}

// Where 64 rows are whole tokens of a group's heads; others are copied 16 bytes at a time.
void make_query_map(const AttentionParams& p, PrefillArgs* a) {
  const MappedRows rows{&p.q, p.head_dim, p.num_heads, p.num_tokens, p.group, 64};
  a->has_query_map = fits_tensor_map(rows) && make_tensor_map(&a->query_map, rows) == KVX_STATUS_OK;
}
// Likewise, of the 16 rows that a warp has.
void make_out_map(const AttentionParams& p, PrefillArgs* a) {
  const MappedRows rows{&p.out, p.v_head_dim, p.num_heads, p.num_tokens, p.group, 16};
  a->has_out_map =
      p.out.dtype == p.q.dtype && fits_tensor_map(rows) && make_tensor_map(&a->out_map, rows) == KVX_STATUS_OK;
}

}  // namespace

bool takes_prefill(const AttentionParams& p) {
  const PlaneParams *k = &p.kv.plane[0], *v = &p.kv.plane[1];
  if (!has_warpgroups() || p.scale <= 0.f || p.kv.bases[0]) return false;
  if (k->dtype != v->dtype) return false;
  if (p.q.dtype != KVX_DTYPE_BF16 && p.q.dtype != KVX_DTYPE_F16) return false;
  ScaleKind kind;
  // Rows of more than that are split, and queries of such a tile do not become f16.
  const bool is_split = k->dtype == p.q.dtype || (dtype_bits(k->dtype) == 8 && p.q.dtype == KVX_DTYPE_BF16);
  if (most_dims(p) > (is_split ? kMostSplitPrefillDims : kMostWidePrefillDims) || (p.head_dim | p.v_head_dim) % 8 ||
      row_unit(p) < (is_16_bit(*k) ? 16 : 4))
    return false;
  // f16 holds what bf16 queries are, but for their range; the other way round digits would be lost.
  if (is_16_bit(*k) ? k->dtype != p.q.dtype && k->dtype != KVX_DTYPE_F16 : !find_scales(p, &kind)) return false;
  if (!is_16_bit(*k) && kind == GROUP_SCALES && most_dims(p) > kMostWidePrefillDims) return false;
  if (!fits_rows(p.q, true) || !fits_rows(p.out, false) || p.num_tokens * p.group > kMaxCount) return false;
  return true;
}

kvx_status_t run_prefill(const AttentionParams& p, int num_sms, void* stream) {
  PrefillArgs a = {};
  a.unit = row_unit(p), a.rows = make_row_finder(p, a.unit);
  make_maps(p, &a);
  make_query_map(p, &a);
  make_out_map(p, &a);
  for (int i = 0; i < 2; i++) a.data[i] = p.kv.plane[i].data, a.scales[i] = p.kv.plane[i].scale;
  a.dims[0] = int32_t(p.head_dim), a.dims[1] = int32_t(p.v_head_dim);
  a.type = p.kv.plane[0].dtype;
  for (int i = 0; i < 2; i++) {
    ScaleKind kind;
    a.has_one_scale[i] = scale_kind(a.scales[i], &kind) && kind != ROW_SCALES;
    a.scale_words[i] = are_words(a.scales[i]);
  }
  for (int i = 0; i < 2; i++) a.row_chunks[i] = (a.dims[i] * dtype_bits(p.kv.plane[i].dtype) + 127) / 128;
  a.q = p.q, a.out = p.out, a.lse = p.lse, a.lse_token = p.lse_token, a.lse_head = p.lse_head, a.sinks = p.sinks;
  a.cu_seqlens = p.cu_seqlens, a.cu_bytes = p.cu_bytes;
  a.num_seqs = int32_t(p.num_seqs), a.num_kv_heads = int32_t(p.num_kv_heads), a.query_len = int32_t(p.query_len),
  a.max_seq_len = int32_t(p.max_seq_len);
  a.skip_rows = int32_t(p.skip_rows), a.group = make_fast_divider(p.group);
  a.window = p.window, a.num_tokens = p.num_tokens, a.scale = p.scale, a.soft_cap = p.soft_cap,
  a.is_causal = p.is_causal, a.stores_16 = fits_rows(p.out, true);
  // No sequence has more blocks of rows than its own, rounded up: a bound that needs no lengths. Those we take have
  // more than skip_rows.
  const int64_t rows = p.num_tokens * p.group, of_block = tile_queries(p),
                seqs = std::min(p.num_seqs, rows / (p.skip_rows + 1));
  const int64_t most =
      p.cu_seqlens ? rows / of_block + seqs : p.num_seqs * ((p.query_len * p.group + of_block - 1) / of_block);
  const int64_t items = most * p.num_kv_heads;
  if (items > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld blocks of query rows are more than one launch takes.", (long long)items);
  a.waves = ItemWaves{uint32_t(items), uint32_t(num_sms)};
  const int64_t blocks = a.waves.share_out();
  const bool is_wide = most_dims(p) > kMostPrefillDims;
  if (a.box > 0 && wants_products(p)) return start_prefill_products(a, blocks, stream);
  switch (p.kv.plane[0].dtype) {
    case KVX_DTYPE_BF16:
      return is_wide ? start_wide_prefill_bf16(p, a, blocks, stream) : start_prefill_bf16(p, a, blocks, stream);
    case KVX_DTYPE_F16:
      return is_wide ? start_wide_prefill_f16(p, a, blocks, stream) : start_prefill_f16(p, a, blocks, stream);
    default: break;
  }
  ScaleKind kind;
  if (!find_scales(p, &kind)) return fail(KVX_STATUS_INTERNAL_ERROR, "no prefill kernel.");
  if (kind == GROUP_SCALES)
    return p.kv.plane[0].dtype == KVX_DTYPE_F8_E4M3 ? start_prefill_mxfp8(p, a, blocks, stream)
                                                    : start_prefill_nibbles(p, a, blocks, stream);
  if (p.kv.plane[0].dtype == KVX_DTYPE_S4) return start_prefill_s4(p, a, blocks, stream);
  return is_wide ? start_wide_prefill_bytes(p, a, blocks, kind, stream)
                 : start_prefill_bytes(p, a, blocks, kind, stream);
}

}  // namespace cuda
}  // namespace kvx
