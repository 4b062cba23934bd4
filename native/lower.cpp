#include "lower.h"

#include <string.h>

#include <initializer_list>

#include "array.h"
#include "format.h"

namespace kvx {
using namespace common;

namespace {

bool is_float(int dtype) { return dtype == KVX_DTYPE_F16 || dtype == KVX_DTYPE_BF16 || dtype == KVX_DTYPE_F32; }
bool is_element(int dtype) {
  return is_float(dtype) || dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_F8_E5M2 || dtype == KVX_DTYPE_S8 ||
         dtype == KVX_DTYPE_S4 || dtype == KVX_DTYPE_E2M1;
}
bool is_scale(int dtype) { return is_float(dtype) || dtype == KVX_DTYPE_F8_E4M3 || dtype == KVX_DTYPE_E8M0; }

struct Geometry {
  int64_t num_blocks, block_size, num_kv_heads, head_dim;
};

// Axis order of each layout: position of block, token, head, dim (and dim%pack) in `shape`.
kvx_status_t lower_plane_data(const char* name, const kvx_plane_t& plane, const Geometry& g, bool needs_data,
                              PlaneParams* out) {
  const kvx_array_t& a = plane.data;
  KVX_NEED(is_element(a.dtype),
           "%s cache dtype is %s; a cache holds f16, bf16, f32, fp8_e4m3, fp8_e5m2, int8, int4 or e2m1.", name,
           dtype_name(a.dtype));
  bool packed = plane.layout == KVX_LAYOUT_BLOCK_HND_PACKED || (plane.layout == KVX_LAYOUT_BLOCK_CUSTOM && a.ndim == 5);
  bool nhd = plane.layout == KVX_LAYOUT_BLOCK_NHD || (plane.layout == KVX_LAYOUT_BLOCK_CUSTOM && a.ndim == 4);
  KVX_NEED(packed || nhd || plane.layout == KVX_LAYOUT_BLOCK_HND,
           "%s cache layout is %s (%d) with %u dimensions; NHD, HND and CUSTOM take 4, HND_PACKED and CUSTOM take 5.",
           name, layout_name(plane.layout), plane.layout, a.ndim);
  KVX_NEED(a.ndim == (packed ? 5u : 4u), "%s cache has %u dimensions; layout %s has %d.", name, a.ndim,
           layout_name(plane.layout), packed ? 5 : 4);
  const int bits = dtype_bits(a.dtype);
  const int64_t pack = packed ? a.shape[4] : g.head_dim;
  KVX_NEED(pack > 0 && g.head_dim % pack == 0, "%s cache pack is %lld; it must divide head_dim %lld.", name,
           (long long)pack, (long long)g.head_dim);
  const int block = 0, token = packed ? 3 : (nhd ? 1 : 2), head = packed || !nhd ? 1 : 2, dim = packed ? 2 : 3;
  const int64_t want[4] = {g.num_blocks, g.block_size, g.num_kv_heads, packed ? g.head_dim / pack : g.head_dim};
  const int axis[4] = {block, token, head, dim};
  static const char* const axis_name[4] = {"num_blocks", "block_size", "num_kv_heads", "head_dim"};
  for (int i = 0; i < 4; i++)
    KVX_NEED(a.shape[axis[i]] == want[i], "%s cache shape[%d] is %lld; layout %s and the cache's %s make it %lld.",
             name, axis[i], (long long)a.shape[axis[i]], layout_name(plane.layout), axis_name[i], (long long)want[i]);
  KVX_TRY(check_array(name, "cache", a, needs_data));
  if (bits == 4) {
    const int lo = packed ? 4 : 3;
    KVX_NEED(pack % 2 == 0, "%s cache has two %s a byte along dim; %lld is odd.", name, dtype_name(a.dtype),
             (long long)pack);
    for (uint32_t i = 0; i < a.ndim; i++)
      KVX_NEED(a.shape[i] == 1 || (int(i) == lo ? a.stride[i] == 1 : a.stride[i] % 2 == 0),
               "%s cache stride[%u] is %lld; with two %s a byte dim has stride 1 and the others are even.", name, i,
               (long long)a.stride[i], dtype_name(a.dtype));
  }
  KVX_NEED(!overlaps_itself(a), "%s cache strides make two elements share an address (or interleave past checking).",
           name);
  auto bytes = [&](int i) { return a.shape[i] == 1 ? 0 : a.stride[i] * bits / 8; };
  out->data = static_cast<char*>(a.data);
  out->block = bytes(block);
  out->token = bytes(token);
  out->head = bytes(head);
  out->dim_hi = packed ? bytes(dim) : 0;
  const int lo = packed ? 4 : 3;
  // One byte per step for whole elements; 4-bit rows are addressed by byte in the kernels.
  out->dim_lo = bits == 4 ? 1 : (a.shape[lo] == 1 ? bits / 8 : a.stride[lo] * bits / 8);
  out->pack = int32_t(pack);
  out->head_dim = int32_t(g.head_dim);
  out->dtype = a.dtype;
  if (packed && g.head_dim / pack == 1) out->dim_hi = 0;
  // A split dim whose pieces happen to be adjacent is one dense row.
  if (packed && out->dim_lo * 8 == (bits == 4 ? 8 : bits) && g.head_dim / pack > 1 && out->dim_hi == pack * bits / 8) {
    out->pack = int32_t(g.head_dim);
    out->dim_hi = 0;
  }
  out->is_dense = out->pack == g.head_dim && out->dim_lo * 8 == (bits == 4 ? 8 : bits);
  return KVX_STATUS_OK;
}

kvx_status_t lower_plane_scale(const char* name, const kvx_plane_t& plane, const Geometry& g, PlaneParams* out) {
  ScaleParams& s = out->scale;
  s = ScaleParams{};
  const int gran = plane.granularity;
  const bool inline_scale = plane.flags & KVX_PLANE_FLAG_SCALE_INLINE;
  KVX_NEED((plane.flags & ~KVX_PLANE_FLAG_SCALE_INLINE) == 0,
           "%s plane flags are 0x%x; only SCALE_INLINE (1) is known.", name, plane.flags);
  KVX_NEED(gran >= KVX_SCALE_GRANULARITY_NONE && gran <= KVX_SCALE_GRANULARITY_PER_GROUP,
           "%s scale granularity is %d; 0 (none) to 6 (per group) exist.", name, gran);
  s.group_size = int32_t(g.head_dim);
  s.num_groups = 1;
  s.mode = SCALE_NONE;
  const bool fine = gran >= KVX_SCALE_GRANULARITY_PER_TOKEN_HEAD;
  // Per tensor without an array is the scalar alone: v1's fallback from k_scale_desc to k_scale.
  if (gran == KVX_SCALE_GRANULARITY_NONE ||
      (gran == KVX_SCALE_GRANULARITY_PER_TENSOR && plane.scale.data == nullptr && is_quantised(out->dtype))) {
    KVX_NEED(plane.scale.data == nullptr && !inline_scale, "%s has scales but granularity %d.", name, gran);
    if (is_quantised(out->dtype) && plane.tensor_scale) {
      s.tensor_scale = plane.tensor_scale;
      s.mode = SCALE_READ;
    }
    return KVX_STATUS_OK;
  }
  KVX_NEED(is_quantised(out->dtype), "%s cache is %s, which takes no scales; its granularity must be NONE.", name,
           dtype_name(out->dtype));
  s.tensor_scale = plane.tensor_scale;
  if (gran == KVX_SCALE_GRANULARITY_PER_GROUP) {
    KVX_NEED(plane.group_size > 0 && g.head_dim % plane.group_size == 0,
             "%s scale group_size is %u; it must divide head_dim %lld.", name, plane.group_size, (long long)g.head_dim);
    KVX_NEED(dtype_bits(out->dtype) != 4 || plane.group_size % 2 == 0,
             "%s scale group_size is %u; 4-bit caches need an even one.", name, plane.group_size);
    s.group_size = int32_t(plane.group_size);
    s.num_groups = int32_t(g.head_dim / plane.group_size);
  } else {
    KVX_NEED(plane.group_size == 0, "%s scale group_size is %u; it belongs to PER_GROUP only, set 0.", name,
             plane.group_size);
  }
  if (inline_scale) {
    KVX_NEED(fine, "%s scales are inline but not per token-head or per group.", name);
    KVX_NEED(plane.scale.data == nullptr, "%s has both inline scales and a scale array.", name);
    KVX_NEED(is_scale(plane.scale_dtype), "%s scale dtype is %s; f32, f16, bf16, fp8_e4m3 and e8m0 are scales.", name,
             dtype_name(plane.scale_dtype));
    KVX_NEED(out->is_dense, "%s has inline scales, which need the elements of a row to be adjacent.", name);
    const int64_t row = g.head_dim * dtype_bits(out->dtype) / 8, size = dtype_bits(plane.scale_dtype) / 8;
    KVX_NEED(plane.scale_offset >= row && plane.scale_offset < (1 << 30),
             "%s scale_offset is %lld bytes; a row has %lld bytes of elements before it.", name,
             (long long)plane.scale_offset, (long long)row);
    KVX_NEED((uintptr_t(out->data) + plane.scale_offset) % size == 0 && out->block % size == 0 &&
                 out->token % size == 0 && out->head % size == 0,
             "%s inline scales are not aligned to their %lld bytes.", name, (long long)size);
    const int64_t end = plane.scale_offset + s.num_groups * size;
    kvx_array_t cell{};
    cell.ndim = 4;
    const int64_t cs[4] = {g.num_blocks, g.block_size, g.num_kv_heads, end},
                  ct[4] = {out->block, out->token, out->head, 1};
    memcpy(cell.shape, cs, sizeof cs), memcpy(cell.stride, ct, sizeof ct);
    KVX_NEED(!overlaps_itself(cell), "%s inline cells overlap.", name);
    for (int64_t stride : {out->block, out->token, out->head})
      KVX_NEED(stride == 0 || stride >= end,
               "%s rows are %lld bytes apart; %lld bytes of elements and inline scales do not fit.", name,
               (long long)stride, (long long)end);
    if (plane.data.data_bytes) {
      const int64_t last =
          out->block * (g.num_blocks - 1) + out->token * (g.block_size - 1) + out->head * (g.num_kv_heads - 1) + end;
      KVX_NEED(uint64_t(last) <= plane.data.data_bytes, "%s inline scales end at byte %lld; the buffer has %llu.", name,
               (long long)last, (unsigned long long)plane.data.data_bytes);
    }
    s.data = out->data + plane.scale_offset;
    s.block = out->block;
    s.token = out->token;
    s.head = out->head;
    s.group = size;
    s.dtype = plane.scale_dtype;
    s.mode = SCALE_COMPUTED;
    return KVX_STATUS_OK;
  }
  const kvx_array_t& a = plane.scale;
  KVX_NEED(is_scale(a.dtype), "%s scale dtype is %s; f32, f16, bf16, fp8_e4m3 and e8m0 are scales.", name,
           dtype_name(a.dtype));
  KVX_NEED(a.data != nullptr, "%s scale array is NULL; granularity %d needs one.", name, gran);
  // Axes present, outermost first, of [block, token, head, group].
  static const uint8_t axes_of[7] = {0, 0b0000, 0b1000, 0b0010, 0b1010, 0b1110, 0b1111};
  const int64_t size[4] = {g.num_blocks, g.block_size, g.num_kv_heads, s.num_groups};
  int64_t* const stride[4] = {&s.block, &s.token, &s.head, &s.group};
  uint32_t n = 0;
  for (int i = 0; i < 4; i++) n += (axes_of[gran] >> (3 - i)) & 1;
  const bool scalar = n == 0 && (a.ndim == 0 || (a.ndim == 1 && a.shape[0] == 1));
  KVX_NEED(scalar || a.ndim == n, "%s scale has %u dimensions; granularity %d has %u.", name, a.ndim, gran, n);
  KVX_TRY(check_array(name, "scale", a, true));
  for (int i = 0, j = 0; i < 4; i++) {
    if (!((axes_of[gran] >> (3 - i)) & 1)) continue;
    KVX_NEED(a.shape[j] == size[i], "%s scale shape[%d] is %lld; the cache makes it %lld.", name, j,
             (long long)a.shape[j], (long long)size[i]);
    *stride[i] = a.shape[j] == 1 ? 0 : a.stride[j] * dtype_bits(a.dtype) / 8;
    j++;
  }
  KVX_NEED(!fine || !overlaps_itself(a), "%s scale strides make two scales share an address.", name);
  s.data = static_cast<char*>(a.data);
  s.dtype = a.dtype;
  s.mode = fine ? SCALE_COMPUTED : SCALE_READ;
  return KVX_STATUS_OK;
}

// K and V may be two views of one buffer (fused layouts). Rows must not collide.
kvx_status_t check_planes_apart(const kvx_cache_t& c, const PlaneParams p[2]) {
  int64_t end[2], row[2];
  for (int i = 0; i < 2; i++) {
    const PlaneParams& q = p[i];
    row[i] = q.dim_hi * (q.head_dim / q.pack - 1) +
             (dtype_bits(q.dtype) == 4 ? q.pack / 2 : (q.pack - 1) * q.dim_lo + dtype_bits(q.dtype) / 8);
    if ((i ? c.v : c.k).flags & KVX_PLANE_FLAG_SCALE_INLINE)
      row[i] = (q.scale.data - q.data) + q.scale.group * q.scale.num_groups;
    end[i] = q.block * (c.num_blocks - 1) + q.token * (c.block_size - 1) + q.head * (c.num_kv_heads - 1) + row[i];
  }
  const uintptr_t at[2] = {reinterpret_cast<uintptr_t>(p[0].data), reinterpret_cast<uintptr_t>(p[1].data)};
  const int first = at[0] <= at[1] ? 0 : 1;
  if (at[1 - first] - at[first] >= uintptr_t(end[first])) return KVX_STATUS_OK;
  const int64_t apart = int64_t(at[1 - first] - at[first]);  // less than end: far from overflowing
  const bool same = p[0].block == p[1].block && p[0].token == p[1].token && p[0].head == p[1].head;
  KVX_NEED(
      same,
      "K and V share memory but have different block, token or head strides; that cannot be told from an overlap.");
  // The axes of the pair: those of a plane, and `apart` from K to V.
  kvx_array_t both{};
  both.ndim = 5;
  const int64_t shape[5] = {c.num_blocks, c.block_size, c.num_kv_heads, 2,
                            row[first] > row[1 - first] ? row[first] : row[1 - first]};
  const int64_t stride[5] = {p[0].block, p[0].token, p[0].head, apart, 1};
  memcpy(both.shape, shape, sizeof shape);
  memcpy(both.stride, stride, sizeof stride);
  both.dtype = KVX_DTYPE_U8;
  const bool adjacent = p[0].is_dense && p[1].is_dense;
  if (adjacent &&
      apart >= row[first]) {  // unequal rows: test the pair as one cell when V follows K inside the head stride
    kvx_array_t cell = both;
    cell.ndim = 4;
    cell.shape[3] = apart + row[1 - first];
    cell.stride[3] = 1;
    if (!overlaps_itself(cell)) return KVX_STATUS_OK;
  }
  if (!adjacent) {  // rows with holes: the elements' own axes, and the step from K to V
    const kvx_array_t& a = c.k.data;
    const int bits = dtype_bits(a.dtype), n = int(a.ndim);
    const bool alike = a.dtype == c.v.data.dtype && c.k_head_dim == c.v_head_dim && p[0].pack == p[1].pack &&
                       p[0].dim_hi == p[1].dim_hi && p[0].dim_lo == p[1].dim_lo;
    if (alike && (bits == 4 || apart % (bits / 8) == 0)) {
      int64_t axes[kMaxOverlapDims], steps[kMaxOverlapDims];
      for (int k = 0; k < n; k++) axes[k] = a.shape[k], steps[k] = a.stride[k];
      axes[n] = 2, steps[n] = bits == 4 ? apart * 2 : apart / (bits / 8);
      if (!overlaps_itself(axes, steps, n + 1)) return KVX_STATUS_OK;
    }
  } else if (!overlaps_itself(both)) {
    return KVX_STATUS_OK;
  }
  return fail(KVX_STATUS_INVALID_ARGUMENT, "K and V overlap: V starts %lld bytes from K and rows are %lld bytes.",
              (long long)apart, (long long)row[first]);
}

}  // namespace

kvx_status_t lower_rows(const char* name, const char* what, const kvx_array_t& a, int64_t heads, int64_t dim,
                        bool needs_data, RowsParams* out) {
  KVX_NEED(is_float(a.dtype), "%s is %s; IO is f16, bf16 or f32.", what, dtype_name(a.dtype));
  const int n = int(a.ndim);
  KVX_NEED(n == 3 || n == 4, "%s has %d dimensions; it must be [num_tokens, num_kv_heads, head_dim].", what, n);
  KVX_NEED(a.shape[n - 2] == heads && a.shape[n - 1] == dim,
           "%s ends in [%lld, %lld]; the cache's num_kv_heads and head_dim make it [%lld, %lld].", what,
           (long long)a.shape[n - 2], (long long)a.shape[n - 1], (long long)heads, (long long)dim);
  KVX_TRY(check_array(name, what, a, needs_data));
  const int64_t size = dtype_bits(a.dtype) / 8;
  out->data = static_cast<char*>(a.data);
  out->token = a.stride[n - 3] * size;
  out->head = heads == 1 ? 0 : a.stride[n - 2] * size;
  out->dim = dim == 1 ? size : a.stride[n - 1] * size;
  out->dtype = a.dtype;
  out->is_dense = out->dim == size;
  return KVX_STATUS_OK;
}

namespace {

kvx_status_t lower_token_scale(const char* what, const kvx_array_t& a, int64_t tokens, int64_t heads,
                               PlaneParams* plane) {
  if (a.data == nullptr) return KVX_STATUS_OK;
  ScaleParams& s = plane->scale;
  KVX_NEED(s.mode == SCALE_COMPUTED, "%s is given, but the cache's scales are not per token-head or per group.", what);
  KVX_NEED(a.dtype == KVX_DTYPE_F32, "%s is %s; scales given with tokens are f32.", what, dtype_name(a.dtype));
  const bool groups = s.num_groups > 1 || a.ndim == 3;
  KVX_NEED(a.ndim == (groups ? 3u : 2u) && a.shape[0] == tokens && a.shape[1] == heads &&
               (!groups || a.shape[2] == s.num_groups),
           "%s has the wrong shape; it must be [%lld, %lld%s%.0d].", what, (long long)tokens, (long long)heads,
           groups ? ", groups] = groups " : "", groups ? s.num_groups : 0);
  KVX_TRY(check_array(what, "scales", a, true));
  s.given = static_cast<const char*>(a.data);
  s.given_token = a.stride[0] * 4;
  s.given_head = a.stride[1] * 4;
  s.given_group = groups ? a.stride[2] * 4 : 0;
  s.mode = SCALE_GIVEN;
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t check_header(const char* what, uint32_t version, uint32_t struct_bytes, uint64_t need_bytes) {
  if (version >> 16 != KVX_ABI_VERSION_MAJOR)
    return fail(KVX_STATUS_INCOMPATIBLE, "%s has ABI version %u.%u; this library speaks %u.%u.", what, version >> 16,
                version & 0xffff, KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR);
  KVX_NEED(struct_bytes >= need_bytes, "%s.struct_bytes is %u; this version has %llu.", what, struct_bytes,
           (unsigned long long)need_bytes);
  return KVX_STATUS_OK;
}

kvx_status_t lower_cache(const kvx_cache_t& c, PlaneParams plane[2]) {
  KVX_TRY(check_header("cache", c.version, c.struct_bytes, sizeof(kvx_cache_t)));
  KVX_NEED(c.flags == 0, "cache.flags is %llu; no flag is known.", (unsigned long long)c.flags);
  for (uint64_t word : c.reserved) KVX_NEED(word == 0, "cache.reserved is not 0.");
  for (const kvx_plane_t* plane : {&c.k, &c.v})
    KVX_NEED(plane->reserved32 == 0 && plane->reserved[0] == 0 && plane->reserved[1] == 0,
             "a plane's reserved words are not 0.");
  KVX_NEED(
      c.num_blocks > 0 && c.block_size > 0 && c.num_kv_heads > 0 && c.k_head_dim > 0 && c.v_head_dim > 0,
      "cache has num_blocks %lld, block_size %lld, num_kv_heads %lld, head_dim %lld and %lld; each must be 1 or more.",
      (long long)c.num_blocks, (long long)c.block_size, (long long)c.num_kv_heads, (long long)c.k_head_dim,
      (long long)c.v_head_dim);
  const int64_t limit = int64_t(1) << 30;
  KVX_NEED(c.block_size < limit && c.num_kv_heads < limit && c.k_head_dim < limit && c.v_head_dim < limit,
           "cache has block_size %lld, num_kv_heads %lld, head_dim %lld and %lld; each must be under 2^30.",
           (long long)c.block_size, (long long)c.num_kv_heads, (long long)c.k_head_dim, (long long)c.v_head_dim);
  int64_t slots;
  KVX_NEED(mul_fits(c.num_blocks, c.block_size, &slots), "cache num_blocks %lld x block_size %lld overflows.",
           (long long)c.num_blocks, (long long)c.block_size);
  const bool pooled = c.pool_primary != nullptr;  // KV_OFFSETS: addresses come from the pools
  const Geometry gk{c.num_blocks, c.block_size, c.num_kv_heads, c.k_head_dim},
      gv{c.num_blocks, c.block_size, c.num_kv_heads, c.v_head_dim};
  KVX_TRY(lower_plane_data("K", c.k, gk, !pooled, &plane[0]));
  KVX_TRY(lower_plane_data("V", c.v, gv, !pooled, &plane[1]));
  KVX_TRY(lower_plane_scale("K", c.k, gk, &plane[0]));
  KVX_TRY(lower_plane_scale("V", c.v, gv, &plane[1]));
  if (!pooled) KVX_TRY(check_planes_apart(c, plane));
  return KVX_STATUS_OK;
}

kvx_status_t lower_pointers(const char* name, int index, kvx_plane_t* plane) {
  KVX_NEED(plane->data.data == nullptr, "the cache has a data pointer beside %s; leave one of them out.", name);
  KVX_NEED(!(plane->flags & KVX_PLANE_FLAG_SCALE_INLINE), "scales are inline; with %s they must stand apart.", name);
  plane->data.data = reinterpret_cast<void*>(uintptr_t(index + 1) << 58);
  plane->data.data_bytes = 0;
  return KVX_STATUS_OK;
}

kvx_status_t lower_write(const kvx_cache_t& c, const kvx_write_args_t& w, WriteParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(lower_cache(c, out->plane));
  KVX_TRY(check_header("args", w.version, w.struct_bytes, sizeof(kvx_write_args_t)));
  for (uint64_t word : w.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(w.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)w.flags);
  KVX_NEED(c.k.data.data && c.v.data.data,
           "the cache has no data pointers; writes go to k.data and v.data, not to pools.");
  KVX_TRY(check_planes_apart(c, out->plane));
  KVX_NEED(w.slots.dtype == KVX_DTYPE_S32 || w.slots.dtype == KVX_DTYPE_S64,
           "slot_mapping is %s; it must be int32 or int64.", dtype_name(w.slots.dtype));
  KVX_NEED(w.slots.ndim == 1, "slot_mapping has %u dimensions; it takes 1.", w.slots.ndim);
  const int64_t tokens = w.slots.shape[0];
  KVX_NEED(w.k.ndim == 3 && w.v.ndim == 3,
           "k has %u dimensions and v %u; they take 3: [num_tokens, num_kv_heads, head_dim].", w.k.ndim, w.v.ndim);
  KVX_NEED(w.k.shape[0] == tokens && w.v.shape[0] == tokens,
           "k has %lld tokens, v %lld, slot_mapping %lld; they must agree.", (long long)w.k.shape[0],
           (long long)w.v.shape[0], (long long)tokens);
  KVX_TRY(lower_rows("write", "k", w.k, c.num_kv_heads, c.k_head_dim, tokens > 0, &out->rows[0]));
  KVX_TRY(lower_rows("write", "v", w.v, c.num_kv_heads, c.v_head_dim, tokens > 0, &out->rows[1]));
  KVX_TRY(check_repeats("write", "k", w.k));
  KVX_TRY(check_repeats("write", "v", w.v));
  KVX_TRY(check_array("write", "slot_mapping", w.slots, tokens > 0));
  KVX_TRY(lower_token_scale("k_token_scale", w.k_token_scale, tokens, c.num_kv_heads, &out->plane[0]));
  KVX_TRY(lower_token_scale("v_token_scale", w.v_token_scale, tokens, c.num_kv_heads, &out->plane[1]));
  KVX_TRY(check_apart_from_cache(c, {{"slot_mapping", w.slots}}));
  out->slot_bytes = w.slots.dtype == KVX_DTYPE_S64 ? 8 : 4;
  out->slots = w.slots.data;
  out->slot_stride = w.slots.stride[0] * out->slot_bytes;
  out->num_tokens = tokens;
  out->num_slots = c.num_blocks * c.block_size;
  out->block_size = c.block_size;
  out->num_heads = c.num_kv_heads;
  out->invalid_slot = w.invalid_slot;
  out->device = c.device;
  out->errors = reinterpret_cast<unsigned long long*>(w.errors);
  return KVX_STATUS_OK;
}

kvx_status_t lower_amax(const kvx_amax_args_t& a, AmaxParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof(kvx_amax_args_t)));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  const int gran = a.granularity;
  KVX_NEED(gran >= KVX_SCALE_GRANULARITY_PER_TENSOR && gran <= KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD,
           "granularity is %d; 1 (tensor), 2 (block), 3 (head) and 4 (block-head) exist.", gran);
  KVX_NEED(a.x.ndim == 3, "x has %u dimensions; it must be [num_tokens, num_kv_heads, head_dim].", a.x.ndim);
  const int64_t tokens = a.x.shape[0];
  KVX_TRY(lower_rows("amax", "x", a.x, a.x.shape[1], a.x.shape[2], tokens > 0, &out->rows));
  KVX_TRY(check_repeats("amax", "x", a.x));
  const bool by_block = gran == KVX_SCALE_GRANULARITY_PER_BLOCK || gran == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
  const bool by_head = gran == KVX_SCALE_GRANULARITY_PER_HEAD || gran == KVX_SCALE_GRANULARITY_PER_BLOCK_HEAD;
  KVX_NEED(a.amax.dtype == KVX_DTYPE_F32, "amax is %s; it must be f32.", dtype_name(a.amax.dtype));
  const uint32_t n = uint32_t(by_block) + uint32_t(by_head);
  KVX_NEED(a.amax.ndim == n || (n == 0 && a.amax.ndim == 1 && a.amax.shape[0] == 1),
           "amax has %u dimensions; granularity %d has %u.", a.amax.ndim, gran, n);
  KVX_TRY(check_array("amax", "amax", a.amax, true));
  KVX_NEED(!overlaps_itself(a.amax), "amax strides make two entries share an address.");
  KVX_NEED(!by_head || a.amax.shape[n - 1] == a.x.shape[1], "amax has %lld heads; x has %lld.",
           (long long)a.amax.shape[n - 1], (long long)a.x.shape[1]);
  if (by_block) {
    KVX_NEED(a.block_size > 0, "block_size is %lld; it must be 1 or more.", (long long)a.block_size);
    KVX_NEED(a.slots.dtype == KVX_DTYPE_S32 || a.slots.dtype == KVX_DTYPE_S64,
             "slot_mapping is %s; it must be int32 or int64.", dtype_name(a.slots.dtype));
    KVX_NEED(a.slots.ndim == 1 && a.slots.shape[0] == tokens, "slot_mapping must be [%lld], one slot a token.",
             (long long)tokens);
    KVX_TRY(check_array("amax", "slot_mapping", a.slots, tokens > 0));
    KVX_TRY(check_apart({{"amax", a.amax}}, {{"slot_mapping", a.slots}}));
    out->slot_bytes = a.slots.dtype == KVX_DTYPE_S64 ? 8 : 4;
    out->slots = a.slots.data;
    out->slot_stride = a.slots.stride[0] * out->slot_bytes;
    KVX_NEED(mul_fits(a.amax.shape[0], a.block_size, &out->num_slots), "amax shape[0] %lld x block_size overflows.",
             (long long)a.amax.shape[0]);
    out->block = a.amax.stride[0] * 4;
  }
  if (by_head) out->head = a.amax.stride[n - 1] * 4;
  const bool empty = tokens == 0 || a.x.shape[1] == 0 || a.x.shape[2] == 0;
  out->num_tokens = empty ? 0 : tokens;
  out->num_heads = empty ? 0 : a.x.shape[1];
  out->head_dim = a.x.shape[2];
  out->invalid_slot = a.invalid_slot;
  out->block_size = by_block ? a.block_size : 1;
  out->amax = static_cast<char*>(a.amax.data);
  out->device = a.device;
  out->errors = reinterpret_cast<unsigned long long*>(a.errors);
  return KVX_STATUS_OK;
}

kvx_status_t lower_gather(const kvx_cache_t& c, const kvx_gather_args_t& g, GatherParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(lower_cache(c, out->plane));
  KVX_TRY(check_header("args", g.version, g.struct_bytes, sizeof(kvx_gather_args_t)));
  for (uint64_t word : g.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(g.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)g.flags);
  KVX_TRY(lower_table(c, g.table, out));
  const int64_t seqs = out->table.num_seqs * out->table.beam_width;
  KVX_NEED(g.max_seq_len > 0 || seqs == 0, "max_seq_len is %lld; it must be 1 or more.", (long long)g.max_seq_len);
  KVX_NEED(g.max_seq_len >= 0 && g.max_seq_len < (int64_t(1) << 40), "max_seq_len is %lld; it must be under 2^40.",
           (long long)g.max_seq_len);
  const kvx_array_t* io[2] = {&g.k, &g.v};
  const int64_t dims[2] = {c.k_head_dim, c.v_head_dim};
  for (int i = 0; i < 2; i++) {
    const char* what = i ? "v" : "k";
    const kvx_array_t& a = *io[i];
    RowsParams& rows = out->rows[i];
    if (g.cu_seqlens.data != nullptr) {
      KVX_NEED(a.ndim == 3, "%s has %u dimensions; with cu_seqlens the output is [tokens, num_kv_heads, head_dim].",
               what, a.ndim);
      KVX_TRY(lower_rows("gather", what, a, c.num_kv_heads, dims[i], a.shape[0] > 0, &rows));
      KVX_NEED(i == 0 || a.shape[0] == out->num_rows, "k has %lld rows and v %lld; they must agree.",
               (long long)out->num_rows, (long long)a.shape[0]);
      out->num_rows = a.shape[0];
    } else {
      int64_t want;
      KVX_NEED(mul_fits(seqs, g.max_seq_len, &want), "%lld sequences x max_seq_len %lld overflows.", (long long)seqs,
               (long long)g.max_seq_len);
      KVX_NEED(
          (a.ndim == 3 && a.shape[0] == want) || (a.ndim == 4 && a.shape[0] == seqs && a.shape[1] == g.max_seq_len),
          "%s is [%lld, %lld, ...] with %u dimensions; it must be [%lld, num_kv_heads, head_dim] or [%lld, %lld, "
          "num_kv_heads, head_dim].",
          what, (long long)a.shape[0], (long long)a.shape[1], a.ndim, (long long)want, (long long)seqs,
          (long long)g.max_seq_len);
      KVX_TRY(lower_rows("gather", what, a, c.num_kv_heads, dims[i], want > 0, &rows));
      out->seq_rows[i] = seqs < 2      ? 0
                         : a.ndim == 4 ? a.stride[0] * dtype_bits(a.dtype) / 8
                                       : rows.token * g.max_seq_len;
      out->num_rows = want;
    }
    KVX_NEED(!overlaps_itself(a), "%s strides make two output elements share an address.", what);
  }
  if (g.cu_seqlens.data != nullptr) {
    const kvx_array_t& cu = g.cu_seqlens;
    KVX_NEED(cu.dtype == KVX_DTYPE_S32 || cu.dtype == KVX_DTYPE_S64, "cu_seqlens is %s; it must be int32 or int64.",
             dtype_name(cu.dtype));
    KVX_NEED(cu.ndim == 1 && cu.shape[0] == seqs + 1 && cu.stride[0] == 1,
             "cu_seqlens must be a dense [%lld], one more than the sequences.", (long long)(seqs + 1));
    KVX_TRY(check_array("gather", "cu_seqlens", cu, true));
    out->cu_seqlens = cu.data;
    out->cu_bytes = cu.dtype == KVX_DTYPE_S64 ? 8 : 4;
  }
  KVX_TRY(check_apart({{"k", g.k}, {"v", g.v}}, {{"block_table", g.table.indices},
                                                 {"indptr", g.table.indptr},
                                                 {"last_page_len", g.table.last_page_len},
                                                 {"seq_lens", g.table.seq_lens},
                                                 {"cu_seqlens", g.cu_seqlens}}));
  out->max_seq_len = g.max_seq_len;
  // Packed: no sequence has more rows than the output, whatever max_seq_len claims. Work is counted by it. 1: an empty
  // grid is no launch.
  if (out->cu_seqlens && out->num_rows < g.max_seq_len) out->max_seq_len = out->num_rows > 0 ? out->num_rows : 1;
  int64_t all;
  KVX_NEED(mul_fits(seqs, out->max_seq_len, &all), "%lld sequences x max_seq_len %lld overflows.", (long long)seqs,
           (long long)out->max_seq_len);
  out->block_size = c.block_size;
  out->num_blocks = c.num_blocks;
  out->num_heads = c.num_kv_heads;
  out->device = c.device;
  out->errors = reinterpret_cast<unsigned long long*>(g.errors);
  return KVX_STATUS_OK;
}

}  // namespace kvx
