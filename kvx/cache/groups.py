"""Layer groups: layers whose blocks are handed out together, because they need the same tokens.

A model with full and sliding layers has two groups: each has an allocator, a table and storage of its own. What a group's blocks
hold of a sequence is its kind (kvx/cache/kinds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvx.cache.kinds import GroupKind, kind_of
from kvx.errors import BadArgument
from kvx.layout.buffers import allocate_buffers
from kvx.layout.views import layer_views
from kvx.ops.move.copy_blocks import copy_blocks
from kvx.ops.storage import allocate
from kvx.spec.cache_spec import CacheSpec, Spec


@dataclass(frozen=True)
class Member:
    """Layers of a group that store the same planes."""

    layers: tuple[int, ...]  # of the model
    spec: Spec  # of one layer's tensors: num_layers is 1

    @property
    def num_bytes(self) -> int:
        return self.spec.cache_bytes * len(self.layers)


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share block ids."""

    name: str
    layers: tuple[int, ...]  # of the model
    spec: Spec  # of one layer's tensors: num_layers is 1
    window: int = 0  # the short way to Sliding(window): positions a token sees, its own the last of them. 0: all
    is_latent: bool = False  # the short way to Latent(window)
    kind: GroupKind | None = None  # what its blocks hold of a sequence; None: as window and is_latent say
    others: tuple[Member, ...] = ()  # layers on the same blocks that store other planes

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "others", tuple(self.others))
        if self.window < 0:
            raise BadArgument(f"LayerGroup {self.name!r}: window is {self.window}; it must be 0 (all) or more.")
        if self.kind is None:
            object.__setattr__(self, "kind", kind_of(self.window, self.is_latent))
        elif self.window or self.is_latent:
            raise BadArgument(f"LayerGroup {self.name!r}: kind is {self.kind}, and window or is_latent says one too. Give one.")
        else:
            object.__setattr__(self, "window", self.blocks_of.window)
            object.__setattr__(self, "is_latent", self.blocks_of.is_latent)
        for member in self.members:
            layers, spec = member.layers, member.spec
            if not layers or len(set(layers)) != len(layers):
                raise BadArgument(f"LayerGroup {self.name!r}: layers are {layers}; they must be one or more, each once.")
            if spec.num_layers != 1:
                raise BadArgument(
                    f"LayerGroup {self.name!r}: spec.num_layers is {spec.num_layers}; it must be the spec of one layer."
                )
            if spec.num_blocks != self.spec.num_blocks:
                raise BadArgument(
                    f"LayerGroup {self.name!r}: specs have {self.spec.num_blocks} and {spec.num_blocks} blocks; a group has one "
                    "number."
                )
            if member.spec is not self.spec and isinstance(spec, CacheSpec):
                raise BadArgument(
                    f"LayerGroup {self.name!r}: others have K and V; layers of other K and V are a group of their own."
                )
            if sentence := self.blocks_of.check(spec):
                raise BadArgument(f"LayerGroup {self.name!r}: {sentence}")

    @property
    def blocks_of(self) -> GroupKind:
        """The kind, which is always there once the group is made."""
        assert self.kind is not None
        return self.kind

    @property
    def members(self) -> tuple[Member, ...]:
        return (Member(self.layers, self.spec), *self.others)

    @property
    def num_bytes(self) -> int:
        """Of all its layers."""
        return sum(member.num_bytes for member in self.members)

    @property
    def block_size(self) -> int:
        """Tokens of a block; 0: it holds no tokens, and any will do."""
        return self.spec.block_size if isinstance(self.spec, CacheSpec) else 0


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

    def copy_block(self, source: int, destination: int, backend: str) -> None:
        copy_blocks(self.cache, [(source, destination)], spec=self.spec, backend=backend, **self.scales)


@dataclass(frozen=True, eq=False)
class PlanesLayer:
    """A handle of a layer whose planes are not K and V: each a tensor of [num_blocks, ...] in the plane's axes."""

    planes: Mapping[str, Tensor]
    buffers: tuple[Tensor, ...]  # the same memory as bytes, in the order of the spec's layout
    spec: Spec
    group: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.buffers


AnyLayer = Layer | PlanesLayer


def make_layer(group: LayerGroup, spec: Spec, index: int, device: str | torch.device) -> AnyLayer:
    if isinstance(spec, CacheSpec):
        storage = allocate(spec, device)
        return Layer(storage.cache, storage.scales(), spec, index, group.window, group.is_latent)
    buffers = tuple(allocate_buffers(spec, device))
    views = layer_views(list(buffers), spec)[0]
    return PlanesLayer({view.plane: _tensor(view.tensor) for view in views}, buffers, spec, index)


def _tensor(found: Tensor | list[Tensor]) -> Tensor:
    if not isinstance(found, Tensor):
        raise BadArgument("PagedCache(): a layout with every block in an allocation of its own; a group's blocks stand in one.")
    return found


def check_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Groups that can be one cache."""
    if not groups:
        raise BadArgument("PagedCache(): groups is empty; give one kvx.LayerGroup or more.")
    sizes = {g.block_size for g in groups if g.block_size}
    if len(sizes) > 1:
        raise BadArgument(f"PagedCache(): groups have block_size {sorted(sizes)}; all groups have the same.")
    for has_state in (False, True):  # a layer may have K and V, and states beside them
        layers = [i for g in groups if g.blocks_of.has_state == has_state for m in g.members for i in m.layers]
        twice = sorted({i for i in layers if layers.count(i) > 1})
        if twice:
            raise BadArgument(f"PagedCache(): layers {twice} are in two groups.")
    names = [g.name for g in groups]
    if len(set(names)) != len(names):
        raise BadArgument(f"PagedCache(): two groups have one name, of {names}.")
    return tuple(groups)
