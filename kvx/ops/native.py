"""The one door to libkvx: tensors in, a status out.

A tensor crosses as its object's address; the library reads pointer, shape and strides through torch's DLPack exchange
function (torch >= 2.10), so a call costs a few hundred nanoseconds a tensor less than asking in Python. Where torch has no
such function, `_Described` fills the same struct in Python. What a spec says is laid out once (`door_spec`) and reused.
"""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, Incompatible, InternalError, KvxError, OutOfRange, Unsupported
from kvx.layout.planes import plane_maps, pooled_strides
from kvx.ops import library
from kvx.spec.cache_spec import CacheSpec, PlaneSpec

_P, _I32, _I64, _U32, _U64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32, ctypes.c_uint64
_STATUS: dict[int, type[KvxError]] = {1: BadArgument, 2: Unsupported, 3: OutOfRange, 4: Incompatible, 5: InternalError}
ABI_VERSION = 1 << 16 | 2
_LAYOUT_CUSTOM, _FLAG_SCALE_INLINE = 15, 1


class Array(ctypes.Structure):
    _fields_ = [
        ("data", _P),
        ("data_bytes", _U64),
        ("shape", _I64 * 5),
        ("stride", _I64 * 5),
        ("ndim", _U32),
        ("dtype", _I32),
    ]


class _Plane(ctypes.Structure):
    _fields_ = [
        ("data", Array),
        ("scale", Array),
        ("tensor_scale", _P),
        ("layout", _I32),
        ("granularity", _I32),
        ("group_size", _U32),
        ("flags", _U32),
        ("scale_offset", _I64),
        ("scale_dtype", _I32),
        ("reserved32", _U32),
        ("reserved", _U64 * 2),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("version", _U32),
        ("struct_bytes", _U32),
        ("flags", _U64),
        ("num_blocks", _I64),
        ("block_size", _I64),
        ("num_kv_heads", _I64),
        ("k_head_dim", _I64),
        ("v_head_dim", _I64),
        ("memory", _I32),
        ("device", _I32),
        ("k", _Plane),
        ("v", _Plane),
        ("pool_primary", _P),
        ("pool_secondary", _P),
        ("bytes_per_block", _U64),
        ("secondary_blocks", _I64),
        ("primary_bytes", _U64),
        ("secondary_bytes", _U64),
        ("reserved", _U64 * 4),
    ]


class ConvertArgs(ctypes.Structure):
    _fields_ = [
        ("version", _U32),
        ("struct_bytes", _U32),
        ("flags", _U64),
        ("src_memory", _I32),
        ("dst_memory", _I32),
        ("table_memory", _I32),
        ("device", _I32),
        ("src_buffers", _P),
        ("dst_buffers", _P),
        ("src_bytes", _P),
        ("dst_bytes", _P),
        ("src_blocks", Array),
        ("dst_blocks", Array),
        ("seq_lens", Array),
        ("errors", _P),
        ("reserved", _U64 * 4),
    ]


class _DoorPlane(ctypes.Structure):
    _fields_ = [
        ("tensor", _I32),
        ("ndim", _I32),
        ("num_axes", _I32),
        ("raw", _I32),
        ("shape", _I64 * 8),
        ("axis_size", _I64 * 5),
        ("dim", _I32 * 5),
        ("offset_dim", _I32),
        ("mul", _I64 * 5),
        ("offset_mul", _I64),
    ]


class _DoorSpec(ctypes.Structure):
    _fields_ = [("cache", _Cache), ("plane", _DoorPlane * 2), ("reserved", _I64 * 2)]


class Extra(ctypes.Structure):
    """Optional tensors of a call; NULL = absent."""

    _fields_ = [
        (name, _P)
        for name in (
            "k_scale",
            "v_scale",
            "k_tensor_scale",
            "v_tensor_scale",
            "k_token_scale",
            "v_token_scale",
            "errors",
        )
    ]


class TableArgs(ctypes.Structure):
    _fields_ = [
        *(
            (name, _P)
            for name in (
                "indices",
                "indptr",
                "last_page_len",
                "seq_lens",
                "cu_seqlens",
                "pool_primary",
                "pool_secondary",
                "k_pointers",
                "v_pointers",
            )
        ),
        *((name, _I64) for name in ("format", "beam_width", "max_seq_len", "bytes_per_block")),
    ]


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("q", "out", "lse", "sinks", "workspace")),
        *((name, _I64) for name in ("step", "flags", "window", "max_query_len", "bytes")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "soft_cap")),
    ]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", _P),
        ("device_type", _I32),
        ("device_id", _I32),
        ("ndim", _I32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(_I64)),
        ("strides", ctypes.POINTER(_I64)),
        ("byte_offset", _U64),
    ]


_DLPACK_TYPE = {
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}


class _Described:
    """A DLTensor made in Python, for a torch without the exchange function."""

    def __init__(self, x: Tensor):
        n = x.dim()
        self.shape, self.strides = (_I64 * n)(*x.shape), (_I64 * n)(*x.stride())
        code, bits = _DLPACK_TYPE.get(x.dtype, (255, 0))
        device = {"cpu": 1, "cuda": 2}.get(x.device.type, 0)
        self.struct = _DLTensor(x.data_ptr(), device, x.device.index or 0, n, code, bits, 1, self.shape, self.strides, 0)
        self.address = ctypes.addressof(self.struct)


def _exchange_function() -> int:
    """Address of `int f(PyObject*, DLTensor*)`, or 0."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return 0
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = _P, [ctypes.py_object, ctypes.c_char_p]
    address = get(capsule, b"dlpack_exchange_api")
    major = _U32.from_address(address).value
    # version, previous table, allocator, managed from object, object from managed, DLTensor from object
    return ((_P * 6).from_address(address)[5] or 0) if major == 1 else 0


def _open() -> ctypes.PyDLL | None:
    lib = library.load()
    if lib is None:
        return None
    mine = [ctypes.sizeof(t) for t in (_DoorSpec, Extra, TableArgs, AttentionArgs)]
    sizes = (_I64 * len(mine))()
    lib.kvx_door_sizes(sizes, len(mine))
    if list(sizes) != mine:
        raise Incompatible(
            f"{library.library_path()} is of another build (door {list(sizes)}, kvx wants {mine}). Rebuild: `make build`."
        )
    lib.kvx_last_error.restype = ctypes.c_char_p
    lib.kvx_door_init.argtypes = [_P] * 4
    lib.kvx_door_init.restype = None
    lib.kvx_door_write.argtypes = [_P] * 8
    lib.kvx_door_gather.argtypes = [_P] * 8
    lib.kvx_door_attention.argtypes = [_P] * 7
    lib.kvx_plan_load.argtypes = [ctypes.c_char_p, _U64, _P]
    lib.kvx_plan_free.argtypes = lib.kvx_bound_free.argtypes = [_P]
    lib.kvx_plan_free.restype = lib.kvx_bound_free.restype = None
    lib.kvx_bind.argtypes = [_P] * 3
    lib.kvx_run.argtypes = [_P] * 2
    lib.kvx_hash_blocks.argtypes = [_I32, ctypes.c_char_p, ctypes.c_char_p, _I64, _I64, _P]
    lib.kvx_door_amax.argtypes = [_P, _P, _P, ctypes.c_int, _I64, _P, _P]
    api = ctypes.pythonapi
    save, restore, clear = (ctypes.cast(f, _P).value for f in (api.PyEval_SaveThread, api.PyEval_RestoreThread, api.PyErr_Clear))
    lib.kvx_door_init(_exchange_function() or None, save, restore, clear)
    return lib


LIB = _open()
if LIB is not None and hasattr(os, "register_at_fork") and hasattr(LIB, "omp_set_num_threads"):
    # A forked child has none of OpenMP's threads: a team would wait for them for ever. A team of one waits for nobody.
    os.register_at_fork(after_in_child=partial(LIB.omp_set_num_threads, 1))
INFO = library.build_info()
HAS_CPU = LIB is not None
HAS_CUDA = INFO is not None and INFO.has_cuda and INFO.cuda_devices > 0
IS_EXCHANGED = _exchange_function() != 0
write_call: Any = LIB.kvx_door_write if LIB else None
gather_call: Any = LIB.kvx_door_gather if LIB else None
attention_call: Any = LIB.kvx_door_attention if LIB else None
amax_call: Any = LIB.kvx_door_amax if LIB else None
hash_blocks_call: Any = LIB.kvx_hash_blocks if LIB else None
run_call: Any = LIB.kvx_run if LIB else None
# A conversion or digest on the host takes long: called through CDLL, which lets go of the interpreter lock.
_UNLOCKED = ctypes.CDLL(library.library_path()) if LIB else None
run_host_call: Any = _UNLOCKED.kvx_run if _UNLOCKED else None
digest_call: Any = _UNLOCKED.kvx_digest if _UNLOCKED else None
if _UNLOCKED:
    _UNLOCKED.kvx_run.argtypes, _UNLOCKED.kvx_digest.argtypes = [_P] * 2, [_P] * 4


def raise_status(status: int, message: str = "", *, call: str = "") -> None:
    """`call`: Python's name, where several C calls with names of their own stand behind it."""
    assert LIB is not None
    message = message or LIB.kvx_last_error().decode()
    raise _STATUS[status](f"{call}: {message.partition(': ')[2]}" if call else message)


def handles(*tensors: Tensor | None) -> tuple[list[int | None], list[Any]]:
    """What the door takes for each tensor, and what must stay alive during the call."""
    if IS_EXCHANGED:
        return [None if t is None else id(t) for t in tensors], []
    keep = [None if t is None else _Described(t) for t in tensors]
    return [None if d is None else d.address for d in keep], keep


def address_of(struct: ctypes.Structure) -> int:
    return ctypes.addressof(struct)


def fill_array(array: Array, x: Tensor) -> None:
    """int32 and int64 tensors: tables of a conversion."""
    array.data, array.data_bytes, array.ndim = (
        x.data_ptr(),
        x.untyped_storage().nbytes() - x.storage_offset() * x.element_size(),
        x.dim(),
    )
    array.dtype = 6 if x.dtype == torch.int32 else 7
    array.shape[: x.dim()] = x.shape
    array.stride[: x.dim()] = x.stride()


def stream_of(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else 0


def door_spec(spec: CacheSpec) -> int:
    """Address of the spec as the door reads it. Made once, kept with the spec."""
    try:
        return spec.__dict__["_door_address"]
    except (KeyError, AttributeError):
        if not isinstance(spec, CacheSpec):
            raise BadArgument(f"spec is {type(spec).__name__}; it is a kvx.CacheSpec.") from None
        struct = _make(spec)
        spec.__dict__["_door_struct"] = struct
        spec.__dict__["_door_address"] = ctypes.addressof(struct)
        return spec.__dict__["_door_address"]


def pooled_door_spec(spec: CacheSpec) -> _DoorSpec:
    """For KV_OFFSETS: no tensors, but the strides of one dense block of K or V."""
    struct = _make(spec)
    for plane, m, strides in zip((struct.cache.k, struct.cache.v), plane_maps(spec), pooled_strides(spec), strict=True):
        plane.data.ndim = len(m.axes)
        plane.data.shape[: len(m.axes)] = m.sizes
        plane.data.stride[: len(m.axes)] = strides
    return struct


def _make(spec: CacheSpec) -> _DoorSpec:
    struct = _DoorSpec()
    c = struct.cache
    c.version, c.struct_bytes = ABI_VERSION, ctypes.sizeof(_Cache)
    c.num_blocks, c.block_size, c.num_kv_heads = spec.num_blocks, spec.block_size, spec.num_kv_heads
    c.k_head_dim, c.v_head_dim = (p.head_dim for p in spec.kv)
    for i, m in enumerate(plane_maps(spec)):
        _fill_plane(c.v if i else c.k, spec.plane(i))
        d = struct.plane[i]
        d.tensor, d.ndim, d.num_axes = m.buffer, len(m.shape), len(m.axes)
        d.raw = int(spec.plane(i).format.is_in_bytes or spec.tensor_units[i] < spec.plane(i).unit_bytes)
        d.shape[: len(m.shape)] = m.shape
        d.axis_size[: len(m.sizes)] = m.sizes
        d.dim[: len(m.dim)] = m.dim
        d.mul[: len(m.mul)] = m.mul
        d.offset_dim, d.offset_mul = m.offset_dim, m.offset_mul
    return struct


def _fill_plane(plane: _Plane, spec: PlaneSpec) -> None:
    fmt = spec.format
    plane.layout = _LAYOUT_CUSTOM  # axes are named by their count, 4 or 5, and strides say the order
    plane.data.dtype = fmt.element.code
    plane.granularity = int(fmt.granularity)
    plane.group_size = fmt.group_size
    if fmt.scale is not None:
        plane.scale.dtype = fmt.scale.code
        plane.scale_dtype = fmt.scale.code
    if fmt.is_inline:
        plane.flags = _FLAG_SCALE_INLINE
        plane.scale_offset = spec.head_dim * fmt.element.bits // 8
