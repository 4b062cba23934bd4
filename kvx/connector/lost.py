"""Blocks that were there when they were counted, and not when they were read. The engine is told; nothing computed on them
is saved.

LostLoads is the worker's and covers the steps that were scheduled before it knew. WrongBlocks is the scheduler's, from then on.
Both go by memory, not by requests: requests end, are preempted and share blocks, and vLLM 0.32 leaves wrong blocks in its own
prefix cache when one ends before it was computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from kvx.connector.jobs import NULL, Job

_LOGGER = logging.getLogger("kvx")
# For each number the least of all ranks whose loss makes this one's K and V wrong. All call it with as many, or wait for ever.
Agree = Callable[[list[int]], list[int]]


class Lost(NamedTuple):
    job: Job
    first: int  # its first token that did not come, to some rank


class _Unheard(NamedTuple):
    """A loss that the scheduler does not know of."""

    told: frozenset[int]  # blocks that the engine is told of: what was to be loaded, from the first loss on
    wrong: frozenset[int]  # those, and what the step computed on them


class LostLoads:
    """What a worker loaded in vain. Of a model with one group."""

    def __init__(
        self,
        *,
        engine_size: int,
        tier_size: int,
        agree: Agree = list,  # of one rank
        logger: logging.Logger = _LOGGER,
        is_all_or_none: bool = False,  # the engine cannot go on after a part of a load: what is lost of one loses all of it
    ) -> None:
        self._engine_size, self._tier_size, self._agree = engine_size, tier_size, agree
        self._is_all_or_none, self._logger = is_all_or_none, logger
        self._failed: set[int] = set()
        self._unheard: list[_Unheard] = []

    def load(
        self,
        jobs: Sequence[Job],
        load: Callable[[Job], list[int]],  # gives the places of a job's names that were not to be had
        *,
        tables: Iterable[Sequence[int]] = (),  # of all requests that begin in this step: they may share what is loaded
    ) -> list[Lost]:
        """Load a step's jobs, which all ranks have.

        A rank to which all came has wrong activations, once another's K and V are wrong: what is lost to one is lost to all.
        """
        if not jobs:
            return []
        firsts = self._agree([self._first_lost(job, load) for job in jobs])
        lost = [Lost(job, first) for job, first in zip(jobs, firsts, strict=True) if first < job.end]
        for job, first in lost:
            start, end = first // self._engine_size, -(-job.end // self._engine_size)
            told = frozenset(job.blocks[0][start:end]) - {NULL}
            self._failed |= told
            self._unheard.append(_Unheard(told, told.union(*(_from_first(table, told) for table in [job.blocks[0], *tables]))))
        return lost

    def _first_lost(self, job: Job, load: Callable[[Job], list[int]]) -> int:
        try:
            missing = load(job)
        except Exception as error:  # raised here, it would leave the other ranks waiting for this one's word
            self._logger.warning("KVX could not load blocks of request %s: %r", job.request, error)
            return job.first
        if not missing:
            return job.end
        if self._is_all_or_none:
            return job.first
        return max(job.first, (job.first_name(self._tier_size) + min(missing)) * self._tier_size)

    def take_failed(self) -> set[int]:
        """Blocks that the engine is to be told of, once."""
        failed, self._failed = self._failed, set()
        return failed

    def is_wrong(self, job: Job) -> bool:
        """Whether a save's tokens were computed on what did not come: their K and V are wrong, and their names are right."""
        table = job.blocks[0][: -(-job.end // self._engine_size)]  # with all that its tokens were computed on
        return any(not lost.wrong.isdisjoint(table) for lost in self._unheard)

    def heard(self, failed: Collection[int]) -> None:
        """The scheduler knows of these, in this step and those that follow: WrongBlocks leaves out their saves."""
        self._unheard = [lost for lost in self._unheard if not lost.told <= frozenset(failed)]


class WrongBlocks:
    """The engine's blocks with wrong K and V, until they are written again from their first token to their last."""

    def __init__(self, engine_size: int) -> None:
        self._engine_size = engine_size
        self._right: dict[int, int] = {}  # block -> how many of its first tokens were written again

    def __len__(self) -> int:
        return len(self._right)

    def lost(self, failed: Collection[int], tables: Iterable[Sequence[int]]) -> None:
        """The engine was told that these did not come. `tables` are those of all requests."""
        self._add(failed)
        for table in tables:
            self._add(_from_first(table, failed))

    def is_right(self, table: Sequence[int], first: int, end: int) -> bool:
        """A step loads or computes tokens `first` to `end` of this table: whether all before them is right, and so they."""
        if not self._right:
            return True
        size = self._engine_size
        before, written = table[: -(-first // size)], table[first // size : -(-end // size)]
        if any(self._right.get(block, size) < min(size, first - n * size) for n, block in enumerate(before)):
            self._add(written)
            return False
        for n, block in enumerate(written, first // size):
            if end >= (n + 1) * size:
                self._right.pop(block, None)
            elif block in self._right:
                self._right[block] = end - n * size
        return True

    def _add(self, blocks: Iterable[int]) -> None:
        self._right.update((block, 0) for block in blocks if block != NULL)


def _from_first(table: Sequence[int], failed: Collection[int]) -> Sequence[int]:
    """The table from its first failed block on: what follows was computed on that."""
    return table[next((n for n, block in enumerate(table) if block in failed), len(table)) :]
