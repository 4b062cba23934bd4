// The content digest: two sums modulo 2^64 over all words of 16 bytes. kvx/ops/digest.py has the same arithmetic in torch.
//
// A word is four numbers of 32 bits. Each gets a key added modulo 2^32, from the row's coordinates and its place in the row; then
// products of two (NH, as in UMAC): first = 0*1 + 2*3, second = 0*3 + 2*1. A change of one number meets two independent factors.
// Sums do not mind order, so rows can be taken in any; coordinates make equal words in different places differ.
// Against accidents, not against somebody who means it: the keys are public.
#pragma once
#include "format.h"

namespace kvx {
namespace KVX_ISA_NAMESPACE {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
constexpr int kRowBits = 24;       // of a coordinate: the byte of the row
constexpr int kPositionBits = 33;  // where a seed has the position, under 2^31; below it the rest of the coordinate
constexpr int kWordBytes = 16;

// Added to a number's key from word to word.
KVX_HD uint32_t word_step(int number) { return number == 0 ? 0x7f4a7c15u : number == 1 ? 0x9e3779b9u : number == 2 ? 0x1ce4e5b9u : 0xbf58476du; }

struct RowKey {  // of four numbers, the low halves first
  uint64_t first, second;
};

KVX_HD uint64_t mix64(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// What a row's key comes from.
KVX_HD uint64_t row_seed(uint64_t coordinate, uint64_t seq, uint64_t position) {
  return (coordinate >> kRowBits) + (position << kPositionBits) + (seq + 1) * kGolden;
}

KVX_HD RowKey row_key(uint64_t seed) {
  const uint64_t first = mix64(seed), product = (first ^ 0xa0761d6478bd642full) * 0xd6e8feb86659fd93ull, second = product ^ (product >> 32);
  return RowKey{first, second};
}

KVX_HD uint32_t first_word(uint64_t coordinate) { return uint32_t(coordinate & ((1u << kRowBits) - 1)) / kWordBytes; }

KVX_HD void add_word(const uint32_t (&word)[4], const RowKey& key, uint32_t index, uint64_t* first, uint64_t* second) {
  const uint32_t keys[4] = {uint32_t(key.first), uint32_t(key.first >> 32), uint32_t(key.second), uint32_t(key.second >> 32)};
  uint32_t x[4];
  for (int i = 0; i < 4; i++) x[i] = word[i] + keys[i] + index * word_step(i);
  *first += uint64_t(x[0]) * x[1] + uint64_t(x[2]) * x[3];
  *second += uint64_t(x[0]) * x[3] + uint64_t(x[2]) * x[1];
}

}  // namespace KVX_ISA_NAMESPACE
}  // namespace kvx
