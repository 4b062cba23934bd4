// Checks of one strided array, and the table of a gather.
#pragma once
#include <initializer_list>

#include "check.h"
#include "params.h"

namespace kvx {

// Dimensions, strides, alignment, and that the last element lies inside data_bytes (when known).
// `call` and `what` name the array in the sentence ("K cache", "write k").
kvx_status_t check_array(const char* call, const char* what, const kvx_array_t& a, bool needs_data);

// Of an input that is read once for every element it describes: it may repeat elements (stride 0, or axes that
// interleave), but not so often that work has no end. After check_array.
kvx_status_t check_repeats(const char* call, const char* what, const kvx_array_t& a);

// What a call finds its way by lies outside what it writes: an index that was checked is read again, and must not have
// changed by then. After check_array of each; absent ones count for nothing. `more` bytes follow the last element of
// what is written (inline scales).
struct Written {
  const char* name;
  const kvx_array_t& array;
  int64_t more = 0;
};
struct Indices {
  const char* name;
  const kvx_array_t& array;
};
kvx_status_t check_apart(std::initializer_list<Written> written, std::initializer_list<Indices> indices);
kvx_status_t check_apart_from_cache(const kvx_cache_t& cache, std::initializer_list<Indices> indices);

// True when two different indices could reach one address. Sufficient, not necessary: dimensions that interleave
// (stride 2 and 3) are called an overlap too, and no engine has such a cache.
bool overlaps_itself(const kvx_array_t& a);
bool overlaps_itself(const int64_t* shape, const int64_t* stride, int ndim);
constexpr int kMaxOverlapDims = KVX_MAX_TENSOR_DIMS + 1;  // a plane's, and the step from K to V

kvx_status_t lower_table(const kvx_cache_t& cache, const kvx_table_t& table, GatherParams* out);

}  // namespace kvx
