"""Room: how much may be in flight. Who wants more waits."""

from __future__ import annotations

import threading


class Room:
    """Blocks that may be in flight."""

    def __init__(self, num_blocks: int) -> None:
        self._left, self._change = num_blocks, threading.Condition()

    def take(self, n: int) -> None:
        with self._change:
            while self._left < n:
                self._change.wait()
            self._left -= n

    def give(self, n: int) -> None:
        with self._change:
            self._left += n
            self._change.notify_all()
