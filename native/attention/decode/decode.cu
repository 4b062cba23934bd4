// The table of decode kernels, and which calls they take. Everything else
// runs on the general kernel (attention/cuda/attention.cu).
#include <algorithm>

#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

namespace {

// Rows with several scales each.
bool find_grouped(const AttentionParams& p, const DecodeShape& shape, bool is_wide, DecodeChoice* out) {
  const int dtype = p.kv.plane[0].dtype;
  if (dtype == KVX_DTYPE_E2M1 && has_group_scales(p, KVX_DTYPE_F8_E4M3, 16))
    *out = is_wide ? choose_wide_decode_nvfp4(shape) : choose_decode_nvfp4(shape);
  else if (dtype == KVX_DTYPE_E2M1 && has_group_scales(p, KVX_DTYPE_E8M0, 32))
    *out = is_wide ? choose_wide_decode_mxfp4(shape) : choose_decode_mxfp4(shape);
  else if (dtype == KVX_DTYPE_F8_E4M3 && has_group_scales(p, KVX_DTYPE_E8M0, 32))
    *out = is_wide ? choose_wide_decode_mxfp8(shape) : choose_decode_mxfp8(shape);
  else if (dtype == KVX_DTYPE_S4 && has_group_scales(p, KVX_DTYPE_F16, 32))
    *out = is_wide ? choose_wide_decode_s4(shape, GROUP_SCALES) : choose_decode_s4(shape, GROUP_SCALES);
  else return false;
  return true;
}

// A row's scales follow each other and begin at words, and fill what a tile of one warp has for them.
ScaleWords scale_words(const AttentionParams& p, const ScaleParams& s, int64_t dims) {
  const int64_t most = std::max(p.head_dim, p.v_head_dim);
  if (most <= kMostNarrowDims && dims != (most <= 64 ? 64 : kMostNarrowDims)) return NO_WORDS;
  if (are_words(s)) return WHOLE_WORDS;
  const int64_t bytes = dtype_bits(s.dtype) / 8;
  const uint64_t where = reinterpret_cast<uintptr_t>(s.data) | uint64_t(s.block | s.token);
  const bool is_pair = s.group == bytes && s.num_groups * bytes == 2 && s.head == 2 && p.num_kv_heads % 2 == 0;
  return is_pair && where % 4 == 0 && most <= 64 ? WORDS_OF_TWO_HEADS : NO_WORDS;
}

// Steps of a plane's scales; false where those of a block, or of two blocks side by side, lie 2 GB or more apart.
bool find_steps(const AttentionParams& p, const ScaleParams& s, int32_t (&steps)[3]) {
  const int64_t all[3] = {s.block, s.token, s.head}, most[3] = {1, p.kv.block_size - 1, p.num_kv_heads - 1};
  int64_t last = 0;  // of a block
  for (int i = 0; i < 3; i++) {
    if (most[i] > 0 && std::abs(all[i]) > kMaxCount / most[i]) return false;
    if (i > 0) last += std::abs(all[i]) * most[i];
    steps[i] = most[i] > 0 ? int32_t(all[i]) : 0;
  }
  return last <= kMaxCount;
}

// Of a latent cache, whose planes are latents and rotary parts.
bool find_latent(const AttentionParams& p, const DecodeShape& shape, DecodeChoice* out) {
  for (const PlaneParams& plane : p.kv.plane)
    if (plane.dtype != KVX_DTYPE_BF16 || plane.scale.data || plane.scale.tensor_scale) return false;
  if (p.head_dim != kLatentDim || p.rope_dim != kRopeDim || p.q.dtype != KVX_DTYPE_BF16 || !fits_row_finder(p))
    return false;
  *out = choose_decode_latent(shape);
  return true;
}

bool find_choice(const AttentionParams& p, DecodeChoice* out) {
  const PlaneParams *k = &p.kv.plane[0], *v = &p.kv.plane[1];
  const int64_t rows = p.group * p.max_query_len;
  if (!p.q.is_dense || p.q.token % 4 || p.q.head % 4 || reinterpret_cast<uintptr_t>(p.q.data) % 4) return false;
  const bool is_f32 = p.q.dtype == KVX_DTYPE_F32;
  if (rows > (is_f32 ? kMostRows / 2 : kMostRows) || rows < 1 || p.num_seqs * p.num_kv_heads * kMostRows > kMaxCount)
    return false;
  if (p.is_latent) return find_latent(p, DecodeShape{p.head_dim, p.v_head_dim, rows, false}, out);
  const bool own = p.kv.bases[0] != nullptr;
  const bool is_16_bit = k->dtype == KVX_DTYPE_BF16 || k->dtype == KVX_DTYPE_F16;
  const int unit = row_unit(p);
  DecodeShape shape{p.head_dim, p.v_head_dim, rows, unit < 16};
  const bool is_wide = shape.most_dims() > kMostNarrowDims;
  const int bits = dtype_bits(k->dtype);
  if (bits != 4 && bits != 8 && bits != 16) return false;
  if (k->dtype != v->dtype || unit == 0 || shape.most_dims() > kMostWideDims || (own && is_wide)) return false;
  if (!own && bits <= 8 && !is_f32 && find_grouped(p, shape, is_wide, out)) return true;
  ScaleKind kind[2];
  if (!scale_kind(k->scale, &kind[0]) || !scale_kind(v->scale, &kind[1])) return false;
  const bool by_row = kind[0] == ROW_SCALES || kind[1] == ROW_SCALES;
  for (int i = 0; i < 2; i++)
    if (by_row &&
        (kind[i] != ROW_SCALES || p.kv.plane[i].scale.dtype != KVX_DTYPE_F32 || k->dtype == KVX_DTYPE_F8_E5M2))
      shape.is_odd = true;
  if (is_16_bit) {
    if (kind[0] != NO_SCALES || kind[1] != NO_SCALES) return false;
    if (is_f32) return !own && choose_decode_under_f32(shape, k->dtype, out);
    // f16 holds what bf16 queries are, but for their range (fit_query); the other way round it takes two numbers.
    if (k->dtype == KVX_DTYPE_BF16 && p.q.dtype == KVX_DTYPE_F16) {
      if (own) return false;
      *out = is_wide ? choose_wide_decode_bf16_in_parts(shape) : choose_decode_bf16_in_parts(shape);
    } else if (k->dtype == KVX_DTYPE_BF16)
      *out = is_wide ? choose_wide_decode_bf16(shape) : choose_decode_bf16(shape, own);
    else *out = is_wide ? choose_wide_decode_f16(shape) : choose_decode_f16(shape, own);
    return true;
  }
  if (own) return false;
  if (is_f32) return choose_decode_under_f32(shape, k->dtype, out);
  const ScaleKind scales = by_row ? ROW_SCALES : ONE_SCALE;
  if (k->dtype == KVX_DTYPE_F8_E4M3) {
    *out = is_wide ? choose_wide_decode_e4m3(shape, scales) : choose_decode_e4m3(shape, scales);
    return true;
  }
  if (k->dtype == KVX_DTYPE_F8_E5M2) {
    *out = is_wide ? choose_wide_decode_e5m2(shape) : choose_decode_e5m2(shape);
    return true;
  }
  if (k->dtype == KVX_DTYPE_S8) {
    *out = is_wide ? choose_wide_decode_s8(shape, scales) : choose_decode_s8(shape, scales);
    return true;
  }
  if (k->dtype == KVX_DTYPE_S4 && by_row) {
    *out = is_wide ? choose_wide_decode_s4(shape, ROW_SCALES) : choose_decode_s4(shape, ROW_SCALES);
    return true;
  }
  return false;
}

// Workers of an SM: a device with less shared memory has fewer.
int workers_of(const DecodeChoice& choice) {
  return std::min(choice.workers, max_shared_memory() / choice.worker_bytes);
}

PlanShape shape_of(const AttentionParams& p, const DecodeChoice& choice, int num_sms) {
  const int rows = p.q.dtype == KVX_DTYPE_F32 ? choice.columns / 2 : choice.columns;
  return plan_shape(p, rows, num_sms, workers_of(choice));
}

bool takes_decode(const AttentionParams& p) {
  DecodeChoice choice;
  return find_choice(p, &choice) && workers_of(choice) > 0;
}

}  // namespace

DecodePart decode_part(const AttentionParams& p, AttentionParams* part) {
  *part = p;
  if (p.is_latent) {
    // Hopper has a kernel that takes 64 rows at once: as fast as this one from nine rows on. Elsewhere heads are cut
    // into groups, each with a KV head that stands where the others' do: the first that reads a row finds it in memory,
    // the others in L2. A plan knows no soft cap, so none is asked for here.
    const int64_t most = (has_warpgroups() ? kMostRows / 2 : kMostRows) / std::max<int64_t>(p.max_query_len, 1);
    if (most == 0 || (has_warpgroups() && p.group > most)) return DECODE_NONE;
    while (part->group > most || p.num_heads % part->group) part->group--;
    part->num_kv_heads = p.num_heads / part->group;
    for (PlaneParams& plane : part->kv.plane) plane.head = 0;
    return takes_decode(*part) ? DECODE_ALL : DECODE_NONE;
  }
  if (takes_decode(p)) return DECODE_ALL;
  // Queries in f32: the general kernel splits up to 16 rows where this one has up to eight, so it takes a mixed batch.
  if (!p.cu_seqlens || p.q.dtype == KVX_DTYPE_F32) return DECODE_NONE;
  part->max_query_len = kMostRows / p.group;
  return takes_decode(*part) ? DECODE_SHORT : DECODE_NONE;
}

uint64_t decode_workspace(const AttentionParams& p, int num_sms) {
  DecodeChoice choice;
  return find_choice(p, &choice) ? uint64_t(shape_of(p, choice, num_sms).bytes) : 0;
}

kvx_status_t plan_decode(const AttentionParams& p, int num_sms, void* stream) {
  DecodeChoice choice;
  if (!find_choice(p, &choice)) return KVX_STATUS_OK;
  return launch_plan(p, shape_of(p, choice, num_sms), choice.tile_tokens, stream);
}

kvx_status_t run_decode(const AttentionParams& p, int num_sms, void* stream) {
  DecodeChoice choice;
  if (!find_choice(p, &choice)) return fail(KVX_STATUS_INTERNAL_ERROR, "no decode kernel.");
  DecodeArgs a = {};
  a.unit = row_unit(p), a.rows = make_row_finder(p, a.unit);
  for (int i = 0; i < 2; i++) a.data[i] = p.kv.plane[i].data, a.scales[i] = p.kv.plane[i].scale;
  a.dims[0] = int32_t(p.head_dim + p.rope_dim), a.dims[1] = int32_t(p.v_head_dim);
  for (int i = 0; i < 2; i++) {
    ScaleKind kind;
    a.has_one_scale[i] = scale_kind(a.scales[i], &kind) && kind != ROW_SCALES;
    a.scale_words[i] = scale_words(p, a.scales[i], a.dims[i]);
    if (!find_steps(p, a.scales[i], a.scale_steps[i]))
      return fail(
          KVX_STATUS_UNSUPPORTED,
          "scales of %s in one block, or in two blocks side by side, lie 2 GB or more apart; make them contiguous.",
          i ? "V" : "K");
  }
  a.q = p.q, a.out = p.out, a.lse = p.lse, a.lse_token = p.lse_token, a.lse_head = p.lse_head, a.sinks = p.sinks;
  a.cu_seqlens = p.cu_seqlens, a.cu_bytes = p.cu_bytes;
  a.num_seqs = int32_t(p.num_seqs), a.num_kv_heads = int32_t(p.num_kv_heads), a.group = int32_t(p.group),
  a.query_len = int32_t(p.query_len);
  a.max_seq_len = int32_t(p.max_seq_len), a.window = p.window, a.num_tokens = p.num_tokens;
  a.scale = p.scale, a.soft_cap = p.soft_cap, a.is_causal = p.is_causal;
  a.workspace = p.workspace, a.plan = shape_of(p, choice, num_sms);
  return choice.start(a, num_sms, workers_of(choice), stream);
}

}  // namespace cuda
}  // namespace kvx
