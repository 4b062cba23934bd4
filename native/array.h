// Checks of one strided array, and the table of a gather.
#pragma once
#include "check.h"
#include "params.h"

namespace kvx {

// Dimensions, strides, alignment, and that the last element lies inside data_bytes (when known).
// `call` and `what` name the array in the sentence ("K cache", "write k").
kvx_status_t check_array(const char* call, const char* what, const kvx_array_t& a, bool needs_data);

// True when two different indices could reach one address. Sufficient, not necessary: dimensions that interleave
// (stride 2 and 3) are called an overlap too, and no engine has such a cache.
bool overlaps_itself(const kvx_array_t& a);
bool overlaps_itself(const int64_t* shape, const int64_t* stride, int ndim);
constexpr int kMaxOverlapDims = KVX_MAX_TENSOR_DIMS + 1;  // a plane's, and the step from K to V

kvx_status_t lower_table(const kvx_cache_t& cache, const kvx_table_t& table, GatherParams* out);

}  // namespace kvx
