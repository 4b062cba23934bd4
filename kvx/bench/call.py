"""kvx bench call: what one Python call costs the host, checks included, on caches too small to matter: kvx.write over its kernel,
and kvx.convert with block ids of the host."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.bench.harness import Timing, machine, summarise, time_host
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
        "convert": [_convert(*case) for case in ((1, 64, 1), (47, 64, 1), (1, 16384, 16384))],
    }


def _convert(layers: int, num_blocks: int, num_ids: int, calls: int = 40) -> dict[str, Any]:
    """Calls one after the other, on a GPU where there is one: each with other ids than the one before, or all with the same."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    src = kvx.CacheSpec(num_blocks, 4, 1, 8, num_layers=layers, layout="layer kv | block token head dim")
    dst = replace(src, layout="block layer kv head token dim")
    plan, source, target = kvx.plan(src, dst), kvx.allocate_buffers(src, device), kvx.allocate_buffers(dst, device)
    g = torch.Generator().manual_seed(0)
    ids = [tuple(torch.randperm(num_blocks, generator=g)[:num_ids] for _ in range(2)) for _ in range(calls)]

    def timed(pairs: Sequence[tuple[Tensor, ...]]) -> Timing:
        samples = []
        for a, b in (*pairs[:5], *pairs):
            start = time.perf_counter()
            kvx.convert(source, target, plan=plan, src_blocks=a, dst_blocks=b)
            samples.append((time.perf_counter() - start) * 1e6)
        if device == "cuda":
            torch.cuda.synchronize()
        return summarise(samples[5:])

    new, same = timed(ids), timed(ids[:1] * calls)
    label = {"device": device, "buffers": len(source) + len(target), "ids": num_ids}
    return {**label, "new_ids": asdict(new), "same_ids": asdict(same)}


def _empty_call() -> Any:
    lib = ctypes.PyDLL(library.library_path())
    call = lib.kvx_check_version
    call.argtypes = [ctypes.c_uint32, ctypes.c_uint32]
    return lambda: call(1, 2)


def _kernel_loop(spec: kvx.CacheSpec, cache: Any, k: Tensor, v: Tensor, slots: Tensor) -> Any:
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


def _fill(array: Any, t: Tensor, dtype: int) -> None:
    array.data, array.data_bytes, array.ndim, array.dtype = t.data_ptr(), t.numel() * t.element_size(), t.dim(), dtype
    array.shape[: t.dim()] = t.shape
    array.stride[: t.dim()] = t.stride()


def show(result: dict[str, Any]) -> str:
    p, c = (Timing(**result[n]) for n in ("python_call", "c_call_through_ctypes"))
    lines = [
        f" call kvx.write | {p.median_us:.2f} us ({p.p10_us:.2f}-{p.p90_us:.2f}) | C through ctypes {c.median_us:.2f} us | "
        f"kernel and its checks {result['kernel_us']:.2f} us | overhead {result['overhead_us']:.2f} us"
    ]
    for r in result["convert"]:
        new, same = Timing(**r["new_ids"]), Timing(**r["same_ids"])
        lines.append(
            f" call kvx.convert on {r['device']}, {r['buffers']} buffers, {r['ids']:,} blocks | other ids {new.median_us:.1f} us "
            f"({new.p10_us:.1f}-{new.p90_us:.1f}) | the same ids {same.median_us:.1f} us ({same.p10_us:.1f}-{same.p90_us:.1f})"
        )
    return "\n".join(lines)
