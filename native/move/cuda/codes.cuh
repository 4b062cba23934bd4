// Rows that change between floats and codes, in chunks of 16 elements.
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

// Scales: of 8-bit codes f32, read or found from the row; ANY: of any type, read or found, and with a tensor's own.
enum Found { READ, COMPUTED, ANY };

// From IO floats to code C (Encode), or from code C to IO floats, two tokens at a time. Four blocks an SM: with five,
// registers spill (measured on an H200: 84 % of a copy against 81).
template <int IO, int C, bool Encode, Found Scale>
__global__ void __launch_bounds__(kThreads, 4) convert_cell_chunks(const __grid_constant__ CellArgs a) {
  constexpr int U = 2, W = Encode ? DST : SRC;
  const DeviceCell& job = a.job[0];  // one a launch: its fields are then operands, not loads
  wait_for_previous();
  CellColumn c;
  if (!find_column(a, job, &c)) return;
  const DeviceRow& coded = job.row[W];
  const uint32_t lane = c.lane, tokens = c.tokens, group = job.group.divide(c.chunk);
  const bool idle = c.idle, owns = c.chunk == group * job.group.d;
  char *from = c.from, *to = c.to;
  // Rows start where chunk 0 does; an inline scale is counted from there.
  char* scale = scale_of(coded, c.here, W, c.here.at[W] - int64_t(c.chunk) * job.digit[0].stride[W], c.scale[W]) +
                group * coded.scale.group;
  const uint32_t scale_step = coded.is_inline ? job.token_stride[W] : job.token_scale[W];
  ScaleParams any = coded.scale;  // ANY: at a token's, once data is set
  any.group = 0, any.tensor_scale = coded.tensor ? coded.tensor + c.layer : nullptr;
  for (uint32_t begin = 0; begin < job.token.size.d; begin += U * job.tokens_each) {
    RawChunk<IO> raw[U] = {};
    CodeChunk<C> codes[U] = {};
    bool there[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const uint32_t token = begin + u * job.tokens_each + lane;
      there[u] = !idle && token < tokens;
      if (there[u]) {
        if constexpr (Encode) raw[u] = load_raw<IO>(from + uint64_t(token) * job.token_stride[SRC]);
        else codes[u] = load_codes<C>(from + uint64_t(token) * job.token_stride[SRC], job.width[SRC]);
      }
    }
#pragma unroll
    for (int u = 0; u < U; u++) {
      const uint32_t token = begin + u * job.tokens_each + lane;
      char* place = to + uint64_t(token) * job.token_stride[DST];
      float* factor = reinterpret_cast<float*>(scale + uint64_t(token) * scale_step);
      any.data = scale + uint64_t(token) * scale_step;
      if constexpr (Encode) {
        const uint32_t mine = magnitude_bits(raw[u]);
        uint32_t most = 0;
        if (Scale == COMPUTED || (Scale == ANY && any.mode == SCALE_COMPUTED))
          most = largest_of_group(raw[u], mine, job.group.d);
        if (!there[u]) continue;
        if constexpr (Scale == COMPUTED) {
          float found = divide_by_qmax<C>(__uint_as_float(most));
          found = found > 1e-6f ? found : 1e-6f;
          if (owns) *factor = found;
          encode_chunk<IO, C>(place, raw[u], mine, Quantiser<C>::of_largest(found), job.width[DST]);
        } else {
          const float by = Scale == READ ? *factor : settle_scale(any, C, 0, 0, 0, 0, 0, __uint_as_float(most), owns);
          encode_chunk<IO, C>(place, raw[u], mine, Quantiser<C>(by), job.width[DST]);
        }
      } else if (there[u]) {
        float x[kChunk];
        decode_codes<C>(codes[u], x);
        const float by = Scale == ANY ? read_scale(any, 0, 0, 0, 0) : *factor;
#pragma unroll
        for (int i = 0; i < kChunk; i++) x[i] = __fmul_rn(x[i], by);
        store_chunk<IO>(place, x);
      }
    }
  }
}

}  // namespace cuda
}  // namespace kvx
