"""Blocks in a directory, several to a file: for blocks so small that opening, naming and closing a file each takes longer than
their bytes. What is put in one call lies in one pack, and is read in one call of the system where it is asked for together.

As with DiskTier, any process may be killed at any moment, and nothing is locked: a pack takes its name when it is whole. Which
blocks a pack has is in its header, which a process reads once; so it learns what others wrote at the latest `refresh_s` after.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from kvx.errors import Damaged, Incompatible, TierError
from kvx.spec.byte_size import parse_bytes
from kvx.tiers.block import Block, BlockKind, Take, fill
from kvx.tiers.block_file import has_whole_pages, is_aligned, open_file
from kvx.tiers.block_io import READ_BYTES, DirectIo
from kvx.tiers.directory import Directory, name_of, new_file, partial_name
from kvx.tiers.pack_file import PackTable, most_blocks, pack_bytes, read_blocks, read_table, stride_bytes, write_pack
from kvx.tiers.tier import Tier, TierEvent, blocks_in

_NAME_BYTES = 16  # of a pack
_COUNTS = {"refused": "refused", "failed": "errors", "evicted": "evicted"}  # event -> field of TierStats


def _new_name() -> bytes:
    """Of a pack, random: no two processes write the same. Packs are few, so they are in 16 folders, and not in 256."""
    first, *rest = os.urandom(_NAME_BYTES)
    return bytes([first % 16, *rest])


def pack_kind(kind: BlockKind) -> BlockKind:
    """What the directory says it has: packs of this kind, which a DiskTier does not read."""
    return BlockKind({**kind.manifest, "file": "pack"}, kind.buffer_bytes)


class PackTier(Tier):
    """At most `capacity_bytes` of packs of one kind. The pack that was used longest ago leaves first, with all its blocks;
    so do the neighbours of a block that is dropped, or damaged.
    """

    is_lasting = is_shared = True

    def __init__(
        self,
        path: str | Path,
        kind: BlockKind,
        capacity_bytes: int | str,  # bytes, or "50GB"
        *,
        threads: int = 4,
        max_pending: int = 64,
        on_event: Callable[[TierEvent], None] | None = None,
        refresh_s: float = 1.0,
        grace_s: float = 600.0,  # an unfinished file this old has no writer any more
        direct: bool = False,  # past the system's cache, where it can
    ) -> None:
        self.check(kind)
        self.path, self.refresh_s, self._files = Path(path), refresh_s, DirectIo(direct=direct)
        if isinstance(capacity_bytes, str):
            capacity_bytes = parse_bytes(capacity_bytes, "PackTier: capacity_bytes")
        blocks_in("PackTier", capacity_bytes, pack_bytes(kind, 1))
        self.capacity_bytes = capacity_bytes
        # A small tier has several packs too, or all of it would leave at once; a thread holds room for one while it writes.
        self._most = min(most_blocks(kind), max(1, capacity_bytes // (4 * threads * pack_bytes(kind, 1))))
        super().__init__(kind, threads=threads, max_pending=max_pending, on_event=on_event)
        self._lock = threading.Lock()
        self._packs: dict[bytes, PackTable] = {}
        self._where: dict[bytes, bytes] = {}  # block -> pack
        self._num_bytes = self._coming = 0  # of the packs; of those being written
        self._untold: list[TierEvent] = []  # while the lock is held
        try:
            self._directory = Directory(self.path, pack_kind(kind), grace_s=grace_s, fsync=False)
            self._refresh()
        except OSError as error:
            raise TierError(f"PackTier: {path} cannot be used: {error}. Give a directory that this user can write to.") from error
        self._tell_all()

    @property
    def num_blocks(self) -> int:
        """As far as this process knows."""
        with self._lock:
            return len(self._where)

    def names(self) -> list[bytes]:
        with self._lock:
            return list(self._where)

    # --- what is there -----------------------------------------------------------------------------------------------------

    def _holds(self, key: bytes) -> bool:
        return self._has([key])[0]

    def _has(self, keys: list[bytes]) -> list[bool]:
        """A pack that another process evicted is found out here: one look at each file."""
        packs = self._find(keys)
        gone = {pack for pack in set(packs) if pack is not None and not self._is_there(pack)}
        return [pack is not None and pack not in gone for pack in packs]

    def _find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._lock:
            if any(key not in self._where for key in keys):
                self._refresh_in_time()
            found = [self._where.get(key) for key in keys]
        self._tell_all()
        return found

    def _is_there(self, pack: bytes) -> bool:
        try:
            found = os.lstat(self._directory.path_of(pack))
        except OSError:
            self._forget(pack)
            return False
        return stat.S_ISREG(found.st_mode)

    def _refresh_in_time(self) -> None:
        if time.monotonic() - self._refreshed_s >= self.refresh_s:
            with suppress(OSError):  # the directory may have been removed: its blocks are misses, and the next put says why
                self._refresh()

    def _refresh(self) -> None:
        """Learn what other processes wrote and removed. Under the lock."""
        self._refreshed_s = time.monotonic()
        self._directory.refresh()
        known = self._directory.recency
        for pack in [p for p in self._packs if p not in known]:
            self._discard(pack)
        for pack in [p for p in known if p not in self._packs]:
            try:
                with self._opened(pack) as file:
                    self._add(pack, read_table(file, self.kind))
            except FileNotFoundError:
                known.forget([pack])
            except (Damaged, Incompatible) as error:
                self._untold.append(TierEvent("refused", pack, f"{self._directory.path_of(pack)}: {error}"))
                self._unlink(pack)
            except OSError as error:  # it is not looked at again
                self._packs[pack] = PackTable((), (), 1, 0, 0)
                self._untold.append(TierEvent("failed", pack, f"{self._directory.path_of(pack)}: {error}"))

    def _add(self, pack: bytes, table: PackTable) -> None:
        if pack not in self._packs:
            self._packs[pack] = table
            self._num_bytes += table.num_bytes
            self._where.update(dict.fromkeys(table.names, pack))

    def _discard(self, pack: bytes) -> None:
        table = self._packs.pop(pack, None)
        if table is not None:
            self._num_bytes -= table.num_bytes
            for key in table.names:
                if self._where.get(key) == pack:
                    del self._where[key]

    def _forget(self, pack: bytes) -> None:
        with self._lock:
            self._discard(pack)
            self._directory.recency.forget([pack])

    def _unlink(self, pack: bytes) -> bool:
        """Under the lock, in one step, or a reader would count it again in between."""
        self._discard(pack)
        self._directory.recency.forget([pack])
        try:
            with self._directory.folder(pack) as folder:
                os.unlink(name_of(pack), dir_fd=folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._untold.append(TierEvent("failed", pack, str(error)))
            return False
        return True

    def _tell_all(self) -> None:
        with self._lock:
            events, self._untold = self._untold, []
        for event in events:
            self._count(**{_COUNTS[event.kind]: 1})
            self._tell(event.kind, event.key, event.detail)

    # --- put ---------------------------------------------------------------------------------------------------------------

    def _store(self, key: bytes, block: Block) -> bool:
        return self._put([key], [block])[0]

    def _put(self, keys: list[bytes], blocks: list[Block]) -> list[bool]:
        there, stored = self._has(keys), 0
        for pack in {p for p, is_there in zip(self._find(keys), there, strict=True) if is_there and p is not None}:
            with suppress(OSError, Damaged), self._opened(pack) as file:
                self._directory.mark_used(pack, file, self._lock)
        new = [n for n, is_there in enumerate(there) if not is_there]
        try:
            for start in range(0, len(new), self._most):
                few = new[start : start + self._most]
                try:
                    self._write([keys[n] for n in few], [blocks[n] for n in few])
                except OSError as error:
                    self._tell("failed", keys[few[0]], str(error), errors=1)
                    raise TierError(
                        f"put(): {len(few)} blocks from {keys[few[0]].hex()} on: {error}. {stored} blocks before them were stored."
                    ) from error
                stored += len(few)
                for n in few if self._listeners else ():
                    self._tell("stored", keys[n])
        finally:
            self._count(stored=stored, bytes_in=stored * self.kind.num_bytes)
        return [not is_there for is_there in there]

    def _write(self, keys: list[bytes], blocks: list[Block]) -> None:
        pack, size = _new_name(), pack_bytes(self.kind, len(keys))
        with self._lock:
            self._coming += size
        try:
            self._make_room()
            table = self._write_file(pack, keys, blocks)
            with self._lock:
                self._directory.use(pack, self._directory.recency.now_ns())
                self._add(pack, table)
        finally:
            with self._lock:
                self._coming -= size
            self._tell_all()

    def _make_room(self) -> None:
        with self._lock:
            self._refresh_in_time()
            while self._num_bytes + self._coming > self.capacity_bytes and len(self._directory.recency):
                for pack, error in self._directory.evict_to(len(self._directory.recency) - 1):
                    names = self._packs[pack].names if pack in self._packs else ()
                    self._discard(pack)
                    if error is None:
                        self._untold += [TierEvent("evicted", key) for key in names]
                    elif not isinstance(error, FileNotFoundError):  # which is another process's evicting
                        self._untold.append(TierEvent("failed", pack, str(error)))

    def _write_file(self, pack: bytes, keys: list[bytes], blocks: list[Block]) -> PackTable:
        name, tables = name_of(pack), list[PackTable]()
        partial = partial_name(name)
        room = self._files.room(pack_bytes(self.kind, len(keys)) - len(keys) * stride_bytes(self.kind))
        with self._directory.folder(pack, is_made=True) as folder:
            try:
                fd = self._files.run(
                    lambda flags: new_file(partial, folder, flags),
                    lambda fd, _: tables.append(write_pack(fd, room, keys, blocks)),
                    all(map(is_aligned, blocks)),
                    lambda: os.unlink(partial, dir_fd=folder),
                )
                os.close(fd)
                for block in blocks:
                    block.require_held()
                os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial, dir_fd=folder)
                raise
        return tables[-1]

    # --- get ---------------------------------------------------------------------------------------------------------------

    def _fetch(self, key: bytes, into: Block | None) -> Block | None:
        return self._get([key], [into])[0]

    def _get(self, keys: list[bytes], into: list[Block | None]) -> list[Block | None]:
        blocks = [block or self.kind.empty() for block in into]
        fillers = [fill(block) for block in blocks]

        def take(which: Sequence[int], start: int, rows: np.ndarray) -> None:
            for n, row in zip(which, rows, strict=True):
                fillers[n](start, row)

        return [block if is_there else None for block, is_there in zip(blocks, self._read_to(keys, take), strict=True)]

    def _read_to(self, keys: list[bytes], take: Take) -> list[bool]:
        found = [False] * len(keys)
        by_pack: dict[bytes, list[int]] = {}
        for n, pack in enumerate(self._find(keys)):
            if pack is not None:
                by_pack.setdefault(pack, []).append(n)
        for pack, some in by_pack.items():
            if self._read(pack, keys, some, take):
                for n in some:
                    found[n] = True
        self._count_read(sum(found), len(keys))
        return found

    def _read(self, pack: bytes, keys: list[bytes], some: list[int], take: Take) -> bool:
        """All of them, or none: one that is damaged takes its pack along."""
        with self._lock:
            table = self._packs.get(pack)
        if table is None:  # evicted since
            return False
        places = {name: n for n, name in enumerate(table.names)}
        wanted = [(places[keys[n]], n) for n in some]
        room = self._files.room(max(READ_BYTES, table.stride))
        try:
            with self._directory.folder(pack) as folder:
                fd = self._files.run(
                    lambda flags: open_file(name_of(pack), folder, flags),
                    lambda fd, _: read_blocks(fd, table, self.kind, wanted, room, take),
                    has_whole_pages(self.kind),
                    lambda: None,
                )
            try:
                self._directory.mark_used(pack, fd, self._lock)
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._forget(pack)
        except Damaged as error:
            with self._lock:
                self._unlink(pack)
            self._tell("refused", keys[some[0]], f"{self._directory.path_of(pack)}: {error}", refused=1)
        except OSError as error:
            self._tell("failed", keys[some[0]], f"{self._directory.path_of(pack)}: {error}", errors=1)
        else:
            return True
        return False

    def _remove(self, key: bytes) -> bool:
        (pack,) = self._find([key])
        if pack is None:
            return False
        with self._lock:
            is_removed = self._unlink(pack)
        self._tell_all()
        return is_removed

    @contextmanager
    def _opened(self, pack: bytes) -> Iterator[int]:
        with self._directory.folder(pack) as folder:
            fd = open_file(name_of(pack), folder)
        try:
            yield fd
        finally:
            os.close(fd)
