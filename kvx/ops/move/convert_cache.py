"""convert_cache: an engine's tensors in, another engine's out. The long way is describe, plan, allocate_buffers, convert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange, Unsupported
from kvx.layout.axes import Axis, Layout
from kvx.layout.buffers import allocate_buffers
from kvx.layout.engine_row import EngineRow
from kvx.layout.engines import ENGINES, engine, row_name
from kvx.layout.gate import grids
from kvx.layout.place import num_cache_buffers
from kvx.layout.plan import plan
from kvx.layout.readings import Reading, read_as
from kvx.layout.views import layer_views
from kvx.ops.move.convert import Buffers, convert, flat
from kvx.quant.scales import finite_amax, scale_from_amax
from kvx.spec.byte_size import byte_text
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import Granularity
from kvx.spec.shown import Shown

_SIZES = ("num_layers", "num_blocks", "src_block_size", "num_kv_heads", "head_dim", "v_head_dim")


@dataclass(frozen=True, eq=False, repr=False)
class ConvertedCache(Shown):
    buffers: list[Tensor]  # the destination's, in the order of `spec`: cache tensors, then scales that stand apart
    spec: CacheSpec
    source: CacheSpec
    taken_as: str  # the source's row or rows

    def shown(self) -> dict[str, str]:
        a, b = self.source, self.spec
        return {
            "taken as": f"{self.taken_as}, {a.layout!r}, {a.format}, {a.num_layers} layers, {a.num_blocks} blocks of "
            f"{a.block_size}, {a.num_kv_heads} heads of {a.head_dim}",
            "converted to": f"{b.layout!r}, {b.format}, {b.num_blocks} blocks of {b.block_size}",
            "size": f"{byte_text(sum(t.nbytes for t in self.buffers))} in {len(self.buffers)} buffers",
            "device": str(self.buffers[0].device),
        }


def convert_cache(
    tensors: Buffers | Mapping[str, Buffers],  # what the engine registers: a tensor, one for each layer, K and V of each; a list
    # of lists, vLLM's dictionary, a DynamicCache
    src: str,  # the engine or row they are of: "vllm", "vllm.0.26.nhd"; `kvx layouts` lists the rows
    dst: str,  # the engine or row that is wanted
    *,
    format: str = "",  # wanted; "": as it is. Its scales are made of the data
    src_format: str = "",  # where the tensors' type does not say it: uint8, scales
    block_size: int = 0,  # wanted; 0: as it is. Another one needs `blocks`
    blocks: Sequence[int] | None = None,  # blocks of one sequence, in its order; they become 0, 1, 2 ... None: all, as they lie
    **sizes: int,  # of the source, which shapes cannot tell: num_kv_heads=, head_dim=, src_block_size= ...
) -> ConvertedCache:
    """The same K and V as another engine keeps them, on the same device. Printed, the result says what the tensors were taken for.

    Tensors that fit two layouts of `src` are refused with both named.
    """
    nested = _nested(tensors)
    if not list(flat("tensors", nested, "convert_cache")):
        raise BadArgument("convert_cache(): there are no tensors. Give what the engine registers, a tensor or more.")
    wrong = next((name for name in sizes if name not in _SIZES), "")
    if wrong:
        raise BadArgument(f"convert_cache(): {wrong}= is none of its arguments. Sizes of the source are {', '.join(_SIZES)}.")
    if "src_block_size" in sizes:
        sizes["block_size"] = sizes.pop("src_block_size")
    reading = read_as("convert_cache", nested, src, format=src_format, **sizes)
    source, given, row = reading.spec, reading.tensors, _wanted(dst, reading)
    tokens = block_size or source.block_size
    if blocks is None and tokens != source.block_size:
        raise BadArgument(
            f"convert_cache(): block_size is {tokens} and the source's blocks have {source.block_size} tokens. Which blocks follow "
            "each other? Give blocks=, those of one sequence in its order."
        )
    if row.refuses(tokens):
        raise BadArgument(
            f"convert_cache(): blocks have {tokens} tokens; {row.name} takes {row.block_size}. Give block_size= and blocks=."
        )
    ids = list(range(source.num_blocks)) if blocks is None else [int(i) for i in blocks]
    bad = next((i for i in ids if not 0 <= i < source.num_blocks), None)
    if bad is not None:
        raise OutOfRange(f"convert_cache(): blocks has {bad}; the source has {source.num_blocks} blocks, from 0 on.")
    count = -(-len(ids) * source.block_size // tokens)
    wanted = row.spec(
        num_layers=source.num_layers, num_blocks=max(1, count), block_size=tokens, num_kv_heads=source.num_kv_heads,
        head_dim=source.head_dim, v_head_dim=source.v_head_dim, format=format or source.format,
    )  # fmt: skip
    buffers = allocate_buffers(wanted, given[0].device)
    _set_scales(reading, ids, wanted, buffers)
    lens = torch.tensor([len(ids) * source.block_size]) if count * tokens != len(ids) * source.block_size else None
    convert(given, buffers, plan=plan(source, wanted), src_blocks=ids, dst_blocks=list(range(count)), seq_lens=lens)
    return ConvertedCache(list(_shaped(buffers, wanted)), wanted, source, " or ".join(r.name for r in reading.rows))


def _set_scales(reading: Reading, ids: list[int], wanted: CacheSpec, buffers: list[Tensor]) -> None:
    """Scales of a whole layer, or of its heads, made of the data that comes. convert finds those of blocks and tokens itself."""
    at = num_cache_buffers(wanted)
    for i, plane in enumerate(wanted.planes):
        fmt, given = plane.format, reading.spec.plane(i).format
        if wanted.scale_shape(i) is None:
            continue
        scale, at = buffers[at], at + 1
        if fmt.granularity not in (Granularity.TENSOR, Granularity.HEAD) or not ids:
            continue
        if given.scale is not None:
            raise Unsupported(
                f"convert_cache(): {given} to {fmt}: nothing says the scales of the result. Give a format with a scale for each "
                f"token and head, or convert with scales of your own: kvx.convert."
            )
        for layer, planes in enumerate(layer_views(reading.tensors, reading.spec)):
            view = planes[i]
            x = view.tensor[ids] if isinstance(view.tensor, Tensor) else torch.stack([view.tensor[j] for j in ids])
            axes = ["block", *(axis for axis in view.axes if axis != "block")]
            kept = axes.index("head") if fmt.granularity == Granularity.HEAD else -1
            scale[layer] = scale_from_amax(finite_amax(x, tuple(n for n in range(x.dim()) if n != kept)), fmt)


def _shaped(buffers: list[Tensor], spec: CacheSpec) -> Iterator[Tensor]:
    """Bytes as elements, in the dimensions of the layout where these are whole ones."""
    kinds = [grid for count, grid in grids(spec) for _ in range(count)]
    for t, grid in zip(buffers, kinds, strict=True):
        typed = t if grid.dtype is None else t.view(grid.dtype)
        shape = [step.size for step in grid.steps] if grid.is_scale else _dims(spec)
        yield typed.view(shape) if prod(shape) == typed.numel() else typed


def _dims(spec: CacheSpec) -> list[int]:
    """Of a buffer of K, of V or of both; of planes with orders of their own, none."""
    if "[" in spec.layout:
        return [0]
    sizes = {"layer": spec.num_layers, "block": spec.num_blocks, "kv": 2, "token": spec.block_size, "head": spec.num_kv_heads}
    sizes["dim"] = spec.plane(0).row_units

    def size(axis: Axis) -> int:
        whole, pack = sizes[axis.name], spec.plane(0).pack(axis.factor) if axis.part else 1
        return {"": whole, "/": whole // pack, "%": pack}[axis.part]

    return [prod(map(size, dim)) for dim in Layout.parse(spec.layout).first.dims]


def _nested(tensors: Any) -> Any:
    """vLLM registers a dictionary by layer; a cache of Transformers has layers with keys and values."""
    if isinstance(tensors, Mapping):
        return list(tensors.values())
    layers = getattr(tensors, "layers", None)
    return tensors if layers is None else [t for layer in layers for t in (layer.keys, layer.values)]


def _wanted(dst: str, reading: Reading) -> EngineRow:
    """Of a cache of latents, the engine's row for those."""
    latent = f"{row_name(dst)}.mla"
    if reading.rows[0].num_kv_heads and latent in ENGINES:
        return ENGINES[latent]
    return engine(dst)
