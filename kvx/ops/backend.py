"""Who computes: torch (any device, the definition), cpu and cuda (native). Chosen by where the cache is, or by name.

A native backend that is missing is said aloud, once, when this module is imported; `kvx inspect` prints the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.errors import BadArgument, KvxWarning, OutOfRange, Unsupported, a_type
from kvx.ops import native
from kvx.ops.registry import OPS
from kvx.ops.support import BACKENDS, Support, kernels_of
from kvx.spec.cache_spec import CacheSpec

if not native.HAS_CPU:
    warnings.warn(
        "libkvx is not built: every op runs on the torch backend. In a source checkout run `make build`.",
        KvxWarning,
        stacklevel=2,
    )
elif torch.cuda.is_available() and not native.HAS_CUDA:
    warnings.warn(
        "libkvx was built without CUDA and torch sees a GPU: ops on it run on the torch backend. "
        "Install kvx-cu13; in a source checkout run `KVX_CUDA=ON make build` with nvcc on PATH.",
        KvxWarning,
        stacklevel=2,
    )


@dataclass
class _Debug:
    is_on: bool = False


_debug = _Debug()


def debug(on: bool = True) -> None:
    """Check device calls as host calls are: each one waits for the device and raises OutOfRange for bad slots and block ids."""
    _debug.is_on = on


def is_debug() -> bool:
    return _debug.is_on


def reason_missing(backend: str) -> str | None:
    """Why a backend cannot be used here; None when it can."""
    if backend == "torch" or (backend == "cpu" and native.HAS_CPU) or (backend == "cuda" and native.HAS_CUDA):
        return None
    if not native.HAS_CPU:
        return "libkvx is not built; run `make build`"
    if native.INFO is not None and not native.INFO.has_cuda:
        return "libkvx was built without CUDA; install kvx-cu13, or run `KVX_CUDA=ON make build` with nvcc on PATH or CUDA_HOME set"
    return "no CUDA device or driver on this machine"


def supports(op: str, spec: CacheSpec | None = None, backend: str = "torch") -> Support:
    """Whether `op` runs on `backend` for caches of `spec` (None: for some cache), and if not, why and what does.

    The answer is true or false as a condition; as text it is the sentence an unsupported call raises. For attention on a GPU it
    also says which kernel the spec gets, under queries of the cache's own type (bf16 over quantised ones), and what it reaches.
    """
    if op not in OPS:
        raise BadArgument(f'supports(): there is no op "{op}"; there are {", ".join(OPS)}.')
    if backend not in BACKENDS:
        raise BadArgument(f'supports(): backend is "{backend}"; it must be torch, cpu or cuda.')
    takes = OPS[op]
    if backend not in takes.backends:
        have = "have" if len(takes.backends) > 1 else "has"
        return Support(op, backend, f"{op}(): no {backend} kernel; {', '.join(takes.backends)} {have} it.")
    missing = reason_missing(backend)
    if missing is not None:
        return Support(op, backend, f'{op}(): backend "{backend}" is not there: {missing}. backend="torch" runs anywhere.')
    reason = takes.rule(spec, backend) if takes.rule and spec is not None else ""
    if backend != "cuda" or reason or spec is None:
        return Support(op, backend, reason)
    major, minor = torch.cuda.get_device_capability()
    return Support(op, backend, "", kernels_of(op, spec, 10 * major + minor))


def chosen_backend(op: str, cache: Tensor | Sequence[Tensor], *, spec: CacheSpec | None = None, backend: str = "auto") -> str:
    """Which backend a call with this cache would run on: what `backend="auto"` chose, or the one named."""
    return choose(op, backend, cache if isinstance(cache, Tensor) else cache[0], spec)


def choose(call: str, backend: str, tensor: Tensor, spec: CacheSpec | None = None) -> str:
    """The backend a call runs on. `auto` is the native one of the tensor's device where it supports the call, torch otherwise."""
    device = tensor.device.type
    if device == "meta":
        raise BadArgument(f"{call}(): the cache is on the meta device and has no memory. Allocate it on a real one.")
    if backend == "auto":
        if device not in ("cpu", "cuda") or reason_missing(device) is not None:
            return "torch"
        return device if spec is None or _is_taken(call, spec, device) else "torch"
    if backend not in BACKENDS:
        raise BadArgument(f'{call}(): backend is "{backend}"; it must be auto, torch, cpu or cuda.')
    reason = reason_missing(backend)
    if reason is not None:
        raise Unsupported(f'{call}(): backend "{backend}" is not there: {reason}. backend="torch" runs anywhere.')
    if spec is not None and not _is_taken(call, spec, backend):
        raise Unsupported(str(supports(call, spec, backend)))
    if backend != "torch" and backend != device:
        raise BadArgument(f'{call}(): backend is "{backend}" and the cache is on {device}. Use backend="auto", or move the cache.')
    return backend


def require(call: str, spec: CacheSpec) -> None:
    """Raise what `supports` answers where no backend takes caches of this spec."""
    if not _is_taken(call, spec, "torch"):
        raise Unsupported(str(supports(call, spec)))


def _is_taken(call: str, spec: CacheSpec, backend: str) -> bool:
    """supports(), asked once and kept with the spec: hashing a spec would cost each call a microsecond."""
    known: dict[tuple[str, str], bool] = spec.__dict__.setdefault("_taken", {})
    if (call, backend) not in known:
        known[call, backend] = call not in OPS or bool(supports(call, spec, backend))
    return known[call, backend]


def as_tensor(call: str, name: str, x: object) -> Tensor:
    """A torch view of anything with `__dlpack__` (NumPy, CuPy, JAX). Memory is shared, not copied."""
    if isinstance(x, Tensor):
        return x
    if hasattr(x, "__dlpack__"):
        return torch.utils.dlpack.from_dlpack(x)
    hint = " kvx.slot_mapping makes it of a block table." if name == "slot_mapping" else ""
    raise BadArgument(f"{call}(): {name} is {a_type(x)}; it takes a torch tensor, or an array with __dlpack__.{hint}")


class ErrorCounter:
    """The device's count of bad indices, read when debugging. Used as `with`: raises on leaving."""

    def __init__(self, call: str, device: torch.device):
        self.call = call
        self.count = torch.zeros((), dtype=torch.int64, device=device)

    def __enter__(self) -> Tensor:
        return self.count

    def __exit__(self, kind: object, *_: object) -> None:
        bad = int(self.count)
        if kind is None and bad:
            raise OutOfRange(
                f"{self.call}(): {bad} slots or block ids are outside the cache; "
                "those rows were skipped (written) or zeroed (gathered)."
            )
