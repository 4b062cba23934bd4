// Prefill over eight-bit caches: how bytes become the f16 tiles that are multiplied, and queries f16.
//
// Codes are f16 without their scales, exactly. One scale a head joins the row's factor (K) and the final division (V).
// With scales a row, the tile's 128 keys have theirs in shared memory: K's multiply scores; V's join the exponent as
// logarithms, and the sum of weights divides by them again (attention/decode/decode.cuh does the same).
#pragma once
#include "attention/prefill/items.cuh"
#include "tiles/block_rows.cuh"
#include "tiles/elements.cuh"

namespace kvx {
namespace cuda {

// The loading warpgroup. K and V have a buffer of raw bytes each, and a thread widens the chunks it has copied itself:
// nobody is waited for between the two. A plane's next bytes are on their way from the moment its buffer has been read
// until the other plane's have been widened and a stage is free.
//
// A thread has chunk c (16 bytes, which become two chunks of f16) of rows r + kRowsAtOnce * j. Eight neighbours have
// four chunks of two rows, so that the f16 chunks they store, every other one of a row, meet all banks. Chunks past the
// end of rows are zeros from the start, and never copied.
template <class P> struct PrefillBytes {
  using C = typename P::Config;
  using Convert = typename C::Rows::Convert;
  using Rings = typename C::Rings;
  static constexpr int kChunks = C::kKeyDims / 16, kRowsAtOnce = 128 / kChunks / 8 * 8, kMine = C::kKeys / kRowsAtOnce,
                       kCopying = kChunks * kRowsAtOnce;  // threads that copy
  static_assert(kRowsAtOnce >= 8 && kChunks % 4 == 0, "a thread's rows are alike to the swizzle");
  // Wide rows leave no room for raw bytes beside the stages: a thread copies a chunk to where the first of the two it
  // becomes will lie.
  static constexpr bool kInPlace = C::kRawBytes == 0;
  static constexpr int kStep = kInPlace ? kRowsAtOnce * 128 : 2048;  // from a thread's raw chunk to its next
  const P& p;

  // Asked for anew where it is needed: what follows from it would take registers all along.
  static __device__ __forceinline__ uint32_t own_thread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x % 128;
  }
  static __device__ __forceinline__ uint32_t chunk_of(uint32_t thread) {
    return thread % 4 + thread / 8 % (kChunks / 4) * 4;
  }
  static __device__ __forceinline__ uint32_t row_of(uint32_t thread) {
    return thread / (2 * kChunks) * 2 + thread / 4 % 2;
  }
  // Where a thread's first chunk becomes two in a stage, and where it lies raw.
  static __device__ __forceinline__ uint32_t wide(uint32_t thread, uint32_t tile_at) {
    return tile_at + P::chunk_at(row_of(thread), 2 * chunk_of(thread));
  }
  __device__ __forceinline__ uint32_t raw(int plane, uint32_t thread, uint32_t tile_at) const {
    return kInPlace ? wide(thread, tile_at) : p.at + C::kRawAt + plane * C::kRawBytes + thread * 16;
  }

  // Which tile is found next, and its row of this thread's, asked for.
  struct Cursor {
    const PrefillItem *item, *end;
    int32_t tile;  // of the item
    tiles::RowAsked asked;
  };
  __device__ __forceinline__ void ask(Cursor* c) const {
    if (c->item == c->end) return;
    c->asked = tiles::ask_row(p.a.rows, c->item->seq, uint32_t(c->item->first_tile + c->tile) * C::kKeys + own_thread(),
                              c->item->begin, C::kKeys == 128 || own_thread() < C::kKeys ? c->item->length : 0);
  }

  // A tile's rows, for all: a thread finds one. Then the next is asked for. `tile` counts those of all items.
  __device__ __forceinline__ void find(Cursor* c, uint32_t tile) const {
    const uint32_t thread = own_thread();
    const int32_t head = c->item->head;
    const tiles::RowPlace row = tiles::place_row(p.a.rows, c->asked, head);
    const bool is_there = row.block >= 0;
    uint32_t* offsets = Rings::offsets(p.rings(), tile) + thread % kRowsAtOnce * kMine +
                        thread / kRowsAtOnce;  // where the threads that copy it look
    const bool has_row = C::kKeys == 128 || thread < C::kKeys;
    if (has_row)
      offsets[0] = is_there ? row.offset[0] : Rings::kNoRow,
      offsets[C::kKeys] = is_there ? row.offset[1] : Rings::kNoRow;
    if (C::kScales == ROW_SCALES && has_row) {  // with the next copies
#pragma unroll
      for (int plane = 0; plane < 2; plane++) {
        const ScaleParams& s = p.a.scales[plane];
        const char* from = is_there ? s.data + row.block * s.block + c->asked.inside * s.token + head * s.head : s.data;
        tiles::copy_4(p.at + C::kScalesAt + tile % 4 * C::kScaleBytes + thread / 2 * 16 + plane * 8 + thread % 2 * 4,
                      from, is_there ? 4 : 0);
      }
    }
    const uint32_t there = __ballot_sync(0xffffffffu, is_there);
    if (thread % 32 == 0)
      reinterpret_cast<uint32_t*>(Rings::valid(p.rings(), tile))[thread / 32] = has_row ? there : ~0u;
    tiles::meet(1, 128);
    if (++c->tile == c->item->num_tiles) c->item++, c->tile = 0;
    ask(c);
  }

  template <bool kIsFull> __device__ __forceinline__ void copy_rows(uint32_t tile, int plane, uint32_t tile_at) const {
    const uint32_t thread = own_thread(), to = raw(plane, thread, tile_at);
    const char* data = p.a.data[plane] + chunk_of(thread) * 16;
    asm volatile("" : "+l"(data));  // added up here: an address below is one instruction
    Rings::template copy_rows<kMine, kStep>(
        to, data, Rings::offsets(p.rings(), tile) + plane * C::kKeys + row_of(thread) * kMine, kIsFull);
  }
  __device__ __forceinline__ bool is_past_rows(int plane) const {
    return chunk_of(own_thread()) >= uint32_t(plane ? p.a.row_chunks[1] : p.a.row_chunks[0]);
  }
  __device__ __forceinline__ bool copies() const { return kCopying == 128 || own_thread() < uint32_t(kCopying); }
  // A chunk of zeros stays one when it becomes two.
  __device__ __forceinline__ void clear(int plane, uint32_t stages) const {
    if (!copies() || !is_past_rows(plane)) return;
#pragma unroll 1
    for (int stage = 0; stage < (kInPlace ? C::kStages : 1); stage++)
#pragma unroll 1
      for (int j = 0; j < kMine; j++)
        tiles::copy_16(raw(plane, own_thread(), stages + stage * Rings::kTileBytes) + j * kStep, p.a.data[0], 0);
  }
  __device__ __forceinline__ void copy(uint32_t tile, int plane, uint32_t tile_at) const {
    if (!copies() || is_past_rows(plane)) return;
    if (Rings::is_full(*Rings::valid(p.rings(), tile))) copy_rows<true>(tile, plane, tile_at);
    else copy_rows<false>(tile, plane, tile_at);
  }

  static __device__ __forceinline__ uint4 eight(uint32_t lo, uint32_t hi) {
    const uint2 x = Convert::four(lo), y = Convert::four(hi);
    return make_uint4(x.x, x.y, y.x, y.y);
  }
  __device__ __forceinline__ void widen(int plane, uint32_t tile_at) const {
    if (!copies()) return;
    const uint32_t thread = own_thread(), from = raw(plane, thread, tile_at), to = wide(thread, tile_at);
    constexpr int kAhead = 1;  // a load on its way while a chunk is widened: more would not leave registers
    uint4 x[kAhead + 1];
#pragma unroll
    for (int j = 0; j < kAhead; j++) x[j] = tiles::load_shared_16(from + j * kStep);
#pragma unroll
    for (int j = 0; j < kMine; j++) {
      if (j + kAhead < kMine) x[(j + kAhead) % (kAhead + 1)] = tiles::load_shared_16(from + (j + kAhead) * kStep);
      const uint4& now = x[j % (kAhead + 1)];
      const uint32_t row = j * kRowsAtOnce * 128;
      tiles::store_shared_16(to + row, eight(now.x, now.y));
      tiles::store_shared_16((to ^ 16) + row, eight(now.z, now.w));
    }
  }

  // Of the row this thread has found: what those who multiply need of V's scale, found once and not by every row of
  // queries. A scale of 0 counts as a tiny one.
  __device__ __forceinline__ void finish_scales(uint32_t tile) const {
    const uint32_t thread = own_thread();
    if (thread >= C::kKeys) return;
    float* slot = reinterpret_cast<float*>(p.shared + C::kScalesAt + tile % 4 * C::kScaleBytes);
    float* of_value = slot + thread / 2 * 4 + 2 + thread % 2;
    const float scale = fmaxf(*of_value, 7.8886091e-31f);  // 2^-100
    *of_value = tiles::log2_fast(scale), slot[2 * C::kKeys + thread] = tiles::inverse_fast(scale);
  }

  // Copies are in groups: K of tile 0 (with scales of both planes), V of it, K of tile 1, ... All but the last are
  // there when a plane is widened. Offsets of tile i + 2 are written when all have met after those of tile i were read;
  // valid rows and scales have four places, since the multiplying warps read them after they gave the keys back, and no
  // later than the values.
  __device__ __forceinline__ void load() const {
    Cursor cursor = {p.items, p.items + p.num_items, 0, {-1, 0}};
    ask(&cursor);
    typename Rings::Ring keys = Rings::keys(p.at + C::kRingsAt);
    typename Rings::Ring values = Rings::values(p.at + C::kRingsAt);  // of the same type: both planes are as wide
    clear(0, keys.stages), clear(1, values.stages);
    bool copies_next = true;
    for (uint32_t next = 0; copies_next; next++) {  // tile `next` is copied, the one before it widened
      copies_next = cursor.item != cursor.end;
      if (copies_next) find(&cursor, next);
#pragma unroll
      for (int plane = 0; plane < 2; plane++) {
        typename Rings::Ring& ring = plane ? values : keys;
        if (next > 0) {
          tiles::wait_copies<1>();
          if (C::kScales == ROW_SCALES && plane == 0) finish_scales(next - 1);
          // In place the stage is ours already, since the bytes were copied to it.
          if constexpr (kInPlace)
            widen(plane, ring.tile()), tiles::show_to_multiplications(), ring.arrive_full(), ring.next();
          else ring.fill([&](uint32_t tile) { widen(plane, tile); });
        }
        if (copies_next) {
          if constexpr (kInPlace) ring.wait_free();
          copy(next, plane, ring.tile());
        }
        tiles::commit_copies();
      }
    }
  }
};

// Queries as f16, by the threads that multiply, in place: for eight-bit caches, and for f16 ones under bf16 queries.
// bf16 has the digits but not the range: a row is divided by a power of two, which is exact, and what undoes it is left
// beside. `flips`: K's one scale is negative; scores are compared before they are multiplied by it. A thread has the
// chunks that it copied itself (Prefill::ask_queries).
template <class P> __device__ __forceinline__ void fit_queries(const P& p, uint32_t buffer, bool flips) {
  using Queries = typename P::Queries;
  const uint32_t chunk = Queries::chunk(), flip = flips ? 0x80008000u : 0u;
  const bool is_bf16 = p.a.q.dtype == KVX_DTYPE_BF16;
  const auto low = [](uint32_t x) { return __uint_as_float(x << 16); };
  const auto high = [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); };
  const auto power_of_two = [](int e) { return __uint_as_float(uint32_t(e + 127) << 23); };
#pragma unroll 2
  for (int j = 0; j < Queries::kMine; j++) {
    const uint32_t r = Queries::row(j), at = p.at + buffer + P::query_at(r, chunk);
    const bool has_chunk = Queries::kLanes == Queries::kChunks || chunk < uint32_t(Queries::kChunks);
    const uint4 x = has_chunk ? tiles::load_shared_16(at) : make_uint4(0, 0, 0, 0);
    uint32_t words[4] = {x.x, x.y, x.z, x.w};
    int exponent = 0;
    if (is_bf16) {
      float largest = 0.f;
      for (uint32_t word : words) largest = fmaxf(largest, fmaxf(fabsf(low(word)), fabsf(high(word))));
      for (int hop = 1; hop < Queries::kLanes; hop *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, hop));
      const int biased = int(__float_as_uint(largest) >> 23);  // 255: an infinity
      exponent = biased == 255 ? 0 : max(biased - 127 - 8, -100);
      const float shrink = power_of_two(-exponent);
      for (uint32_t& word : words) word = tiles::F16Numbers::pack(low(word) * shrink, high(word) * shrink);
    }
    if (has_chunk)
      tiles::store_shared_16(at, make_uint4(words[0] ^ flip, words[1] ^ flip, words[2] ^ flip, words[3] ^ flip));
    if (chunk == 0) reinterpret_cast<float*>(p.shared + P::Config::kGrowAt)[r] = power_of_two(exponent);
  }
}

}  // namespace cuda
}  // namespace kvx
