"""Backing: where blocks go that leave a cache, and come from when a prefix is asked for again. kvx/tiers implements it.

The cache offers what it is about to overwrite, and asks for what follows its own prefix. A block gets its name here only when its
bytes are there: whatever fails on the way leaves the cache as it was.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvx.cache.blocks import BlockAllocator, BlockIds
from kvx.cache.names import BlockHash

if TYPE_CHECKING:
    from kvx.cache.paged import PagedCache
    from kvx.cache.prefix import PrefixCache
    from kvx.cache.sequence import Sequence


class Backing(Protocol):
    def offer(self, group: int, hashes: Listing[BlockHash], blocks: BlockIds) -> None:
        """These blocks are about to be overwritten: read them, in the order of the stream, before returning. Never raises."""

    def find(self, group: int, hashes: Listing[BlockHash]) -> Listing[bool]:
        """Which of these it has."""

    def load(self, group: int, hashes: Listing[BlockHash], blocks: BlockIds) -> int:
        """Fill these blocks, in the order of the stream: how many of the first are right now. A damaged one ends it."""


def bring_back(cache: PagedCache, prefix: PrefixCache, backing: Backing, seq: Sequence) -> int:
    """The blocks after those of a sequence just admitted, as far as the cache and its backing have them together: how many.

    Called under the cache's lock. Whatever ends it early leaves references that are no sequence's: they are counted again then.
    """
    bs, done = cache.block_size, seq.length // cache.block_size
    names = seq._hashes[done : max(0, seq.num_tokens - 1) // bs]
    recall = _Recall(cache, prefix, backing, names, done, [set() for _ in cache.allocators])
    try:
        while count := recall.choose():
            if recall.load():
                for i, part in enumerate(recall.parts):
                    cache._hold_after(seq, i, done + part.first, part.ids)
                length = (done + count) * bs
                seq.length = seq.num_cached = seq._limit = seq._num_stored = length
                prefix.stats.tokens_brought += count * bs
                return count
            recall.give_back()  # there is one less to choose from
        return 0
    except BaseException:
        cache._guard.is_torn = True
        cache._guard.mend()
        raise


class _Part(NamedTuple):
    """What one group needs of the blocks that were chosen."""

    first: int  # before it a window needs none
    ids: BlockIds  # from `first` on; -1 where the cache has none
    is_here: NDArray[np.bool_]


@dataclass
class _Recall:
    cache: PagedCache
    prefix: PrefixCache
    backing: Backing
    names: list[BlockHash]  # of blocks after the first `done`
    done: int
    lost: list[set[BlockHash]]  # of each group: the backing has them, and could not load them
    parts: list[_Part] = field(default_factory=list)  # one a group
    held: list[tuple[BlockAllocator, BlockIds]] = field(default_factory=list)  # until they are a sequence's

    def choose(self) -> int:
        """The longest beginning of the names that can be had in every group and has room. `parts` is what it takes."""
        n, bs = len(self.names), self.cache.block_size
        lengths, fits = np.arange(n + 1), np.ones(n + 1, np.bool_)
        found = []
        for i, (group, allocator) in enumerate(zip(self.cache._groups, self.cache.allocators, strict=True)):
            ids = self.prefix.ids(i, self.names)
            is_there = self._is_there(i, ids)
            first = np.array([group.first_block((self.done + m) * bs) - self.done for m in range(n + 1)])
            first = np.clip(first, 0, lengths)
            # Before each length: blocks that are nowhere, and those that would no longer be free or idle.
            absent = np.concatenate(([0], np.cumsum(~is_there)))
            taken = np.concatenate(([0], np.cumsum((ids < 0) | allocator.is_idle(ids))))
            fits &= absent[lengths] == absent[first]
            fits &= taken[lengths] - taken[first] <= allocator.num_available
            found.append((ids, first))
        m = int(np.flatnonzero(fits)[-1])
        parts = [(int(first[m]), ids[int(first[m]) : m].copy()) for ids, first in found]
        self.parts = [_Part(first, ids, ids >= 0) for first, ids in parts]
        return m

    def _is_there(self, group: int, ids: BlockIds) -> NDArray[np.bool_]:
        """In the cache, or in its backing."""
        is_there, lost = ids >= 0, self.lost[group]
        asked = [j for j in np.flatnonzero(ids < 0) if self.names[j] not in lost]
        if asked:
            is_there[asked] = self.backing.find(group, [self.names[j] for j in asked])
        return is_there

    def load(self) -> bool:
        """Hold and fill the blocks: whether all came. One that does not is `lost`."""
        for part, allocator in zip(self.parts, self.cache.allocators, strict=True):
            # First: what is allocated next may evict idle ones.
            self.held.append((allocator, allocator.retain_checked(part.ids[part.is_here])))
        return all(self._load(i) for i in range(len(self.parts)))

    def give_back(self) -> None:
        while self.held:
            allocator, ids = self.held.pop()
            allocator.release_checked(ids)

    def _load(self, group: int) -> bool:
        part, allocator = self.parts[group], self.cache.allocators[group]
        absent = [self.names[part.first + int(j)] for j in np.flatnonzero(~part.is_here)]
        if not absent:
            return True
        self.held.append((allocator, allocator.allocate_checked(len(absent))))
        part.ids[~part.is_here] = new = self.held[-1][1]
        came = self.backing.load(group, absent, new)
        self.prefix.put_checked(group, absent[:came], new[:came])
        self.lost[group].update(absent[came : came + 1])
        return came == len(absent)
