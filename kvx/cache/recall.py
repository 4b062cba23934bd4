"""Recall: what a prefix has more of in a cache's backing, brought back into its blocks.

A block gets its name here only when its bytes are there: whatever fails on the way leaves the cache as it was.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvx.cache.backing import Backing
from kvx.cache.blocks import BlockAllocator, BlockIds
from kvx.cache.group_table import GroupTable
from kvx.cache.names import BlockHash
from kvx.cache.prefix import PrefixCache, Stretch


class Recalled(NamedTuple):
    """What one group needs of the blocks that were chosen."""

    first: int  # before it none is needed
    ids: BlockIds  # from `first` on; -1 where the cache has none
    is_here: NDArray[np.bool_]


@dataclass
class Recall:
    """The blocks after a sequence's own, as far as a cache and its backing have them together. Used under the cache's lock.

    Whatever ends it early leaves references that are no sequence's: they are counted again then.
    """

    tables: Listing[GroupTable]
    prefix: PrefixCache
    backing: Backing
    names: list[BlockHash]  # of blocks after the first `done`
    done: int
    stretch: Stretch | None = None  # of the names, where somebody listens
    lost: list[set[BlockHash]] = field(init=False)  # of each group: the backing has them, and could not load them
    parts: list[Recalled] = field(default_factory=list)  # one a group
    held: list[tuple[BlockAllocator, BlockIds]] = field(default_factory=list)  # until they are a sequence's

    def __post_init__(self) -> None:
        self.lost = [set() for _ in self.tables]

    def run(self) -> int:
        """How many blocks more there are. `parts` has them, each with a reference."""
        while count := self._choose():
            if self._load():
                return count
            self._give_back()  # there is one less to choose from
        return 0

    def _choose(self) -> int:
        """The longest beginning of the names that can be had in every group and has room. `parts` is what it takes."""
        n, found = len(self.names), []
        lengths, fits = np.arange(n + 1), np.ones(n + 1, np.bool_)
        for i, table in enumerate(self.tables):
            ids = self.prefix.ids(i, self.names)
            is_there = self._is_there(i, ids)
            first = table.kind.first_needed(self.done + lengths, table.block_size) - self.done
            first = np.clip(first, 0, lengths)
            # Before each length: blocks that are nowhere, and those that would no longer be free or idle.
            absent = np.concatenate(([0], np.cumsum(~is_there)))
            taken = np.concatenate(([0], np.cumsum((ids < 0) | table.allocator.is_idle(ids))))
            fits &= absent[lengths] == absent[first]
            fits &= taken[lengths] - taken[first] <= table.allocator.num_available
            found.append((ids, first))
        m = int(np.flatnonzero(fits)[-1])
        parts = [(int(first[m]), ids[int(first[m]) : m].copy()) for ids, first in found]
        self.parts = [Recalled(first, ids, ids >= 0) for first, ids in parts]
        return m

    def _is_there(self, group: int, ids: BlockIds) -> NDArray[np.bool_]:
        """In the cache, or in its backing."""
        is_there, lost = ids >= 0, self.lost[group]
        asked = [j for j in np.flatnonzero(ids < 0) if self.names[j] not in lost]
        if asked:
            is_there[asked] = self.backing.find(group, [self.names[j] for j in asked])
        return is_there

    def _load(self) -> bool:
        """Hold and fill the blocks: whether all came. One that does not is `lost`."""
        for part, table in zip(self.parts, self.tables, strict=True):
            # First: what is allocated next may evict idle ones.
            self.held.append((table.allocator, table.allocator.retain_checked(part.ids[part.is_here])))
        return all(self._load_group(i) for i in range(len(self.parts)))

    def _load_group(self, group: int) -> bool:
        part, allocator = self.parts[group], self.tables[group].allocator
        absent = [self.names[part.first + int(j)] for j in np.flatnonzero(~part.is_here)]
        if not absent:
            return True
        self.held.append((allocator, allocator.allocate_checked(len(absent))))
        part.ids[~part.is_here] = new = self.held[-1][1]
        if self.prefix.hears_requests:
            self.prefix.tell_loading(group, absent, new)
        came = self.backing.load(group, absent, new)
        self.prefix.put_checked(group, absent[:came], new[:came], self.stretch)
        self.lost[group].update(absent[came : came + 1])
        return came == len(absent)

    def _give_back(self) -> None:
        while self.held:
            allocator, ids = self.held.pop()
            allocator.release_checked(ids)
