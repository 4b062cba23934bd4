// Small tables on their way to a device, without waiting: written into pinned memory, copied in stream order. Their
// memory comes from a pool of each device and goes back once the device has passed the work that reads it. The pool
// keeps what its busiest moment needed: giving memory back to the driver would wait for the device.
#pragma once
#include <cuda_runtime.h>

#include <atomic>
#include <memory>
#include <vector>

#include "check.h"

namespace kvx {
namespace cuda {

struct Slot {
  char *host, *device;  // the same bytes here and there
  int size_class;
};
using SlotRef = std::shared_ptr<Slot>;  // when the last is gone, the slot is back in its pool

// While any thread captures, the driver refuses calls that might wait or allocate. Ours touch no captured stream.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// All of these are for the current device.

kvx_status_t take_slot(size_t bytes, SlotRef* slot);
// From the slot's pinned memory to its device memory, behind what is on the stream.
kvx_status_t send(const Slot& slot, size_t bytes, void* stream);
// Holds the slots until the device has passed what is on the stream now. In a capture the graph holds them: it copies
// and reads them at every replay.
kvx_status_t hold_until_passed(std::vector<SlotRef> slots, void* stream);

// A table that is sent ahead of the runs that read it, on a stream of the pool's own: it waits for no other work.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const Ahead&) = delete;
  Ahead& operator=(const Ahead&) = delete;
  ~Ahead();
  kvx_status_t send(SlotRef slot, size_t bytes);
  // What follows on the stream finds it there.
  kvx_status_t put_before(void* stream) const;
  const SlotRef& slot() const { return slot_; }  // NULL: nothing was sent

 private:
  SlotRef slot_;
  cudaEvent_t sent_ = nullptr;
  mutable std::atomic<bool> is_there_{false};
};

}  // namespace cuda
}  // namespace kvx
