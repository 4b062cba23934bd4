"""From a spec to the dimensions of its cache tensors, and from tensors to K and V views.

A `PlaneMap` says where each axis of K or V lies in a tensor: stride of the axis = tensor stride of `dim` times `mul`.
The native entries and the torch definition both address the cache through it, so strides are honoured in one place; how axes
lie inside each other is kvx/layout/place.py's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from kvx.errors import BadArgument, Unsupported
from kvx.layout.axes import Layout, PlaneLayout
from kvx.layout.place import axis_spans
from kvx.spec.cache_spec import CacheSpec, PlaneSpec

WHOLE = ("block", "token", "head", "dim")
SPLIT = ("block", "head", "dim/", "token", "dim%")


class PlaneMap(NamedTuple):
    buffer: int  # which cache tensor
    shape: tuple[int, ...]  # of that tensor
    axes: tuple[str, ...]  # WHOLE or SPLIT
    sizes: tuple[int, ...]  # of each axis, in elements
    units: tuple[int, ...]  # of each axis, in the tensor's own units (bytes for 4-bit and inline formats, and beside them)
    dim: tuple[int, ...]
    mul: tuple[int, ...]
    offset_dim: int  # -1: the plane starts where the tensor does
    offset_mul: int


@lru_cache(maxsize=256)
def plane_maps(spec: CacheSpec) -> tuple[PlaneMap, PlaneMap]:
    layout = Layout.parse(spec.layout)
    for plane in spec.kv:
        if plane.format.element.is_moved_only:
            raise Unsupported(
                f"format {plane.format} only converts, bit for bit; ops that address tokens do not take it. They take f16, bf16, "
                "f32 and the quantised formats."
            )
    if layout.unsupported_by_ops:
        raise Unsupported(
            f"layout {spec.layout!r} {layout.unsupported_by_ops}; ops that address tokens do not take it. "
            "Convert to one they do, such as kvx.NHD: kvx.convert(...)."
        )
    return _map(spec, layout.planes["k"], 0), _map(spec, layout.planes["v"], 1)


def cache_shapes(spec: CacheSpec) -> tuple[tuple[int, ...], ...]:
    """The shape of each cache tensor of one layer: one, or K's and V's."""
    k, v = plane_maps(spec)
    return (k.shape,) if v.buffer == 0 else (k.shape, v.shape)


def cache_tensors(cache: torch.Tensor | Sequence[torch.Tensor], spec: CacheSpec) -> tuple[torch.Tensor, ...]:
    tensors = (cache,) if isinstance(cache, torch.Tensor) else tuple(cache)
    shapes = cache_shapes(spec)
    if len(tensors) != len(shapes):
        raise BadArgument(
            f"cache has {len(tensors)} tensors; layout {spec.layout!r} has {len(shapes)}. Pass "
            + ("(k_cache, v_cache)." if len(shapes) == 2 else "one tensor that holds K and V.")
        )
    return tensors


def views(cache: torch.Tensor | Sequence[torch.Tensor], spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as strided views: [block, token, head, dim], or [block, head, dim/x, token, dim%x] for split layouts."""
    tensors = cache_tensors(cache, spec)
    for i, m in enumerate(plane_maps(spec)):
        types, found = element_types(spec, i), tensors[m.buffer].dtype
        if found not in types:
            raise BadArgument(f"cache is {found}; format {spec.plane(i).format} of the spec makes it {types[0]}.")
    return strided_views(tensors, spec)


def strided_views(tensors: tuple[torch.Tensor, ...], spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """`views` of tensors of any type that are as large."""
    k, v = (_view(tensors[m.buffer], m) for m in plane_maps(spec))
    if spec.tensor_units[0] < spec.plane(0).unit_bytes:
        k = _typed(k, spec.plane(0))
    if spec.tensor_units[1] < spec.kv[1].unit_bytes:
        v = _typed(v, spec.kv[1])
    return k, v


def _typed(view: torch.Tensor, plane: PlaneSpec) -> torch.Tensor:
    """Bytes that are whole elements, as those."""
    size = plane.unit_bytes
    steps = [stride for stride, n in zip(view.stride()[:-1], view.shape[:-1], strict=True) if n > 1]
    if view.stride(-1) != 1 or any(n % size for n in (view.data_ptr(), view.storage_offset(), *steps)):
        raise BadArgument(
            f"cache has strides of {steps} bytes from byte {view.storage_offset()}; {plane.format} of {plane.name} needs multiples "
            f"of {size}, and rows in one piece."
        )
    return view.view(getattr(torch, plane.format.element.torch_name))


@lru_cache(maxsize=256)
def pooled_strides(spec: CacheSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """KV_OFFSETS pools: strides, in elements, of K's and V's axes in one dense block, in the order the layout gives them.

    The block axis gets the size of a block; where blocks really start is the table's to say.
    """
    k, v = (_dense_strides(m) for m in plane_maps(spec))
    return k, v


def _dense_strides(m: PlaneMap) -> tuple[int, ...]:
    def depth(axis: str) -> tuple[int, int]:  # outermost first: by dimension, then by how far each steps inside a fused one
        i = m.axes.index(axis)
        return m.dim[i], -m.mul[i]

    stride, strides = 1, {}
    for axis in sorted((a for a in m.axes if a != "block"), key=depth, reverse=True):
        strides[axis] = stride
        stride *= m.sizes[m.axes.index(axis)]
    strides["block"] = stride
    return tuple(strides[a] for a in m.axes)


def element_types(spec: CacheSpec, index: int) -> tuple[torch.dtype, ...]:
    """What the tensor that holds K (0) or V (1) may be of: its elements, or bytes where an element is no larger."""
    plane = spec.plane(index)
    if plane.format.is_in_bytes or spec.tensor_units[index] < plane.unit_bytes:
        return (torch.uint8,)
    element = getattr(torch, plane.format.element.torch_name)
    return (element, torch.uint8) if plane.format.element.bits <= 8 else (element,)


def _view(tensor: torch.Tensor, m: PlaneMap) -> torch.Tensor:
    if tuple(tensor.shape) != m.shape:
        raise BadArgument(f"cache is {list(tensor.shape)}; the spec makes it {list(m.shape)}.")
    strides = [tensor.stride(d) * mul for d, mul in zip(m.dim, m.mul, strict=True)]
    offset = tensor.storage_offset() + (tensor.stride(m.offset_dim) * m.offset_mul if m.offset_dim >= 0 else 0)
    return tensor.as_strided(m.units, strides, offset)


def _map(spec: CacheSpec, plane: PlaneLayout, index: int) -> PlaneMap:
    this, unit = spec.plane(index), spec.tensor_units[index]
    spans = {s.axis: s for s in axis_spans(spec, index)}
    place: dict[str, tuple[int, int]] = {}
    offset = (-1, 0)
    shape = []
    for i, dim in enumerate(plane.layer_dims):
        last = spans[dim[-1]]  # one step of the dimension is one of its innermost axis
        step = unit if last.axis == plane.order[-1] and last.axis.name == "dim" else last.span // last.size
        for axis in dim:
            if axis.name != "kv":
                place[axis.name + axis.part] = i, 1 if axis is dim[-1] else spans[axis].stride // step
            elif index:
                offset = i, spans[axis].stride // step
        shape.append(spans[dim[0]].span // step)
    names = SPLIT if plane.split_of("dim") else WHOLE
    pack = this.pack(plane.split_of("dim") or "1")
    sizes = {"block": spec.num_blocks, "token": spec.block_size, "head": spec.num_kv_heads, "dim": this.head_dim}
    sizes |= {"dim/": this.head_dim // pack, "dim%": pack}
    units = {n: size * this.format.element.bits // (8 * unit) if n in ("dim", "dim%") else size for n, size in sizes.items()}
    return PlaneMap(
        buffer=index if any(axis.name == "kv" for axis in plane.left) else 0,
        shape=tuple(shape),
        axes=names,
        sizes=tuple(sizes[n] for n in names),
        units=tuple(units[n] for n in names),
        dim=tuple(place[n][0] for n in names),
        mul=tuple(place[n][1] for n in names),
        offset_dim=offset[0],
        offset_mul=offset[1],
    )
