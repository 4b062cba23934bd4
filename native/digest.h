// The content digest: two sums modulo 2^64 over all words of 8 bytes. kvx/ops/digest.py has the same arithmetic in torch.
//
// A word's term is NH (UMAC): (low half + key) * (high half + key), halves modulo 2^32, under keys that come from its coordinates.
// Sums do not mind order, so rows can be taken in any; coordinates make equal words in different places differ.
// Against accidents, not against somebody who means it: the keys are public.
#pragma once
#include "format.h"

namespace kvx {
namespace KVX_ISA_NAMESPACE {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
constexpr int kRowBits = 24;  // of a coordinate: the byte of the row

struct RowKey {
  uint64_t first, second;
};

KVX_HD uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Positions under 2^31 keep the sum below one number a row; one multiplication chain, since a device does it for every vector.
KVX_HD RowKey row_key(uint64_t coordinate, uint64_t seq, uint64_t position) {
  const uint64_t first = mix64((coordinate >> kRowBits) + (position << 33) + (seq + 1) * kGolden);
  const uint64_t second = (first ^ 0xa0761d6478bd642full) * 0xd6e8feb86659fd93ull;
  return RowKey{first, second ^ (second >> 32)};
}

KVX_HD uint64_t word_term(uint64_t word, uint64_t key) {
  return uint64_t(uint32_t(word) + uint32_t(key)) * uint64_t(uint32_t(word >> 32) + uint32_t(key >> 32));
}

}  // namespace KVX_ISA_NAMESPACE
}  // namespace kvx
