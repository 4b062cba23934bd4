"""kvx bench call: what one Python call costs over the kernel itself, checks included, on a cache too small to matter."""

from __future__ import annotations

import ctypes
from dataclasses import asdict
from typing import Any

import torch

import kvx
from kvx.bench.harness import Timing, machine, time_host
from kvx.ops import library, native
from kvx.ops.door_spec import door_spec
from kvx.ops.structs import Array, DoorSpec


def measure(seconds: float = 1.0) -> dict[str, Any]:
    """Times of kvx.write, of the same work through the C ABI with a ready descriptor, and the difference."""
    spec = kvx.CacheSpec(4, 4, 1, 8, format="f32")
    cache = kvx.allocate(spec).cache
    k, v = torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    slots = torch.tensor([5])
    python = time_host(lambda: kvx.write(cache, k, v, slot_mapping=slots, spec=spec), seconds=seconds, inner=200)
    loop = _kernel_loop(spec, cache, k, v, slots)
    kernel = time_host(loop, seconds=seconds, inner=200)
    nothing = time_host(_empty_call(), seconds=seconds / 4, inner=200)
    # The kernel call goes through ctypes too; that way in is Python's cost, so it is taken off.
    kernel_alone = max(0.0, kernel.median_us - nothing.median_us)
    return {
        "bench": "call",
        "machine": machine("cpu"),
        "python_call": asdict(python),
        "c_call_through_ctypes": asdict(kernel),
        "empty_ctypes_call": asdict(nothing),
        "kernel_us": kernel_alone,
        "overhead_us": python.median_us - kernel_alone,
    }


def _empty_call() -> Any:
    lib = ctypes.PyDLL(library.library_path())
    call = lib.kvx_check_version
    call.argtypes = [ctypes.c_uint32, ctypes.c_uint32]
    return lambda: call(1, 2)


def _kernel_loop(spec: kvx.CacheSpec, cache: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
    """kvx_write with descriptors made beforehand."""
    lib = ctypes.PyDLL(library.library_path())
    call = lib.kvx_write
    call.argtypes = [ctypes.c_void_p] * 3
    door = DoorSpec.from_buffer_copy(ctypes.string_at(door_spec(spec), ctypes.sizeof(DoorSpec)))
    c = door.cache
    c.memory, c.device = 1, 0
    for plane, tensor in ((c.k, cache[0]), (c.v, cache[1])):
        _fill(plane.data, tensor, 3)
    args = _WriteArgs(version=c.version, struct_bytes=ctypes.sizeof(_WriteArgs), invalid_slot=-1)
    _fill(args.k, k, 3)
    _fill(args.v, v, 3)
    _fill(args.slots, slots, 7)
    a, b = ctypes.addressof(c), ctypes.addressof(args)
    if call(a, b, None) != 0:
        raise AssertionError(f"kvx_write refused the bench's descriptor: {native.last_error()}")
    keep = (door, args)

    def run(keep: Any = keep) -> None:
        call(a, b, None)

    return run


class _WriteArgs(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32),
        ("struct_bytes", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("k", Array),
        ("v", Array),
        ("slots", Array),
        ("invalid_slot", ctypes.c_int64),
        ("k_token_scale", Array),
        ("v_token_scale", Array),
        ("errors", ctypes.c_void_p),
        ("reserved", ctypes.c_uint64 * 4),
    ]


def _fill(array: Any, t: torch.Tensor, dtype: int) -> None:
    array.data, array.data_bytes, array.ndim, array.dtype = t.data_ptr(), t.numel() * t.element_size(), t.dim(), dtype
    array.shape[: t.dim()] = t.shape
    array.stride[: t.dim()] = t.stride()


def show(result: dict[str, Any]) -> str:
    p, c = (Timing(**result[n]) for n in ("python_call", "c_call_through_ctypes"))
    return (
        f" call kvx.write | {p.median_us:.2f} us ({p.p10_us:.2f}-{p.p90_us:.2f}) | C through ctypes {c.median_us:.2f} us | "
        f"kernel and its checks {result['kernel_us']:.2f} us | overhead {result['overhead_us']:.2f} us"
    )
