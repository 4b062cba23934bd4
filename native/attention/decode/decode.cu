// The table of decode kernels, and which calls they take. Everything else
// runs on the general kernel (attention/cuda/attention.cu).
#include <algorithm>

#include "attention/decode/table.cuh"

namespace kvx {
namespace cuda {

namespace {

// Scales of `dims` elements each, in K and in V. Where they lie does not matter: a plan is made without them.
bool has_groups(const AttentionParams& p, int dtype, int dims) {
  for (const PlaneParams& plane : p.kv.plane)
    if (!plane.scale.data || plane.scale.dtype != dtype || plane.scale.group_size != dims || plane.head_dim % dims ||
        plane.scale.num_groups != plane.head_dim / dims)
      return false;
  return true;
}

// Rows with several scales each.
bool find_grouped(const AttentionParams& p, const DecodeShape& shape, DecodeChoice* out) {
  const int dtype = p.kv.plane[0].dtype;
  if (dtype == KVX_DTYPE_E2M1 && has_groups(p, KVX_DTYPE_F8_E4M3, 16)) *out = choose_decode_nvfp4(shape);
  else if (dtype == KVX_DTYPE_E2M1 && has_groups(p, KVX_DTYPE_E8M0, 32)) *out = choose_decode_mxfp4(shape);
  else if (dtype == KVX_DTYPE_F8_E4M3 && has_groups(p, KVX_DTYPE_E8M0, 32)) *out = choose_decode_mxfp8(shape);
  else if (dtype == KVX_DTYPE_S4 && has_groups(p, KVX_DTYPE_F16, 32)) *out = choose_decode_s4(shape, GROUP_SCALES);
  else return false;
  return true;
}

// A row's scales follow each other, begin at words, and fill what a tile has for them.
ScaleWords scale_words(const AttentionParams& p, const ScaleParams& s, int64_t dims) {
  const int64_t bytes = dtype_bits(s.dtype) / 8, row = s.num_groups * bytes,
                tile = std::max(p.head_dim, p.v_head_dim) <= 64 ? 64 : 128;
  const uint64_t where = reinterpret_cast<uintptr_t>(s.data) | uint64_t(s.block | s.token);
  if (s.group != bytes || dims != tile || where % 4) return NO_WORDS;
  if (row % 4 == 0 && s.head % 4 == 0) return WHOLE_WORDS;
  return row == 2 && s.head == 2 && p.num_kv_heads % 2 == 0 ? WORDS_OF_TWO_HEADS : NO_WORDS;
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

bool find_choice(const AttentionParams& p, DecodeChoice* out) {
  const PlaneParams *k = &p.kv.plane[0], *v = &p.kv.plane[1];
  const int64_t rows = p.group * p.max_query_len;
  if (!p.q.is_dense || p.q.token % 4 || p.q.head % 4 || reinterpret_cast<uintptr_t>(p.q.data) % 4 ||
      p.q.dtype == KVX_DTYPE_F32)
    return false;
  if (rows > kMostRows || rows < 1 || p.num_seqs * p.num_kv_heads * kMostRows > kMaxCount) return false;
  const bool own = p.kv.bases[0] != nullptr;
  if (!(own ? fits_own_caches(p) : fits_row_finder(p))) return false;
  const bool is_16_bit = k->dtype == KVX_DTYPE_BF16 || k->dtype == KVX_DTYPE_F16;
  const DecodeShape shape{p.head_dim, p.v_head_dim, rows};
  const bool is_wide = shape.most_dims() > kMostNarrowDims;
  const int bits = dtype_bits(k->dtype);
  if (bits != 4 && bits != 8 && bits != 16) return false;
  if (k->dtype != v->dtype || (p.head_dim | p.v_head_dim) % (128 / bits) || shape.most_dims() > kMostWideDims ||
      (own && is_wide))
    return false;
  if (!own && !is_wide && bits <= 8 && find_grouped(p, shape, out)) return true;
  ScaleKind kind[2];
  if (!scale_kind(k->scale, &kind[0]) || !scale_kind(v->scale, &kind[1])) return false;
  const bool by_row = kind[0] == ROW_SCALES && kind[1] == ROW_SCALES,
             by_head = kind[0] != ROW_SCALES && kind[1] != ROW_SCALES;
  if (is_16_bit) {
    if (kind[0] != NO_SCALES || kind[1] != NO_SCALES) return false;
    // f16 holds what bf16 queries are, but for their range (fit_query); the other way round it takes two numbers.
    if (k->dtype == KVX_DTYPE_BF16 && p.q.dtype == KVX_DTYPE_F16) {
      if (own) return false;
      *out = is_wide ? choose_wide_decode_bf16_in_parts(shape) : choose_decode_bf16_in_parts(shape);
    } else if (k->dtype == KVX_DTYPE_BF16)
      *out = is_wide ? choose_wide_decode_bf16(shape) : choose_decode_bf16(shape, own);
    else *out = is_wide ? choose_wide_decode_f16(shape) : choose_decode_f16(shape, own);
    return true;
  }
  if (own || !(by_row || by_head)) return false;
  const ScaleKind scales = by_row ? ROW_SCALES : ONE_SCALE;
  if (k->dtype == KVX_DTYPE_F8_E4M3) {
    *out = is_wide ? choose_wide_decode_e4m3(shape, scales) : choose_decode_e4m3(shape, scales);
    return true;
  }
  if (k->dtype == KVX_DTYPE_F8_E5M2 && by_head) {
    *out = is_wide ? choose_wide_decode_e5m2(shape) : choose_decode_e5m2(shape);
    return true;
  }
  if (k->dtype == KVX_DTYPE_S8) {
    *out = is_wide ? choose_wide_decode_s8(shape, scales) : choose_decode_s8(shape, scales);
    return true;
  }
  if (k->dtype == KVX_DTYPE_S4 && by_row && !is_wide) {
    *out = choose_decode_s4(shape, scales);
    return true;
  }
  return false;
}

// Workers of an SM: a device with less shared memory has fewer.
int workers_of(const DecodeChoice& choice) {
  return std::min(choice.workers, max_shared_memory() / choice.worker_bytes);
}

PlanShape shape_of(const AttentionParams& p, const DecodeChoice& choice, int num_sms) {
  return plan_shape(p, choice.columns, num_sms, workers_of(choice));
}

bool takes_decode(const AttentionParams& p) {
  DecodeChoice choice;
  return find_choice(p, &choice) && workers_of(choice) > 0;
}

}  // namespace

DecodePart decode_part(const AttentionParams& p, AttentionParams* part) {
  *part = p;
  if (takes_decode(p)) return DECODE_ALL;
  if (!p.cu_seqlens) return DECODE_NONE;
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
  a.rows = make_row_finder(p);
  for (int i = 0; i < 2; i++) a.data[i] = p.kv.plane[i].data, a.scales[i] = p.kv.plane[i].scale;
  a.dims[0] = int32_t(p.head_dim), a.dims[1] = int32_t(p.v_head_dim);
  for (int i = 0; i < 2; i++) {
    a.scale_words[i] = scale_words(p, a.scales[i], a.dims[i]);
    if (!find_steps(p, a.scales[i], a.scale_steps[i]))
      return fail(
          KVX_STATUS_UNSUPPORTED,
          "scales of %s in one block, or in two blocks side by side, lie 2 GB or more apart; make them contiguous.",
          i ? "V" : "K");
  }
  for (int i = 0; i < 2; i++) a.chunks[i] = a.dims[i] * dtype_bits(p.kv.plane[i].dtype) / 128;
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
