#include "array.h"

#include "format.h"

namespace kvx {
using namespace common;

kvx_status_t check_array(const char* call, const char* what, const kvx_array_t& a, bool needs_data) {
  KVX_NEED(a.ndim <= KVX_MAX_TENSOR_DIMS, "%s %s has %u dimensions; at most %d.", call, what, a.ndim,
           KVX_MAX_TENSOR_DIMS);
  const int bits = dtype_bits(a.dtype);
  KVX_NEED(bits > 0, "%s %s has dtype %d, which does not exist.", call, what, a.dtype);
  int64_t last = 0, count = 1;  // element offset of the last element; elements, axes of none left out
  bool empty = false;
  for (uint32_t i = 0; i < a.ndim; i++) {
    KVX_NEED(a.shape[i] >= 0 && a.shape[i] <= kMaxElements, "%s %s shape[%u] is %lld; it must be 0 to 2^55.", call,
             what, i, (long long)a.shape[i]);
    KVX_NEED(a.stride[i] >= 0 && a.stride[i] <= kMaxElements, "%s %s stride[%u] is %lld; it must be 0 to 2^55.", call,
             what, i, (long long)a.stride[i]);
    if (a.shape[i] == 0) empty = true;
    // Of an array without elements too: whoever multiplies two of its axes may.
    else
      KVX_NEED(mul_fits(count, a.shape[i], &count) && count <= kMaxElements, "%s %s has more than 2^55 elements.", call,
               what);
  }
  if (empty) return KVX_STATUS_OK;
  for (uint32_t i = 0; i < a.ndim; i++) {
    int64_t reach;
    KVX_NEED(mul_fits(a.shape[i] - 1, a.stride[i], &reach) && reach <= kMaxElements && last <= kMaxElements - reach,
             "%s %s shape[%u] %lld x stride %lld overflows.", call, what, i, (long long)a.shape[i],
             (long long)a.stride[i]);
    last += reach;
  }
  if (!needs_data && a.data == nullptr) return KVX_STATUS_OK;
  KVX_NEED(a.data != nullptr, "%s %s has no data pointer.", call, what);
  const int align = bits >= 8 ? bits / 8 : 1;
  KVX_NEED(reinterpret_cast<uintptr_t>(a.data) % align == 0,
           "%s %s data is at %p, not aligned to its %d-byte elements.", call, what, a.data, align);
  const uint64_t need = (uint64_t(last + 1) * bits + 7) / 8;
  KVX_NEED(a.data_bytes == 0 || need <= a.data_bytes, "%s %s shape and strides reach byte %llu; the buffer has %llu.",
           call, what, (unsigned long long)need, (unsigned long long)a.data_bytes);
  KVX_NEED(need <= UINTPTR_MAX - reinterpret_cast<uintptr_t>(a.data),
           "%s %s data is at %p; %llu bytes from there are past the last address.", call, what, a.data,
           (unsigned long long)need);
  return KVX_STATUS_OK;
}

kvx_status_t check_repeats(const char* call, const char* what, const kvx_array_t& a) {
  constexpr int64_t kFreely = int64_t(1) << 26, kTimes = 1024;
  int64_t count = 1, span = 1;
  for (uint32_t i = 0; i < a.ndim; i++)
    if (a.shape[i] == 0) return KVX_STATUS_OK;
  for (uint32_t i = 0; i < a.ndim; i++) count *= a.shape[i], span += (a.shape[i] - 1) * a.stride[i];
  KVX_NEED(count <= kFreely || count / kTimes <= span,
           "%s %s has %lld elements in memory of %lld: strides that repeat elements may make 2^26 of them, or 1,024 "
           "times what there is. Call .contiguous().",
           call, what, (long long)count, (long long)span);
  return KVX_STATUS_OK;
}

namespace {

struct Range {
  uintptr_t begin, end;
};

Range range_of(const kvx_array_t& a, int64_t more) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(a.data);
  if (begin == 0 || a.ndim > KVX_MAX_TENSOR_DIMS) return Range{0, 0};
  uint64_t last = 0;  // unsigned: an array that is absent may say anything
  for (uint32_t i = 0; i < a.ndim; i++) {
    if (a.shape[i] == 0) return Range{0, 0};
    last += uint64_t(a.shape[i] - 1) * uint64_t(a.stride[i]);
  }
  return Range{begin, begin + uintptr_t((last + 1) * uint64_t(dtype_bits(a.dtype)) + 7) / 8 + uintptr_t(more)};
}

}  // namespace

kvx_status_t check_apart(std::initializer_list<Written> written, std::initializer_list<Indices> indices) {
  for (const Written& w : written) {
    const Range a = range_of(w.array, w.more);
    for (const Indices& i : indices) {
      const Range b = range_of(i.array, 0);
      KVX_NEED(a.end <= b.begin || b.end <= a.begin,
               "%s and %s share memory; what a call finds its way by must not be written by it.", i.name, w.name);
    }
  }
  return KVX_STATUS_OK;
}

kvx_status_t check_apart_from_cache(const kvx_cache_t& c, std::initializer_list<Indices> indices) {
  // Of the last row, what stands behind its elements. Exact: behind the cache is somebody
  // else's memory, perhaps these indices.
  const auto inline_bytes = [](const kvx_plane_t& p, int64_t head_dim) -> int64_t {
    if (!(p.flags & KVX_PLANE_FLAG_SCALE_INLINE)) return 0;
    const int64_t groups =
        p.granularity == KVX_SCALE_GRANULARITY_PER_GROUP && p.group_size ? head_dim / int64_t(p.group_size) : 1;
    const int64_t end = p.scale_offset + groups * dtype_bits(p.scale_dtype) / 8,
                  elements = head_dim * dtype_bits(p.data.dtype) / 8;
    return end > elements ? end - elements : 0;
  };
  return check_apart({{"the K cache", c.k.data, inline_bytes(c.k, c.k_head_dim)},
                      {"the V cache", c.v.data, inline_bytes(c.v, c.v_head_dim)},
                      {"k_scale", c.k.scale},
                      {"v_scale", c.v.scale}},
                     indices);
}

bool overlaps_itself(const kvx_array_t& a) { return overlaps_itself(a.shape, a.stride, int(a.ndim)); }

bool overlaps_itself(const int64_t* all_shape, const int64_t* all_stride, int ndim) {
  int64_t shape[kMaxOverlapDims], stride[kMaxOverlapDims];  // by stride, without dimensions of one
  int n = 0;
  for (int i = 0; i < ndim; i++) {
    if (all_shape[i] == 0) return false;
    if (all_shape[i] == 1) continue;
    int j = n++;
    for (; j > 0 && stride[j - 1] > all_stride[i]; j--) shape[j] = shape[j - 1], stride[j] = stride[j - 1];
    shape[j] = all_shape[i], stride[j] = all_stride[i];
  }
  int64_t reach = 0;  // last element of the dimensions inside
  for (int i = 0; i < n; i++) {
    if (stride[i] <= reach) return true;
    reach += stride[i] * (shape[i] - 1);
  }
  return false;
}

namespace {

bool is_index(int dtype) { return dtype == KVX_DTYPE_S32 || dtype == KVX_DTYPE_S64; }
int index_bytes(int dtype) { return dtype == KVX_DTYPE_S64 ? 8 : 4; }

kvx_status_t check_index_vector(const char* what, const kvx_array_t& a, int64_t count) {
  KVX_NEED(a.data != nullptr, "%s is missing.", what);
  KVX_NEED(is_index(a.dtype), "%s is %s; it must be int32 or int64.", what, dtype_name(a.dtype));
  KVX_NEED(a.ndim == 1 && a.shape[0] == count && (a.stride[0] == 1 || count == 1),
           "%s must be a dense [%lld]; it is [%lld] with %u dimensions.", what, (long long)count, (long long)a.shape[0],
           a.ndim);
  return check_array("gather", what, a, true);
}

}  // namespace

kvx_status_t lower_table(const kvx_cache_t& c, const kvx_table_t& t, GatherParams* out) {
  TableParams& p = out->table;
  const kvx_array_t& ids = t.indices;
  KVX_NEED(t.struct_bytes >= sizeof(kvx_table_t), "table.struct_bytes is %u; this version has %zu.", t.struct_bytes,
           sizeof(kvx_table_t));
  KVX_NEED(is_index(ids.dtype), "block_table is %s; it must be int32 or int64.", dtype_name(ids.dtype));
  p.format = t.format;
  p.beam_width = 1;
  p.indices = ids.data;
  p.index_bytes = index_bytes(ids.dtype);
  const bool offsets = t.format == KVX_BLOCK_TABLE_KV_OFFSETS;
  KVX_NEED(offsets || (t.beam_width >= 0 && t.beam_width <= 1),
           "beam_width is %lld; only KV_OFFSETS tables have beams.", (long long)t.beam_width);
  KVX_NEED(offsets || (c.pool_primary == nullptr),
           "the cache has a pool, which belongs to KV_OFFSETS tables; this one has format %d.", t.format);
  const bool csr = t.format == KVX_BLOCK_TABLE_PAGE_CSR, ragged = t.format == KVX_BLOCK_TABLE_RAGGED;
  KVX_NEED(csr || t.last_page_len.data == nullptr, "last_page_len belongs to page-CSR tables; this one has format %d.",
           t.format);
  KVX_NEED(csr || ragged || t.indptr.data == nullptr,
           "indptr belongs to ragged and page-CSR tables; this one has format %d.", t.format);
  int64_t count = 1, tokens = 0;
  KVX_NEED(ids.ndim <= KVX_MAX_TENSOR_DIMS, "block_table has %u dimensions; at most %d.", ids.ndim,
           KVX_MAX_TENSOR_DIMS);
  for (uint32_t i = 0; i < ids.ndim; i++)
    KVX_NEED(ids.shape[i] >= 0 && mul_fits(count, ids.shape[i], &count), "block_table shape overflows.");
  KVX_TRY(check_array("gather", "block_table", ids, count > 0));
  // Each entry is some work: one that stands there many times would be work without end. Sequences may share a row.
  KVX_NEED(
      ids.ndim == 0 || ids.shape[ids.ndim - 1] <= 1 || ids.stride[ids.ndim - 1] > 0,
      "block_table has %lld entries of stride 0 in a row; the entries of a row must not be one. Call .contiguous().",
      (long long)ids.shape[ids.ndim - 1]);
  switch (t.format) {
    case KVX_BLOCK_TABLE_PACKED:
      KVX_NEED(ids.ndim == 2, "block_table has %u dimensions; PACKED is [seq_count, max_blocks_per_seq].", ids.ndim);
      p.num_seqs = ids.shape[0];
      p.max_blocks = ids.shape[1];
      p.row_stride = ids.stride[0] * p.index_bytes;
      p.index_stride = ids.stride[1] * p.index_bytes;
      break;
    case KVX_BLOCK_TABLE_RAGGED:
    case KVX_BLOCK_TABLE_PAGE_CSR:
      KVX_NEED(ids.ndim == 1, "block_table indices have %u dimensions; RAGGED and PAGE_CSR have one.", ids.ndim);
      KVX_NEED(t.indptr.ndim == 1 && t.indptr.shape[0] >= 1, "indptr must be [seq_count + 1].");
      p.num_seqs = t.indptr.shape[0] - 1;
      KVX_TRY(check_index_vector("indptr", t.indptr, t.indptr.shape[0]));
      p.indptr = t.indptr.data;
      p.indptr_bytes = index_bytes(t.indptr.dtype);
      p.num_indices = ids.shape[0];
      KVX_NEED(!csr || mul_fits(p.num_indices, c.block_size, &tokens),
               "block_table has %lld pages of %lld tokens, more than can be counted.", (long long)p.num_indices,
               (long long)c.block_size);
      p.index_stride = ids.stride[0] * p.index_bytes;
      break;
    case KVX_BLOCK_TABLE_KV_OFFSETS: {
      KVX_NEED(ids.dtype == KVX_DTYPE_S32, "KV_OFFSETS indices are %s; they must be int32.", dtype_name(ids.dtype));
      const int64_t w = t.beam_width;
      KVX_NEED(w >= 1 && w < (1 << 20), "beam_width is %lld; KV_OFFSETS needs 1 or more.", (long long)w);
      KVX_NEED((c.block_size & (c.block_size - 1)) == 0, "block_size is %lld; KV_OFFSETS needs a power of two.",
               (long long)c.block_size);
      KVX_NEED(c.pool_primary != nullptr && c.bytes_per_block != 0,
               "KV_OFFSETS needs pool_primary and bytes_per_block.");
      const int n = int(ids.ndim);
      KVX_NEED(
          (n == 4 && ids.shape[1] == w && ids.shape[2] == 2) || (n == 3 && ids.shape[0] % w == 0 && ids.shape[1] == 2),
          "KV_OFFSETS indices must be [seq_count, %lld, 2, max_blocks_per_seq] or [seq_count * %lld, 2, "
          "max_blocks_per_seq].",
          (long long)w, (long long)w);
      KVX_NEED(n == 3 || ids.shape[0] <= 1 || w == 1 || ids.stride[0] == mul_most(w, ids.stride[1]),
               "KV_OFFSETS beams must be evenly spaced.");
      p.num_seqs = n == 4 ? ids.shape[0] : ids.shape[0] / w;
      p.beam_width = int32_t(w);
      p.max_blocks = ids.shape[n - 1];
      p.row_stride = (n == 4 && w == 1 ? ids.stride[0] : ids.stride[n - 3]) * 4;
      p.kv_stride = ids.stride[n - 2] * 4;
      p.index_stride = ids.stride[n - 1] * 4;
      out->pool[0] = static_cast<char*>(c.pool_primary);
      out->pool[1] = static_cast<char*>(c.pool_secondary);
      out->pool_stride = int64_t(c.bytes_per_block);
      KVX_NEED(c.bytes_per_block < (uint64_t(1) << 40), "bytes_per_block is %llu.",
               (unsigned long long)c.bytes_per_block);
      KVX_NEED(c.secondary_blocks >= 0, "secondary_blocks is %lld.", (long long)c.secondary_blocks);
      out->pool_blocks[0] = c.num_blocks;
      out->pool_blocks[1] = c.pool_secondary ? (c.secondary_blocks ? c.secondary_blocks : c.num_blocks) : 0;
      const uint64_t sizes[2] = {c.primary_bytes, c.secondary_bytes};
      for (int i = 0; i < 2; i++) {
        const PlaneParams& plane = out->plane[i];
        const int64_t row =
            plane.dim_hi * (plane.head_dim / plane.pack - 1) +
            (dtype_bits(plane.dtype) == 4 ? plane.pack / 2
                                          : (plane.pack - 1) * plane.dim_lo + dtype_bits(plane.dtype) / 8);
        const int64_t block = plane.token * (c.block_size - 1) + plane.head * (c.num_kv_heads - 1) + row;
        KVX_NEED(block <= out->pool_stride, "one block of %s has %lld bytes; bytes_per_block is %lld.", i ? "V" : "K",
                 (long long)block, (long long)out->pool_stride);
        const int size = dtype_bits(plane.dtype) >= 8 ? dtype_bits(plane.dtype) / 8 : 1;
        KVX_NEED(
            out->pool_stride % size == 0 && uintptr_t(out->pool[0]) % size == 0 && uintptr_t(out->pool[1]) % size == 0,
            "a pool or bytes_per_block is not aligned to the %d-byte elements.", size);
        KVX_NEED(plane.scale.mode <= SCALE_READ && plane.scale.block == 0,
                 "KV_OFFSETS reads per-tensor and per-head scales only.");
        int64_t bytes;
        KVX_NEED(
            mul_fits(out->pool_blocks[i], out->pool_stride, &bytes) && (sizes[i] == 0 || uint64_t(bytes) <= sizes[i]),
            "%lld blocks of %lld bytes do not fit the %s pool of %llu bytes.", (long long)out->pool_blocks[i],
            (long long)out->pool_stride, i ? "secondary" : "primary", (unsigned long long)sizes[i]);
      }
      break;
    }
    default:
      return fail(KVX_STATUS_INVALID_ARGUMENT,
                  "block_table format is %d; PACKED 1, RAGGED 2, KV_OFFSETS 3 and PAGE_CSR 4 exist.", t.format);
  }
  KVX_NEED(p.num_seqs < (int64_t(1) << 31) / p.beam_width, "%lld sequences is more than 2^31.", (long long)p.num_seqs);
  if (csr) {
    KVX_NEED(t.seq_lens.data == nullptr, "page-CSR lengths follow from indptr and last_page_len; leave seq_lens out.");
    if (p.num_seqs > 0) KVX_TRY(check_index_vector("last_page_len", t.last_page_len, p.num_seqs));
    p.last_page_len = t.last_page_len.data;
    p.last_bytes = index_bytes(t.last_page_len.dtype);
  } else {
    KVX_NEED(is_index(t.seq_lens.dtype), "seq_lens is %s; it must be int32 or int64.", dtype_name(t.seq_lens.dtype));
    KVX_NEED(t.seq_lens.ndim == 1 && t.seq_lens.shape[0] == p.num_seqs,
             "seq_lens has %lld sequences; the table has %lld.",
             (long long)(t.seq_lens.ndim == 1 ? t.seq_lens.shape[0] : -1), (long long)p.num_seqs);
    if (p.num_seqs > 0) KVX_TRY(check_index_vector("seq_lens", t.seq_lens, p.num_seqs));
    p.seq_lens = t.seq_lens.data;
    p.len_bytes = index_bytes(t.seq_lens.dtype);
  }
  return KVX_STATUS_OK;
}

}  // namespace kvx
