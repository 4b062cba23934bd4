"""The gate: is this tensor what the spec says? Conversions, digests, files and views ask it before they read a byte.

A spec knows every buffer's element type and how its axes step through memory. A tensor is that buffer when its type is the same and
its dimensions are those axes: in memory order or permuted, adjacent ones merged or not, as engines register them. Flat
uint8 says nothing of what it holds and is taken at its word; int8 too where planes have names, as vLLM's pages of states are.
Everything else is refused, by the name of what differs.

Ops on one layer's tensors ask `check_layer`; their native form is open_cache of native/door.cpp, which gives the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.axes import PLANES, Layout
from kvx.layout.place import Place, in_memory, num_cache_buffers, places, scale_places
from kvx.spec.cache_spec import PlaneSpec, Spec

_AREAS = ("K and V", "planes")  # areas of planes, of orders or sizes of their own, in one buffer


class AxisStep(NamedTuple):
    """One axis of a buffer, or what several planes put between two of them."""

    axis: str
    size: int
    stride: int  # bytes

    @property
    def end(self) -> int:
        return self.size * self.stride


class Grid(NamedTuple):
    """What one buffer holds: its axes in memory, outermost first, and the type its elements have in torch."""

    steps: tuple[AxisStep, ...]  # those longer than 1
    dtype: torch.dtype | None  # None: bytes alone will do, since elements are no whole ones or of two types
    bytes: int  # up to the last element
    format: str
    layout: str
    is_scale: bool = False

    def __str__(self) -> str:
        return " ".join(f"{s.axis} {s.size}" for s in self.steps) or "one element"


def check_buffers(call: str, name: str, tensors: Sequence[Tensor], specs: Sequence[Spec], *, scales: bool = True) -> None:
    """Every buffer of these shards, one after the other, is what its spec says, and all are in one place.

    Without `scales`, the buffers of the layout alone.
    """
    runs = [run for spec in specs for run in grids(spec) if scales or not run[1].is_scale]
    expected = sum(count for count, _ in runs)
    if len(tensors) != expected:
        raise BadArgument(f"{call}(): {name} has {len(tensors)} buffers; the specs make {expected}.")
    check_devices(call, name, tensors)
    at = 0
    for count, grid in runs:
        size = grid.bytes
        for t in tensors[at : at + count]:
            if t.dtype is torch.uint8 and t.dim() == 1 and t.numel() >= size and t.is_contiguous() and not t.is_meta:
                at += 1
                continue  # nearly all are, and there may be thousands
            reason = refusal(t, grid)
            if reason:
                raise BadArgument(f"{call}(): {name} buffer {at} {reason}")
            at += 1


def check_devices(call: str, name: str, tensors: Sequence[Tensor]) -> None:
    devices = {t.device for t in tensors}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise BadArgument(f"{call}(): {name} is on {len(devices)} devices: {found}. Move its buffers to one.")


def refusal(t: Tensor, grid: Grid) -> str:
    """Why a tensor is not this buffer, as the end of a sentence; "" when it is."""
    reason = no_memory(t)
    if reason:
        return reason
    return _refusal(grid, t.dtype, tuple(t.shape), t.stride(), t.element_size())


def check_memory(call: str, backend: str = "", **tensors: Tensor | Sequence[Tensor | None] | None) -> None:
    """Tensors whose bytes an op may use: asked where gradients are on or the torch body runs. The library asks for itself."""
    first: tuple[str, Tensor] | None = None
    for name, given in tensors.items():
        for t in (given,) if isinstance(given, Tensor) else given or ():
            if not isinstance(t, Tensor):
                continue
            reason = no_memory(t)
            if reason:
                raise BadArgument(f"{call}(): {name} {reason}")
            if backend != "torch" or t.numel() < 2 or name == "pairs":  # which copy_blocks brings to the cache's device
                continue
            first = first or (name, t)
            if t.device != first[1].device:
                raise BadArgument(f"{call}(): {name} is on {t.device}, {first[0]} on {first[1].device}; all are on one device.")


def check_apart(call: str, **tensors: Tensor | Sequence[Tensor | None] | None) -> None:
    """Tensors a torch body writes: no two elements share memory. The library asks for itself."""
    for name, given in tensors.items():
        for t in (given,) if isinstance(given, Tensor) else given or ():
            if t is None or not t.numel():
                continue
            end = 1
            for stride, n in sorted(zip(t.stride(), t.shape, strict=True)):
                if n > 1 and stride < end:
                    raise BadArgument(
                        f"{call}(): {name} is {list(t.shape)} with strides {list(t.stride())}; elements that are written overlap "
                        "in memory. Give it memory of its own: .contiguous()."
                    )
                end = max(end, stride * (n - 1) + 1)


def no_memory(t: Tensor) -> str:
    """Why a tensor's bytes cannot be used as they are, whatever they should hold; "" when they can."""
    if t.layout is not torch.strided:
        return f"is a {str(t.layout).removeprefix('torch.')} tensor, without strides. Give its .to_dense()."
    if t.is_meta:
        return "is on the meta device and has no memory. Allocate it on a real one."
    if t.requires_grad and torch.is_grad_enabled():
        return "requires grad, and no gradient comes back out of a cache. Give its .detach(), or call under torch.no_grad()."
    if t.is_neg() or t.is_conj():
        return (
            "is a lazily negated or conjugated view, so its memory holds other values. Give its .resolve_neg() or .resolve_conj()."
        )
    return ""


@lru_cache(maxsize=4096)
def _refusal(grid: Grid, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> str:
    got = f"is {list(shape)} {_name(dtype)}"
    is_bytes = dtype is torch.uint8 or (dtype is torch.int8 and "plane[" in grid.layout)
    if not is_bytes and dtype is not grid.dtype:
        want = "uint8" if grid.dtype is None else f"{_name(grid.dtype)}, or raw bytes as flat uint8"
        return f"{got}; {grid.format} in the spec makes it {want}. Give the spec the format these tensors have, or cast them."
    given = [(stride * item, n) for stride, n in zip(strides, shape, strict=True) if n != 1]
    dims, end = sorted(given, reverse=True), item
    for stride, n in reversed(dims):
        if n and stride < end:
            return f"{got} with strides {list(strides)}; its elements overlap in memory. Give it memory of its own: .contiguous()."
        end = stride * n
    size = 0 if 0 in shape else item + sum((n - 1) * stride for stride, n in dims)
    if size < grid.bytes:
        return f"{got}, {size} bytes of memory; the spec makes {grid.bytes}: {grid}."
    is_contiguous = given == dims and end == prod(shape) * item and size == end
    if is_contiguous and is_bytes and len(shape) < 3:
        return ""  # flat, or [num_blocks, block_bytes] and the like
    if is_contiguous and len(shape) == 1 and size <= max(grid.bytes, grid.steps[0].end if grid.steps else 0):
        return ""
    got += f" with strides {list(strides)}"
    said = f"layout {grid.layout!r} of the spec lies in memory as {grid}"
    conflict = _conflict(dims, item, grid)
    if given != dims and not _conflict(_contiguous(given, item), item, _compact(grid)):  # its shape alone has the spec's order
        if conflict:
            return f"{got}; {said}. Its strides have them in another order: give its .contiguous(), or the layout its memory has."
        order = sorted(range(len(shape)), key=lambda i: -strides[i])
        return (
            f"{got}: permuted, and axes of equal size give it two readings. Whether its memory or its shape is in the order of "
            f"{grid.layout!r} cannot be told. If its memory is, give its .permute({', '.join(map(str, order))}); if its shape "
            "is, its .contiguous()."
        )
    has_holes = any(outer != stride * n for (outer, _), (stride, n) in zip(dims, [*dims[1:], (item, 1)], strict=False))
    if conflict and has_holes:
        return f"{got}; {said}, and its memory has holes. Where they pad blocks, say so in the spec: block_bytes."
    return f"{got}; {said}, and {conflict}. Reshape it, or give the spec these sizes." if conflict else ""


def _contiguous(dims: list[tuple[int, int]], item: int) -> list[tuple[int, int]]:
    """The same sizes in the same order, as a copy of the tensor would have them."""
    out: list[tuple[int, int]] = []
    for _, n in reversed(dims):
        out.insert(0, (item, n))
        item *= n
    return out


def _compact(grid: Grid) -> Grid:
    """Without what pads its axes."""
    steps: list[AxisStep] = []
    for s in reversed(grid.steps):
        steps.insert(0, s._replace(stride=steps[0].end if steps else s.stride))
    return grid._replace(steps=tuple(steps))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _conflict(dims: list[tuple[int, int]], item: int, grid: Grid) -> str:
    """Where a tensor's dimensions and a buffer's axes are not the same memory; "" when they are.

    Each dimension is one axis, or several adjacent ones as one; areas of K and V that are not alike may be cut at will.
    Parts of axes are refused: with them, shapes that are wrong pass for whole axes here and parts there.
    """
    found: list[list[AxisStep]] = [[] for _ in grid.steps]  # for each axis, the dimensions or the part of one that step through it
    for stride, n in dims:
        dim = AxisStep("", n, stride)
        covered = [i for i, s in enumerate(grid.steps) if stride <= s.stride and s.end <= dim.end and s.stride % stride == 0]
        for i, s in enumerate(grid.steps):
            if i in covered:
                found[i].append(s)
            elif s.axis in _AREAS and s.stride <= stride and dim.end <= s.end:
                found[i].append(dim)
            elif stride < s.end and s.stride < dim.end:
                return f"its {n} of {stride} bytes are neither {s.axis} nor whole axes"
        if not covered and all(dim not in parts for parts in found):
            return f"its {n} of {stride} bytes are no axis of it"
        if covered:
            inner, outer = grid.steps[covered[-1]], grid.steps[covered[0]]
            limit = grid.steps[covered[0] - 1].stride if covered[0] else outer.end  # blocks may be padded
            if stride not in (inner.stride, item) or dim.end > limit:
                return f"its {n} of {stride} bytes are more than {outer.axis} has"
    for s, parts in zip(grid.steps, found, strict=True):
        count = prod(p.size for p in parts)
        if count != s.size or min(p.stride for p in parts) != s.stride:
            return f"it has {count} of {s.axis}"
    return ""


# ---- what a spec's buffers hold


@lru_cache(maxsize=1024)
def grids(spec: Spec) -> tuple[tuple[int, Grid], ...]:
    """(how many in a row, what each holds) of all buffers, in the order of `buffer_sizes`."""
    planes = [(spec.plane(i), places(spec)[i]) for i in in_memory(spec)]
    total = num_cache_buffers(spec)
    if any(axis.name in PLANES for axis in Layout.parse(spec.layout).left):
        each = [_cache_grid(spec, [plane]) for plane in planes]
        inside = planes[1][1].buffer - planes[0][1].buffer if len(planes) > 1 else total
        alike = len(set(each)) == 1
        out = [(total, each[0])] if alike else [(inside, grid) for grid in each] * (total // (len(each) * inside))
    else:
        out = [(total, _cache_grid(spec, planes))]
    for plane, place in zip(spec.planes, scale_places(spec), strict=True):
        if place is not None and plane.format.scale is not None:
            steps = tuple(AxisStep(d.axis, d.size, d.stride) for d in place.digits if d.size > 1)
            size, dtype = place.digits[0].size * place.digits[0].stride, getattr(torch, plane.format.scale.torch_name)
            out.append((1, Grid(steps, dtype, size, f"the scale of format {plane.format}", spec.layout, True)))
    for plane in spec.planes:
        if plane.format.has_tensor_scale:
            steps = (AxisStep("layer", spec.num_layers, 4),) if spec.num_layers > 1 else ()
            out.append(
                (
                    1,
                    Grid(
                        steps, torch.float32, 4 * spec.num_layers, f"the tensor scale of format {plane.format}", spec.layout, True
                    ),
                )
            )
    return tuple(out)


def _cache_grid(spec: Spec, planes: list[tuple[PlaneSpec, Place]]) -> Grid:
    """The buffer that holds one plane, or all together."""
    steps = [_steps(place) for _, place in planes]
    units = [place.unit_bytes for _, place in planes]
    dtypes = {None if p.format.is_in_bytes else getattr(torch, p.format.element.torch_name) for p, _ in planes}
    formats = " and ".join(dict.fromkeys(f"format {p.format}" for p, _ in planes))
    size = max(place.unit_bytes + sum((d.size - 1) * d.stride for d in place.digits) + place.offset for _, place in planes)
    offsets = [place.offset for _, place in planes]
    apart = offsets[1] - offsets[0] if len(planes) > 1 else 0
    alike = all(x == steps[0] for x in steps) and len(set(units)) == 1
    if alike and all(offset == offsets[0] + i * apart for i, offset in enumerate(offsets)):
        both = [AxisStep("kv" if len(planes) == 2 else "plane", len(planes), apart)] if len(planes) > 1 else []
        found = sorted([*steps[0], *both], key=lambda s: -s.stride)
    else:  # orders or sizes of their own: what stands outside all, and the planes' areas as one
        shared = [s for s in steps[0] if all(s in other for other in steps)]
        shared = [s for s in shared if all(x in shared for p in steps for x in p if x.stride >= s.stride)]
        inner = min((s.stride for s in shared), default=-(-size // units[0]) * units[0])
        if spec.block_bytes:  # an engine's view of padded pages has their content alone
            inner = min(inner, size - sum((s.size - 1) * s.stride for s in shared))
        found = [*shared, AxisStep(_AREAS["plane[" in spec.layout], inner // min(units), min(units))]
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return Grid(tuple(found), dtype, size, formats, spec.layout)


def _steps(place: Place) -> list[AxisStep]:
    steps = [AxisStep(d.axis, d.size + d.unused, d.stride) for d in place.digits if d.stride and d.size + d.unused > 1]
    return sorted(steps, key=lambda s: -s.stride)
