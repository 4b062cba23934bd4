/* The few words the C tests are written in: checks that count and print, and numbers in the dtypes of the ABI.
 * Numbers are converted here a second time, on purpose: a test that used the library's own rounding would agree with
 * its mistakes. */
#ifndef KVX_TESTS_CHECK_H
#define KVX_TESTS_CHECK_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kvx_abi.h"

static int checks_passed, checks_failed;
static const char* check_case = ""; /* what a loop is at, so that a failure inside it can be found */

/* snprintf for labels: being cut is fine there, and no warning is wanted for it. */
static inline void print_to(char* text, size_t bytes, const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(text, bytes, format, args);
  va_end(args);
}

static inline int check_counts(int ok) {
  if (ok) checks_passed++;
  else checks_failed++;
  return ok;
}

static inline void check_int(const char* file, int line, const char* text, long long got, long long want) {
  if (check_counts(got == want)) return;
  printf("%s:%d: [%s] %s: expected %lld, got %lld\n    last error: %s\n", file, line, check_case, text, want, got,
         kvx_last_error());
}

static inline void check_status(const char* file, int line, const char* text, kvx_status_t got, kvx_status_t want) {
  if (check_counts(got == want)) return;
  printf("%s:%d: [%s] %s: expected %s, got %s\n    last error: %s\n", file, line, check_case, text,
         kvx_status_text(want), kvx_status_text(got), kvx_last_error());
}

static inline void check_text(const char* file, int line, const char* got, const char* part) {
  if (check_counts(got != NULL && strstr(got, part) != NULL)) return;
  printf("%s:%d: [%s] expected a text with \"%s\", got \"%s\"\n", file, line, check_case, part, got ? got : "NULL");
}

static inline void check_bytes(const char* file, int line, const char* text, const void* got, const void* want,
                               size_t bytes) {
  const uint8_t *g = (const uint8_t*)got, *w = (const uint8_t*)want;
  size_t i = 0;
  while (i < bytes && g[i] == w[i]) i++;
  if (check_counts(i == bytes)) return;
  printf("%s:%d: [%s] %s: byte %zu of %zu: expected 0x%02x, got 0x%02x\n    last error: %s\n", file, line, check_case,
         text, i, bytes, w[i], g[i], kvx_last_error());
}

#define CHECK(condition) check_int(__FILE__, __LINE__, #condition, !!(condition), 1)
#define CHECK_INT(got, want) check_int(__FILE__, __LINE__, #got, (long long)(got), (long long)(want))
#define CHECK_STATUS(call, want) check_status(__FILE__, __LINE__, #call, call, want)
#define CHECK_OK(call) CHECK_STATUS(call, KVX_STATUS_OK)
#define CHECK_INVALID(call) CHECK_STATUS(call, KVX_STATUS_INVALID_ARGUMENT)
#define CHECK_ERROR_HAS(part) check_text(__FILE__, __LINE__, kvx_last_error(), part)
#define CHECK_TEXT(got, part) check_text(__FILE__, __LINE__, got, part)
#define CHECK_BYTES(got, want, bytes) check_bytes(__FILE__, __LINE__, #got, got, want, bytes)

/* `call` with one field changed is INVALID_ARGUMENT; the field is put back. */
#define REFUSES(field, value, call)                                                                      \
  do {                                                                                                   \
    char saved_[sizeof(field)];                                                                          \
    memcpy(saved_, &(field), sizeof saved_);                                                             \
    (field) = (value);                                                                                   \
    check_status(__FILE__, __LINE__, #field " = " #value ": " #call, call, KVX_STATUS_INVALID_ARGUMENT); \
    memcpy(&(field), saved_, sizeof saved_);                                                             \
  } while (0)

static inline int check_report(void) {
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed ? 1 : 0;
}

/* ------------------------------------------------------------------ numbers
 * Only values that the type holds exactly and that are zero or normal in it: then there is no rounding to agree on. */

static inline int dtype_bytes(int dtype) {
  switch (dtype) {
    case KVX_DTYPE_S64: return 8;
    case KVX_DTYPE_F32:
    case KVX_DTYPE_S32: return 4;
    case KVX_DTYPE_F16:
    case KVX_DTYPE_BF16: return 2;
    default: return 1;
  }
}

/* Sign, `exponent` bits with the usual bias, `mantissa` bits. */
static inline uint32_t float_code(float x, int exponent, int mantissa) {
  uint32_t b;
  memcpy(&b, &x, 4);
  const uint32_t sign = b >> 31 << (exponent + mantissa), magnitude = b & 0x7fffffffu;
  if (magnitude == 0) return sign;
  const uint32_t rebias = (127u - ((1u << (exponent - 1)) - 1u)) << 23;
  return sign | ((magnitude - rebias) >> (23 - mantissa));
}

static inline void put_number(void* p, int dtype, float x) {
  uint8_t* to = (uint8_t*)p;
  uint32_t code;
  int64_t whole = (int64_t)x;
  switch (dtype) {
    case KVX_DTYPE_F16: code = float_code(x, 5, 10); break;
    case KVX_DTYPE_BF16: code = float_code(x, 8, 7); break;
    case KVX_DTYPE_F32: memcpy(&code, &x, 4); break;
    case KVX_DTYPE_F8_E4M3: code = float_code(x, 4, 3); break;
    case KVX_DTYPE_F8_E5M2: code = float_code(x, 5, 2); break;
    case KVX_DTYPE_S64: memcpy(to, &whole, 8); return;
    default: code = (uint32_t)whole; break;
  }
  if (dtype_bytes(dtype) == 4) {
    memcpy(to, &code, 4);
  } else if (dtype_bytes(dtype) == 2) {
    const uint16_t half = (uint16_t)code;
    memcpy(to, &half, 2);
  } else {
    *to = (uint8_t)code;
  }
}

#endif /* KVX_TESTS_CHECK_H */
