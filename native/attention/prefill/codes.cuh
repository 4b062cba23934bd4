// Prefill over caches of eight and four bits: how codes become the 16-bit tiles that are multiplied, and queries f16.
//
// Codes are f16 without their scales, exactly. One scale a head joins the row's factor (K) and the final division (V).
// With scales a row, the tile's 128 keys have theirs in shared memory: K's multiply scores; V's join the exponent as
// logarithms, and the sum of weights divides by them again (attention/decode/decode.cuh does the same). Where a row has
// several scales, elements become bf16 with them: exactly, if the scale is e4m3 or a power of two.
#pragma once
#include <type_traits>

#include "attention/any/unit.cuh"
#include "attention/prefill/items.cuh"
#include "tiles/block_rows.cuh"
#include "tiles/elements.cuh"

namespace kvx {
namespace cuda {

// Rows of codes. Which of several types they are is asked at run time, once, by who widens them: kernels are the same
// otherwise.
struct Bytes {  // e4m3, e5m2, int8
  using Numbers = tiles::F16Numbers;
  static constexpr int kBits = 8;
};
struct BytesAsBf16 {  // the same
  using Numbers = tiles::Bf16Numbers;
  static constexpr int kBits = 8;
};
struct Nibbles {  // int4
  using Numbers = tiles::F16Numbers;
  static constexpr int kBits = 4;
};
struct BytesWithScales {  // mxfp8
  using Numbers = tiles::Bf16Numbers;
  static constexpr int kBits = 8;
};
struct NibblesWithScales {  // nvfp4, mxfp4, int4 by groups
  using Numbers = tiles::Bf16Numbers;
  static constexpr int kBits = 4;
};

// How a chunk of 16 bytes is widened: `operator()` makes the 16 bytes that part `i` of it becomes.
template <class Convert> struct WidenBytes {
  __device__ __forceinline__ uint4 operator()(const uint4& raw, int i) const {
    const uint2 x = Convert::four(i ? raw.z : raw.x), y = Convert::four(i ? raw.w : raw.y);
    return make_uint4(x.x, x.y, y.x, y.y);
  }
};
__device__ __forceinline__ uint32_t word_of(const uint4& raw, int i) {
  return i == 0 ? raw.x : i == 1 ? raw.y : i == 2 ? raw.z : raw.w;
}
template <int kType> struct WidenBytesToBf16 {
  __device__ __forceinline__ uint4 operator()(const uint4& raw, int i) const {
    const uint32_t words[2] = {word_of(raw, 2 * i), word_of(raw, 2 * i + 1)};
    uint32_t pairs[4];
    decode_pairs<8>(words, kType, pairs);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};
struct WidenS4 {
  __device__ __forceinline__ uint4 operator()(const uint4& raw, int i) const {
    const uint32_t flipped = word_of(raw, i) ^ 0x88888888u;
    uint32_t apart[4];  // elements j and j + 4. 1024 + x has an x under 16 in its low bits
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const uint32_t bits = (flipped >> 4 * j & 0x000f000fu) | 0x64006400u;
      const __half2 moved = __hsub2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(1032.f));
      apart[j] = *reinterpret_cast<const uint32_t*>(&moved);
    }
    return make_uint4(__byte_perm(apart[0], apart[1], 0x5410), __byte_perm(apart[2], apart[3], 0x5410),
                      __byte_perm(apart[0], apart[1], 0x7632), __byte_perm(apart[2], apart[3], 0x7632));
  }
};

// Below, with the scales of a chunk, which stand at `scales`; `sign` flips them.
__device__ __forceinline__ uint4 scaled_bf16(const uint32_t (&pairs)[4], uint32_t scale) {
  return make_uint4(multiply_bf16(pairs[0], scale), multiply_bf16(pairs[1], scale), multiply_bf16(pairs[2], scale),
                    multiply_bf16(pairs[3], scale));
}
// A power of two as a pair of bf16. Its first code and its last, 2^-127 and NaN, are not what its bits say.
__device__ __forceinline__ uint32_t e8m0_pair(uint32_t code) {
  return (code == 0 ? 0x0040u : code == 255 ? 0x7fffu : code << 7) * 0x10001u;
}
struct WidenNvfp4 {
  static constexpr int kScaleBytes = 2;  // of a chunk
  uint32_t scale[2];
  __device__ __forceinline__ WidenNvfp4(const char* scales, uint32_t sign) {
    const uint32_t two = tiles::e4m3_to_f16(*reinterpret_cast<const uint16_t*>(scales));
    const float2 x = __half22float2(*reinterpret_cast<const __half2*>(&two));
    scale[0] = tiles::Bf16Numbers::pack(x.x, x.x) ^ sign, scale[1] = tiles::Bf16Numbers::pack(x.y, x.y) ^ sign;
  }
  __device__ __forceinline__ uint4 operator()(const uint4& raw, int i) const {
    const uint32_t word = word_of(raw, i);
    uint32_t pairs[4];
    decode_pairs<4>(&word, KVX_DTYPE_E2M1, pairs);
    return scaled_bf16(pairs, scale[i / 2]);
  }
};
struct WidenMxfp4 {
  static constexpr int kScaleBytes = 1;
  uint32_t scale;
  __device__ __forceinline__ WidenMxfp4(const char* scales, uint32_t sign)
      : scale(e8m0_pair(*reinterpret_cast<const uint8_t*>(scales)) ^ sign) {}
  __device__ __forceinline__ uint4 operator()(const uint4& raw, int i) const {
    const uint32_t word = word_of(raw, i);
    uint32_t pairs[4];
    decode_pairs<4>(&word, KVX_DTYPE_E2M1, pairs);
    return scaled_bf16(pairs, scale);
  }
};
// Rounded once: a product of a code and an f16 has more digits than bf16.
struct WidenS4Groups {
  static constexpr int kScaleBytes = 2;
  float scale;
  __device__ __forceinline__ WidenS4Groups(const char* scales, uint32_t sign) {
    scale = __half2float(*reinterpret_cast<const __half*>(scales));
    if (sign) scale = -scale;
  }
  __device__ __forceinline__ uint4 operator()(const uint4& raw, int i) const {
    const uint32_t word = word_of(raw, i);
    uint32_t pairs[4];
    decode_pairs<4>(&word, KVX_DTYPE_S4, pairs);
#pragma unroll
    for (int j = 0; j < 4; j++)
      pairs[j] = tiles::Bf16Numbers::pack(__uint_as_float(pairs[j] << 16) * scale,
                                          __uint_as_float(pairs[j] & 0xffff0000u) * scale);
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
};
struct WidenMxfp8 {
  static constexpr int kScaleBytes = 0;  // half a scale: two chunks share one
  uint32_t scale;
  __device__ __forceinline__ WidenMxfp8(const char* scales, uint32_t sign)
      : scale(e8m0_pair(*reinterpret_cast<const uint8_t*>(scales)) ^ sign) {}
  __device__ __forceinline__ uint4 operator()(const uint4& raw, int i) const {
    const uint32_t words[2] = {word_of(raw, 2 * i), word_of(raw, 2 * i + 1)};
    uint32_t pairs[4];
    decode_pairs<8>(words, KVX_DTYPE_F8_E4M3, pairs);
    return scaled_bf16(pairs, scale);
  }
};

// The loading warpgroup. K and V have a buffer of raw bytes each, and a thread widens the chunks it has copied itself:
// nobody is waited for between the two. A plane's next bytes are on their way from the moment its buffer has been read
// until the other plane's have been widened and a stage is free.
//
// A thread has chunk c (16 bytes, which become two chunks of 16-bit elements, or four) of rows r + kRowsAtOnce * j.
// Eight neighbours have four chunks of two rows (two of four), so that the wide chunks they store, every other one of a
// row (every fourth), meet all banks. Chunks past the end of rows are zeros from the start, and never copied.
template <class P> struct PrefillCodes {
  using C = typename P::Config;
  using Rows = typename C::Rows;
  using Rings = typename C::Rings;
  static constexpr int kBits = Rows::kBits, kBecomes = 16 / kBits, kNeighbours = kBits == 8 ? 4 : 2,
                       kNeighbourRows = 8 / kNeighbours;
  // Of a part of a row: rows of more than 16 chunks have several.
  static constexpr int kParts = C::kKeyDims * kBits / 128 > 16 ? C::kKeyDims *kBits / 2048 : 1,
                       kPartBytes = 2 * kBecomes * C::Rings::kColumnBytes;  // between parts of a tile
  static constexpr int kChunks = C::kKeyDims * kBits / 128 / kParts,
                       kRowsAtOnce = kChunks * 32 < 128 ? 32 : 128 / kChunks / 8 * 8, kMine = C::kKeys / kRowsAtOnce,
                       kCopying = kChunks * kRowsAtOnce;  // threads that copy
  static_assert(kRowsAtOnce >= 8 && kChunks % kNeighbours == 0 && kMine % 4 == 0,
                "a thread's rows are alike to the swizzle");
  // Wide rows leave no room for raw bytes beside the stages: a thread copies a chunk to where the first of those it
  // becomes will lie.
  static constexpr bool kInPlace = C::kRawBytes == 0;
  static constexpr int kStep = kInPlace ? kRowsAtOnce * 128 : kCopying * 16;  // from a thread's raw chunk to its next
  const P& p;

  // Asked for anew where it is needed: what follows from it would take registers all along.
  static __device__ __forceinline__ uint32_t own_thread() {
    uint32_t x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x % 128;
  }
  static __device__ __forceinline__ uint32_t chunk_of(uint32_t thread) {
    return thread % kNeighbours + thread / 8 % (kChunks / kNeighbours) * kNeighbours;
  }
  static __device__ __forceinline__ uint32_t row_of(uint32_t thread) {
    return thread / (kNeighbourRows * kChunks) * kNeighbourRows + thread / kNeighbours % kNeighbourRows;
  }
  // Where a thread's first chunk of a part is widened to in a stage, and where it lies raw.
  static __device__ __forceinline__ uint32_t wide(uint32_t thread, uint32_t tile_at) {
    return tile_at + P::chunk_at(row_of(thread), kBecomes * chunk_of(thread));
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

  // How a call's rows are loaded. Odd ones lie at multiples of fewer than 16 bytes, or have scales of f16, or one of a
  // head beside others of rows: what that takes would cost the usual ones 3 to 12 %. kOf: what `code_type` is, or
  // kAsked, which odd ones ask for in every tile.
  static constexpr int kAsked = -1;
  template <int kOf_, bool kIsOdd_> struct Way {
    static constexpr int kOf = kOf_;
    static constexpr bool kIsOdd = kIsOdd_;
  };
  __device__ __forceinline__ bool is_odd() const {
    bool odd = p.a.unit < 16;
    for (int plane = 0; plane < 2 && C::kScales == ROW_SCALES; plane++)
      odd |= p.a.has_one_scale[plane] || p.a.scales[plane].dtype != KVX_DTYPE_F32;
    return odd;
  }
  __device__ __forceinline__ int code_type() const {
    return std::is_same<Rows, NibblesWithScales>::value ? p.a.scales[0].dtype : p.a.type;
  }

  // A tile's rows, for all: a thread finds one. Then the next is asked for. `tile` counts those of all items.
  template <class Way> __device__ __forceinline__ void find(Cursor* c, uint32_t tile) const {
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
        const uint32_t to = C::kScalesAt + tile % 4 * C::kScaleBytes + thread / 2 * 16 + plane * 8 + thread % 2 * 4;
        if (Way::kIsOdd && p.a.has_one_scale[plane])
          *reinterpret_cast<float*>(p.shared + to) = 1.f;  // it multiplies elsewhere
        else if (!Way::kIsOdd || s.dtype == KVX_DTYPE_F32) tiles::copy_4(p.at + to, from, is_there ? 4 : 0);
        else
          *reinterpret_cast<float*>(p.shared + to) =
              is_there ? __half2float(*reinterpret_cast<const __half*>(from)) : 0.f;
      }
    }
    if constexpr (C::kScales == GROUP_SCALES)
      if (has_row) copy_group_scales(c->asked.inside, row.block, head, tile);
    const uint32_t there = __ballot_sync(0xffffffffu, is_there);
    if (thread % 32 == 0)
      reinterpret_cast<uint32_t*>(Rings::valid(p.rings(), tile))[thread / 32] = has_row ? there : ~0u;
    tiles::meet(1, 128);
    if (++c->tile == c->item->num_tiles) c->item++, c->tile = 0;
    ask(c);
  }

  // [K, V][row] of a tile: kScaleRow bytes a row, zeros where there are no scales.
  __device__ __forceinline__ char* group_scales(uint32_t tile, int plane) const {
    return p.shared + C::kScalesAt + tile % 4 * C::kScaleBytes + plane * C::kKeys * C::kScaleRow;
  }
  __device__ __forceinline__ void copy_group_scales(uint32_t inside, int32_t block, int32_t head, uint32_t tile) const {
    const bool is_there = block >= 0;
#pragma unroll
    for (int plane = 0; plane < 2; plane++) {
      const ScaleParams& s = p.a.scales[plane];
      const char* from = is_there ? s.data + block * s.block + inside * s.token + head * s.head : s.data;
      char* to = group_scales(tile, plane) + own_thread() * C::kScaleRow;
      const int bytes = s.dtype == KVX_DTYPE_F16 ? 2 : 1, there = is_there ? int(s.num_groups) : 0;
      if (p.a.scale_words[plane]) {
#pragma unroll
        for (int i = 0; i < C::kScaleRow / 4; i++)
          tiles::copy_4(tiles::shared_address(to + 4 * i), from + 4 * i, 4 * i < there * bytes ? 4 : 0);
        continue;
      }
#pragma unroll 1
      for (int i = 0; i < C::kScaleRow / bytes; i++)
        if (bytes == 1) to[i] = i < there ? from[i * s.group] : char(0);
        else
          reinterpret_cast<uint16_t*>(to)[i] =
              i < there ? *reinterpret_cast<const uint16_t*>(from + i * s.group) : uint16_t(0);
    }
  }

  // A thread's chunks of a part of a row; below, of all parts.
  template <bool kIsFull> __device__ __forceinline__ void copy_rows(uint32_t tile, int plane, uint32_t tile_at,
                                                                    int part) const {
    const uint32_t thread = own_thread(), to = raw(plane, thread, tile_at) + part * kPartBytes;
    const char* data = p.a.data[plane] + chunk_of(thread) * 16 + part * 256;
    asm volatile("" : "+l"(data));  // added up here: an address below is one instruction
    Rings::template copy_rows<kMine, kStep>(
        to, data, Rings::offsets(p.rings(), tile) + plane * C::kKeys + row_of(thread) * kMine, kIsFull);
  }
  // Rows that lie at multiples of fewer bytes; a chunk's end may be past theirs.
  __device__ __forceinline__ void copy_pieces(uint32_t tile, int plane, uint32_t tile_at, int part) const {
    const uint32_t thread = own_thread(), to = raw(plane, thread, tile_at) + part * kPartBytes,
                   from = chunk_of(thread) * 16 + part * 256;
    const uint32_t* offsets = Rings::offsets(p.rings(), tile) + plane * C::kKeys + row_of(thread) * kMine;
    const uint32_t unit = p.a.unit, there = p.a.dims[plane] * kBits / 8 - from;
#pragma unroll 1
    for (int j = 0; j < kMine; j++) {
      const bool is_row = offsets[j] != Rings::kNoRow;
      const char* row = p.a.data[plane] + (is_row ? uint64_t(offsets[j]) * unit + from : 0);
#pragma unroll 1
      for (uint32_t at = 0; at < 16; at += unit) {
        const int wanted = is_row && at < there ? int(unit) : 0;
        if (unit == 8) tiles::copy_8(to + j * kStep + at, row + at, wanted);
        else tiles::copy_4(to + j * kStep + at, row + at, wanted);
      }
    }
  }
  __device__ __forceinline__ bool is_past_rows(int plane, int part) const {
    return chunk_of(own_thread()) + part * 16 >= uint32_t(plane ? p.a.row_chunks[1] : p.a.row_chunks[0]);
  }
  __device__ __forceinline__ bool copies() const { return kCopying == 128 || own_thread() < uint32_t(kCopying); }
  // A chunk of zeros stays one when it is widened.
  __device__ __forceinline__ void clear(int plane, uint32_t stages) const {
    if (!copies()) return;
#pragma unroll 1
    for (int stage = 0; stage < (kInPlace ? C::kStages : 1); stage++)
#pragma unroll 1
      for (int j = 0; j < kParts * kMine; j++)
        if (is_past_rows(plane, j / kMine))
          tiles::copy_16(
              raw(plane, own_thread(), stages + stage * Rings::kTileBytes) + j / kMine * kPartBytes + j % kMine * kStep,
              p.a.data[0], 0);
  }
  template <class Way> __device__ __forceinline__ void copy(uint32_t tile, int plane, uint32_t tile_at) const {
    if (!copies()) return;
#pragma unroll
    for (int part = 0; part < kParts; part++) {
      if (is_past_rows(plane, part)) continue;
      if (Way::kIsOdd && p.a.unit < 16) copy_pieces(tile, plane, tile_at, part);
      else if (Rings::is_full(*Rings::valid(p.rings(), tile))) copy_rows<true>(tile, plane, tile_at, part);
      else copy_rows<false>(tile, plane, tile_at, part);
    }
  }

  // `widener` says how a thread's row is widened.
  template <class Widener> __device__ __forceinline__ void widen_rows(int plane, uint32_t tile_at,
                                                                      const Widener& widener) const {
    if (!copies()) return;
    const uint32_t thread = own_thread(), from = raw(plane, thread, tile_at), to = wide(thread, tile_at);
    constexpr int kAll = kParts * kMine,
                  kAhead = 1;  // a load on its way while a chunk is widened: more would not leave
    uint4 x[kAhead + 1];       // registers
    const auto step = [](int j, int of_row) { return j / kMine * kPartBytes + j % kMine * of_row; };
#pragma unroll
    for (int j = 0; j < kAhead; j++) x[j] = tiles::load_shared_16(from + step(j, kStep));
#pragma unroll
    for (int j = 0; j < kAll; j++) {
      if (j + kAhead < kAll) x[(j + kAhead) % (kAhead + 1)] = tiles::load_shared_16(from + step(j + kAhead, kStep));
      const uint4 now = x[j % (kAhead + 1)];
      const auto widen_chunk = widener(j % kMine);
#pragma unroll
      for (int i = 0; i < kBecomes; i++)
        tiles::store_shared_16((to ^ (i << 4)) + step(j, kRowsAtOnce * 128), widen_chunk(now, i));
    }
  }
  // Two chunks of K's may share a scale. `sign` is K's alone.
  template <class Widen> __device__ __forceinline__ void widen_with_scales(int plane, uint32_t tile_at, uint32_t tile,
                                                                           uint32_t sign) const {
    static_assert(kParts == 1, "chunks of one part have the scales that stand first");
    const uint32_t thread = own_thread(), chunk = chunk_of(thread), of_plane = plane ? 0u : sign;
    const char* scales = group_scales(tile, plane) + row_of(thread) * C::kScaleRow +
                         (Widen::kScaleBytes ? chunk * Widen::kScaleBytes : chunk / 2);
    widen_rows(plane, tile_at, [&](int j) { return Widen(scales + j * kRowsAtOnce * C::kScaleRow, of_plane); });
  }
  template <class Widen> __device__ __forceinline__ void widen_alone(int plane, uint32_t tile_at) const {
    widen_rows(plane, tile_at, [](int) { return Widen(); });
  }
  template <class Way>
  __device__ __forceinline__ void widen(int plane, uint32_t tile_at, uint32_t tile, uint32_t sign) const {
    const int of = Way::kOf == kAsked ? code_type() : Way::kOf;
    if constexpr (std::is_same<Rows, Bytes>::value) {
      if (of == KVX_DTYPE_F8_E4M3) widen_alone<WidenBytes<tiles::ConvertE4m3>>(plane, tile_at);
      else if (of == KVX_DTYPE_S8) widen_alone<WidenBytes<tiles::ConvertS8>>(plane, tile_at);
      else widen_alone<WidenBytes<tiles::ConvertE5m2>>(plane, tile_at);
    } else if constexpr (std::is_same<Rows, BytesAsBf16>::value) {
      if (of == KVX_DTYPE_F8_E4M3) widen_alone<WidenBytesToBf16<KVX_DTYPE_F8_E4M3>>(plane, tile_at);
      else if (of == KVX_DTYPE_S8) widen_alone<WidenBytesToBf16<KVX_DTYPE_S8>>(plane, tile_at);
      else widen_alone<WidenBytesToBf16<KVX_DTYPE_F8_E5M2>>(plane, tile_at);
    } else if constexpr (std::is_same<Rows, Nibbles>::value) {
      widen_alone<WidenS4>(plane, tile_at);
    } else if constexpr (std::is_same<Rows, BytesWithScales>::value) {
      widen_with_scales<WidenMxfp8>(plane, tile_at, tile, sign);
    } else {
      if (of == KVX_DTYPE_F8_E4M3) widen_with_scales<WidenNvfp4>(plane, tile_at, tile, sign);
      else if (of == KVX_DTYPE_E8M0) widen_with_scales<WidenMxfp4>(plane, tile_at, tile, sign);
      else widen_with_scales<WidenS4Groups>(plane, tile_at, tile, sign);
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
    constexpr bool kIsByte = std::is_same<Rows, Bytes>::value || std::is_same<Rows, BytesAsBf16>::value,
                   kIsNibble = std::is_same<Rows, NibblesWithScales>::value;
    const int of = code_type();
    if (is_odd()) return load_by<Way<kAsked, true>>();
    if constexpr (kIsByte || kIsNibble) {
      if (of == KVX_DTYPE_F8_E4M3) load_by<Way<KVX_DTYPE_F8_E4M3, false>>();
      else if (of == (kIsByte ? KVX_DTYPE_S8 : KVX_DTYPE_E8M0))
        load_by<Way<kIsByte ? KVX_DTYPE_S8 : KVX_DTYPE_E8M0, false>>();
      else load_by<Way<kIsByte ? KVX_DTYPE_F8_E5M2 : KVX_DTYPE_F16, false>>();
    } else {
      load_by<Way<kAsked, false>>();
    }
  }
  template <class Way> __device__ __forceinline__ void load_by() const {
    Cursor cursor = {p.items, p.items + p.num_items, 0, {-1, 0}};
    ask(&cursor);
    typename Rings::Ring keys = Rings::keys(p.at + C::kRingsAt);
    typename Rings::Ring values = Rings::values(p.at + C::kRingsAt);  // of the same type: both planes are as wide
    clear(0, keys.stages), clear(1, values.stages);
    // Where scales stand with elements, a negative one of the tensor turns K's: scores are compared before they are
    // multiplied by it.
    const float* of_tensor = C::kScales == GROUP_SCALES ? p.a.scales[0].tensor_scale : nullptr;
    const uint32_t sign = of_tensor && *of_tensor < 0.f ? 0x80008000u : 0u;
    // In place the stage is ours already, since the bytes were copied to it.
    const auto widen_copied = [&](typename Rings::Ring& ring, int plane, uint32_t tile) {
      if (C::kScales == ROW_SCALES && plane == 0) finish_scales(tile);
      if (C::kScales == GROUP_SCALES && plane == 0) tiles::meet(1, 128);  // each has copied those of its row
      if constexpr (kInPlace)
        widen<Way>(plane, ring.tile(), tile, sign), tiles::show_to_multiplications(), ring.arrive_full(), ring.next();
      else ring.fill([&](uint32_t tile_at) { widen<Way>(plane, tile_at, tile, sign); });
    };
    const auto copy_next = [&](typename Rings::Ring& ring, int plane, uint32_t tile) {
      if constexpr (kInPlace) ring.wait_free();
      copy<Way>(tile, plane, ring.tile());
    };
    bool copies_next = true;
    for (uint32_t next = 0; copies_next; next++) {  // tile `next` is copied, the one before it widened
      copies_next = cursor.item != cursor.end;
      if (copies_next) find<Way>(&cursor, next);
      if constexpr (C::kStages > 1) {
#pragma unroll
        for (int plane = 0; plane < 2; plane++) {
          typename Rings::Ring& ring = plane ? values : keys;
          if (next > 0) tiles::wait_copies<1>(), widen_copied(ring, plane, next - 1);
          if (copies_next) copy_next(ring, plane, next);
          tiles::commit_copies();
        }
      } else {
        // One stage: the values before these keys are free only when these have been multiplied.
        if (copies_next) copy_next(keys, 0, next);
        tiles::commit_copies();
        if (next > 0) tiles::wait_copies<1>(), widen_copied(values, 1, next - 1);
        if (copies_next) tiles::wait_copies<0>(), widen_copied(keys, 0, next), copy_next(values, 1, next);
        tiles::commit_copies();
      }
    }
  }
};

// Queries as f16, by the threads that multiply, in place: for caches of codes, and for f16 ones under bf16 queries.
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
