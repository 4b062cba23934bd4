"""What the bytes of vLLM's pages depend on, where they are kept as they lie: facts out of its OffloadingConfig."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from typing import Any

import torch

from kvx.errors import BadArgument
from kvx.identity import has_identity


def require_model(call: str, model: str, config: Any) -> None:
    if not has_identity(model):
        got = f"is {model!r}, a geometry" if model else "is not given"
        raise BadArgument(
            f'{call}: "model" {got}. vLLM tells it neither revision nor quantisation nor overrides of {config.model.name}, so give '
            '"model": a name that only these weights have. kvx.weights_identity(folder) makes one of the files.'
        )


def page_facts(config: Any, model: str) -> dict[str, str]:
    """Of all groups."""
    p = config.parallel
    return {
        "bytes": f"vLLM pages, {config.kv_cache_layout}, {platform.machine()}{_cpu_packing()}",
        "model": model,
        "dtype": config.model.dtype,
        "block_size": ",".join(str(g.tokens_per_block) for g in config.groups),
        "layers": ";".join(",".join(g.layer_names) for g in config.groups),
        "ranks": f"tp{p.tp_size} pp{p.pp_size} pcp{p.pcp_size} dcp{p.dcp_size}",
    }


def chunk_facts(
    config: Any,
    model: str,
    *,
    group: int,
    spans: Sequence[tuple[int, int]],  # (first byte, how many) of a chunk that are kept
    device: str,
    version: str,
) -> dict[str, str | int]:
    """Of one group's chunks: all ranks of some blocks, one behind the other. Each file repeats it, so it is short."""
    facts = page_facts(config, model)
    layout = f"{config.kv_cache_layout}{', canonical' if config.canonical_layout else ''}"
    where = f"{platform.machine()}{_cpu_packing()}" if device == "cpu" else device  # a GPU's pages do not depend on the host
    (told,) = (g for g in config.groups if g.group_id == group)
    return {
        **facts,
        "names": "vllm",
        "bytes": f"vLLM {version} chunks, {layout}, {where}",
        "block_size": told.tokens_per_block,
        "hash_size": config.cache.tokens_per_hash,
        "blocks": config.cache.blocks_per_chunk,
        "layers": _short(told.layer_names),
        "spans": _short([f"{start}+{size}" for start, size in spans]),
        "group": group,
        "ranks": f"{facts['ranks']}{' replicated' if config.replicated_layout else ''}",
    }


def _short(names: Sequence[str]) -> str:
    if len(names) < 3:
        return ",".join(names)
    digest = hashlib.blake2b("\0".join(names).encode(), digest_size=16).hexdigest()
    return f"{names[0]} to {names[-1]}, {len(names)} of them, {digest}"


def _cpu_packing() -> str:
    """vLLM's CPU backend packs rows by what the processor has."""
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)()
    return f" {torch.backends.cpu.get_cpu_capability()}{' amx' if has_amx else ''}"
