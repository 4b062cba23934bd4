// Block tables: from (sequence, position) to a block, for host and device. Four encodings, one answer.
#pragma once
#include "format.h"
#include "params.h"

namespace kvx {
namespace KVX_ISA_NAMESPACE {

KVX_HD int64_t read_index(const void* base, int64_t byte_offset, int bytes) {
  const char* p = (const char*)base + byte_offset;
  return bytes == 8 ? *(const int64_t*)p : (int64_t)*(const int32_t*)p;
}

enum BlockState { BLOCK_FOUND, BLOCK_NONE, BLOCK_BAD };  // none: KV_OFFSETS -1, rows come out as zero and are no error

struct BlockPlace {
  char* base;  // first byte of the block in plane K or V
  int64_t id;  // block id, for scales with a block axis
  int state;   // BlockState
};

// Tokens of output sequence `seq` (beams share their sequence's length). Page-CSR lengths follow from the pages.
KVX_HD int64_t sequence_length(const TableParams& t, int64_t seq, int64_t block_size) {
  int64_t s = (int64_t)((uint32_t)seq / (uint32_t)t.beam_width);  // fewer than 2^31 sequences: array.cpp
  if (t.seq_lens) return read_index(t.seq_lens, s * t.len_bytes, t.len_bytes);
  int64_t first = read_index(t.indptr, s * t.indptr_bytes, t.indptr_bytes);
  int64_t end = read_index(t.indptr, (s + 1) * t.indptr_bytes, t.indptr_bytes);
  if (first == end) return 0;
  int64_t last = read_index(t.last_page_len, s * t.last_bytes, t.last_bytes);
  // Between pages that there are: differences and products then cannot wrap (array.cpp).
  if (first < 0 || end < first || end > t.num_indices || last < 1 || last > block_size) return -1;
  return (end - first - 1) * block_size + last;
}

// The block that holds position `pos` (logical block `pos / block_size` = logical) of output sequence `seq`, in plane 0
// (K) or 1 (V).
KVX_HD BlockPlace find_block(const GatherParams& p, int64_t seq, int64_t pos, int64_t logical, int plane) {
  const TableParams& t = p.table;
  BlockPlace place = {nullptr, 0, BLOCK_BAD};
  int64_t id;
  if (t.format == KVX_BLOCK_TABLE_PACKED) {
    if (logical >= t.max_blocks) return place;
    id = read_index(t.indices, seq * t.row_stride + logical * t.index_stride, t.index_bytes);
  } else if (t.format == KVX_BLOCK_TABLE_KV_OFFSETS) {
    if (logical >= t.max_blocks) return place;
    int64_t value = read_index(t.indices, seq * t.row_stride + plane * t.kv_stride + logical * t.index_stride, 4);
    if (value == -1) {
      place.state = BLOCK_NONE;
      return place;
    }
    int secondary = value < 0;
    id = value & 0x7fffffff;
    if (id >= p.pool_blocks[secondary]) return place;
    place.base = p.pool[secondary] + id * p.pool_stride;
    place.id = id;
    place.state = BLOCK_FOUND;
    return place;
  } else {
    int64_t step = t.format == KVX_BLOCK_TABLE_RAGGED ? pos : logical;  // one entry per token, or per page
    int64_t first = read_index(t.indptr, seq * t.indptr_bytes, t.indptr_bytes);
    int64_t end = read_index(t.indptr, (seq + 1) * t.indptr_bytes, t.indptr_bytes);
    // Compared by subtraction: first + step would wrap for an indptr near 2^63.
    const int64_t limit = end < t.num_indices ? end : t.num_indices;
    if (first < 0 || first >= limit || step >= limit - first) return place;
    id = read_index(t.indices, (first + step) * t.index_stride, t.index_bytes);
  }
  if (id < 0 || id >= p.num_blocks) return place;
  place.base = p.plane[plane].data + id * p.plane[plane].block;
  place.id = id;
  place.state = BLOCK_FOUND;
  return place;
}

// find_block, where blocks may be buffers of their own. Gather has no such blocks, and no
// register to spare for the question.
KVX_HD BlockPlace find_any_block(const GatherParams& p, int64_t seq, int64_t pos, int64_t logical, int plane) {
  BlockPlace place = find_block(p, seq, pos, logical, plane);
  if (p.bases[plane] && place.state == BLOCK_FOUND) {
    place.base = (char*)(uintptr_t)p.bases[plane][place.id];
    if (!place.base) place.state = BLOCK_BAD;
  }
  return place;
}

// Rows of output sequence `seq`: first output row and how many. Padded output has max_seq_len each.
struct RowRange {
  int64_t first, count;
};

KVX_HD RowRange output_rows(const GatherParams& p, int64_t seq) {
  if (!p.cu_seqlens) return RowRange{seq * p.max_seq_len, p.max_seq_len};
  int64_t first = read_index(p.cu_seqlens, seq * p.cu_bytes, p.cu_bytes);
  int64_t end = read_index(p.cu_seqlens, (seq + 1) * p.cu_bytes, p.cu_bytes);
  // In this order: a difference of two numbers of any size would wrap.
  if (first < 0 || end < first || end > p.num_rows || end - first > p.max_seq_len) return RowRange{0, -1};
  return RowRange{first, end - first};
}

KVX_HD char* output_row(const GatherParams& p, int plane, int64_t seq, RowRange range, int64_t pos) {
  const RowsParams& r = p.rows[plane];
  return p.cu_seqlens ? r.data + (range.first + pos) * r.token : r.data + seq * p.seq_rows[plane] + pos * r.token;
}

}  // namespace KVX_ISA_NAMESPACE
}  // namespace kvx
