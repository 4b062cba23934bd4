// A row of a hybrid cache from f32 numbers to its page, by one warp: norm, rotation, Hadamard, codes.
// kvx/ops/entry/finish.py and kvx/quant/rows.py have the arithmetic. Rows of 512 in the usual formats stay in
// registers; the rest go by way of shared memory.
#pragma once
#include <math.h>

#include "cuda/rope.cuh"
#include "entry/cuda/step.cuh"

namespace kvx {
namespace cuda {

struct RowAt {
  char *data, *scales;
};

__device__ __forceinline__ RowAt row_at(const RowPages& r, int32_t page, int32_t row) {
  char* base = r.data + page * r.page;
  return RowAt{base + int64_t(row) * r.data_bytes,
               base + int64_t(r.rows) * r.data_bytes + int64_t(row) * r.scale_bytes};
}

// ---- rows of 512: lane l holds pieces l and l + 32 of eight elements, the order in which squares are added

constexpr int kLaneRow = 32 * kChunk, kLaneRope = 64,
              kRopeLane = 24;  // the rotary part: second pieces of lanes 24 to 31

enum LaneFormat {
  LANES_NONE,     // not in registers
  LANES_V4,       // 448 e4m3 in groups of 64, 64 bf16, scales that are powers of two
  LANES_V4_BF16,  // the same, of numbers rounded to bf16 first
  LANES_BF16,
  LANES_F32,
  LANES_INDEX  // rows of 128, all of them coded: entry/cuda/encode_index.cuh
};

// Format of a row that fits, and in *least_code the scale that no group is under.
inline LaneFormat lane_format(const RowPages& r, const FinishParams& f, int32_t* least_code) {
  *least_code = 0;
  const uint64_t bits = uint64_t(uintptr_t(r.data)) | uint64_t(r.page) | uint64_t(uintptr_t(f.cos)) |
                        uint64_t(uintptr_t(f.sin)) | uint64_t(f.table_row) | uint64_t(uintptr_t(f.weight));
  if (r.dim != kLaneRow || (f.cos && f.rope_dim != kLaneRope) || f.table_row > kMaxCount || common_alignment(bits) < 16)
    return LANES_NONE;
  if (r.group == 0) return r.rope_dim ? LANES_NONE : r.dtype == KVX_DTYPE_F32 ? LANES_F32 : LANES_BF16;
  if (r.dtype != KVX_DTYPE_F8_E4M3 || r.group != 64 || r.rope_dim != kLaneRope || r.scale_dtype != KVX_DTYPE_E8M0 ||
      r.scale_bytes != 8)
    return LANES_NONE;
  const float least = r.least_amax / 448.0f;
  uint8_t code;
  store_scale(reinterpret_cast<char*>(&code), KVX_DTYPE_E8M0, least > r.least_scale ? least : r.least_scale);
  *least_code = code;
  if (code < 1 || code > 247) return LANES_NONE;  // quotients of smaller groups are subnormal: see scale_code
  return r.rounds_first ? LANES_V4_BF16 : LANES_V4;
}

// The weight of a lane's pieces as loaded; what is not f32 fills the first word of each. Nothing waits for it until it
// is widened.
struct RawWeight {
  uint4 first[2], second[2];
};

__device__ __forceinline__ RawWeight load_raw_weight(const FinishParams& f, uint32_t lane) {
  RawWeight r{};
  const bool is_f32 = f.weight_dtype == KVX_DTYPE_F32;
  const uint4* at = reinterpret_cast<const uint4*>(f.weight) + (is_f32 ? 2 * lane : lane);
  r.first[0] = __ldg(at), r.second[0] = __ldg(at + (is_f32 ? 64 : 32));
  if (is_f32) r.first[1] = __ldg(at + 1), r.second[1] = __ldg(at + 65);
  return r;
}

__device__ __forceinline__ void widen_weight(const FinishParams& f, const RawWeight& r, float (&w)[kChunk]) {
  const uint32_t words[kChunk] = {r.first[0].x,  r.first[0].y,  r.first[0].z,  r.first[0].w,
                                  r.first[1].x,  r.first[1].y,  r.first[1].z,  r.first[1].w,
                                  r.second[0].x, r.second[0].y, r.second[0].z, r.second[0].w,
                                  r.second[1].x, r.second[1].y, r.second[1].z, r.second[1].w};
  const auto widen = [&](auto number) {
#pragma unroll
    for (int i = 0; i < kChunk; i++) w[i] = number(words[i / kPiece * kPiece + i % kPiece / 2], i % 2);
  };
  if (f.weight_dtype == KVX_DTYPE_F32) {
#pragma unroll
    for (int i = 0; i < kChunk; i++) w[i] = __uint_as_float(words[i]);
  } else if (f.weight_dtype == KVX_DTYPE_BF16) {
    widen([](uint32_t two, int i) { return __uint_as_float(i ? two & 0xffff0000u : two << 16); });
  } else {
    widen([](uint32_t two, int i) { return __half2float(__ushort_as_half(uint16_t(i ? two >> 16 : two))); });
  }
}

__device__ __forceinline__ void load_weight(const FinishParams& f, uint32_t lane, float (&w)[kChunk]) {
  widen_weight(f, load_raw_weight(f, lane), w);
}

// cos and sin of the four pairs of a lane that has some.
struct Turn {
  float4 c, s;
};

__device__ __forceinline__ Turn load_turn(const FinishParams& f, uint32_t lane, int32_t at) {
  Turn t{};  // set: what is not would be kept through loops
  if (f.cos && lane >= kRopeLane) {
    const uint64_t offset = uint64_t(uint32_t(at)) * uint32_t(f.table_row);
    t.c =
        __ldg(reinterpret_cast<const float4*>(reinterpret_cast<const char*>(f.cos) + (lane - kRopeLane) * 16 + offset));
    t.s =
        __ldg(reinterpret_cast<const float4*>(reinterpret_cast<const char*>(f.sin) + (lane - kRopeLane) * 16 + offset));
  }
  return t;
}

__device__ __forceinline__ void rotate_lanes(const FinishParams& f, uint32_t lane, const Turn& t, float (&x)[kChunk]) {
  if (!f.cos || lane < kRopeLane) return;
  rotate_pair(&x[8], &x[9], t.c.x, t.s.x), rotate_pair(&x[10], &x[11], t.c.y, t.s.y);
  rotate_pair(&x[12], &x[13], t.c.z, t.s.z), rotate_pair(&x[14], &x[15], t.c.w, t.s.w);
}

__device__ __forceinline__ void finish_lanes(const FinishParams& f, uint32_t lane, const float (&w)[kChunk],
                                             const Turn& t, float (&x)[kChunk]) {
  if (f.weight) {
    float sum = __fadd_rn(add_squares(x), add_squares(x + kPiece));
#pragma unroll
    for (int hop = 16; hop > 0; hop /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, hop));
    const float r = norm_factor(sum, f.inverse_dim, f.eps);
#pragma unroll
    for (int i = 0; i < kChunk; i++) x[i] = __fmul_rn(__fmul_rn(x[i], r), w[i]);
  }
  rotate_lanes(f, lane, t, x);
}

// The power of two for a largest magnitude, as the byte it is stored in: amax / 448, rounded, then up. 448 is 1.75 *
// 2^8, and a quotient rounds to a power of two only where it is one: so the exponent less 8, and one more for mantissas
// above 1.75.
__device__ __forceinline__ int32_t scale_code(uint32_t amax_bits, int32_t least_code) {
  return max(int32_t((amax_bits + 0x1fffffu) >> 23) - 8, least_code);
}

__device__ __forceinline__ uint32_t finite_bits(float x) {
  const uint32_t b = __float_as_uint(x) & 0x7fffffffu;
  return b < kInfinity ? b : 0u;
}

// Bits of the largest finite magnitude of both groups a lane has a piece of; eight lanes share each.
template <bool IsBf16> __device__ __forceinline__ void group_amax(const float (&x)[kChunk],
                                                                  const uint32_t (&words)[kPiece], uint32_t* a,
                                                                  uint32_t* b) {
  uint32_t most_a = 0, most_b = 0;
  if constexpr (IsBf16) {  // both in one word
#pragma unroll
    for (int i = 0; i < 4; i++)
      most_a = __vmaxu2(most_a, words[i] & 0x7fff7fffu), most_b = __vmaxu2(most_b, words[i + 4] & 0x7fff7fffu);
    uint32_t both = __vmaxu2(__byte_perm(most_a, most_b, 0x5410), __byte_perm(most_a, most_b, 0x7632));
    if (both + 0x00800080u & 0x80008000u) {  // rare: not finite
      most_a = most_b = 0;
#pragma unroll
      for (int i = 0; i < kPiece; i++)
        most_a = max(most_a, finite_bits(x[i])), most_b = max(most_b, finite_bits(x[i + kPiece]));
      both = most_a >> 16 | most_b;
    }
#pragma unroll
    for (int hop = 4; hop > 0; hop /= 2) both = __vmaxu2(both, __shfl_xor_sync(0xffffffffu, both, hop));
    most_a = both << 16, most_b = both & 0xffff0000u;
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; i++)
      most_a = max(most_a, __float_as_uint(x[i]) & 0x7fffffffu),
      most_b = max(most_b, __float_as_uint(x[i + kPiece]) & 0x7fffffffu);
    if (max(most_a, most_b) >= kInfinity) {
      most_a = most_b = 0;
#pragma unroll
      for (int i = 0; i < kPiece; i++)
        most_a = max(most_a, finite_bits(x[i])), most_b = max(most_b, finite_bits(x[i + kPiece]));
    }
#pragma unroll
    for (int hop = 4; hop > 0; hop /= 2)
      most_a = max(most_a, __shfl_xor_sync(0xffffffffu, most_a, hop)),
      most_b = max(most_b, __shfl_xor_sync(0xffffffffu, most_b, hop));
  }
  *a = most_a, *b = most_b;
}

// Codes of four, in one word from the start.
__device__ __forceinline__ uint32_t e4m3_four(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t w;
  asm("{\n.reg .b16 lo, hi;\ncvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\nmov.b32 "
      "%0, {lo, hi};\n}"
      : "=r"(w)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return w;
#else
  return encode_four<KVX_DTYPE_F8_E4M3>(a, b, c, d);
#endif
}

__device__ __forceinline__ uint2 encode_eight(const float* x, int32_t code) {
  const float inverse = __uint_as_float(uint32_t(254 - code) << 23);  // exact, so the product is the quotient
  float y[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; i++) y[i] = __fmul_rn(x[i], inverse);
  return make_uint2(e4m3_four(y[0], y[1], y[2], y[3]), e4m3_four(y[4], y[5], y[6], y[7]));
}

// Every lane of the warp comes here, with the same row; data NULL: it is not stored.
template <LaneFormat F> __device__ __forceinline__ void store_lanes(const RowAt& to, uint32_t lane, int32_t least_code,
                                                                    float (&x)[kChunk]) {
  if constexpr (F == LANES_F32) {
    if (!to.data) return;
#pragma unroll
    for (int i = 0; i < 4; i++)
      *reinterpret_cast<float4*>(to.data + 1024 * (i / 2) + 32 * lane + 16 * (i % 2)) =
          make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
  } else {
    uint32_t words[kPiece];
#pragma unroll
    for (int i = 0; i < kPiece; i++) words[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    const uint4 second = make_uint4(words[4], words[5], words[6], words[7]);
    if constexpr (F == LANES_BF16) {
      if (!to.data) return;
      *reinterpret_cast<uint4*>(to.data + 16 * lane) = make_uint4(words[0], words[1], words[2], words[3]);
      *reinterpret_cast<uint4*>(to.data + 512 + 16 * lane) = second;
    } else {
      if constexpr (F == LANES_V4_BF16) {
#pragma unroll
        for (int i = 0; i < kChunk; i++)
          x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
      }
      uint32_t a, b;
      group_amax<F == LANES_V4_BF16>(x, words, &a, &b);
      if (!to.data) return;
      const int32_t code_a = scale_code(a, least_code), code_b = scale_code(b, least_code);
      *reinterpret_cast<uint2*>(to.data + 8 * lane) = encode_eight(x, code_a);
      // __stwb is a plain store that the compiler leaves whole.
      if (lane < kRopeLane)
        __stwb(reinterpret_cast<uint2*>(to.data + 256 + 8 * lane), encode_eight(x + kPiece, code_b));
      else __stwb(reinterpret_cast<uint4*>(to.data + 448 + 16 * (lane - kRopeLane)), second);
      if (lane % 8 == 0)
        to.scales[lane / 8] = char(code_a), to.scales[4 + lane / 8] = char(lane < kRopeLane ? code_b : 0);
    }
  }
}

// ---- four rows at once, of LANES_V4_BF16: a step of all four before the next, so that a warp waits for its lanes once
// and not four times

// Sums of squares of four rows over the lanes, by halves, as finish_lanes adds them: lanes 8i
// to 8i + 7 get that of row i.
__device__ __forceinline__ float add_four(const float (&sum)[4], uint32_t lane) {
  const bool is_upper = lane & 16, is_odd = lane & 8;
  const float a = __fadd_rn(is_upper ? sum[2] : sum[0], __shfl_xor_sync(0xffffffffu, is_upper ? sum[0] : sum[2], 16));
  const float b = __fadd_rn(is_upper ? sum[3] : sum[1], __shfl_xor_sync(0xffffffffu, is_upper ? sum[1] : sum[3], 16));
  float one = __fadd_rn(is_odd ? b : a, __shfl_xor_sync(0xffffffffu, is_odd ? a : b, 8));
#pragma unroll
  for (int hop = 4; hop > 0; hop /= 2) one = __fadd_rn(one, __shfl_xor_sync(0xffffffffu, one, hop));
  return one;
}

// The largest magnitude of a lane's pieces, the first one's in the low half. OnlyFinite:
// of what is neither NaN nor infinite.
template <bool OnlyFinite> __device__ __forceinline__ uint32_t lane_amax(const uint32_t (&words)[kPiece]) {
  uint32_t m[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; i++) {
    m[i] = words[i] & 0x7fff7fffu;
    const uint32_t top = m[i] + 0x00800080u & 0x80008000u;  // of halves that are not finite
    if constexpr (OnlyFinite) m[i] &= ~(top - (top >> 15));
  }
  const uint32_t a = __vmaxu2(__vimax3_u16x2(m[0], m[1], m[2]), m[3]),
                 b = __vmaxu2(__vimax3_u16x2(m[4], m[5], m[6]), m[7]);
  return __vmaxu2(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
}

// encode_eight of numbers that are bf16. A product with a power of two is exact, but where it is too small for any code
// but 0.
__device__ __forceinline__ uint2 encode_words(const uint32_t* words, int32_t code) {
  const uint32_t inverse = uint32_t(254 - code) * 0x00800080u;
  float y[kPiece];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const __nv_bfloat162 q = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(words + i),
                                     *reinterpret_cast<const __nv_bfloat162*>(&inverse));
    const uint32_t w = *reinterpret_cast<const uint32_t*>(&q);
    y[2 * i] = __uint_as_float(w << 16), y[2 * i + 1] = __uint_as_float(w & 0xffff0000u);
  }
  return make_uint2(e4m3_four(y[0], y[1], y[2], y[3]), e4m3_four(y[4], y[5], y[6], y[7]));
}

// `amax`: of both groups that a lane has a piece of, the first in the low half.
__device__ __forceinline__ void store_words(const RowAt& to, uint32_t lane, int32_t least_code, uint32_t amax,
                                            const uint32_t (&words)[kPiece]) {
  if (!to.data) return;
  const int32_t code_a = scale_code(amax << 16, least_code), code_b = scale_code(amax & 0xffff0000u, least_code);
  *reinterpret_cast<uint2*>(to.data + 8 * lane) = encode_words(words, code_a);
  if (lane < kRopeLane) __stwb(reinterpret_cast<uint2*>(to.data + 256 + 8 * lane), encode_words(words + 4, code_b));
  else
    __stwb(reinterpret_cast<uint4*>(to.data + 448 + 16 * (lane - kRopeLane)),
           make_uint4(words[4], words[5], words[6], words[7]));
  if (lane % 8 == 0) to.scales[lane / 8] = char(code_a), to.scales[4 + lane / 8] = char(lane < kRopeLane ? code_b : 0);
}

// ---- any row: floats in shared memory, and room for its sums of eight. By one warp.

struct AnyRow {
  int32_t sums;    // sums of eight: a power of two
  float hadamard;  // dim^-0.5; 0: no Hadamard rotation
};

inline AnyRow any_row(int64_t dim, bool has_hadamard) {
  AnyRow r{1, has_hadamard ? float(pow(double(dim), -0.5)) : 0.0f};
  while (int64_t(r.sums) * kPiece < dim) r.sums *= 2;
  return r;
}

inline int64_t any_row_floats(int64_t dim, const AnyRow& r) { return (dim + 3) / 4 * 4 + r.sums; }

constexpr int64_t kPlainShared = 48 << 10;  // what every device gives without asking

// `fixed`: bytes of shared memory that the kernel has besides.
template <class... Params> kvx_status_t allow_shared(void (*kernel)(Params...), int64_t bytes, int64_t fixed,
                                                     int64_t dim) {
  if (bytes + fixed <= kPlainShared) return KVX_STATUS_OK;
  int device = 0, most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (bytes + fixed > most)
    return fail(
        KVX_STATUS_UNSUPPORTED,
        "a row of %lld elements takes %lld bytes of shared memory; this device has %d. The host has no such bound.",
        (long long)dim, (long long)(bytes + fixed), most);
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed("a kernel of hybrid rows", error);
}

__device__ inline void finish_any(const FinishParams& f, const AnyRow& r, int32_t dim, int64_t at, float* x,
                                  float* sums) {
  const int lane = threadIdx.x % 32;
  if (f.weight) {
    for (int32_t piece = lane; piece < r.sums; piece += 32) {
      float v[kPiece];
#pragma unroll
      for (int i = 0; i < kPiece; i++) v[i] = piece * kPiece + i < dim ? x[piece * kPiece + i] : 0.0f;
      sums[piece] = add_squares(v);
    }
    __syncwarp();
    for (int32_t half = r.sums / 2; half > 0; half /= 2) {
      for (int32_t i = lane; i < half; i += 32) sums[i] = __fadd_rn(sums[i], sums[i + half]);
      __syncwarp();
    }
    const float factor = norm_factor(sums[0], f.inverse_dim, f.eps);
    const int size = dtype_bits(f.weight_dtype) / 8;
    for (int32_t d = lane; d < dim; d += 32)
      x[d] = __fmul_rn(__fmul_rn(x[d], factor), load_float(f.weight + int64_t(d) * size, f.weight_dtype));
    __syncwarp();
  }
  if (f.cos) {
    const float *c = reinterpret_cast<const float*>(reinterpret_cast<const char*>(f.cos) + at * f.table_row),
                *s = reinterpret_cast<const float*>(reinterpret_cast<const char*>(f.sin) + at * f.table_row);
    float* part = x + dim - f.rope_dim;
    for (int32_t i = lane; i < f.rope_dim / 2; i += 32)
      rotate_pair(part + 2 * i, part + 2 * i + 1, __ldg(c + i), __ldg(s + i));
    __syncwarp();
  }
  if (r.hadamard != 0.0f) {
    for (int32_t width = 1; width < dim; width *= 2) {
      for (int32_t i = lane; i < dim / 2; i += 32) {
        float* lo = x + 2 * i - (i & (width - 1));
        const float a = lo[0], b = lo[width];
        lo[0] = __fadd_rn(a, b), lo[width] = __fsub_rn(a, b);
      }
      __syncwarp();
    }
    for (int32_t d = lane; d < dim; d += 32) x[d] = __fmul_rn(x[d], r.hadamard);
    __syncwarp();
  }
}

// e2m1 with ties to the smaller magnitude and without -0.
__device__ __forceinline__ uint32_t e2m1_down(float y) {
  const float m = fabsf(y);
  const uint32_t code =
      uint32_t(m > 0.25f) + (m > 0.75f) + (m > 1.25f) + (m > 1.75f) + (m > 2.5f) + (m > 3.5f) + (m > 5.0f);
  return code | (y < 0.0f && code ? 8u : 0u);
}

// The scale of a group, stored by one lane; returned as it will be read back.
__device__ __forceinline__ float settle_group(const RowPages& r, char* place, float amax, bool owns) {
  float scale = fmaxf(__fdiv_rn(fmaxf(amax, r.least_amax), dtype_qmax(r.dtype)), r.least_scale);
  alignas(4) char stored[4];
  if (r.has_power_scale) store_scale(stored, KVX_DTYPE_E8M0, scale), scale = load_scale(stored, KVX_DTYPE_E8M0);
  store_scale(stored, r.scale_dtype, scale);
  if (owns) store_scale(place, r.scale_dtype, scale);
  return load_scale(stored, r.scale_dtype);
}

__device__ inline void store_any(const RowPages& r, const RowAt& to, float* x) {
  const int lane = threadIdx.x % 32;
  if (r.rounds_first) {
    for (int32_t d = lane; d < r.dim; d += 32) x[d] = bf16_to_f32(f32_to_bf16(x[d]));
    __syncwarp();
  }
  for (int32_t d = r.coded + lane; d < r.dim; d += 32)
    *reinterpret_cast<uint16_t*>(to.data + r.coded_bytes + 2 * (d - r.coded)) = f32_to_bf16(x[d]);
  if (r.group == 0) {
    for (int32_t d = lane; d < r.coded; d += 32) {
      if (r.dtype == KVX_DTYPE_F32) *reinterpret_cast<float*>(to.data + 4 * d) = x[d];
      else *reinterpret_cast<uint16_t*>(to.data + 2 * d) = f32_to_bf16(x[d]);
    }
    return;
  }
  const int scale_size = r.scale_dtype == KVX_DTYPE_F32 ? 4 : 1;
  for (int32_t i = r.num_groups * scale_size + lane; i < r.scale_bytes; i += 32) to.scales[i] = 0;
  for (int32_t g = 0; g < r.num_groups; g++) {
    const float* group = x + g * r.group;
    uint32_t most = 0;
    for (int32_t i = lane; i < r.group; i += 32) most = max(most, finite_bits(group[i]));
    most = __reduce_max_sync(0xffffffffu, most);
    const float scale = settle_group(r, to.scales + g * scale_size, __uint_as_float(most), lane == 0);
    if (r.dtype == KVX_DTYPE_E2M1) {
      for (int32_t i = lane; i < r.group / 2; i += 32) {
        const float lo = __fdiv_rn(group[2 * i], scale), hi = __fdiv_rn(group[2 * i + 1], scale);
        to.data[(g * r.group) / 2 + i] =
            char(r.ties_down ? e2m1_down(lo) | e2m1_down(hi) << 4
                             : uint32_t(encode8(lo, KVX_DTYPE_E2M1)) | uint32_t(encode8(hi, KVX_DTYPE_E2M1)) << 4);
      }
    } else {
      for (int32_t i = lane; i < r.group; i += 32)
        to.data[g * r.group + i] = char(encode8(__fdiv_rn(group[i], scale), KVX_DTYPE_F8_E4M3));
    }
  }
}

}  // namespace cuda
}  // namespace kvx
