#include "cuda/device.cuh"

#include "run.h"

namespace kvx {
namespace cuda {

namespace {
constexpr int kMaxDevices = 64;
int sm_count[kMaxDevices];  // 0 = not asked yet; races write the same value
int ptx_of[kMaxDevices];    // architecture the kernels on this device were compiled for; 0 = not asked yet
}  // namespace

DeviceGuard::DeviceGuard(int device) {
  cudaError_t error = cudaGetDevice(&previous_);
  if (error != cudaSuccess) {
    previous_ = -1;
    status_ =
        fail(KVX_STATUS_UNSUPPORTED, "the cache is in device memory, and there is no usable CUDA device here: %s.",
             cudaGetErrorString(error));
    return;
  }
  current_ = previous_;
  if (device < 0 || device == previous_) {
    previous_ = -1;
    return;
  }
  current_ = device;
  error = cudaSetDevice(device);
  if (error != cudaSuccess)
    status_ = fail(KVX_STATUS_INVALID_ARGUMENT, "device %d cannot be used: %s.", device, cudaGetErrorString(error));
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

int DeviceGuard::num_sms() const {
  if (current_ < 0 || current_ >= kMaxDevices) return 64;
  if (sm_count[current_] == 0) cudaDeviceGetAttribute(&sm_count[current_], cudaDevAttrMultiProcessorCount, current_);
  return sm_count[current_];
}

// Stands for every kernel here: they are compiled for the same architectures.
__global__ void probe() {}

// wait_for_previous() is code of sm_90 and later. A binary made from older PTX lacks it, whatever the device is, so the
// question is what this device would run, not what it is.
bool can_launch_early() {
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kMaxDevices) return false;
  if (ptx_of[device] == 0) {
    cudaFuncAttributes attributes = {};
    ptx_of[device] = cudaFuncGetAttributes(&attributes, probe) == cudaSuccess ? attributes.ptxVersion : -1;
  }
  return ptx_of[device] >= 90;
}

kvx_status_t launch_failed(const char* kernel, cudaError_t error) {
  return fail(KVX_STATUS_INTERNAL_ERROR, "launch of %s failed: %s (%d).", kernel, cudaGetErrorString(error),
              int(error));
}

void describe(kvx_build_info_t* info) {
  info->has_cuda = 1;
  info->cuda_archs = KVX_CUDA_ARCH_TEXT;
  int count = 0;  // cudaGetDeviceCount leaves it alone when there is no driver
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    count = 0;
    cudaGetLastError();
  }
  info->cuda_devices = count;
  cudaRuntimeGetVersion(&info->cuda_runtime);
  cudaDriverGetVersion(&info->cuda_driver);
}

}  // namespace cuda
}  // namespace kvx
