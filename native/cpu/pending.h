// Copies that wait to be done together: see copy_grids in rows.h for what that gains.
#pragma once
#include <string.h>

#include "cpu/rows.h"

namespace kvx {
namespace cpu {

inline bool operator==(const CopyGrid& a, const CopyGrid& b) { return memcmp(&a, &b, sizeof a) == 0; }

// Places of one transpose.
class PendingTurns {
 public:
  static constexpr int64_t kMost = 64;

  PendingTurns(const RowTable& ops, const Transpose& shape) : ops_(ops), shape_(shape) {}
  PendingTurns(const PendingTurns&) = delete;
  ~PendingTurns() { flush(); }

  void add(char* dst, const char* src) {
    if (count_ == kMost) flush();
    pairs_[count_++] = CopyPair{dst, src};
  }
  void flush() {
    if (count_) ops_.transpose(shape_, pairs_, count_);
    count_ = 0;
  }

 private:
  const RowTable& ops_;
  const Transpose shape_;
  int64_t count_ = 0;
  CopyPair pairs_[kMost];
};

// Places of one grid. A place of another grid, a full list or the end starts the copying.
class Pending {
 public:
  static constexpr int64_t kMost = 64;

  Pending(const RowTable& ops, bool stream) : ops_(ops), stream_(stream) {}
  Pending(const Pending&) = delete;
  ~Pending() { flush(); }

  void add(const CopyGrid& grid, char* dst, const char* src) {
    if (count_ == kMost || !(grid == grid_)) {
      flush();
      grid_ = grid;
    }
    pairs_[count_++] = CopyPair{dst, src};
  }
  void flush() {
    if (count_) ops_.copy_grids(grid_, pairs_, count_, stream_);
    count_ = 0;
  }

 private:
  const RowTable& ops_;
  const bool stream_;
  int64_t count_ = 0;
  CopyGrid grid_ = {};
  CopyPair pairs_[kMost];
};

}  // namespace cpu
}  // namespace kvx
