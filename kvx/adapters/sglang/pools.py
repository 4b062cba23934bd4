"""SGLang's host pools as caches of KVX: the one place that knows their fields. They are looked up by name: SGLang is not imported.

A page of K and V lies in the store as its pool has it, in one run: what the pool's own `get_data_page` gives. Pools whose bytes KVX
has no words for (states, an indexer's keys, fp8 without its scales, DeepSeek-V4's) go as such pages, whole, with a manifest that
only the same pool has.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, Unsupported
from kvx.layout.buffers import bytes_of
from kvx.layout.engines import ENGINES
from kvx.spec import CacheSpec

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
_BY_LAYER = "_layer_shard_enabled"  # of a pool whose ranks have layers each


@dataclass(frozen=True)
class Ranks:
    """Where a process stands among those that share a model out, as HiCacheStorageConfig says it."""

    tp_rank: int = 0
    tp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    is_replicated: bool = False  # MLA: every rank has all of K and V
    num_kv_heads: int = 0  # of the model; 0: not said
    has_groups: bool = False  # the model has several pools: one alone does not hold all its layers

    @classmethod
    def of(cls, config: Any, num_kv_heads: int = 0) -> Ranks:
        if getattr(config, "dcp_size", 1) > 1:
            raise Unsupported(f"KvxStorage: dcp_size is {config.dcp_size}; SGLang 0.5.23 takes file and Mooncake with it alone.")
        return cls(
            config.tp_rank, config.tp_size, getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1),
            bool(config.is_mla_model), num_kv_heads,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class HostPool:
    name: str  # SGLang's: kv, mamba, swa, ...
    pool: Any
    page_size: int  # indices of a page: tokens, or 1 where a page is a state
    page_bytes: int
    facts: dict[str, str | int]  # what must be equal to read its pages, beside the spec
    spec: CacheSpec | None = None  # of all its pages; None: they go whole
    page_spec: CacheSpec | None = None  # of one page, as it lies in the store
    buffers: Sequence[Tensor] = field(default=())

    def pages(self, host_indices: Tensor, count: int) -> list[int]:
        """The first index of each page, as SGLang counts: in tokens."""
        if host_indices is None or host_indices.numel() != count * self.page_size:
            got = "none" if host_indices is None else host_indices.numel()
            raise BadArgument(f"{count} pages of {self.page_size} have {count * self.page_size} indices; {got} were given.")
        return [int(i) for i in host_indices[:: self.page_size].tolist()]

    def blocks(self, pages: Sequence[int]) -> list[int]:
        return [index // self.page_size for index in pages]


def read_pool(name: str, pool: Any, *, model: str, ranks: Ranks) -> HostPool:
    """What a pool of this name is. Unsupported where it has no memory of its own."""
    kind = type(pool).__name__
    tag = getattr(pool, "storage_format_tag", None)
    if kind in _OF_KV and pool.dtype in FORMATS and tag is None and not _more(pool):
        return _of_kv(name, pool, model, ranks)
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
    page_size = getattr(pool, "page_size", 1) or 1
    return HostPool(name, pool, page_size, page_size * pool.size_per_token, facts | _rank("cp", ranks.cp_rank, ranks.cp_size))


def _more(pool: Any) -> list[str]:
    """What a pool has beside K and V, or has otherwise."""
    more = ("index_k_buffer", "index_k_scale_buffer", "shared_allocation_domain")
    found = [name for name in more if getattr(pool, name, None) is not None]
    return found + [name for name in ("stores_page_envelope", _BY_LAYER) if getattr(pool, name, False)]


def _of_kv(name: str, pool: Any, model: str, ranks: Ranks) -> HostPool:
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
        total = ranks.num_kv_heads or (heads * ranks.tp_size if heads > 1 else 0)
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
    if name != "kv" or ranks.has_groups:
        facts["group"] = name
    if drafts := pool.layer_num - getattr(pool, "target_layer_num", pool.layer_num):
        facts["draft_layers"] = drafts
    spec = CacheSpec(
        num_blocks=pool.page_num, block_size=pool.page_size, num_kv_heads=heads, head_dim=dims[0], v_head_dim=dims[1],
        layout=layout, format=FORMATS[pool.dtype], num_layers=pool.layer_num, layer_start=getattr(pool, "start_layer", 0) or 0,
        head_start=head_start, model=model,
    )  # fmt: skip
    page = spec.replaced(num_blocks=1, layout=page_layout(layout))
    buffers = [pool.k_buffer, pool.v_buffer] if is_apart else [pool.kv_buffer]
    return HostPool(name, pool, pool.page_size, page.cache_bytes, facts, spec, page, [bytes_of(t) for t in buffers])


def page_layout(layout: str) -> str:
    """A page of a pool in one run: its axes in the pool's order, the block outside."""
    inner = layout.replace("(block token)", "token")
    if "|" in inner:  # K and V have memory of their own, and rows of two widths: in one run they stand side by side
        inner = inner.replace("kv |", "").replace("dim", "(kv dim)")
    return "block | " + " ".join(re.sub(r"\bblock\b", "", inner).split())


def _rank(axis: str, rank: int, size: int) -> dict[str, str | int]:
    return {axis: f"{rank}/{size}"} if size > 1 else {}
