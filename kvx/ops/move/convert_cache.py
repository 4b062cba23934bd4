"""convert_cache: from one engine's tensors to another's in one call, made of describe, plan, allocate_buffers and convert."""

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
from kvx.ops.backend import as_tensor
from kvx.ops.move.block_ids import blocks_of
from kvx.ops.move.convert import convert
from kvx.ops.move.sides import Buffers, flat
from kvx.quant.scales import finite_amax, scale_from_amax
from kvx.spec.byte_size import byte_text
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.formats import Granularity
from kvx.spec.shown import Shown

_SIZES = ("num_layers", "num_blocks", "src_block_size", "num_kv_heads", "head_dim", "v_head_dim")


@dataclass(frozen=True, eq=False, repr=False)
class ConvertedCache(Shown):
    """What convert_cache returns: the new tensors and the specs of both sides."""

    buffers: list[Tensor]  # the new cache tensors, then its scales if they are separate tensors
    spec: CacheSpec  # of `buffers`
    source: CacheSpec  # of the tensors that were given
    taken_as: str  # the engine layout, or layouts, of the tensors that were given

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
    tensors: Buffers
    | Mapping[str, Buffers],  # what the engine registers: one tensor, one per layer, or K and V of each layer, as a
    # list, a list of lists, vLLM's dictionary or a DynamicCache
    src: str,  # the engine they come from, or its exact layout: "vllm", "vllm.0.26.nhd". `kvx layouts` lists them
    dst: str,  # the engine or layout to convert to
    *,
    format: str = "",  # of the result; "": that of the source. Scales are computed from the data
    src_format: str = "",  # of the source, if the dtype of the tensors does not determine it (uint8, int8 with scales)
    block_size: int = 0,  # of the result; 0: that of the source. A different one needs `blocks`
    blocks: Sequence[int] | None = None,  # the block table of one sequence; its blocks become 0, 1, 2 ... None: all blocks
    **sizes: int,  # sizes of the source that do not follow from the shapes: num_kv_heads=, head_dim=, src_block_size= ...
) -> ConvertedCache:
    """Convert the KV cache tensors of one engine to the layout of another, on the same device.

    The layout and the sizes of the source are found from the tensors; print the result to see them. If the tensors fit more than
    one layout of `src`, the call raises BadArgument and lists these.
    """
    nested = _nested(tensors)
    if not list(flat("tensors", nested, "convert_cache")):
        raise BadArgument("convert_cache(): there are no tensors. Give the KV cache tensors that the engine registers.")
    wrong = next((name for name in sizes if name not in _SIZES), "")
    if wrong:
        raise BadArgument(
            f"convert_cache(): there is no argument {wrong}=. It takes format, src_format, block_size, blocks, and sizes of the "
            f"source: {', '.join(_SIZES)}. The result is on the device of the tensors."
        )
    if block_size < 0:
        raise BadArgument(f"convert_cache(): block_size is {block_size}; it takes the tokens per block, or 0 for the source's.")
    if "src_block_size" in sizes:
        sizes["block_size"] = sizes.pop("src_block_size")
    reading = read_as("convert_cache", nested, src, format=src_format, **sizes)
    source, given, row = reading.spec, reading.tensors, _wanted(dst, reading)
    tokens = block_size or source.block_size
    if blocks is None and tokens != source.block_size:
        raise BadArgument(
            f"convert_cache(): block_size is {tokens} and the source's blocks have {source.block_size} tokens. Which blocks follow "
            "each other? Give blocks=, the block table of one sequence."
        )
    if row.refuses(tokens):
        raise BadArgument(
            f"convert_cache(): {row.name} does not take blocks of {tokens} tokens; it takes: {row.block_size}. Give block_size= "
            "and blocks=, the block table of one sequence."
        )
    table = blocks_of("convert_cache", "blocks", blocks, source.num_blocks)
    if table.dim() != 1:
        raise BadArgument(
            f"convert_cache(): blocks is {list(table.shape)}; it takes the block table of one sequence, such as [7, 3]."
        )
    ids: list[int] = table.tolist()
    bad = next((i for i in ids if not 0 <= i < source.num_blocks), None)
    if bad is not None:
        raise OutOfRange(f"convert_cache(): blocks has {bad}; the source has blocks 0 to {source.num_blocks - 1}.")
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
                f"convert_cache(): scales of {fmt} cannot be computed from a source in {given}. Give a format with a scale for "
                f"each token and head, or set scales yourself and call kvx.convert."
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
    """Lists of tensors: of vLLM's dictionary by layer, of a Transformers cache, of arrays that share their memory by DLPack."""
    if isinstance(tensors, Mapping):
        tensors = list(tensors.values())
    if isinstance(tensors, list | tuple):
        return [_nested(part) for part in tensors]
    layers = getattr(tensors, "layers", None)
    if layers is not None:
        return [t for layer in layers for t in (layer.keys, layer.values)]
    return as_tensor("convert_cache", "tensors", tensors)


def _wanted(dst: str, reading: Reading) -> EngineRow:
    """Of a cache of latents, the engine's row for those."""
    latent = f"{row_name(dst)}.mla"
    if reading.rows[0].num_kv_heads and latent in ENGINES:
        return ENGINES[latent]
    return engine(dst)
