"""Demotion: what a tier evicts goes to the next one, on a thread of its own and never waiting for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from kvx.tiers.block import Block
from kvx.tiers.tier import Tier

_BATCH = 16  # blocks of one put: small, so that what waits is soon found below


class Demotion(NamedTuple):
    key: bytes
    block: Block
    tier: Tier  # where it goes


class DemotionQueue:
    """A queue of at most `max_blocks`. What finds it full is dropped: the tier above has no time to wait."""

    def __init__(self, max_blocks: int, told: Callable[[str, Demotion, str], None]) -> None:
        self._max_blocks = max_blocks
        self._told = told  # ("handed down" | "dropped", what, why), on any thread
        self._demoted: dict[bytes, Demotion] = {}  # in the queue, or being put: it is still found here
        self._queue: deque[Demotion] = deque()
        self._change = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="DemotionQueue", daemon=True)
        self._thread.start()

    def push(self, key: bytes, block: Block, tier: Tier) -> None:
        """Take it on, or drop it. Never waits."""
        demotion = Demotion(key, block, tier)
        with self._change:
            if key in self._demoted:
                return
            is_full = len(self._demoted) >= self._max_blocks or self._is_closed
            if not is_full:
                self._demoted[key] = demotion
                self._queue.append(demotion)
                self._change.notify_all()
        if is_full:
            self._told("dropped", demotion, f"{self._max_blocks} blocks are on their way down already")

    def get(self, key: bytes) -> Block | None:
        demotion = self._demoted.get(key)
        return None if demotion is None else demotion.block

    def drain(self) -> None:
        """Wait until all that was pushed has arrived or is lost."""
        with self._change:
            while self._demoted:
                self._change.wait()

    def close(self) -> None:
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._change:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._change.wait()
                tier = self._queue[0].tier
                batch: list[Demotion] = []
                while self._queue and self._queue[0].tier is tier and len(batch) < _BATCH:
                    batch.append(self._queue.popleft())
            self._put(tier, batch)
            with self._change:
                for demotion in batch:
                    del self._demoted[demotion.key]
                self._change.notify_all()

    def _put(self, tier: Tier, batch: list[Demotion]) -> None:
        """One by one where the batch fails, so that a bad block takes no other with it."""
        for part in [batch] if len(batch) == 1 else [batch, *([demotion] for demotion in batch)]:
            try:
                tier.put([f.key for f in part], [f.block for f in part]).result()
            except Exception as error:  # of a listener too: without this thread drain() would wait for ever
                if len(part) == 1:
                    self._tell("dropped", part[0], str(error))
                continue
            for demotion in part:
                self._tell("handed down", demotion, "")
            if len(part) == len(batch):
                return

    def _tell(self, kind: str, demotion: Demotion, why: str) -> None:
        with suppress(Exception):  # of a callback: here is no future to raise it, and others are still to be demoted
            self._told(kind, demotion, why)
