// compress on the device, one launch a call, and the same grid for the same shapes. A block of threads (or a cluster of
// them) has one of two tasks, and a window that closes is in one of them alone:
//
//   inside   units of tokens [u * ratio, (u + 1) * ratio), one or a few: of each the window that closes among them, if
//            all it pools was given in this step
//   edge     a sequence: windows that need the tail of the step before, and then the tail for the step after. What
//            reads a tail writes it, each thread its own channels, so that no other block is waited for.
//
// A thread pools four channels; one warp then norms, rotates and codes the entry. Entries of 128 channels take a warp
// alone. Here: which kernel, and how it is laid out.
#include "entry/compress/running.cuh"
#include "entry/compress/tokens.cuh"

namespace kvx {
namespace cuda {

namespace {

template <int IO> kvx_status_t run_tokens(PoolArgs a, int num_sms, void* stream) {
  const CompressParams& p = a.p;
  const bool is_four = IO != 0 && p.has_overlap && p.ratio == 4 && a.format != LANES_NONE,
             is_warp = is_four && a.format == LANES_INDEX;
  if (!is_four && a.format == LANES_INDEX) a.format = LANES_NONE;
  const int64_t units = divide_up(p.step.num_tokens, p.ratio), row_bytes = 4 * int64_t(a.row_floats);
  // A block has a few units where there are enough for every multiprocessor: then all its warps finish entries.
  while (is_four && !is_warp && a.windows < uint32_t(kTokenWarps) && 2 * a.windows * row_bytes <= kPlainShared &&
         units > int64_t(num_sms) * 2 * a.windows)
    a.windows *= 2;
  if (is_warp) a.windows = kTokenWarps;
  a.edge_blocks = uint32_t(is_warp ? divide_up(p.step.num_seqs, kTokenWarps) : p.step.num_seqs);
  const dim3 grid(unsigned(a.edge_blocks + divide_up(units, a.windows)), 1, 1), block(kTokenThreads, 1, 1);
  const auto kernel = !is_four ? pool_tokens<IO, false, FINISH_ANY> : is_warp ? pool_tokens < IO, IO != 0,
             IO != 0 ? FINISH_INDEX : FINISH_ANY > : pool_tokens < IO, IO != 0, IO != 0 ? FINISH_LANES : FINISH_ANY > ;
  KVX_TRY(allow_shared(kernel, a.windows * row_bytes, 8 * kTokenWarps, p.dim));
  return launch_early_with("pool_tokens", kernel, grid, block, int(a.windows * row_bytes), stream, a);
}

template <int IO> kvx_status_t run_running(PoolArgs a, unsigned tasks, int shared, int num_sms, void* stream) {
  const CompressParams& p = a.p;
  if (a.format == LANES_INDEX) a.format = LANES_NONE;
  const uint32_t slices = uint32_t(divide_up(p.dim, 32 * kWide<IO>));  // warps that cover the channels
  const bool is_long = p.step.num_tokens >= 8 * int64_t(p.step.num_seqs);
  a.wide_warps = 1, a.cluster = 1;
  if (is_long) {  // tokens over warps, channels over the blocks of a cluster
    while (can_launch_early() && a.cluster < 4 && a.cluster < slices) a.cluster *= 2;
  } else {  // a token or two of each sequence: channels over warps
    while (a.wide_warps < kRunWarps && a.wide_warps < slices) a.wide_warps *= 2;
  }
  auto kernel = IO == 0 || a.format == LANES_NONE ? pool_running<IO, FINISH_ANY> : pool_running < IO,
       IO == 0 ? FINISH_ANY : FINISH_LANES > ;
  int fixed = sizeof(Pool) * kRunThreads * kWide<IO> + 8;
  if constexpr (IO != 0) {
    // Where pairs of windows are enough for nearly every multiprocessor.
    const int64_t pairs = divide_up(p.step.num_tokens, 2 * p.ratio);
    if (is_long && a.format != LANES_NONE && a.cluster == kRowCluster && p.dim == kRowChannels &&
        p.ratio % kPairBatch<IO> == 0 && pairs * kRowCluster * 10 >= num_sms * 9) {
      kernel = pool_windows<IO>;
      shared = 2 * (shared + int(sizeof(Pool)) * kRunThreads * kWide<IO>), fixed = 8;
      a.windows = uint32_t(pairs), tasks = unsigned(pairs + p.step.num_seqs);
    }
  }
  KVX_TRY(allow_shared(kernel, shared, fixed, p.dim));
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization,
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension, attributes[1].val.clusterDim.x = a.cluster,
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tasks * a.cluster), config.blockDim = dim3(kRunThreads),
  config.dynamicSmemBytes = size_t(shared);
  config.stream = static_cast<cudaStream_t>(stream), config.attrs = attributes,
  config.numAttrs = a.cluster > 1        ? 2
                    : can_launch_early() ? 1
                                         : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, a);
  return error == cudaSuccess ? KVX_STATUS_OK : launch_failed("pool_running", error);
}

template <int IO> kvx_status_t run(const PoolArgs& a, int num_sms, void* stream) {
  const CompressParams& p = a.p;
  const int64_t tasks = p.step.num_seqs + divide_up(p.step.num_tokens, p.ratio), shared = 4 * int64_t(a.row_floats);
  if (tasks > kMaxCount / 4)
    return fail(KVX_STATUS_UNSUPPORTED, "%lld tokens of %d sequences are more than one launch takes; split the batch.",
                (long long)p.step.num_tokens, p.step.num_seqs);
  return p.is_running ? run_running<IO>(a, unsigned(tasks), int(shared), num_sms, stream)
                      : run_tokens<IO>(a, num_sms, stream);
}

}  // namespace

kvx_status_t compress(const CompressParams& p, void* stream) {
  DeviceGuard guard(p.device);
  KVX_TRY(guard.status());
  if (p.step.num_tokens == 0 || p.step.num_seqs == 0) return KVX_STATUS_OK;
  PoolArgs a{p,
             make_fast_divider(p.ratio),
             make_fast_divider(p.entries.rows),
             any_row(p.dim, p.has_hadamard),
             LANES_NONE,
             0,
             0,
             0,
             1,
             1,
             1};
  a.row_floats = int32_t(divide_up(any_row_floats(p.dim, a.any), 4) * 4);
  if (fits_index_row(p.entries, p.finish)) a.format = LANES_INDEX;
  else if (!p.has_hadamard) a.format = lane_format(p.entries, p.finish, &a.least_code);
  const uint64_t bits =
      rows_address_bits(p.kv) | rows_address_bits(p.score) | uint64_t(uintptr_t(p.bias)) | uint64_t(uintptr_t(p.state));
  const bool is_wide = p.kv.is_dense && p.score.is_dense && p.kv.dtype == p.score.dtype && p.dim % 4 == 0 &&
                       common_alignment(bits) == 16;
  if (!is_wide) return run<0>(a, guard.num_sms(), stream);
  switch (p.kv.dtype) {
    case KVX_DTYPE_F16: return run<KVX_DTYPE_F16>(a, guard.num_sms(), stream);
    case KVX_DTYPE_BF16: return run<KVX_DTYPE_BF16>(a, guard.num_sms(), stream);
    default: return run<KVX_DTYPE_F32>(a, guard.num_sms(), stream);
  }
}

}  // namespace cuda
}  // namespace kvx
