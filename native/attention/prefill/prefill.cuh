// Attention of many queries a sequence, on Hopper: items of 128 query rows (192 of up to 64 elements) against tiles of
// 128 keys, or of 64 where values are wider than 128.
//
// A query row is one head of one token; rows of all heads that share a KV head stand in one item (GQA packed), so that
// its keys and values are loaded once for all of them. One warpgroup loads (rows through the block table, zeros where
// nothing stands), the others multiply, 64 rows each: while the tensor cores add a tile's values, the softmax of the
// next tile's scores is computed. A block of threads has several items (items.cuh), and goes from one to the next
// without a pause: keys of the next are loaded and multiplied before the results of the last are stored. Whole blocks
// go through the copy engine where tensor maps can tell of them (tiles/map_filler.cuh), else rows are copied
// (tiles/row_filler.cuh); rows of eight and four bits are widened on their way (attention/prefill/codes.cuh), or are
// multiplied as they are, where the caller allows it (attention/prefill/products.cuh). Rows that are no tile's width
// run in the next tile: columns of Q, K and V past them are zeros, and those of the result are not stored. Of 512
// elements a warpgroup has registers for half the values of 64 rows: items are 64 query rows then, both warpgroups
// multiply all of their keys, and each adds up one half of the values.
#pragma once
#include <type_traits>

#include "attention/prefill/codes.cuh"
#include "attention/prefill/items.cuh"
#include "tiles/elements.cuh"
#include "tiles/map_filler.cuh"
#include "tiles/row_filler.cuh"
#include "tiles/wgmma.cuh"

namespace kvx {
namespace cuda {

// Widths of a tile's rows, in elements, and how many keys it has: what two stages of it leave room for, and registers
// for their scores.
template <int kKeyDims_, int kValueDims_, int kKeys_, int kStages_ = 2,
          bool kSplitsValues_ = false> struct PrefillTile {
  static constexpr int kKeyDims = kKeyDims_, kValueDims = kValueDims_, kKeys = kKeys_, kStages = kStages_;
  static constexpr bool kSplitsValues =
      kSplitsValues_;  // the two warpgroups have the same rows, and half of their values each
};

template <class Rows_, class Tile, ScaleKind kScales_> struct PrefillConfig {
  using Rows = Rows_;
  using Numbers = typename Rows::Numbers;
  static constexpr ScaleKind kScales = kScales_;
  static constexpr bool kIsCodes = Rows::kBits <= 8, kIsF16 = std::is_same<Numbers, tiles::F16Numbers>::value;
  static constexpr int kElementBytes = std::is_same<Numbers, tiles::E4m3Numbers>::value ? 1 : 2;  // as multiplied
  static constexpr bool kFitsQueries = kIsCodes && !std::is_same<Numbers, tiles::Bf16Numbers>::value;
  static constexpr int kKeyDims = Tile::kKeyDims, kValueDims = Tile::kValueDims, kKeys = Tile::kKeys,
                       kStages = Tile::kStages;
  static constexpr bool kSplitsValues = Tile::kSplitsValues;
  // Warpgroups that multiply. Rows of 64 elements leave registers for a third, whose exponentials, as many as
  // multiplications, then run beside those of the others.
  static constexpr int kGroups = kElementBytes == 2 && !kIsCodes && kKeyDims <= 64 ? 3 : 2;
  static constexpr int kRows = kSplitsValues ? 64 : 64 * kGroups,
                       kOutDims = kSplitsValues ? kValueDims / 2 : kValueDims;  // of a warpgroup's results
  using Rings = tiles::KvRings<kKeyDims * kElementBytes, kStages, kKeys, kValueDims * kElementBytes>;
  static constexpr int kColumnBytes = Rings::kColumnBytes,
                       kQueryColumnBytes = kRows * 128;  // of K or V, and of Q: 64 elements of a tile's rows
  // Queries of the next item arrive while this one's are multiplied, where there is room for both.
  static constexpr int kQueryBuffers = kElementBytes == 2 && !kIsCodes && kKeyDims <= 128 ? 2 : 1,
                       kQueryBytes = kRows * kKeyDims * 2;
  static constexpr int kQueryAt = 0, kRingsAt = kQueryBuffers * kQueryBytes, kItemsAt = kRingsAt + Rings::kBytes,
                       kWorkAt = kItemsAt + ItemWaves::kMost * int(sizeof(PrefillItem));
  // Results leave through the place of their item's queries, by the copy engine.
  static constexpr bool kLeavesByBoxes = kQueryBuffers == 2 && !kSplitsValues && kOutDims <= kKeyDims;
  // Where f16 or e4m3 is multiplied: what a query row was divided by. Rows of codes alone: [4 tiles] of scales (one a
  // row: a pair of keys' K and logarithms of V together, then the inverses of V; several: those of K's rows, then of
  // V's); raw bytes of K and V, which of wide rows lie in the stages themselves.
  // Raw bytes begin a line: rows that straddle lines arrive in more pieces.
  static constexpr int kQueryBarriersAt = kWorkAt + 16, kStagingAt = kWorkAt + 128,
                       kGrowAt = kStagingAt + kGroups * 4 * 1024,
                       kScalesAt = kGrowAt + (kIsF16 || kElementBytes == 1 ? kRows * 4 : 0),
                       kScaleRow = Rows::kBits == 4    ? kKeyDims / 16
                                   : kKeyDims / 32 < 4 ? 4
                                                       : kKeyDims / 32,
                       kScaleBytes = kScales == ROW_SCALES     ? kKeys * 12
                                     : kScales == GROUP_SCALES ? 2 * kKeys * kScaleRow
                                                               : 0;
  static constexpr int kRawAt = kScalesAt + 4 * kScaleBytes,
                       kRawBytes =
                           kIsCodes && kElementBytes == 2 && kKeyDims <= 128 ? kKeys * kKeyDims * Rows::kBits / 8 : 0;
  static constexpr int kSharedBytes = kRawAt + 2 * kRawBytes + 1024;  // 1024: to begin on a multiple of it
  static_assert(kSharedBytes <= 227 * 1024, "shared memory of a block of threads");
  static_assert(kRawBytes == 0 || kRawAt % 128 == 0, "whole lines");
  static_assert(!kIsCodes || kKeyDims == kValueDims, "tiles of codes are as wide as each other");
  static constexpr int kThreads = 128 * (1 + kGroups), kLoadRegisters = kGroups == 3 ? 32 : 40,
                       kMultiplyRegisters = kGroups == 3 ? 160 : 232;
};

template <class C> struct Prefill {
  using Config = C;
  using Numbers = typename C::Numbers;
  using Rings = typename C::Rings;
  static constexpr int kOut = C::kOutDims / 2;  // results of a thread
  const PrefillArgs& a;
  char* shared;
  uint32_t at;
  const PrefillItem* items;  // of this block of threads
  uint32_t num_items;

  __device__ __forceinline__ char* rings() const { return shared + C::kRingsAt; }
  static __device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
    return Rings::chunk_at(row, chunk);
  }
  // Where an item's queries are, and in them a row's chunk. `item` counts those of this block of threads.
  static __device__ __forceinline__ uint32_t query_buffer(uint32_t item) {
    return C::kQueryBuffers == 2 ? (item & 1) * C::kQueryBytes : 0;
  }
  static __device__ __forceinline__ uint32_t query_at(uint32_t row, uint32_t chunk) {
    return C::kQueryAt + (chunk / 8) * C::kQueryColumnBytes + row * 128 + (((chunk % 8) ^ (row % 8)) << 4);
  }

  // How threads that multiply share out the 16-byte chunks of query rows: a warp has those that it multiplies, or half
  // of them where both warpgroups multiply the same.
  struct Queries {
    static constexpr int kChunks = C::kKeyDims / 8, kLanes = kChunks == 24 || kChunks > 32 ? 32 : kChunks,
                         kParts = (kChunks + kLanes - 1) / kLanes, kRowsAtOnce = 32 / kLanes,
                         kMine = (C::kSplitsValues ? 8 : 16) / kRowsAtOnce;
    static __device__ __forceinline__ uint32_t chunk() { return threadIdx.x % kLanes; }
    static __device__ __forceinline__ uint32_t row(int j) {
      return (threadIdx.x / 32 - 4) * (C::kSplitsValues ? 8 : 16) + j * kRowsAtOnce + threadIdx.x % 32 / kLanes;
    }
  };
  // Where a warpgroup's queries arrive, by the copy engine.
  __device__ __forceinline__ uint32_t query_barrier(int group) const {
    return at + C::kQueryBarriersAt + (C::kSplitsValues ? 0 : group * 8);
  }
  __device__ __forceinline__ bool fits_queries() const {
    return C::kFitsQueries || (C::kIsF16 && !C::kSplitsValues && a.q.dtype == KVX_DTYPE_BF16);
  }

  __device__ __forceinline__ bool has_one_scale(int plane) const {
    return C::kScales == ONE_SCALE || (C::kScales == ROW_SCALES && a.has_one_scale[plane]);
  }

  // An item's queries, on their way when this returns. The multiplications that read those before them in their place
  // are over.
  __device__ __forceinline__ void ask_queries(const PrefillItem& w, uint32_t item) const {
    const uint32_t buffer = at + query_buffer(item);
    if (C::kSplitsValues) tiles::meet(2, 256);
    if (a.has_query_map) {
      const uint32_t thread = threadIdx.x - 128;
      if (thread % (C::kSplitsValues ? 256 : 128) < 32 && tiles::is_elected()) {
        const int group = thread / 128;
        const uint32_t from = C::kSplitsValues ? 0 : group * 64, barrier = query_barrier(group);
        const int32_t token = int32_t(w.first_query + a.group.divide(w.first_row + from));
        tiles::arrive_and_expect(barrier, 64 * C::kKeyDims * 2);
#pragma unroll
        for (int column = 0; column < C::kKeyDims / 64; column++)
          tiles::copy_box(buffer + C::kQueryAt + column * C::kQueryColumnBytes + from * 128, a.query_map, column * 64,
                          w.head * int32_t(a.group.d), token, 0, barrier);
      }
      return;
    }
#pragma unroll 1
    for (int j = 0; j < Queries::kMine; j++) {
      const uint32_t r = Queries::row(j), row = w.first_row + r, token = a.group.divide(row),
                     head = w.head * a.group.d + row - token * a.group.d;
      const char* from = a.q.data + (w.first_query + token) * a.q.token + int64_t(head) * a.q.head;
#pragma unroll
      for (int part = 0; part < Queries::kParts; part++) {
        const uint32_t chunk = part * Queries::kLanes + Queries::chunk();
        const bool is_there = int32_t(row) < w.rows && int32_t(chunk * 8) < a.dims[0];
        if (Queries::kChunks % Queries::kLanes == 0 || chunk < uint32_t(Queries::kChunks))
          tiles::copy_16(buffer + query_at(r, chunk), is_there ? from + chunk * 16 : a.q.data, is_there ? 16 : 0);
      }
    }
    tiles::commit_copies();
  }
  // They are there, and as they are multiplied. `of_head`: K's scale.
  __device__ __forceinline__ void finish_queries(int group, float of_head, uint32_t item) const {
    if (a.has_query_map) tiles::wait(query_barrier(group), item & 1);
    else tiles::wait_copies<0>();
    if constexpr (C::kIsF16 && !C::kSplitsValues)
      if (fits_queries()) fit_queries(*this, query_buffer(item), C::kScales != ROW_SCALES && of_head < 0.f);
    if (a.has_query_map && !fits_queries()) return;
    tiles::show_to_multiplications();
    if (C::kSplitsValues) tiles::meet(2, 256);
    else tiles::meet(3 + C::kGroups + group, 128);
  }

  // A warp's 16 rows of results, 32 elements at a time: through shared memory, so that four lanes store 64 bytes of a
  // row. `rows`: of the two rows of 16-bit elements that this lane stores to, null where there is none.
  template <class To>
  __device__ __forceinline__ void store_16(const float (&out)[kOut], const float (&inverse)[2], int dims_from,
                                           char* const (&rows)[2]) const {
    const uint32_t lane = threadIdx.x % 32, staging = at + C::kStagingAt + (threadIdx.x / 32 - 4) * 1024,
                   row = lane % 16, of_row = staging + row * 64, turn = row / 2 % 4;
#pragma unroll
    for (int m = 0; m < C::kOutDims / 32; m++) {
#pragma unroll
      for (int k = 0; k < 2; k++) {  // 16 elements: of rows 0-7 and 8-15, first and last eight
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const float* pair = out + 16 * m + 8 * k + 4 * (i / 2) + 2 * (i % 2);
          x[i] = To::pack(pair[0] * inverse[i % 2], pair[1] * inverse[i % 2]);
        }
        tiles::store_matrices(of_row + (((2 * k + lane / 16) ^ turn) << 4), x);
      }
      __syncwarp();
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t r = lane / 4 + 8 * h, chunk = lane % 4;
        const uint4 eight = tiles::load_shared_16(staging + r * 64 + ((chunk ^ (r / 2 % 4)) << 4));
        const int dim = dims_from + 32 * m + 8 * int(chunk);
        if (rows[h] && dim < a.dims[1]) *reinterpret_cast<uint4*>(rows[h] + dim * 2) = eight;
      }
      __syncwarp();
    }
  }

  // A warp's 16 rows of an item by the copy engine, out of the place of their queries, which nobody multiplies any
  // more. Whoever asks for others there waits until they were read.
  template <class To> __device__ __forceinline__ void store_boxes(const PrefillItem& w, const float (&out)[kOut],
                                                                  const float (&inverse)[2], uint32_t item) const {
    const uint32_t lane = threadIdx.x % 32, row = lane % 16, first = (threadIdx.x / 32 - 4) * 16,
                   from = at + query_buffer(item) + C::kQueryAt + first * 128, to = from + row * 128;
#pragma unroll
    for (int k = 0; k < C::kOutDims / 16; k++) {
      uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* pair = out + 8 * k + 4 * (i / 2) + 2 * (i % 2);
        x[i] = To::pack(pair[0] * inverse[i % 2], pair[1] * inverse[i % 2]);
      }
      tiles::store_matrices(to + k / 4 * C::kQueryColumnBytes + (((k % 4 * 2 + lane / 16) ^ (row % 8)) << 4), x);
    }
    tiles::show_to_multiplications();
    __syncwarp();
    if (tiles::is_elected()) {
      const int32_t token = int32_t(w.first_query + a.group.divide(w.first_row + first));
#pragma unroll
      for (int column = 0; column < C::kOutDims / 64; column++)
        tiles::store_box(a.out_map, from + column * C::kQueryColumnBytes, column * 64, w.head * int32_t(a.group.d),
                         token);
      tiles::commit_boxes();
    }
  }
  // Results of item `item` of this block of threads, by boxes if that `may` be and all of the warp's rows are there.
  __device__ __forceinline__ void store(const PrefillItem& w, const float (&out)[kOut], const float (&inverse)[2],
                                        uint32_t item, bool may, int32_t first_row, int dims_from) const {
    if constexpr (C::kLeavesByBoxes) {
      const int32_t first = w.first_row + (int32_t(threadIdx.x) / 32 - 4) * 16;
      if (may && __all_sync(0xffffffffu, first + 16 <= w.rows)) {
        if (!C::kIsF16 || a.out.dtype == KVX_DTYPE_BF16) store_boxes<tiles::Bf16Numbers>(w, out, inverse, item);
        else store_boxes<tiles::F16Numbers>(w, out, inverse, item);
        return;
      }
    }
    store_results(w, out, inverse, first_row, dims_from);
  }

  // What is added up of a row's weights: sums of this thread's keys. A weight is 2 to the power of score * factor -
  // base.
  struct Softened {
    static constexpr float kNoBase = -1e30f;  // nothing was seen yet. Finite: infinity less infinity is no number
    float base[2], sum[2], factor[2];         // factor: of what is softened, log2(e) included
  };

  // This thread's rows of an item are over: their log-sum-exps are stored, and what their results are multiplied by
  // returned. `total`: of the row's weights. `first_row`: of the item's sequence, this thread's first; the other is
  // eight on.
  __device__ __forceinline__ void finish_rows(const PrefillItem& w, const float (&base)[2], float (&total)[2],
                                              int32_t first_row, int dims_from, float (&inverse)[2]) const {
    const float of_values = C::kIsCodes ? scale_of(a.scales[1], w.head, has_one_scale(1)) : 1.f;
    const auto find = [&](int32_t row, int32_t* token, int32_t* head) {
      *token = int32_t(a.group.divide(row)), *head = w.head * int32_t(a.group.d) + row - *token * int32_t(a.group.d);
      return row < w.rows;
    };
    int32_t token, head;
    if (a.lse && dims_from == 0) {  // of a row's four threads the first two store one row each
      const bool is_second = threadIdx.x % 4 == 1;
      const float sum = is_second ? total[1] : total[0];
      if (find(first_row + 8 * is_second, &token, &head) && threadIdx.x % 4 < 2)
        *reinterpret_cast<float*>(a.lse + (w.first_query + token) * a.lse_token + head * a.lse_head) =
            sum != 0.f ? ((is_second ? base[1] : base[0]) + log2f(sum)) * 0.69314718f : -INFINITY;  // NaN stays
    }
    if (a.sinks)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (find(first_row + 8 * h, &token, &head) && total[h] != 0.f)
          total[h] += tiles::exp2_fast(a.sinks[head] * 1.44269504f - base[h]);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      // Without scales that they hold a total is 1 or more: the largest weight was 1 when it was met.
      const float inverse_of = C::kScales == ROW_SCALES ? 1.f / total[h] : tiles::inverse(total[h]);
      inverse[h] = total[h] != 0.f ? of_values * inverse_of : 0.f;
    }
  }
  // Of this thread's own sums.
  __device__ __forceinline__ void finish_sums(const PrefillItem& w, const Softened& x, int32_t first_row, int dims_from,
                                              float (&inverse)[2]) const {
    float total[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      total[h] = x.sum[h] + __shfl_xor_sync(0xffffffffu, x.sum[h], 1);
      total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
    }
    finish_rows(w, x.base, total, first_row, dims_from, inverse);
  }

  // Results are not changed: their registers are written by multiplications alone, or the assembler waits for each.
  __device__ __forceinline__ void store_results(const PrefillItem& w, const float (&out)[kOut],
                                                const float (&inverse)[2], int32_t first_row, int dims_from) const {
    const int t = threadIdx.x % 4;
    char* to[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int32_t row = first_row + 8 * h, token = int32_t(a.group.divide(row)),
                    head = w.head * int32_t(a.group.d) + row - token * int32_t(a.group.d);
      to[h] = row < w.rows ? a.out.data + (w.first_query + token) * a.out.token + int64_t(head) * a.out.head : nullptr;
    }
    if (a.stores_16 && a.out.dtype != KVX_DTYPE_F32) {
      // A lane's row of results, in the order they are stored in, is that of its scores too: lane / 4 and eight on.
      if (a.out.dtype == KVX_DTYPE_BF16) store_16<tiles::Bf16Numbers>(out, inverse, dims_from, to);
      else store_16<tiles::F16Numbers>(out, inverse, dims_from, to);
      return;
    }
#pragma unroll 1  // seldom, and both rows at once would not leave registers for the rest
    for (int h = 0; h < 2; h++) {
      if (!to[h]) continue;
#pragma unroll
      for (int n = 0; n < C::kOutDims / 8; n++) {
        if (dims_from + 8 * n >= a.dims[1]) break;
        const float by = h ? inverse[1] : inverse[0], lo = by * (h ? out[4 * n + 2] : out[4 * n]),
                    hi = by * (h ? out[4 * n + 3] : out[4 * n + 1]);
        const int dim = dims_from + 8 * n + 2 * t;
        if (a.out.dtype == KVX_DTYPE_F32)
          reinterpret_cast<float*>(to[h])[dim] = lo, reinterpret_cast<float*>(to[h])[dim + 1] = hi;
        else
          *reinterpret_cast<uint32_t*>(to[h] + dim * 2) =
              a.out.dtype == KVX_DTYPE_BF16 ? tiles::Bf16Numbers::pack(lo, hi) : tiles::F16Numbers::pack(lo, hi);
      }
    }
  }

  // The loading warpgroup; where the copy engine does the work, as many of its warps as ask for it.
  template <class Filler> __device__ __forceinline__ void fill(Filler& filler) const {
    filler.begin();
    for (uint32_t item = 0; item < num_items; item++) {
      filler.start(items[item]);
      for (int i = 0; i < items[item].num_tiles; i++) filler.fill_next();
    }
  }
  __device__ __forceinline__ void load() const {
    if constexpr (C::kIsCodes) {
      PrefillCodes<Prefill<C>>{*this}.load();
    } else if (a.box > 0) {
      if (threadIdx.x >= tiles::MapFiller<Rings>::kWarps * 32) return;
      tiles::MapFiller<Rings> filler{a.maps,
                                     a.rows,
                                     a.data,
                                     uint32_t(a.box),
                                     {uint32_t(a.row_chunks[0]), uint32_t(a.row_chunks[1])},
                                     rings(),
                                     at + C::kRingsAt,
                                     threadIdx.x / 32};
      fill(filler);
    } else {
      tiles::RowFiller<Rings> filler{a.rows,  a.data,           {uint32_t(a.row_chunks[0]), uint32_t(a.row_chunks[1])},
                                     rings(), at + C::kRingsAt, 1};
      fill(filler);
      filler.finish();
    }
  }

  // What this thread's two rows of an item see.
  struct Limits {
    int32_t limit[2], least_limit, most_low;  // of rows; least and most: tiles between them need no mask
    int32_t left, first;                      // tiles of the item from this one on; its first key
  };
  // `rows_from`: the warpgroup's first row of the item. `row_from`: this thread's; the other is eight on.
  __device__ __forceinline__ Limits find_limits(const PrefillItem& item, int rows_from, int row_from) const {
    Limits x;
    const int32_t from = item.length - item.queries + 1;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int32_t row = item.first_row + row_from + 8 * h;
      if constexpr (C::kElementBytes == 1) {  // in one step: with a branch its registers would not suffice
        const int32_t end = a.is_causal ? from + int32_t(a.group.divide(row)) : item.length;
        x.limit[h] = row >= item.rows ? 0 : end;
      } else {  // in two: in one the assembler has multiplications of f16 wait for each other
        x.limit[h] = row >= item.rows ? 0 : a.is_causal ? from + int32_t(a.group.divide(row)) : item.length;
      }
    }
    const int32_t group_first = item.first_row + rows_from, group_last = min(group_first + 63, item.rows - 1);
    x.least_limit = a.is_causal ? from + int32_t(a.group.divide(group_first)) : item.length;
    x.most_low =
        a.window > 0
            ? int32_t((a.is_causal ? from + int32_t(a.group.divide(max(group_last, 0))) : item.length) - a.window)
            : 0;
    x.left = item.num_tiles, x.first = item.first_tile * C::kKeys;
    return x;
  }

  // Scores of keys that a row does not see are -infinity. `tile`: counts those of all items. `is_whole`: all of its
  // rows are there.
  __device__ __forceinline__ void hide(const PrefillItem& w, const Limits& x, uint32_t tile, bool is_whole,
                                       float (&s)[C::kKeys / 2]) const {
    const int t = threadIdx.x % 4;
    if (x.first < x.most_low || !is_whole) {
      const uint4 valid = *Rings::valid(rings(), tile);
      int32_t low[2];  // first keys that rows see
#pragma unroll
      for (int h = 0; h < 2; h++) low[h] = a.window > 0 ? int32_t(x.limit[h] - a.window) : 0;
      const uint32_t words[4] = {valid.x, valid.y, valid.z, valid.w};
      if (a.rows.kv.errors && w.head == 0 && threadIdx.x == 128) {  // positions whose block is none
        uint32_t missing = 0;
        for (int k = 0; k < C::kKeys / 32; k++)
          missing += __popc(tiles::rows_within(x.first + 32 * k, w.begin, w.length) & ~words[k]);
        if (missing) atomicAdd(a.rows.kv.errors, (unsigned long long)missing);
      }
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int32_t key = 8 * n + 2 * t + e;
          const bool is_valid = words[n / 4] >> (key % 32) & 1;
#pragma unroll
          for (int h = 0; h < 2; h++)
            if (!is_valid || x.first + key >= x.limit[h] || x.first + key < low[h]) s[4 * n + 2 * h + e] = -INFINITY;
        }
    } else if (x.first + C::kKeys > x.least_limit) {  // the usual one: a limit, and nothing missing
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int32_t of_row = x.limit[h] - x.first - 2 * t;
#pragma unroll
        for (int n = 0; n < C::kKeys / 8; n++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (8 * n + e >= of_row) s[4 * n + 2 * h + e] = -INFINITY;
      }
    }
  }

  // Caps scores, in the unit they are in: `factor` makes a score an exponent of two, capped or not. Where `factor` is
  // tiny its inverse is held back from infinity, which a score of 0 would turn into NaN.
  template <int kScores> static __device__ __forceinline__ void cap_scores(float soft_cap, const float (&factor)[2],
                                                                           float (&s)[kScores]) {
    const float cap = soft_cap * 1.44269504f;
    float in[2], back[2];
#pragma unroll
    for (int h = 0; h < 2; h++) in[h] = factor[h] / cap, back[h] = fminf(cap / factor[h], 1e37f);
#pragma unroll
    for (int k = 0; k < kScores; k++) s[k] = tanhf(s[k] * in[k / 2 % 2]) * back[k / 2 % 2];
  }

  // Rows of this thread's scores: r0 = 16 * warp + g and r0 + 8 of its warpgroup's 64.
  //
  // Items are one stream of tiles: while a tile's values are added, the next tile's scores are softened, whichever item
  // it is of.
  __device__ __forceinline__ void multiply() {
    constexpr int kSteps = C::kKeyDims / 16, kKeySteps = C::kKeys / 16;
    using Scores = tiles::Warpgroup<Numbers, C::kKeys>;
    using Out = tiles::Warpgroup<Numbers, C::kOutDims>;
    const int thread = threadIdx.x - 128, group = thread / 128, warp = thread % 128 / 32, lane = thread % 32,
              g = lane / 4, t = lane % 4;
    const int rows_from = C::kSplitsValues ? 0 : group * 64,
              dims_from = C::kSplitsValues ? group * C::kOutDims : 0;  // of this warpgroup
    const int row_from = rows_from + warp * 16 + g;                    // of this thread, in an item
    const PrefillItem* w = items;                                      // whose scores are softened
    uint32_t num_later = num_items - 1;                                // items after it

    Limits sight;
    Softened x;
    const auto scale_of_keys = [&](const PrefillItem& item) {
      return C::kIsCodes ? scale_of(a.scales[0], item.head, has_one_scale(0)) : 1.f;
    };
    const auto begin_item = [&](const PrefillItem& item) {
      sight = find_limits(item, rows_from, row_from);
      const float of_head = scale_of_keys(item);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        x.factor[h] = a.scale * 1.44269504f;
        x.factor[h] *= C::kScales == ROW_SCALES ? of_head : fabsf(of_head);
        if (C::kIsF16 && fits_queries())
          x.factor[h] *= reinterpret_cast<const float*>(shared + C::kGrowAt)[row_from + 8 * h];
        if (C::kIsCodes && x.factor[h] == 0.f) x.factor[h] = 1e-37f;  // a head of zeros: not 0 * infinity
        x.base[h] = Softened::kNoBase, x.sum[h] = 0.f;
      }
    };
    float out[kOut], s[C::kKeys / 2];
    uint32_t p[kKeySteps][4];
    bool adds = false;  // values are: the item's first are what its results begin with
    const uint32_t query = at + C::kQueryAt + rows_from * 128;
    typename Rings::Ring keys = Rings::keys(at + C::kRingsAt);
    typename Rings::ValueRing values = Rings::values(at + C::kRingsAt);
    const bool arrives = thread % 128 == 0;  // one of a warpgroup gives a stage back
    // Copies of rows are shown to multiplications here; other fillers have done so.
    const auto wait_full = [&](const auto& ring) {
      ring.wait_full();
      if (!C::kIsCodes && a.box == 0) tiles::show_to_multiplications();
    };

    // Descriptors count 16 bytes in their low bits: stepping through a tile is one addition.
    uint64_t query_matrix = tiles::matrix_descriptor(query, 16, 1024);
    const uint64_t key_matrix = tiles::matrix_descriptor(keys.stages, 16, 1024);
    const uint64_t value_matrix =
        tiles::matrix_descriptor(values.stages + dims_from / 64 * C::kColumnBytes, C::kColumnBytes, 1024);
    const auto multiply_keys = [&]() {
      const uint64_t from = key_matrix + keys.stage() * uint32_t(Rings::kTileBytes >> 4);
      // Added to here where there are many steps, and not kept in registers for all of them.
      const uint64_t of_queries =
          kSteps > 8 ? tiles::matrix_descriptor(tiles::for_all_lanes(query), 16, 1024) : query_matrix;
      // Of more steps than 16 descriptors are found anew every eight: kept, or stepped through in a loop, they leave
      // too few registers, and multiplications wait for each other.
      uint64_t q = of_queries, key = from;
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
        const uint32_t of_query = ((k / 4) * C::kQueryColumnBytes + (k % 4) * 32) >> 4,
                       of_key = ((k / 4) * C::kColumnBytes + (k % 4) * 32) >> 4;
        if (kSteps > 16 && k % 8 == 0)
          q = tiles::matrix_descriptor(tiles::for_all_lanes(query), 16, 1024),
          key = tiles::matrix_descriptor(tiles::for_all_lanes(keys.tile()), 16, 1024);
        Scores::multiply(s, q + of_query, key + of_key, k > 0);
      }
      tiles::commit_multiplications();
    };
    const auto multiply_values = [&]() {
      const uint64_t from = value_matrix + values.stage() * uint32_t(Rings::kValueTileBytes >> 4);
#pragma unroll
      for (int k = 0; k < kKeySteps; k++)
        Out::multiply_turned(out, p[k], from + uint32_t(k * 16 * 128 >> 4), k > 0 || adds);
      tiles::commit_multiplications();
      adds = true;
    };
    // Scores of the tile whose keys were given back last to weights, in place: powers of two, relative to the row's
    // base. That is the largest score there was when it was set: as long as none is 256 times its weight it stays, and
    // so do earlier sums. Otherwise they have to be multiplied by `shrink`, and this returns true.
    const auto soften = [&](bool is_whole, float(&shrink)[2]) {
      const uint32_t i = keys.step - 1;
      const float* scales = reinterpret_cast<const float*>(shared + C::kScalesAt + i % 4 * C::kScaleBytes);
      // With a scale a row, scores are what weights are powers of: factor and V's scale are in them.
      if constexpr (C::kScales == ROW_SCALES) {
        const auto join_scales = [&](auto caps) {
          const float cap = a.soft_cap * 1.44269504f, in[2] = {x.factor[0] / cap, x.factor[1] / cap};
#pragma unroll
          for (int n = 0; n < C::kKeys / 8; n++) {
            const float4 pair = reinterpret_cast<const float4*>(scales)[4 * n + t];
#pragma unroll
            for (int i = 0; i < 4; i++) {
              float& y = s[4 * n + i];
              y *= i % 2 ? pair.y : pair.x;
              if constexpr (decltype(caps)::value) y = __fmaf_rn(tanhf(y * in[i / 2]), cap, i % 2 ? pair.w : pair.z);
              else y = __fmaf_rn(y, x.factor[i / 2], i % 2 ? pair.w : pair.z);
            }
          }
        };
        if (a.soft_cap > 0.f) join_scales(std::true_type{});
        else join_scales(std::false_type{});
      } else if (a.soft_cap > 0.f) {
        cap_scores(a.soft_cap, x.factor, s);
      }
      hide(*w, sight, i, is_whole, s);
      // Four chains a row: one of 32 dependent steps would take longer than the multiplications it hides behind.
      float tops[2][4], totals[2][4];
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 4; c++) tops[h][c] = s[4 * (c / 2) + 2 * h + c % 2], totals[h][c] = 0.f;
#pragma unroll
      for (int n = 2; n < C::kKeys / 8; n++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) tops[h][n % 2 * 2 + e] = fmaxf(tops[h][n % 2 * 2 + e], s[4 * n + 2 * h + e]);
      bool rises = false;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        tops[h][0] = fmaxf(fmaxf(tops[h][0], tops[h][1]), fmaxf(tops[h][2], tops[h][3]));
        if (C::kScales != ROW_SCALES) tops[h][0] *= x.factor[h];
        rises |= tops[h][0] > x.base[h] + 8.f;
      }
      rises = __any_sync(0xffffffffu, rises);
      if (rises) {  // seldom, once the largest scores were met
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float largest = fmaxf(tops[h][0], x.base[h]);
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
          largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
          shrink[h] = tiles::exp2_fast(x.base[h] - largest), x.base[h] = largest;
          x.sum[h] *= shrink[h];
        }
      }
#pragma unroll
      for (int n = 0; n < C::kKeys / 8; n++) {
        float2 without;  // V's scale
        if constexpr (C::kScales == ROW_SCALES)
          without = reinterpret_cast<const float2*>(scales + 2 * C::kKeys)[4 * n + t];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            float& y = s[4 * n + 2 * h + e];
            float& total = totals[h][n % 2 * 2 + e];
            if constexpr (C::kScales == ROW_SCALES) {
              y = tiles::exp2_fast(y - x.base[h]);
              total = __fmaf_rn(y, e ? without.y : without.x, total);
            } else {
              y = tiles::exp2_fast(__fmaf_rn(y, x.factor[h], -x.base[h]));
              total += y;
            }
          }
      }
#pragma unroll
      for (int h = 0; h < 2; h++) x.sum[h] += (totals[h][0] + totals[h][1]) + (totals[h][2] + totals[h][3]);
      return rises;
    };
    const auto pack = [&]() {
#pragma unroll
      for (int k = 0; k < kKeySteps; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[k][i] = Numbers::pack(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
    };

    constexpr bool kAsksEarly = C::kQueryBuffers == 2;
    ask_queries(*w, 0);
    finish_queries(group, scale_of_keys(*w), 0);
    begin_item(*w);
    if (kAsksEarly && num_later) {
      // All have seen the first queries arrive: whoever came after the second did would wait for the third.
      tiles::meet(3 + C::kGroups + group, 128);
      ask_queries(w[1], 1);
    }
    wait_full(keys);
    tiles::begin_multiplications();
    multiply_keys();
    tiles::wait_multiplications<0>();
    tiles::hold(s);
    bool is_whole = Rings::is_full(*Rings::valid(rings(), keys.step));
    keys.give_back(arrives);
    if (!kAsksEarly && sight.left == 1 && num_later) ask_queries(w[1], 1);
    float shrink[2];
    soften(is_whole, shrink);
    pack();
    if (group == C::kGroups - 1) tiles::pass(3, 256);
    bool is_owed = false;  // queries that were not asked for, since results had to leave their place
    const auto ask_owed = [&]() {
      if (!C::kLeavesByBoxes || !is_owed) return;
      tiles::wait_boxes_read();
      tiles::meet(3 + C::kGroups + group, 128);
      ask_queries(w[1], num_items - num_later);
      is_owed = false;
    };
    for (;;) {  // keys are a tile ahead of values
      const bool ends = sight.left == 1;
      if (ends) {
        if (num_later == 0) break;
        const uint32_t next = num_items - num_later;
        finish_queries(group, scale_of_keys(w[1]), next);
        if (C::kQueryBuffers == 2) query_matrix = tiles::matrix_descriptor(query + query_buffer(next), 16, 1024);
      }
      wait_full(keys);
      if (!ends) ask_owed();  // not while multiplications are under way: the assembler would wait for each of them
      tiles::hold(s), tiles::hold(out);
      tiles::meet(3 + group, 256);  // they take turns: one multiplies while others soften
      tiles::begin_multiplications();
      multiply_keys();
      wait_full(values);
      multiply_values();
      tiles::pass(group + 1 == C::kGroups ? 3 : 4 + group, 256);
      is_whole = Rings::is_full(*Rings::valid(rings(), keys.step));
      float inverse[2];
      bool by_boxes = false;
      if (ends) {
        finish_sums(*w, x, w->first_row + row_from, dims_from, inverse);
        num_later--, begin_item(*++w);
        // An item of one tile has no time for its successor's queries to be late.
        by_boxes = C::kLeavesByBoxes && a.has_out_map && sight.left > 1;
        if (kAsksEarly && num_later && !by_boxes) ask_queries(w[1], num_items - num_later);
      } else {
        sight.left--, sight.first += C::kKeys;
      }
      tiles::wait_multiplications<1>();
      tiles::hold(s);
      keys.give_back(arrives);
      if (!kAsksEarly && sight.left == 1 && num_later) ask_queries(w[1], num_items - num_later);
      const bool shrinks = soften(is_whole, shrink);
      // Softened before the wait, not after: that is the overlap. A sum is never negative; that it might be, and be
      // stored, keeps the assembler from waiting first (13.0 moves the wait up to where registers suit it).
      tiles::store_if_negative(at + C::kWorkAt, x.sum[0] + x.sum[1]);
      tiles::wait_multiplications<0>();
      tiles::hold(out);
      values.give_back(arrives);
      if (ends) {
        store(w[-1], out, inverse, num_items - 2 - num_later, by_boxes, w[-1].first_row + row_from, dims_from);
        adds = false, is_owed = by_boxes && num_later > 0;
      } else if (shrinks) {
#pragma unroll
        for (int k = 0; k < kOut; k++) out[k] *= shrink[k / 2 % 2];
      }
      pack();
    }
    if (group == 0) tiles::meet(3, 256);  // the last one's last word
    wait_full(values);
    tiles::hold(out);
    tiles::begin_multiplications();
    multiply_values();
    tiles::wait_multiplications<0>();
    tiles::hold(out);
    float inverse[2];
    finish_sums(*w, x, w->first_row + row_from, dims_from, inverse);
    if (C::kLeavesByBoxes) tiles::meet(3 + C::kGroups + group, 128);  // nobody multiplies the queries any more
    store(*w, out, inverse, num_items - 1, a.has_out_map, w->first_row + row_from, dims_from);
    if (C::kLeavesByBoxes) tiles::wait_boxes();
  }
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) prefill(const __grid_constant__ PrefillArgs a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char raw[];
  char* shared = raw + (1024 - (tiles::shared_address(raw) & 1023)) % 1024;
  const uint32_t at = tiles::shared_address(shared);
  wait_for_previous();
  PrefillItem* items = reinterpret_cast<PrefillItem*>(shared + C::kItemsAt);
  __shared__ uint32_t num_items;
  if (threadIdx.x < 32) {
    const uint32_t found = find_items<C::kRows, C::kKeys>(a, items);
    if (threadIdx.x == 0) num_items = found;
  }
  if (threadIdx.x == 32) {
    const int fills = !C::kIsCodes && a.box > 0 ? tiles::MapFiller<typename C::Rings>::kArrivals : 128;
    C::Rings::keys(at + C::kRingsAt).init(fills, C::kGroups * tiles::arrivals_of(128));
    C::Rings::values(at + C::kRingsAt).init(fills, C::kGroups * tiles::arrivals_of(128));
    for (int group = 0; group < C::kGroups; group++) tiles::init_barrier(at + C::kQueryBarriersAt + group * 8, 1);
    tiles::show_barriers();
  }
  __syncthreads();
  if (num_items == 0) return;
  Prefill<C> p{a, shared, at, items, num_items};
  if (threadIdx.x < 128) {
    tiles::give_registers<C::kLoadRegisters>();
    p.load();
  } else {
    tiles::take_registers<C::kMultiplyRegisters>();
    p.multiply();
  }
#endif
}

}  // namespace cuda
}  // namespace kvx
