"""Where libkvx and its header are, and what the library was built with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvx.errors import Incompatible, Unsupported
from kvx.ops.registry import ENTRIES

_PACKAGE = Path(__file__).resolve().parent.parent
_NAMES = ("libkvx.so", "libkvx.dylib", "kvx.dll")


def include_dir() -> str:
    """The folder of kvx_abi.h, for C and C++ users."""
    for folder in (_PACKAGE / "include", _PACKAGE.parent / "include"):
        if (folder / "kvx_abi.h").exists():
            return str(folder)
    raise Unsupported(f"include_dir(): kvx_abi.h is not in {_PACKAGE / 'include'}. Reinstall kvx.")


def library_path() -> str:
    """The shared library, to link against or load."""
    for name in _NAMES:
        path = _PACKAGE / "lib" / name
        if path.exists():
            return str(path)
    raise Unsupported(
        f"library_path(): no {_NAMES[0]} in {_PACKAGE / 'lib'}. In a source checkout run `make build`; otherwise reinstall kvx."
    )


class _BuildInfo(ctypes.Structure):
    _fields_ = [
        ("struct_bytes", ctypes.c_uint32),
        ("has_cuda", ctypes.c_uint32),
        ("cuda_archs", ctypes.c_char_p),
        ("simd", ctypes.c_char_p),
        ("max_threads", ctypes.c_int32),
        ("cuda_devices", ctypes.c_int32),
        ("cuda_runtime", ctypes.c_int32),
        ("cuda_driver", ctypes.c_int32),
    ]


@dataclass(frozen=True)
class BuildInfo:
    abi: str
    has_cuda: bool
    cuda_archs: str
    simd: str
    max_threads: int
    cuda_devices: int
    cuda_runtime: int
    cuda_driver: int


@cache
def load(*, keeps_lock: bool = True) -> ctypes.CDLL | None:
    """The library, every call with its signature; None when there is none (a pure source tree): torch then does everything.

    The door opens Python objects, so its calls keep the interpreter lock and let go of it for long work. Calls without objects
    that take long (a conversion, a digest) are loaded without `keeps_lock`.
    """
    try:
        path = library_path()
    except Unsupported:
        return None
    lib = ctypes.PyDLL(path) if keeps_lock else ctypes.CDLL(path)
    for entry in ENTRIES.values():
        if not hasattr(lib, entry.name):
            raise Incompatible(f"{path} is of another build: it has no {entry.name}. Rebuild: `make build`.")
        function = getattr(lib, entry.name)
        function.argtypes, function.restype = entry.takes, entry.gives
    return lib


def build_info() -> BuildInfo | None:
    lib = load()
    if lib is None:
        return None
    info = _BuildInfo(struct_bytes=ctypes.sizeof(_BuildInfo))
    version = (ctypes.c_uint32 * 4)()
    lib.kvx_get_version(ctypes.addressof(version))
    lib.kvx_build_info(ctypes.addressof(info))
    return BuildInfo(
        abi=".".join(str(n) for n in version[1:]),
        has_cuda=bool(info.has_cuda),
        cuda_archs=(info.cuda_archs or b"").decode(),
        simd=(info.simd or b"").decode(),
        max_threads=info.max_threads,
        cuda_devices=info.cuda_devices,
        cuda_runtime=info.cuda_runtime,
        cuda_driver=info.cuda_driver,
    )
