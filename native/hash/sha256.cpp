// SHA-256 (FIPS 180-4): portable, and with the instructions that Arm and x86 have for
// it, chosen when it is first called.
#include <stdlib.h>
#include <string.h>

#include "hash/chain.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__clang__)
#define KVX_TARGET_SHA __attribute__((target("sha2")))
#else
#define KVX_TARGET_SHA __attribute__((target("+crypto")))
#endif
#elif defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define KVX_TARGET_SHA __attribute__((target("sha,sse4.1,ssse3")))
#endif

namespace kvx {
namespace cpu {
namespace {

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr uint32_t kStart[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr size_t kChunk = 64;

uint32_t load_big(const uint8_t* p) { return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | p[3]; }

void store_big(uint8_t* p, uint32_t x) {
  for (int i = 0; i < 4; i++) p[i] = uint8_t(x >> (24 - 8 * i));
}

// FIPS 180-4, 5.1.1: a one bit, zeros, and the length in bits, up to a whole chunk. How many chunks there are then.
size_t pad(uint8_t* message, size_t bytes) {
  const size_t chunks = (bytes + 9 + kChunk - 1) / kChunk;
  uint8_t* end = message + chunks * kChunk;
  message[bytes] = 0x80;
  memset(message + bytes + 1, 0, size_t(end - 8 - (message + bytes + 1)));
  const uint64_t bits = uint64_t(bytes) * 8;
  store_big(end - 8, uint32_t(bits >> 32));
  store_big(end - 4, uint32_t(bits));
  return chunks;
}

uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

void sha256_plain(uint8_t* message, size_t bytes, uint8_t* digest) {
  uint32_t state[8];
  memcpy(state, kStart, sizeof state);
  for (size_t chunks = pad(message, bytes); chunks; chunks--, message += kChunk) {
    uint32_t w[64];
    for (int i = 0; i < 16; i++) w[i] = load_big(message + 4 * i);
    for (int i = 16; i < 64; i++) {
      const uint32_t x = w[i - 15], y = w[i - 2];
      w[i] = w[i - 16] + (rotate(x, 7) ^ rotate(x, 18) ^ x >> 3) + w[i - 7] + (rotate(y, 17) ^ rotate(y, 19) ^ y >> 10);
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4], f = state[5], g = state[6],
             h = state[7];
    for (int i = 0; i < 64; i++) {
      const uint32_t one = h + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
      const uint32_t two = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d, state[4] += e, state[5] += f, state[6] += g,
        state[7] += h;
  }
  for (int i = 0; i < 8; i++) store_big(digest + 4 * i, state[i]);
}

#if defined(__aarch64__)

// Four rounds a step. w[i % 4] holds the step's words, and then those of the step four later.
KVX_TARGET_SHA void sha256_arm(uint8_t* message, size_t bytes, uint8_t* digest) {
  uint32x4_t abcd = vld1q_u32(kStart), efgh = vld1q_u32(kStart + 4);
  for (size_t chunks = pad(message, bytes); chunks; chunks--, message += kChunk) {
    const uint32x4_t first = abcd, second = efgh;
    uint32x4_t w[4];
    for (int i = 0; i < 4; i++) w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(message + 16 * i)));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const uint32x4_t words = vaddq_u32(w[i % 4], vld1q_u32(kRound + 4 * i)), before = abcd;
      if (i < 12) w[i % 4] = vsha256su1q_u32(vsha256su0q_u32(w[i % 4], w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
      abcd = vsha256hq_u32(abcd, efgh, words);
      efgh = vsha256h2q_u32(efgh, before, words);
    }
    abcd = vaddq_u32(abcd, first), efgh = vaddq_u32(efgh, second);
  }
  vst1q_u8(digest, vrev32q_u8(vreinterpretq_u8_u32(abcd)));
  vst1q_u8(digest + 16, vrev32q_u8(vreinterpretq_u8_u32(efgh)));
}

bool has_sha() {
#if defined(__APPLE__)
  return true;
#elif defined(__linux__)
  return getauxval(AT_HWCAP) & (1ul << 6);  // HWCAP_SHA2
#else
  return false;
#endif
}

#elif defined(__x86_64__)

// The same by x86's: the state goes in as (f e b a) and (h g d c), two rounds an instruction.
KVX_TARGET_SHA void sha256_x86(uint8_t* message, size_t bytes, uint8_t* digest) {
  const __m128i big = _mm_set_epi64x(0x0c0d0e0f08090a0bll, 0x0405060700010203ll);
  __m128i abef = _mm_set_epi32(int(kStart[0]), int(kStart[1]), int(kStart[4]), int(kStart[5]));
  __m128i cdgh = _mm_set_epi32(int(kStart[2]), int(kStart[3]), int(kStart[6]), int(kStart[7]));
  for (size_t chunks = pad(message, bytes); chunks; chunks--, message += kChunk) {
    const __m128i first = abef, second = cdgh;
    __m128i w[4];
    for (int i = 0; i < 4; i++)
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(message + 16 * i)), big);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
      const __m128i words = _mm_add_epi32(w[i % 4], _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i)));
      if (i < 12) {
        const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]),
                                          _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4));
        w[i % 4] = _mm_sha256msg2_epu32(sum, w[(i + 3) % 4]);
      }
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, words);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(words, 0x0e));
    }
    abef = _mm_add_epi32(abef, first), cdgh = _mm_add_epi32(cdgh, second);
  }
  alignas(16) uint32_t one[4], two[4];  // f e b a, h g d c
  _mm_store_si128(reinterpret_cast<__m128i*>(one), abef);
  _mm_store_si128(reinterpret_cast<__m128i*>(two), cdgh);
  const uint32_t state[8] = {one[3], one[2], two[3], two[2], one[1], one[0], two[1], two[0]};
  for (int i = 0; i < 8; i++) store_big(digest + 4 * i, state[i]);
}

bool has_sha() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));  // SHA
}

#endif

HashFunction choose() {
  const char* cap = getenv("KVX_SIMD");  // debugging, as in machine.cpp; here on Arm too
  if (cap && !strcmp(cap, "plain")) return sha256_plain;
#if defined(__aarch64__)
  if (has_sha()) return sha256_arm;
#elif defined(__x86_64__)
  if (has_sha()) return sha256_x86;
#endif
  return sha256_plain;
}

}  // namespace

HashFunction best_sha256() {
  static const HashFunction best = choose();
  return best;
}

}  // namespace cpu
}  // namespace kvx
