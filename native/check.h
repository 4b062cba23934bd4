// The sentence behind a failed call, the edge that C meets, and overflow-safe arithmetic for descriptors that may lie.
#pragma once
#include <stdint.h>

#include <exception>

#include "../include/kvx_abi.h"

namespace kvx {

// Writes the sentence kvx_last_error() returns on this thread, and hands back `status`.
#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
kvx_status_t
fail(kvx_status_t status, const char* text, ...);
// The public call named at the head of the sentence ("write()"). Set once per entry point.
void begin_call(const char* name);

// Returns from the enclosing function when a step failed.
#define KVX_TRY(step)                             \
  do {                                            \
    kvx_status_t status_ = (step);                \
    if (status_ != KVX_STATUS_OK) return status_; \
  } while (0)

#define KVX_NEED(condition, ...)                                                    \
  do {                                                                              \
    if (!(condition)) return ::kvx::fail(KVX_STATUS_INVALID_ARGUMENT, __VA_ARGS__); \
  } while (0)

// An op's call on a device, declared beside its parameters. In a build without nvcc the declaration is the stub too.
#ifdef KVX_NO_CUDA
kvx_status_t no_cuda();
#define KVX_ON_DEVICE(name, Params) \
  inline kvx_status_t name(const Params&, void*) { return no_cuda(); }
#else
#define KVX_ON_DEVICE(name, Params) kvx_status_t name(const Params& p, void* stream);
#endif

// Every C entry is one of these: it names the call for its sentences and lets no exception out. What throws inside is
// memory that could not be had; code that OpenMP runs carries it here (cpu/carry.h).
template <class Call>
kvx_status_t entry(const char* name, Call&& call) noexcept {
  begin_call(name);
  try {
    return call();
  } catch (const std::exception& error) {
    return fail(KVX_STATUS_INTERNAL_ERROR, "it could not get the memory it needs (%s).", error.what());
  } catch (...) {
    return fail(KVX_STATUS_INTERNAL_ERROR, "it was stopped by an exception without a name.");
  }
}

// No address in the library goes past this many bytes from its base, so sums of two cannot overflow int64. Numbers of
// elements, and strides in elements, stay under the second, so that eight bytes of each do not reach the first.
constexpr int64_t kMaxBytes = int64_t(1) << 61;
constexpr int64_t kMaxElements = kMaxBytes / 64;

// Products and sums of numbers that a caller gave. False where the result is negative or past kMaxBytes; *out is then
// of no use.
inline bool mul_fits(int64_t a, int64_t b, int64_t* out) {
  return !__builtin_mul_overflow(a, b, out) && *out <= kMaxBytes && *out >= 0;
}
// Where the number only says whether work is worth sharing out: past kMaxBytes it stays there.
inline int64_t mul_most(int64_t a, int64_t b) {
  int64_t product;
  return mul_fits(a, b, &product) ? product : kMaxBytes;
}

const char* dtype_name(int dtype);
const char* layout_name(int layout);

}  // namespace kvx
