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
  *kind = s.block || s.token ? ROW_SCALES : ONE_SCALE;
  return s.num_groups == 1 && (s.dtype == KVX_DTYPE_F32 || (s.dtype == KVX_DTYPE_F16 && *kind == ROW_SCALES));
}

// Scales of `dims` elements each, in K and in V. Where they lie does not matter: a plan is made without them.
inline bool has_group_scales(const AttentionParams& p, int dtype, int dims) {
  for (const PlaneParams& plane : p.kv.plane)
    if (!plane.scale.data || plane.scale.dtype != dtype || plane.scale.group_size != dims || plane.head_dim % dims ||
        plane.scale.num_groups != plane.head_dim / dims)
      return false;
  return true;
}

// A row's scales follow each other, and begin and end at words.
inline bool are_words(const ScaleParams& s) {
  const int64_t bytes = dtype_bits(s.dtype) / 8;
  const uint64_t where = reinterpret_cast<uintptr_t>(s.data) | uint64_t(s.block | s.token | s.head);
  return s.group == bytes && (where | uint64_t(s.num_groups * bytes)) % 4 == 0;
}

// The one scale of a plane's head; 1 where rows have their own.
__device__ __forceinline__ float scale_of(const ScaleParams& s, int32_t head, bool is_one) {
  float x = s.tensor_scale ? *s.tensor_scale : 1.f;
  if (is_one && s.data) x *= *reinterpret_cast<const float*>(s.data + head * s.head);
  return x;
}

}  // namespace cuda
}  // namespace kvx
