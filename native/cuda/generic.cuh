// One warp, one (token, head) row, any strides, any type, any scale: what runs where no fast kernel fits.
#pragma once
#include "cuda/chunk.cuh"

namespace kvx {
namespace cuda {

__device__ __forceinline__ char* element_at(const PlaneParams& p, char* cell, int64_t d, int bits) {
  const int64_t hi = d / p.pack, in = d % p.pack;
  return cell + hi * p.dim_hi + (bits == 4 ? in / 2 : in * p.dim_lo);
}

__device__ __forceinline__ void copy_element(char* to, const char* from, int bits) {
  if (bits == 32) *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
  else *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(from);
}

__device__ inline void write_row(const PlaneParams& p, const RowsParams& rows, char* cell, const char* src,
                                 int64_t token, int64_t block, int64_t offset, int64_t head) {
  const int lane = threadIdx.x % 32, bits = dtype_bits(p.dtype);
  const int64_t size = p.scale.group_size;
  for (int64_t g = 0; g < p.scale.num_groups; g++) {
    float amax = 0;
    if (p.scale.mode == SCALE_COMPUTED) {
      for (int64_t d = g * size + lane; d < (g + 1) * size; d += 32) {
        const float a = fabsf(load_float(src + d * rows.dim, rows.dtype));
        amax = fmaxf(amax, a < __int_as_float(0x7f800000) ? a : 0.0f);
      }
      for (int step = 16; step > 0; step /= 2) amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
    }
    const float scale = settle_scale(p.scale, p.dtype, token, block, offset, head, g, amax, lane == 0);
    if (bits == 4) {
      for (int64_t d = g * size + 2 * lane; d < (g + 1) * size; d += 64) {
        const uint32_t lo = encode8(__fdiv_rn(load_float(src + d * rows.dim, rows.dtype), scale), p.dtype);
        const uint32_t hi = encode8(__fdiv_rn(load_float(src + (d + 1) * rows.dim, rows.dtype), scale), p.dtype);
        *element_at(p, cell, d, bits) = char(lo | hi << 4);
      }
      continue;
    }
    for (int64_t d = g * size + lane; d < (g + 1) * size; d += 32) {
      char* to = element_at(p, cell, d, bits);
      const char* from = src + d * rows.dim;
      if (p.dtype == rows.dtype) copy_element(to, from, bits);
      else if (bits > 8) store_float(to, p.dtype, load_float(from, rows.dtype));
      else *reinterpret_cast<uint8_t*>(to) = encode8(__fdiv_rn(load_float(from, rows.dtype), scale), p.dtype);
    }
  }
}

__device__ inline void gather_row(const PlaneParams& p, const RowsParams& rows, char* dst, char* cell, int64_t block,
                                  int64_t offset, int64_t head) {
  const int lane = threadIdx.x % 32, bits = dtype_bits(p.dtype);
  for (int64_t d = lane; d < p.head_dim; d += 32) {
    char* to = dst + d * rows.dim;
    const char* from = element_at(p, cell, d, bits);
    if (p.dtype == rows.dtype) {
      copy_element(to, from, bits);
    } else if (bits > 8) {
      store_float(to, rows.dtype, load_float(from, p.dtype));
    } else {
      uint8_t code = *reinterpret_cast<const uint8_t*>(from);
      if (bits == 4) code = d % p.pack & 1 ? code >> 4 : code & 15;
      store_float(to, rows.dtype,
                  decode8(code, p.dtype) * read_scale(p.scale, block, offset, head, d / p.scale.group_size));
    }
  }
}

__device__ inline void zero_row(const RowsParams& rows, char* dst, int64_t head_dim) {
  for (int64_t d = threadIdx.x % 32; d < head_dim; d += 32) {
    if (rows.dtype == KVX_DTYPE_F32) *reinterpret_cast<uint32_t*>(dst + d * rows.dim) = 0;
    else *reinterpret_cast<uint16_t*>(dst + d * rows.dim) = 0;
  }
}

}  // namespace cuda
}  // namespace kvx
