// amax on the device: a warp takes rows of one head, and maxima meet in the output. Magnitudes order as their bits do,
// so the maximum is an integer atomic and the result does not depend on the order.
#include "cuda/device.cuh"
#include "run.h"
#include "table.h"

namespace kvx {
namespace cuda {

namespace {

constexpr uint32_t kInfinity = 0x7f800000u;

__device__ __forceinline__ uint32_t finite_magnitude(float x) {
  const uint32_t b = __float_as_uint(x) & 0x7fffffffu;
  return b < kInfinity ? b : 0u;
}

// Bits of the largest finite magnitude in a lane's share of a row. Width: bytes a lane loads at a time; 0 = by element,
// any stride.
template <int Width> __device__ __forceinline__ uint32_t row_amax(const AmaxParams& p, const char* row, int lane) {
  uint32_t best = 0;
  if constexpr (Width == 0) {
    for (int64_t d = lane; d < p.head_dim; d += 32)
      best = max(best, finite_magnitude(load_float(row + d * p.rows.dim, p.rows.dtype)));
  } else {
    const int bytes = int(p.head_dim * p.rows.dim);
    for (int at = lane * Width; at < bytes; at += 32 * Width) {
      typename Vec<Width>::T v = load_once<typename Vec<Width>::T>(row + at);
      const uint32_t* w = reinterpret_cast<const uint32_t*>(&v);
#pragma unroll
      for (int i = 0; i < Width / 4; i++) {
        if (p.rows.dtype == KVX_DTYPE_F32) {
          best = max(best, finite_magnitude(__uint_as_float(w[i])));
        } else if (p.rows.dtype == KVX_DTYPE_BF16) {
          best = max(best, max(finite_magnitude(bf16_to_f32(uint16_t(w[i]))),
                               finite_magnitude(bf16_to_f32(uint16_t(w[i] >> 16)))));
        } else {
          best = max(best, max(finite_magnitude(f16_to_f32(uint16_t(w[i]))),
                               finite_magnitude(f16_to_f32(uint16_t(w[i] >> 16)))));
        }
      }
    }
  }
  return best;
}

template <int Width>
__global__ void __launch_bounds__(256) amax_rows(const __grid_constant__ AmaxParams p, BlockDivider divider) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32),
                warp = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t head = warp % p.num_heads;  // a warp stays with its head, so that it can keep the maximum to itself
  const int64_t step = warps / p.num_heads;
  if (warp >= step * p.num_heads) return;
  const char* rows = p.rows.data + head * p.rows.head;
  uint32_t best = 0;
  if (!p.slots) {
#pragma unroll 4
    for (int64_t token = warp / p.num_heads; token < p.num_tokens; token += step)
      best = max(best, row_amax<Width>(p, rows + token * p.rows.token, lane));
    best = __reduce_max_sync(0xffffffffu, best);
    if (lane == 0) atomicMax(reinterpret_cast<unsigned*>(p.amax + head * p.head), best);
    return;
  }
  for (int64_t token = warp / p.num_heads; token < p.num_tokens; token += step) {
    const int64_t slot = read_index(p.slots, token * p.slot_stride, p.slot_bytes);
    if (slot < 0 || slot == p.invalid_slot) continue;
    if (slot >= p.num_slots) {
      if (p.errors && head == 0 && lane == 0) atomicAdd(p.errors, 1ull);
      continue;
    }
    int64_t block, offset;
    divider.split(slot, &block, &offset);
    best = __reduce_max_sync(0xffffffffu, row_amax<Width>(p, rows + token * p.rows.token, lane));
    if (lane == 0) atomicMax(reinterpret_cast<unsigned*>(p.amax + block * p.block + head * p.head), best);
  }
}

}  // namespace

kvx_status_t amax(const AmaxParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0 || p.num_heads == 0 || p.head_dim == 0) return KVX_STATUS_OK;
  const int64_t most = int64_t(guard.num_sms()) * 8, need = (p.num_tokens * p.num_heads + 7) / 8,
                least = (p.num_heads + 7) / 8;
  const int64_t blocks = need < most ? need : (least > most ? least : most);
  const dim3 grid{unsigned(blocks)}, block{256};
  const BlockDivider divider = make_divider(p.block_size);
  // Entries are raised as unsigned bits, so they must not be negative: amax starts at 0 and only rises.
  const bool dense = p.rows.is_dense && p.head_dim * p.rows.dim < (1 << 30);
  const int width = dense ? common_alignment(uint64_t(uintptr_t(p.rows.data)) | uint64_t(p.rows.token) |
                                             uint64_t(p.rows.head) | uint64_t(p.head_dim * p.rows.dim))
                          : 0;
  if (width >= 16 && p.head_dim * p.rows.dim >= 512)
    return launch("amax_rows", amax_rows<16>, grid, block, stream, p, divider);
  if (width >= 8) return launch("amax_rows", amax_rows<8>, grid, block, stream, p, divider);
  if (width >= 4) return launch("amax_rows", amax_rows<4>, grid, block, stream, p, divider);
  return launch("amax_rows", amax_rows<0>, grid, block, stream, p, divider);
}

}  // namespace cuda
}  // namespace kvx
