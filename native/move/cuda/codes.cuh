// Chunks of 16 elements between floats and codes under scales of any type, with or without a tensor's own: 4-bit
// formats, scales of e4m3, e8m0 and f16. cells.cu has a kernel of its own for codes of 8 bits under f32 scales.
#pragma once
#include "move/cuda/cells.cuh"

namespace kvx {
namespace cuda {

// The largest magnitude among the lanes that share a scale, a power of two of them; NaN and infinities left out. By
// whole warps.
template <int IO> __device__ __forceinline__ uint32_t largest_of_group(const RawChunk<IO>& raw, uint32_t mine,
                                                                       uint32_t lanes) {
  const auto largest = [lanes](uint32_t m) {
    for (uint32_t hop = lanes / 2; hop > 0; hop /= 2) m = max(m, __shfl_xor_sync(0xffffffffu, m, hop));
    return m;
  };
  const uint32_t most = largest(mine);
  return __any_sync(0xffffffffu, most >= kInfinity) ? largest(finite_magnitude_bits(raw)) : most;
}

// From IO floats to code C (Encode), or from code C to IO floats, two tokens at a time.
template <int IO, int C, bool Encode>
__global__ void __launch_bounds__(kThreads, 4) convert_coded_chunks(const __grid_constant__ CellArgs a) {
  constexpr int U = 2, W = Encode ? DST : SRC;
  const DeviceCell& job = a.job[0];
  wait_for_previous();
  CellColumn c;
  if (!find_column(a, job, &c)) return;
  const DeviceRow& coded = job.row[W];
  const uint32_t group = job.group.divide(c.chunk);
  const bool owns = c.chunk == group * job.group.d;
  char* first = scale_of(coded, c.here, W, c.here.at[W] - int64_t(c.chunk) * job.digit[0].stride[W], c.scale[W]) +
                group * coded.scale.group;
  const uint32_t scale_step = coded.is_inline ? job.token_stride[W] : job.token_scale[W];
  ScaleParams scale = coded.scale;  // at a token's, once data is set: its strides are 0
  scale.group = 0;
  scale.tensor_scale = coded.tensor ? coded.tensor + c.layer : nullptr;
  for (uint32_t begin = 0; begin < job.token.size.d; begin += U * job.tokens_each) {
    RawChunk<IO> raw[U] = {};
    CodeChunk<C> codes[U] = {};
    bool there[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const uint32_t token = begin + u * job.tokens_each + c.lane;
      there[u] = !c.idle && token < c.tokens;
      const char* from = c.from + uint64_t(token) * job.token_stride[SRC];
      if (there[u]) {
        if constexpr (Encode) raw[u] = load_raw<IO>(from);
        else codes[u] = load_codes<C>(from, job.width[SRC]);
      }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      const uint32_t token = begin + u * job.tokens_each + c.lane;
      char* place = c.to + uint64_t(token) * job.token_stride[DST];
      scale.data = first + uint64_t(token) * scale_step;
      if constexpr (Encode) {
        const uint32_t mine = magnitude_bits(raw[u]),
                       most = scale.mode == SCALE_COMPUTED ? largest_of_group(raw[u], mine, job.group.d) : 0;
        if (!there[u]) continue;
        const float by = settle_scale(scale, C, 0, 0, 0, 0, 0, __uint_as_float(most), owns);
        encode_chunk<IO, C>(place, raw[u], mine, Quantiser<C>(by), job.width[DST]);
      } else if (there[u]) {
        float x[kChunk];
        decode_codes<C>(codes[u], x);
        const float by = read_scale(scale, 0, 0, 0, 0);
#pragma unroll
        for (int i = 0; i < kChunk; i++) x[i] = __fmul_rn(x[i], by);
        store_chunk<IO>(place, x);
      }
    }
  }
}

}  // namespace cuda
}  // namespace kvx
