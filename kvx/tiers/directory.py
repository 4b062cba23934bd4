"""The folders of a disk tier, and what this process knows of them: which blocks there are, and which was used longest ago.

The folders are the truth and are shared with other processes; the order is in the files' times of change, so it outlives them.
What is not the tier's own is not touched: links are not followed, and only files whose names it gives are removed.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvx.errors import BadArgument, Damaged, KvxWarning, TierError
from kvx.tiers.block import BlockKind, kind_from_text
from kvx.tiers.block_file import open_file
from kvx.tiers.recency import Recency
from kvx.tiers.tier import MOST_KEY_BYTES

SUFFIX, PARTIAL, MANIFEST = ".kvx", ".partial", "manifest.json"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_UNFINISHED = re.compile(r"\.(manifest\.json|(?:[0-9a-f]{2})+)\.\d+\.\d+\.partial")
_MOST_MANIFEST_BYTES = 1 << 20
# A folder's time of change moves in ticks of the kernel's clock, 10 ms at most: one that changed just now may change again unseen.
_TICK_NS = 50_000_000
_SKEW_NS = 3600 * 10**9  # a file dated later than this from now has a wrong date, not a clock of another machine
# Of unfinished files: no two of a process have the same name. Another may have its id, in another container or after it was
# killed, and begins with another number.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "big"))


class Directory:
    """Not thread-safe but for path_of, folder, claim and mark_used: its owner has the lock."""

    def __init__(self, root: Path, kind: BlockKind, *, grace_s: float, fsync: bool) -> None:
        self.root, self.kind, self.grace_s, self.fsync = root, kind, grace_s, fsync
        self._root = str(root)  # of what is called for each block: a Path takes longer than the system
        self.recency = Recency()
        self.unreadable: dict[str, str] = {}  # folder -> why, of those that could not be looked at
        self._known: dict[str, set[bytes]] = {}  # folder -> blocks that were seen there
        self._changed_ns: dict[str, int] = {}  # folder -> its time of change at the last scan
        self._claimed: tuple[int, ...] = ()  # of the manifest that was read last

    def path_of(self, key: bytes) -> Path:
        return self.root / f"{key[0]:02x}" / name_of(key)

    def folder(self, key: bytes, *, is_made: bool = False) -> _Folder:
        """A descriptor of a block's folder. One that is a link is refused: what it leads to is not the tier's."""
        path = f"{self._root}/{key[0]:02x}"
        try:
            return _open_folder(path)
        except FileNotFoundError:
            if not is_made:
                raise
        self.claim()  # the directory may have been removed, or made anew
        _make_folder(Path(path))
        return _open_folder(path)

    # --- whose it is ------------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Say in the directory what its blocks are, or find that they are the same. The first of several processes says it."""
        path = self.root / MANIFEST
        if _make_folder(self.root) is False and not self._claimed:
            mode = self.root.stat().st_mode
            if mode & 0o022 and not mode & stat.S_ISVTX:
                warnings.warn(
                    f"DiskTier: {self.root} can be written to by other users (mode {stat.S_IMODE(mode):o}): they can put blocks of "
                    "theirs in place of yours. chmod 700 keeps them out.",
                    KvxWarning, stacklevel=4,
                )  # fmt: skip
        try:
            fd = open_file(path)
        except FileNotFoundError:
            _write_manifest(path, self.kind, self.fsync)
            fd = open_file(path)
        except Damaged as error:
            raise _damaged(path, error) from None
        with open(fd, "rb") as file:
            s = os.fstat(fd)
            if (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) == self._claimed:
                return
            if s.st_uid == os.geteuid() and s.st_mode & 0o077:
                with suppress(OSError):  # a directory that can only be read
                    os.fchmod(fd, 0o600)
            data = file.read(_MOST_MANIFEST_BYTES)
        self.kind.require_same(_kind_of(path, data), "DiskTier")
        self._claimed = s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns

    # --- what is in it ----------------------------------------------------------------------------------------------------

    def use(self, key: bytes, at_ns: int) -> None:
        """This process wrote or read the block."""
        self.recency.use(key, at_ns)
        self._known.setdefault(f"{key[0]:02x}", set()).add(key)

    def mark_used(self, key: bytes, file: int, lock: threading.Lock) -> None:
        """This process read the block, from this open file. `lock` is the owner's, who does not hold it now."""
        with lock:
            used_ns = self.recency.now_ns()
        with suppress(OSError):  # a directory that can only be read: the order is then of this process
            os.utime(file, ns=(used_ns, used_ns))
        with lock:
            if os.fstat(file).st_nlink:  # an open file may have been evicted since: it is not to be counted again
                self.use(key, used_ns)

    def refresh(self) -> None:
        """Learn what other processes wrote and removed, and clear away what killed writers left."""
        self.claim()
        seen = set()
        for entry in list(os.scandir(self.root)):
            if not _FOLDER.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                if entry.name.startswith(f".{MANIFEST}."):
                    self._is_young_partial(entry)
                continue
            seen.add(entry.name)
            try:
                self._look_into(entry)
            except FileNotFoundError:  # a folder that somebody removed
                seen.discard(entry.name)
            except OSError as error:  # its blocks are missed; the others are there
                self.unreadable[entry.name] = str(error)
        self.unreadable = {name: why for name, why in self.unreadable.items() if name in seen}
        for gone in self._known.keys() - seen:
            self.recency.forget(self._known.pop(gone))
            self._changed_ns.pop(gone, None)

    def _look_into(self, entry: os.DirEntry[str]) -> None:
        looked_ns = time.time_ns()  # before: what is written while it is looked at may have the time of change that was seen
        found = entry.stat(follow_symlinks=False)
        if self._changed_ns.get(entry.name) == found.st_mtime_ns:
            return
        with _open_folder(entry.path) as fd:
            if found.st_uid == os.geteuid() and found.st_mode & 0o077:
                with suppress(OSError):  # a directory that can only be read
                    os.fchmod(fd, 0o700)  # made by an earlier version, which left it to the umask
            has_partial = self._scan(fd, entry.name)
        self.unreadable.pop(entry.name, None)
        # A folder with unfinished files is looked at again, since they grow old without a change of it.
        is_settled = not has_partial and abs(looked_ns - found.st_mtime_ns) > _TICK_NS
        self._changed_ns[entry.name] = found.st_mtime_ns if is_settled else -1

    def _scan(self, fd: int, folder: str) -> bool:
        """Whether unfinished files are left there."""
        seen, has_partial = set(), False
        for entry in list(os.scandir(fd)):
            with suppress(OSError):  # gone since, or not ours to touch: another process is at work here too
                if self._is_young_partial(entry, folder, fd):
                    has_partial = True
                elif (key := _key_of(entry.name, folder)) is not None and entry.is_file(follow_symlinks=False):
                    if key not in self.recency:
                        self.recency.use(key, _used_ns(entry.stat(follow_symlinks=False)))
                    seen.add(key)
        self.recency.forget(self._known.get(folder, set()) - seen)
        self._known[folder] = seen
        return has_partial

    def _is_young_partial(self, entry: os.DirEntry[str], folder: str = MANIFEST, fd: int | None = None) -> bool:
        """Whether it is a tier's unfinished file that may have a writer. An old one is removed."""
        match = _UNFINISHED.fullmatch(entry.name)
        if match is None or not match[1].startswith(folder) or not entry.is_file(follow_symlinks=False):
            return False
        with suppress(OSError):  # gone since, or not ours to remove
            if time.time() - entry.stat(follow_symlinks=False).st_mtime <= self.grace_s:
                return True
            os.unlink(entry.path if fd is None else entry.name, dir_fd=fd)
        return False

    def evict_to(self, num_blocks: int) -> Iterator[tuple[bytes, OSError | None]]:
        """Remove those used longest ago until so many are left. With each its error, where the system refused."""
        while len(self.recency) > num_blocks:
            oldest = self.recency.take_oldest()
            if oldest is None:
                return
            key, used_ns = oldest
            name = name_of(key)
            try:
                with self.folder(key) as fd:
                    found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if _used_ns(found) == found.st_mtime_ns > used_ns:  # another process used it
                        self.recency.use(key, found.st_mtime_ns)
                        continue
                    os.unlink(name, dir_fd=fd)
            except OSError as error:  # FileNotFoundError: another process evicted it
                yield key, error
                continue
            yield key, None


class _Folder(int):
    """A descriptor, closed when its `with` is left."""

    def __enter__(self) -> int:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self)


def name_of(key: bytes) -> str:
    return f"{key.hex()}{SUFFIX}"


def partial_name(name: str) -> str:
    """Of a file being written, which gets this name when it is whole."""
    return f".{name.removesuffix(SUFFIX)}.{os.getpid()}.{next(_numbers)}{PARTIAL}"


def read_manifest(root: Path) -> BlockKind | None:
    """The kind of the blocks in a directory; None where it does not say."""
    path = root / MANIFEST
    try:
        fd = open_file(path)
    except FileNotFoundError:
        return None
    except Damaged as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise TierError(f"DiskTier: {root} cannot be used: {error}.") from error
    with open(fd, "rb") as file:
        return _kind_of(path, file.read(_MOST_MANIFEST_BYTES))


def _kind_of(path: Path, data: bytes) -> BlockKind:
    try:
        return kind_from_text(data.decode())
    except (BadArgument, UnicodeDecodeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> BadArgument:
    return BadArgument(f"DiskTier: {path} is damaged: {str(error).rstrip('.')}. Remove it, or give another directory.")


def _write_manifest(path: Path, kind: BlockKind, is_synced: bool) -> None:
    partial = path.with_name(partial_name(path.name))
    try:
        with open(new_file(partial), "wb") as file:
            file.write(kind.text.encode())
            file.flush()
            _sync(file.fileno(), is_synced)
        try:
            os.link(partial, path)  # unlike a rename, it does not take another's place
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(fd, is_synced)
    finally:
        os.close(fd)


def _sync(fd: int, is_needed: bool) -> None:
    try:
        os.fsync(fd)
    except OSError:  # a file system that cannot can keep blocks all the same
        if is_needed:
            raise


def new_file(path: str | Path, dir_fd: int | None = None, flags: int = 0) -> int:
    """A file that is new, and its owner's alone whatever the umask: K and V tell what was asked."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600, dir_fd=dir_fd)
    with suppress(OSError):  # a file system without modes; the umask can only have taken bits away
        os.fchmod(fd, 0o600)
    return fd


def _make_folder(path: Path) -> bool:
    """A folder that is its owner's alone, and those above it that are missing. False where it was there."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return False
    except FileNotFoundError:
        _make_folder(path.parent)
        os.mkdir(path, 0o700)
    with suppress(OSError):  # a file system without modes
        os.chmod(path, 0o700)
    return True


def _open_folder(path: str) -> _Folder:
    try:
        return _Folder(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW))
    except NotADirectoryError as error:
        what = "a symbolic link" if os.path.islink(path) else "no folder"
        why = f"it is {what}, and a tier writes into folders of its own only; remove it"
        raise NotADirectoryError(error.errno, why, path) from None


def _used_ns(found: os.stat_result) -> int:
    """When a file was used last. A date that is long from now is no use: it counts as one of this moment."""
    now_ns = time.time_ns()
    return found.st_mtime_ns if found.st_mtime_ns <= now_ns + _SKEW_NS else now_ns


def _key_of(name: str, folder: str) -> bytes | None:
    """Of a name that path_of gives in this folder."""
    digits = name.removesuffix(SUFFIX)
    if not name.endswith(SUFFIX) or not digits.startswith(folder) or not 0 < len(digits) <= 2 * MOST_KEY_BYTES:
        return None
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        return None
    return key if key.hex() == digits else None
