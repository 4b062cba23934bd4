"""Room: how much may be in flight. Who wants more waits."""

from __future__ import annotations

import threading
from collections.abc import Hashable


class Room:
    """Blocks that may be in flight, by who has them."""

    def __init__(self, num_blocks: int) -> None:
        self._left, self._change = num_blocks, threading.Condition()
        self._taken: dict[Hashable, int] = {}

    def take(self, owner: Hashable, n: int) -> None:
        """Interrupted, it has taken all or nothing: give() knows."""
        with self._change:
            while self._left < n:
                self._change.wait()
            self._left, self._taken[owner] = self._left - n, n

    def give(self, owner: Hashable) -> None:
        """What an owner has, if anything: once, however often it is called."""
        with self._change:
            self._left += self._taken.pop(owner, 0)
            self._change.notify_all()
