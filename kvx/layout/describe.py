"""From tensors to a spec: sizes from their shapes, the order of axes in memory from their strides, never from a guess.

vLLM registers [block, head, token, (kv dim)] views whatever lies in memory; the strides tell NHD from HND. So `axes` names the
tensors' dimensions, and the layout that comes back is the order the bytes have. Blocks further apart than their content are padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor

from kvx.errors import BadArgument, Unsupported
from kvx.layout.axes import Axis, Layout
from kvx.layout.place import num_cache_buffers
from kvx.layout.views import PlaneView, spec_of_views
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import Format

_TYPES = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "int8": "int8",
}


def describe(
    tensors: Tensor
    | Sequence[Tensor]
    | Sequence[Sequence[PlaneView]],  # one tensor per allocation, in the order of the axes left of
    # `|` in `layout`, the last axis changing fastest; or what kvx.layer_views returns
    layout: str = "",  # the dimensions of the tensors, such as "layer | block head token (kv dim)"; not given for views
    *,
    format: str = "",  # of K; "": that of the tensors' dtype
    v_format: str = "",  # of V; "": as K, or for views that of their dtype
    **sizes: int,  # sizes that do not follow from the shapes: block_size=, num_kv_heads=, head_dim=, v_head_dim=, num_layers= ...
) -> CacheSpec:
    """Make the CacheSpec of an existing cache from its tensors: sizes from the shapes, the order of axes from the strides.

    `layout` names the dimensions as the tensors show them. `spec.layout` is their order in memory, which differs for a
    transposed view.
    """
    parts = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if parts and all(isinstance(layer, (tuple, list)) and layer and isinstance(layer[0], PlaneView) for layer in parts):
        views = cast("list[Sequence[PlaneView]]", parts)
        if layout:
            raise BadArgument(f"describe(): layout is {layout!r} and views name their axes themselves; leave it out.")
        k, v = (given or _format(view.first) for given, view in ((format, views[0][0]), (v_format or format, views[0][-1])))
        return spec_of_views(views, (k, v), **sizes)
    if not layout:
        raise BadArgument(
            "describe(): layout is missing; it names the tensors' dimensions, such as layout='layer | block head token (kv dim)'."
        )
    read = Layout.parse(layout)
    if "[" in layout:
        raise Unsupported(f"describe(): layout {layout!r} gives planes dimensions of their own; write the spec by hand.")
    given = [t for t in parts if isinstance(t, Tensor)]
    if not given or len(given) < len(parts):
        raise BadArgument("describe(): tensors is empty or holds something else than tensors.")
    _require_alike(given, read)
    formats = format or _format(given[0]), v_format or format or _format(given[0])
    found = _sizes(given, read, sizes, formats)
    order, padded = _memory_order(given[0], read)
    left = " ".join(axis.name for axis in read.left)
    text = f"{left} | {order}" if left else order
    spec = CacheSpec(layout=text, format=formats[0], v_format=v_format, **found, block_bytes=padded)
    if num_cache_buffers(spec) != len(given):
        raise BadArgument(f"describe(): {len(given)} tensors; layout {layout!r} and the sizes make {num_cache_buffers(spec)}.")
    return spec


def _require_alike(parts: list[Tensor], layout: Layout) -> None:
    first = parts[0]
    if first.dim() != len(layout.first.dims):
        names = " ".join(_name(dim) for dim in layout.first.dims)
        raise BadArgument(
            f"describe(): tensors are {list(first.shape)}; layout {layout.text!r} names {len(layout.first.dims)} dimensions: "
            f"{names}."
        )
    for i, t in enumerate(parts):
        same = (t.shape, t.stride(), t.dtype, t.device) == (first.shape, first.stride(), first.dtype, first.device)
        if not same:
            raise BadArgument(
                f"describe(): tensor {i} is {list(t.shape)} {t.dtype} with strides {list(t.stride())}, tensor 0 "
                f"{list(first.shape)} {first.dtype} with {list(first.stride())}. "
                "Layers that differ need a call for each group of equal ones."
            )


def _name(dim: tuple[Axis, ...]) -> str:
    names = " ".join(map(str, dim))
    return f"({names})" if len(dim) > 1 else names


def _format(t: Tensor) -> str:
    name = str(t.dtype).removeprefix("torch.")
    if name not in _TYPES:
        raise BadArgument(f"describe(): the tensors are {t.dtype}, a type from which no format follows; give format=.")
    return _TYPES[name]


_FIELDS = {"layer": "num_layers", "block": "num_blocks", "token": "block_size", "head": "num_kv_heads", "dim": "head_dim"}
_SIZES = (*_FIELDS.values(), "v_head_dim", "layer_start", "head_start")


def _sizes(parts: list[Tensor], layout: Layout, given: dict[str, int], formats: tuple[str, str]) -> dict[str, Any]:
    """Axes that stand alone say their size; fused ones say it when all but one are known."""
    known = dict(given)
    wrong = next((name for name in given if name not in _SIZES), "")
    if wrong:
        raise BadArgument(f"describe(): {wrong}= is no size of a cache; the sizes are {', '.join(_SIZES)}.")

    def learn(axis: str, size: int, where: str) -> None:
        field = _FIELDS[axis]
        if known.setdefault(field, size) != size:
            raise BadArgument(f"describe(): {where} makes {field} {size}, but it was given or found elsewhere as {known[field]}.")

    if all(axis.name != "layer" for axis in (*layout.left, *layout.first.order)):
        known.setdefault("num_layers", 1)
    for dim, size in zip(layout.first.dims, parts[0].shape, strict=True):
        if [axis.name for axis in dim] == ["kv"] and size != 2:
            raise BadArgument(f"describe(): dimension kv has {size}; K and V are 2. Is layout {layout.text!r} the tensors' own?")
        if len(dim) == 1 and dim[0].name != "kv" and not dim[0].part:
            learn(dim[0].name, size, f"dimension {_name(dim)} of {size}")
    split = {axis.name for axis in layout.first.order if axis.part}
    for name in split:
        outer, inner = (n for dim, n in zip(layout.first.dims, parts[0].shape, strict=True) for a in dim if a.name == name)
        learn(name, outer * inner, f"the two parts of {name}")
    for dim, size in zip(layout.first.dims, parts[0].shape, strict=True):
        if len(dim) == 1:
            continue
        names, rest = [axis.name for axis in dim], size
        if names[-2:] == ["kv", "dim"] and "v_head_dim" in known and "head_dim" in known:
            rows = zip(formats, (known["head_dim"], known["v_head_dim"]), strict=True)
            cell = sum(Format.named(name).row_bytes(n) for name, n in rows)
            rest, names = size * parts[0].element_size() // cell, names[:-2]
        unknown = []
        for name in names:
            if name == "kv":
                rest //= 2
            elif _FIELDS[name] in known:
                rest //= known[_FIELDS[name]]
            else:
                unknown.append(name)
        if len(unknown) > 1:
            fields = " or ".join(_FIELDS[n] + "=" for n in unknown)
            raise BadArgument(
                f"describe(): dimension {_name(dim)} of {size} does not tell {' from '.join(unknown)}; give {fields}."
            )
        if unknown:
            learn(unknown[0], rest, f"dimension {_name(dim)} of {size}")
    left = [axis.name for axis in layout.left]
    if "layer" in left:
        others = (2 if "kv" in left else 1) * (known.get("num_blocks", 1) if "block" in left else 1)
        learn("layer", len(parts) // others, f"{len(parts)} tensors")
    missing = [f for f in _FIELDS.values() if f not in known]
    if missing:
        raise BadArgument(f"describe(): nothing says {missing[0]}; give {missing[0]}=.")
    return known


def _memory_order(t: Tensor, layout: Layout) -> tuple[str, int]:
    """The dimensions by their strides, outermost first, and block_bytes. Memory is dense, but for what pads blocks."""
    dims = [(stride, size, dim) for stride, size, dim in zip(t.stride(), t.shape, layout.first.dims, strict=True)]
    # Dimensions of one element have any stride: they keep their place among the others.
    order = sorted(range(len(dims)), key=lambda i: -_weight(dims, i))
    expected, padded = 1, 0
    for n, i in reversed(list(enumerate(order))):
        stride, size, dim = dims[i]
        outside = {axis.name for j in order[:n] for axis in dims[j][2] if dims[j][1] > 1}
        if _name(dim) == "block" and size > 1 and stride > expected and outside <= {"layer"}:
            expected, padded = stride, stride * t.element_size()
        if size > 1 and stride != expected:
            raise Unsupported(
                f"describe(): dimension {_name(dim)} has stride {stride}, and {expected} would be dense: only blocks may be "
                "padded. Tensors with other holes need a copy, or a layout that names what lies between."
            )
        expected *= size
    return " ".join(_name(dims[i][2]) for i in order), padded


def _weight(dims: list[tuple[int, int, tuple[Axis, ...]]], i: int) -> float:
    """A stride to sort by; dimensions of one stand just outside the dimension that follows them."""
    while i < len(dims) - 1 and dims[i][1] == 1:
        i += 1
        if dims[i][1] > 1:
            return dims[i][0] + 0.5
    return float(dims[i][0])
