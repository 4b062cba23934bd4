"""Residency: which block of a cache and its tiers is where, and what changed since it was told, as records of vLLM's KV events.

An event of the cache or of a tier is a reason to look again, and what is told is what was seen. So events that come in another
order, twice or not at all make nothing wrong: every change is followed by an event, and the last look sees it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvx.cache.kinds import Chunked, Full, GroupKind, Latent, Sliding, State
from kvx.cache.names import BlockHash
from kvx.cache.paged import PagedCache
from kvx.cache.prefix import Stretch
from kvx.errors import BadArgument, KvxError

Record = dict[str, Any]  # a BlockStored, BlockRemoved or AllBlocksCleared, as vLLM encodes it
CLEARED: Record = {"type": "AllBlocksCleared"}
# The memory that is computed on, as vLLM names it whatever the device: on a CPU too. "CPU" is the host tier's, which keeps a block
# that the cache has evicted; one name for both would have the eviction remove the other's.
DEVICE = "GPU"
_MOST_DEPARTED = 1 << 16  # blocks that nothing has, whose tokens are still known: they may be on their way to a tier


class KnownTier(Protocol):
    """What is asked of a kvx.tiers.Tier."""

    medium: str
    is_remote: bool

    def names(self) -> list[bytes]: ...
    def has_now(self, keys: Sequence[bytes]) -> list[bool]: ...
    def listen(self, on_event: Callable[[Any], None]) -> None: ...
    def unlisten(self, on_event: Callable[[Any], None]) -> None: ...


class KnownTiers(Protocol):
    """What is asked of a kvx.tiers.CacheTiers."""

    cache: PagedCache

    def tiers_of(self, group: int) -> Sequence[Sequence[KnownTier]]: ...


class Origin(NamedTuple):
    """What a block's name is made of."""

    parent: BlockHash  # b"": it is the first of a sequence
    tokens: bytes
    extra_keys: tuple[Any, ...] | None


class Holder(NamedTuple):
    """One of the stores that have blocks of a group: the cache, or a tier of a member of the group."""

    group: int
    bit: int
    tier: KnownTier | None  # None: the cache


class _Medium(NamedTuple):
    name: str
    locality: str | None
    masks: tuple[int, ...]  # of each member the bits of its holders: a block is there when each has one


class _Group(NamedTuple):
    fields: Record  # that say what its blocks are
    media: tuple[_Medium, ...]
    bits: dict[BlockHash, int]  # the holders that have a block, by its name


class Residency:
    """Not thread-safe: one thread looks and tells."""

    def __init__(self, cache: PagedCache, tiers: KnownTiers | None = None) -> None:
        if cache.prefix is None:
            raise BadArgument("publish(): this cache has no names for its blocks. Make it with prefix=True.")
        if tiers is not None and tiers.cache is not cache:
            raise BadArgument("publish(): tiers are another cache's. Give those that are attached to this one.")
        self._prefix, self._block_size = cache.prefix, cache.block_size
        self._origins: dict[BlockHash, Origin] = {}  # of what is anywhere; names are of tokens, so groups share them
        self._departed: OrderedDict[BlockHash, Origin] = OrderedDict()  # of what is nowhere now
        self.error = ""  # why a tier could not be looked at; who looks again clears it
        self._groups: list[_Group] = []
        self._device: list[Holder] = []
        self.holders: list[Holder] = []
        for n, kind in enumerate(cache.kinds):
            found: dict[tuple[str, str | None], list[int]] = {(DEVICE, None): [1]}
            self._device.append(Holder(n, 1, None))
            self.holders.append(self._device[-1])
            members = [] if tiers is None else tiers.tiers_of(n)
            for m, member in enumerate(members):
                for tier in member:
                    bit = 1 << sum(holder.group == n for holder in self.holders)
                    self.holders.append(Holder(n, bit, tier))
                    key = tier.medium, "REMOTE" if tier.is_remote else "LOCAL"
                    found.setdefault(key, [0] * len(members))[m] |= bit
            media = tuple(_Medium(name, locality, tuple(masks)) for (name, locality), masks in found.items())
            self._groups.append(_Group(_kind_fields(n, kind), media, {}))

    def cache_holder(self, group: int) -> Holder:
        """The cache's own blocks."""
        return self._device[group]

    def learn(self, stretch: Stretch) -> list[Record]:
        """The tokens of these names. Blocks that were told without them are told again."""
        size, bs, parent, again = 4 * self._block_size, self._block_size, stretch.parent, []
        for i, name in enumerate(stretch.names):
            if name not in self._origins:
                begin = stretch.first + i * bs
                here = [(extra, at - begin) for at, extra in stretch.extras if begin <= at < begin + bs]
                keys = ((stretch.extra,) if stretch.extra else ()) + tuple(here)
                origin = Origin(parent, stretch.tokens[i * size : (i + 1) * size], keys or None)
                if any(name in group.bits for group in self._groups):
                    self._origins[name] = origin
                    again.append(name)
                else:
                    self._depart(name, origin)
            parent = name
        records = _Records()
        for n, group in enumerate(self._groups):
            for medium in group.media:
                for name in again:
                    if _is_in(medium, group.bits.get(name, 0)):
                        self._tell_stored(records, n, medium, name)
        return records.all

    def look(self, holder: Holder, names: Sequence[BlockHash], now: bool | None = None) -> list[Record]:
        """What changed of these blocks. `now` says whether the holder has them, where that is known; else it is asked."""
        if now is not None:
            there: Iterable[bool] = [now] * len(names)
        elif holder.tier is not None:
            try:
                there = holder.tier.has_now(names)
            except (KvxError, OSError, RuntimeError) as error:
                self.error = f"{type(holder.tier).__name__} cannot be asked: {error}"
                return []
        else:
            there = (self._prefix.ids(holder.group, names) >= 0).tolist()
        records, group = _Records(), self._groups[holder.group]
        for name, is_there in zip(names, there, strict=True):
            before = group.bits.get(name, 0)
            after = before | holder.bit if is_there else before & ~holder.bit
            if before != after:
                self._move(holder.group, name, before, after, records)
        return records.all

    def look_everywhere(self, *, is_clear: bool = False) -> list[Record]:
        """What changed of all blocks. `is_clear`: the cache forgot its names, and tiers were not touched."""
        records: list[Record] = []
        for holder in self.holders:
            if is_clear and holder.tier is not None:
                continue
            names = self._prefix.named(holder.group)[0] if holder.tier is None else holder.tier.names()
            bits = self._groups[holder.group].bits
            known = [name for name, at in bits.items() if at & holder.bit]
            records += self.look(holder, list(dict.fromkeys([*known[::-1], *names])))
        if is_clear and records and not any(group.bits for group in self._groups):
            return [CLEARED]
        return records

    def resident(self) -> dict[tuple[int, str], set[BlockHash]]:
        """What was told: the names of each group and medium."""
        return {
            (n, medium.name): {name for name, bits in group.bits.items() if _is_in(medium, bits)}
            for n, group in enumerate(self._groups)
            for medium in group.media
        }

    def _move(self, n: int, name: BlockHash, before: int, after: int, records: _Records) -> None:
        group = self._groups[n]
        if after:
            group.bits[name] = after
            if name in self._departed:
                self._origins[name] = self._departed.pop(name)
        for medium in group.media:
            was, is_now = _is_in(medium, before), _is_in(medium, after)
            if is_now and not was:
                self._tell_stored(records, n, medium, name)
            elif was and not is_now:
                records.remove(n, medium, name)
        if not after:
            del group.bits[name]
            if name in self._origins and not any(name in other.bits for other in self._groups):
                self._depart(name, self._origins.pop(name))

    def _depart(self, name: BlockHash, origin: Origin) -> None:
        self._departed[name] = origin
        self._departed.move_to_end(name)
        if len(self._departed) > _MOST_DEPARTED:
            self._departed.popitem(last=False)

    def _tell_stored(self, records: _Records, n: int, medium: _Medium, name: BlockHash) -> None:
        records.store(self._groups[n].fields, medium, name, self._origins.get(name), self._block_size)


class _Records:
    """Changes one after the other; those that continue the last record join it."""

    def __init__(self) -> None:
        self.all: list[Record] = []

    def store(self, fields: Record, medium: _Medium, name: BlockHash, origin: Origin | None, block_size: int) -> None:
        tokens = [] if origin is None else np.frombuffer(origin.tokens, "<i4").tolist()
        keys = None if origin is None else origin.extra_keys
        last = self.all[-1] if self.all else {}
        if (
            origin is not None
            and last.get("type") == "BlockStored"
            and last["block_hashes"][-1] == origin.parent
            and last["token_ids"]
            and (last["medium"], last.get("locality"), last["group_idx"]) == (medium.name, medium.locality, fields["group_idx"])
            and ("extra_keys" in last) == (keys is not None)
        ):
            last["block_hashes"].append(name)
            last["token_ids"] += tokens
            if keys is not None:
                last["extra_keys"].append(keys)
            return
        self.all.append(
            {
                "type": "BlockStored",
                "block_hashes": [name],
                "parent_block_hash": None if origin is None or not origin.parent else origin.parent,
                "token_ids": tokens,
                "block_size": 0 if origin is None else block_size,  # as vLLM says it of blocks whose tokens it does not know
                "lora_id": None,
                "medium": medium.name,
                "lora_name": None,
                **({} if keys is None else {"extra_keys": [keys]}),
                **fields,
                **({} if medium.locality is None else {"locality": medium.locality}),
            }
        )

    def remove(self, n: int, medium: _Medium, name: BlockHash) -> None:
        last = self.all[-1] if self.all else {}
        where = medium.name, medium.locality, n
        if last.get("type") == "BlockRemoved" and (last["medium"], last.get("locality"), last["group_idx"]) == where:
            last["block_hashes"].append(name)
            return
        record = {"type": "BlockRemoved", "block_hashes": [name], "medium": medium.name, "group_idx": n}
        self.all.append(record if medium.locality is None else {**record, "locality": medium.locality})


def _is_in(medium: _Medium, bits: int) -> bool:
    return all(bits & mask for mask in medium.masks)


def _kind_fields(n: int, kind: GroupKind) -> Record:
    """What vLLM says of a group: its number, its kind by the name that vLLM has for it, and the window of one that slides."""
    names: dict[type[GroupKind], str] = {
        Full: "full_attention",
        Sliding: "sliding_window",
        Chunked: "chunked_local_attention",
        State: "mamba",
        Latent: "sliding_window_mla" if kind.window else "mla_attention",
    }
    name = next((name for known, name in names.items() if isinstance(kind, known)), "unknown")
    fields: Record = {"group_idx": n, "kv_cache_spec_kind": name}
    return {**fields, "kv_cache_spec_sliding_window": kind.window} if kind.window else fields
