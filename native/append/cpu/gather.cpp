// gather on the host: lengths and block ids are checked first, then one task per sequence and span of its blocks.
#include <string.h>

#include "cpu/pending.h"
#include "cpu/row.h"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cpu {

namespace {

constexpr int64_t kThreadBytes = 128 << 10;
constexpr int64_t kStreamBytes = 16 << 20;  // larger outputs go past the caches
constexpr int64_t kSpan = 32;               // blocks a task takes

int64_t output_bytes(const GatherParams& p) {
  return p.num_rows * p.num_heads *
         (p.plane[0].head_dim * element_bytes(p.rows[0].dtype) + p.plane[1].head_dim * element_bytes(p.rows[1].dtype));
}

kvx_status_t check_tables(const GatherParams& p) {
  const int64_t seqs = p.table.num_seqs * p.table.beam_width;
  for (int64_t s = 0; s < seqs; s++) {
    const RowRange out = output_rows(p, s);
    if (out.count < 0)
      return fail(
          KVX_STATUS_OUT_OF_RANGE,
          "cu_seqlens[%lld..%lld] is not a range of at most max_seq_len %lld rows inside the %lld of the output.",
          (long long)s, (long long)s + 1, (long long)p.max_seq_len, (long long)p.num_rows);
    const int64_t length = sequence_length(p.table, s, p.block_size);
    if (length < 0)
      return fail(KVX_STATUS_OUT_OF_RANGE, "sequence %lld has a negative or impossible length.", (long long)s);
    const int64_t rows = least(length, out.count);
    const int64_t step = p.table.format == KVX_BLOCK_TABLE_RAGGED ? 1 : p.block_size;
    for (int64_t pos = 0; pos < rows; pos += step)
      for (int plane = 0; plane < (p.table.format == KVX_BLOCK_TABLE_KV_OFFSETS ? 2 : 1); plane++)
        if (find_block(p, s, pos, pos / p.block_size, plane).state == BLOCK_BAD)
          return fail(KVX_STATUS_OUT_OF_RANGE,
                      "block_table of sequence %lld has no block inside the cache (num_blocks %lld) for position %lld "
                      "of %lld. Nothing was gathered.",
                      (long long)s, (long long)p.num_blocks, (long long)pos, (long long)length);
  }
  return KVX_STATUS_OK;
}

// Positions [pos, end) of one sequence out of one block, row by row.
void gather_rows(const RowTable& ops, const GatherParams& p, int i, char* dst, int64_t pos, int64_t end,
                 const BlockPlace& place) {
  const PlaneParams& c = p.plane[i];
  const RowsParams& r = p.rows[i];
  const int64_t offset = pos % p.block_size, run = end - pos;
  const bool by_head = c.head > c.token;  // in the order of the block, so that it is read front to back
  const int64_t outer = by_head ? p.num_heads : run, inner = by_head ? run : p.num_heads;
  for (int64_t a = 0; a < outer; a++)
    for (int64_t b = 0; b < inner; b++) {
      const int64_t h = by_head ? a : b, t = by_head ? b : a;
      char* row = dst + t * r.token + h * r.head;
      if (place.state == BLOCK_FOUND)
        gather_row(ops, c, r, row, place.base + (offset + t) * c.token + h * c.head,
                   ScaleAt{place.id, offset + t, h, 0});
      else zero_row(r, row, c.head_dim);
    }
}

// The rows of `run` tokens, where they move as they are.
CopyGrid make_grid(const PlaneParams& c, const RowsParams& r, int64_t heads, int64_t run) {
  const int64_t row = span_bytes(c.dtype, c.head_dim), token = row * heads;
  const bool whole_tokens = heads == 1 || (c.head == row && r.head == row);
  if (whole_tokens && c.token == token && r.token == token) return CopyGrid{token * run, 1, 1, 0, 0, 0, 0};
  if (whole_tokens) return CopyGrid{token, run, 1, r.token, 0, c.token, 0};
  if (c.head > c.token) return CopyGrid{row, heads, run, r.head, r.token, c.head, c.token};
  return CopyGrid{row, run, heads, r.token, r.head, c.token, c.head};
}

// Logical blocks [first, last) of one sequence.
void gather_blocks(const RowTable& ops, const GatherParams& p, int64_t seq, int64_t first, int64_t last, bool stream) {
  const RowRange out = output_rows(p, seq);
  const int64_t length = least(sequence_length(p.table, seq, p.block_size), out.count);
  const bool ragged = p.table.format == KVX_BLOCK_TABLE_RAGGED;  // names a block for every token
  bool copies[2];
  CopyGrid whole[2];
  for (int i = 0; i < 2; i++) {
    const PlaneParams& c = p.plane[i];
    copies[i] = c.dtype == p.rows[i].dtype && c.is_dense && p.rows[i].is_dense;
    whole[i] = make_grid(c, p.rows[i], p.num_heads, p.block_size);
  }
  // K and V of a block together where one list serves both: side by side in memory, they
  // are then read while still cached.
  Pending pending[2] = {{ops, stream}, {ops, stream}};
  Pending* lists[2] = {&pending[0], &pending[whole[0] == whole[1] ? 0 : 1]};
  for (int64_t block = first; block < last; block++) {
    const int64_t begin = block * p.block_size, end = least(begin + p.block_size, out.count),
                  valid = least(length, end);
    for (int i = 0; i < 2; i++) {
      int64_t pos = begin;
      while (pos < valid) {
        const int64_t next = ragged ? pos + 1 : valid, offset = pos - begin;
        const BlockPlace place = find_block(p, seq, pos, block, i);
        char* dst = output_row(p, i, seq, out, pos);
        if (!copies[i] || place.state != BLOCK_FOUND) gather_rows(ops, p, i, dst, pos, next, place);
        else if (next - pos == p.block_size) lists[i]->add(whole[i], dst, place.base);
        else
          lists[i]->add(make_grid(p.plane[i], p.rows[i], p.num_heads, next - pos), dst,
                        place.base + offset * p.plane[i].token);
        pos = next;
      }
      if (pos < end)
        gather_rows(ops, p, i, output_row(p, i, seq, out, pos), pos, end, BlockPlace{nullptr, 0, BLOCK_NONE});
    }
  }
}

}  // namespace

kvx_status_t gather(const GatherParams& p) {
  KVX_TRY(check_tables(p));
  const RowTable& ops = best_rows();
  const int64_t seqs = p.table.num_seqs * p.table.beam_width,
                blocks = (p.max_seq_len + p.block_size - 1) / p.block_size;
  const int64_t least_tasks = 8 * max_threads();
  const int64_t span = greatest(1, least(kSpan, seqs * blocks / least_tasks)), spans = (blocks + span - 1) / span;
  const int64_t bytes = output_bytes(p);
  const bool stream = bytes >= kStreamBytes;
#pragma omp parallel if (bytes >= kThreadBytes)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < seqs * spans; i++)
      gather_blocks(ops, p, i / spans, i % spans * span, least(blocks, (i % spans + 1) * span), stream);
    if (stream) ops.stream_fence();
  }
  return KVX_STATUS_OK;
}

}  // namespace cpu
}  // namespace kvx
