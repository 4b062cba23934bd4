// The content digest: two sums modulo 2^64 over all words of 16 bytes. kvx/ops/move/digest.py has the same arithmetic
// in torch.
//
// A word is four numbers of 32 bits, a row has six keys of 32 bits, and word j adds, with m = 2j + 1 and sums in
// brackets modulo 2^32,
//   first  += (w0 + m*k0) * (w1 + m*k1) + (w2 + m*k2) * (w3 + m*k3)
//   second += (w0 + m*k2) * (w1 + m*k3) + (w2 + m*k4) * (w3 + m*k5)
// That is NH of UMAC twice, with keys shifted by two (its Toeplitz construction): for any two words that differ,
// however many of their numbers do, at most one choice of keys in 2^32 leaves a sum alone, and one in 2^64 both. So it
// is for changes in one word of each of any rows. Several words of one row share their keys: a change d in them is as
// well hidden only where the sums of m*d are 0 in all four numbers at once, which exchanged, shifted, doubled or
// cleared words are not. Keys come from the row's coordinates and from what the rows hold (`content`: format and head
// size). Sums do not mind order, so rows can be taken in any. Against accidents, not against somebody who means it: the
// keys are public.
#pragma once
#include "format.h"

namespace kvx {
namespace KVX_ISA_NAMESPACE {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
constexpr int kRowBits = 24;       // of a coordinate: the byte of the row
constexpr int kPositionBits = 33;  // where a seed has the position, under 2^31; below it the rest of the coordinate
constexpr int kWordBytes = 16;

struct RowKey {  // six of 32 bits, the low halves first
  uint64_t k01, k23, k45;
};

KVX_HD uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// What a row's key comes from.
KVX_HD uint64_t row_seed(uint64_t coordinate, uint64_t seq, uint64_t position, uint32_t content) {
  return (coordinate >> kRowBits) + (position << kPositionBits) + (seq + 1) * kGolden + content * 0xd1342543de82ef95ull;
}

KVX_HD RowKey row_key(uint64_t seed) {
  const uint64_t first = mix64(seed);
  const uint64_t second = (first ^ 0xa0761d6478bd642full) * 0xd6e8feb86659fd93ull,
                 third = (first ^ 0xe7037ed1a0b428dbull) * 0x8ebc6af09c88c6e3ull;
  return RowKey{first, second ^ (second >> 32), third ^ (third >> 32)};
}

KVX_HD uint32_t first_word(uint64_t coordinate) { return uint32_t(coordinate & ((1u << kRowBits) - 1)) / kWordBytes; }

KVX_HD void add_word(const uint32_t (&word)[4], const RowKey& key, uint32_t index, uint64_t* first, uint64_t* second) {
  const uint32_t m = 2 * index + 1;
  const uint32_t k[6] = {m * uint32_t(key.k01),       m * uint32_t(key.k01 >> 32), m * uint32_t(key.k23),
                         m * uint32_t(key.k23 >> 32), m * uint32_t(key.k45),       m * uint32_t(key.k45 >> 32)};
  *first += uint64_t(word[0] + k[0]) * (word[1] + k[1]) + uint64_t(word[2] + k[2]) * (word[3] + k[3]);
  *second += uint64_t(word[0] + k[2]) * (word[1] + k[3]) + uint64_t(word[2] + k[4]) * (word[3] + k[5]);
}

}  // namespace KVX_ISA_NAMESPACE
}  // namespace kvx
