/* Section 22 from C: names that Python's hashlib and xxhash gave, and calls that are refused. */
#include <stdlib.h>

#include "check.h"

enum { NUM_BLOCKS = 3, BLOCK_SIZE = 4 };

static int32_t tokens[NUM_BLOCKS * BLOCK_SIZE];
static uint8_t parent[32], names[NUM_BLOCKS * 32 + 1];

static void test_names(kvx_hash_t hash, size_t bytes, const char* last) {
  uint8_t want[32];
  for (size_t i = 0; i < bytes; i++) {
    const char digits[3] = {last[2 * i], last[2 * i + 1], 0};
    want[i] = (uint8_t)strtol(digits, NULL, 16);
  }
  memset(names, 0xee, sizeof names);
  CHECK_OK(kvx_hash_blocks(hash, parent, tokens, NUM_BLOCKS, BLOCK_SIZE, names));
  CHECK_BYTES(names + 2 * bytes, want, bytes);
  CHECK_INT(names[3 * bytes], 0xee);                                                             /* not past the last */
  CHECK_OK(kvx_hash_blocks(hash, names + bytes, tokens + 2 * BLOCK_SIZE, 1, BLOCK_SIZE, names)); /* go on from a name */
  CHECK_BYTES(names, want, bytes);
}

static void test_refusals(void) {
  names[0] = 0xee;
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_INVALID, parent, tokens, 1, BLOCK_SIZE, names));
  CHECK_INVALID(kvx_hash_blocks(4, parent, tokens, 1, BLOCK_SIZE, names));
  CHECK_ERROR_HAS("hash is 4");
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_SHA256, parent, tokens, -1, BLOCK_SIZE, names));
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_SHA256, parent, tokens, 1, 0, names));
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_SHA256, parent, tokens, INT64_MAX / 4, BLOCK_SIZE, names));
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_SHA256, parent, tokens, 1, INT64_MAX / 2, names));
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_SHA256, NULL, tokens, 1, BLOCK_SIZE, names));
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_SHA256, parent, NULL, 1, BLOCK_SIZE, names));
  CHECK_INVALID(kvx_hash_blocks(KVX_HASH_SHA256, parent, tokens, 1, BLOCK_SIZE, NULL));
  CHECK_OK(kvx_hash_blocks(KVX_HASH_SHA256, NULL, NULL, 0, BLOCK_SIZE, NULL));
  CHECK_INT(names[0], 0xee);
}

int main(void) {
  for (int i = 0; i < NUM_BLOCKS * BLOCK_SIZE; i++) tokens[i] = 1000 * i - 3;
  for (int i = 0; i < 32; i++) parent[i] = (uint8_t)i;
  test_names(KVX_HASH_BLAKE2B, 16, "caea538415023ee7ca36e3d1a9248ab2");
  test_names(KVX_HASH_SHA256, 32, "97cb1f3f9bd4c25fa6a0c9618c4e401c6ac716e79a75f192a129e8adeffc2391");
  test_names(KVX_HASH_XXH3_128, 16, "fca8436fe3d06c472566f034f60617b3");
  test_refusals();
  return check_report();
}
