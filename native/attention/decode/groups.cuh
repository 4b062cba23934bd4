// Scales along rows, a few a row (nvfp4, mxfp4, mxfp8, int4 by groups), as the decode kernel multiplies them.
//
// A scale of 16 elements (e4m3) multiplies codes as they are widened: the products are exact in f16. One of 32 elements
// is of two whole fragments: K's multiplies their scores in f32, V's multiplies weights. The largest of a row of V
// joins the weights' exponents: what it leaves of the others is at most 1, and f16 holds it.
#pragma once
#include "format.h"
#include "params.h"
#include "tiles/elements.cuh"

namespace kvx {
namespace cuda {

__device__ __forceinline__ uint32_t multiply_f16(uint32_t x, uint32_t y) {
  const __half2 z = __hmul2(*reinterpret_cast<const __half2*>(&x), *reinterpret_cast<const __half2*>(&y));
  return *reinterpret_cast<const uint32_t*>(&z);
}

// Rows without such scales.
template <class Rows, int kKeyDims, int kValueDims, int kTokens, int kTeam, int kScaleDims = Rows::kScaleDims>
struct GroupScales {
  static constexpr int kBytes = 0, kPreparedBytes = 0;
};

// How the scales of rows are read: one by one, or as words. Rows of two bytes are read with those of the head beside
// them, an even one and the next.
enum ScaleWords { NO_WORDS, WHOLE_WORDS, WORDS_OF_TWO_HEADS };

// Of a row that does not begin and end at words, or whose scales are `step` bytes apart: `there` are, the others become
// zeros. Seldom, and apart from the kernels' own code. All are asked for before the first is stored.
template <class Code, int kScales, int kRow>
static __device__ __noinline__ void copy_scales(const char* from, int64_t step, int there, uint32_t* to) {
  constexpr int kBytes = int(sizeof(Code)), kWords = kRow / 4;
  static_assert(kRow % 4 == 0, "rows of words");
  if (step == kBytes) {  // the words that hold them, moved into place
    const int bytes = there * kBytes, skipped = int(reinterpret_cast<uintptr_t>(from) % 4);
    const uint32_t* first = reinterpret_cast<const uint32_t*>(from - skipped);
    uint32_t words[kWords + 1];
#pragma unroll
    for (int i = 0; i <= kWords; i++) words[i] = 4 * i - skipped < bytes ? first[i] : 0;
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      const int left = bytes - 4 * i;
      const uint32_t mask = left >= 4 ? ~0u : left > 0 ? ~0u >> (32 - 8 * left) : 0;
      to[i] = __funnelshift_r(words[i], words[i + 1], 8 * skipped) & mask;
    }
    return;
  }
  Code codes[kScales];
#pragma unroll
  for (int i = 0; i < kScales; i++) codes[i] = i < there ? *reinterpret_cast<const Code*>(from + i * step) : Code(0);
#pragma unroll
  for (int i = 0; i < kScales; i++) reinterpret_cast<Code*>(to)[i] = codes[i];
}

// How a row's scales come to a tile: [K, V][token][scales of a row], zeros where there are none. Of K those of a warp's
// slice; of V as well, or where the largest of a row is asked for, the whole team's.
template <class Rows, int kKeyDims, int kValueDims, int kTokens, int kTeam> struct GroupRows {
  using Scales = typename Rows::Scales;
  static constexpr int kKeys = kKeyDims / Rows::kScaleDims, kValues = kValueDims / Rows::kScaleDims;
  static constexpr int kRowValues = Rows::kScaleDims == 32 ? kValues * kTeam : kValues;
  static constexpr int row_bytes(int scales) { return scales * Scales::kBytes < 4 ? 4 : scales * Scales::kBytes; }
  static constexpr int kKeyRow = row_bytes(kKeys), kValueRow = row_bytes(kRowValues);
  static constexpr int kValuesAt = kTokens * kKeyRow, kBytes = kTokens * (kKeyRow + kValueRow);

  // From the row's scale number `first` on.
  template <int kScales, int kRow> static __device__ __forceinline__ void copy_row(const ScaleParams& s, int words,
                                                                                   bool is_there, const char* from,
                                                                                   int32_t head, int first, char* to) {
    if (words == NO_WORDS) {
      copy_scales<typename Scales::Code, kScales, kRow>(
          from + first * s.group, s.group, is_there ? int(s.num_groups) - first : 0, reinterpret_cast<uint32_t*>(to));
      return;
    }
    from += first * Scales::kBytes - skipped(words, head);
    // Of rows that are shorter than a team's tile is wide, some are past the end.
    const int there = kTeam > 1 ? int(s.num_groups - first) * Scales::kBytes / 4 : kRow / 4;
#pragma unroll
    for (int i = 0; i < kRow / 4; i++)
      tiles::copy_4(tiles::shared_address(to + i * 4), from + i * 4, is_there && i < there ? 4 : 0);
  }
  static __device__ __forceinline__ void copy(int plane, const ScaleParams& s, int words, bool is_there,
                                              const char* from, int32_t head, int member, char* to, int token) {
    if (plane == 0) copy_row<kKeys, kKeyRow>(s, words, is_there, from, head, member * kKeys, to + token * kKeyRow);
    else
      copy_row<kRowValues, kValueRow>(s, words, is_there, from, head, kRowValues == kValues ? member * kValues : 0,
                                      to + kValuesAt + token * kValueRow);
  }
  // Bytes of a word that are the head's before.
  static __device__ __forceinline__ int skipped(int words, int32_t head) {
    return words == WORDS_OF_TWO_HEADS ? (head & 1) * 2 : 0;
  }
};

template <class Rows, int kKeyDims, int kValueDims, int kTokens, int kTeam>
struct GroupScales<Rows, kKeyDims, kValueDims, kTokens, kTeam, 16>
    : GroupRows<Rows, kKeyDims, kValueDims, kTokens, kTeam> {
  using Base = GroupRows<Rows, kKeyDims, kValueDims, kTokens, kTeam>;
  static constexpr int kPreparedBytes = 0;

  // A pair of scales for each word of four matrices (tiles/elements.cuh: Nibbles).
  struct Pairs {
    uint32_t of[4];
    __device__ __forceinline__ uint32_t operator()(int i, uint32_t pair) const { return multiply_f16(pair, of[i]); }
  };
  // Scales of the two chunks of a group of 64 elements, first or second half of each, in two bytes.
  static __device__ __forceinline__ uint32_t two(const char* row, int group, bool is_second) {
    const uint32_t x = reinterpret_cast<const uint32_t*>(row)[group];
    return __byte_perm(x, 0, is_second ? 0x4431 : 0x4420);
  }
  // Of K: the tokens are g and g + 8, lanes 2 and 3 of four have the second half of a chunk.
  static __device__ __forceinline__ Pairs of_keys(const char* scales, int m, int group, int g, int t) {
    Pairs p;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint32_t x = tiles::e4m3_to_f16(two(scales + (m * 16 + h * 8 + g) * Base::kKeyRow, group, t >= 2));
      p.of[h] = __byte_perm(x, 0, 0x1010), p.of[2 + h] = __byte_perm(x, 0, 0x3232);
    }
    return p;
  }
  // Of V: the tokens are 2 t and 2 t + 1, and those 8 on; lanes from g = 4 on have the second half of a chunk.
  static __device__ __forceinline__ Pairs of_values(const char* scales, int k, int group, int g, int t) {
    Pairs p;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const char* row = scales + Base::kValuesAt + (k * 16 + h * 8 + 2 * t) * Base::kValueRow;
      const uint32_t x = __byte_perm(two(row, group, g >= 4), two(row + Base::kValueRow, group, g >= 4), 0x5140);
      p.of[h] = tiles::e4m3_to_f16(x & 0xffffu), p.of[2 + h] = tiles::e4m3_high_to_f16(x);
    }
    return p;
  }
};

template <class Rows, int kKeyDims, int kValueDims, int kTokens, int kTeam>
struct GroupScales<Rows, kKeyDims, kValueDims, kTokens, kTeam, 32>
    : GroupRows<Rows, kKeyDims, kValueDims, kTokens, kTeam> {
  using Base = GroupRows<Rows, kKeyDims, kValueDims, kTokens, kTeam>;
  using Scales = typename Rows::Scales;
  // Prepared, of a warp's slice: K's in f32 [token][scales] | V's, what the row's largest leaves of them, in f16
  // [scales][token] | the largest's logarithm and inverse [token].
  static constexpr int kValuesAt = kTokens * Base::kKeys * 4, kRowsAt = kValuesAt + kTokens * Base::kValues * 2,
                       kPreparedBytes = kRowsAt + kTokens * 8;

  struct __align__(Base::kKeys * 4) Keys {
    float of[Base::kKeys];
  };
  static __device__ __forceinline__ Keys of_keys(const void* prepared, int token) {
    return static_cast<const Keys*>(prepared)[token];
  }
  static __device__ __forceinline__ uint32_t of_value(const void* prepared, int token, int group) {  // and the next's
    return *reinterpret_cast<const uint32_t*>(static_cast<const char*>(prepared) + kValuesAt +
                                              (group * kTokens + token) * 2);
  }
  static __device__ __forceinline__ float2 of_row(const void* prepared, int token) {
    return *reinterpret_cast<const float2*>(static_cast<const char*>(prepared) + kRowsAt + token * 8);
  }

  // A tile's, by one warp: a lane has a token of 32.
  static __device__ __forceinline__ void prepare(const char* scales, void* prepared, int lane, int member,
                                                 const int (&words)[2], int32_t head) {
    const char *of_keys = scales + Base::skipped(words[0], head),
               *of_values = scales + Base::kValuesAt + Base::skipped(words[1], head);
#pragma unroll
    for (int first = 0; first < kTokens; first += 32) {
      const int token = first + lane;
      Keys keys;
      uint16_t* values = reinterpret_cast<uint16_t*>(static_cast<char*>(prepared) + kValuesAt) + token;
      float2* row = reinterpret_cast<float2*>(static_cast<char*>(prepared) + kRowsAt) + token;
      // All of them before the first is stored: the compiler cannot know that they stand elsewhere.
      Row<Base::kKeys> of_key;
      Row<Base::kRowValues> of_row;
      Row<Base::kValues> of_value;
      of_key.load(of_keys + token * Base::kKeyRow), of_row.load(of_values + token * Base::kValueRow);
      of_value.load(of_values + token * Base::kValueRow + (kTeam > 1 ? member * Base::kValues * Scales::kBytes : 0));
      prepare_row(Scales(), of_key, of_row, of_value, keys.of, values, row);
      static_cast<Keys*>(prepared)[token] = keys;
    }
    __syncwarp();
  }

  // Scales of a row, in words.
  template <int kScales> struct Row {
    static constexpr int kWords = (kScales * Scales::kBytes + 3) / 4;
    uint32_t words[kWords];
    __device__ __forceinline__ void load(const char* from) {
#pragma unroll
      for (int i = 0; i < kWords; i++)
        if constexpr (kScales * Scales::kBytes % 4 == 0) words[i] = reinterpret_cast<const uint32_t*>(from)[i];
        else words[i] = *reinterpret_cast<const uint16_t*>(from);
    }
    __device__ __forceinline__ uint32_t code(int i) const {
      constexpr int kOfWord = 4 / Scales::kBytes;
      return words[i / kOfWord] >> i % kOfWord * 8 * Scales::kBytes & (Scales::kBytes == 1 ? 0xffu : 0xffffu);
    }
  };

  // Powers of two by their exponents. Under 2^-60 a row's largest counts as that: its inverse is a number still.
  static __device__ __forceinline__ void prepare_row(tiles::E8m0Scales, const Row<Base::kKeys>& of_key,
                                                     const Row<Base::kRowValues>& of_row,
                                                     const Row<Base::kValues>& of_value, float (&keys)[Base::kKeys],
                                                     uint16_t* values, float2* row) {
    // 2^-127 and NaN, the first code and the last, are the others' bits with the mantissa's highest.
#pragma unroll
    for (int i = 0; i < Base::kKeys; i++) {
      const uint32_t code = of_key.code(i);
      keys[i] = __uint_as_float(code << 23 | ((code + 1 & 0xfeu) == 0 ? 0x400000u : 0u));
    }
    int largest = 127 - 60;
#pragma unroll
    for (int i = 0; i < Base::kRowValues; i++) largest = max(largest, of_row.code(i) == 255 ? 0 : int(of_row.code(i)));
#pragma unroll
    for (int i = 0; i < Base::kValues; i++) {
      const uint32_t code = of_value.code(i);
      const float under = __uint_as_float(uint32_t(max(127 + int(code) - largest, 0)) << 23);
      values[i * kTokens] = code == 255 ? uint16_t(0x7fff) : __half_as_ushort(__float2half(under));
    }
    *row =
        make_float2(float(largest - 127), __uint_as_float(largest == 254 ? 0x400000u : uint32_t(254 - largest) << 23));
  }
  static __device__ __forceinline__ void prepare_row(tiles::F16Scales, const Row<Base::kKeys>& of_key,
                                                     const Row<Base::kRowValues>& of_row,
                                                     const Row<Base::kValues>& of_value, float (&keys)[Base::kKeys],
                                                     uint16_t* values, float2* row) {
    const auto number = [](uint32_t code) { return __half2float(__ushort_as_half(uint16_t(code))); };
#pragma unroll
    for (int i = 0; i < Base::kKeys; i++) keys[i] = number(of_key.code(i));
    float largest = 9.3132257e-10f;  // 2^-30, under all that f16 has
#pragma unroll
    for (int i = 0; i < Base::kRowValues; i++) largest = fmaxf(largest, fabsf(number(of_row.code(i))));
    const float inverse = tiles::inverse_fast(largest);
#pragma unroll
    for (int i = 0; i < Base::kValues; i++)
      values[i * kTokens] = __half_as_ushort(__float2half(number(of_value.code(i)) * inverse));
    *row = make_float2(tiles::log2_fast(largest), inverse);
  }
};

}  // namespace cuda
}  // namespace kvx
