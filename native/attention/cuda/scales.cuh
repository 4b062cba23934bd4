// Where the scales of a plane stand, as attention's fast kernels see it.
#pragma once
#include "attention/attention.h"

namespace kvx {
namespace cuda {

enum ScaleKind { NO_SCALES, ONE_SCALE, ROW_SCALES, GROUP_SCALES };  // none; one a KV head; one a token; several a token

// False = such scales are for the general kernel.
inline bool scale_kind(const ScaleParams& s, ScaleKind* kind) {
  if (!s.data) {
    *kind = s.tensor_scale ? ONE_SCALE : NO_SCALES;
    return true;
  }
  if (s.dtype != KVX_DTYPE_F32 || s.num_groups > 1) return false;
  *kind = s.block || s.token ? ROW_SCALES : ONE_SCALE;
  return true;
}

// The one scale of a plane's head; 1 where rows have their own.
__device__ __forceinline__ float scale_of(const ScaleParams& s, int32_t head, bool is_one) {
  float x = s.tensor_scale ? *s.tensor_scale : 1.f;
  if (is_one && s.data) x *= *reinterpret_cast<const float*>(s.data + head * s.head);
  return x;
}

}  // namespace cuda
}  // namespace kvx
