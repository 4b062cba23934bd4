// Attention on a device: picks the kernel. The fast ones have their table in attention/decode/decode.cu and
// attention/prefill/prefill.cu; attention/any/any.cu takes every format, and attention/cuda/row.cu the rest.
#include "attention/cuda/attention.cuh"

#include <stdlib.h>
#include <string.h>

#include <mutex>
#include <set>
#include <utility>

namespace kvx {
namespace cuda {

int max_shared_memory() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return bytes;
}

kvx_status_t allow_shared_memory(const void* kernel, int bytes) {
  static std::mutex lock;
  static std::set<std::pair<const void*, int>> done;
  int device = 0;
  cudaGetDevice(&device);
  std::lock_guard<std::mutex> hold(lock);
  if (done.count({kernel, device})) return KVX_STATUS_OK;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return fail(KVX_STATUS_UNSUPPORTED,
                "this device does not have the %d bytes of shared memory a block of threads that the kernel needs: %s.",
                bytes, cudaGetErrorString(error));
  }
  done.insert({kernel, device});
  return KVX_STATUS_OK;
}

namespace {

// Rows of a plane whose blocks are `block` bytes apart, in units from its start.
bool fits_offsets(const AttentionParams& p, const PlaneParams& plane, int64_t num_blocks, int64_t block, int unit) {
  constexpr int64_t kMost = 0xffffffff;  // the last one stands for no row
  const int64_t last =
      (num_blocks - 1) * block + (p.kv.block_size - 1) * plane.token + (p.num_kv_heads - 1) * plane.head;
  if (!plane.is_dense || (reinterpret_cast<uintptr_t>(plane.data) | uint64_t(block | plane.token | plane.head)) % unit)
    return false;
  for (int64_t bytes : {last, block, plane.token, plane.head})
    if (bytes / unit >= kMost) return false;
  return true;
}

}  // namespace

bool fits_row_finder(const AttentionParams& p, int unit) {
  if (p.kv.table.format == KVX_BLOCK_TABLE_KV_OFFSETS || p.kv.bases[0]) return false;
  for (const PlaneParams& plane : p.kv.plane)
    if (!fits_offsets(p, plane, p.kv.num_blocks, plane.block, unit)) return false;
  return true;
}

bool fits_own_caches(const AttentionParams& p, int unit) {
  if (!p.kv.bases[0] || p.kv.table.format != KVX_BLOCK_TABLE_PACKED || p.kv.table.max_blocks != 1) return false;
  for (const PlaneParams& plane : p.kv.plane)
    if (!fits_offsets(p, plane, 1, 0, unit)) return false;
  return p.kv.num_blocks <= kMaxCount;
}

int row_unit(const AttentionParams& p) {
  const int64_t bits[2] = {p.head_dim * dtype_bits(p.kv.plane[0].dtype),
                           p.v_head_dim * dtype_bits(p.kv.plane[1].dtype)};
  for (int unit : {16, 8, 4})
    if ((bits[0] | bits[1]) % (8 * unit) == 0 && (p.kv.bases[0] ? fits_own_caches(p, unit) : fits_row_finder(p, unit)))
      return unit;
  return 0;
}

tiles::RowFinder make_row_finder(const AttentionParams& p, int unit) {
  tiles::RowFinder f = {};
  f.kv = p.kv;
  f.block_size = make_fast_divider(p.kv.block_size);
  f.is_packed_32 =
      p.kv.table.format == KVX_BLOCK_TABLE_PACKED && p.kv.table.index_bytes == 4 && p.kv.table.index_stride == 4;
  for (int i = 0; i < 2; i++) {
    const PlaneParams& plane = p.kv.plane[i];
    f.block[i] = p.kv.bases[i] ? 0 : uint32_t(plane.block / unit), f.token[i] = uint32_t(plane.token / unit),
    f.head[i] = uint32_t(plane.head / unit);
  }
  return f;
}

bool has_warpgroups() {
#if defined(KVX_HAS_90A)
  static const char* asked = getenv("KVX_GPU");  // for tests: run what other GPUs run
  if (asked && strcmp(asked, "portable") == 0) return false;
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major == 9 && minor == 0;
#else
  return false;
#endif
}

namespace {

// Who has the sequences of few query rows: what of a call that is, and the plan they need.
enum Splitter { NOBODY, DECODER, ANY_SPLITTER, LATENT };
Splitter find_splitter(const AttentionParams& p, AttentionParams* part, DecodePart* which) {
  if ((*which = decode_part(p, part)) != DECODE_NONE) return DECODER;
  if (p.is_latent) return takes_latent(p) ? LATENT : NOBODY;
  if (takes_prefill(p)) return NOBODY;  // rows that are many for decode
  return (*which = any_part(p, part)) != DECODE_NONE ? ANY_SPLITTER : NOBODY;
}

}  // namespace

uint64_t attention_workspace(const AttentionParams& p) {
  DeviceGuard guard(p.kv.device);
  if (guard.status() != KVX_STATUS_OK) return 0;
  AttentionParams part;
  DecodePart which;
  switch (find_splitter(p, &part, &which)) {
    case DECODER: return decode_workspace(part, guard.num_sms());
    case ANY_SPLITTER: return any_workspace(part, guard.num_sms());
    case LATENT: return latent_workspace(p, guard.num_sms());
    default: return 0;
  }
}

kvx_status_t plan_attention(const AttentionParams& p, void* stream) {
  DeviceGuard guard(p.kv.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0) return KVX_STATUS_OK;
  AttentionParams part;
  DecodePart which;
  switch (find_splitter(p, &part, &which)) {
    case DECODER: return plan_decode(part, guard.num_sms(), stream);
    case ANY_SPLITTER: return plan_any(part, guard.num_sms(), stream);
    case LATENT: return plan_latent(p, guard.num_sms(), stream);
    default: return KVX_STATUS_OK;
  }
}

kvx_status_t attention(const AttentionParams& p, void* stream) {
  DeviceGuard guard(p.kv.device);
  KVX_TRY(guard.status());
  if (p.num_tokens == 0) return KVX_STATUS_OK;
  // A long sequence with one query needs the whole device, which sharing it out gives it; a chunk of a prompt has
  // enough rows by itself. Which sequence is which only the device knows: both run, and
  // each leaves the other's rows alone.
  AttentionParams part, rest = p;
  DecodePart which = DECODE_NONE;
  switch (find_splitter(p, &part, &which)) {
    case DECODER:
      if (!p.is_planned) KVX_TRY(plan_decode(part, guard.num_sms(), stream));
      KVX_TRY(run_decode(part, guard.num_sms(), stream));
      rest.skip_rows = kMostRows;
      break;
    case ANY_SPLITTER:
      if (!p.is_planned) KVX_TRY(plan_any(part, guard.num_sms(), stream));
      KVX_TRY(run_any_split(part, guard.num_sms(), &rest.skip_rows, stream));
      break;
    case LATENT:
      if (!p.is_planned) KVX_TRY(plan_latent(p, guard.num_sms(), stream));
      return run_latent(p, guard.num_sms(), stream);
    default: break;
  }
  if (which == DECODE_ALL) return KVX_STATUS_OK;
  if (p.is_latent) return run_latent_any(p, stream);
  if (takes_prefill(rest)) return run_prefill(rest, guard.num_sms(), stream);
  return takes_any(rest) ? run_any(rest, stream) : run_row(rest, stream);
}

}  // namespace cuda
}  // namespace kvx
