"""Where every element of a cache lies: each axis as one or two digits, each digit with a stride in bytes.

A `Place` is a layout with sizes put in. The byte of (layer, block, token, head, dim) of a plane is `offset` plus, for each
digit, `(index // divisor % size) * stride`; digits of axes left of the bar choose a buffer instead, by `step`.
The planner, the tests' oracle and `kvx layouts` read places, and kvx/layout/planes.py the same strides for one layer's tensors;
nothing else works out strides from a layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from kvx.layout.axes import PLANES, Axis, Layout, PlaneLayout
from kvx.spec.cache_spec import Spec


class Digit(NamedTuple):
    axis: str  # layer, block, or one of the plane's: token, head, dim
    divisor: int  # 1, or the factor of a split for its outer part
    size: int
    stride: int  # bytes; 0 left of the bar
    step: int  # buffers; 0 right of the bar
    unused: int = 0  # in memory before the first; `offset` is behind them


class AxisSpan(NamedTuple):
    """One axis of a plane inside an allocation."""

    axis: Axis
    size: int
    stride: int  # bytes from one index to the next; of the axis of planes, from the first plane to this one
    span: int  # bytes of all its indices, unused ones before the first included


class Place(NamedTuple):
    digits: tuple[Digit, ...]  # outermost first; the row's axis counts units (kvx/spec/cache_spec.py)
    buffer: int  # of layer 0, block 0
    offset: int  # bytes into it
    unit_bytes: int  # of one unit of the row

    def of(self, axis: str) -> tuple[Digit, ...]:
        """The axis's digits, outer part first."""
        return tuple(sorted((d for d in self.digits if d.axis == axis), key=lambda d: -d.divisor))

    def locate(self, **index: int) -> tuple[int, int]:
        """(buffer, byte) of one unit: layer=, block=, token=, head=, dim=; axes not named are 0."""
        buffer, byte = self.buffer, self.offset
        for d in self.digits:
            i = index.get(d.axis, 0) // d.divisor % d.size
            buffer, byte = buffer + i * d.step, byte + i * d.stride
        return buffer, byte


@lru_cache(maxsize=1024)
def places(spec: Spec) -> tuple[Place, ...]:
    """One a plane."""
    return tuple(_place(spec, i) for i in range(spec.num_planes))


@lru_cache(maxsize=1024)
def scale_places(spec: Spec) -> tuple[Place | None, ...]:
    """Where the scales of each plane lie, in buffers behind the cache's own; None where there are none or they are inline.

    A scale buffer is [num_layers, *spec.scale_shape]; dim counts groups. Axes that share a scale have no digit.
    """
    out: list[Place | None] = []
    buffer = num_cache_buffers(spec)
    for i in range(spec.num_planes):
        shape, scale = spec.scale_shape(i), spec.plane(i).format.scale
        if shape is None or scale is None:
            out.append(None)
            continue
        names = _SCALE_AXES[int(spec.plane(i).format.granularity)]
        digits, stride = [], scale.bits // 8
        for name, size in zip(reversed(("layer", *names)), reversed((spec.num_layers, *shape)), strict=True):
            digits.append(Digit(name, 1, size, stride, 0))
            stride *= size
        out.append(Place(tuple(reversed(digits)), buffer, 0, scale.bits // 8))
        buffer += 1
    return tuple(out)


def tensor_scale_buffers(spec: Spec) -> tuple[int, ...]:
    """For each plane, which buffer holds the f32 that multiplies every scale, one a layer; -1 where the format has none."""
    buffer = num_cache_buffers(spec) + sum(place is not None for place in scale_places(spec))
    out = []
    for plane in spec.planes:
        out.append(buffer if plane.format.has_tensor_scale else -1)
        buffer += plane.format.has_tensor_scale
    return tuple(out)


_SCALE_AXES = ((), (), ("block",), ("head",), ("block", "head"), ("block", "token", "head"), ("block", "token", "head", "dim"))


def num_cache_buffers(spec: Spec) -> int:
    """Allocations the layout has: the product of the axes left of the bar."""
    return _product(spec, Layout.parse(spec.layout).left)


def num_buffers(spec: Spec) -> int:
    """All buffers: the layout's, then K's and V's scales where they stand apart, then their tensor scales."""
    return sum(count for count, _ in buffer_sizes(spec))


@lru_cache(maxsize=1024)
def buffer_sizes(spec: Spec) -> tuple[tuple[int, int], ...]:
    """The buffers' sizes as (count, bytes): so many in a row. The layout's go by the axes left of the bar, last fastest.

    Bytes up to the last element: where blocks are padded, engines hand out views that end before the last block's padding.
    """
    scales = [(1, p.digits[0].size * p.digits[0].stride) for p in scale_places(spec) if p is not None]
    tensor = [(1, 4 * spec.num_layers) for buffer in tensor_scale_buffers(spec) if buffer >= 0]
    return (*_cache_sizes(spec), *scales, *tensor)


def _cache_sizes(spec: Spec) -> tuple[tuple[int, int], ...]:
    left = Layout.parse(spec.layout).left
    sizes = [_inner_bytes(spec, i) for i in in_memory(spec)]
    at = next((i for i, axis in enumerate(left) if axis.name in PLANES), -1)
    if at < 0 or len(set(sizes)) == 1:
        return ((num_cache_buffers(spec), sizes[0]),)
    inside = _product(spec, left[at + 1 :])
    return tuple((inside, size) for size in sizes) * (num_cache_buffers(spec) // (len(sizes) * inside))


def buffer_bytes(spec: Spec) -> tuple[int, ...]:
    """The size of each buffer."""
    return tuple(size for count, size in buffer_sizes(spec) for _ in range(count))


def _layout(spec: Spec, plane: int) -> PlaneLayout:
    return Layout.parse(spec.layout).planes[spec.plane(plane).name]


def _size(spec: Spec, plane: int, axis: Axis) -> int:
    this = spec.plane(plane)
    if axis.name in PLANES:
        return spec.num_planes
    outside = {"layer": spec.num_layers, "block": spec.num_blocks}
    whole = this.row_units if axis.name == this.row_axis else outside.get(axis.name) or this.sizes[axis.name]
    if not axis.part:
        return whole
    factor = _factor(spec, plane, axis)
    return factor if axis.part == "%" else whole // factor


def _factor(spec: Spec, plane: int, axis: Axis) -> int:
    """What an axis is split by; of a row, in units."""
    this = spec.plane(plane)
    pack = this.pack(axis.factor)
    return pack * this.format.element.bits // (8 * this.unit_bytes) if axis.name == this.row_axis else pack


def _product(spec: Spec, axes: tuple[Axis, ...]) -> int:
    count = 1
    for axis in axes:
        count *= _size(spec, 0, axis)
    return count


def _inner_bytes(spec: Spec, plane: int, inside_planes: bool = False) -> int:
    """Bytes of one buffer up to its last element; with inside_planes, of what stands inside the axis of planes."""
    size, padding = spec.plane(plane).unit_bytes, 0
    for axis in reversed(_layout(spec, plane).order):
        if axis.name in PLANES:
            if inside_planes:
                return size
            size = sum(_areas(spec))
        elif axis.name == "block" and spec.block_bytes:  # nothing but layer stands outside it
            size, padding = spec.block_bytes * spec.num_blocks, spec.block_bytes - size
        else:
            size *= _size(spec, plane, axis) + axis.unused
    return size - padding


def _areas(spec: Spec) -> list[int]:
    """Bytes of what stands inside the axis of planes, in the order of memory."""
    return [_inner_bytes(spec, i, inside_planes=True) for i in in_memory(spec)]


def in_memory(spec: Spec) -> list[int]:
    """Planes as the layout has them, one after the other."""
    names = [plane.name for plane in spec.planes]
    return [names.index(name) for name in Layout.parse(spec.layout).planes]


def axis_spans(spec: Spec, plane: int) -> Iterator[AxisSpan]:
    """Of every axis right of the bar, innermost first."""
    inside = spec.plane(plane).unit_bytes
    for axis in reversed(_layout(spec, plane).order):
        if axis.name in PLANES:
            areas = _areas(spec)
            inside = sum(areas)
            yield AxisSpan(axis, len(areas), sum(areas[: in_memory(spec).index(plane)]), inside)
            continue
        size, stride = _size(spec, plane, axis), spec.block_bytes if axis.name == "block" and spec.block_bytes else inside
        inside = stride * (size + axis.unused)
        yield AxisSpan(axis, size, stride, inside)


def _place(spec: Spec, plane: int) -> Place:
    layout = _layout(spec, plane)
    digits: list[Digit] = []
    offset = 0
    for axis, size, stride, _ in axis_spans(spec, plane):
        if axis.name in PLANES:
            offset += stride
            continue
        divisor = _factor(spec, plane, axis) if axis.part == "/" else 1
        digits.append(Digit(axis.name, divisor, size, stride, 0, axis.unused))
        offset += axis.unused * stride
    buffer, step = 0, 1
    for axis in reversed(layout.left):
        size = _size(spec, plane, axis)
        if axis.name in PLANES:
            buffer += in_memory(spec).index(plane) * step
        else:
            digits.append(Digit(axis.name, 1, size, 0, step))
        step *= size
    if all(d.axis != "layer" for d in digits):
        digits.append(Digit("layer", 1, 1, 0, 0))
    return Place(tuple(reversed(digits)), buffer, offset, spec.plane(plane).unit_bytes)
