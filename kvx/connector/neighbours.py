"""Blocks that others wrote of the same tokens: under another engine's names, in other sizes, of other ranks.

An engine that has the tokens can make every name that a store has for them. So it takes over what it lacks, converted into blocks
of its own kind, and leaves a record (an alias) where an engine that has no tokens will look. docs/store.md has both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvx.connector.store_kinds import Family, OtherKinds, is_plain
from kvx.connector.store_names import Alias, Scheme, alias_kind, aliases, state_names, write_alias
from kvx.connector.tier_stack import TierStack
from kvx.errors import KvxError
from kvx.handover import names as rule_names
from kvx.layout.buffers import allocate_buffers
from kvx.ops.move.convert import convert
from kvx.spec import CacheSpec, Spec, StateSpec
from kvx.tiers import Block, CacheTiers, DiskTier, TierOption
from kvx.tiers.option import DISK_BYTES

# The names that an engine gives a sequence's full blocks of so many tokens.
Namer = Callable[[ArrayLike, int], list[bytes]]
NamerOf = Callable[[str], Namer | None]
_LOGGER = logging.getLogger("kvx")
_AT_ONCE = 64  # blocks that are in memory together


class Neighbours:
    """Of one part and one rank. What fails is logged, and as if it was not there."""

    def __init__(
        self,
        options: Sequence[TierOption],  # those that the stack was opened from
        stack: TierStack,
        spec: Spec,  # of one of its blocks
        *,
        namer_of: NamerOf,  # of engines that have hashes of their own, by what their kinds say
        block_size: int = 0,  # of states, whose spec does not say it: tokens between their names
        logger: logging.Logger = _LOGGER,
    ) -> None:
        self._stack, self._spec, self._logger = stack, spec, logger
        self._namer_of, self._size = namer_of, block_size or spec.block_size
        self._kinds = OtherKinds(options, stack.kind, spec, Scheme("", self._size))
        self._records: dict[object, DiskTier] = {}

    def take_over(self, tokens: Sequence[int], names: Sequence[bytes], first: int = 0) -> int:
        """How many of a sequence's blocks, which have these names here, came to the stack from others; of those from `first` on."""
        try:
            return sum(self._take(family, tokens, names, first) for family in self._kinds.every_family())
        except (KvxError, OSError) as error:
            self._logger.warning("KVX did not take over blocks that another engine wrote: %s", error)
            return 0

    def _take(self, family: Family, tokens: Sequence[int], names: Sequence[bytes], first: int) -> int:
        # A block that was rounded must not come under a name of blocks that were not.
        if any([p.format for p in s.planes] != [p.format for p in self._spec.planes] for s in family.specs):
            return 0
        wanted_here = names[first:]
        missing = [name for name, has in zip(wanted_here, self._stack.has_any(wanted_here), strict=True) if not has]
        if isinstance(self._spec, StateSpec):
            return self._take_states(family, tokens, names, set(missing)) if missing else 0
        theirs = self._names(family.scheme, tokens) if missing else []
        there = dict(zip(theirs, family.has(theirs), strict=True)) if theirs else {}
        lead = aliases(names, self._size, theirs, family.scheme.block_size)
        wanted = [(name, lead[name]) for name in missing if name in lead and all(there[n] for n in lead[name].names)]
        for start in range(0, len(wanted), _AT_ONCE):
            made = dict(self._converted(family, wanted[start : start + _AT_ONCE]))
            self._stack.put(list(made), list(made.values()))
        return len(wanted)

    def _take_states(self, family: Family, tokens: Sequence[int], names: Sequence[bytes], missing: set[bytes]) -> int:
        """States that stand where a block ends here and there. Under KVX's names, blocks of any size may have named them."""
        taken, is_own = 0, family.tiers[0].kind.text == self._stack.kind.text
        sizes = [family.scheme.block_size] if family.scheme.block_size else self._kinds.rule_sizes()
        for size in (size for size in sizes if not (is_own and size == self._size)):
            theirs = state_names(self._names(Scheme(family.scheme.names, size), tokens), size, self._size)
            mine = state_names(names, self._size, size)
            both = [(mine[end], theirs[end]) for end in mine if end in theirs and mine[end] in missing]
            has = family.has([there for _, there in both])
            wanted = [(name, Alias(0, (there,))) for (name, there), ok in zip(both, has, strict=True) if ok]
            made = dict(self._converted(family, wanted))
            self._stack.put(list(made), list(made.values()))
            missing -= set(made)
            taken += len(made)
        return taken

    def _names(self, scheme: Scheme, tokens: Sequence[int]) -> list[bytes]:
        """None of a scheme that nobody here can make."""
        if not scheme.names:
            return rule_names(tokens, scheme.block_size, self._spec.model)
        namer = self._namer_of(scheme.names)
        return [] if namer is None else namer(tokens, scheme.block_size)

    def _converted(self, family: Family, wanted: Sequence[tuple[bytes, Alias]]) -> Iterator[tuple[bytes, Block]]:
        for name, alias in wanted:
            found = family.get(alias.names)
            if None in found:  # it left, or is damaged
                continue
            shards = zip(*(blocks for blocks in found if blocks is not None), strict=True)
            into = allocate_buffers(self._spec)
            src, dst = ([0], [0]) if isinstance(self._spec, StateSpec) else alias.tables(self._size, family.scheme.block_size)
            p = family.plan(len(alias.names), self._spec)
            convert([b.buffers[0] for shard in shards for b in shard], into, plan=p, src_blocks=src, dst_blocks=dst)
            yield name, self._stack.kind.block(into)

    def lead(self, tokens: Sequence[int], names: Sequence[bytes], *, are_coming: bool = False) -> int:
        """How many records were written that lead from other engines' names of these tokens to blocks that are here.

        With `are_coming` to all of them: who writes blocks on eviction has no tokens then. One that never came is a miss.
        """
        try:
            return sum(self._lead(scheme, tokens, names, are_coming) for scheme in self._kinds.schemes() if scheme.names)
        except (KvxError, OSError) as error:
            self._logger.warning("KVX did not write the names under which another engine would find its blocks: %s", error)
            return 0

    def _lead(self, scheme: Scheme, tokens: Sequence[int], names: Sequence[bytes], are_coming: bool) -> int:
        there = [] if are_coming else self._stack.has_any(names)
        is_state = isinstance(self._spec, StateSpec)
        names = names[: there.index(False)] if False in there and not is_state else names
        pages = self._names(scheme, tokens[: len(names) * self._size])
        found = aliases(pages, scheme.block_size, names, self._size)
        if is_state:  # of pages that end where one stands
            here = dict(zip(names, there, strict=True))
            ends = {page: alias.end_name(scheme.block_size, self._size) for page, alias in found.items()}
            found = {page: found[page] for page, end in ends.items() if end is not None and here.get(end)}
        written = 0
        for folder, tiers in self._kinds.schemes()[scheme].items():
            has = zip(*(tier.has_now(list(found)) for tier in tiers), strict=True)
            wanted = [page for page, own in zip(found, has, strict=True) if not all(own)]  # their own pages, of every rank
            kind = alias_kind(self._spec.model, scheme, Scheme("", self._size))
            if (folder, scheme) not in self._records:
                self._records[folder, scheme] = DiskTier(folder / kind.digest.hex(), kind, _RECORDS_BYTES, threads=1)
            tier = self._records[folder, scheme]
            new = [page for page, old in zip(wanted, tier.has_now(wanted), strict=True) if not old]
            tier.put_now(new, [write_alias(kind, found[page]) for page in new])
            written += len(new)
        return written

    def close(self) -> None:
        self._kinds.close()
        for tier in self._records.values():
            tier.close()


class CacheNeighbours:
    """What others wrote, for a PagedCache on CacheTiers: a Finder of the cache's, by the tiers that are directories of a store.

    Of a cache with one group, whose folder says all by its digest. Of one with several nothing is found: their folders are named by
    the cache's groups, which no other engine has.
    """

    def __init__(self, tiers: CacheTiers, *, namer_of: NamerOf, logger: logging.Logger = _LOGGER) -> None:
        self._tiers, self._one = tiers, None
        mover, folders = tiers.movers[0], [t for t in tiers.movers[0].tiers if isinstance(t, DiskTier)]
        options = [TierOption("disk", DISK_BYTES, t.path.parent) for t in folders if is_plain(t.path, t.kind)]
        if len(tiers.movers) == 1 and options and isinstance(mover.kept, CacheSpec):
            stack = TierStack(mover.kind, mover.tiers)
            self._one, self._spec = Neighbours(options, stack, mover.kept, namer_of=namer_of, logger=logger), mover.kept
            tiers.cache.attach(tiers, finder=self)

    def look(self, tokens: NDArray[np.int32], hashes: Sequence[bytes], first: int) -> None:
        if self._one is None:
            return
        ids, names = tokens.tolist(), list(hashes)
        self._one.take_over(ids, names, first)
        # Records lead to KVX's names: a cache whose names begin with another salt than the model has none of those.
        if rule_names(ids[: self._spec.block_size], self._spec.block_size, self._spec.model) == names[:1]:
            self._one.lead(ids, names, are_coming=True)

    def close(self) -> None:
        """The cache goes on without it."""
        prefix = self._tiers.cache.prefix
        if prefix is not None and prefix.finder is self:
            prefix.finder = None
        if self._one is not None:
            self._one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_RECORDS_BYTES = 1000**3  # of a folder of records: a quarter of a million pages
