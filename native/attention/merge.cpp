// merge_attention: descriptors to params, then run where the memory is.
#include "attention/merge.h"

#include <string.h>

#include "array.h"
#include "format.h"
#include "lower.h"

namespace kvx {
using namespace common;

namespace {

kvx_status_t lower_merge(const kvx_merge_args_t& a, MergeParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_NEED(a.outs.ndim == 4, "outs has %u dimensions; it must be [parts, num_tokens, heads, head_dim].", a.outs.ndim);
  const int64_t parts = a.outs.shape[0], tokens = a.outs.shape[1], heads = a.outs.shape[2], dim = a.outs.shape[3];
  KVX_NEED(parts > 0 && heads > 0 && dim > 0,
           "outs is [%lld, %lld, %lld, %lld]; parts, heads and head_dim must be 1 or more.", (long long)parts,
           (long long)tokens, (long long)heads, (long long)dim);
  const bool needs = tokens > 0;
  KVX_TRY(lower_rows("outs", "outs", a.outs, heads, dim, needs, &out->parts));
  KVX_TRY(check_repeats("outs", "array", a.outs));
  out->part = a.outs.stride[0] * dtype_bits(a.outs.dtype) / 8;
  KVX_NEED(a.lses.dtype == KVX_DTYPE_F32, "lses is %s; it must be f32.", dtype_name(a.lses.dtype));
  KVX_NEED(a.lses.ndim == 3 && a.lses.shape[0] == parts && a.lses.shape[1] == tokens && a.lses.shape[2] == heads,
           "lses has the wrong shape; outs makes it [%lld, %lld, %lld].", (long long)parts, (long long)tokens,
           (long long)heads);
  KVX_TRY(check_array("lses", "array", a.lses, needs));
  KVX_NEED(a.out.ndim == 3 && a.out.shape[0] == tokens,
           "out has %u dimensions and %lld tokens; it must be [%lld, %lld, %lld].", a.out.ndim,
           (long long)a.out.shape[0], (long long)tokens, (long long)heads, (long long)dim);
  KVX_TRY(lower_rows("out", "out", a.out, heads, dim, needs, &out->out));
  KVX_NEED(!overlaps_itself(a.out), "out strides make two elements share an address.");
  if (a.lse.ndim) {
    KVX_NEED(a.lse.dtype == KVX_DTYPE_F32 && a.lse.ndim == 2 && a.lse.shape[0] == tokens && a.lse.shape[1] == heads,
             "lse must be [%lld, %lld] f32.", (long long)tokens, (long long)heads);
    KVX_TRY(check_array("lse", "array", a.lse, needs));
    KVX_NEED(!overlaps_itself(a.lse), "lse strides make two elements share an address.");
    out->lse = static_cast<char*>(a.lse.data), out->lse_token = a.lse.stride[0] * 4,
    out->lse_head = a.lse.stride[1] * 4;
  }
  if (a.sinks.ndim) {
    KVX_NEED(a.sinks.dtype == KVX_DTYPE_F32 && a.sinks.ndim == 1 && a.sinks.shape[0] == heads,
             "sinks must be [heads] = [%lld] f32.", (long long)heads);
    KVX_TRY(check_array("sinks", "array", a.sinks, true));
    out->sinks = static_cast<const char*>(a.sinks.data), out->sink_stride = a.sinks.stride[0] * 4;
  }
  out->lses = static_cast<const char*>(a.lses.data);
  out->lses_part = a.lses.stride[0] * 4, out->lses_token = a.lses.stride[1] * 4, out->lses_head = a.lses.stride[2] * 4;
  out->num_parts = parts, out->num_tokens = tokens, out->num_heads = heads, out->head_dim = dim;
  out->device = a.device;
  return KVX_STATUS_OK;
}

}  // namespace

kvx_status_t run_merge(const kvx_merge_args_t& args, void* stream) {
  MergeParams p;
  bool on_device;
  KVX_TRY(lower_merge(args, &p));
  KVX_TRY(check_memory(args.memory, &on_device));
  return on_device ? cuda::merge(p, stream) : cpu::merge(p);
}

}  // namespace kvx

extern "C" kvx_status_t kvx_merge_attention(const kvx_merge_args_t* args, void* stream) {
  return kvx::entry("merge_attention()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    return kvx::run_merge(*args, stream);
  });
}
