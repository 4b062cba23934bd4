// gather on the host: lengths and block ids are checked first, then one task per (sequence, block).
#include <string.h>

#include "../run.h"
#include "../table.h"
#include "row.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadBytes = 128 << 10;
constexpr int64_t kStreamBytes = 16 << 20;  // larger outputs go past the caches

int64_t output_bytes(const GatherParams& p) {
  return p.num_rows * p.num_heads * (p.plane[0].head_dim * element_bytes(p.rows[0].dtype) + p.plane[1].head_dim * element_bytes(p.rows[1].dtype));
}

inline void copy_bytes(const RowTable& ops, bool stream, char* dst, const char* src, int64_t bytes) {
  if (stream) ops.stream_copy(dst, src, bytes);
  else ops.copy(dst, src, bytes);
}

kvx_status_t check_tables(const GatherParams& p) {
  const int64_t seqs = p.table.num_seqs * p.table.beam_width;
  for (int64_t s = 0; s < seqs; s++) {
    const RowRange out = output_rows(p, s);
    if (out.count < 0)
      return fail(KVX_STATUS_OUT_OF_RANGE, "cu_seqlens[%lld..%lld] is not a range of at most max_seq_len %lld rows inside the %lld of the output.", (long long)s,
                  (long long)s + 1, (long long)p.max_seq_len, (long long)p.num_rows);
    const int64_t length = sequence_length(p.table, s, p.block_size);
    if (length < 0) return fail(KVX_STATUS_OUT_OF_RANGE, "sequence %lld has a negative or impossible length.", (long long)s);
    const int64_t rows = least(length, out.count);
    const int64_t step = p.table.format == KVX_BLOCK_TABLE_RAGGED ? 1 : p.block_size;
    for (int64_t pos = 0; pos < rows; pos += step)
      for (int plane = 0; plane < (p.table.format == KVX_BLOCK_TABLE_KV_OFFSETS ? 2 : 1); plane++)
        if (find_block(p, s, pos, pos / p.block_size, plane).state == BLOCK_BAD)
          return fail(KVX_STATUS_OUT_OF_RANGE,
                      "block_table of sequence %lld has no block inside the cache (num_blocks %lld) for position %lld of %lld. Nothing was gathered.",
                      (long long)s, (long long)p.num_blocks, (long long)pos, (long long)length);
  }
  return KVX_STATUS_OK;
}

// Positions [pos, end) of one sequence out of one block.
void gather_run(const RowTable& ops, const GatherParams& p, int i, int64_t seq, RowRange out, int64_t pos, int64_t end, const BlockPlace& place, bool stream) {
  const PlaneParams& c = p.plane[i];
  const RowsParams& r = p.rows[i];
  const int64_t offset = pos % p.block_size, run = end - pos;
  char* dst = output_row(p, i, seq, out, pos);
  if (place.state != BLOCK_FOUND) {
    for (int64_t t = 0; t < run; t++)
      for (int64_t h = 0; h < p.num_heads; h++) zero_row(r, dst + t * r.token + h * r.head, c.head_dim);
    return;
  }
  char* src = place.base + offset * c.token;
  const bool copy = c.dtype == r.dtype && c.is_dense && r.is_dense;
  int64_t row = span_bytes(c.dtype, c.head_dim), heads = p.num_heads;
  if (copy && (heads == 1 || (c.head == row && r.head == row))) row *= heads, heads = 1;
  if (copy && heads == 1 && c.token == row && r.token == row) {
    copy_bytes(ops, stream, dst, src, row * run);
    return;
  }
  // In the order of the block: it is then read once, front to back, and the scattered side is the buffered stores.
  const bool by_head = c.head > c.token;
  const int64_t outer = by_head ? heads : run, inner = by_head ? run : heads;
  for (int64_t a = 0; a < outer; a++)
    for (int64_t b = 0; b < inner; b++) {
      const int64_t h = by_head ? a : b, t = by_head ? b : a;
      char *to = dst + t * r.token + h * r.head, *from = src + t * c.token + h * c.head;
      if (copy) copy_bytes(ops, stream, to, from, row);
      else gather_row(ops, c, r, to, from, ScaleAt{place.id, offset + t, h, 0});
    }
}

void gather_block(const RowTable& ops, const GatherParams& p, int64_t seq, int64_t logical, bool stream) {
  const RowRange out = output_rows(p, seq);
  const int64_t begin = logical * p.block_size, end = least(begin + p.block_size, out.count);
  const int64_t valid = least(sequence_length(p.table, seq, p.block_size), end);
  const bool ragged = p.table.format == KVX_BLOCK_TABLE_RAGGED;
  for (int i = 0; i < 2; i++) {
    int64_t pos = begin;
    for (; pos < valid; pos = ragged ? pos + 1 : valid)  // ragged tables name a block for every token
      gather_run(ops, p, i, seq, out, pos, ragged ? pos + 1 : valid, find_block(p, seq, pos, logical, i), stream);
    if (pos < end) gather_run(ops, p, i, seq, out, pos, end, BlockPlace{nullptr, 0, BLOCK_NONE}, stream);
  }
}

}  // namespace

kvx_status_t gather(const GatherParams& p) {
  KVX_TRY(check_tables(p));
  const RowTable& ops = best_rows();
  const int64_t seqs = p.table.num_seqs * p.table.beam_width, blocks = (p.max_seq_len + p.block_size - 1) / p.block_size;
  const int64_t tasks = seqs * blocks;
  const int64_t bytes = output_bytes(p);
  const bool stream = bytes >= kStreamBytes;
#pragma omp parallel if (bytes >= kThreadBytes)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tasks; i++) gather_block(ops, p, i / blocks, i % blocks, stream);
    if (stream) ops.stream_fence();
  }
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
