// attention_sparse for every format, width and architecture.
#pragma once
#include "entry/hybrid.h"

namespace kvx {
namespace cuda {

kvx_status_t attention_sparse_any(const SparseParams& p, void* stream);

}  // namespace cuda
}  // namespace kvx
