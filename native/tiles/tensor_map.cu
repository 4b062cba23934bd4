#include "tiles/tensor_map.h"

#include <atomic>

#include <cuda_runtime.h>

#include "format.h"

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

// [last][token][head][dim] of 16-bit elements, in bytes and counts, and the box.
struct Shape {
  const void* data;
  int64_t dims, counts[3], strides[3];  // of head, token, last
  int64_t box_heads, box_tokens;
};

bool fits(const Shape& s) {
  constexpr int64_t kMostBytes = int64_t(1) << 40, kMostCount = 0x7fffffff;  // coordinates have 31 bits
  if (s.dims % 8 || reinterpret_cast<uintptr_t>(s.data) % 16 || s.box_tokens == 0) return false;
  for (int i = 0; i < 3; i++) {
    const int64_t stride = stride_of(s.strides[i], s.counts[i], s.dims * 2);
    if (s.counts[i] < 1 || s.counts[i] > kMostCount || stride <= 0 || stride % 16 || stride >= kMostBytes) return false;
  }
  return true;
}

kvx_status_t make(CUtensorMap* map, const Shape& s) {
  static std::atomic<Encode> found{nullptr};
  Encode encode = found.load(std::memory_order_relaxed);
  if (!encode) {
    KVX_TRY(find_encode(&encode));
    found.store(encode, std::memory_order_relaxed);
  }
  const int64_t row_bytes = s.dims * 2;
  const cuuint64_t counts[4] = {cuuint64_t(s.dims), cuuint64_t(s.counts[0]), cuuint64_t(s.counts[1]),
                                cuuint64_t(s.counts[2])};
  cuuint64_t strides[3];
  for (int i = 0; i < 3; i++) strides[i] = cuuint64_t(stride_of(s.strides[i], s.counts[i], row_bytes));
  const cuuint32_t box[4] = {64, cuuint32_t(s.box_heads), cuuint32_t(s.box_tokens), 1}, steps[4] = {1, 1, 1, 1};
  // A row's other half is asked for right after the first: both come with one request to memory.
  const CUtensorMapL2promotion fetch =
      row_bytes % 256 == 0 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, const_cast<void*>(s.data), counts, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, fetch, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return KVX_STATUS_OK;
  return fail(KVX_STATUS_INTERNAL_ERROR,
              "cuTensorMapEncodeTiled returned %d for %lld x %lld tokens x %lld heads x %lld elements, "
              "strides %lld, %lld, %lld bytes.",
              int(result), (long long)s.counts[2], (long long)s.counts[1], (long long)s.counts[0], (long long)s.dims,
              (long long)strides[2], (long long)strides[1], (long long)strides[0]);
}

Shape shape_of(const MappedPlane& p) {
  return {p.plane->data,
          p.plane->head_dim * common::dtype_bits(p.plane->dtype) / 16,
          {p.num_heads, p.block_size, p.num_blocks},
          {p.plane->head, p.plane->token, p.plane->block},
          1,
          box_tokens(p.block_size, p.tile_rows)};
}
Shape shape_of(const MappedRows& q) {
  return {q.rows->data,
          q.head_dim,
          {q.num_heads, q.num_tokens, 1},
          {q.rows->head, q.rows->token, 0},
          q.group,
          q.box_rows % q.group == 0 ? q.box_rows / q.group : 0};
}

}  // namespace

bool fits_tensor_map(const MappedPlane& p) {
  return p.plane->is_dense && p.plane->head_dim * common::dtype_bits(p.plane->dtype) % 128 == 0 && fits(shape_of(p));
}
kvx_status_t make_tensor_map(CUtensorMap* map, const MappedPlane& p) { return make(map, shape_of(p)); }

bool fits_tensor_map(const MappedRows& q) { return q.rows->is_dense && fits(shape_of(q)); }
kvx_status_t make_tensor_map(CUtensorMap* map, const MappedRows& q) { return make(map, shape_of(q)); }

}  // namespace cuda
}  // namespace kvx
