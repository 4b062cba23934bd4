"""Readings: which of an engine's layouts given tensors can have. Shapes, strides and the engine's own rules decide; two that fit
are refused, since one of them would turn the cache into garbage."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvx.errors import BadArgument, KvxError
from kvx.layout.axes import Axis, Layout
from kvx.layout.describe import describe
from kvx.layout.engine_row import EngineRow
from kvx.layout.engines import engine_rows
from kvx.spec.cache_spec import CacheSpec

Nested = Tensor | Sequence["Nested"]


@dataclass(frozen=True)
class Reading:
    rows: tuple[EngineRow, ...]  # that have these bytes
    spec: CacheSpec
    tensors: list[Tensor]  # in the order of the spec

    def __str__(self) -> str:
        s = self.spec
        names = " or ".join(row.name for row in self.rows)
        sizes = f"{s.num_blocks} blocks of {s.block_size} tokens, {s.num_kv_heads} heads of {s.head_dim}"
        return f"{names}: {s.num_layers} layers, {sizes}"


def read_as(call: str, tensors: Nested, engine: str, *, format: str = "", **sizes: int) -> Reading:
    """The one reading of `tensors` as a cache of `engine`, an engine's name or a row's. `sizes` are those the caller knows."""
    found: dict[CacheSpec, Reading] = {}
    why: dict[str, str] = {}
    for row in engine_rows(engine):
        given = _in_order(call, tensors, row)
        for result in _try(row, given, format, sizes):
            if isinstance(result, str):
                why[row.name] = result
            else:
                rows = found[result].rows if result in found else ()
                found[result] = Reading(tuple(dict.fromkeys((*rows, row))), result, given)
    readings = list(found.values())
    what = f"{len(given)} tensors of {list(given[0].shape)} {str(given[0].dtype).removeprefix('torch.')}"
    if not readings:
        nearest = sorted(
            why.items(), key=lambda reason: reason[1].startswith("tensors are [")
        )  # another number of dimensions: last
        names: dict[str, list[str]] = {}
        for name, reason in nearest:
            names.setdefault(reason, []).append(name)
        shown = list(names.items())[:4]
        rest = len(nearest) - sum(len(same) for _, same in shown)
        reasons = "".join(f"\n  {', '.join(same)}: {reason}" for reason, same in shown)
        reasons += f"\n  and {rest} more layouts do not fit." if rest else ""
        raise BadArgument(f'{call}(): no layout of "{engine}" fits {what}.{reasons}')
    if len(readings) > 1:
        lines = "".join(f"\n  {reading}" for reading in readings)
        raise BadArgument(
            f'{call}(): {what} fit more than one layout of "{engine}". Name the one they have, or give the sizes that tell them '
            f"apart (num_kv_heads=, head_dim=, src_block_size=):{lines}"
        )
    return readings[0]


def _try(row: EngineRow, tensors: Sequence[Tensor], format: str, sizes: dict[str, int]) -> Iterator[CacheSpec | str]:
    """What a row makes of the tensors in each order their dimensions can have, or why it does not fit."""
    is_dense = all(t.is_contiguous() for t in tensors)
    orders = [row.registered or row.layout]
    if row.registered and is_dense and "[" not in row.layout:
        orders.append(row.layout)  # the memory's own order, as dumps and other tools have it
    for axes in orders:
        if "[" in axes:
            yield "K and V have orders of their own, which shapes do not show. Make the spec by hand: kvx.engine(...).spec(...)."
            continue
        given = tensors if not row.num_kv_heads else [_with_head(t, Layout.parse(axes)) for t in tensors]
        try:
            spec = describe(list(given), axes, format=format, v_format="", **_with_heads(row, sizes))
            if "[" in row.layout:
                spec = spec.replaced(layout=row.layout)
        except KvxError as error:
            yield re.sub(r"\b(block_size|format)=", r"src_\1=", str(error).removeprefix("describe(): "))
            continue
        yield _reason(row, spec, sizes, tensors[0], is_dense) or spec


def _reason(row: EngineRow, spec: CacheSpec, sizes: dict[str, int], first: Tensor, is_dense: bool) -> str:
    """Why the engine would not have made such a cache; "" where it could."""
    if ".cpu" in row.name and not (is_dense and first.is_cpu):
        return "it has dense tensors in host memory."
    if "[" in row.layout:
        if row.dtypes and spec.format not in row.dtypes.replace(";", ",").replace(" ", ",").split(","):
            return f"it has {row.dtypes}; these are {spec.format}."
    elif _axes(spec.layout) != _axes(row.layout):
        return f"in memory the order is {spec.layout!r}; it has {row.layout!r}."
    if row.num_kv_heads and spec.num_kv_heads != row.num_kv_heads:
        return f"it has {row.num_kv_heads} latent row for each token; these have {spec.num_kv_heads} heads."
    if "block_size" not in sizes and row.refuses(spec.block_size):
        return (
            f"blocks would have {spec.block_size} tokens; {row.engine} takes {row.block_size}. Give src_block_size= if that is so."
        )
    return ""


def _in_order(call: str, tensors: Nested, row: EngineRow) -> list[Tensor]:
    """As the row names them: K and V of each layer, or all of K and then all of V. Nested lists show which they are."""
    left = [axis.name for axis in Layout.parse(row.registered or row.layout).left]
    parts: list[Any] = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if sorted(left) == ["kv", "layer"] and parts and all(isinstance(part, (list, tuple)) for part in parts):
        sizes = len(parts), len(parts[0])
        if sizes == (2, 2):
            raise BadArgument(
                f"{call}(): two lists of two tensors are K and V of two layers in either order. Give {row.name} one list: "
                + ("all of K, then all of V." if left[0] == "kv" else "K and V of the first layer, then of the second.")
            )
        if sizes[left.index("kv")] != 2 and sizes[left.index("layer")] == 2:
            parts = [list(pair) for pair in zip(*parts, strict=True)]
    return [t for part in parts for t in ([part] if isinstance(part, Tensor) else _in_order(call, part, row))]


def _axes(layout: str) -> list[Axis]:
    """In the order of memory, one tensor for each layer or one for all."""
    read = Layout.parse(layout)
    return [*read.left, *read.first.order]


def _with_head(t: Tensor, layout: Layout) -> Tensor:
    """Latent rows have no heads, and some engines no dimension for them."""
    dims = layout.first.dims
    at = next((i for i, dim in enumerate(dims) if [axis.name for axis in dim] == ["head"]), -1)
    return t.unsqueeze(at) if at >= 0 and t.dim() == len(dims) - 1 else t


def _with_heads(row: EngineRow, sizes: dict[str, int]) -> dict[str, int]:
    return {"num_kv_heads": row.num_kv_heads, **sizes} if row.num_kv_heads else sizes
