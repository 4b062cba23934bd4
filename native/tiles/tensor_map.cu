#include "tiles/tensor_map.h"

#include <atomic>

#include <cuda_runtime.h>

namespace kvx {
namespace cuda {

namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's own call, asked of the runtime: the library is not linked with libcuda, and loads where there is none.
kvx_status_t find_encode(Encode* encode) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) {
    cudaGetLastError();
    return fail(KVX_STATUS_UNSUPPORTED, "the driver could not be asked for cuTensorMapEncodeTiled: %s.",
                cudaGetErrorString(error));
  }
  if (result != cudaDriverEntryPointSuccess || !found)
    return fail(KVX_STATUS_UNSUPPORTED, "this driver has no cuTensorMapEncodeTiled (%d). It came with CUDA 12.0.",
                int(result));
  *encode = reinterpret_cast<Encode>(found);
  return KVX_STATUS_OK;
}

// What the engine steps by from one to the next of `count`: where there is but one, any
// stride will do, and 0 would be refused.
int64_t stride_of(int64_t bytes, int64_t count, int64_t row_bytes) { return count > 1 ? bytes : row_bytes; }

}  // namespace

bool fits_tensor_map(const MappedPlane& p) {
  constexpr int64_t kMostBytes = int64_t(1) << 40, kMostCount = 0x7fffffff;  // coordinates have 31 bits
  const PlaneParams& plane = *p.plane;
  if (!plane.is_dense || plane.head_dim % 8 || reinterpret_cast<uintptr_t>(plane.data) % 16 ||
      box_tokens(p.block_size, p.tile_rows) == 0)
    return false;
  const int64_t counts[3] = {p.num_heads, p.block_size, p.num_blocks},
                strides[3] = {plane.head, plane.token, plane.block};
  for (int i = 0; i < 3; i++) {
    const int64_t stride = stride_of(strides[i], counts[i], plane.head_dim * 2);
    if (counts[i] < 1 || counts[i] > kMostCount || stride <= 0 || stride % 16 || stride >= kMostBytes) return false;
  }
  return true;
}

kvx_status_t make_tensor_map(CUtensorMap* map, const MappedPlane& p) {
  static std::atomic<Encode> found{nullptr};
  Encode encode = found.load(std::memory_order_relaxed);
  if (!encode) {
    KVX_TRY(find_encode(&encode));
    found.store(encode, std::memory_order_relaxed);
  }
  const PlaneParams& plane = *p.plane;
  const int64_t row_bytes = plane.head_dim * 2;
  const cuuint64_t counts[4] = {cuuint64_t(plane.head_dim), cuuint64_t(p.num_heads), cuuint64_t(p.block_size),
                                cuuint64_t(p.num_blocks)};
  const cuuint64_t strides[3] = {cuuint64_t(stride_of(plane.head, p.num_heads, row_bytes)),
                                 cuuint64_t(stride_of(plane.token, p.block_size, row_bytes)),
                                 cuuint64_t(stride_of(plane.block, p.num_blocks, row_bytes))};
  const cuuint32_t box[4] = {64, 1, cuuint32_t(box_tokens(p.block_size, p.tile_rows)), 1}, steps[4] = {1, 1, 1, 1};
  // A row's other half is asked for right after the first: both come with one request to memory.
  const CUtensorMapL2promotion fetch =
      row_bytes % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, plane.data, counts, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, fetch, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return KVX_STATUS_OK;
  return fail(KVX_STATUS_INTERNAL_ERROR,
              "cuTensorMapEncodeTiled returned %d for a plane of %lld blocks x %lld tokens x %lld heads x %d elements, "
              "strides %lld, %lld, %lld bytes.",
              int(result), (long long)p.num_blocks, (long long)p.block_size, (long long)p.num_heads, plane.head_dim,
              (long long)strides[2], (long long)strides[1], (long long)strides[0]);
}

}  // namespace cuda
}  // namespace kvx
