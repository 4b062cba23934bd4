"""Block files of one kind, written and read through the system's cache or past it (O_DIRECT), where the file system can.

Past it a block is not copied once more, and costs no memory beside the one it lies in.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvx.tiers.block import Block, BlockKind
from kvx.tiers.block_file import header_bytes, is_aligned, open_file, read_block, read_direct, write_block, write_direct
from kvx.tiers.directory import new_file


class BlockIo:
    """Thread-safe."""

    def __init__(self, kind: BlockKind, *, direct: bool) -> None:
        self._kind, self._is_direct = kind, direct and hasattr(os, "O_DIRECT")
        self._mine = threading.local()

    @contextmanager
    def write(self, name: str, folder: int, key: bytes, block: Block) -> Iterator[int]:
        """A new file with the block in it."""

        def write(fd: int, room: memoryview | None) -> None:
            if room is not None:
                write_direct(fd, key, block, room)
                return
            with open(fd, "wb", closefd=False) as file:
                write_block(file, key, block)

        fd = self._run(lambda flags: new_file(name, folder, flags), write, block, lambda: os.unlink(name, dir_fd=folder))
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def read(self, name: str, folder: int, key: bytes, into: Block) -> Iterator[int]:
        """The file that `into` was filled from. Damaged or Incompatible where it is not as it was written."""

        def read(fd: int, room: memoryview | None) -> None:
            if room is not None:
                read_direct(fd, key, into, room)
                return
            with open(fd, "rb", buffering=0, closefd=False) as file:
                read_block(file, key, into)

        fd = self._run(lambda flags: open_file(name, folder, flags), read, into, lambda: None)
        try:
            yield fd
        finally:
            os.close(fd)

    def _run(
        self,
        open_it: Callable[[int], int],  # with these flags
        move: Callable[[int, memoryview | None], None],
        block: Block,
        undo: Callable[[], None],
    ) -> int:
        if self._is_direct and is_aligned(block):
            try:
                return _opened(lambda: open_it(os.O_DIRECT), lambda fd: move(fd, self._room()))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # this file system cannot
                with suppress(FileNotFoundError):
                    undo()
        return _opened(lambda: open_it(0), lambda fd: move(fd, None))

    def _room(self) -> memoryview:
        """For a header: memory of this thread's that begins on a page."""
        if not hasattr(self._mine, "room"):
            self._mine.room = memoryview(mmap.mmap(-1, header_bytes(self._kind)))
        room: memoryview = self._mine.room
        return room


def _opened(open_it: Callable[[], int], use: Callable[[int], None]) -> int:
    """A descriptor that was used, closed where that failed."""
    fd = open_it()
    try:
        use(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd
