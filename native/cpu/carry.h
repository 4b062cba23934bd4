// An exception may not leave a parallel region: it would end the process. The first is kept here and thrown again
// behind the region, where the C entry catches it (check.h).
#pragma once
#include <atomic>
#include <exception>

namespace kvx {
namespace cpu {

class Carry {
 public:
  // In the region. After a failure nothing is begun: what it would make is not used. A thread still meets every loop
  // and barrier.
  template <class Work>
  void operator()(Work&& work) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      work();
    } catch (...) {
      if (!failed_.exchange(true)) error_ = std::current_exception();
    }
  }

  // Behind it.
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

}  // namespace cpu
}  // namespace kvx
