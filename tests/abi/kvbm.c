/* The seven calls of kvbm_kernels.h from C99 and C++: zero sizes, NULL and numbers outside their enums, and which of
 * them is seen first. Nothing here needs a device; where there is none, real work must come back with an error and not
 * end the process. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kvbm_kernels.h"

static int passed, failed;

static void check(int line, const char* text, long got, long want) {
  if (got == want) {
    passed++;
    return;
  }
  failed++;
  printf("%s:%d: %s: expected %ld, got %ld\n", __FILE__, line, text, want, got);
}

#define CHECK(call, want) check(__LINE__, #call, (long)(call), (long)(want))

enum { OK = KVBM_SUCCESS, BAD = KVBM_INVALID_VALUE, NHD = KVBM_LAYOUT_NHD, F16 = KVBM_DTYPE_F16 };
static const size_t kHuge = SIZE_MAX / 4;

static char source[64], target[64];
static void* sources[1] = {source};
static void* targets[1] = {target};
static const void* const* from;
static void* const* to;

static int to_universal(size_t nb, size_t hd, int dtype, int layout) {
  return kvbm_kernels_launch_universal_from_block(to, from, nb, 1, 1, 1, 1, hd, dtype, layout, NULL);
}

static int to_blocks(size_t nb, size_t hd, int dtype, int layout) {
  return kvbm_kernels_launch_block_from_universal(from, to, nb, 1, 1, 1, 1, hd, dtype, layout, NULL);
}

static int operational(size_t nb, size_t inner, size_t elem_size, int dtype, int direction, int backend) {
  return kvbm_kernels_launch_operational_copy(from, from, to, to, nb, 1, 1, inner, elem_size, dtype, direction, backend,
                                              NULL);
}

static void check_permutes(int (*permute)(size_t, size_t, int, int)) {
  int dtype;
  from = NULL, to = NULL;
  for (dtype = KVBM_DTYPE_F16; dtype <= KVBM_DTYPE_FP8; dtype++) {
    CHECK(permute(0, 8, dtype, NHD), OK);
    CHECK(permute(1, 0, dtype, KVBM_LAYOUT_HND), OK);
    CHECK(permute(1, 8, dtype, NHD), BAD);
  }
  CHECK(permute(0, 8, -1, NHD), BAD);
  CHECK(permute(0, 8, 5, NHD), BAD);
  CHECK(permute(0, 8, F16, 2), BAD);
  CHECK(permute(0, 8, F16, -1), BAD);
  from = (const void* const*)sources;
  CHECK(permute(1, 8, F16, NHD), BAD);
  to = targets;
  CHECK(permute(1, 8, F16, 2), BAD);
  CHECK(permute(kHuge, 8, KVBM_DTYPE_F64, NHD), BAD);
}

static void check_operational(void) {
  int backend;
  from = NULL, to = NULL;
  for (backend = -1; backend <= 5; backend++) {
    CHECK(operational(0, 8, 2, F16, KVBM_BLOCK_TO_OPERATIONAL, backend), OK);
    CHECK(operational(1, 0, 2, F16, KVBM_OPERATIONAL_TO_BLOCK, backend), OK);
    CHECK(operational(1, 8, 0, F16, KVBM_OPERATIONAL_TO_BLOCK, backend), OK);
    CHECK(operational(1, 8, 2, F16, KVBM_BLOCK_TO_OPERATIONAL, backend), BAD);
    CHECK(operational(0, 8, 2, 5, KVBM_BLOCK_TO_OPERATIONAL, backend), BAD);
    CHECK(operational(0, 8, 2, F16, 2, backend), BAD);
  }
  from = (const void* const*)sources, to = targets;
  CHECK(operational(1, 8, 4, F16, KVBM_BLOCK_TO_OPERATIONAL, KVBM_BACKEND_AUTO), BAD);
  CHECK(operational(1, 8, 2, KVBM_DTYPE_FP8, KVBM_BLOCK_TO_OPERATIONAL, KVBM_BACKEND_MEMCPY_ASYNC), BAD);
  CHECK(operational(1, 3, 2, F16, KVBM_BLOCK_TO_OPERATIONAL, KVBM_BACKEND_VECTORIZED), KVBM_NOT_SUPPORTED);
  CHECK(operational(1, kHuge, 8, KVBM_DTYPE_F64, KVBM_BLOCK_TO_OPERATIONAL, KVBM_BACKEND_AUTO), BAD);
  /* Tables of the device are not asked for where the host reads its own. */
  CHECK(kvbm_kernels_launch_operational_copy(from, NULL, to, to, 1, 1, 1, 8, 2, F16, KVBM_BLOCK_TO_OPERATIONAL,
                                             KVBM_BACKEND_AUTO, NULL),
        BAD);
  CHECK(kvbm_kernels_launch_operational_copy(NULL, from, to, to, 1, 1, 1, 8, 2, F16, KVBM_BLOCK_TO_OPERATIONAL,
                                             KVBM_BACKEND_KERNEL_ONLY, NULL),
        BAD);
}

static void check_copies(void) {
  int mode;
  CHECK(kvbm_kernels_launch_vectorized_copy(NULL, NULL, 16, 0, NULL), OK);
  CHECK(kvbm_kernels_launch_vectorized_copy(NULL, NULL, 0, 1, NULL), OK);
  CHECK(kvbm_kernels_launch_vectorized_copy(NULL, targets, 16, 1, NULL), BAD);
  CHECK(kvbm_kernels_launch_vectorized_copy(sources, NULL, 16, 1, NULL), BAD);
  CHECK(kvbm_kernels_launch_vectorized_copy(sources, targets, 16, -1, NULL), BAD);
  for (mode = KVBM_BATCHED_WITH_FALLBACK; mode <= KVBM_BATCH_WITHOUT_FALLBACK; mode++) {
    CHECK(kvbm_kernels_memcpy_batch(NULL, NULL, 16, 0, mode, NULL), OK);
    CHECK(kvbm_kernels_memcpy_batch(NULL, NULL, 0, 1, mode, NULL), OK);
    CHECK(kvbm_kernels_memcpy_batch(NULL, targets, 16, 1, mode, NULL), BAD);
    CHECK(kvbm_kernels_memcpy_batch((const void* const*)sources, NULL, 16, 1, mode, NULL), BAD);
  }
  CHECK(kvbm_kernels_memcpy_batch(NULL, NULL, 16, 0, 3, NULL), BAD);
  CHECK(kvbm_kernels_memcpy_batch(NULL, NULL, 16, 0, -1, NULL), BAD);
}

/* Only without a device: host addresses would be nonsense to a kernel. */
static void check_work_is_refused(int refusal) {
  int backend;
  from = (const void* const*)sources, to = targets;
  CHECK(to_universal(1, 8, F16, NHD), refusal);
  CHECK(to_blocks(1, 8, KVBM_DTYPE_FP8, KVBM_LAYOUT_HND), refusal);
  CHECK(kvbm_kernels_launch_vectorized_copy(sources, targets, 16, 1, NULL), refusal);
  CHECK(kvbm_kernels_memcpy_batch(from, to, 16, 1, KVBM_BATCHED_WITH_FALLBACK, NULL), refusal);
  for (backend = -1; backend <= 5; backend++)
    CHECK(operational(1, 8, 2, F16, KVBM_OPERATIONAL_TO_BLOCK, backend), refusal);
}

int main(void) {
  int copied;
  check_permutes(to_universal);
  check_permutes(to_blocks);
  check_operational();
  check_copies();
  memset(source, 7, sizeof source);
  copied = kvbm_kernels_memcpy_batch((const void* const*)sources, targets, sizeof target, 1, KVBM_FALLBACK_ONLY, NULL);
  if (copied == OK) {
    CHECK(memcmp(source, target, sizeof target), 0);
  } else {
    check_work_is_refused(copied);
  }
  if (kvbm_kernels_is_stub_build()) {
    CHECK(copied, KVBM_NOT_SUPPORTED);
    CHECK(kvbm_kernels_has_memcpy_batch_async(), false);
  }
  printf("stub %d, batch %d, copy of host memory returned %d\n", (int)kvbm_kernels_is_stub_build(),
         (int)kvbm_kernels_has_memcpy_batch_async(), copied);
  printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
