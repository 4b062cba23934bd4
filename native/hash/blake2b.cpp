// BLAKE2b of 16 bytes without a key (RFC 7693).
#include <string.h>

#include "hash/chain.h"

namespace kvx {
namespace cpu {
namespace {

constexpr size_t kChunk = 128, kDigest = 16;
constexpr uint64_t kStart[8] = {0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull,
                                0xa54ff53a5f1d36f1ull, 0x510e527fade682d1ull, 0x9b05688c2b3e6c1full,
                                0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull};
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

inline uint64_t rotate(uint64_t x, int n) { return x >> n | x << (64 - n); }

inline void mix(uint64_t& a, uint64_t& b, uint64_t& c, uint64_t& d, uint64_t x, uint64_t y) {
  a += b + x, d = rotate(d ^ a, 32), c += d, b = rotate(b ^ c, 24);
  a += b + y, d = rotate(d ^ a, 16), c += d, b = rotate(b ^ c, 63);
}

// `end`: bytes of the message up to the end of this chunk.
void compress(uint64_t (&state)[8], const uint8_t* chunk, uint64_t end, bool is_last) {
  uint64_t m[16], v[16];
  memcpy(m, chunk, sizeof m);
  memcpy(v, state, sizeof state);
  memcpy(v + 8, kStart, sizeof kStart);
  v[12] ^= end;
  if (is_last) v[14] = ~v[14];
#pragma GCC unroll 12
  for (int round = 0; round < 12; round++) {  // unrolled, so that the order of the words is known when it is compiled
    const uint8_t(&s)[16] = kOrder[round % 10];
    mix(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
    mix(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
    mix(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
    mix(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
    mix(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
    mix(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
    mix(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
    mix(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

void blake2b_128(uint8_t* message, size_t bytes, uint8_t* digest) {
  uint64_t state[8];
  memcpy(state, kStart, sizeof state);
  state[0] ^= 0x01010000 ^ kDigest;  // depth 1, fanout 1, no key
  const size_t chunks = bytes ? (bytes + kChunk - 1) / kChunk : 1;
  memset(message + bytes, 0, chunks * kChunk - bytes);
  for (size_t i = 1; i < chunks; i++, message += kChunk) compress(state, message, i * kChunk, false);
  compress(state, message, bytes, true);
  memcpy(digest, state, kDigest);
}

}  // namespace cpu
}  // namespace kvx
