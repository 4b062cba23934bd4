// append_swa on the device, one launch a call. Two kernels: rows of 512 in the usual formats in registers, a few of
// them on their way at once, and one row a warp by way of shared memory for the rest.
#include "cuda/columns.cuh"
#include "entry/cuda/encode.cuh"

namespace kvx {
namespace cuda {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;

struct SwaArgs {
  AppendSwaParams p;
  FastDivider rows;   // of a page
  FastDivider usual;  // tokens of a sequence, were all as long
  AnyRow any;
  int32_t least_code;
  bool reads_all;  // sequences are shorter than windows, as far as the host can tell: rows are loaded before their
                   // place is known
};

// Where a token's row goes; page -1: nowhere.
struct TokenPlace {
  int32_t page, row, at;
};

// Sequences are often as long as each other: where that is so, one load tells what a search takes three for.
__device__ __forceinline__ StepToken guess_token(const SwaArgs& a, uint32_t token) {
  const StepParams& s = a.p.step;
  const StepToken t = open_sequence(s, int32_t(min(a.usual.divide(token), uint32_t(s.num_seqs) - 1)));
  if (__all_sync(0xffffffffu, t.seq >= 0 && int32_t(token) >= t.begin && int32_t(token) < t.end)) return t;
  return find_token(s, int32_t(token));
}

// The sequence of a token by one lane alone.
__device__ __forceinline__ StepToken search_token(const StepParams& s, int32_t token) {
  int32_t first = 0, count = s.num_seqs;
  while (count > 1) {
    const int32_t half = count / 2;
    if (__ldg(s.cu_seqlens + first + half) <= token) first += half, count -= half;
    else count = half;
  }
  return open_sequence(s, first);
}

// All lanes of a warp come here with the same `first`, and each with a token of its own, at `first` or soon after.
__device__ __forceinline__ TokenPlace place_token(const SwaArgs& a, uint32_t first, uint32_t token, bool counts) {
  const AppendSwaParams& p = a.p;
  TokenPlace place{-1, 0, 0};
  StepToken t = guess_token(a, first);
  if (token >= p.step.num_tokens) return place;
  if (int32_t(token) < t.begin || int32_t(token) >= t.end) {
    t = search_token(p.step, int32_t(token));
    if (int32_t(token) < t.begin || int32_t(token) >= t.end) return place;
  }
  bool is_bad = t.is_bad && int32_t(token) == max(t.begin, 0);  // a sequence counts once
  if (t.seq >= 0 && !(p.positions && t.end - int32_t(token) > p.window.rows)) {
    const uint32_t at = uint32_t(t.start) + (token - uint32_t(t.begin));
    is_bad = at > uint32_t(kMaxCount) || (p.finish.cos && at >= p.finish.num_positions);
    if (!is_bad) {
      const uint32_t index = p.positions ? at : token, page = a.rows.divide(index);
      place = TokenPlace{p.positions ? t.slot : int32_t(page), int32_t(index - page * a.rows.d), int32_t(at)};
    }
  }
  if (is_bad && counts && p.errors) atomicAdd(p.errors, 1ull);
  return place;
}

__device__ __forceinline__ void mark_position(const AppendSwaParams& p, const TokenPlace& place) {
  if (p.positions) p.positions[int64_t(place.page) * p.window.rows + place.row] = place.at;
}

__device__ __forceinline__ char* from_lane(char* p, int lane) {
  return reinterpret_cast<char*>(__shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(p), lane));
}

// Rows that lane i has found the place of, `at` their positions.
template <int IO>
__device__ __forceinline__ void append_four(const FinishParams& f, int32_t least_code, uint32_t lane,
                                            const RawWeight& weight, const RawChunk<IO> (&raw)[4], int32_t at,
                                            const RowAt& mine) {
  Turn turn = load_turn(f, lane, __shfl_sync(0xffffffffu, at, 0));  // of a row at hand
  float x[kChunk], w[kChunk], factor = 1.0f;
  if (f.weight) {
    widen_weight(f, weight, w);
    float sums[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
      for (int j = 0; j < kChunk; j++) x[j] = element(raw[i], j);
      sums[i] = __fadd_rn(add_squares(x), add_squares(x + kPiece));
    }
    factor = norm_factor(add_four(sums, lane), f.inverse_dim, f.eps);
  }
  uint32_t words[4][kPiece], amax[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const Turn next = i < 3 ? load_turn(f, lane, __shfl_sync(0xffffffffu, at, i + 1)) : turn;
#pragma unroll
    for (int j = 0; j < kChunk; j++) x[j] = element(raw[i], j);
    if (f.weight) {
      const float r = __shfl_sync(0xffffffffu, factor, 8 * i);
#pragma unroll
      for (int j = 0; j < kChunk; j++) x[j] = __fmul_rn(__fmul_rn(x[j], r), w[j]);
    }
    rotate_lanes(f, lane, turn, x);
#pragma unroll
    for (int j = 0; j < kPiece; j++) words[i][j] = pack_bf16(x[2 * j], x[2 * j + 1]);
    amax[i] = lane_amax<false>(words[i]);
    turn = next;
  }
  if (__vmaxu2(__vimax3_u16x2(amax[0], amax[1], amax[2]), amax[3]) + 0x00800080u &
      0x80008000u) {  // rare: not all are finite
#pragma unroll
    for (int i = 0; i < 4; i++) amax[i] = lane_amax<true>(words[i]);
  }
#pragma unroll
  for (int hop = 4; hop > 0; hop /= 2) {
#pragma unroll
    for (int i = 0; i < 4; i++) amax[i] = __vmaxu2(amax[i], __shfl_xor_sync(0xffffffffu, amax[i], hop));
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    store_words(RowAt{from_lane(mine.data, i), from_lane(mine.scales, i)}, lane, least_code, amax[i], words[i]);
}

// Lane i finds the place of row i, and all of them go through every row: what has no place is not stored, and no lane
// leaves before the others, whom it exchanges sums with.
template <int IO, LaneFormat F, int Rows>
__global__ void __launch_bounds__(kThreads, Rows == 1                              ? 6
                                            : IO == KVX_DTYPE_F32 || F == LANES_V4 ? 4
                                                                                   : 5)
    append_row_lanes(const __grid_constant__ SwaArgs a) {
  const AppendSwaParams& p = a.p;
  const uint32_t lane = threadIdx.x % 32, last = uint32_t(p.step.num_tokens) - 1,
                 from = (blockIdx.x * kWarps + threadIdx.x / 32) * Rows;
  const bool is_past = from > last;
  const uint32_t first = is_past ? last / Rows * Rows : from;
  wait_for_previous();
  let_next_start();
  RawChunk<IO> raw[Rows];
  const char* const x0 = p.x.data + lane * piece_bytes<IO>;
  const auto load_row = [&](uint32_t token) {
    const char* x = x0 + int64_t(token) * p.x.token;
    return load_pieces<IO>(x, x + 32 * piece_bytes<IO>);
  };
  if (a.reads_all) {
#pragma unroll
    for (int i = 0; i < Rows; i++) raw[i] = load_row(min(first + i, last));
  }
  RawWeight weight{};
  if (p.finish.weight) weight = load_raw_weight(p.finish, lane);
  const bool counts = lane < Rows && !is_past;
  TokenPlace place = place_token(a, first, first + lane % Rows, counts);
  if (is_past) place.page = -1;
  if (!__any_sync(0xffffffffu, place.page >= 0)) return;
  if (place.page < 0) place.at = 0;
  RowAt mine{nullptr, nullptr};
  if (place.page >= 0) {
    mine = row_at(p.window, place.page, place.row);
    if (counts) mark_position(p, place);
  }
  if constexpr (F == LANES_V4_BF16 && Rows == 4) {
    if (!a.reads_all) {
#pragma unroll
      for (int i = 0; i < Rows; i++) {
        raw[i] = RawChunk<IO>{};
        if (from_lane(mine.data, i)) raw[i] = load_row(first + i);
      }
    }
    return append_four<IO>(p.finish, a.least_code, lane, weight, raw, place.at, mine);
  }
  Turn turn[Rows];  // of a row at hand and of the next
  turn[0] = load_turn(p.finish, lane, __shfl_sync(0xffffffffu, place.at, 0));
  float w[kChunk];
  if (p.finish.weight) widen_weight(p.finish, weight, w);
#pragma unroll
  for (int i = 0; i < Rows; i++) {
    const RowAt to{from_lane(mine.data, i), from_lane(mine.scales, i)};
    if (i + 1 < Rows) turn[i + 1] = load_turn(p.finish, lane, __shfl_sync(0xffffffffu, place.at, i + 1));
    if (!a.reads_all) {
      raw[i] = RawChunk<IO>{};
      if (to.data) raw[i] = load_row(first + i);
    }
    float x[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; j++) x[j] = element(raw[i], j);
    finish_lanes(p.finish, lane, w, turn[i], x);
    store_lanes<F>(to, lane, a.least_code, x);
  }
}

__global__ void __launch_bounds__(kThreads) append_row_warps(const __grid_constant__ SwaArgs a) {
  extern __shared__ float shared[];
  const AppendSwaParams& p = a.p;
  const int32_t lane = threadIdx.x % 32, dim = p.window.dim;
  float* x = shared + int64_t(threadIdx.x / 32) * ((dim + 3) / 4 * 4 + a.any.sums);
  float* sums = x + (dim + 3) / 4 * 4;
  const uint32_t token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  wait_for_previous();
  let_next_start();
  const TokenPlace place = place_token(a, token, token, lane == 0);
  if (place.page < 0) return;
  const char* from = p.x.data + int64_t(token) * p.x.token;
  for (int32_t d = lane; d < dim; d += 32) x[d] = load_float(from + d * p.x.dim, p.x.dtype);
  __syncwarp();
  finish_any(p.finish, a.any, dim, place.at, x, sums);
  store_any(p.window, row_at(p.window, place.page, place.row), x);
  if (lane == 0) mark_position(p, place);
}

template <int IO, LaneFormat F> kvx_status_t run_lanes(const SwaArgs& a, int num_sms, void* stream) {
  constexpr int kMany = IO == KVX_DTYPE_F32 ? 2 : 4;  // a row is 8 or 16 registers
  const bool is_many = a.p.step.num_tokens >= int64_t(num_sms) * 16 * kWarps * kMany / 4;
  const int64_t rows = kWarps * (is_many ? kMany : 1);
  const dim3 grid(unsigned(divide_up(a.p.step.num_tokens, rows)), 1, 1), block(kThreads, 1, 1);
  if (is_many) return launch_early("append_row_lanes", append_row_lanes<IO, F, kMany>, grid, block, stream, a);
  return launch_early("append_row_lanes", append_row_lanes<IO, F, 1>, grid, block, stream, a);
}

template <int IO> kvx_status_t run_format(const SwaArgs& a, LaneFormat format, int num_sms, void* stream) {
  switch (format) {
    case LANES_V4: return run_lanes<IO, LANES_V4>(a, num_sms, stream);
    case LANES_V4_BF16: return run_lanes<IO, LANES_V4_BF16>(a, num_sms, stream);
    case LANES_BF16: return run_lanes<IO, LANES_BF16>(a, num_sms, stream);
    default: return run_lanes<IO, LANES_F32>(a, num_sms, stream);
  }
}

kvx_status_t run_warps(const SwaArgs& a, void* stream) {
  const int64_t warp_bytes = 4 * any_row_floats(a.p.window.dim, a.any);
  int warps = kWarps;
  while (warps > 1 && warps * warp_bytes > kPlainShared) warps /= 2;
  KVX_TRY(allow_shared(append_row_warps, warps * warp_bytes, 0, a.p.window.dim));
  const dim3 grid(unsigned(divide_up(a.p.step.num_tokens, warps)), 1, 1), block(unsigned(32 * warps), 1, 1);
  return launch_early_with("append_row_warps", append_row_warps, grid, block, int(warps * warp_bytes), stream, a);
}

}  // namespace

kvx_status_t append_swa(const AppendSwaParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.step.num_tokens == 0 || p.step.num_seqs == 0) return KVX_STATUS_OK;
  const int64_t usual = divide_up(p.step.num_tokens, p.step.num_seqs);
  SwaArgs a{p,
            make_fast_divider(p.window.rows),
            make_fast_divider(int32_t(usual)),
            any_row(p.window.dim, false),
            0,
            p.step.num_tokens <= int64_t(p.step.num_seqs) * p.window.rows || !p.positions};
  const LaneFormat format = lane_format(p.window, p.finish, &a.least_code);
  const bool is_aligned = p.x.is_dense && common_alignment(rows_address_bits(p.x)) == 16;
  if (format == LANES_NONE || !is_aligned) return run_warps(a, stream);
  switch (p.x.dtype) {
    case KVX_DTYPE_F16: return run_format<KVX_DTYPE_F16>(a, format, guard.num_sms(), stream);
    case KVX_DTYPE_BF16: return run_format<KVX_DTYPE_BF16>(a, format, guard.num_sms(), stream);
    default: return run_format<KVX_DTYPE_F32>(a, format, guard.num_sms(), stream);
  }
}

}  // namespace cuda
}  // namespace kvx
