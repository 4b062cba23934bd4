// Buffers that notice: each ends where a page begins that nobody may touch, and has bytes in front of it that must not
// change. What a call may not write is compared after it, what it may is put back.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace fuzz {

struct Buffer {
  char* data;
  size_t bytes;
  int index_bytes;  // 4 or 8: its entries are indices, which may lie as well; 0: they are not
  bool is_output;
  std::vector<char> saved;

  static constexpr size_t kFront = 64;

  Buffer(size_t size, bool output, int index) : bytes(size), index_bytes(index), is_output(output), saved(size) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE)), pages = (size + kFront + page - 1) / page;
    char* base = static_cast<char*>(
        mmap(nullptr, (pages + 1) * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base == MAP_FAILED || mprotect(base + pages * page, page, PROT_NONE) != 0) perror("mmap"), exit(3);
    data = base + pages * page - size;
    memset(data - kFront, 0xa5, kFront);
  }

  bool contains(const void* p) const {
    return static_cast<const char*>(p) >= data && static_cast<const char*>(p) < data + bytes;
  }
  void keep() { memcpy(saved.data(), data, bytes); }
  void put_back() { memcpy(data, saved.data(), bytes); }

  // Empty, or what has changed that must not have.
  std::string damage(bool may_be_written) const {
    for (size_t i = 0; i < kFront; i++)
      if (data[-1 - int64_t(i)] != char(0xa5))
        return "byte " + std::to_string(i + 1) + " in front of a buffer of " + std::to_string(bytes) + " was written";
    if (!may_be_written && memcmp(data, saved.data(), bytes) != 0)
      return "an input of " + std::to_string(bytes) + " bytes was written";
    return "";
  }
};

// xorshift, begun anew for every case, so that a case can be run alone.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {
    for (int i = 0; i < 4; i++) bits();
  }
  uint64_t bits() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state * 0x2545f4914f6cdd1du;
  }
  int below(int n) { return int((bits() >> 33) % uint64_t(n)); }
  bool chance(int one_in) { return below(one_in) == 0; }

  // A number somebody might put there: ends of types, neighbours and multiples of what stood there.
  int64_t hostile(int64_t old) {
    const uint64_t o = uint64_t(old);  // unsigned: the neighbours of the ends wrap
    switch (below(24)) {
      case 0: return 0;
      case 1: return 1;
      case 2: return -1;
      case 3: return INT64_MIN;
      case 4: return INT64_MAX;
      case 5: return int64_t(1) << 31;
      case 6: return int64_t(0xffffffff);
      case 7: return INT32_MAX;
      case 8: return int64_t(o + 1);
      case 9: return int64_t(o - 1);
      case 10: return int64_t(o * 2);
      case 11: return old / 2;
      case 12: return int64_t(1) << below(63);
      case 13: return -(int64_t(1) << below(63));
      case 14: return (int64_t(1) << below(63)) - 1;
      case 15: return int64_t(o + uint64_t(below(64)) - 32);
      case 16: return int64_t(bits());
      case 17: return int64_t(1) << (16 * (1 + below(3)));
      default: return below(24);
    }
  }
};

}  // namespace fuzz
