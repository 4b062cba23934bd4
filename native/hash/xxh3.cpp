// XXH3 of 128 bits, seed 0 (Yann Collet's specification, xxhash_spec.md), of 17 bytes or more: a link of a chain is
// never shorter.
#include <string.h>

#include "hash/chain.h"

namespace kvx {
namespace cpu {
namespace {

constexpr uint64_t kPrime32[4] = {0, 0x9e3779b1, 0x85ebca77, 0xc2b2ae3d};
constexpr uint64_t kPrime64[6] = {
    0, 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9, 0x85ebca77c2b2ae63, 0x27d4eb2f165667c5};
constexpr size_t kSecretBytes = 192;
constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct Pair {
  uint64_t low, high;
};

inline uint64_t load(const uint8_t* p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}

inline uint64_t fold(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

inline uint64_t avalanche(uint64_t h) {
  h = (h ^ h >> 37) * 0x165667919e3779f9;
  return h ^ h >> 32;
}

inline uint64_t mix16(const uint8_t* in, const uint8_t* secret) {
  return fold(load(in) ^ load(secret), load(in + 8) ^ load(secret + 8));
}

inline void mix32(Pair& sum, const uint8_t* one, const uint8_t* two, const uint8_t* secret) {
  sum.low = (sum.low + mix16(one, secret)) ^ (load(two) + load(two + 8));
  sum.high = (sum.high + mix16(two, secret + 16)) ^ (load(one) + load(one + 8));
}

inline Pair finish(const Pair& sum, size_t bytes) {
  const uint64_t low = sum.low + sum.high, high = sum.low * kPrime64[1] + sum.high * kPrime64[4] + bytes * kPrime64[2];
  return {avalanche(low), 0 - avalanche(high)};
}

Pair hash_to_128(const uint8_t* in, size_t bytes) {  // from both ends to the middle
  Pair sum{bytes * kPrime64[1], 0};
  const uint8_t* end = in + bytes;
  if (bytes > 96) mix32(sum, in + 48, end - 64, kSecret + 96);
  if (bytes > 64) mix32(sum, in + 32, end - 48, kSecret + 64);
  if (bytes > 32) mix32(sum, in + 16, end - 32, kSecret + 32);
  mix32(sum, in, end - 16, kSecret);
  return finish(sum, bytes);
}

Pair hash_to_240(const uint8_t* in, size_t bytes) {
  Pair sum{bytes * kPrime64[1], 0};
  for (size_t i = 0; i < 128; i += 32) mix32(sum, in + i, in + i + 16, kSecret + i);
  sum = {avalanche(sum.low), avalanche(sum.high)};
  for (size_t i = 128; i + 32 <= bytes; i += 32) mix32(sum, in + i, in + i + 16, kSecret + 3 + i - 128);
  mix32(sum, in + bytes - 16, in + bytes - 32, kSecret + 136 - 17 - 16);
  return finish(sum, bytes);
}

void add_stripe(uint64_t (&sums)[8], const uint8_t* in, const uint8_t* secret) {
  for (int i = 0; i < 8; i++) {
    const uint64_t word = load(in + 8 * i), key = word ^ load(secret + 8 * i);
    sums[i ^ 1] += word;
    sums[i] += (key & 0xffffffff) * (key >> 32);
  }
}

uint64_t merge(const uint64_t (&sums)[8], const uint8_t* secret, uint64_t start) {
  for (int i = 0; i < 8; i += 2) start += fold(sums[i] ^ load(secret + 8 * i), sums[i + 1] ^ load(secret + 8 * i + 8));
  return avalanche(start);
}

Pair hash_long(const uint8_t* in, size_t bytes) {
  constexpr size_t kStripe = 64, kStripes = (kSecretBytes - kStripe) / 8;  // after so many the sums are scrambled
  uint64_t sums[8] = {kPrime32[3], kPrime64[1], kPrime64[2], kPrime64[3],
                      kPrime64[4], kPrime32[2], kPrime64[5], kPrime32[1]};
  const uint8_t* last = kSecret + kSecretBytes - kStripe;
  for (size_t stripe = 0; stripe < (bytes - 1) / kStripe; stripe++) {
    add_stripe(sums, in + stripe * kStripe, kSecret + stripe % kStripes * 8);
    if (stripe % kStripes == kStripes - 1) {
      for (int i = 0; i < 8; i++) sums[i] = (sums[i] ^ sums[i] >> 47 ^ load(last + 8 * i)) * kPrime32[1];
    }
  }
  add_stripe(sums, in + bytes - kStripe, last - 7);
  return {merge(sums, kSecret + 11, bytes * kPrime64[1]), merge(sums, last - 11, ~(bytes * kPrime64[2]))};
}

void store_big(uint8_t* p, uint64_t x) {
  x = __builtin_bswap64(x);
  memcpy(p, &x, 8);
}

}  // namespace

void xxh3_128(uint8_t* message, size_t bytes, uint8_t* digest) {
  const Pair h = bytes <= 128   ? hash_to_128(message, bytes)
                 : bytes <= 240 ? hash_to_240(message, bytes)
                                : hash_long(message, bytes);
  store_big(digest, h.high);
  store_big(digest + 8, h.low);
}

}  // namespace cpu
}  // namespace kvx
