"""Blocks in a directory, a file each: written whole or not at all, checked on every read, the least recently used leaves first.

Several processes may use one directory, and any may be killed at any moment. Nothing is locked: a file takes its name when it is
whole, and one that vanishes is a miss.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from kvx.errors import Damaged, Incompatible, TierError, Unsupported
from kvx.spec.byte_size import parse_bytes
from kvx.tiers.block import Block, BlockKind, Take
from kvx.tiers.block_file import TakePiece, file_bytes, open_file
from kvx.tiers.block_io import BlockIo
from kvx.tiers.directory import Directory, name_of, partial_name
from kvx.tiers.tier import Tier, TierEvent, blocks_in


class DiskTier(Tier):
    """At most `capacity_bytes` of files of one kind, which the directory keeps. Opening it with another kind is refused.

    With several processes, each learns what the others wrote at the latest `refresh_s` after, and makes room then.
    """

    is_lasting = is_shared = True

    def __init__(
        self,
        path: str | Path,
        kind: BlockKind,
        capacity_bytes: int | str,  # bytes, or "50GB"
        *,
        fsync: bool = False,  # True: a block that was put outlives a loss of power too; killed processes need none
        threads: int = 4,
        max_pending: int = 64,
        on_event: Callable[[TierEvent], None] | None = None,
        refresh_s: float = 1.0,
        grace_s: float = 600.0,  # an unfinished file this old has no writer any more
        direct: bool = False,  # past the system's cache, where it can: for those whose blocks lie in memory elsewhere already
    ) -> None:
        self.check(kind)
        self.path, self.file_bytes, self.fsync, self.refresh_s = Path(path), file_bytes(kind), fsync, refresh_s
        self._root, self._files = str(self.path), BlockIo(kind, direct=direct)
        if isinstance(capacity_bytes, str):
            capacity_bytes = parse_bytes(capacity_bytes, "DiskTier: capacity_bytes")
        self.capacity_blocks = blocks_in("DiskTier", capacity_bytes, self.file_bytes)
        try:
            self._directory = Directory(self.path, kind, grace_s=grace_s, fsync=fsync)
            self._directory.refresh()
        except OSError as error:
            raise TierError(f"DiskTier: {path} cannot be used: {error}. Give a directory that this user can write to.") from error
        # A thread holds room for one file while it writes: more threads than blocks would pass the capacity.
        super().__init__(kind, threads=min(threads, self.capacity_blocks), max_pending=max_pending, on_event=on_event)
        self._lock = threading.Lock()
        self._coming: dict[int, bytes] = {}  # by thread: the block it is writing, whose room is taken
        self._refreshed_s = time.monotonic()
        self._told: set[str] = set()  # folders that could not be read, and were told of
        self._tell_unreadable()

    @property
    def num_blocks(self) -> int:
        """As far as this process knows."""
        with self._lock:
            return len(self._directory.recency)

    def names(self) -> list[bytes]:
        with self._lock:
            return list(self._directory.recency)

    def _store(self, key: bytes, block: Block) -> bool:
        if self._holds(key) and self._touch(key):
            return False
        with self._lock:
            self._coming[threading.get_ident()] = key
            self._directory.recency.forget([key])  # of a wrong size, or gone: its place is this one's
        try:
            self._make_room()
            self._write(key, block)
        finally:
            with self._lock:
                self._coming.pop(threading.get_ident(), None)
        return True

    def _make_room(self) -> None:
        with self._lock:
            if time.monotonic() - self._refreshed_s >= self.refresh_s:
                self._directory.refresh()
                self._refreshed_s = time.monotonic()
            coming = sum(key not in self._directory.recency for key in set(self._coming.values()))
            evicted = list(self._directory.evict_to(self.capacity_blocks - coming))
        self._tell_unreadable()
        for key, error in evicted:
            if isinstance(error, FileNotFoundError):  # another process evicted it
                continue
            if error is None:
                self._tell("evicted", key, evicted=1)
            else:
                self._tell("failed", key, str(error), errors=1)

    def _tell_unreadable(self) -> None:
        """Of each folder once, until it can be read again."""
        with self._lock:
            unreadable = dict(self._directory.unreadable)
            new, self._told = unreadable.keys() - self._told, set(unreadable)
        for folder in sorted(new):
            self._tell("failed", bytes.fromhex(folder), f"{self.path / folder}: {unreadable[folder]}", errors=1)

    def _write(self, key: bytes, block: Block) -> None:
        name = name_of(key)
        unfinished = partial_name(name)
        with self._directory.folder(key, is_made=True) as folder:
            try:
                with self._files.write(unfinished, folder, key, block) as file:
                    if self.fsync:
                        os.fsync(file)
                    block.require_held()
                    with self._lock:
                        used_ns = self._directory.recency.now_ns()
                    os.utime(file, ns=(used_ns, used_ns))
                os.replace(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise
            with self._lock:
                self._directory.use(key, used_ns)
                del self._coming[threading.get_ident()]  # or it would have room twice, once evicted
            if self.fsync:
                os.fsync(folder)

    def _fetch(self, key: bytes, into: Block | None) -> Block | None:
        block = into or self.kind.empty()
        return block if self._read(key, block) else None

    def _read_to(self, keys: list[bytes], take: Take) -> list[bool]:
        def hand_on(n: int, start: int, piece: memoryview) -> None:
            take([n], start, np.frombuffer(piece, np.uint8)[None])

        found = [self._read(key, partial(hand_on, n)) for n, key in enumerate(keys)]
        self._count_read(sum(found), len(keys))
        return found

    def _read(self, key: bytes, into: Block | TakePiece) -> bool:
        try:
            with self._directory.folder(key) as folder, self._files.read(name_of(key), folder, key, into) as file:
                self._used(key, file)
        except FileNotFoundError:
            return False
        except (Damaged, Incompatible) as error:
            self._remove(key)
            self._tell("refused", key, f"{self._directory.path_of(key)}: {error}", refused=1)
            return False
        except (OSError, Unsupported) as error:
            self._tell("failed", key, f"{self._directory.path_of(key)}: {error}", errors=1)
            return False
        return True

    def _touch(self, key: bytes) -> bool:
        """Used now. False where it is gone, or no file of a tier's."""
        try:
            with self._directory.folder(key) as folder, open(open_file(name_of(key), folder), "rb", buffering=0) as file:
                self._used(key, file.fileno())
        except (Damaged, OSError):
            return False
        return True

    def _used(self, key: bytes, file: int) -> None:
        self._directory.mark_used(key, file, self._lock)

    def _holds(self, key: bytes) -> bool:
        try:
            found = os.lstat(f"{self._root}/{key[0]:02x}/{name_of(key)}")
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == self.file_bytes

    def _remove(self, key: bytes) -> bool:
        try:
            with self._lock:  # in one step, or a reader would count it again in between
                self._directory.recency.forget([key])
                with self._directory.folder(key) as folder:
                    os.unlink(name_of(key), dir_fd=folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._tell("failed", key, str(error), errors=1)
            return False
        return True
