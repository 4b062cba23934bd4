// What write, gather and copy_blocks must have done, found a second time from descriptors: one element after the other,
// and nothing else of an output changed. For caches and rows of one float type, where bytes move as they are.
#pragma once
#include "scene.h"

namespace fuzz {

inline int64_t index_at(const kvx_array_t& a, int64_t i, int64_t j = 0) {
  const int bytes = bits_of(a.dtype) / 8;
  const char* p = static_cast<const char*>(a.data) + (i * a.stride[0] + (a.ndim > 1 ? j * a.stride[1] : 0)) * bytes;
  int64_t wide = 0;
  int32_t narrow = 0;
  if (bytes == 8) return memcpy(&wide, p, 8), wide;
  return memcpy(&narrow, p, 4), narrow;
}

// Byte of element (block, token, head, d) of a plane.
inline int64_t cell_byte(const kvx_plane_t& plane, int64_t block, int64_t token, int64_t head, int64_t d) {
  const kvx_array_t& a = plane.data;
  const int64_t* s = a.stride;
  const int size = bits_of(a.dtype) / 8;
  if (a.ndim == 5)
    return (block * s[0] + head * s[1] + d / a.shape[4] * s[2] + token * s[3] + d % a.shape[4] * s[4]) * size;
  if (plane.layout == KVX_LAYOUT_BLOCK_HND) return (block * s[0] + head * s[1] + token * s[2] + d * s[3]) * size;
  return (block * s[0] + token * s[1] + head * s[2] + d * s[3]) * size;
}

inline bool is_plain(const kvx_cache_t& c, const kvx_array_t& k, const kvx_array_t& v) {
  const int t = c.k.data.dtype;
  return (t == KVX_DTYPE_F32 || t == KVX_DTYPE_F16 || t == KVX_DTYPE_BF16) && c.v.data.dtype == t && k.dtype == t &&
         v.dtype == t;
}

// A copy of every output as it was before the call; elements are put into it, and in the end all must be equal.
class Expected {
 public:
  explicit Expected(const Scene& scene) : scene_(scene) {
    for (const Buffer& b : scene.buffers) copies_.push_back(b.saved);
  }
  char* at(const void* data, int64_t byte) {
    const char* p = static_cast<const char*>(data) + byte;
    for (size_t i = 0; i < copies_.size(); i++)
      if (scene_.buffers[i].contains(p)) return copies_[i].data() + (p - scene_.buffers[i].data);
    return nullptr;
  }
  void skip(const void* data, int64_t byte, int64_t count) {  // unspecified: as it now is
    if (char* to = at(data, byte)) memcpy(to, static_cast<const char*>(data) + byte, size_t(count));
  }
  std::string compare(const char* what) const {
    for (size_t i = 0; i < copies_.size(); i++)
      for (size_t n = 0; n < copies_[i].size(); n++)
        if (copies_[i][n] != scene_.buffers[i].data[n])
          return std::string(what) + " returned OK, and byte " + std::to_string(n) + " of " +
                 std::to_string(copies_[i].size()) + " of buffer " + std::to_string(i) + " is not what it must be";
    return "";
  }

 private:
  const Scene& scene_;
  std::vector<std::vector<char>> copies_;
};

inline std::string check_write(const Scene& scene, const kvx_cache_t& c, const kvx_write_args_t& w) {
  if (!is_plain(c, w.k, w.v)) return "";
  Expected expected(scene);
  const kvx_plane_t* planes[2] = {&c.k, &c.v};
  const kvx_array_t* rows[2] = {&w.k, &w.v};
  const int64_t tokens = w.slots.shape[0], dims[2] = {c.k_head_dim, c.v_head_dim};
  const int size = bits_of(c.k.data.dtype) / 8;
  for (int pass = 0; pass < 2; pass++)  // then slots that two tokens have
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t slot = index_at(w.slots, t);
      if (slot < 0 || slot == w.invalid_slot) continue;
      bool twice = false;
      for (int64_t u = 0; u < tokens; u++) twice |= u != t && index_at(w.slots, u) == slot;
      for (int i = 0; i < 2; i++)
        for (int64_t h = 0; h < c.num_kv_heads; h++)
          for (int64_t d = 0; d < dims[i]; d++) {
            const int64_t to = cell_byte(*planes[i], slot / c.block_size, slot % c.block_size, h, d);
            const kvx_array_t& r = *rows[i];
            const char* from =
                static_cast<const char*>(r.data) + (t * r.stride[0] + h * r.stride[1] + d * r.stride[2]) * size;
            if (pass == 0) memcpy(expected.at(planes[i]->data.data, to), from, size_t(size));
            else if (twice) expected.skip(planes[i]->data.data, to, size);
          }
    }
  return expected.compare("write");
}

// Where position `pos` of output sequence `seq` lies in plane i: NULL = there is none, and its rows are zero.
inline const char* find_cell(const kvx_cache_t& c, const kvx_table_t& t, int64_t seq, int64_t pos, int i, int64_t head,
                             int64_t d) {
  const kvx_plane_t& plane = i ? c.v : c.k;
  const int64_t logical = pos / c.block_size;
  int64_t id;
  if (t.format == KVX_BLOCK_TABLE_KV_OFFSETS) {
    const kvx_array_t& a = t.indices;
    const int64_t w = t.beam_width;
    const int64_t at = a.ndim == 4
                           ? seq / w * a.stride[0] + seq % w * a.stride[1] + i * a.stride[2] + logical * a.stride[3]
                           : seq * a.stride[0] + i * a.stride[1] + logical * a.stride[2];
    int32_t value;
    memcpy(&value, static_cast<const char*>(a.data) + at * 4, 4);
    if (value == -1) return nullptr;
    const char* pool = static_cast<const char*>(value < 0 ? c.pool_secondary : c.pool_primary);
    return pool + int64_t(value & 0x7fffffff) * int64_t(c.bytes_per_block) +
           cell_byte(plane, 0, pos % c.block_size, head, d);
  }
  if (t.format == KVX_BLOCK_TABLE_PACKED) id = index_at(t.indices, seq, logical);
  else id = index_at(t.indices, index_at(t.indptr, seq) + (t.format == KVX_BLOCK_TABLE_RAGGED ? pos : logical));
  return static_cast<const char*>(plane.data.data) + cell_byte(plane, id, pos % c.block_size, head, d);
}

inline int64_t table_seqs(const kvx_table_t& t) {
  if (t.format == KVX_BLOCK_TABLE_RAGGED || t.format == KVX_BLOCK_TABLE_PAGE_CSR) return t.indptr.shape[0] - 1;
  return t.indices.shape[0] * (t.format == KVX_BLOCK_TABLE_KV_OFFSETS && t.indices.ndim == 4 ? t.beam_width : 1);
}

inline std::string check_gather(const Scene& scene, const kvx_cache_t& c, const kvx_gather_args_t& g) {
  if (!is_plain(c, g.k, g.v)) return "";
  Expected expected(scene);
  const kvx_array_t* rows[2] = {&g.k, &g.v};
  const int64_t dims[2] = {c.k_head_dim, c.v_head_dim};
  const int size = bits_of(c.k.data.dtype) / 8;
  const kvx_table_t& t = g.table;
  for (int64_t s = 0; s < table_seqs(t); s++) {
    const int64_t own = t.format == KVX_BLOCK_TABLE_KV_OFFSETS ? s / t.beam_width : s;
    int64_t length, first = s * g.max_seq_len, count = g.max_seq_len;
    if (t.format == KVX_BLOCK_TABLE_PAGE_CSR) {
      const int64_t pages = index_at(t.indptr, s + 1) - index_at(t.indptr, s);
      length = pages ? (pages - 1) * c.block_size + index_at(t.last_page_len, s) : 0;
    } else {
      length = index_at(t.seq_lens, own);
    }
    if (g.cu_seqlens.data) first = index_at(g.cu_seqlens, s), count = index_at(g.cu_seqlens, s + 1) - first;
    for (int i = 0; i < 2; i++) {
      const kvx_array_t& r = *rows[i];
      const int n = int(r.ndim);
      for (int64_t pos = 0; pos < count; pos++)
        for (int64_t h = 0; h < c.num_kv_heads; h++)
          for (int64_t d = 0; d < dims[i]; d++) {
            const int64_t row = n == 4 ? s * r.stride[0] + pos * r.stride[1] : (first + pos) * r.stride[0];
            char* to = expected.at(r.data, (row + h * r.stride[n - 2] + d * r.stride[n - 1]) * size);
            const char* from = pos < length ? find_cell(c, t, s, pos, i, h, d) : nullptr;
            if (to == nullptr) return "gather returned OK for rows that are not there";
            if (from) memcpy(to, from, size_t(size));
            else memset(to, 0, size_t(size));
          }
    }
  }
  return expected.compare("gather");
}

inline std::string check_copy(const Scene& scene, const kvx_cache_t& c, const kvx_copy_blocks_args_t& a) {
  if (!is_plain(c, c.k.data, c.v.data)) return "";
  Expected expected(scene);
  const int size = bits_of(c.k.data.dtype) / 8;
  for (int64_t n = 0; n < a.pairs.shape[0]; n++) {
    const int64_t from = index_at(a.pairs, n, 0), to = index_at(a.pairs, n, 1);
    if (from < 0 || to < 0 || from == to) continue;
    for (int i = 0; i < 2; i++) {
      const kvx_plane_t& plane = i ? c.v : c.k;
      for (int64_t t = 0; t < c.block_size; t++)
        for (int64_t h = 0; h < c.num_kv_heads; h++)
          for (int64_t d = 0; d < (i ? c.v_head_dim : c.k_head_dim); d++)
            memcpy(expected.at(plane.data.data, cell_byte(plane, to, t, h, d)),
                   expected.at(plane.data.data, cell_byte(plane, from, t, h, d)), size_t(size));
    }
  }
  return expected.compare("copy_blocks");
}

}  // namespace fuzz
