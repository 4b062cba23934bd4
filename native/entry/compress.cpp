// compress: descriptors to params, then run where the memory is.
#include <string.h>

#include "array.h"
#include "entry/hybrid.h"
#include "format.h"
#include "lower.h"

namespace kvx {
namespace {

bool is_adjacent(const kvx_array_t& a) {
  int64_t step = 1;
  for (int i = int(a.ndim) - 1; i >= 0; i--) {
    if (a.shape[i] > 1 && a.stride[i] != step) return false;
    step = mul_most(step, a.shape[i]);
  }
  return true;
}

kvx_status_t lower_state(const kvx_compress_args_t& a, int64_t dim, CompressParams* out) {
  const int64_t overlap[4] = {3, a.ratio, 2, dim}, ring[4] = {1, a.ratio, 2, dim}, running[2] = {3, dim};
  const int64_t* want = out->has_overlap ? overlap : out->is_running ? running : ring;
  const uint32_t n = out->is_running ? 2 : 4;
  bool is_so = a.state.dtype == KVX_DTYPE_F32 && a.state.ndim == n + 1 && is_adjacent(a.state);
  for (uint32_t i = 0; is_so && i < n; i++) is_so = a.state.shape[i + 1] == want[i];
  KVX_NEED(is_so, "state is %s with %u dimensions; it must be adjacent f32 %s of ratio %lld and dim %lld.",
           dtype_name(a.state.dtype), a.state.ndim,
           out->has_overlap  ? "[slots, 3, ratio, 2, dim]"
           : out->is_running ? "[slots, 3, dim]"
                             : "[slots, 1, ratio, 2, dim]",
           (long long)a.ratio, (long long)dim);
  KVX_TRY(check_array("state", "array", a.state, a.state.shape[0] > 0));
  out->state = static_cast<float*>(a.state.data);
  out->state_slot = 4 * dim * (out->has_overlap ? 6 * a.ratio : out->is_running ? 3 : 2 * a.ratio);
  return KVX_STATUS_OK;
}

kvx_status_t lower(const kvx_compress_args_t& a, CompressParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags <= 7 && (a.flags & 3) != 3, "args.flags is %llu: OVERLAP or RUNNING, and HADAMARD.",
           (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(a.ratio >= 1 && a.ratio <= 4096, "ratio is %lld; it must be 1 to 4096.", (long long)a.ratio);
  out->has_overlap = a.flags & KVX_COMPRESS_OVERLAP, out->is_running = a.flags & KVX_COMPRESS_RUNNING,
  out->has_hadamard = a.flags & KVX_COMPRESS_HADAMARD;
  KVX_TRY(lower_row_pages("entries", a.entries, &out->entries));
  const int64_t dim = out->entries.dim, parts = out->has_overlap ? 2 : 1;
  KVX_NEED(!out->has_hadamard || (dim & (dim - 1)) == 0, "dim is %lld; a Hadamard rotation takes a power of two.",
           (long long)dim);
  KVX_TRY(lower_state(a, dim, out));
  const int64_t slots = a.state.shape[0];
  KVX_NEED(a.kv.dtype != KVX_DTYPE_F8_E4M3 && a.score.dtype != KVX_DTYPE_F8_E4M3, "kv and score are f16, bf16 or f32.");
  KVX_TRY(lower_tokens("kv", a.kv, 1, parts * dim, &out->kv));
  KVX_TRY(lower_tokens("score", a.score, 1, parts * dim, &out->score));
  KVX_TRY(check_repeats("kv", "array", a.kv));
  KVX_TRY(check_repeats("score", "array", a.score));
  KVX_NEED(a.kv.shape[0] == a.score.shape[0], "kv has %lld tokens and score %lld.", (long long)a.kv.shape[0],
           (long long)a.score.shape[0]);
  if (a.bias.ndim) {
    KVX_NEED(a.bias.dtype == KVX_DTYPE_F32 && a.bias.ndim == 2 && a.bias.shape[0] == a.ratio &&
                 a.bias.shape[1] == parts * dim && is_adjacent(a.bias),
             "bias is an adjacent f32 [ratio, parts * dim] = [%lld, %lld].", (long long)a.ratio,
             (long long)(parts * dim));
    KVX_TRY(check_array("bias", "array", a.bias, true));
    out->bias = static_cast<const float*>(a.bias.data);
  }
  KVX_TRY(lower_finish(a.finish, dim, &out->finish));
  KVX_TRY(lower_entry_table(a.block_table, slots, &out->table));
  if (a.num_shared.ndim) {
    KVX_NEED(a.num_shared.dtype == KVX_DTYPE_S32 && a.num_shared.ndim == 1 && a.num_shared.shape[0] >= slots &&
                 is_adjacent(a.num_shared),
             "num_shared is an adjacent int32 [slots].");
    KVX_TRY(check_array("num_shared", "array", a.num_shared, slots > 0));
    out->num_shared = static_cast<const int32_t*>(a.num_shared.data);
  }
  KVX_TRY(lower_step(a.step, a.kv.shape[0], slots, &out->step));
  KVX_TRY(check_apart({{"state", a.state}, {"entries", a.entries.pages}}, {{"step.slots", a.step.slots},
                                                                           {"step.cu_seqlens", a.step.cu_seqlens},
                                                                           {"step.starts", a.step.starts},
                                                                           {"block_table", a.block_table},
                                                                           {"num_shared", a.num_shared}}));
  out->ratio = int32_t(a.ratio), out->dim = int32_t(dim), out->parts = int32_t(parts);
  out->errors = reinterpret_cast<unsigned long long*>(a.errors), out->device = a.device;
  return KVX_STATUS_OK;
}

}  // namespace
}  // namespace kvx

extern "C" kvx_status_t kvx_compress(const kvx_compress_args_t* args, void* stream) {
  using namespace kvx;
  return entry("compress()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    CompressParams p;
    bool on_device;
    KVX_TRY(lower(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    if (on_device) return cuda::compress(p, stream);
    KVX_TRY(check_host_step(p.step));
    return cpu::compress(p);
  });
}
