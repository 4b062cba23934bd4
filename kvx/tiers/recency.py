"""Which block was used longest ago: names with the time of their last use. The oldest is found without walking all."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator

_SLACK = 1024  # entries of the past that the heap may have before it is made anew


class Recency:
    """Not thread-safe: its owner has the lock."""

    def __init__(self) -> None:
        self._used_ns: dict[bytes, int] = {}
        self._heap: list[tuple[int, bytes]] = []  # with entries of the past: true where _used_ns agrees
        self._last_ns = 0

    def __len__(self) -> int:
        return len(self._used_ns)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._used_ns)

    def __contains__(self, key: bytes) -> bool:
        return key in self._used_ns

    def now_ns(self) -> int:
        """The time, later than any it gave before: two uses are never at once, so their order holds in a file's mtime."""
        self._last_ns = max(time.time_ns(), self._last_ns + 1)
        return self._last_ns

    def use(self, key: bytes, at_ns: int) -> None:
        known_ns = self._used_ns.get(key)
        if known_ns is not None and known_ns >= at_ns:  # a time before 1970 is negative, and a time
            return
        self._used_ns[key] = at_ns
        if len(self._heap) > 2 * len(self._used_ns) + _SLACK:
            self._heap = [(at, k) for k, at in self._used_ns.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (at_ns, key))

    def forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._used_ns.pop(key, None)

    def take_oldest(self) -> tuple[bytes, int] | None:
        """Forget the one used longest ago; it, and when that was."""
        while self._heap:
            at, key = heapq.heappop(self._heap)
            if self._used_ns.get(key) == at:
                del self._used_ns[key]
                return key, at
        return None
