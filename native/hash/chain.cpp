// kvx_hash_blocks: h[i] = H(h[i - 1], tokens of block i). The loop is here, a hash function a file in cpu/.
#include "hash/chain.h"

#include <string.h>

#include <memory>
#include <new>

namespace kvx {
namespace {

struct Hash {
  cpu::HashFunction function;
  size_t bytes;  // of a digest
};

Hash hash_of(int32_t hash) {
  switch (hash) {
    case KVX_HASH_BLAKE2B: return {cpu::blake2b_128, 16};
    case KVX_HASH_SHA256: return {cpu::best_sha256(), 32};
    case KVX_HASH_XXH3_128: return {cpu::xxh3_128, 16};
    default: return {nullptr, 0};
  }
}

}  // namespace
}  // namespace kvx

extern "C" kvx_status_t kvx_hash_blocks(int32_t hash, const void* parent, const int32_t* tokens, int64_t num_blocks,
                                        int64_t block_size, void* names) {
  using namespace kvx;
  return entry("kvx_hash_blocks()", [&]() -> kvx_status_t {
    const Hash h = hash_of(hash);
    KVX_NEED(h.function != nullptr, "hash is %d; it must be 1 (blake2b), 2 (sha256) or 3 (xxh3_128).", hash);
    KVX_NEED(num_blocks >= 0, "num_blocks is %lld; it must be 0 or more.", (long long)num_blocks);
    KVX_NEED(block_size > 0, "block_size is %lld; it must be 1 or more.", (long long)block_size);
    int64_t block_bytes, total;
    KVX_NEED(mul_fits(block_size, 4, &block_bytes) && mul_fits(block_bytes, num_blocks, &total),
             "%lld blocks of %lld tokens are more than an address can count.", (long long)num_blocks,
             (long long)block_size);
    if (num_blocks == 0) return KVX_STATUS_OK;
    KVX_NEED(parent != nullptr && tokens != nullptr && names != nullptr, "parent, tokens or names is NULL.");

    // The message of a link lies in one piece, with room for a function's padding: most are small enough for the stack.
    const size_t bytes = h.bytes + size_t(block_bytes);
    uint8_t small[2048];
    std::unique_ptr<uint8_t[]> large;
    if (bytes + cpu::kHashPadding > sizeof small) {
      large.reset(new (std::nothrow) uint8_t[bytes + cpu::kHashPadding]);
      if (large == nullptr)
        return fail(KVX_STATUS_INTERNAL_ERROR, "no memory for a block of %lld tokens.", (long long)block_size);
    }
    uint8_t* message = large ? large.get() : small;
    const uint8_t *before = static_cast<const uint8_t*>(parent), *block = reinterpret_cast<const uint8_t*>(tokens);
    uint8_t* name = static_cast<uint8_t*>(names);
    for (int64_t i = 0; i < num_blocks; i++, block += block_bytes, name += h.bytes) {
      memcpy(message, before, h.bytes);
      memcpy(message + h.bytes, block, size_t(block_bytes));
      h.function(message, bytes, name);
      before = name;
    }
    return KVX_STATUS_OK;
  });
}
