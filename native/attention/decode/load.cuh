// How a warp of the decode kernel keeps tiles on their way: it walks its worker's share of them, finds their rows
// through the table, and copies its slice of each row into its ring.
#pragma once
#include "attention/decode/config.cuh"

namespace kvx {
namespace cuda {

// Where a worker stands in the line of tiles.
struct Cursor {
  int32_t seq, head, tile;  // tile of this (seq, head)
  SeqRange range;
  tiles::OwnCache own;  // kOwnCaches alone
};

// Seldom, and apart from the kernels' own code, so that it costs other calls nothing: 32 rows that lie at multiples of
// `unit` bytes, fewer than 16, in pieces of that. A lane has a row's place; in shared memory rows are `row_bytes`
// apart.
static __device__ __noinline__ void copy_pieces(uint32_t to, const char* data, uint32_t of_mine, uint32_t valid,
                                                uint32_t bytes, uint32_t unit, uint32_t row_bytes) {
  const uint32_t pieces = bytes / unit;  // of a row: up to 64
  if (pieces == 0) return;
  const uint32_t inverse = ((1u << 20) + pieces - 1) / pieces;
#pragma unroll 4
  for (uint32_t j = 0; j < pieces; j++) {
    const uint32_t i = j * 32 + threadIdx.x % 32, r = i * inverse >> 20, inside = (i - r * pieces) * unit,
                   mix = row_bytes % 128 ? r >> 1 & 3 : r & 7;  // tiles::Swizzle
    const uint32_t place = to + r * row_bytes + ((inside / 16 ^ mix) << 4) + inside % 16;
    const char* from = data + uint64_t(__shfl_sync(0xffffffffu, of_mine, r)) * unit + inside;
    const int wanted = valid >> r & 1 ? int(unit) : 0;
    if (unit == 8) tiles::copy_8(place, from, wanted);
    else tiles::copy_4(place, from, wanted);
  }
}
// A row's scale where it is not copied: of f16, or 1 where a head has one, which multiplies elsewhere.
static __device__ __noinline__ void store_odd_scale(float* to, const char* from, bool is_f16, bool is_there) {
  *to = !is_f16 ? 1.f : is_there ? __half2float(*reinterpret_cast<const __half*>(from)) : 0.f;
}

template <class C> struct DecodeLoads {
  using Rows = typename C::Rows;
  using Groups = typename C::Groups;
  static constexpr int kRowsPerLane = C::kTokens / 32;
  static constexpr bool kTakesOdd = C::kTakesOdd;
  static constexpr int kKeySlice = C::kKeyDims * Rows::kBits / 8, kValueSlice = C::kValueDims * Rows::kBits / 8;

  const DecodeArgs& a;
  const int member, lane;  // of a team's warps, and of its own lanes
  typename C::Ring ring;
  const int key_chunks, value_chunks;  // of the slice: how many whole chunks of 16 bytes rows have

  __device__ __forceinline__ DecodeLoads(const DecodeArgs& args, char* shared, int of_member)
      : a(args),
        member(of_member),
        lane(threadIdx.x % 32),
        ring(shared + of_member * C::Ring::kBytes),
        key_chunks(bytes_of(0) / 16),
        value_chunks(bytes_of(1) / 16) {}

  // Of a row in this warp's slice.
  __device__ __forceinline__ int bytes_of(int plane) const {
    const int slice = plane ? kValueSlice : kKeySlice;
    if (C::kIsLatent) return slice;
    return min(max(a.dims[plane] * Rows::kBits / 8 - member * slice, 0), slice);
  }

  // What of K is past the end of rows meets queries of zero, so it must be numbers: zeros from the start. Copies write
  // a row's own bytes alone.
  __device__ __forceinline__ void clear() const {
    if (key_chunks == C::kKeyChunks) return;
    for (int stage = 0; stage < C::Ring::kStages; stage++)
      for (int i = lane; i < C::kTokens * C::kKeyChunks; i += 32)
        if (i % C::kKeyChunks >= key_chunks)
          tiles::store_shared_16(
              ring.tile_at(stage) + tiles::Swizzle<C::kKeyRowBytes>::at(i / C::kKeyChunks, i % C::kKeyChunks),
              make_uint4(0, 0, 0, 0));
    __syncwarp();
  }

  // What a cursor knows of its sequence. Read when it comes to it, not once a tile.
  __device__ __forceinline__ void enter(Cursor* c, int32_t length, int32_t queries) const {
    c->range = seq_range(length, queries, a.window, a.is_causal, C::kTokens);
    if constexpr (C::kOwnCaches) c->own = tiles::find_own_cache(a.rows, c->seq, a.workspace);
  }
  __device__ __forceinline__ void step(Cursor* c) const {
    if (++c->tile < c->range.num_tiles) return;
    c->tile = 0;
    if ((c->head += a.plan.lines) < a.num_kv_heads) return;
    c->head -= a.num_kv_heads;  // the line's first: lines divide the heads
    // Sequences without rows of ours have no tiles (make_plan); whoever steps knows that tiles are left.
    SeqQueries queries;
    do {
      if (++c->seq >= a.num_seqs) return;
      queries = queries_of(a, c->seq);
    } while (a.cu_seqlens && rows_of(a, queries) == 0);
    enter(c, clamped_length(a.rows.kv, c->seq, a.max_seq_len), queries.count);
  }

  struct Asked {
    tiles::RowAsked row[kRowsPerLane];
  };
  __device__ __forceinline__ Asked ask(const Cursor& c) const {
    Asked f;
    const uint32_t first = uint32_t(c.range.begin / C::kTokens + c.tile) * C::kTokens;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; i++) {
      const uint32_t position = first + i * 32 + lane;
      if constexpr (C::kOwnCaches)
        f.row[i] = tiles::RowAsked{
            position >= uint32_t(c.range.begin) && position < uint32_t(c.range.end) ? c.own.id : -1, position};
      else f.row[i] = tiles::ask_row(a.rows, c.seq, position, c.range.begin, c.range.end);
    }
    return f;
  }

  // 32 rows' chunks from kFirst to kEnd, of those `chunks` that are there (kIsWhole: all). Lanes hold a row's place
  // each and hand it round. Places in shared memory are alike every eight rows.
  template <bool kIsFull, bool kIsWhole, int kRowBytes, int kFirst, int kEnd> __device__ __forceinline__ void
  load_chunks(uint32_t to, const char* data, uint32_t of_mine, uint32_t valid, uint32_t chunks) const {
    constexpr int kLeft = kEnd - kFirst,
                  kWidth = kLeft >= 16  ? 16
                           : kLeft >= 8 ? 8
                           : kLeft >= 4 ? 4
                           : kLeft >= 2 ? 2
                                        : 1,
                  kRowsAtOnce = 32 / kWidth, kSteps = kRowsAtOnce >= 8 ? 1 : 8 / kRowsAtOnce;
    const uint32_t chunk = kFirst + lane % kWidth, sub = lane / kWidth;
    const char* from = data + chunk * 16;
    asm("" : "+l"(from));  // in a register: an address is one instruction then, and not three
#pragma unroll
    for (int j = 0; j < 32 / kRowsAtOnce; j++) {
      const uint32_t r = j * kRowsAtOnce + sub;
      const uint32_t offset = __shfl_sync(0xffffffffu, of_mine, r);
      const uint32_t place = to + tiles::Swizzle<kRowBytes>::at(j % kSteps * kRowsAtOnce + sub, chunk) +
                             j / kSteps * kSteps * kRowsAtOnce * kRowBytes;
      if (!kIsWhole && chunk >= chunks) continue;
      if constexpr (kIsFull) tiles::copy_16(place, from + uint64_t(offset) * 16);
      else tiles::copy_16(place, from + uint64_t(offset) * 16, valid >> r & 1 ? 16 : 0);
    }
    if constexpr (kLeft > kWidth)
      load_chunks<kIsFull, kIsWhole, kRowBytes, kFirst + kWidth, kEnd>(to, data, of_mine, valid, chunks);
  }

  __device__ __forceinline__ const char* slice_of(int plane, const tiles::OwnCache& own) const {
    return (C::kOwnCaches ? own.data[plane] : a.data[plane]) + member * (plane ? kValueSlice : kKeySlice);
  }

  template <bool kIsFull, bool kIsWhole> __device__ __forceinline__ void load_rows(uint32_t at,
                                                                                   const tiles::RowPlace& mine,
                                                                                   uint32_t valid, uint32_t first_row,
                                                                                   const tiles::OwnCache& own) const {
    load_chunks<kIsFull, kIsWhole, C::kKeyRowBytes, 0, C::kKeyChunks>(
        at + first_row * C::kKeyRowBytes, slice_of(0, own), mine.offset[0], valid, key_chunks);
    load_chunks<kIsFull, kIsWhole, C::kValueRowBytes, 0, C::kValueChunks>(
        at + C::kKeyBytes + first_row * C::kValueRowBytes, slice_of(1, own), mine.offset[1], valid, value_chunks);
  }

  // Where the scales of a row begin; of one that is not there, some that are.
  __device__ __forceinline__ const char* scales_of(int plane, int32_t block, uint32_t inside, int32_t head) const {
    const int32_t(&steps)[3] = a.scale_steps[plane];
    const char* of_block = a.scales[plane].data + int64_t(max(block, 0)) * steps[0];
    asm("" : "+l"(of_block));
    return of_block + (int32_t(inside) * steps[1] + head * steps[2]);
  }

  // Puts a tile's loads under way.
  __device__ __forceinline__ void load(const Asked& f, int32_t head, const tiles::OwnCache& own) {
    const uint32_t at = ring.tile_at(ring.filling);
#pragma unroll
    for (int i = 0; i < kRowsPerLane; i++) {
      const tiles::RowPlace mine = tiles::place_row(a.rows, f.row[i], head);
      const uint32_t valid = __ballot_sync(0xffffffffu, mine.block >= 0);
      const bool is_whole = key_chunks == C::kKeyChunks && value_chunks == C::kValueChunks;
      if (kTakesOdd && a.unit < 16) {
        copy_pieces(at + i * 32 * C::kKeyRowBytes, slice_of(0, own), mine.offset[0], valid, bytes_of(0), a.unit,
                    C::kKeyRowBytes);
        copy_pieces(at + C::kKeyBytes + i * 32 * C::kValueRowBytes, slice_of(1, own), mine.offset[1], valid,
                    bytes_of(1), a.unit, C::kValueRowBytes);
      } else if (Rows::kBits <= 8 && valid == 0xffffffffu && is_whole)
        load_rows<true, true>(at, mine, valid, i * 32, own);
      else if (Rows::kBits == 8 && valid == 0xffffffffu) load_rows<true, false>(at, mine, valid, i * 32, own);
      else load_rows<false, C::kIsLatent>(at, mine, valid, i * 32, own);
      if (C::kScales == ROW_SCALES && member == 0) {  // who tells the others of its team
#pragma unroll
        for (int plane = 0; plane < 2; plane++) {
          const uint32_t place = C::kTileBytes + (plane * C::kTokens + i * 32 + lane) * 4;
          const ScaleParams& s = a.scales[plane];
          const char* from = scales_of(plane, mine.block, f.row[i].inside, head);
          if (!kTakesOdd || (!a.has_one_scale[plane] && s.dtype == KVX_DTYPE_F32))
            tiles::copy_4(at + place, from, mine.block >= 0 ? 4 : 0);
          else
            store_odd_scale(reinterpret_cast<float*>(ring.tile(ring.filling) + place), from, !a.has_one_scale[plane],
                            mine.block >= 0);
        }
      }
      if constexpr (C::kScales == GROUP_SCALES)
#pragma unroll
        for (int plane = 0; plane < 2; plane++) {
          const ScaleParams& s = a.scales[plane];
          Groups::copy(plane, s, a.scale_words[plane], mine.block >= 0,
                       scales_of(plane, mine.block, f.row[i].inside, head), head, member,
                       ring.tile(ring.filling) + C::kTileBytes, i * 32 + lane);
        }
      if (lane == 0) ring.note(ring.filling)[i] = valid;
    }
    ring.end_fill();
  }
};

}  // namespace cuda
}  // namespace kvx
