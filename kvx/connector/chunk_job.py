"""One job of an engine's scheduler, while it runs and after. Its rows are the engine's, and another's as soon as it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class JobDone(NamedTuple):
    job_id: int
    is_load: bool
    keys: Sequence[bytes]
    moved: frozenset[bytes]  # with those that the store had already
    num_bytes: int
    seconds: float  # that threads spent on it

    @property
    def is_whole(self) -> bool:
        return self.moved.issuperset(self.keys)


@dataclass(eq=False)
class ChunkJob:
    job_id: int
    is_load: bool
    keys: Sequence[bytes]
    pieces: int = 0  # that are not done
    moved: set[bytes] = field(default_factory=set)
    num_bytes: int = 0
    seconds: float = 0.0
    is_over: bool = False  # the engine was told, and its rows are another's
    touching: int = 0  # threads that copy from or to its rows right now
    changed: threading.Condition = field(default_factory=threading.Condition)

    def touch(self, copy: Callable[[], None]) -> bool:
        """Copy while the rows are this job's. False: they are not any more."""
        with self.changed:
            if self.is_over:
                return False
            self.touching += 1
        try:
            copy()
        finally:
            with self.changed:
                self.touching -= 1
                self.changed.notify_all()
        return True

    def is_held(self) -> bool:
        """Whether its rows are still its own: what was read from them until now is what was handed over."""
        with self.changed:
            return not self.is_over

    def end(self) -> JobDone:
        with self.changed:
            self.is_over = True
            self.changed.wait_for(lambda: not self.touching)
        return JobDone(self.job_id, self.is_load, self.keys, frozenset(self.moved), self.num_bytes, self.seconds)
