// amax on the device: a warp takes a row, and maxima meet in the output. Magnitudes order as their bits do, so the maximum is
// an integer atomic and the result does not depend on the order.
#include "../run.h"
#include "../table.h"
#include "device.cuh"

namespace kvx {
namespace cuda {

namespace {

__global__ void __launch_bounds__(256) amax_rows(const __grid_constant__ AmaxParams p, BlockDivider divider) {
  const int lane = threadIdx.x % 32;
  const int64_t warps = int64_t(gridDim.x) * (blockDim.x / 32), warp = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t head = warp % p.num_heads;  // a warp stays with its head, so that it can keep the maximum to itself
  const int64_t step = warps / p.num_heads;
  if (warp >= step * p.num_heads) return;
  float best = 0;
  for (int64_t token = warp / p.num_heads; token < p.num_tokens; token += step) {
    int64_t block = 0, offset;
    if (p.slots) {
      const int64_t slot = read_index(p.slots, token * p.slot_stride, p.slot_bytes);
      if (slot < 0 || slot == p.invalid_slot) continue;
      if (slot >= p.num_slots) {
        if (p.errors && head == 0 && lane == 0) atomicAdd(p.errors, 1ull);
        continue;
      }
      divider.split(slot, &block, &offset);
    }
    const char* row = p.rows.data + token * p.rows.token + head * p.rows.head;
    for (int64_t d = lane; d < p.head_dim; d += 32) {
      const float a = fabsf(load_float(row + d * p.rows.dim, p.rows.dtype));
      best = fmaxf(best, a < __int_as_float(0x7f800000) ? a : 0.0f);
    }
    if (p.slots) {
      for (int s = 16; s > 0; s /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, s));
      if (lane == 0) atomicMax(reinterpret_cast<int*>(p.amax + block * p.block + head * p.head), __float_as_int(best));
      best = 0;
    }
  }
  if (p.slots) return;
  for (int s = 16; s > 0; s /= 2) best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, s));
  if (lane == 0) atomicMax(reinterpret_cast<int*>(p.amax + head * p.head), __float_as_int(best));
}

}  // namespace

kvx_status_t amax(const AmaxParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0 || p.num_heads == 0 || p.head_dim == 0) return KVX_STATUS_OK;
  const int64_t most = int64_t(guard.num_sms()) * 8, need = (p.num_tokens * p.num_heads + 7) / 8, least = (p.num_heads + 7) / 8;
  const int64_t blocks = need < most ? need : (least > most ? least : most);
  return launch("amax_rows", amax_rows, dim3(unsigned(blocks)), dim3(256), stream, p, make_divider(p.block_size));
}

}  // namespace cuda
}  // namespace kvx
