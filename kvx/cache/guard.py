"""Guard: one lock for a cache and all that it is made of, and what makes it whole again after a call that was broken off.

A call changes two kinds of things. What holds true is few: the sequences and their tables, the names, the pins. It changes last,
in statements without a call in them, between which Python looks for no signal. The rest follows from it: counts, lists of free
blocks, the queue of idle ones. A call that Ctrl-C breaks off may leave the rest behind; then it is counted again. So nothing has to
be deferred, an interrupt ends a wait for a tier at once, and a second one while things are counted again only delays that.

Once torch.compile has run, or under a debugger, Python also looks for signals between the end of a Python function and the store of
its result. So what a caller will have to give back goes into a list of the caller's, `out`, before it is there.

The lock is held for the length of a call, also while a backing is asked. Locks are taken in one order: an engine's, a cache's, a
mover's, a tier's. Whoever is told something by a mover or a tier must not call the cache from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvx.errors import BadArgument, OutOfBlocks


class Guard:
    __slots__ = ("_menders", "is_torn", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_torn = False  # a call was broken off, and what follows from the truth is not counted again yet
        self._menders: list[Callable[[], None]] = []

    def mended_by(self, mend: Callable[[], None]) -> None:
        """Called under the lock, those of owners before those of what they own: so they are given the other way round."""
        self._menders.insert(0, mend)

    def mend(self) -> None:
        """Under the lock."""
        self.is_torn = True
        for mend in self._menders:
            mend()
        self.is_torn = False

    def is_mine(self) -> bool:
        """Whether this thread is inside: whoever asks then is a signal's handler, in the middle of a call."""
        return self.lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def join(self, other: Guard) -> Guard:
        """What this one guards is the other's from now on."""
        if other is not self:
            other._menders += self._menders
        return other

    def __getstate__(self) -> tuple[bool, list[Callable[[], None]]]:
        return self.is_torn, self._menders

    def __setstate__(self, state: tuple[bool, list[Callable[[], None]]]) -> None:
        """Of a copy: it has a lock of its own."""
        self.lock = threading.RLock()
        self.is_torn, self._menders = state


class Guarded(Protocol):
    _guard: Guard


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Guarded)


def whole(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Of a method: it happens as one, for other threads and after Ctrl-C.

    BadArgument and OutOfBlocks are raised before anything changes. What gives the caller something to give back, such as a
    sequence, does this itself: Ctrl-C may come when the call is over and its result on the way.
    """

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        guard = self._guard
        with guard.lock:
            if guard.is_torn:
                guard.mend()
            try:
                return method(self, *args, **kwargs)
            except (BadArgument, OutOfBlocks):
                raise
            except BaseException:
                guard.is_torn = True  # first: a second Ctrl-C may come as soon as something is called
                guard.mend()
                raise

    return call
