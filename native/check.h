// The sentence behind a failed call, and overflow-safe arithmetic for descriptors that may lie.
#pragma once
#include <stdint.h>

#include "../include/kvx_abi.h"

namespace kvx {

// Writes the sentence kvx_last_error() returns on this thread, and hands back `status`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
kvx_status_t fail(kvx_status_t status, const char* text, ...);
// The public call named at the head of the sentence ("write()"). Set once per entry point.
void begin_call(const char* name);

// Returns from the enclosing function when a step failed.
#define KVX_TRY(step)                          \
  do {                                         \
    kvx_status_t status_ = (step);             \
    if (status_ != KVX_STATUS_OK) return status_; \
  } while (0)

#define KVX_NEED(condition, ...) \
  do {                           \
    if (!(condition)) return ::kvx::fail(KVX_STATUS_INVALID_ARGUMENT, __VA_ARGS__); \
  } while (0)

// No address in the library goes past this many bytes from its base, so sums of two cannot overflow int64.
constexpr int64_t kMaxBytes = int64_t(1) << 61;

inline bool mul_fits(int64_t a, int64_t b, int64_t* out) {
  return !__builtin_mul_overflow(a, b, out) && *out <= kMaxBytes && *out >= 0;
}

const char* dtype_name(int dtype);
const char* layout_name(int layout);

}  // namespace kvx
