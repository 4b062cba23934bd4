#include "device.cuh"

#include "../run.h"

namespace kvx {
namespace cuda {

namespace {
constexpr int kMaxDevices = 64;
int sm_count[kMaxDevices];  // 0 = not asked yet; races write the same value
int major_of[kMaxDevices];  // compute capability
}  // namespace

DeviceGuard::DeviceGuard(int device) {
  cudaError_t error = cudaGetDevice(&previous_);
  if (error != cudaSuccess) {
    previous_ = -1;
    status_ = fail(KVX_STATUS_UNSUPPORTED, "the cache is in device memory, and there is no usable CUDA device here: %s.", cudaGetErrorString(error));
    return;
  }
  current_ = previous_;
  if (device < 0 || device == previous_) {
    previous_ = -1;
    return;
  }
  current_ = device;
  error = cudaSetDevice(device);
  if (error != cudaSuccess) status_ = fail(KVX_STATUS_INVALID_ARGUMENT, "device %d cannot be used: %s.", device, cudaGetErrorString(error));
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

int DeviceGuard::num_sms() const {
  if (current_ < 0 || current_ >= kMaxDevices) return 64;
  if (sm_count[current_] == 0) cudaDeviceGetAttribute(&sm_count[current_], cudaDevAttrMultiProcessorCount, current_);
  return sm_count[current_];
}

bool can_launch_early() {
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= kMaxDevices) return false;
  if (major_of[device] == 0) cudaDeviceGetAttribute(&major_of[device], cudaDevAttrComputeCapabilityMajor, device);
  return major_of[device] >= 9;
}

kvx_status_t launch_failed(const char* kernel, cudaError_t error) {
  return fail(KVX_STATUS_INTERNAL_ERROR, "launch of %s failed: %s (%d).", kernel, cudaGetErrorString(error), int(error));
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
