"""An engine's calls of a store: several blocks at once, on threads, in bounded time. What fails is logged, and a miss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from kvx.connector.block_store import BlockStore, StoredBlock
from kvx.connector.bounded import Bounded, Lease
from kvx.tiers import Block

R = TypeVar("R")
Release = Callable[[Sequence[int]], object]  # of the names of a call, by number
_THREADS = 4
_MOST_BYTES = 128 << 20


class StoreCalls:
    """Reads, looks and writes wait for each other no more than they must: a disk that hangs for one may answer another."""

    def __init__(self, *, timeout_s: float, logger: logging.Logger) -> None:
        self._logger = logger
        self._reads, self._looks, self._writes = (
            Bounded(what, timeout_s=timeout_s, threads=threads, logger=logger)
            for what, threads in (("get", _THREADS), ("exists", 1), ("set", _THREADS))
        )

    def safely(self, what: str, call: Callable[[], R], miss: R) -> R:
        try:
            return call()
        except Exception as error:  # an engine goes on without its store, whatever happens there
            self._logger.warning("KVX %s failed, which counts as a miss: %s: %s", what, type(error).__name__, error)
            return miss

    def has(self, store: BlockStore, names: Sequence[bytes]) -> list[bool]:
        (found,) = self._looks.run([lambda: store.has(names)])
        return found or [False] * len(names)

    def fetch(
        self,
        store: BlockStore,
        names: Sequence[bytes],
        into: Sequence[Block] | None = None,  # the engine's memory, lent; None: the store's
        release: Release = lambda which: None,  # of what was lent, for every answer that is None
    ) -> list[StoredBlock | None]:
        parts = _parts(len(names))
        jobs = [partial(store.fetch, names[part], into and into[part]) for part in parts]
        found: list[StoredBlock | None] = []
        for part, came in zip(parts, self._lending(self._reads, jobs, parts, release), strict=True):
            here = range(part.start, part.stop)
            found += came or [None] * len(here)
            if came is not None and (missing := [n for n, block in zip(here, came, strict=True) if block is None]):
                release(missing)
        return found

    def put(
        self,
        store: BlockStore,
        names: Sequence[bytes],
        stage: Callable[[list[int]], list[Block]],
        release: Release = lambda which: None,  # of what was lent, for every answer that is False
    ) -> list[bool]:
        """`stage` gives those that it is told, on this thread: copies, or what is lent. What is there already is not put again."""
        (there,) = self._writes.run([lambda: store.stack.has(names)])
        if there is None:
            release(list(range(len(names))))
            return [False] * len(names)
        wanted = [n for n, has in enumerate(there) if not has]
        blocks, parts = stage(wanted), _parts(len(wanted))
        jobs = [partial(store.put, [names[n] for n in wanted[part]], blocks[part]) for part in parts]
        done = self._lending(self._writes, jobs, parts, lambda which: release([wanted[n] for n in which]))
        for part, ok in zip(parts, done, strict=True):
            for n in wanted[part]:
                there[n] = ok is not None
        return there

    def _lending(self, calls: Bounded, jobs: Sequence[Callable[[], R]], parts: Sequence[slice], release: Release) -> list[R | None]:
        """What a job that is given up was lent is released when it has ended."""
        leases = [Lease(partial(release, range(part.start, part.stop))) for part in parts]
        answers = calls.run([partial(lease.run, job) for lease, job in zip(leases, jobs, strict=True)])
        for lease, answer in zip(leases, answers, strict=True):
            if answer is None:
                lease.give_up()
        return answers

    def drop(self, store: BlockStore, names: Sequence[bytes]) -> list[bool]:
        """Which were in some tier of the reader's own kind, and are not any more."""
        (found,) = self._writes.run([lambda: [tier.drop(names).result() for tier in store.stack.tiers]])
        return [any(answers) for answers in zip(*found, strict=True)] if found else [False] * len(names)

    def close(self, stores: Iterable[BlockStore]) -> None:
        for store in stores:
            self._writes.run([store.close])
        for calls in (self._reads, self._looks, self._writes):
            calls.close()


def steps(store: BlockStore, count: int, block_bytes: int) -> list[slice]:
    """What is in memory of the store's at once: an engine hands over a hundred blocks, of megabytes each."""
    size = max(_THREADS, _MOST_BYTES // max(store.kind.num_bytes, block_bytes))
    return [slice(n, min(n + size, count)) for n in range(0, count, size)]


def _parts(count: int) -> list[slice]:
    """Runs of about the same length, one a thread."""
    size = -(-count // _THREADS) or 1
    return [slice(n, min(n + size, count)) for n in range(0, count, size)]
