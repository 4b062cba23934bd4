// Barriers in shared memory that count arrivals, by phase; and setting registers aside for those who multiply.
#pragma once
#include "tiles/ptx.cuh"

namespace kvx {
namespace cuda {
namespace tiles {

__device__ __forceinline__ void init_barrier(uint32_t at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
// Barriers just initialised become visible to what arrives at them from outside of the threads.
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(uint32_t at) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(at) : "memory");
}
// Threads that have met may have one of them arrive for all. racecheck follows each thread's own arrivals, so for it
// all do (`make sanitize-gpu`): a barrier then waits for that many times as many.
#ifdef KVX_ALL_ARRIVE
constexpr bool kAllArrive = true;
#else
constexpr bool kAllArrive = false;
#endif
__host__ __device__ constexpr int arrivals_of(int threads) { return kAllArrive ? threads : 1; }
__device__ __forceinline__ void arrive_for_all(uint32_t at, bool is_the_one) {
  if (kAllArrive || is_the_one) arrive(at);
}
// Arrives once every copy_16 this thread has begun is there.
__device__ __forceinline__ void arrive_when_copied(uint32_t at) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
// For so many.
__device__ __forceinline__ void arrive_times(uint32_t at, int times) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0], %1; }" ::"r"(at), "r"(times)
               : "memory");
}
// Arrives, and so many bytes have to arrive as well before the phase is over.
__device__ __forceinline__ void arrive_and_expect(uint32_t at, int bytes) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1; }" ::"r"(at), "r"(bytes)
               : "memory");
}
// Bytes that stand together, by Hopper's copy engine: they arrive at the barrier. Addresses and `bytes` are multiples
// of 16.
__device__ __forceinline__ void copy_run(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// Waits until the phase with this parity is over.
__device__ __forceinline__ void wait(uint32_t at, int parity) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }\n" ::"r"(at),
      "r"(parity)
      : "memory");
}
// Whether it is, without waiting.
__device__ __forceinline__ bool is_over(uint32_t at, int parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(at), "r"(parity)
               : "memory");
  return done;
}
// Shared memory written by ordinary stores and copies becomes visible to multiplications.
__device__ __forceinline__ void show_to_multiplications() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters> __device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Some of a block's warps meet; `id` 1..15.
__device__ __forceinline__ void meet(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Comes to a meeting without waiting for the others.
__device__ __forceinline__ void pass(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
