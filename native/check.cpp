#include "check.h"

#include <stdarg.h>
#include <stdio.h>

namespace kvx {
namespace {
thread_local char last_error[512] = "";
thread_local const char* call_name = "";
}  // namespace

void begin_call(const char* name) { call_name = name; }

kvx_status_t fail(kvx_status_t status, const char* text, ...) {
  int n = snprintf(last_error, sizeof last_error, "%s: ", call_name);
  va_list args;
  va_start(args, text);
  vsnprintf(last_error + n, sizeof last_error - n, text, args);
  va_end(args);
  return status;
}

const char* dtype_name(int dtype) {
  static const char* const names[] = {"invalid", "f16",    "bf16",  "f32",  "fp8_e4m3", "fp8_e5m2", "int32", "int64",
                                      "uint32",  "uint64", "uint8", "int8", "int4",     "e2m1",     "e8m0",  "f64"};
  return dtype >= 0 && dtype <= KVX_DTYPE_F64 ? names[dtype] : "unknown";
}

const char* layout_name(int layout) {
  switch (layout) {
    case KVX_LAYOUT_BLOCK_NHD: return "NHD";
    case KVX_LAYOUT_BLOCK_HND: return "HND";
    case KVX_LAYOUT_BLOCK_HND_PACKED: return "HND_PACKED";
    case KVX_LAYOUT_BLOCK_CUSTOM: return "CUSTOM";
    default: return "invalid";
  }
}

}  // namespace kvx

extern "C" const char* kvx_last_error(void) { return kvx::last_error; }

extern "C" const char* kvx_status_text(kvx_status_t status) {
  switch (status) {
    case KVX_STATUS_OK: return "OK";
    case KVX_STATUS_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case KVX_STATUS_UNSUPPORTED: return "UNSUPPORTED";
    case KVX_STATUS_OUT_OF_RANGE: return "OUT_OF_RANGE";
    case KVX_STATUS_INCOMPATIBLE: return "INCOMPATIBLE";
    case KVX_STATUS_INTERNAL_ERROR: return "INTERNAL_ERROR";
  }
  return "UNKNOWN_STATUS";
}
