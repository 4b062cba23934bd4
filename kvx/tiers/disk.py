"""Blocks in a directory, a file each: written whole or not at all, checked on every read, the least recently used leaves first.

Several processes may use one directory, and any may be killed at any moment. Nothing is locked: a file takes its name when it is
whole, and one that vanishes is a miss.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvx.errors import BadArgument, Incompatible, TierError, Unsupported
from kvx.files import sync_folder
from kvx.tiers.block import Block, BlockKind, check_kind, kind_from_text
from kvx.tiers.block_file import Damaged, file_bytes, read_block, write_block
from kvx.tiers.directory import PARTIAL, Directory
from kvx.tiers.tier import Tier, TierEvent, blocks_in

_MANIFEST = "manifest.json"
_numbers = itertools.count()  # of unfinished files: no two of a process have the same name


class DiskTier(Tier):
    """At most `capacity_bytes` of files of one kind, which the directory keeps. Opening it with another kind is refused.

    With several processes, each learns what the others wrote at the latest `refresh_s` after, and makes room then.
    """

    is_lasting = True

    def __init__(
        self,
        path: str | Path,
        kind: BlockKind,
        capacity_bytes: int,
        *,
        fsync: bool = False,  # True: a block that was put outlives a loss of power too; killed processes need none
        threads: int = 4,
        max_pending: int = 64,
        on_event: Callable[[TierEvent], None] | None = None,
        refresh_s: float = 1.0,
        grace_s: float = 600.0,  # an unfinished file this old has no writer any more
    ) -> None:
        check_kind("DiskTier", kind)
        self.path, self.file_bytes, self.fsync, self.refresh_s = Path(path), file_bytes(kind), fsync, refresh_s
        self.capacity_blocks = blocks_in("DiskTier", capacity_bytes, self.file_bytes)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            _claim(self.path / _MANIFEST, kind)
            self._directory = Directory(self.path, grace_s=grace_s)
            self._directory.refresh()
        except OSError as error:
            raise TierError(f"DiskTier: {path} cannot be used: {error}.") from error
        # A thread holds room for one file while it writes: more threads than blocks would pass the capacity.
        super().__init__(kind, threads=min(threads, self.capacity_blocks), max_pending=max_pending, on_event=on_event)
        self._lock = threading.Lock()
        self._coming: set[bytes] = set()  # blocks being written, whose room is taken
        self._refreshed_s = time.monotonic()

    @property
    def num_blocks(self) -> int:
        """As far as this process knows."""
        with self._lock:
            return len(self._directory.recency)

    def _store(self, key: bytes, block: Block) -> bool:
        path = self._directory.path_of(key)
        if self._holds(key) and self._touch(key, path):
            return False
        with self._lock:
            self._coming.add(key)
            self._directory.recency.forget([key])  # of a wrong size, or gone: its place is this one's
        try:
            self._make_room()
            self._write(key, block, path)
        finally:
            with self._lock:
                self._coming.discard(key)
        return True

    def _make_room(self) -> None:
        with self._lock:
            if time.monotonic() - self._refreshed_s >= self.refresh_s:
                self._directory.refresh()
                self._refreshed_s = time.monotonic()
            # One that has its name already, while its thread is not done, is known: it is counted there.
            coming = sum(key not in self._directory.recency for key in self._coming)
            evicted = list(self._directory.evict_to(self.capacity_blocks - coming))
        for key, error in evicted:
            if error is None:
                self._tell("evicted", key, evicted=1)
            else:
                self._tell("failed", key, str(error), errors=1)

    def _write(self, key: bytes, block: Block, path: Path) -> None:
        partial = path.with_name(f".{path.stem}.{os.getpid()}.{next(_numbers)}{PARTIAL}")
        path.parent.mkdir(exist_ok=True)
        try:
            with partial.open("xb") as file:
                write_block(file, key, block)
                file.flush()
                if self.fsync:
                    os.fsync(file.fileno())
            with self._lock:
                used_ns = self._directory.recency.now_ns()
            os.utime(partial, ns=(used_ns, used_ns))
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise
        with self._lock:
            self._directory.use(key, used_ns)
        if self.fsync:
            sync_folder(path.parent)

    def _fetch(self, key: bytes, into: Block | None) -> Block | None:
        path = self._directory.path_of(key)
        block = into or self.kind.empty()
        try:
            with path.open("rb", buffering=0) as file:
                read_block(file, key, block)
        except FileNotFoundError:
            return None
        except (Damaged, Incompatible) as error:
            self._remove(key)
            self._tell("refused", key, f"{path}: {error}", refused=1)
            return None
        except (OSError, Unsupported) as error:
            self._tell("failed", key, f"{path}: {error}", errors=1)
            return None
        self._touch(key, path)
        return block

    def _touch(self, key: bytes, path: Path) -> bool:
        """Used now. False where it is gone."""
        with self._lock:
            used_ns = self._directory.recency.now_ns()
        try:
            os.utime(path, ns=(used_ns, used_ns))
        except FileNotFoundError:
            return False
        except OSError:
            pass  # a directory that can only be read: the order is then of this process
        with self._lock:
            self._directory.use(key, used_ns)
        return True

    def _holds(self, key: bytes) -> bool:
        try:
            return os.stat(self._directory.path_of(key)).st_size == self.file_bytes
        except OSError:
            return False

    def _remove(self, key: bytes) -> bool:
        with self._lock:
            self._directory.recency.forget([key])
        try:
            self._directory.path_of(key).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._tell("failed", key, str(error), errors=1)
            return False
        return True


def _claim(path: Path, kind: BlockKind) -> None:
    """Say in the directory what its blocks are, or find that they are the same. The first of several processes says it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}{PARTIAL}")
    if not path.exists():
        with partial.open("x") as file:
            file.write(kind.text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(partial, path)  # unlike a rename, it does not take another's place
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(partial, path)
        partial.unlink(missing_ok=True)
        sync_folder(path.parent)
    try:
        theirs = kind_from_text(path.read_text())
    except (BadArgument, UnicodeDecodeError) as error:
        raise BadArgument(f"DiskTier: {path} is damaged: {str(error).rstrip('.')}. Remove it, or give another directory.") from None
    kind.require_same(theirs, "DiskTier")
