// What a launch of prefill is given, and its items: each is some query rows of one sequence and KV head against the
// keys they see. A block of threads has a run of them, so that loading, multiplying and storing go on from one to the
// next.
#pragma once
#include "attention/cuda/plan.cuh"
#include "attention/cuda/scales.cuh"
#include "tiles/block_rows.cuh"
#include "tiles/kv_rings.cuh"
#include "tiles/tensor_map.cuh"

namespace kvx {
namespace cuda {

// Which items a block of threads has. Blocks are begun in order, one a multiprocessor at first: the first wave of them
// has five eighths of all items, the next one of what is left, and the last ones have one each. So most items follow
// another, and yet all multiprocessors end together. Items of a wave are dealt out in turn: what is read at the same
// time stands together.
struct ItemWaves {
  static constexpr uint32_t kMost = 32;  // items of a block
  uint32_t num_items, width;             // width: blocks of a wave
  uint32_t full = 0, turn = 0;           // waves of kMost items a block, which come first; see item()

  struct Run {
    uint32_t first, block, count;  // of the wave: its first item, and which block of it
  };
  // Item i of a run. The blocks take turns, each time from another place: by the golden section of them, so that none
  // has all the long ones, however many rows a sequence has.
  __device__ __forceinline__ uint32_t item(const Run& run, uint32_t i) const {
    return run.first + i * width + (run.block + i * turn) % width;
  }
  __host__ __device__ __forceinline__ uint32_t of_wave(uint32_t left) const {
    const uint32_t share = uint32_t(uint64_t(left / width) * 5 / 8);
    return share < 1 ? 1 : share > kMost ? kMost : share;
  }
  __device__ __forceinline__ Run run(uint32_t block) const {
    if (block < full * width) return Run{block / width * kMost * width, block % width, kMost};
    block -= full * width;
    for (uint32_t first = full * kMost * width; first < num_items; block -= width) {
      const uint32_t each = of_wave(num_items - first);
      if (block < width) return Run{first, block, each};
      first += each * width;
    }
    return Run{0, 0, 0};
  }
  // Counts the full waves; returns how many blocks there are in all.
  int64_t share_out() {
    full = 0, turn = uint32_t(width * 0.618034);
    uint32_t first = 0;
    for (; of_wave(num_items - first) == kMost; first += kMost * width) full++;
    int64_t waves = full;
    for (; first < num_items; first += of_wave(num_items - first) * width) waves++;
    return waves * width;
  }
};

struct PrefillArgs {
  CUtensorMap maps[2], query_map;  // K, V; the copy engine wants them on multiples of 64 bytes
  int32_t box;                     // tokens of a map's box; 0 = there are no maps, rows are copied
  tiles::RowFinder rows;
  const char* data[2];
  int32_t dims[2],
      row_chunks[2];  // of K (and Q) and of V (and results); chunks of 16 bytes that a row of the cache has, begun ones
                      // too
  int32_t unit;       // bytes that rows' offsets count, and that rows are multiples of: 16; of codes 8 and 4 as well
  RowsParams q, out;
  char* lse;
  int64_t lse_token, lse_head;
  const float* sinks;
  const void* cu_seqlens;
  int32_t cu_bytes;
  int32_t num_seqs, num_kv_heads, query_len, max_seq_len, skip_rows;
  FastDivider group;
  int64_t window, num_tokens;
  float scale, soft_cap;
  int32_t is_causal;
  ScaleParams scales[2];
  int32_t type;              // of elements, where they are codes
  int32_t has_one_scale[2];  // ROW_SCALES: a plane that has one a head all the same
  int32_t scale_words[2];    // GROUP_SCALES: a row's are copied as words; else one by one
  int32_t stores_16;         // results begin on multiples of 16 bytes
  int32_t has_query_map;
  ItemWaves waves;
  int32_t has_out_map;
  CUtensorMap out_map;
};

struct PrefillItem : tiles::TileRange {
  int32_t first_row, rows, queries;  // rows: of the sequence
  int64_t first_query;
};

// A block's items, found by one warp before anything else, a lane an item; returns how many there are. Their order:
// sequence by sequence, in it head by head, in it the rows that see most first. So blocks that run at the same time
// read the same keys, and what is left at the end is short.
template <int kRows, int kKeys> __device__ __forceinline__ uint32_t find_items(const PrefillArgs& a,
                                                                               PrefillItem* items) {
  const uint32_t lane = threadIdx.x % 32;
  const ItemWaves::Run run = a.waves.run(blockIdx.x);
  const uint32_t index = a.waves.item(run, lane);
  bool is_found = false;
  uint32_t before = 0;  // items of sequences before these 32
  for (int32_t from = 0; from < a.num_seqs; from += 32) {
    const int32_t seq = from + int32_t(lane);
    uint32_t mine = 0;
    int32_t queries = 0;
    int64_t begins = 0, length = 0;
    if (seq < a.num_seqs) {
      const SeqQueries found = queries_of(a, seq);
      queries = found.count, begins = found.first;
      length = sequence_length(a.rows.kv.table, seq, a.rows.kv.block_size);
      if (queries < 0 || begins < 0 || queries > a.num_tokens - begins || int64_t(queries) * a.group.d <= a.skip_rows)
        queries = 0;
      mine = uint32_t((int64_t(queries) * a.group.d + kRows - 1) / kRows) * a.num_kv_heads;
    }
    uint32_t sum = mine;
    for (int hop = 1; hop < 32; hop *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, hop);
      if (lane >= uint32_t(hop)) sum += other;
    }
    const uint32_t all = __shfl_sync(0xffffffffu, sum, 31);
    // Which of these sequences this lane's item is of: how many of them end at or before it.
    uint32_t at = 0;
    for (uint32_t step = 16; step > 0; step /= 2)
      if (__shfl_sync(0xffffffffu, sum, at + step - 1) <= index - before) at += step;
    const uint32_t of_it = __shfl_sync(0xffffffffu, mine, at), ends = __shfl_sync(0xffffffffu, sum, at);
    PrefillItem w;
    w.seq = from + int32_t(at), w.queries = __shfl_sync(0xffffffffu, queries, at);
    w.first_query = __shfl_sync(0xffffffffu, begins, at);
    w.length = __shfl_sync(0xffffffffu, int32_t(length < 0 ? 0 : length > a.max_seq_len ? a.max_seq_len : length), at);
    if (!is_found && lane < run.count && index - before < all) {
      const uint32_t inside = index - before - (ends - of_it), blocks = of_it / a.num_kv_heads;
      w.head = int32_t(inside / blocks);
      w.first_row = int32_t(blocks - 1 - inside % blocks) * kRows;
      w.rows = w.queries * int32_t(a.group.d);
      const int32_t last_row = min(w.first_row + kRows, w.rows) - 1;
      int32_t end = w.length, first = 0;
      if (a.is_causal) end = w.length - w.queries + 1 + int32_t(a.group.divide(last_row));
      if (a.window > 0)
        first = int32_t(max(int64_t(0), (a.is_causal ? int64_t(w.length) - w.queries + 1 + a.group.divide(w.first_row)
                                                     : int64_t(w.length)) -
                                            a.window));
      w.begin = first, w.first_tile = first / kKeys;
      // Rows that see nothing have a tile all the same, in which nothing is there for them: every item is alike.
      w.num_tiles = max(1, (max(end, 0) + kKeys - 1) / kKeys - w.first_tile);
      items[lane] = w;
      is_found = true;
    }
    before += all;
    if (!__any_sync(0xffffffffu, !is_found && lane < run.count)) break;
  }
  return __popc(__ballot_sync(0xffffffffu, is_found));  // ascending numbers: those found are the first ones
}

}  // namespace cuda
}  // namespace kvx
