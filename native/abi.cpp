// The v1.2 entry points: lower, check memory, run where the cache lives.
#include <string.h>

#include "lower.h"
#include "run.h"

namespace kvx {

kvx_status_t check_memory(int32_t memory, bool* on_device) {
  *on_device = memory == KVX_MEMORY_DEVICE || memory == KVX_MEMORY_UNIFIED;
  KVX_NEED(*on_device || memory == KVX_MEMORY_HOST, "memory is %d; say HOST (1), DEVICE (2) or UNIFIED (3).", memory);
  return KVX_STATUS_OK;
}

kvx_status_t run_write(const kvx_cache_t& cache, const kvx_write_args_t& args, void* stream) {
  WriteParams p;
  bool on_device;
  KVX_TRY(lower_write(cache, args, &p));
  KVX_TRY(check_memory(cache.memory, &on_device));
  return on_device ? cuda::write(p, stream) : cpu::write(p);
}

kvx_status_t run_gather(const kvx_cache_t& cache, const kvx_gather_args_t& args, void* stream) {
  GatherParams p;
  bool on_device;
  KVX_TRY(lower_gather(cache, args, &p));
  KVX_TRY(check_memory(cache.memory, &on_device));
  return on_device ? cuda::gather(p, stream) : cpu::gather(p);
}

}  // namespace kvx

using namespace kvx;

extern "C" {

kvx_status_t kvx_get_version(kvx_version_t* version) {
  return entry("kvx_get_version()", [&]() -> kvx_status_t {
    KVX_NEED(version != nullptr, "version is NULL.");
    *version = {uint32_t(sizeof(kvx_version_t)), KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR, KVX_ABI_VERSION_PATCH};
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_check_version(uint32_t major, uint32_t minor) {
  return entry("kvx_check_version()", [&]() -> kvx_status_t {
    if (major == KVX_ABI_VERSION_MAJOR) return KVX_STATUS_OK;
    return fail(KVX_STATUS_INCOMPATIBLE,
                "the caller was built for ABI %u.%u; this library speaks %u.%u. Rebuild against its kvx_abi.h.", major,
                minor, KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR);
  });
}

kvx_status_t kvx_build_info(kvx_build_info_t* info) {
  return entry("kvx_build_info()", [&]() -> kvx_status_t {
    KVX_NEED(info != nullptr && info->struct_bytes >= sizeof(kvx_build_info_t),
             "info is NULL or struct_bytes is too small.");
    const uint32_t bytes = info->struct_bytes;
    memset(info, 0, sizeof *info);
    info->struct_bytes = bytes;
    info->simd = cpu::simd_name();
    info->max_threads = cpu::max_threads();
    cuda::describe(info);
    return KVX_STATUS_OK;
  });
}

kvx_status_t kvx_validate_cache(const kvx_cache_t* cache) {
  return entry("kvx_validate_cache()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr, "cache is NULL.");
    PlaneParams plane[2];
    bool on_device;
    KVX_TRY(lower_cache(*cache, plane));
    return check_memory(cache->memory, &on_device);
  });
}

kvx_status_t kvx_validate_write(const kvx_cache_t* cache, const kvx_write_args_t* args) {
  return entry("kvx_validate_write()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    WriteParams p;
    bool on_device;
    KVX_TRY(lower_write(*cache, *args, &p));
    return check_memory(cache->memory, &on_device);
  });
}

kvx_status_t kvx_validate_gather(const kvx_cache_t* cache, const kvx_gather_args_t* args) {
  return entry("kvx_validate_gather()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    GatherParams p;
    bool on_device;
    KVX_TRY(lower_gather(*cache, *args, &p));
    return check_memory(cache->memory, &on_device);
  });
}

kvx_status_t kvx_write(const kvx_cache_t* cache, const kvx_write_args_t* args, void* stream) {
  return entry("write()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    return run_write(*cache, *args, stream);
  });
}

kvx_status_t kvx_gather(const kvx_cache_t* cache, const kvx_gather_args_t* args, void* stream) {
  return entry("gather()", [&]() -> kvx_status_t {
    KVX_NEED(cache != nullptr && args != nullptr, "cache or args is NULL.");
    return run_gather(*cache, *args, stream);
  });
}

kvx_status_t kvx_amax(const kvx_amax_args_t* args, void* stream) {
  return entry("amax()", [&]() -> kvx_status_t {
    KVX_NEED(args != nullptr, "args is NULL.");
    AmaxParams p;
    bool on_device;
    KVX_TRY(lower_amax(*args, &p));
    KVX_TRY(check_memory(args->memory, &on_device));
    return on_device ? cuda::amax(p, stream) : cpu::amax(p);
  });
}

}  // extern "C"
