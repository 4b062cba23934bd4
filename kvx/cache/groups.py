"""Layer groups: layers whose blocks are handed out together, because they need the same tokens.

A model with full and sliding layers has two groups: each has an allocator, a table and storage of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvx.cache.blocks import BlockAllocator
from kvx.cache.guard import Guard
from kvx.cache.prefix import first_block
from kvx.errors import BadArgument
from kvx.layout.storage import allocate
from kvx.ops.move.copy_blocks import copy_blocks
from kvx.spec.cache_spec import CacheSpec


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share block ids."""

    name: str
    layers: tuple[int, ...]  # of the model
    spec: CacheSpec  # of one layer's tensors: num_layers is 1
    window: int = 0  # positions a token sees, its own the last of them; blocks wholly behind are given back. 0: all
    is_latent: bool = False  # MLA: K the latent, V the rotary part (docs/attention.md)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers or len(set(self.layers)) != len(self.layers):
            raise BadArgument(f"LayerGroup {self.name!r}: layers are {self.layers}; they are one or more, each once.")
        if self.spec.num_layers != 1:
            raise BadArgument(f"LayerGroup {self.name!r}: spec.num_layers is {self.spec.num_layers}; it is the spec of one layer.")
        if self.window < 0:
            raise BadArgument(f"LayerGroup {self.name!r}: window is {self.window}; it is 0 (all) or more.")
        if self.is_latent and self.spec.num_kv_heads != 1:
            raise BadArgument(f"LayerGroup {self.name!r}: is_latent with {self.spec.num_kv_heads} KV heads; a latent has one.")

    @property
    def num_bytes(self) -> int:
        """Of all its layers."""
        return self.spec.cache_bytes * len(self.layers)


@dataclass(frozen=True, eq=False)
class Layer:
    """A handle: one layer's tensors as the ops take them. Made once, when the cache is."""

    cache: Tensor | tuple[Tensor, Tensor]
    scales: dict[str, Any]  # keyword arguments of the ops: k_scale, v_scale
    spec: CacheSpec
    group: int  # index of its group: Batch.table(group), Batch.slot_mapping(group)
    window: int
    is_latent: bool

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        cache = (self.cache,) if isinstance(self.cache, Tensor) else self.cache
        return (*cache, *(s for s in self.scales.values() if s is not None))


class GroupState:
    """A group at work: storage, allocator, and the table of every sequence's blocks."""

    def __init__(
        self,
        group: LayerGroup,
        index: int,
        max_seqs: int,
        max_blocks: int,
        device: str | torch.device,
        backend: str,
        guard: Guard,
    ) -> None:
        self.group = group
        self.window = group.window
        self.allocator = BlockAllocator(group.spec.num_blocks, name=group.name, guard=guard)
        self.table = np.full((max_seqs, max_blocks), -1, np.int32)  # one row a sequence; -1: behind the window, or not yet
        self.layers = {i: _layer(group, index, device) for i in group.layers}
        self._backend = backend

    def first_block(self, length: int) -> int:
        """The first block that a token at position `length`, or any after it, sees."""
        return first_block(length, self.window, self.group.spec.block_size)

    def copy_block(self, source: int, destination: int) -> None:
        for layer in self.layers.values():
            copy_blocks(layer.cache, [(source, destination)], spec=layer.spec, backend=self._backend, **layer.scales)


def _layer(group: LayerGroup, index: int, device: str | torch.device) -> Layer:
    storage = allocate(group.spec, device)
    return Layer(storage.cache, storage.scales(), group.spec, index, group.window, group.is_latent)


def check_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Groups that can be one cache."""
    if not groups:
        raise BadArgument("PagedCache(): groups is empty; give one kvx.LayerGroup or more.")
    sizes = {g.spec.block_size for g in groups}
    if len(sizes) > 1:
        raise BadArgument(f"PagedCache(): groups have block_size {sorted(sizes)}; all groups have the same.")
    layers = [i for g in groups for i in g.layers]
    twice = sorted({i for i in layers if layers.count(i) > 1})
    if twice:
        raise BadArgument(f"PagedCache(): layers {twice} are in two groups.")
    names = [g.name for g in groups]
    if len(set(names)) != len(names):
        raise BadArgument(f"PagedCache(): two groups have one name, of {names}.")
    return tuple(groups)
