"""CacheTiers: a PagedCache on tiers. What it evicts is offloaded; what a prefix has more of is brought back.

Each layer group has a mover and tiers of its own, whose blocks are the group's, by the cache's names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from torch import Tensor

from kvx.cache.blocks import BlockIds
from kvx.cache.groups import LayerGroup
from kvx.cache.paged import PagedCache
from kvx.errors import BadArgument
from kvx.layout.place import num_buffers, num_cache_buffers
from kvx.spec.cache_spec import CacheSpec
from kvx.tiers.mover import Mover
from kvx.tiers.mover_stats import MoverEvent, MoverStats
from kvx.tiers.tier import Tier


class CacheTiers:
    """The backing of a cache: made, it is attached. Leaving its `with` detaches it and waits; the tiers stay open."""

    def __init__(
        self,
        cache: PagedCache,
        tiers: Sequence[Sequence[Tier]],  # of each layer group, the fastest first
        *,
        kept: Sequence[CacheSpec],  # of each group's blocks in its tiers: as many tokens, layers counted from 0
        max_in_flight_bytes: int = 256 << 20,
        on_event: Callable[[MoverEvent], None] | None = None,
    ) -> None:
        if not len(tiers) == len(kept) == len(cache.groups):
            raise BadArgument(
                f"CacheTiers: tiers of {len(tiers)} groups and kept of {len(kept)}; the cache has {len(cache.groups)} groups."
            )
        for spec in kept:
            if spec.block_size != cache.block_size:
                raise BadArgument(f"CacheTiers: kept blocks have {spec.block_size} tokens, the cache's {cache.block_size}.")
        self.cache = cache
        self.num_lost, self.error = 0, ""  # blocks that could not even be sent, and why the last was not
        self.movers: list[Mover] = []
        try:
            for group, mine, spec in zip(cache.groups, tiers, kept, strict=True):
                for tier in mine:
                    tier.keep_for(cache)
                buffers, specs = buffers_of(cache, group)
                self.movers.append(
                    Mover(buffers, specs, mine, kept=spec, max_in_flight_bytes=max_in_flight_bytes, on_event=on_event)
                )
            cache.attach(self)
        except BaseException:
            self._close()
            raise

    # --- what the cache calls ---------------------------------------------------------------------------------------------

    def offer(self, group: int, hashes: Sequence[bytes], blocks: BlockIds) -> None:
        try:
            self.movers[group].offload(hashes, blocks.tolist())
        except Exception as error:  # the blocks are lost, and the cache goes on
            self.num_lost += len(hashes)
            self.error = str(error)

    def find(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        return self.movers[group].has(hashes)

    def load(self, group: int, hashes: Sequence[bytes], blocks: BlockIds) -> int:
        return self.movers[group].onboard(hashes, blocks.tolist())

    # --- all of it --------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> MoverStats:
        """Of all groups together."""
        first, *others = (mover.stats for mover in self.movers)
        return sum(others, first)

    def save(self) -> None:
        """Put what the cache and the faster tiers have into the last tier, where that outlives the process."""
        prefix = self.cache.prefix
        assert prefix is not None
        for group, mover in enumerate(self.movers):
            if mover.tiers[-1].is_lasting:
                names, blocks = prefix.named(group)
                mover.save(names, blocks.tolist())

    def close(self) -> None:
        """Detach, and wait for what is in flight."""
        if self.cache.prefix is not None and self.cache.prefix.backing is self:
            self.cache.attach(None)
        self._close()

    def _close(self) -> None:
        for mover in self.movers:
            mover.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def buffers_of(cache: PagedCache, group: LayerGroup) -> tuple[list[Tensor], list[CacheSpec]]:
    """A group's tensors, and the specs by which a conversion reads them. Layers are counted from 0."""
    layers = [cache.layer(i) for i in group.layers]
    buffers = [t for layer in layers for t in layer.tensors]
    spec = group.spec
    if num_buffers(spec) == num_cache_buffers(spec) and "layer" not in spec.layout:
        layout = f"layer {spec.layout}" if "|" in spec.layout else f"layer | {spec.layout}"
        return buffers, [replace(spec, layout=layout, num_layers=len(layers))]
    # Scales of each layer stand apart, so each is a shard.
    return buffers, [replace(spec, layer_start=n) for n in range(len(layers))]
