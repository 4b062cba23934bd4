// What a block of threads of sparse attention works on: up to 64 heads of one token, and the list of keys they see.
//
// The list is the token's window, oldest first, then its entries: those selected for it, or all it may read. Key j of
// the list is found in three steps that each need a load of the one before (its number, its page, its row), so they are
// asked for tiles ahead.
#pragma once
#include "entry/cuda/step.cuh"
#include "tiles/ptx.cuh"

namespace kvx {
namespace cuda {

constexpr int kSparseRows = 64, kSparseKeys = 64, kSparseDim = 512;  // of a tile: heads, keys; elements of a row

struct SparseArgs {
  SparseParams p;
  FastDivider window_rows, entry_rows, fresh_rows;
  FastDivider head_groups, ratio, splits;  // blocks of 64 heads; how many an item's keys are split into
  float factor;                            // softmax scale, log2(e) included
};

// Partial results in the workspace, one for each (item, split): [64, 512] f32, then (base, sum) of the 64.
constexpr int64_t kSparsePartBytes = (kSparseRows * kSparseDim + 2 * kSparseRows) * 4;

struct SparseItem {
  int32_t token, first_head;
  int32_t slot;  // -1: the token is skipped
  int32_t position, begin, start;
  int32_t num_window, num_keys;  // keys of the window, of the whole list
  int32_t visible;               // entries up to its own
  int32_t first_tile, num_tiles;
};

// By a whole warp.
__device__ __forceinline__ SparseItem sparse_item(const SparseArgs& a, int32_t index, int32_t split) {
  const SparseParams& p = a.p;
  SparseItem w = {};
  w.token = int32_t(a.head_groups.divide(uint32_t(index))),
  w.first_head = (index - w.token * int32_t(a.head_groups.d)) * kSparseRows;
  const StepToken t = find_token(p.step, w.token);
  w.slot = t.slot;
  const bool counts = w.first_head == 0 && split == 0 && p.errors && threadIdx.x % 32 == 0;
  if (t.is_bad && counts) atomicAdd(p.errors, 1ull);
  if (t.slot < 0) return w;
  w.position = t.position(w.token), w.begin = t.begin, w.start = t.start;
  if (p.cos && w.position >= p.num_positions && counts) atomicAdd(p.errors, 1ull);
  w.num_window = min(p.window_tokens, w.position + 1);
  w.visible = int32_t(a.ratio.divide(uint32_t(w.position + 1)));
  const int32_t entries = !p.entries.data ? 0
                          : p.selected    ? p.num_selected
                                          : int32_t(min(int64_t(w.visible), p.max_entries));
  if (p.entries.data && !p.selected && w.visible > p.max_entries && counts)
    atomicAdd(p.errors, (unsigned long long)(w.visible - p.max_entries));
  w.num_keys = w.num_window + entries;
  const uint32_t tiles = uint32_t(w.num_keys + kSparseKeys - 1) / kSparseKeys;
  w.first_tile = int32_t(a.splits.divide(uint32_t(split) * tiles)),
  w.num_tiles = int32_t(a.splits.divide(uint32_t(split + 1) * tiles)) - w.first_tile;
  return w;
}

enum KeyKind : int32_t { KEY_NONE, KEY_WINDOW, KEY_FRESH, KEY_ENTRY };

struct KeyAsked {
  KeyKind kind;
  int32_t number;  // position of a row, or which entry
  int32_t loaded;  // position of the row that stands there, or the entry's page
};

struct KeyPlace {
  const char* data;  // NULL: no such key
  const char* scales;
};

// Its kind and number; where it has to be loaded, from where.
__device__ __forceinline__ const int32_t* number_at(const SparseArgs& a, const SparseItem& w, int32_t key,
                                                    KeyAsked* k) {
  const SparseParams& p = a.p;
  *k = KeyAsked{KEY_NONE, 0, 0};
  if (key >= w.num_keys) return nullptr;
  if (key < w.num_window) {
    k->number = w.position - w.num_window + 1 + key;
    k->kind = p.fresh.data && k->number >= w.start ? KEY_FRESH : KEY_WINDOW;
    return nullptr;
  }
  k->kind = KEY_ENTRY, k->number = key - w.num_window;
  return p.selected ? reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(p.selected) +
                                                       w.token * p.selected_token) +
                          k->number
                    : nullptr;
}
// Where it is said what stands there. `look_at_page` looks at that when it is needed.
__device__ __forceinline__ const int32_t* page_at(const SparseArgs& a, const SparseItem& w, KeyAsked* k) {
  const SparseParams& p = a.p;
  if (k->kind == KEY_WINDOW) {
    const uint32_t row = uint32_t(k->number) - a.window_rows.divide(uint32_t(k->number)) * a.window_rows.d;
    return p.positions + int64_t(w.slot) * p.window.rows + row;
  }
  if (k->kind == KEY_ENTRY && (k->number < 0 || k->number >= w.visible)) k->kind = KEY_NONE;
  if (k->kind != KEY_ENTRY) return nullptr;
  const int32_t* at = entry_page_at(p.table, w.slot, int32_t(a.entry_rows.divide(uint32_t(k->number))));
  if (!at) k->loaded = INT32_MAX;
  return at;
}
__device__ __forceinline__ void look_at_page(const SparseArgs& a, KeyAsked* k, bool counts) {
  if (k->kind == KEY_WINDOW && k->loaded != k->number) k->kind = KEY_NONE;
  if (k->kind != KEY_ENTRY || (k->loaded >= 0 && k->loaded < a.p.entries.num_pages)) return;
  k->kind = KEY_NONE;
  if (k->loaded >= 0 && counts && a.p.errors) atomicAdd(a.p.errors, 1ull);
}

__device__ __forceinline__ KeyPlace place_row(const RowPages& r, int64_t page, int64_t row) {
  const char* base = r.data + page * r.page;
  return KeyPlace{base + row * r.data_bytes, base + int64_t(r.rows) * r.data_bytes + row * r.scale_bytes};
}

__device__ __forceinline__ int64_t page_and_row(const FastDivider& rows, int32_t number, uint32_t* row) {
  const uint32_t page = rows.divide(uint32_t(number));
  *row = uint32_t(number) - page * rows.d;
  return page;
}

__device__ __forceinline__ KeyPlace place_key(const SparseArgs& a, const SparseItem& w, KeyAsked k, bool counts) {
  const SparseParams& p = a.p;
  look_at_page(a, &k, counts);
  uint32_t row;
  if (k.kind == KEY_ENTRY) {
    page_and_row(a.entry_rows, k.number, &row);
    return place_row(p.entries, k.loaded, row);
  }
  if (k.kind == KEY_FRESH) {
    const int64_t page = page_and_row(a.fresh_rows, w.begin + k.number - w.start, &row);
    return place_row(p.fresh, page, row);
  }
  if (k.kind == KEY_WINDOW) {
    page_and_row(a.window_rows, k.number, &row);
    return place_row(p.window, w.slot, row);
  }
  return KeyPlace{nullptr, nullptr};
}

// Where a warp's keys of two tiles are, sixteen of each: lane l has key l % 16 of its sixteen, lanes from 16 on that of
// the second tile. Numbers are asked for four tiles ahead and pages two. They come to shared memory, as copies that are
// committed and waited for with the caller's: a register that is still to be loaded is not moved without waiting.
struct KeyFinder {
  static constexpr int kTiles = 2, kSlotBytes = 8;  // of a lane: a number and a page
  const SparseArgs& a;
  const SparseItem& w;
  uint32_t slot;
  int32_t key, tile;     // the lane's, of those that are found next
  bool counts;           // bad pages
  KeyAsked asked, next;  // of them, and of those after

  __device__ __forceinline__ KeyFinder(const SparseArgs& a, const SparseItem& w, uint32_t slots)
      : a(a),
        w(w),
        slot(slots + threadIdx.x % 128 * kSlotBytes),
        tile(int32_t(threadIdx.x % 32 / 16)),
        counts(w.first_head == 0) {
    key = (w.first_tile + tile) * kSparseKeys + int32_t(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16);
    ask(slot, number_at(a, w, key, &next), next.number);
    wait();
    ask_next();
    wait();
  }
  __device__ __forceinline__ KeyPlace find() {
    asked.loaded = int32_t(tiles::load_shared_4(slot + 4));
    const KeyPlace place = tile < w.num_tiles ? place_key(a, w, asked, counts) : KeyPlace{nullptr, nullptr};
    tile += kTiles, key += kTiles * kSparseKeys;
    ask_next();
    return place;
  }

 private:
  static __device__ __forceinline__ void wait() {
    tiles::commit_copies();
    tiles::wait_copies<0>();
  }
  static __device__ __forceinline__ void ask(uint32_t to, const int32_t* from, int32_t known) {
    if (from) tiles::copy_4(to, from, 4);
    else tiles::store_shared_4(to, uint32_t(known));
  }
  // The page of the key whose number has come, and the number of the one after.
  __device__ __forceinline__ void ask_next() {
    asked = next, asked.number = int32_t(tiles::load_shared_4(slot));
    if (tile < w.num_tiles) {
      const int32_t* at = page_at(a, w, &asked);
      ask(slot + 4, at, asked.loaded);
    }
    const int32_t* at = number_at(a, w, key + kTiles * kSparseKeys, &next);
    ask(slot, at, next.number);
  }
};

// What a head's sums are multiplied by, base, sum and sink (-inf: none) being in powers of two; its LSE is written on
// the way.
__device__ __forceinline__ float finish_head(const SparseParams& p, int32_t token, int32_t head, float base, float sum,
                                             float sink, bool writes) {
  if (writes && p.lse)
    *reinterpret_cast<float*>(p.lse + token * p.lse_token + head * p.lse_head) =
        sum != 0.f ? (base + log2f(sum)) * 0.69314718f : -INFINITY;  // NaN stays
  if (p.sinks && sum != 0.f) sum += exp2f(sink - base);
  return sum != 0.f ? 1.f / sum : 0.f;
}
__device__ __forceinline__ float sink_of(const SparseParams& p, int32_t head) {
  return p.sinks ? __ldg(p.sinks + head) * 1.44269504f : -INFINITY;
}

// Elements dim and dim + 1 of the output, turned back by the token's position where cos and sin are given.
__device__ __forceinline__ void turn_back(const SparseParams& p, int32_t position, int32_t dim, float* x, float* y) {
  const int32_t i = dim - (p.dim - p.rope_dim);
  if (!p.cos || i < 0 || position >= p.num_positions) return;
  const int64_t at = position * p.table_row + i / 2 * 4;
  const float c = __ldg(reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.cos) + at)),
              s = __ldg(reinterpret_cast<const float*>(reinterpret_cast<const char*>(p.sin) + at));
  const float lo = *x, hi = *y;
  *x = lo * c + hi * s, *y = hi * c - lo * s;
}

}  // namespace cuda
}  // namespace kvx
