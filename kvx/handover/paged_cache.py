"""Handovers of a PagedCache: a sequence out of it, and one into it, which goes on there and whose whole blocks others find."""

from __future__ import annotations

import numpy as np

from kvx.cache.paged import PagedCache
from kvx.cache.sequence import Sequence
from kvx.errors import Unsupported
from kvx.handover import Handover, export_blocks
from kvx.handover.layer_blocks import (
    LayerTensors,
    num_usable,
    places,
    require_layers,
    require_tokens,
    sources,
    write_layers,
)


def read_sequence(cache: PagedCache, seq: Sequence, *, model: str, block_size: int = 16, format: str = "") -> Handover:
    """All of a sequence's tokens that are in the cache. One whose K and V hang on more than its tokens is refused."""
    if cache.prefix is not None and (seq.extras or seq.root != cache.prefix.root()):
        raise Unsupported(
            f"read_sequence(): {seq} has an extra (a LoRA, an image): a handover names K and V by model and tokens alone, and "
            "another sequence of the same tokens would be given these. It was not read."
        )
    found = []
    for g, group in enumerate(cache.groups):
        blocks = cache.blocks(seq, g)
        held = np.flatnonzero(blocks >= 0)
        first = int(held[0]) * cache.block_size if len(held) else 0
        found += sources(_layers(cache, g), blocks.tolist(), num_tokens=seq.length, window=group.window, first_token=first)
    return export_blocks(seq.tokens[: seq.length], found, model=model, block_size=block_size, format=format)


def write_sequence(
    cache: PagedCache,
    seq: Sequence,  # of the handover's tokens, or of more that begin with them
    handover: Handover,
    *,
    model: str,  # whose KV the cache holds; a handover of another is refused
    is_last_left: bool = True,  # the sequence's last token, which an engine computes to get the next
) -> None:
    """Room for the handover's tokens, and their K and V in it. What the cache had of them stays.

    The handover is checked before anything changes, and OutOfBlocks changes nothing.
    """
    call = "write_sequence"
    handover.check()
    _require_geometry(call, cache, handover, model)
    n = num_usable(call, handover, seq.tokens, is_last_left=is_last_left)
    for group in cache.groups:
        for layer in group.layers:
            require_tokens(call, handover, layer, group.window, n)
    found = seq.length // cache.block_size
    if seq.length >= n:
        return
    cache.extend(seq, n - seq.length)
    firsts, where = [], places(handover)
    for g, group in enumerate(cache.groups):
        blocks = cache.blocks(seq, g)
        blocks[:found] = -1  # others may be reading them
        write_layers(handover, _layers(cache, g), blocks.tolist(), num_tokens=n)
        firsts.append(max(handover.parts[where[layer].part].first_token for layer in group.layers))
    cache.adopt(seq, firsts)


def _require_geometry(call: str, cache: PagedCache, handover: Handover, model: str) -> None:
    """Incompatible where it is of another model, or of other layers or heads."""
    handover.require(model=model)
    require_layers(call, handover, [layer for group in cache.groups for layer in group.layers])
    where = places(handover)
    for group in cache.groups:
        s = group.spec
        for part in {where[layer].part for layer in group.layers}:
            handover.require(part, num_kv_heads=s.num_kv_heads, head_start=s.head_start, head_dim=s.head_dim)
            handover.require(part, v_head_dim=s.v_head_dim or s.head_dim)


def _layers(cache: PagedCache, group: int) -> list[LayerTensors]:
    handles = [(i, cache.layer(i)) for i in cache.groups[group].layers]
    return [LayerTensors(i, layer.tensors, layer.spec) for i, layer in handles]
