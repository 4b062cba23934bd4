/* The C calls of Dynamo's KV block manager kernels (libkvbm_kernels), with the same names, arguments and numbers.
 * Copy this header into any project: it needs no CUDA header. A cudaStream_t fits kvbm_stream_t, an int result is a
 * cudaError_t. What differs from Dynamo's library is marked "differs" here and listed in docs/dynamo.md.
 *
 * Sizes: nb blocks, nl layers, no outer chunks (2: K and V; 1: MLA), nt tokens a block, nh heads, hd elements a head.
 * All in elements, not bytes, unless an argument says bytes.
 *
 *   chunk        one allocation for each (block, layer, outer):  NHD [nt, nh, hd]   HND [nh, nt, hd]
 *   universal    one allocation for each block:                  [nh, nl, no, nt, hd]
 *   operational  one allocation for each block:                  [nl, no, inner]; inner: nt * nh * hd as in the chunk
 *
 * Entry (b, l, o) of a table of chunks is number b * nl * no + l * no + o.
 *
 * Rules for every call
 *   - The order of checks: unknown numbers (1), then zero sizes (0: nothing to do), then NULL (1), then sizes that
 *     overflow (1).
 *   - Calls only enqueue on `stream`, of the current device; NULL is the default stream. They never wait for the
 *     device.
 *   - Tables "the device reads" are in device or pinned host memory and must live until the stream has run; in device
 *     memory they are read faster. Tables "the host reads" are plain arrays, read before the call returns.
 *   - What the pointers point to is device memory, or pinned host memory. Any alignment is right; 16 bytes are fastest.
 *   - Source and destination must not overlap.
 *   - A result is the call's own error. differs: theirs also returns an earlier error of somebody else's.
 *   - Without CUDA in the build, or without a driver, non-empty work returns an error. differs: theirs ends the
 *     process. */
#ifndef KVBM_KERNELS_H
#define KVBM_KERNELS_H

#include <stdbool.h>
#include <stddef.h>

#if defined(_WIN32)
#define KVBM_API __declspec(dllexport)
#elif defined(__GNUC__)
#define KVBM_API __attribute__((visibility("default")))
#else
#define KVBM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st* kvbm_stream_t; /* what cudaStream_t is */

/* The results this library makes itself; any other is the CUDA runtime's. */
enum {
  KVBM_SUCCESS = 0,
  KVBM_INVALID_VALUE = 1,  /* cudaErrorInvalidValue: a number that is not in its enum, NULL, or sizes that overflow */
  KVBM_OUT_OF_MEMORY = 2,  /* cudaErrorMemoryAllocation: no host memory for the arrays of a batch                   */
  KVBM_NOT_SUPPORTED = 801 /* cudaErrorNotSupported: this build or this backend cannot do it                        */
};

/* The type of an element. Only its size matters: bytes are moved, not numbers. */
enum {
  KVBM_DTYPE_F16 = 0,  /* 2 bytes                                        */
  KVBM_DTYPE_BF16 = 1, /* 2                                              */
  KVBM_DTYPE_F32 = 2,  /* 4                                              */
  KVBM_DTYPE_F64 = 3,  /* 8                                              */
  KVBM_DTYPE_FP8 = 4   /* 1. differs: theirs has it on a branch only     */
};

enum {
  KVBM_LAYOUT_NHD = 0,
  KVBM_LAYOUT_HND = 1 /* differs: another value is an error here; theirs reads it as HND */
};

enum {
  KVBM_BLOCK_TO_OPERATIONAL = 0,
  KVBM_OPERATIONAL_TO_BLOCK = 1 /* differs: another value is an error here; theirs reads it as this one */
};

/* All move the same bytes, so another value is read as AUTO, as theirs is. */
enum {
  KVBM_BACKEND_AUTO = 0,         /* the kernel; if it cannot be launched, as MEMCPY_BATCH                        */
  KVBM_BACKEND_VECTORIZED = 1,   /* the kernel; chunks must be a multiple of 8 bytes long, otherwise 801         */
  KVBM_BACKEND_KERNEL_ONLY = 2,  /* the kernel; chunks of any length                                             */
  KVBM_BACKEND_MEMCPY_ASYNC = 3, /* one cudaMemcpyAsync for each chunk                                           */
  KVBM_BACKEND_MEMCPY_BATCH = 4  /* as memcpy_batch in mode BATCHED_WITH_FALLBACK                                */
};

enum {
  KVBM_BATCHED_WITH_FALLBACK = 0, /* cudaMemcpyBatchAsync; where it is refused (1, 801) or stream is NULL, the loop */
  KVBM_FALLBACK_ONLY = 1, /* a loop of cudaMemcpyAsync, which ends at the first error                           */
  KVBM_BATCH_WITHOUT_FALLBACK = 2 /* cudaMemcpyBatchAsync; its error is returned. It refuses the NULL stream */
};

/* clang-format off: an argument a line, with what it is beside it */

/* Chunks -> universal. */
KVBM_API int kvbm_kernels_launch_universal_from_block(
    void* const* universal_ptrs,   /* [nb], the device reads it; written through                                */
    const void* const* block_ptrs, /* [nb * nl * no], the device reads it                                       */
    size_t num_blocks,             /* nb. This or any size below 0: success, and nothing is done                */
    size_t nh, size_t nl, size_t no, size_t nt, size_t hd, int dtype, /* KVBM_DTYPE_* */
    int layout, /* KVBM_LAYOUT_* of the chunks                                               */
    kvbm_stream_t stream);

/* Universal -> chunks: the inverse, same arguments. */
KVBM_API int kvbm_kernels_launch_block_from_universal(
    const void* const* universal_ptrs, /* [nb], the device reads it                                             */
    void* const* block_ptrs,           /* [nb * nl * no], the device reads it; written through                  */
    size_t num_blocks, size_t nh, size_t nl, size_t no, size_t nt, size_t hd, int dtype, int layout,
    kvbm_stream_t stream);

/* Chunks <-> operational. Each table twice, for backends that read it on the host and for those that read it on the
 * device. */
KVBM_API int kvbm_kernels_launch_operational_copy(
    const void* const* block_ptrs_host,   /* [nb * nl * no], the host reads it; never NULL. Written through when
                                             OPERATIONAL_TO_BLOCK                                               */
    const void* const* block_ptrs_device, /* the same addresses, the device reads it; may be NULL for
                                             MEMCPY_ASYNC and MEMCPY_BATCH                                      */
    void* const* operational_ptrs_host,   /* [nb], the host reads it; never NULL                                */
    void* const* operational_ptrs_device, /* the same addresses, the device reads it; may be NULL as above      */
    size_t num_blocks,                    /* nb. This or any size below 0: success, and nothing is done         */
    size_t nl, size_t no, size_t inner,   /* elements of a chunk                                                */
    size_t elem_size,                     /* bytes of an element. differs: must be the dtype's, otherwise 1     */
    int dtype,                            /* KVBM_DTYPE_*. differs: checked for every backend                   */
    int direction,                        /* KVBM_BLOCK_TO_OPERATIONAL or KVBM_OPERATIONAL_TO_BLOCK             */
    int backend,                          /* KVBM_BACKEND_*                                                     */
    kvbm_stream_t stream);

/* num_pairs copies of one size. Large pairs are spread over the device. */
KVBM_API int kvbm_kernels_launch_vectorized_copy(
    void** src_ptrs,        /* [num_pairs], the device reads it                                                 */
    void** dst_ptrs,        /* [num_pairs], the device reads it; written through                                */
    size_t copy_size_bytes, /* of each pair, any number of bytes. 0: success, and nothing is done               */
    int num_pairs,          /* 0: success, and nothing is done. Negative: 1                                     */
    kvbm_stream_t stream);

/* num_copies copies of one size by the copy engines. Pointers may also be pageable host memory, for which the driver
 * may wait. */
KVBM_API int kvbm_kernels_memcpy_batch(const void* const* src_ptrs, /* [num_copies], the host reads it */
                                       void* const* dst_ptrs, /* [num_copies], the host reads it; written through */
                                       size_t size_per_copy,  /* bytes. 0: success, and nothing is done  */
                                       size_t num_copies,     /* 0: success, and nothing is done     */
                                       int mode, /* KVBM_BATCHED_WITH_FALLBACK, ...; another value is 1              */
                                       kvbm_stream_t stream);

/* clang-format on */

/* Built with cudaMemcpyBatchAsync: CUDA 12.8 or newer. differs: theirs asks for 12.9. The driver
 * may still refuse it. */
KVBM_API bool kvbm_kernels_has_memcpy_batch_async(void);

/* Built without CUDA: every call that has work to do returns 801. */
KVBM_API bool kvbm_kernels_is_stub_build(void);

#ifdef __cplusplus
}
#endif

#endif /* KVBM_KERNELS_H */
