// append_swa: descriptors to params, then run where the memory is.
#include <string.h>

#include "array.h"
#include "entry/hybrid.h"
#include "format.h"
#include "lower.h"

namespace kvx {
namespace {

kvx_status_t lower(const kvx_append_swa_args_t& a, AppendSwaParams* out) {
  memset(static_cast<void*>(out), 0, sizeof *out);
  KVX_TRY(check_header("args", a.version, a.struct_bytes, sizeof a));
  KVX_NEED(a.flags == 0, "args.flags is %llu; no flag is known.", (unsigned long long)a.flags);
  for (uint64_t word : a.reserved) KVX_NEED(word == 0, "args.reserved is not 0.");
  KVX_TRY(lower_row_pages("window", a.window, &out->window));
  const RowPages& w = out->window;
  KVX_NEED(a.x.dtype != KVX_DTYPE_F8_E4M3, "x is f8_e4m3; it must be f16, bf16 or f32.");
  KVX_TRY(lower_tokens("x", a.x, 1, w.dim, &out->x));
  if (a.positions.ndim) {
    KVX_NEED(a.positions.dtype == KVX_DTYPE_S32 && a.positions.ndim == 2 && a.positions.shape[0] == w.num_pages &&
                 a.positions.shape[1] == w.rows && (w.rows == 1 || a.positions.stride[1] == 1) &&
                 (w.num_pages <= 1 || a.positions.stride[0] == w.rows),
             "positions are %s with %u dimensions; they must be adjacent int32 [num_pages, rows] = [%lld, %d].",
             dtype_name(a.positions.dtype), a.positions.ndim, (long long)w.num_pages, w.rows);
    KVX_TRY(check_array("positions", "array", a.positions, w.num_pages > 0));
    out->positions = static_cast<int32_t*>(a.positions.data);
  } else {
    KVX_NEED(a.x.shape[0] <= w.num_pages * w.rows,
             "x has %lld tokens; the pages have %lld rows. With positions they are windows, a page a slot.",
             (long long)a.x.shape[0], (long long)(w.num_pages * w.rows));
  }
  KVX_TRY(lower_finish(a.finish, w.dim, &out->finish));
  KVX_TRY(lower_step(a.step, a.x.shape[0], a.positions.ndim ? w.num_pages : INT32_MAX, &out->step));
  KVX_TRY(check_apart(
      {{"window", a.window.pages}, {"positions", a.positions}},
      {{"step.slots", a.step.slots}, {"step.cu_seqlens", a.step.cu_seqlens}, {"step.starts", a.step.starts}}));
  out->errors = reinterpret_cast<unsigned long long*>(a.errors), out->device = a.device;
  return KVX_STATUS_OK;
}

}  // namespace
}  // namespace kvx

extern "C" kvx_status_t kvx_append_swa(const kvx_append_swa_args_t* args, void* stream) {
  using namespace kvx;
  return entry("append_swa()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    AppendSwaParams p;
    bool on_device;
    KVX_TRY(lower(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    if (on_device) return cuda::append_swa(p, stream);
    KVX_TRY(check_host_step(p.step));
    return cpu::append_swa(p);
  });
}
