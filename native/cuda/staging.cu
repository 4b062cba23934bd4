#include "cuda/staging.cuh"

#include <deque>
#include <mutex>

namespace kvx {
namespace cuda {

namespace {

constexpr int kMaxDevices = 64;
constexpr size_t kLeastSlot = 4 << 10;   // bytes of size class 0; each next one is twice as large
constexpr size_t kArenaBytes = 8 << 20;  // what the driver is asked for at a time: 64 runs of 16,384 ids on both sides
constexpr int kSizeClasses = 40, kAsked = 3;

kvx_status_t failed(const char* what, cudaError_t error) {
  cudaGetLastError();  // it is said here, and not to the next who asks
  return fail(KVX_STATUS_INTERNAL_ERROR, "%s: %s.", what, cudaGetErrorString(error));
}

#define KVX_CUDA_TRY(what, call)                            \
  do {                                                      \
    const cudaError_t error_ = (call);                      \
    if (error_ != cudaSuccess) return failed(what, error_); \
  } while (0)

// The graph a stream is captured into; NULL: it is not captured.
cudaError_t captured_graph(void* stream, cudaGraph_t* graph) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  *graph = nullptr;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, nullptr, graph, nullptr, nullptr, nullptr);
#else
  const cudaError_t error =
      cudaStreamGetCaptureInfo_v2(static_cast<cudaStream_t>(stream), &status, nullptr, graph, nullptr, nullptr);
#endif
  if (status != cudaStreamCaptureStatusActive) *graph = nullptr;
  return error;
}

// Slots that something on a stream still reads.
struct Held {
  cudaEvent_t passed;
  std::vector<SlotRef> slots;
};

class Pool {
 public:
  kvx_status_t take(size_t bytes, SlotRef* out) {
    int size_class = 0;
    while ((kLeastSlot << size_class) < bytes) size_class++;
    const RelaxedCapture relaxed;
    collect();
    Slot slot;
    if (!find_idle(size_class, &slot)) KVX_TRY(carve(size_class, &slot));
    *out = SlotRef(new Slot(slot), [this](Slot* done) {
      {
        const std::lock_guard<std::mutex> lock(idle_mutex_);
        idle_[done->size_class].push_back(*done);
      }
      delete done;
    });
    return KVX_STATUS_OK;
  }

  kvx_status_t hold(std::vector<SlotRef> slots, void* stream) {
    const RelaxedCapture relaxed;
    const std::lock_guard<std::mutex> lock(held_mutex_);
    cudaEvent_t event;
    if (events_.empty()) {
      KVX_CUDA_TRY("no event could be made", cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    } else {
      event = events_.back();
      events_.pop_back();
    }
    const cudaError_t error = cudaEventRecord(event, static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) {
      events_.push_back(event);
      return failed("no event could be recorded", error);
    }
    held_.push_back(Held{event, std::move(slots)});
    return KVX_STATUS_OK;
  }

  kvx_status_t own_stream(cudaStream_t* out) {
    const std::lock_guard<std::mutex> lock(arena_mutex_);
    if (!stream_) KVX_CUDA_TRY("no stream could be made", cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    *out = stream_;
    return KVX_STATUS_OK;
  }

 private:
  // A few are asked for each that is added, so that a call costs the same however many are under way. One that is not
  // done goes to the end: behind it may stand those of a faster stream.
  void collect() {
    const std::lock_guard<std::mutex> lock(held_mutex_);
    for (int i = 0; i < kAsked && !held_.empty(); i++) {
      Held first = std::move(held_.front());
      held_.pop_front();
      const cudaError_t error = cudaEventQuery(first.passed);
      if (error == cudaErrorNotReady) {
        cudaGetLastError();  // no error, but the next to ask for one would be given it
        held_.push_back(std::move(first));
        continue;
      }
      events_.push_back(first.passed);
    }
  }

  bool find_idle(int size_class, Slot* out) {
    const std::lock_guard<std::mutex> lock(idle_mutex_);
    std::vector<Slot>& idle = idle_[size_class];
    if (idle.empty()) return false;
    *out = idle.back();
    idle.pop_back();
    return true;
  }

  kvx_status_t carve(int size_class, Slot* out) {
    const std::lock_guard<std::mutex> lock(arena_mutex_);
    const size_t bytes = kLeastSlot << size_class;
    if (bytes > left_) {
      const size_t size = bytes > kArenaBytes ? bytes : kArenaBytes;
      void *host = nullptr, *device = nullptr;
      KVX_CUDA_TRY("no pinned memory for tables", cudaHostAlloc(&host, size, cudaHostAllocDefault));
      const cudaError_t error = cudaMalloc(&device, size);
      if (error != cudaSuccess) {
        cudaFreeHost(host);
        return failed("no device memory for tables", error);
      }
      host_ = static_cast<char*>(host), device_ = static_cast<char*>(device), left_ = size;
    }
    *out = Slot{host_, device_, size_class};
    host_ += bytes, device_ += bytes, left_ -= bytes;
    return KVX_STATUS_OK;
  }

  // A graph that goes gives its slots back from a thread of the driver, so nothing of the driver is called under this.
  std::mutex idle_mutex_;
  std::vector<Slot> idle_[kSizeClasses];
  std::mutex arena_mutex_;  // of what is left of the last arena, and of the stream
  char *host_ = nullptr, *device_ = nullptr;
  size_t left_ = 0;
  cudaStream_t stream_ = nullptr;
  std::mutex held_mutex_;  // of slots under way, and of events that are free
  std::deque<Held> held_;
  std::vector<cudaEvent_t> events_;
};

// Never destroyed: graphs and streams may outlive what C++ destroys at exit.
kvx_status_t pool_here(Pool** out) {
  static Pool* const pools = new Pool[kMaxDevices];
  int device = -1;
  KVX_CUDA_TRY("there is no current device", cudaGetDevice(&device));
  KVX_NEED(device >= 0 && device < kMaxDevices, "device %d is past the %d that have tables.", device, kMaxDevices);
  *out = &pools[device];
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t take_slot(size_t bytes, SlotRef* slot) {
  Pool* pool;
  KVX_TRY(pool_here(&pool));
  return pool->take(bytes, slot);
}

kvx_status_t send(const Slot& slot, size_t bytes, void* stream) {
  KVX_CUDA_TRY(
      "tables could not be put on the device",
      cudaMemcpyAsync(slot.device, slot.host, bytes, cudaMemcpyHostToDevice, static_cast<cudaStream_t>(stream)));
  return KVX_STATUS_OK;
}

kvx_status_t hold_until_passed(std::vector<SlotRef> slots, void* stream) {
  cudaGraph_t graph;
  KVX_CUDA_TRY("a stream could not be asked whether it is captured", captured_graph(stream, &graph));
  if (!graph) {
    Pool* pool;
    KVX_TRY(pool_here(&pool));
    return pool->hold(std::move(slots), stream);
  }
  auto* kept = new std::vector<SlotRef>(std::move(slots));
  const auto let_go = [](void* p) { delete static_cast<std::vector<SlotRef>*>(p); };
  cudaUserObject_t object;
  cudaError_t error = cudaUserObjectCreate(&object, kept, let_go, 1, cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) {
    delete kept;
    return failed("a graph could not be given its tables", error);
  }
  error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
  if (error == cudaSuccess) return KVX_STATUS_OK;
  cudaUserObjectRelease(object, 1);
  return failed("a graph could not be given its tables", error);
}

kvx_status_t Ahead::send(SlotRef slot, size_t bytes) {
  const RelaxedCapture relaxed;
  Pool* pool;
  cudaStream_t stream = nullptr;
  KVX_TRY(pool_here(&pool));
  KVX_TRY(pool->own_stream(&stream));
  if (!sent_) KVX_CUDA_TRY("no event could be made", cudaEventCreateWithFlags(&sent_, cudaEventDisableTiming));
  KVX_TRY(cuda::send(*slot, bytes, stream));
  slot_ = std::move(slot);
  // A slot that goes before the copy was made must not be written by the next that takes it.
  KVX_TRY(pool->hold({slot_}, stream));
  KVX_CUDA_TRY("no event could be recorded", cudaEventRecord(sent_, stream));
  return KVX_STATUS_OK;
}

kvx_status_t Ahead::put_before(void* stream) const {
  if (!slot_ || is_there_.load(std::memory_order_relaxed)) return KVX_STATUS_OK;
  const RelaxedCapture relaxed;
  cudaError_t error = cudaEventQuery(sent_);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();  // no error, but the next to ask for one would be given it
    cudaGraph_t graph;
    KVX_CUDA_TRY("a stream could not be asked whether it is captured", captured_graph(stream, &graph));
    if (!graph) error = cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), sent_, 0);
    else error = cudaEventSynchronize(sent_);  // a graph cannot wait for what is not in it; this is one small copy
    if (error == cudaSuccess) return KVX_STATUS_OK;
  }
  KVX_CUDA_TRY("tables could not be put on the device", error);
  is_there_.store(true, std::memory_order_relaxed);
  return KVX_STATUS_OK;
}

Ahead::~Ahead() {
  if (sent_) cudaEventDestroy(sent_);
}

}  // namespace cuda
}  // namespace kvx
