"""Block files of one kind, written and read through the system's cache or past it (O_DIRECT), where the file system can.

Past it a block is not copied once more, and costs no memory beside the one it lies in.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvx.tiers.block import Block, BlockKind, fill
from kvx.tiers.block_file import (
    TakePiece,
    has_whole_pages,
    header_bytes,
    is_aligned,
    open_file,
    read_block,
    read_cached,
    read_cached_pieces,
    read_pieces,
    write_block,
    write_direct,
)
from kvx.tiers.directory import new_file
from kvx.tiers.staging import Staging

_MOST_CHECKED = 1 << 16
READ_BYTES = 2 << 20  # in one call from a disk, by way of memory of the thread's own
_CACHED_BYTES = 256 << 10  # in one call from the system's cache: it is used while it is in the processor's


class DirectIo:
    """Thread-safe."""

    def __init__(self, *, direct: bool) -> None:
        self._is_direct = direct and hasattr(os, "O_DIRECT")
        self._staging = Staging()

    def run(
        self,
        open_it: Callable[[int], int],  # with these flags
        move: Callable[[int, bool], None],  # whether the descriptor goes past the cache
        is_aligned: bool,  # the memory can
        undo: Callable[[], None],
    ) -> int:
        """A descriptor that was used."""
        if self._is_direct and is_aligned:
            try:
                return _opened(lambda: open_it(os.O_DIRECT), lambda fd: move(fd, True))
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # this file system cannot
                with suppress(FileNotFoundError):
                    undo()
        return _opened(lambda: open_it(0), lambda fd: move(fd, False))

    def room(self, num_bytes: int) -> memoryview:
        """Memory of this thread's that begins on a page."""
        return self._staging.room(num_bytes).data


class BlockIo(DirectIo):
    def __init__(self, kind: BlockKind, *, direct: bool) -> None:
        super().__init__(direct=direct)
        self._kind = kind
        # Block -> its file as it was when this process had checked it: out of the system's cache it is not checked again.
        self._checked: dict[bytes, tuple[int, ...]] = {}

    @contextmanager
    def write(self, name: str, folder: int, key: bytes, block: Block) -> Iterator[int]:
        """A new file with the block in it."""

        def write(fd: int, is_direct: bool) -> None:
            if is_direct:
                write_direct(fd, key, block, self.room(header_bytes(self._kind)))
                return
            with open(fd, "wb", closefd=False) as file:
                write_block(file, key, block)

        fd = self.run(lambda flags: new_file(name, folder, flags), write, is_aligned(block), lambda: os.unlink(name, dir_fd=folder))
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def read(self, name: str, folder: int, key: bytes, into: Block | TakePiece) -> Iterator[int]:
        """The file that `into` was filled from, or given pieces of. Damaged or Incompatible where it is not as it was written."""

        def read(fd: int, is_direct: bool) -> None:
            is_known = not is_direct and self._checked.get(key) == _stamp(fd)
            if not isinstance(into, Block) or is_direct:
                self._hand_on(fd, key, into, is_direct=is_direct, is_known=is_known)
            elif not is_known or not read_cached(fd, into):
                with open(fd, "rb", buffering=0, closefd=False) as file:
                    read_block(file, key, into)

        fd = self.run(lambda flags: open_file(name, folder, flags), read, has_whole_pages(self._kind), lambda: None)
        try:
            yield fd
            if len(self._checked) >= _MOST_CHECKED:
                self._checked.clear()
            self._checked[key] = _stamp(fd)  # after its reader noted the use in the file's times
        finally:
            os.close(fd)

    def _hand_on(self, fd: int, key: bytes, into: Block | TakePiece, *, is_direct: bool, is_known: bool) -> None:
        take = fill(into) if isinstance(into, Block) else into
        room = self.room(header_bytes(self._kind) + (READ_BYTES if is_direct else _CACHED_BYTES))
        if not is_known or not read_cached_pieces(fd, self._kind, room, take):
            read_pieces(fd, key, self._kind, room, take)


def _stamp(fd: int) -> tuple[int, ...]:
    """Another one when a file was changed, or replaced, or used by another process."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _opened(open_it: Callable[[], int], use: Callable[[int], None]) -> int:
    """A descriptor that was used, closed where that failed."""
    fd = open_it()
    try:
        use(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd
