"""A cache's buffers as strided tensors of K and V, layer by layer, in every layout; and from such views back to the spec.

Nothing is copied: what is written through a view stands in the buffer. `views` in planes.py is the part of this that ops take,
made from one layer's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument, Unsupported
from kvx.layout.axes import Layout, PlaneLayout
from kvx.layout.buffers import bytes_of
from kvx.layout.gate import check_buffers
from kvx.layout.match import reach
from kvx.layout.place import Digit, Place, num_buffers, num_cache_buffers, places
from kvx.spec.cache_spec import CacheSpec, PlaneSpec, Spec
from kvx.spec.formats import Format

_ORDER = ("block", "token", "head", "dim")


class PlaneView(NamedTuple):
    """One plane of one layer."""

    layer: int  # of the model
    plane: str  # its name: "k", "v"
    axes: tuple[str, ...]  # of the tensor's dimensions: block token head dim, a split one as its two parts, dim/8 dim%8
    tensor: Tensor | list[Tensor]  # a list where every block is an allocation: one a block, without the block axis
    buffer: int  # which of the cache's buffers it lies in, or the first block does
    block_step: int  # buffers from block to block; 0: one tensor

    @property
    def first(self) -> Tensor:
        return self.tensor if isinstance(self.tensor, Tensor) else self.tensor[0]


def layer_views(buffers: Tensor | Sequence[Tensor], spec: Spec) -> list[tuple[PlaneView, ...]]:
    """K and V of every layer, `[layer][plane]`, as views of the buffers: those of `allocate_buffers`, or an engine's own tensors.

    Dimensions are always block, then the plane's axes (token, head, dim), and a split axis is its two parts, outer first; so
    `reshape` gives [block, token, head, dim]. Elements that are not whole bytes, and rows with inline scales, are views of bytes.
    """
    tensors = [buffers] if isinstance(buffers, Tensor) else list(buffers)
    if len(tensors) == num_buffers(spec):
        tensors = tensors[: num_cache_buffers(spec)]  # scales have shapes of their own
    check_buffers("layer_views", "buffers", tensors, (spec,), scales=False)
    layouts, out = [Layout.parse(spec.layout).planes[p.name] for p in spec.planes], []
    for layer in range(spec.num_layers):
        planes = zip(spec.planes, places(spec), layouts, strict=True)
        out.append(tuple(_view(tensors, spec, layer, *plane) for plane in planes))
    return out


def _view(tensors: list[Tensor], spec: Spec, layer: int, plane: PlaneSpec, place: Place, layout: PlaneLayout) -> PlaneView:
    byte, step = reach(place, "layer", layer)
    order = ("block", *plane.sizes)
    inside = [d for name in order for d in place.of(name) if not d.step]
    axes = tuple(axis for name in order if any(d.axis == name for d in inside) for axis in _names(layout, name))
    apart = place.of("block")[0].step
    parts = [
        _strided(tensors, place.buffer + step + i * apart, place.offset + byte, inside, plane)
        for i in range(spec.num_blocks if apart else 1)
    ]
    return PlaneView(spec.layer_start + layer, plane.name, axes, parts if apart else parts[0], place.buffer + step, apart)


def _names(layout: PlaneLayout, name: str) -> tuple[str, ...]:
    factor = layout.split_of(name)
    return (f"{name}/{factor}", f"{name}%{factor}") if factor else (name,)


def _strided(tensors: list[Tensor], buffer: int, offset: int, digits: list[Digit], plane: PlaneSpec) -> Tensor:
    unit, data = plane.unit_bytes, bytes_of(tensors[buffer])
    if (data.storage_offset() | data.data_ptr()) % unit:
        raise BadArgument(f"layer_views(): buffer {buffer} is not aligned to the {unit} bytes of {plane.format}. Clone it.")
    whole = not plane.format.is_inline and plane.format.element.bits >= 8
    typed = data[: data.numel() // unit * unit].view(getattr(torch, plane.format.element.torch_name) if whole else torch.uint8)
    start = typed.storage_offset() + offset // unit
    return typed.as_strided([d.size for d in digits], [d.stride // unit for d in digits], start)


# ---- and back


def spec_of_views(views: Sequence[Sequence[PlaneView]], formats: tuple[str, str], **fields: Any) -> CacheSpec:
    """The spec whose layer_views these are, by their strides, addresses and buffer numbers. For `describe`.

    Which axes are fused is not to be seen in bytes: `(kv dim)` is written where K's rows and V's alternate, and no other.
    """
    k, v = views[0][0], views[0][-1]
    if any(len(layer) != len(views[0]) or len(layer) > 2 for layer in views):
        raise BadArgument(f"describe(): layers have {sorted({len(layer) for layer in views})} views; each has K and V, or one.")
    head_dim, v_head_dim = _head_dim(k, formats[0]), _head_dim(v, formats[1])
    found: dict[str, Any] = {
        "num_blocks": len(k.tensor) if isinstance(k.tensor, list) else k.first.shape[0],
        "block_size": _size(k, "token"),
        "num_kv_heads": _size(k, "head"),
        "head_dim": head_dim,
        "v_head_dim": v_head_dim if v_head_dim != head_dim else 0,
        "format": formats[0],
        "v_format": formats[1] if formats[1] != formats[0] else "",
        "num_layers": len(views),
        "layer_start": k.layer,
        "layout": _layout_text(views),
    }
    spec = CacheSpec(**(found | fields))
    block = _strides(k).get("block", 0)
    if block > places(spec)[0].of("block")[0].stride > 0:
        spec = replace(spec, block_bytes=block)
    _require_places(views, spec)
    return spec


def _size(view: PlaneView, name: str) -> int:
    return prod(n for axis, n in zip(view.axes, view.first.shape, strict=True) if axis.startswith(name))


def _head_dim(view: PlaneView, name: str) -> int:
    fmt, size = Format.named(name), _size(view, "dim") * view.first.element_size()
    if fmt.is_inline and fmt.scale is not None:
        scale = fmt.scale.bits // 8
        # A scale for each group, or one behind the row.
        groups = size // (fmt.group_size * fmt.element.bits // 8 + scale) if fmt.group_size else 1
        size -= groups * scale
    return size * 8 // fmt.element.bits


def _strides(view: PlaneView) -> dict[str, int]:
    """Bytes, by the axis's name."""
    return {axis: n * view.first.element_size() for axis, n in zip(view.axes, view.first.stride(), strict=True)}


def _layout_text(views: Sequence[Sequence[PlaneView]]) -> str:
    k, v = views[0][0], views[0][-1]
    left: dict[str, int] = {"block": k.block_step} if k.block_step else {}
    inside = [_strides(view) for view in views[0]]
    if len(views) > 1 and views[1][0].buffer != k.buffer:
        left["layer"] = views[1][0].buffer - k.buffer
    elif len(views) > 1:
        for strides, here, after in zip(inside, *views[:2], strict=True):
            strides["layer"] = after.first.data_ptr() - here.first.data_ptr()
    kv, is_alike = v.first.data_ptr() - k.first.data_ptr(), _steps(inside[0]) == _steps(inside[-1])
    if v.buffer != k.buffer:
        left["kv"] = v.buffer - k.buffer
    elif v is not k and is_alike and k.axes == v.axes:
        inside[0]["kv"] = kv
    outside = " ".join(sorted(left, key=lambda axis: -left[axis]))
    if is_alike:
        inner = _ordered(inside[0]).replace("kv dim", "(kv dim)") if "dim" in inside[0] else _ordered(inside[0])
        return f"{outside} | {inner}" if outside else inner
    if "kv" in left:  # orders of their own, in buffers of their own
        outside = " ".join(sorted(left.keys() - {"kv"}, key=lambda axis: -left[axis]))
        return f"{outside} kv[K: | {_ordered(inside[0])}; V: | {_ordered(inside[1])}]"
    shared = {axis: n for axis, n in inside[0].items() if n > kv}  # K's area ends where V's begins: larger steps are outside both
    k_text, v_text = (_ordered({axis: n for axis, n in strides.items() if axis not in shared}) for strides in inside)
    return f"{outside + ' | ' if outside else ''}{_ordered(shared)} kv[K: {k_text}; V: {v_text}]"


def _steps(strides: dict[str, int]) -> dict[str, int]:
    """Strides without dim's where it is the innermost: elements of K and of V may have sizes of their own."""
    return {axis: 0 if axis == "dim" and n == min(strides.values()) else n for axis, n in strides.items()}


def _ordered(strides: dict[str, int]) -> str:
    return " ".join(sorted(strides, key=lambda axis: -strides[axis]))


def _require_places(views: Sequence[Sequence[PlaneView]], spec: CacheSpec) -> None:
    """The layout was read from the first layers; all of them must lie where it says."""
    begin: dict[int, int] = {}  # address of each buffer's first byte, as the first view in it says
    for n, layer in enumerate(views):
        for i, view in enumerate(layer):
            place = places(spec)[i]
            byte, step = reach(place, "layer", n)
            inside = [d for name in _ORDER for d in place.of(name) if not d.step]
            sizes = [(d.size, d.stride if d.size > 1 else 0) for d in inside]
            strides = zip(view.first.shape, _strides(view).values(), strict=True)
            same = [(size, stride if size > 1 else 0) for size, stride in strides] == sizes
            same &= (view.buffer, view.block_step) == (place.buffer + step, place.of("block")[0].step)
            address = view.first.data_ptr() - place.offset - byte
            same &= begin.setdefault(view.buffer, address) == address
            if not same:
                raise Unsupported(
                    f"describe(): {view.plane} of layer {view.layer} is {list(view.first.shape)} with strides "
                    f"{list(view.first.stride())} in buffer {view.buffer}; that is not where {spec.layout!r}, read from the first "
                    "layers, puts it. Describe groups of layers one by one."
                )
