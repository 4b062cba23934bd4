// Descriptors -> params: every check that reads no cache memory, then addresses and byte strides.
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

// [T, heads, dim] on the caller's side. `name` is the call, `what` the array.
kvx_status_t lower_rows(const char* name, const char* what, const kvx_array_t& a, int64_t heads, int64_t dim,
                        bool needs_data, RowsParams* out);
kvx_status_t lower_cache(const kvx_cache_t& cache, PlaneParams plane[2]);
// A plane whose blocks have addresses of their own, given as `name`: it is checked as one buffer, at a made-up address
// that is never used.
kvx_status_t lower_pointers(const char* name, int index, kvx_plane_t* plane);
kvx_status_t lower_write(const kvx_cache_t& cache, const kvx_write_args_t& args, WriteParams* out);
kvx_status_t lower_gather(const kvx_cache_t& cache, const kvx_gather_args_t& args, GatherParams* out);
kvx_status_t lower_amax(const kvx_amax_args_t& args, AmaxParams* out);

// HOST, DEVICE or UNIFIED, and which side that is. Whether this build can run there is the call's own question.
kvx_status_t check_memory(int32_t memory, bool* on_device);
// Struct header of 1.2: major of `version`, size of `struct_bytes`.
kvx_status_t check_header(const char* what, uint32_t version, uint32_t struct_bytes, uint64_t need_bytes);

}  // namespace kvx
