"""Fetch: blocks asked of all tiers at once, each of the fastest that has it. They are read while the caller does other things."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvx.errors import KvxError
from kvx.tiers.block import Block
from kvx.tiers.memory import HostMemory
from kvx.tiers.tier import Tier

DEMOTED = -1  # the source of a block that was between two tiers
_PIECES = 4  # a batch is one thread's work in its tier, so one that is read is cut

Ask = Callable[[Tier, list[bytes]], list[bool]]


class Fetch:
    def __init__(
        self,
        names: Sequence[bytes],
        tiers: Sequence[Tier],
        memory: HostMemory,  # where the blocks will lie
        demoted: Callable[[bytes], Block | None],
        has: Ask,
    ) -> None:
        self._names, self._tiers, self._memory, self._demoted = list(names), tiers, memory, demoted
        self._found: list[Block | None] = [None] * len(names)
        self.sources = [DEMOTED] * len(names)  # the number of the tier that a block came from, or DEMOTED
        self._reads: list[tuple[list[int], Future[list[Block | None]]]] = []
        missing = []
        for i, name in enumerate(names):
            self._found[i] = self._in_demotion(name)
            if self._found[i] is None:
                missing.append(i)
        for number, tier in enumerate(tiers):
            if not missing:
                break
            there = has(tier, [names[i] for i in missing])
            mine = [i for i, h in zip(missing, there, strict=True) if h]
            missing = [i for i, h in zip(missing, there, strict=True) if not h]
            for i in mine:
                self.sources[i] = number
            self._reads += self._start(tier, mine)

    def result(self) -> list[Block | None]:
        """Block by block; after the first that is not to be had, some may be missing that are there."""
        for places, read in self._reads:
            for i, block in zip(places, _blocks(read, len(places)), strict=True):
                self._found[i] = block
        for i, block in enumerate(self._found):
            if block is None and not self._find_again(i):
                break
        return self._found

    def _start(self, tier: Tier, places: list[int]) -> list[tuple[list[int], Future[list[Block | None]]]]:
        is_ours = getattr(tier, "memory", None) is self._memory
        size = max(1, len(places) if is_ours else -(-len(places) // _PIECES))
        reads = []
        for start in range(0, len(places), size):
            part = places[start : start + size]
            into = None if is_ours else self._memory.take(len(part))
            reads.append((part, _get(tier, [self._names[i] for i in part], into)))
        return reads

    def _find_again(self, i: int) -> bool:
        """One that a tier had a moment ago, or has damaged: it may be on its way down, or in a slower tier."""
        self._found[i], self.sources[i] = self._in_demotion(self._names[i]), DEMOTED
        for number, tier in enumerate(self._tiers):
            if self._found[i] is None:
                for _, read in self._start(tier, [i]):
                    (self._found[i],) = _blocks(read, 1)
                self.sources[i] = number
        return self._found[i] is not None

    def _in_demotion(self, name: bytes) -> Block | None:
        block = self._demoted(name)
        if block is None or self._memory.place(block) is not None:
            return block
        (here,) = self._memory.take(1)
        for to, t in zip(here.buffers, block.buffers, strict=True):
            to.copy_(t)
        return here


def _get(tier: Tier, names: list[bytes], into: list[Block] | None) -> Future[list[Block | None]]:
    """At once where nothing is to be copied."""
    now: Future[list[Block | None]] = Future()
    try:
        if into is not None:
            return tier.get(names, into)
        now.set_result(tier.get_now(names))
    except (KvxError, OSError, RuntimeError) as error:
        now.set_exception(error)
    return now


def _blocks(read: Future[list[Block | None]], n: int) -> list[Block | None]:
    """What was read; none where the tier fails: the blocks are computed again then."""
    error = read.exception()
    if error is None:
        return read.result()
    if not isinstance(error, (KvxError, OSError, RuntimeError)):
        raise error
    return [None] * n
