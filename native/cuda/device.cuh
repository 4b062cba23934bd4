// What every kernel file needs: the device guard, launching, and memory access of a given width.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "check.h"
#include "format.h"
#include "params.h"

namespace kvx {
namespace cuda {

using namespace common;

// Makes `device` current for one call (-1 leaves it) and restores it. status() says whether there is a device at all.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  kvx_status_t status() const { return status_; }
  int num_sms() const;

 private:
  int previous_ = -1, current_ = -1;
  kvx_status_t status_ = KVX_STATUS_OK;
};

kvx_status_t launch_failed(const char* kernel, cudaError_t error);

// cudaLaunchKernelEx returns this launch's own error; cudaGetLastError would also hand us somebody else's.
template <class... Params, class... Args>
kvx_status_t launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, void* stream, Args&&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed(name, error);
}

// Like launch, but the kernel may be put on the device while the one before it on the stream still drains; it must call
// wait_for_previous() before it touches memory, but for what is older than the kernel before it, if that one waited
// before it let the next start. Hides a microsecond of launch on Hopper and later; elsewhere a plain launch.
bool can_launch_early();

template <class... Params, class... Args>
kvx_status_t launch_early_with(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes,
                               void* stream, Args&&... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = size_t(shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &early;
  config.numAttrs = can_launch_early() ? 1 : 0;
  cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed(name, error);
}

template <class... Params, class... Args>
kvx_status_t launch_early(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, void* stream,
                          Args&&... args) {
  return launch_early_with(name, kernel, grid, block, 0, stream, static_cast<Args&&>(args)...);
}

__device__ __forceinline__ void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel of the stream, if launched early, may be put on the device from here on; it waits for this one's end
// all the same.
__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <int Bytes> struct Vec;
template <> struct Vec<16> {
  using T = uint4;
};
template <> struct Vec<8> {
  using T = uint2;
};
template <> struct Vec<4> {
  using T = uint32_t;
};
template <> struct Vec<2> {
  using T = uint16_t;
};
template <> struct Vec<1> {
  using T = uint8_t;
};

// Rows are read once and not again soon: keep them out of L1 and first to leave L2.
template <class T> __device__ __forceinline__ T load_once(const void* p) { return __ldcs(static_cast<const T*>(p)); }
template <class T> __device__ __forceinline__ void store_once(void* p, T v) { __stcs(static_cast<T*>(p), v); }

// Division by a number known on the host, as a multiplication: a 32-bit division costs some twenty instructions, and
// the threads of a copy do little else. Exact for dividends under 2^31.
struct FastDivider {
  uint32_t d, multiplier, shift;
  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

inline FastDivider make_fast_divider(int64_t d) {
  FastDivider f{uint32_t(d), 0, 0};
  while ((uint64_t(1) << f.shift) < uint64_t(d)) f.shift++;
  f.multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << f.shift) - uint64_t(d))) / uint64_t(d) + 1);
  return f;
}

// Everything the fast kernels index fits 32 bits (checked by fits_32), so that an address is one multiply-add: 64-bit
// by 64-bit products cost four times that, and a copy does little else.
constexpr int64_t kMaxCount = 0x7fffffff;
constexpr int64_t kMaxStride = 0xffffffff;

// Slot or position -> (block, offset) of the general kernels: a shift for powers of two, a multiplication for what fits
// 31 bits, else a division.
struct BlockDivider {
  int64_t size;
  FastDivider fast;
  int32_t shift;  // -1 = not a power of two
  __device__ __forceinline__ void split(int64_t x, int64_t* quotient, int64_t* remainder) const {
    if (shift >= 0) *quotient = x >> shift;
    else if (uint64_t(x) <= 0x7fffffffu) *quotient = fast.divide(uint32_t(x));
    else *quotient = x / size;
    *remainder = x - *quotient * size;
  }
};

inline BlockDivider make_divider(int64_t size) {
  BlockDivider d{size, make_fast_divider(size), -1};
  if ((size & (size - 1)) == 0) d.shift = __builtin_ctzll(uint64_t(size));
  return d;
}

// The widest access every address of a set allows: the lowest set bit of everything or-ed together.
inline int common_alignment(uint64_t bits) {
  const uint64_t low = bits & (~bits + 1);
  return low == 0 || low > 16 ? 16 : int(low);
}

// The shape of a block of threads: columns along x, tokens along y, all warps full.
struct Tile {
  unsigned columns, lanes;
};

inline Tile make_tile(int64_t columns) {
  constexpr unsigned kThreads = 256;
  if (columns >= kThreads) return Tile{kThreads, 1};
  const unsigned c = unsigned(columns);
  for (unsigned lanes = kThreads / c; lanes > 0; lanes--)
    if (c * lanes % 32 == 0) return Tile{c, lanes};
  return Tile{c, (31 + c) / c};  // a warp that is not full; nothing shuffles across it (see fits_shuffle)
}

}  // namespace cuda
}  // namespace kvx
