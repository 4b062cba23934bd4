// What ends a decode whose sequences were shared out: the parts of several workers become one row.
#include "attention/decode/combine.cuh"

namespace kvx {
namespace cuda {

namespace {

// Adds up the parts of every (sequence, head) that several workers shared, in the order of the line: a query row is one
// warp's, or that of kWarps where there are few rows: a warp alone would wait for memory once for every eight
// parts of a long sequence. Each then adds up every kWarps-th part, and the first their sums. Of fewer rows yet, each
// 32 * kPerLane elements are a block's.
template <int kPerLane, int kWarps>
__global__ void __launch_bounds__(128) combine(const __grid_constant__ DecodeArgs a, bool one_scale) {
  let_next_start();
  // The plan and the sequences' ends are older than the launch before this one, which waited for them: they are read
  // ahead of its end. Nobody leaves before that: whoever comes after waits for this launch alone.
  const int lane = threadIdx.x % 32, member = threadIdx.x / 32 % kWarps, first_dim = blockIdx.y * kPerLane * 32;
  const int64_t index = int64_t(blockIdx.x) * (4 / kWarps) + threadIdx.x / 32 / kWarps;
  const int32_t row = int32_t(index % a.plan.rows), kv_head = int32_t(index / a.plan.rows % a.num_kv_heads);
  const int64_t seq64 = index / a.plan.rows / a.num_kv_heads;
  const int32_t seq = int32_t(min(seq64, int64_t(a.num_seqs) - 1));
  const int lines = a.plan.lines, head_of_line = kv_head / lines, line = kv_head - head_of_line * lines;
  int first_share = 0, last_share = 0, first_slot = 0;
  if (seq64 < a.num_seqs && row < rows_of(a, queries_of(a, seq))) {
    const int64_t number = int64_t(seq) * (a.num_kv_heads / lines) + head_of_line;
    const PlanItem item = load_now<PlanItem>(a.workspace + a.plan.item_at + number * int64_t(sizeof(PlanItem)));
    first_share = item.first_share, last_share = item.last_share, first_slot = item.first_slot;
  }
  constexpr int kUnroll = kPerLane > 8 ? 4 : kPerLane > 2 ? 8 : 16;
  wait_for_previous();
  if (first_share >= last_share) return;  // one worker had it alone, or there is none
  const int width = a.dims[1] + 2;
  const auto dim_of = [&](int i) { return first_dim + i * 32 + lane; };
  const auto has_dim = [&](int i) { return dim_of(i) < a.dims[1]; };
  const char* parts = a.workspace + a.plan.partial_at;
  float largest = -INFINITY, total = 0.f, x[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; i++) x[i] = 0.f;
  const auto add = [&](float top, float under, const float(&part)[kPerLane]) {
    if (under == 0.f) return;
    const float now = fmaxf(largest, top), old = tiles::exp2_fast(largest - now), fresh = tiles::exp2_fast(top - now);
    total = total * old + under * fresh;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) x[i] = x[i] * old + part[i] * fresh;
    largest = now;
  };
  for (int s = first_share + member; s <= last_share; s += kUnroll * kWarps) {
    float part[kUnroll][kPerLane], top[kUnroll], under[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; u++) {
      const int of = min(s + u * kWarps, last_share);
      const float* p = reinterpret_cast<const float*>(
                           parts + (2 * (int64_t(of) * lines + line) + (of == first_share ? first_slot : 0)) *
                                       a.plan.partial_bytes) +
                       row * width;
      const bool is_part = s + u * kWarps <= last_share;  // most rows have two or three
      top[u] = is_part ? __ldcg(p) : 0.f, under[u] = is_part ? __ldcg(p + 1) : 0.f;
#pragma unroll
      for (int i = 0; i < kPerLane; i++) part[u][i] = is_part && has_dim(i) ? __ldcg(p + 2 + dim_of(i)) : 0.f;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; u++) add(top[u], under[u], part[u]);
  }
  if constexpr (kWarps > 1) {  // of one row, all of a block: all of its warps come here
    __shared__ float sums[kWarps - 1][kPerLane + 2][32];
    if (member) {
      float(&mine)[kPerLane + 2][32] = sums[member - 1];
      mine[0][lane] = largest, mine[1][lane] = total;
#pragma unroll
      for (int i = 0; i < kPerLane; i++) mine[2 + i][lane] = x[i];
    }
    __syncthreads();
    if (member) return;
#pragma unroll
    for (int w = 0; w < kWarps - 1; w++) {
      float part[kPerLane];
#pragma unroll
      for (int i = 0; i < kPerLane; i++) part[i] = sums[w][2 + i][lane];
      add(sums[w][0][lane], sums[w][1][lane], part);
    }
  }
  const int64_t first = queries_of(a, seq).first;
  const int32_t token = row / a.group, head = kv_head * a.group + row - token * a.group;
  const float inverse = finish(a, first + token, head, largest, total, scale_of(a.scales[1], kv_head, one_scale),
                               lane == 0 && blockIdx.y == 0);
  char* out = a.out.data + (first + token) * a.out.token + int64_t(head) * a.out.head;
#pragma unroll
  for (int i = 0; i < kPerLane; i++)
    if (has_dim(i)) write(a.out, out, dim_of(i), x[i] * inverse);
}

template <int kWarps> auto choose_combine(int32_t dims) {
  return dims <= 64    ? combine<2, kWarps>
         : dims <= 96  ? combine<3, kWarps>
         : dims <= 128 ? combine<4, kWarps>
         : dims <= 192 ? combine<6, kWarps>
         : dims <= 256 ? combine<8, kWarps>
                       : combine<16, kWarps>;
}

}  // namespace

kvx_status_t launch_combine(const DecodeArgs& args, bool one_scale, void* stream) {
  const int64_t rows = int64_t(args.num_seqs) * args.num_kv_heads * args.plan.rows;
  // Few enough for all of their warps to run at once.
  if (rows <= 4 * int64_t(args.plan.blocks)) {
    // Fewer yet: a row's parts are more than four warps read in one go. By measurement; more of these small blocks take
    // longer to start than they save.
    const int64_t blocks = (args.dims[1] + 63) / 64;  // of a row
    if (blocks > 1 && rows <= args.plan.blocks && rows * blocks <= 4 * int64_t(args.plan.blocks))
      return launch_early("attention_combine", combine<2, 4>, dim3(unsigned(rows), unsigned(blocks)), dim3(128), stream,
                          args, one_scale);
    return launch_early("attention_combine", choose_combine<4>(args.dims[1]), dim3(unsigned(rows)), dim3(128), stream,
                        args, one_scale);
  }
  return launch_early("attention_combine", choose_combine<1>(args.dims[1]), dim3(unsigned((rows + 3) / 4)), dim3(128),
                      stream, args, one_scale);
}

}  // namespace cuda
}  // namespace kvx
