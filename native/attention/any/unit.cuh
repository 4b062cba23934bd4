// Eight elements of a row of any format: loaded as they lie, and turned into bf16 parts.
//
// A number is a sum of bf16 parts, each what the ones before it leave over: one holds codes of 8 and 4 bits exactly,
// also times a scale of few bits (e4m3, e8m0); two hold 16 bits of any number; three hold f32.
#pragma once
#include "cuda/chunk.cuh"
#include "tiles/ptx.cuh"

namespace kvx {
namespace cuda {

constexpr int kUnit = 8;

// One plane of the cache, as units see it.
struct AnyPlane {
  PlaneParams p;
  int32_t dims, units;        // of a row; units are an even number, so that they fill whole multiplications
  int32_t threads;            // that load: each has every `row_step`th row, or unit where elements lie apart
  int32_t is_staged;          // units are copied ahead of their use
  int32_t raw_at, raw_steps;  // where units lie as they come, in shared memory: [2 tiles][raw_steps][thread]
  int32_t row_step, unit_step;
  FastDivider split;      // of a thread's number: into row and unit, or where elements lie apart into unit and row
  FastDivider per_group;  // units under one scale
  int32_t bits;           // of an element
  int32_t load_bytes;     // of a load: a whole unit's up to 16, or 4; 0 = element by element
  int32_t has_groups;     // scales along the row, which multiply elements; others multiply scores and weights
  int32_t scale_words;    // of a row's scales, copied ahead; 0 = read where they are used
};

// The words of a unit, element by element: rows whose elements lie apart, or that are no multiple of eight.
template <int kBits> struct UnitWords {
  uint32_t w[kBits / 4];
};
template <int kBits> __device__ __noinline__ UnitWords<kBits> load_elements(const AnyPlane& a, const char* row,
                                                                            uint32_t first) {
  UnitWords<kBits> x = {};
  constexpr int kStep = kBits == 4 ? 2 : 1;  // elements of a load
  if (!row) return x;
#pragma unroll
  for (int i = 0; i < kUnit; i += kStep) {
    const uint32_t d = first + i;
    if (d >= uint32_t(a.dims)) break;
    const uint32_t piece = d / uint32_t(a.p.pack), in = d - piece * uint32_t(a.p.pack);
    const char* from = row + piece * a.p.dim_hi + (kBits == 4 ? int64_t(in / 2) : in * a.p.dim_lo);
    if constexpr (kBits == 32) x.w[i] = *reinterpret_cast<const uint32_t*>(from);
    else if constexpr (kBits == 16) x.w[i / 2] |= uint32_t(*reinterpret_cast<const uint16_t*>(from)) << i % 2 * 16;
    else if constexpr (kBits == 8) x.w[i / 4] |= uint32_t(*reinterpret_cast<const uint8_t*>(from)) << i % 4 * 8;
    else x.w[0] |= uint32_t(*reinterpret_cast<const uint8_t*>(from)) << i * 4;
  }
  return x;
}

// Where a unit of close elements begins in its row.
__device__ __forceinline__ int64_t unit_offset(const AnyPlane& a, uint32_t unit) {
  const uint32_t first = unit * kUnit, piece = a.p.pack == a.dims ? 0 : first / uint32_t(a.p.pack);
  return piece * a.p.dim_hi + (first - piece * uint32_t(a.p.pack)) * a.bits / 8;
}

// A unit's bytes to shared memory, zeros where it is not there; `bytes` of a copy are 16, 8 or 4.
template <int kBytes> __device__ __forceinline__ void copy_unit(uint32_t to, const char* from, int is_there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(kBytes),
               "r"(is_there ? kBytes : 0)
               : "memory");
}

__device__ __forceinline__ void two_halves(uint32_t pair, float* x) {
  const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&pair));
  x[0] = f.x, x[1] = f.y;
}

__device__ __forceinline__ uint32_t multiply_bf16(uint32_t x, uint32_t y) {
  const __nv_bfloat162 z =
      __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&y));
  return *reinterpret_cast<const uint32_t*>(&z);
}

// A unit's numbers as bf16, where that holds them. Codes are brought into bf16 as they are: 128 + x has an x under 16
// in its low bits.
template <int kBits> __device__ __forceinline__ void decode_pairs(const uint32_t* words, int dtype, uint32_t (&x)[4]) {
  if constexpr (kBits == 16) {
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = words[i];
  } else if constexpr (kBits == 8) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float f[4];
      if (dtype == KVX_DTYPE_S8) {  // 2^23 + code has the code in its low byte
        const uint32_t flipped = words[i] ^ 0x80808080u;
#pragma unroll
        for (int j = 0; j < 4; j++) f[j] = __uint_as_float(__byte_perm(flipped, 0x4b000000u, 0x7540 | j)) - 8388736.f;
      } else if (dtype == KVX_DTYPE_F8_E4M3) {
        two_halves(tiles::e4m3_to_f16(words[i] & 0xffffu), f), two_halves(tiles::e4m3_high_to_f16(words[i]), f + 2);
      } else {
        two_halves(__byte_perm(words[i], 0, 0x1404), f), two_halves(__byte_perm(words[i], 0, 0x3424), f + 2);
      }
      x[2 * i] = tiles::Bf16Numbers::pack(f[0], f[1]), x[2 * i + 1] = tiles::Bf16Numbers::pack(f[2], f[3]);
    }
  } else if (dtype == KVX_DTYPE_S4) {
    const uint32_t flipped = words[0] ^ 0x88888888u;
    uint32_t apart[4];  // elements i and i + 4
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t bits = (flipped >> 4 * i & 0x000f000fu) | 0x43004300u;
      const __nv_bfloat162 moved =
          __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&bits), __float2bfloat162_rn(136.f));
      apart[i] = *reinterpret_cast<const uint32_t*>(&moved);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      x[i] = __byte_perm(apart[2 * i], apart[2 * i + 1], 0x5410),
      x[i + 2] = __byte_perm(apart[2 * i], apart[2 * i + 1], 0x7632);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) {  // magnitudes 0 .5 1 1.5 2 3 4 6 by their codes: the two bytes of a bf16
      const uint32_t codes = words[0] >> 16 * i & 0xffffu, select = codes & 0x7777u;
      const uint32_t top = __byte_perm(0x3f3f3f00u, 0x40404040u, select),
                     next = __byte_perm(0xc0800000u, 0xc0804000u, select);
      x[2 * i] = __byte_perm(next, top, 0x5140) | ((codes << 12 | codes << 24) & 0x80008000u);
      x[2 * i + 1] = __byte_perm(next, top, 0x7362) | ((codes << 4 | codes << 16) & 0x80008000u);
    }
  }
}

// A unit's numbers, without their scales.
template <int kBits> __device__ __forceinline__ void decode_unit(const uint32_t* words, int dtype, float (&x)[kUnit]) {
  if constexpr (kBits == 32) {
#pragma unroll
    for (int i = 0; i < kUnit; i++) x[i] = __uint_as_float(words[i]);
  } else {
    uint32_t pairs[4];
    if (kBits != 16 || dtype == KVX_DTYPE_BF16) decode_pairs<kBits>(words, dtype, pairs);
#pragma unroll
    for (int i = 0; i < kUnit / 2; i++) {
      if (kBits == 16 && dtype == KVX_DTYPE_F16) two_halves(words[i], x + 2 * i);
      else x[2 * i] = __uint_as_float(pairs[i] << 16), x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  }
}

// Numbers to bf16 parts, part by part of 16 bytes `apart`.
template <int kParts> __device__ __forceinline__ void store_parts(uint32_t to, uint32_t apart, float (&x)[kUnit]) {
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    uint32_t pair[kUnit / 2];
#pragma unroll
    for (int i = 0; i < kUnit / 2; i++) {
      pair[i] = tiles::Bf16Numbers::pack(x[2 * i], x[2 * i + 1]);
      if (part + 1 < kParts)
        x[2 * i] -= __uint_as_float(pair[i] << 16), x[2 * i + 1] -= __uint_as_float(pair[i] & 0xffff0000u);
    }
    tiles::store_shared_16(to + part * apart, make_uint4(pair[0], pair[1], pair[2], pair[3]));
  }
}

}  // namespace cuda
}  // namespace kvx
