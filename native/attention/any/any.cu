// Which calls the kernel for any format takes, and how: rows at once, tokens of a tile, parts of a number.
#include <algorithm>

#include "attention/any/table.cuh"
#include "attention/decode/combine.cuh"

namespace kvx {
namespace cuda {

namespace {

struct AnyChoice {
  int rows, parts;
  PromptKind prompt;  // NO_PROMPT: the kernel for any format
  AnyArgs args;
};

int digits_of(int dtype) {
  switch (dtype) {
    case KVX_DTYPE_E8M0: return 1;
    case KVX_DTYPE_E2M1: return 2;
    case KVX_DTYPE_F8_E5M2: return 3;
    case KVX_DTYPE_F8_E4M3:
    case KVX_DTYPE_S4: return 4;
    case KVX_DTYPE_S8:
    case KVX_DTYPE_BF16: return 8;
    case KVX_DTYPE_F16: return 11;
    case KVX_DTYPE_F32: return 24;
    default: return 0;
  }
}

bool has_groups(const PlaneParams& p) { return dtype_bits(p.dtype) <= 8 && p.scale.num_groups > 1; }

// How many bf16 make an element: all of its digits, unless the query has fewer than that.
int parts_of(const AttentionParams& p, const PlaneParams& plane) {
  if (p.q.dtype == KVX_DTYPE_F32 || plane.dtype == KVX_DTYPE_F32) return 3;
  return digits_of(plane.dtype) + (has_groups(plane) ? digits_of(plane.scale.dtype) : 0) <= 8 ? 1 : 2;
}

AnyPlane make_plane(const AttentionParams& p, int i) {
  AnyPlane a = {};
  a.p = p.kv.plane[i];
  a.dims = int32_t(i ? p.v_head_dim : p.head_dim), a.units = (a.dims + 15) / 16 * 2, a.bits = dtype_bits(a.p.dtype);
  a.has_groups = has_groups(a.p);
  a.per_group = make_fast_divider(a.has_groups ? a.p.scale.group_size / kUnit : a.units);
  const ScaleParams& s = a.p.scale;
  const int64_t scale_bytes = dtype_bits(s.dtype) / 8, row_bytes = s.num_groups * scale_bytes;
  uint64_t where = reinterpret_cast<uintptr_t>(s.data) | uint64_t(s.block | s.token | s.head | row_bytes);
  const bool is_ahead =
      a.has_groups ? s.group == scale_bytes : a.bits <= 8 && s.dtype == KVX_DTYPE_F32 && (s.block || s.token);
  if (is_ahead && s.data && where % 4 == 0 && row_bytes <= 64) a.scale_words = int32_t(row_bytes / 4);
  where = uint64_t(a.p.block | a.p.token | a.p.head) | (p.kv.bases[0] ? 0 : reinterpret_cast<uintptr_t>(a.p.data));
  for (int k = 0; k < 2; k++)
    if (p.kv.table.format == KVX_BLOCK_TABLE_KV_OFFSETS)
      where |= reinterpret_cast<uintptr_t>(p.kv.pool[k]) | uint64_t(p.kv.pool_stride);
  if (a.p.pack != a.dims) where |= uint64_t(a.p.dim_hi);
  const bool is_close = a.bits == 4 || a.p.dim_lo == a.bits / 8;
  if (!is_close || a.dims % kUnit || (a.p.pack != a.dims && a.p.pack % kUnit)) return a;
  // Addresses in a table are known to the device alone; they begin caches, at multiples of 16 bytes.
  const int unit_bytes = std::min(a.bits, 16);
  a.load_bytes = where % unit_bytes == 0 ? unit_bytes : where % 4 == 0 ? 4 : 0;
  return a;
}

int32_t aligned(int64_t bytes) { return int32_t((bytes + 127) / 128 * 128); }

// How a plane's units are shared out to threads, and the room for `buffers` of their bytes.
void stage(AnyPlane* plane, int threads, int tokens, int buffers, int64_t* bytes) {
  if (plane->load_bytes)
    plane->split = make_fast_divider(plane->units), plane->row_step = threads / plane->units, plane->unit_step = 0,
    plane->threads = plane->row_step * plane->units;
  else
    plane->split = make_fast_divider(tokens), plane->row_step = 0, plane->unit_step = threads / tokens,
    plane->threads = threads;
  // Room does not depend on how units are loaded.
  plane->raw_steps = (tokens + threads / plane->units - 1) / (threads / plane->units), plane->raw_at = aligned(*bytes),
  plane->is_staged = buffers && plane->load_bytes;
  if (buffers) *bytes = plane->raw_at + int64_t(buffers) * plane->raw_steps * threads * plane->bits;
}

// Of rows of scales, in words; room for them does not depend on where they lie: plans are made without them.
int64_t scale_words_of(const AnyArgs& a) {
  int64_t words = 0;
  for (const AnyPlane& plane : a.plane)
    if (plane.bits <= 8)
      words += std::min<int64_t>((plane.p.scale.num_groups * dtype_bits(plane.p.scale.dtype) / 8 + 3) / 4, 16);
  return words;
}

// Shared memory for tiles of so many tokens.
void lay_out(AnyChoice* c, int tokens, bool is_staged = true) {
  AnyArgs& a = c->args;
  const int other = c->parts == 3 ? 3 : 2;
  a.tokens = tokens, a.row_bytes = aligned(std::max(a.plane[0].units, a.plane[1].units) * 16);
  a.last_raw = 1;
  a.tile_at = aligned(2 * tokens * sizeof(AnyRow));
  a.query_at = a.tile_at + c->parts * tokens * a.row_bytes;
  a.scores_at = a.query_at + other * c->rows * a.row_bytes;
  a.weights_at = aligned(a.scores_at + c->rows * (tokens + 4 + 3) * 4);
  a.scales_at = a.weights_at + other * c->rows * 128;
  int64_t bytes = a.scales_at + 2 * tokens * scale_words_of(a) * 4;
  for (AnyPlane& plane : a.plane) {
    if (!is_staged && c->parts < 3)
      plane.load_bytes = 0;  // without a stage, kernels of three parts read units whole, others element by element
    stage(&plane, kAnyThreads, tokens, is_staged ? 2 : 0, &bytes);
  }
  a.bytes = int32_t(bytes);
}

// The same for prompts: K and V have a tile each, two where rows go there as they are, else one and a buffer of raw
// bytes.
void lay_out_prompt(AnyChoice* c, int tokens) {
  AnyArgs& a = c->args;
  a.tokens = tokens, a.row_bytes = 2 * prompt_dims(std::max(a.d.dims[0], a.d.dims[1]), c->prompt == PROMPT_PARTS);
  a.planes_apart = 1, a.last_raw = 0;
  a.tile_at =
      (2 * tokens * sizeof(AnyRow) + a.row_bytes - 1) / a.row_bytes * a.row_bytes;  // rows are where `^` finds them
  a.query_at = a.tile_at + (a.is_straight ? 4 : 2) * tokens * a.row_bytes;
  a.scores_at = a.query_at + (c->prompt == PROMPT_PARTS ? 2 : 1) * c->rows * a.row_bytes;
  a.scales_at = aligned(a.scores_at + (c->rows + 2 * kMostAnyTokens + 8) * 4);
  int64_t bytes = a.scales_at + 2 * tokens * scale_words_of(a) * 4;
  for (AnyPlane& plane : a.plane) stage(&plane, kPromptThreads, tokens, a.is_straight ? 0 : 1, &bytes);
  a.bytes = int32_t(bytes);
}

// False: no tile of `c->rows` query rows fits this device.
bool find_tile(AnyChoice* c) {
  const int most = max_shared_memory() - kOwnBytes,
            share = (max_shared_memory() + 1024) / any_blocks(int(c->args.plane[1].dims), c->rows, c->parts) - 1024 -
                    kOwnBytes;
  lay_out(c, 64);
  if (c->args.bytes > share) lay_out(c, 32);
  if (c->args.bytes > most) lay_out(c, 32, false);  // f32 of 512, f16 of 512 in two parts: read where it is converted
  return c->args.bytes <= most;
}

bool find_choice(const AttentionParams& p, int rows, AnyChoice* c) {
  c->parts = 1, c->rows = rows, c->prompt = NO_PROMPT, c->args = AnyArgs{};
  if (std::max(p.head_dim, p.v_head_dim) > kMostAnyDims || (rows == kManyRows && p.v_head_dim > kMostManyDims) ||
      p.num_seqs * p.num_kv_heads * kManyRows > kMaxCount || p.num_tokens * p.group > kMaxCount)
    return false;
  for (int i = 0; i < 2; i++) {
    const PlaneParams& plane = p.kv.plane[i];
    if (digits_of(plane.dtype) == 0 || dtype_bits(plane.dtype) > 32 ||
        (has_groups(plane) && plane.scale.group_size % kUnit))
      return false;
    if (plane.pack % 2 && dtype_bits(plane.dtype) == 4) return false;
    c->parts = std::max(c->parts, parts_of(p, plane));
    c->args.plane[i] = make_plane(p, i);
  }
  return find_tile(c);
}

// Prompts: queries of 16 bits, and elements that one number of 16 bits holds. Under queries in bf16 a code times a
// scale of more digits is rounded to it, as those of a bf16 cache were.
bool find_prompt(const AttentionParams& p, AnyChoice* c) {
  c->parts = 1, c->prompt = NO_PROMPT, c->args = AnyArgs{};
  const bool is_bf16 = p.q.dtype == KVX_DTYPE_BF16;
  const int most = int(std::max(p.head_dim, p.v_head_dim));
  if ((!is_bf16 && p.q.dtype != KVX_DTYPE_F16) || most > kMostPromptDims || p.num_tokens * p.group > kMaxCount ||
      !(p.scale > 0.f))
    return false;
  const PlaneParams *k = &p.kv.plane[0], *v = &p.kv.plane[1];
  if (k->dtype == KVX_DTYPE_F16 && v->dtype == KVX_DTYPE_F16) c->prompt = PROMPT_F16;
  else c->prompt = is_bf16 ? PROMPT_BF16 : PROMPT_PARTS;
  const int own = c->prompt == PROMPT_F16 ? KVX_DTYPE_F16 : KVX_DTYPE_BF16;
  AnyArgs& a = c->args;
  a.is_straight = 1;
  for (int i = 0; i < 2; i++) {
    const PlaneParams& plane = p.kv.plane[i];
    if (c->prompt != PROMPT_F16) {
      const int digits = digits_of(plane.dtype);
      if (digits == 0 || digits > 8 || (has_groups(plane) && plane.scale.group_size % kUnit) ||
          (plane.pack % 2 && dtype_bits(plane.dtype) == 4))
        return false;
      if (!is_bf16 && parts_of(p, plane) > 1) return false;
    }
    a.plane[i] = make_plane(p, i);
    a.plane[i].units = (a.plane[i].dims + 63) / 64 * 8, a.d.dims[i] = a.plane[i].dims;
    if (plane.dtype != own || a.plane[i].load_bytes != 16) a.is_straight = 0;
    if (a.plane[i].bits <= 8) a.scales_rows = 1;
  }
  const bool has_parts = c->prompt == PROMPT_PARTS, is_wide = most > 128,
             has_room = max_shared_memory() >= 200 << 10;  // Hopper's 227 KB
  c->rows = prompt_rows(prompt_dims(most, has_parts), has_parts);
  for (int room :
       {(max_shared_memory() + 1024) / 2 - 1024, max_shared_memory()})  // two blocks of threads on an SM, one
    for (int tokens : {64, 32, 16}) {
      const bool has_kernel = !is_wide ? tokens > 16 : has_parts ? tokens == 16 : tokens > 16 || !has_room;
      if (!has_kernel) continue;
      lay_out_prompt(c, tokens);
      if (a.bytes <= room) return true;
    }
  return false;
}

// For sequences of few rows, shared out by a plan.
bool find_split(const AttentionParams& p, AnyChoice* c) {
  const int64_t rows = p.group * p.max_query_len;
  return rows >= 1 && rows <= kManyRows && find_choice(p, rows <= kFewRows ? kFewRows : kManyRows, c);
}

// For blocks of rows of their own: many at once where they fit.
bool find_own(const AttentionParams& p, AnyChoice* c) {
  return find_prompt(p, c) || find_choice(p, kManyRows, c) || find_choice(p, kFewRows, c);
}

PlanShape shape_of(const AttentionParams& p, const AnyChoice& c, int num_sms) {
  return plan_shape(p, c.rows, num_sms * any_blocks(int(p.v_head_dim), c.rows, c.parts), 1);
}

kvx_status_t start(const AttentionParams& p, AnyChoice* c, int64_t blocks, void* stream) {
  AnyArgs& a = c->args;
  DecodeArgs& d = a.d;
  d.rows.kv = p.kv, d.rows.block_size = make_fast_divider(std::min(p.kv.block_size, kMaxCount));
  d.rows.is_packed_32 =
      p.kv.table.format == KVX_BLOCK_TABLE_PACKED && p.kv.table.index_bytes == 4 && p.kv.table.index_stride == 4;
  d.dims[0] = int32_t(p.head_dim), d.dims[1] = int32_t(p.v_head_dim);
  d.q = p.q, d.out = p.out, d.lse = p.lse, d.lse_token = p.lse_token, d.lse_head = p.lse_head, d.sinks = p.sinks;
  d.cu_seqlens = p.cu_seqlens, d.cu_bytes = p.cu_bytes;
  d.num_seqs = int32_t(p.num_seqs), d.num_kv_heads = int32_t(p.num_kv_heads), d.group = int32_t(p.group),
  d.query_len = int32_t(p.query_len);
  d.max_seq_len = int32_t(p.max_seq_len), d.window = p.window, d.num_tokens = p.num_tokens;
  d.scale = p.scale, d.soft_cap = p.soft_cap, d.is_causal = p.is_causal, d.workspace = p.workspace;
  a.query_parts = p.q.dtype == KVX_DTYPE_BF16 ? 1 : p.q.dtype == KVX_DTYPE_F16 ? 2 : 3;
  a.skip_rows = int32_t(p.skip_rows);
  a.is_common = d.rows.is_packed_32 && !p.kv.bases[0];
  if (c->prompt != NO_PROMPT) return start_prompt(a, c->prompt, blocks, stream);
  switch (c->parts) {
    case 1: return start_any_1(a, c->rows, blocks, stream);
    case 2: return start_any_2(a, c->rows, blocks, stream);
    default: return start_any_3(a, c->rows, blocks, stream);
  }
}

}  // namespace

// Of a varlen call always those of as few rows as decode takes, so that a sequence's results do not hang on the others.
DecodePart any_part(const AttentionParams& p, AttentionParams* part) {
  AnyChoice c;
  *part = p;
  const int64_t most = (p.group <= kFewRows ? kFewRows : kManyRows) / p.group;
  if (p.cu_seqlens) part->max_query_len = std::min(p.max_query_len, most);
  if (!find_split(*part, &c)) return DECODE_NONE;
  return part->max_query_len == p.max_query_len ? DECODE_ALL : DECODE_SHORT;
}

uint64_t any_workspace(const AttentionParams& p, int num_sms) {
  AnyChoice c;
  return find_split(p, &c) ? uint64_t(shape_of(p, c, num_sms).bytes) : 0;
}

kvx_status_t plan_any(const AttentionParams& p, int num_sms, void* stream) {
  AnyChoice c;
  if (!find_split(p, &c)) return KVX_STATUS_OK;
  return launch_plan(p, shape_of(p, c, num_sms), c.args.tokens, stream);
}

kvx_status_t run_any_split(const AttentionParams& p, int num_sms, int64_t* rows, void* stream) {
  AnyChoice c;
  if (!find_split(p, &c)) return fail(KVX_STATUS_INTERNAL_ERROR, "no kernel for few rows of any format.");
  *rows = c.rows;
  c.args.is_split = 1, c.args.d.plan = shape_of(p, c, num_sms);
  KVX_TRY(start(p, &c, c.args.d.plan.max_workers, stream));
  return launch_combine(c.args.d, false, stream);  // scales are in the parts already
}

bool takes_any(const AttentionParams& p) {
  AnyChoice c;
  return find_own(p, &c);
}

kvx_status_t run_any(const AttentionParams& p, void* stream) {
  AnyChoice c;
  if (!find_own(p, &c)) return fail(KVX_STATUS_INTERNAL_ERROR, "no kernel for rows of any format.");
  // No sequence has more blocks of rows than its own, rounded up: a bound that needs no lengths. Those we take have
  // more than skip_rows.
  const int64_t rows = p.num_tokens * p.group, seqs = std::min(p.num_seqs, rows / (p.skip_rows + 1));
  const int64_t most =
                    p.cu_seqlens ? rows / c.rows + seqs : p.num_seqs * ((p.query_len * p.group + c.rows - 1) / c.rows),
                blocks = most * p.num_kv_heads;
  if (blocks > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld blocks of query rows are more than one launch takes.", (long long)blocks);
  if (blocks == 0) return KVX_STATUS_OK;
  return start(p, &c, blocks, stream);
}

}  // namespace cuda
}  // namespace kvx
