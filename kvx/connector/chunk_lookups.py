"""What a scheduler asked a store for, until its requests end: an answer comes later, and then stays the same for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


@dataclass
class _Asked:
    since_s: float = field(default_factory=time.monotonic)
    is_there: bool | None = None  # None: not known yet
    requests: set[str] = field(default_factory=set)


class ChunkLookups:
    """Of one thread, the scheduler's, but for `answers`."""

    def __init__(self, ask: Callable[[bytes], bool], *, timeout_s: float) -> None:
        self.answers: deque[tuple[bytes, bool]] = deque()  # filled by whoever looks
        self._ask, self._timeout_s = ask, timeout_s  # ask() is False where nobody will look
        self._asked: dict[bytes, _Asked] = {}
        self._by_request: dict[str, set[bytes]] = {}

    def look(self, key: bytes, request: str) -> bool | None:
        """Whether the store has it. None: ask again later. What is not answered in time is a miss."""
        for _ in range(len(self.answers)):
            name, is_there = self.answers.popleft()
            if name in self._asked and self._asked[name].is_there is None:
                self._asked[name].is_there = is_there
        asked = self._asked.get(key)
        if asked is None:
            if not self._ask(key):
                return False
            asked = self._asked[key] = _Asked()
        asked.requests.add(request)
        self._by_request.setdefault(request, set()).add(key)
        if asked.is_there is None and time.monotonic() - asked.since_s > self._timeout_s:
            asked.is_there = False
        return asked.is_there

    def miss(self, keys: Iterable[bytes]) -> None:
        """They were there, and could not be loaded: requests that asked are not told again that they are."""
        for key in keys:
            if key in self._asked:
                self._asked[key].is_there = False

    def forget(self, request: str) -> None:
        """It ended. What it asked for is looked for anew by the next."""
        for key in self._by_request.pop(request, ()):
            asked = self._asked[key]
            asked.requests.discard(request)
            if not asked.requests:
                del self._asked[key]

    def __len__(self) -> int:
        return len(self._asked)
