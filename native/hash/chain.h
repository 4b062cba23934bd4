// Names of blocks by their content: a chain of hashes, each over the name before it and a block's tokens.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "check.h"

namespace kvx {
namespace cpu {

// A hash of `bytes` bytes at `message`. After them is room for kHashPadding more, which the function may write to.
constexpr size_t kHashPadding = 128;
using HashFunction = void (*)(uint8_t* message, size_t bytes, uint8_t* digest);

void blake2b_128(uint8_t* message, size_t bytes, uint8_t* digest);  // RFC 7693, 16 bytes, no key
void xxh3_128(uint8_t* message, size_t bytes, uint8_t* digest);     // seed 0, canonical order; of 17 bytes or more
HashFunction best_sha256();                                         // by this CPU's instructions

}  // namespace cpu
}  // namespace kvx
