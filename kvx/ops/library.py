"""Where libkvx and its header are, and what the library was built with.

The package has a libkvx of its own. Where that one is for the CPU alone and kvx-cu13 is installed, the library of kvx-cu13 is taken
instead: it is the same code with CUDA kernels. Beside each library, libkvx.json has its version and its architectures.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import warnings
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from kvx.errors import Incompatible, KvxWarning, Unsupported
from kvx.ops.registry import ENTRIES

_PACKAGE = Path(__file__).resolve().parent.parent
_NAMES = ("libkvx.so", "libkvx.dylib", "kvx.dll")
_CUDA_PACKAGE = "kvx_cu13"  # of several wheels, which have a folder each (wheels/build.py)
# What the library reads from the environment, for debugging, and the values it knows.
SETTINGS = {"KVX_SIMD": ("plain", "avx2", "avx512", "avx512vnni", "avx512bf16"), "KVX_GPU": ("portable",)}


def include_dir() -> str:
    """The folder of kvx_abi.h, for C and C++ users."""
    for folder in (_PACKAGE / "include", _PACKAGE.parent / "include"):
        if (folder / "kvx_abi.h").exists():
            return str(folder)
    raise Unsupported(f"include_dir(): kvx_abi.h is not in {_PACKAGE / 'include'}. Reinstall kvx.")


@cache
def library_path() -> str:
    """The shared library, to link against or load."""
    own = _PACKAGE / "lib"
    folder = _cuda_folder(own) or own
    for name in _NAMES:
        if (folder / name).exists():
            return str(folder / name)
    raise Unsupported(
        f"library_path(): no {_NAMES[0]} in {folder}. In a source checkout run `make build`; otherwise reinstall kvx."
    )


def _cuda_folder(own: Path) -> Path | None:
    """The folder of kvx-cu13's library for this machine's GPUs; None where the package's own library is the one to take."""
    found = find_spec(_CUDA_PACKAGE)
    if found is None or not (own / "libkvx.json").exists():
        return None
    mine = json.loads((own / "libkvx.json").read_text())
    if mine["cuda_archs"]:
        return None  # compiled here
    paths = [path for place in found.submodule_search_locations or () for path in sorted(Path(place).glob("*/libkvx.json"))]
    parts = {path.parent: json.loads(path.read_text()) for path in paths}
    archs = {folder: part["cuda_archs"] for folder, part in parts.items() if part["kvx"] == mine["kvx"]}
    others = sorted({part["kvx"] for part in parts.values()} - {mine["kvx"]})
    if others:
        warnings.warn(
            f"kvx is {mine['kvx']} and kvx-cu13 is {', '.join(others)}: its CUDA kernels are not used. "
            f"Install the same version: pip install kvx-cu13=={mine['kvx']}",
            KvxWarning,
            stacklevel=2,
        )
    gpus = _gpus()
    # Code of the GPU's own architecture counts twice: sm_89 also runs that of sm_80.
    served = {
        folder: sum(is_compiled_for(gpu, text) + (str(gpu) in re.findall(r"\d+", text)) for gpu in gpus)
        for folder, text in archs.items()
    }
    if gpus and archs and not any(served.values()):
        warnings.warn(
            f"kvx-cu13 has CUDA kernels for {', '.join(archs.values())} and this machine's GPU is sm_{gpus[0]}: they are not used. "
            f"In a source checkout this compiles some for it: KVX_CUDA_ARCHS={gpus[0]} pip install .",
            KvxWarning,
            stacklevel=2,
        )
        return None
    return max(served, key=lambda folder: served[folder], default=None)


def is_compiled_for(sm: int, archs: str) -> bool:
    """Code for this architecture, for an older one of its generation, or PTX of any that is not newer."""
    for arch in re.findall(r"(\d+)([a-z]*)(\+PTX|-virtual)?", archs):
        number, kind, is_ptx = int(arch[0]), arch[1], bool(arch[2])
        if (is_ptx or (number // 10 == sm // 10 and not kind)) and number <= sm:
            return True
        if number == sm:
            return True
    return False


def _gpus() -> list[int]:
    """Architectures of the GPUs this process may use, as 80, 90 or 120, asked of the driver; [] where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    gpus = []
    for n in range(count.value):
        driver.cuDeviceGet(ctypes.byref(device), n)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        gpus.append(10 * major.value + minor.value)
    return gpus


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
    for name, values in SETTINGS.items():
        if (value := os.environ.get(name)) and value not in values:
            warnings.warn(f"{name}={value} is ignored: it takes {', '.join(values)}.", KvxWarning, stacklevel=2)
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
