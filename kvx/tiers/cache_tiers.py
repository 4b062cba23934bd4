"""CacheTiers: host memory and disk behind a PagedCache. Evicted blocks are offloaded, and loaded again when a prefix has them.

Each layer group has a mover and tiers of its own, whose blocks are the group's, by the cache's names. Where layers of a group store
different planes, each kind of them (a member) has one; a block is there when all of its members' are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from kvx.cache.blocks import BlockIds
from kvx.cache.groups import Member
from kvx.cache.paged import PagedCache
from kvx.errors import BadArgument, TierError, a_type
from kvx.layout.axes import Layout
from kvx.layout.place import num_buffers, num_cache_buffers
from kvx.spec.byte_size import byte_text, parse_bytes
from kvx.spec.cache_spec import CacheSpec, Spec
from kvx.spec.shown import Shown
from kvx.spec.state_spec import StateSpec
from kvx.tiers.block import BlockKind
from kvx.tiers.mover import Mover
from kvx.tiers.mover_stats import MoverEvent, MoverStats
from kvx.tiers.option import TierOption, open_tiers
from kvx.tiers.tier import Tier


class CacheTiers(Shown):
    """Keep the blocks that a PagedCache evicts in host memory and on disk; `cache.admit` then loads them again.

        with CacheTiers(cache, host="2GB", disk="kv:50GB", model="my-model"): ...

    Constructing it attaches it to the cache. At the end of the `with` block, or in `close()`, it is detached and pending transfers
    finish. Tiers that it opened are then closed, after a directory among them got the blocks still in the cache; tiers passed as
    `tiers` stay open. A cache has one CacheTiers at a time, and keeps it alive until it is closed.
    """

    def __init__(
        self,
        cache: PagedCache,
        tiers: Sequence[Sequence[Tier]] | None = None,  # for each layer group (or member of one), fastest first
        *,
        kept: Sequence[Spec] | None = None,  # specs of the blocks in the tiers: same block size, layers from 0. None: kept_specs()
        host: str | int = "",  # instead of `tiers`: size of the host memory tier, such as "2GB"
        disk: str | Path = "",  # instead of `tiers`: a directory, with or without a size: "kv", "kv:50GB"
        model: str = "",  # a name that no other weights have; a directory needs one. kvx.weights_identity computes it
        max_in_flight_bytes: str | int = 256 << 20,
        on_event: Callable[[MoverEvent], None] | None = None,
    ) -> None:
        if not isinstance(cache, PagedCache):
            raise BadArgument(f"CacheTiers: cache is {a_type(cache)}; it takes a kvx.PagedCache.")
        if tiers is not None and (isinstance(tiers, str) or any(isinstance(mine, str | Tier) for mine in tiers)):
            raise BadArgument(
                f"CacheTiers: tiers is {str(tiers)[:100]}; it takes a list of opened tiers for each layer group. For host memory "
                'and a directory give host="2GB", disk="DIR".'
            )
        before = None if cache.prefix is None else cache.prefix.backing
        if before is not None:
            end = "cache.prefix.backing.close()" if isinstance(before, CacheTiers) else "cache.attach(None)"
            raise BadArgument(
                f"CacheTiers: the cache already has {before!r}. A cache has one: close that first ({end}), or give all tiers to it."
            )
        members = [(n, member) for n, group in enumerate(cache.groups) for member in group.members]
        max_in_flight_bytes = parse_bytes(max_in_flight_bytes, "CacheTiers: max_in_flight_bytes")
        self._own: list[Tier] = []  # opened here, so closed here
        self.cache = cache
        if kept is None:
            kept = kept_specs(cache, model)
        if tiers is None:
            tiers = self._open(kept, [cache.groups[n].name for n, _ in members], host, disk)
        elif host or disk:
            raise BadArgument("CacheTiers: tiers are given, and host or disk too. Give one or the other.")
        if not len(tiers) == len(kept) == len(members):
            what = f"{len(members)} groups" if len(members) == len(cache.groups) else f"{len(members)} members of groups"
            raise BadArgument(f"CacheTiers: tiers of {len(tiers)} groups and kept of {len(kept)}; the cache has {what}.")
        given = [id(tier) for mine in tiers for tier in mine]
        if len(set(given)) != len(given):  # names are of tokens: two groups' blocks have the same
            raise BadArgument("CacheTiers: one tier is given for two groups, or twice; each group has tiers of its own.")
        for spec, (_, member) in zip(kept, members, strict=True):
            if spec.block_size != member.spec.block_size:
                raise BadArgument(f"CacheTiers: kept blocks have {spec.block_size} tokens, the cache's {member.spec.block_size}.")
        self.num_lost, self.error = 0, ""  # blocks that could not even be sent, and why the last was not
        self.movers: list[Mover] = []
        self._of_group: list[list[Mover]] = [[] for _ in cache.groups]
        try:
            for (n, member), mine, spec in zip(members, tiers, kept, strict=True):
                for tier in mine:
                    tier.keep_for(cache)
                buffers, specs = buffers_of(cache, n, member)
                mover = Mover(buffers, specs, mine, kept=spec, max_in_flight_bytes=max_in_flight_bytes, on_event=on_event)
                self.movers.append(mover)
                self._of_group[n].append(mover)
            cache.attach(self)
        except BaseException:
            self._close()
            raise

    def _open(self, kept: Sequence[Spec], names: Sequence[str], host: str | int, disk: str | Path) -> list[list[Tier]]:
        """Tiers of host memory and of a directory, for every kind of block."""
        options = [TierOption.parse(text) for text in [f"host:{host}"] * bool(host) + [f"disk:{disk}"] * bool(disk)]
        if not options:
            raise BadArgument('CacheTiers: it has no tiers. Give host="2GB", disk="DIR" or both; or open tiers and give tiers=.')
        opened = open_tiers(options, [BlockKind.of(spec) for spec in kept], names, pin_memory=self.cache.device.type == "cuda")
        self._own = [tier for mine in opened for tier in mine]
        return opened

    # --- what the cache calls ---------------------------------------------------------------------------------------------

    def offer(self, group: int, hashes: Sequence[bytes], blocks: BlockIds) -> None:
        try:
            for mover in self._of_group[group]:
                mover.offload(hashes, blocks.tolist())
        except Exception as error:  # the blocks are lost, and the cache goes on
            self.num_lost += len(hashes)
            self.error = str(error)

    def find(self, group: int, hashes: Sequence[bytes]) -> list[bool]:
        return [all(found) for found in zip(*(mover.has(hashes) for mover in self._of_group[group]), strict=True)]

    def load(self, group: int, hashes: Sequence[bytes], blocks: BlockIds) -> int:
        came = len(hashes)
        for mover in self._of_group[group]:
            came = min(came, mover.onboard(hashes[:came], blocks[:came].tolist()))
        return came

    # --- all of it --------------------------------------------------------------------------------------------------------

    @property
    def stats(self) -> MoverStats:
        """Of all groups together."""
        first, *others = (mover.stats for mover in self.movers)
        return sum(others, first)

    def shown(self) -> dict[str, str]:
        shown: dict[str, str] = {}
        for n, movers in enumerate(self._of_group):
            for i, mover in enumerate(movers):
                member = f" member {i}" * (len(movers) > 1)
                shown[f"group {self.cache.groups[n].name!r}{member}"] = (
                    ", then ".join(_tier_text(t) for t in mover.tiers) or "no tiers"
                )
        stats = self.stats
        shown["offloaded"] = f"{stats.offloaded} blocks, {byte_text(stats.offloaded_bytes)}"
        shown["loaded"] = f"{stats.onboarded} blocks, {byte_text(stats.onboarded_bytes)}"
        lost = self.num_lost + stats.dropped + stats.failed
        if lost:
            shown["lost"] = f"{lost} blocks" + f" ({self.error[:100]})" * bool(self.error)
        is_attached = self.cache.prefix is not None and self.cache.prefix.backing is self
        return {**shown, "state": "attached" if is_attached else "closed"}

    def tiers_of(self, group: int) -> list[tuple[Tier, ...]]:
        """Of each member of a group, the fastest first."""
        return [mover.tiers for mover in self._of_group[group]]

    def save(self) -> None:
        """Put what the cache and the faster tiers have into the last tier, where that outlives the process."""
        prefix = self.cache.prefix
        assert prefix is not None
        for group, movers in enumerate(self._of_group):
            names, blocks = prefix.named(group)
            for mover in movers:
                if mover.tiers[-1].is_lasting:
                    mover.save(names, blocks.tolist())

    def close(self) -> None:
        """Detach, wait for what is in flight, and close the tiers that were opened here, after they got what the cache has."""
        try:
            if self._own:
                self.save()
        except TierError as error:  # a full disk: what is computed again is no wrong answer
            self.error = str(error)
        if self.cache.prefix is not None and self.cache.prefix.backing is self:
            self.cache.attach(None)
        self._close()

    def _close(self) -> None:
        for mover in self.movers:
            mover.close()
        self._close_own()

    def _close_own(self) -> None:
        for tier in self._own:
            tier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _tier_text(tier: Tier) -> str:
    """Which tier, where, and how full. A remote one is not asked: it may not answer."""
    path, capacity = getattr(tier, "path", None), getattr(tier, "capacity_blocks", None)
    name = type(tier).__name__ if path is None else f"{type(tier).__name__} {path}"
    if tier.is_remote:
        return name
    blocks = tier.num_blocks
    full = f"{blocks} blocks" if capacity is None else f"{blocks} of {capacity} blocks"
    return f"{name}, {full}, {byte_text(blocks * tier.kind.num_bytes)}"


def buffers_of(cache: PagedCache, group: int, member: Member) -> tuple[list[Tensor], list[Spec]]:
    """A member's tensors, and the specs by which a conversion reads them. Layers are counted from 0."""
    spec = member.spec
    if not isinstance(spec, CacheSpec):
        handles = [cache.planes(i, group) for i in member.layers]
        if Layout.parse(spec.layout).has_layers_apart:
            specs = [spec.replaced(num_layers=len(handles), layer_start=0)]
        else:  # a layout with all layers in one allocation, of which each layer here has one of its own
            specs = [spec.replaced(layer_start=n) for n in range(len(handles))]
        return [t for layer in handles for t in layer.tensors], specs
    layers = [cache.layer(i) for i in member.layers]
    buffers = [t for layer in layers for t in layer.tensors]
    if num_buffers(spec) == num_cache_buffers(spec) and "layer" not in spec.layout:
        layout = f"layer {spec.layout}" if "|" in spec.layout else f"layer | {spec.layout}"
        return buffers, [replace(spec, layout=layout, num_layers=len(layers))]
    # Scales of each layer stand apart, so each is a shard.
    return buffers, [replace(spec, layer_start=n) for n in range(len(layers))]


def kept_specs(cache: PagedCache, model: str) -> list[Spec]:
    """How tiers keep each group's blocks, or each member's: every block in one run, in the format it has in the cache."""
    return [kept_spec(member, model) for group in cache.groups for member in group.members]


def kept_spec(member: Member, model: str) -> Spec:
    spec, fields = member.spec, {"num_blocks": 1, "num_layers": len(member.layers), "model": model or member.spec.model}
    if isinstance(spec, StateSpec):
        return spec.replaced(layout=spec.block_layout, layer_start=0, **fields)
    kv = spec.of_kv
    layout = "block | head layer kv token dim" if kv.num_planes == 2 else "block | layer token head dim"
    return kv.replaced(layout=layout, **fields)
