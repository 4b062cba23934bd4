"""libkvbm_kernels, opened: the C calls of include/kvbm_kernels.h with their argument types, and their numbers."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import cache
from pathlib import Path

from kvx.errors import Unsupported
from kvx.ops import library

NOT_SUPPORTED = 801  # cudaErrorNotSupported


class KvbmDType(IntEnum):
    F16 = 0
    BF16 = 1
    F32 = 2
    F64 = 3
    FP8 = 4


class BlockLayout(IntEnum):
    NHD = 0
    HND = 1


class Direction(IntEnum):
    BLOCK_TO_OPERATIONAL = 0
    OPERATIONAL_TO_BLOCK = 1


class CopyBackend(IntEnum):
    AUTO = 0
    VECTORIZED = 1
    KERNEL_ONLY = 2
    MEMCPY_ASYNC = 3
    MEMCPY_BATCH = 4


class BatchMode(IntEnum):
    BATCHED_WITH_FALLBACK = 0
    FALLBACK_ONLY = 1
    BATCH_WITHOUT_FALLBACK = 2


_P, _N, _I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_CALLS: dict[str, tuple[type, list[type]]] = {
    "launch_universal_from_block": (_I, [_P, _P, _N, _N, _N, _N, _N, _N, _I, _I, _P]),
    "launch_block_from_universal": (_I, [_P, _P, _N, _N, _N, _N, _N, _N, _I, _I, _P]),
    "launch_operational_copy": (_I, [_P, _P, _P, _P, _N, _N, _N, _N, _N, _I, _I, _I, _P]),
    "launch_vectorized_copy": (_I, [_P, _P, _N, _I, _P]),
    "memcpy_batch": (_I, [_P, _P, _N, _N, _I, _P]),
    "has_memcpy_batch_async": (ctypes.c_bool, []),
    "is_stub_build": (ctypes.c_bool, []),
}


def library_path() -> str:
    """The shared library, to link against or load. It stands beside libkvx."""
    path = Path(library.library_path()).with_name("libkvbm_kernels.so")
    if not path.exists():
        raise Unsupported(
            f"library_path(): no {path.name} in {path.parent}. In a source checkout run `make build`; otherwise reinstall kvx."
        )
    return str(path)


@cache
def load() -> ctypes.CDLL:
    """Names are the header's: load().kvbm_kernels_memcpy_batch."""
    lib = ctypes.CDLL(library_path())
    for name, (result, arguments) in _CALLS.items():
        call = getattr(lib, f"kvbm_kernels_{name}")
        call.restype, call.argtypes = result, arguments
    return lib
