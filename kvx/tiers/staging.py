"""Memory of a thread's own, by way of which blocks go to files and come from them."""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import numpy as np

_LARGE_PAGE = 2 << 20


class Staging:
    def __init__(self) -> None:
        self._mine = threading.local()

    def room(self, num_bytes: int) -> np.ndarray:
        """uint8, with any bytes in it: this thread's until it asks again. It begins on a page, on a large one where the system has
        them: a disk's reads into those cost far less of its time.
        """
        if len(getattr(self._mine, "room", ())) < num_bytes:
            self._mine.room = _pages(num_bytes)
        room: np.ndarray = self._mine.room
        return room[:num_bytes]


def _pages(num_bytes: int) -> np.ndarray:
    memory = mmap.mmap(-1, num_bytes + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    flat = np.frombuffer(memory, np.uint8)
    start = -flat.ctypes.data % _LARGE_PAGE  # what is before is never used, and takes no memory
    return flat[start : start + num_bytes]
