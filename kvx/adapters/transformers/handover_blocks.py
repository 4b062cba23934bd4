"""A KvxCache's blocks to and from a handover, converted as they lie."""

from __future__ import annotations

import torch

from kvx.adapters.transformers.cache import KvxCache
from kvx.adapters.transformers.wanted import Wanted
from kvx.handover import Handover, Source
from kvx.handover.layer_blocks import LayerTensors, places, require_tokens, sources, write_layers


def block_sources(cache: KvxCache, wanted: Wanted) -> list[Source]:
    wanted.check_sequence(cache.num_sequences)
    found = []
    for blocks in dict.fromkeys(layer.blocks for layer in cache.kv_layers if layer.is_initialized):
        same = [layer for layer in cache.kv_layers if layer.blocks is blocks and layer.is_initialized]
        for layer in same:
            wanted.check_length(layer.length, wanted.padding or 0)
        ids = blocks.blocks_of(wanted.sequence).tolist()
        first = int(blocks.starts[wanted.sequence]) * blocks.block_size
        wanted.check_window(blocks.window, first, same[0].index)
        here = [LayerTensors(layer.index, layer.tensors, layer.spec) for layer in same]
        found += sources(here, ids, num_tokens=wanted.num_tokens, window=blocks.window, first_token=first)
    return found


def fill_blocks(cache: KvxCache, handover: Handover, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """An empty cache."""
    where = places(handover)
    for layer in cache.kv_layers:
        require_tokens("import_cache", handover, layer.index, layer.window, num_tokens)
    likes = []
    for layer in cache.kv_layers:
        spec = handover.parts[where[layer.index].part].kv
        k, v = (torch.empty(1, spec.num_kv_heads, 0, plane.head_dim, dtype=dtype, device=device) for plane in spec.kv)
        likes.append((k, v))
    cache.make_room(num_tokens, likes)
    for blocks in dict.fromkeys(layer.blocks for layer in cache.kv_layers):
        here = [LayerTensors(layer.index, layer.tensors, layer.spec) for layer in cache.kv_layers if layer.blocks is blocks]
        write_layers(handover, here, blocks.blocks_of(0).tolist(), num_tokens=num_tokens)
