// The instructions tiles are made of, one function each. Fragment layouts are PTX's m16n8k16: lane = 4 * g + t.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace kvx {
namespace cuda {
namespace tiles {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The same address, kept in a register: otherwise it is found anew, by four instructions, wherever it is used.
__device__ __forceinline__ void* kept_address(void* p) {
  uint32_t at = shared_address(p);
  asm volatile("" : "+r"(at));
  return __cvta_shared_to_generic(at);
}

// 16 bytes from global to shared memory; `bytes` 0 writes zeros and reads nothing. The compiler does not know that
// shared memory changes: who reads it waits (wait_copies, a barrier) first, and that it knows of.
__device__ __forceinline__ void copy_16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void copy_4(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void copy_8(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft> __device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}
// Four 8 x 8 matrices of 16-bit elements, as multiplications leave them; lane 8 i + j says where row j of matrix i
// goes.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
#endif
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t to, uint32_t lo, uint32_t hi) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(lo), "r"(hi) : "memory");
}
__device__ __forceinline__ void store_shared_16(uint32_t to, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_turned(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
// An 8x8 matrix of 16-bit elements, rows to columns, across the warp.
__device__ __forceinline__ uint32_t turn_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

struct Bf16Numbers {
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
struct F16Numbers {
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
  }
  static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

struct E4m3Numbers {
  // Rounded to the nearest; past 448 is 448, and NaN stays.
  static __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    uint32_t r = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1; cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3; "
        "mov.b32 %0, {lo, hi}; }"
        : "=r"(r)
        : "f"(a), "f"(b), "f"(c), "f"(d));
#endif
    return r;
  }
};

// Two codes of a byte each (the low 16 bits of x) as two f16, exactly.
__device__ __forceinline__ uint32_t e4m3_to_f16(uint32_t x) {
  uint32_t r;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 lo; cvt.u16.u32 lo, %1; cvt.rn.f16x2.e4m3x2 %0, lo; }" : "=r"(r) : "r"(x));
#else
  // Sign, exponent and mantissa moved to f16's places make x * 2^-8; NaN (all ones) becomes f16's.
  const uint32_t spread = __byte_perm(x, 0, 0x1404);  // b0 and b1 in the high bytes of two halves
  const uint32_t bits = (spread & 0x80008000u) | ((spread >> 1) & 0x3f803f80u);
  const __half2 scaled = __hmul2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(256.f));
  r = *reinterpret_cast<const uint32_t*>(&scaled);
  if ((x & 0x7f) == 0x7f) r |= 0x7fffu;
  if ((x & 0x7f00) == 0x7f00) r |= 0x7fff0000u;
#endif
  return r;
}
// The same of the high 16 bits.
__device__ __forceinline__ uint32_t e4m3_high_to_f16(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t r;
  asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.rn.f16x2.e4m3x2 %0, hi; }" : "=r"(r) : "r"(x));
  return r;
#else
  return e4m3_to_f16(x >> 16);
#endif
}
// x + 128 beside 0x64 is the f16 1024 + x + 128; `x` holds codes with their top bits flipped already.
__device__ __forceinline__ uint32_t s8_to_f16(uint32_t flipped, uint32_t select) {
  const uint32_t bits = __byte_perm(flipped, 0x64646464u, select);
  const __half2 moved = __hsub2(*reinterpret_cast<const __half2*>(&bits), __float2half2_rn(1152.f));
  return *reinterpret_cast<const uint32_t*>(&moved);
}

__device__ __forceinline__ void store_if_negative(uint32_t to, float x) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %1, 0f00000000; @p st.shared.f32 [%0], %1; }" ::"r"(to), "f"(x)
               : "memory");
}

// 1 / x of what is neither tiny nor 0, good to a step of f32. NaN stays.
__device__ __forceinline__ float inverse(float x) {
  x = x > 3e38f ? 3e38f : x;
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.f), y);
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tiles
}  // namespace cuda
}  // namespace kvx
