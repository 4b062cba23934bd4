"""The one door to libkvx: tensors in, a status out.

A tensor crosses as its object's address; the library reads pointer, shape and strides through torch's DLPack exchange
function (torch >= 2.10), so a call costs a few hundred nanoseconds a tensor less than asking in Python. Where torch has no
such function, `_Described` fills the same struct in Python.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, Incompatible, InternalError, KvxError, OutOfRange, Unsupported
from kvx.ops import library, structs
from kvx.ops.registry import ENTRIES

_P, _I32, _I64, _U32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
_NO_EXTRA = structs.Extra()
_STATUS: dict[int, type[KvxError]] = {1: BadArgument, 2: Unsupported, 3: OutOfRange, 4: Incompatible, 5: InternalError}


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
        ("byte_offset", ctypes.c_uint64),
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


def _open() -> ctypes.CDLL | None:
    lib = library.load()
    if lib is None:
        return None
    mine = [ctypes.sizeof(t) for t in (structs.DoorSpec, structs.Extra, structs.TableArgs, structs.AttentionArgs)]
    sizes = (_I64 * len(mine))()
    lib.kvx_door_sizes(ctypes.addressof(sizes), len(mine))
    theirs = [*sizes, lib.kvx_door_append_bytes()]
    mine.append(ctypes.sizeof(structs.AppendArgs))
    if theirs != mine:
        raise Incompatible(
            f"{library.library_path()} is of another build (door {theirs}, kvx wants {mine}). Rebuild: `make build`."
        )
    api = ctypes.pythonapi
    calls = (api.PyEval_SaveThread, api.PyEval_RestoreThread, api.PyErr_Clear, api.PyTuple_Size, api.PyTuple_GetItem)
    lib.kvx_door_init(_exchange_function() or None, *(ctypes.cast(f, _P).value for f in calls))
    return lib


LIB = _open()
if LIB is not None and hasattr(os, "register_at_fork") and hasattr(LIB, "omp_set_num_threads"):
    # A forked child has none of OpenMP's threads: a team would wait for them for ever. A team of one waits for nobody.
    os.register_at_fork(after_in_child=partial(LIB.omp_set_num_threads, 1))
INFO = library.build_info()
HAS_CPU = LIB is not None
HAS_CUDA = INFO is not None and INFO.has_cuda and INFO.cuda_devices > 0
IS_EXCHANGED = _exchange_function() != 0


def entry(name: str, *, keeps_lock: bool = True) -> Any:
    """A call of libkvx, as kvx/ops/registry.py describes it. Without the library it is None, and nobody calls it."""
    if name not in ENTRIES:
        raise InternalError(f"{name} is no call of kvx/ops/registry.py; add it to the row of its op.")
    return getattr(LIB if keeps_lock else library.load(keeps_lock=False), name) if LIB is not None else None


def extra(optional: Sequence[int | None]) -> structs.Extra:
    """The struct of a call's optional tensors, given by their handles. Without any it is one that stays."""
    return structs.Extra(*optional) if optional else _NO_EXTRA


def call_struct(name: str, args: ctypes.Structure, second: int) -> None:
    """A call of the C ABI that takes a struct, and a stream or the address of its answer."""
    status = entry(name)(ctypes.addressof(args), second)
    if status:
        raise_status(status)


def last_error() -> str:
    """What the thread's last call said, until its next one."""
    return "" if LIB is None else LIB.kvx_last_error().decode()


def raise_status(status: int, message: str = "", *, call: str = "") -> None:
    """`call`: Python's name, where several C calls with names of their own stand behind it."""
    message = message or last_error()
    raise _STATUS[status](f"{call}: {message.partition(': ')[2]}" if call else message)


def handles(*tensors: Tensor | None) -> tuple[list[int | None], list[Any]]:
    """What the door takes for each tensor, and what must stay alive during the call."""
    if IS_EXCHANGED:
        return [None if t is None else id(t) for t in tensors], []
    keep = [None if t is None else _Described(t) for t in tensors]
    return [None if d is None else d.address for d in keep], keep


_names: dict[str, bytes] = {}


def name_of(call: str) -> bytes:
    """A call's name as C reads it. Kept: the library holds on to it until the thread's next call."""
    return _names.setdefault(call, f"{call}()".encode())


def address_of(struct: ctypes.Structure) -> int:
    return ctypes.addressof(struct)


def fill_array(array: structs.Array, x: Tensor) -> None:
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
