// merge_attention on the device: eight elements of a row a thread, or one where rows are strided or odd. Each thread
// finds its row's weights itself: a few numbers that its neighbours read too.
#include "attention/merge.h"

#include "cuda/columns.cuh"
#include "cuda/rope.cuh"

namespace kvx {
namespace cuda {

namespace {

struct MergeArgs {
  MergeParams p;
  FastDivider per_row, per_token;  // threads of a row; rows of a token
  uint32_t count;                  // threads with work
};

__device__ __forceinline__ float lse_at(const char* p) { return __ldg(reinterpret_cast<const float*>(p)); }

template <int N>
__device__ __forceinline__ void load_part(const char* src, int dtype, float (&x)[N]) {
  if constexpr (N == kPiece) load_eight(src, dtype, x);
  else x[0] = load_float(src, dtype);
}

// NaN weights pass through: __expf is not used, so that the host's result is within an ulp or two of f32.
template <int N>
__global__ void __launch_bounds__(256) merge_parts(const __grid_constant__ MergeArgs a) {
  const MergeParams& p = a.p;
  const uint32_t index = blockIdx.x * blockDim.x + threadIdx.x;
  wait_for_previous();
  if (index >= a.count) return;
  const uint32_t row = a.per_row.divide(index), piece = index - row * a.per_row.d;
  const uint32_t token = a.per_token.divide(row), head = row - token * a.per_token.d;
  const float none = -__int_as_float(0x7f800000);
  const char* lses = p.lses + token * p.lses_token + head * p.lses_head;
  const float sink = p.sinks ? lse_at(p.sinks + head * p.sink_stride) : none;
  float most = sink;
  for (int64_t i = 0; i < p.num_parts; i++) most = fmaxf(most, lse_at(lses + i * p.lses_part));
  const char* src = p.parts.data + token * p.parts.token + head * p.parts.head + int64_t(piece) * N * p.parts.dim;
  float sum[N] = {}, total = 0;
#pragma unroll 4
  for (int64_t i = 0; i < p.num_parts; i++) {
    const float lse = lse_at(lses + i * p.lses_part);
    if (lse == none) continue;
    const float w = expf(__fsub_rn(lse, most));
    float x[N];
    load_part<N>(src + i * p.part, p.parts.dtype, x);
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = __fadd_rn(sum[j], __fmul_rn(w, x[j]));
    total = __fadd_rn(total, w);
  }
  const float divisor = sink == none ? total : __fadd_rn(total, expf(__fsub_rn(sink, most)));
  if (divisor != 0.0f) {
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = __fdiv_rn(sum[j], divisor);
  }
  char* dst = p.out.data + token * p.out.token + head * p.out.head + int64_t(piece) * N * p.out.dim;
  if constexpr (N == kPiece) {
    if (p.out.dtype == KVX_DTYPE_F32) {
#pragma unroll
      for (int j = 0; j < N; j++) sum[j] = one_nan(sum[j]);
      *reinterpret_cast<float4*>(dst) = make_float4(sum[0], sum[1], sum[2], sum[3]);
      *reinterpret_cast<float4*>(dst + 16) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    } else {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; j++)
        w[j] = p.out.dtype == KVX_DTYPE_BF16 ? pack_bf16(sum[2 * j], sum[2 * j + 1])
                                             : pack_f16(sum[2 * j], sum[2 * j + 1]);
      *reinterpret_cast<uint4*>(dst) = make_uint4(w[0], w[1], w[2], w[3]);
    }
  } else {
    store_float(dst, p.out.dtype, sum[0]);
  }
  if (p.lse && piece == 0)
    *reinterpret_cast<float*>(p.lse + token * p.lse_token + head * p.lse_head) =
        one_nan(total == 0.0f ? none : __fadd_rn(most, logf(total)));
}

}  // namespace

kvx_status_t merge(const MergeParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0) return KVX_STATUS_OK;
  const uint64_t bits = rows_address_bits(p.parts) | rows_address_bits(p.out) | uint64_t(p.part);
  const bool is_wide = p.parts.is_dense && p.out.is_dense && p.head_dim % kPiece == 0 && common_alignment(bits) == 16;
  const int64_t per_row = is_wide ? p.head_dim / kPiece : p.head_dim, count = p.num_tokens * p.num_heads * per_row;
  if (count > kMaxCount)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld tokens of %lld heads are more than one launch takes; split the batch.",
                (long long)p.num_tokens, (long long)p.num_heads);
  const MergeArgs a{p, make_fast_divider(per_row), make_fast_divider(p.num_heads), uint32_t(count)};
  const dim3 grid(unsigned(divide_up(count, 256)), 1, 1), block(256, 1, 1);
  return is_wide ? launch_early("merge_parts", merge_parts<kPiece>, grid, block, stream, a)
                 : launch_early("merge_parts", merge_parts<1>, grid, block, stream, a);
}

}  // namespace cuda
}  // namespace kvx
