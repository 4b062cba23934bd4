// A framework's tensors: objects, opened as DLTensors and described as arrays, and the interpreter's lock while a call
// works on them. No Python header: objects are opaque, and what opens them is handed over (door.cpp).
#pragma once
#include <stdio.h>

#include "check.h"

namespace kvx {

// DLPack 1.x, the parts used here.
struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // elements; NULL = dense
  uint64_t byte_offset;
};

using OpenTensor = int (*)(void* object, DLTensor* out);
// Frameworks without an exchange function: the object is a DLTensor already.
inline int copy_tensor(void* object, DLTensor* out) {
  *out = *static_cast<DLTensor*>(object);
  return 0;
}

// What kvx_door_init hands over.
inline OpenTensor open_tensor = copy_tensor;
inline void* (*save_thread)() = nullptr;
inline void (*restore_thread)(void*) = nullptr;
inline void (*clear_error)() = nullptr;  // forgets what the framework raised
inline int64_t (*tuple_size)(void*) = nullptr;
inline void* (*tuple_item)(void*, int64_t) = nullptr;

constexpr int kMaxDims = 8;
constexpr kvx_status_t kPythonError = kvx_status_t(-1);  // the framework has raised already

inline int dtype_of(const DLTensor& t) {
  if (t.type_code == 17 && t.type_bits == 4) return KVX_DTYPE_U8;  // float4_e2m1fn_x2: two a byte
  if (t.type_lanes != 1) return KVX_DTYPE_INVALID;
  switch (t.type_code << 8 | t.type_bits) {
    case 2 << 8 | 16: return KVX_DTYPE_F16;
    case 4 << 8 | 16: return KVX_DTYPE_BF16;
    case 2 << 8 | 32: return KVX_DTYPE_F32;
    case 10 << 8 | 8: return KVX_DTYPE_F8_E4M3;
    case 12 << 8 | 8: return KVX_DTYPE_F8_E5M2;
    case 14 << 8 | 8: return KVX_DTYPE_E8M0;
    case 0 << 8 | 8: return KVX_DTYPE_S8;
    case 1 << 8 | 8: return KVX_DTYPE_U8;
    case 0 << 8 | 32: return KVX_DTYPE_S32;
    case 0 << 8 | 64: return KVX_DTYPE_S64;
    default: return KVX_DTYPE_INVALID;
  }
}

struct Tensor {
  DLTensor dl;
  char* data() const { return static_cast<char*>(dl.data) + dl.byte_offset; }
  int64_t stride(int i) const {
    if (dl.strides) return dl.strides[i];
    int64_t s = 1;
    for (int j = dl.ndim - 1; j > i; j--) s *= dl.shape[j];
    return s;
  }
  // Bytes the tensor covers: the framework vouches that they exist, so a descriptor made from it cannot leave them.
  uint64_t bytes() const {
    int64_t last = 0;
    for (int i = 0; i < dl.ndim; i++) {
      if (dl.shape[i] == 0) return 0;
      last += (dl.shape[i] - 1) * stride(i);
    }
    return (uint64_t(last + 1) * dl.type_bits * dl.type_lanes + 7) / 8;
  }
};

inline const char* shape_text(const int64_t* shape, int ndim, char (&text)[160]) {
  int n = snprintf(text, sizeof text, "[");
  for (int i = 0; i < ndim && n < 140; i++)
    n += snprintf(text + n, sizeof text - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
  snprintf(text + n, sizeof text - n, "]");
  return text;
}

// The tensors of one call: all where the first one is.
struct Door {
  int32_t device_type = 0, device_id = 0;

  kvx_status_t open(const char* name, void* object, Tensor* t) {
    if (open_tensor(object, &t->dl) != 0) {
      if (clear_error == nullptr) return kPythonError;
      clear_error();
      return fail(KVX_STATUS_INVALID_ARGUMENT,
                  "%s has no memory that can be read: it is on the meta device, sparse, or of a type of its own. Give "
                  "a plain tensor on the cache's device.",
                  name);
    }
    KVX_NEED(t->dl.ndim <= kMaxDims, "%s has %d dimensions.", name, t->dl.ndim);
    if (device_type == 0) {
      device_type = t->dl.device_type;
      device_id = t->dl.device_id;
    }
    const bool host = t->dl.device_type == 1 || t->dl.device_type == 3;
    const bool same = host ? (device_type == 1 || device_type == 3)
                           : (t->dl.device_type == device_type && t->dl.device_id == device_id);
    KVX_NEED(same, "%s is on %s:%d, the cache on %s:%d. Every tensor of a call lives where the cache lives.", name,
             host ? "cpu" : "device", t->dl.device_id, device_type == 1 || device_type == 3 ? "cpu" : "device",
             device_id);
    return KVX_STATUS_OK;
  }

  kvx_status_t array(const char* name, void* object, kvx_array_t* a) {
    Tensor t;
    KVX_TRY(open(name, object, &t));
    KVX_NEED(t.dl.ndim <= KVX_MAX_TENSOR_DIMS, "%s has %d dimensions; at most %d.", name, t.dl.ndim,
             KVX_MAX_TENSOR_DIMS);
    a->dtype = dtype_of(t.dl);
    KVX_NEED(a->dtype != KVX_DTYPE_INVALID,
             "%s has an element type (DLPack code %d, %d bits) that KVX does not take. Convert K, V and q to f16, bf16 "
             "or f32, indices to int32 or int64.",
             name, t.dl.type_code, t.dl.type_bits);
    a->ndim = uint32_t(t.dl.ndim);
    for (int i = 0; i < t.dl.ndim; i++) a->shape[i] = t.dl.shape[i], a->stride[i] = t.stride(i);
    a->data = t.data();
    a->data_bytes = t.bytes();
    if (a->data_bytes == 0) a->data = nullptr;
    return KVX_STATUS_OK;
  }

  kvx_status_t optional(const char* name, void* object, kvx_array_t* a) {
    return object ? array(name, object, a) : KVX_STATUS_OK;
  }

  int32_t memory() const {
    return device_type == 2 ? KVX_MEMORY_DEVICE : device_type == 13 ? KVX_MEMORY_UNIFIED : KVX_MEMORY_HOST;
  }
};

// The interpreter lock is released for work worth another thread's while.
template <class F>
kvx_status_t unlocked(int64_t bytes, F&& run) {
  if (bytes < (64 << 10) || save_thread == nullptr) return run();
  struct Released {  // taken back however the work ends
    void* state = save_thread();
    ~Released() { restore_thread(state); }
  } const released;
  return run();
}

}  // namespace kvx
