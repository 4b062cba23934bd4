"""SGLang's host pools as caches of KVX: the one place that knows their fields. They are looked up by name: SGLang is not imported.

A page of K and V lies in the store as its pool has it, in one run: what the pool's own `get_data_page` gives. Pools whose bytes KVX
has no words for (an indexer's keys, fp8 without its scales, DeepSeek-V4's) go as such pages, whole, with a manifest that only the
same pool has. So do the pools of a model with several, whose layers SGLang does not tell, unless the model's config is given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, KvxError, Unsupported
from kvx.handover.model_parts import ModelPart
from kvx.layout.buffers import bytes_of
from kvx.layout.engines import ENGINES
from kvx.layout.state_rows import state_row
from kvx.spec import CacheSpec, Spec, StateSpec

FORMATS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_OF_KV = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_LATENT = "MLATokenToKVPoolHost"
# Of pools that go as whole pages: what their bytes hang on, where they have it.
_NUMBERS = (
    "layout",
    "page_size",
    "layer_num",
    "num_mamba_layers",
    "start_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
)
_STATES = "MambaPoolHost"
_STATE_ROWS = ("sglang.host", "sglang.kimi.host")
_BY_LAYER = "_layer_shard_enabled"  # of a pool whose ranks have layers each


@dataclass(frozen=True)
class Ranks:
    """Where a process stands among those that share a model out, as HiCacheStorageConfig says it."""

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    is_replicated: bool = False  # MLA: every rank has all of K and V
    num_kv_heads: int = 0  # of the model; 0: not said
    has_groups: bool = False  # the model has several pools: one alone does not hold all its layers

    @classmethod
    def of(cls, config: Any, num_kv_heads: int = 0) -> Ranks:
        if getattr(config, "dcp_size", 1) > 1:
            raise Unsupported(f"KvxStorage: dcp_size is {config.dcp_size}; SGLang 0.5.23 takes file and Mooncake with it alone.")
        return cls(
            config.tp_rank, config.tp_size, getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1),
            getattr(config, "pp_rank", 0), getattr(config, "pp_size", 1), bool(config.is_mla_model), num_kv_heads,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class HostPool:
    name: str  # SGLang's: kv, mamba, swa, ...
    pool: Any
    page_size: int  # indices of a page: tokens, or 1 where a page is a state
    page_bytes: int
    facts: dict[str, str | int]  # what must be equal to read its pages, beside the spec
    spec: CacheSpec | None = None  # of all its pages; None: they go whole, or are states
    page_spec: Spec | None = None  # of one page in one run; None: they go whole
    num_layers: int = 0  # of those in its memory, the first: others share them, and are not filled
    tokens: int = 0  # between the names of its pages; 0: not said, of pages that go whole
    buffers: Sequence[Tensor] = field(default=())

    @property
    def kept_spec(self) -> Spec | None:
        """Of one page as the pool has it, as far as it is filled."""
        return None if self.page_spec is None else self.page_spec.replaced(num_layers=self.num_layers)

    def pages(self, host_indices: Tensor, count: int) -> list[int]:
        """The first index of each page, as SGLang counts: in tokens."""
        if host_indices is None or host_indices.numel() != count * self.page_size:
            got = "none" if host_indices is None else host_indices.numel()
            raise BadArgument(f"{count} pages of {self.page_size} have {count * self.page_size} indices; {got} were given.")
        return [int(i) for i in host_indices[:: self.page_size].tolist()]

    def blocks(self, pages: Sequence[int]) -> list[int]:
        return [index // self.page_size for index in pages]


def read_pool(
    name: str,
    pool: Any,
    *,
    model: str,
    ranks: Ranks,
    parts: Sequence[ModelPart] = (),  # of the model; (): not said, and pools of a model with several are found by SGLang alone
    page_size: int = 0,  # tokens of a page: the keys of states are those of K and V
) -> HostPool:
    """What a pool of this name is. Unsupported where it has no memory of its own."""
    kind = type(pool).__name__
    tag = getattr(pool, "storage_format_tag", None)
    is_told = len(parts) > 1 and ranks.has_groups and ranks.pp_size == 1 and not _drafts(pool)
    part = _part_of(name, kind, parts) if is_told else None
    if kind in _OF_KV and pool.dtype in FORMATS and tag is None and not _more(pool):
        return _of_kv(name, pool, model, ranks, part)
    if part is not None and kind == _STATES and not getattr(pool, "slot_state_buffers", ()):
        return _of_states(name, pool, model, ranks, part, page_size)
    if getattr(pool, "kv_buffer", None) is None and not hasattr(pool, "get_data_page"):
        raise Unsupported(f"KvxStorage: the pool {name!r} ({kind}) has no pages in this process; it was not read.")
    facts: dict[str, str | int] = {"pool": kind, "group": name, "dtype": str(pool.dtype).removeprefix("torch.")}
    facts |= {n: getattr(pool, n) for n in _NUMBERS if type(getattr(pool, n, None)) in (int, str)}
    facts["version"] = str(getattr(sys.modules.get("sglang"), "__version__", ""))  # whose pages they are, to the byte
    if tag is not None:
        facts["storage_format"] = str(tag)
    if more := _more(pool):
        facts["more"] = " ".join(more)
    if kind == _STATES:  # both its layouts have the same pages
        del facts["layout"]
        facts |= {
            "temporal": f"{list(pool.temporal_state_shape)} {pool.temporal_dtype}",
            "conv": f"{[list(shape) for shape in pool.conv_state_shapes]} {pool.conv_dtype}",
            "beside": len(getattr(pool, "slot_state_buffers", ())),
        }
    if kind == _STATES or not ranks.is_replicated or getattr(pool, _BY_LAYER, False):
        facts |= _rank("tp", ranks.tp_rank, ranks.tp_size)
    facts |= _rank("cp", ranks.cp_rank, ranks.cp_size) | _rank("pp", ranks.pp_rank, ranks.pp_size)
    size = getattr(pool, "page_size", 1) or 1
    return HostPool(name, pool, size, size * pool.size_per_token, facts)


def _drafts(pool: Any) -> int:
    """Layers of a draft model in the same pages."""
    if hasattr(pool, "mtp_draft_buffer_infos"):
        return len(pool.mtp_draft_buffer_infos)
    layers = getattr(pool, "layer_num", 0)
    return int(layers - getattr(pool, "target_layer_num", layers))


def _part_of(name: str, kind: str, parts: Sequence[ModelPart]) -> ModelPart | None:
    """SGLang has one pool for layers that see all tokens, one for those of a window, and one for states."""
    found = {
        "kv": [p for p in parts if not p.planes and not p.window],
        "swa": [p for p in parts if p.window],
        "mamba": [p for p in parts if p.planes],
    }.get(name, [])
    return found[0] if len(found) == 1 and (kind == _STATES) == bool(found[0].planes) else None


def _of_states(name: str, pool: Any, model: str, ranks: Ranks, part: ModelPart, page_size: int) -> HostPool:
    """Matrices, then convolutions, each of all layers."""
    has_matrix = bool(pool.temporal_state_elem_size)
    types = [pool.temporal_dtype] * has_matrix + [pool.conv_dtype]
    shapes = [tuple(pool.temporal_state_shape)] * has_matrix + [tuple(shape) for shape in pool.conv_state_shapes]
    matrix, conv = FORMATS.get(types[0], ""), FORMATS.get(types[-1], "")
    if matrix and conv and pool.num_mamba_layers == len(part.layers):
        planes = tuple(p.spec(conv if p.is_conv else matrix, matrix) for p in part.planes)
        whole = StateSpec(1, planes, num_layers=len(part.layers), model=model)
        mine = whole
        with suppress(KvxError):  # shares that ranks cannot have: these are then not the pool's
            mine = whole.shard(ranks.tp_size, ranks.tp_rank)
        for row in map(state_row, _STATE_ROWS):
            if row.shapes(mine.planes) == shapes:
                page = mine.replaced(layout=row.layout(mine.planes).replace("block ", "block | ", 1))
                facts = part.fields() | _rank("cp", ranks.cp_rank, ranks.cp_size)
                return HostPool(name, pool, 1, pool.size_per_token, facts, None, page, num_layers=page.num_layers, tokens=page_size)
    said = "; ".join(map(str, part.planes))
    raise _other_config(
        name, f"{pool.num_mamba_layers} layers of states {[list(s) for s in shapes]} in {types[0]} and {types[-1]}",
        f"{len(part.layers)} of {said}, on {ranks.tp_size} ranks",
    )  # fmt: skip


def _other_config(name: str, here: str, said: str) -> BadArgument:
    return BadArgument(
        f"extra config: config says that the pool {name!r} has {said}; SGLang's has {here}. It must be the config.json of this "
        "model, or its folder. Without it pages are kept too, and found by SGLang alone."
    )


def _more(pool: Any) -> list[str]:
    """What a pool has beside K and V, or has otherwise."""
    more = ("index_k_buffer", "index_k_scale_buffer", "shared_allocation_domain")
    found = [name for name in more if getattr(pool, name, None) is not None]
    return found + [name for name in ("stores_page_envelope", _BY_LAYER) if getattr(pool, name, False)]


def _of_kv(name: str, pool: Any, model: str, ranks: Ranks, part: ModelPart | None) -> HostPool:
    is_latent = type(pool).__name__ == _LATENT
    is_split = pool.layout == "page_first_kv_split"
    if f"sglang.{pool.layout}" not in ENGINES:
        raise Unsupported(f"KvxStorage: the layout {pool.layout!r} of the pool {name!r} is not known. It was not read.")
    layout = ENGINES[f"sglang.{pool.layout}"].layout
    if is_latent and not is_split:
        layout = "block layer token head dim" if pool.layout == "page_unified" else layout.removeprefix("kv ")
    elif pool.layout == "page_unified" and pool.head_group_num != pool.head_num:
        each = pool.head_num // pool.head_group_num
        layout = f"block head/{each} layer kv token head%{each} dim"
    is_apart = is_split or type(pool).__name__.startswith("Asymmetric")
    if is_apart and not is_split:
        layout = layout.replace("kv ", "kv | ", 1)
    heads = 1 if is_latent else pool.head_num
    dims = (pool.kv_cache_dim, 0) if is_latent else (pool.head_dim, pool.v_head_dim if pool.v_head_dim != pool.head_dim else 0)
    if is_split:
        dims = (pool.kv_lora_rank, pool.qk_rope_head_dim)
    facts, head_start = {}, 0
    if not is_latent and ranks.tp_size > 1:
        total = part.num_kv_heads if part is not None else ranks.num_kv_heads or (heads * ranks.tp_size if heads > 1 else 0)
        if not total:  # one head each: as many heads as ranks, or fewer that several of them hold
            facts = _rank("tp", ranks.tp_rank, ranks.tp_size)
        elif heads != max(1, total // ranks.tp_size):
            raise BadArgument(
                f"extra config: num_kv_heads is {total}; rank {ranks.tp_rank} of {ranks.tp_size} has {heads} of them. It is the KV "
                "heads of the whole model."
            )
        else:
            head_start = ranks.tp_rank * total // ranks.tp_size
    facts |= _rank("cp", ranks.cp_rank, ranks.cp_size)
    start, num_layers = getattr(pool, "start_layer", 0) or 0, pool.layer_num
    if part is not None:
        _require_rows(name, pool, heads, dims, part, ranks)
        facts |= part.fields()
        start, num_layers = 0, len(part.layers)  # counted within the part
    elif name != "kv" or ranks.has_groups:
        facts["group"] = name
        facts |= _rank("pp", ranks.pp_rank, ranks.pp_size)  # such pools count their layers from 0 in every stage
    if drafts := _drafts(pool):
        facts["draft_layers"] = drafts
    spec = CacheSpec(
        num_blocks=pool.page_num, block_size=pool.page_size, num_kv_heads=heads, head_dim=dims[0], v_head_dim=dims[1],
        layout=layout, format=FORMATS[pool.dtype], num_layers=pool.layer_num, layer_start=start, head_start=head_start, model=model,
    )  # fmt: skip
    page = spec.replaced(num_blocks=1, layout=page_layout(layout))
    buffers = [pool.k_buffer, pool.v_buffer] if is_apart else [pool.kv_buffer]
    memory = [bytes_of(t) for t in buffers]
    return HostPool(name, pool, pool.page_size, page.cache_bytes, facts, spec, page, num_layers, pool.page_size, memory)


def _require_rows(name: str, pool: Any, heads: int, dims: tuple[int, int], part: ModelPart, ranks: Ranks) -> None:
    """Layers that read others' K and V may have memory in the pool, behind the others'; nobody fills it."""
    wanted = 1 if part.is_latent else max(1, part.num_kv_heads // ranks.tp_size), part.head_dim, part.v_head_dim
    is_here = pool.layer_num in (len(part.layers), len(part.layers) + part.num_shared)
    if not is_here or (heads, *dims) != wanted:
        rows = "{} heads, K of {} elements, V of {}".format
        raise _other_config(
            name, f"{pool.layer_num} layers of {rows(heads, dims[0], dims[1] or dims[0])}",
            f"{len(part.layers)} of {rows(wanted[0], wanted[1], wanted[2] or wanted[1])}, on one of {ranks.tp_size} ranks",
        )  # fmt: skip


def page_layout(layout: str) -> str:
    """A page of a pool in one run: its axes in the pool's order, the block outside."""
    inner = layout.replace("(block token)", "token")
    if "|" in inner:  # K and V have memory of their own, and rows of two widths: in one run they stand side by side
        inner = inner.replace("kv |", "").replace("dim", "(kv dim)")
    return "block | " + " ".join(re.sub(r"\bblock\b", "", inner).split())


def _rank(axis: str, rank: int, size: int) -> dict[str, str | int]:
    return {axis: f"{rank}/{size}"} if size > 1 else {}
