"""The folders of a disk tier, and what this process knows of them: which blocks there are, and which was used longest ago.

The folders are the truth and are shared with other processes; the order is in the files' times of change, so it outlives them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvx.tiers.recency import Recency

SUFFIX, PARTIAL = ".kvx", ".partial"
# A folder's time of change moves in ticks of the kernel's clock, 10 ms at most: one that changed just now may change again unseen.
_TICK_NS = 50_000_000


class Directory:
    """Not thread-safe but for path_of: its owner has the lock."""

    def __init__(self, root: Path, *, grace_s: float) -> None:
        self.root, self.grace_s = root, grace_s
        self.recency = Recency()
        self._known: dict[str, set[bytes]] = {}  # folder -> blocks that were seen there
        self._changed_ns: dict[str, int] = {}  # folder -> its time of change at the last scan

    def path_of(self, key: bytes) -> Path:
        return self.root / f"{key[0]:02x}" / f"{key.hex()}{SUFFIX}"

    def use(self, key: bytes, at_ns: int) -> None:
        """This process wrote or read the block."""
        self.recency.use(key, at_ns)
        self._known.setdefault(f"{key[0]:02x}", set()).add(key)

    def refresh(self) -> None:
        """Learn what other processes wrote and removed, and clear away what killed writers left."""
        for entry in list(os.scandir(self.root)):
            if len(entry.name) != 2 or not entry.is_dir():
                self._is_young_partial(entry)
                continue
            with suppress(FileNotFoundError):  # a folder that somebody removed
                changed = entry.stat().st_mtime_ns
                if self._changed_ns.get(entry.name) == changed:
                    continue
                has_partial = self._scan(entry.name)
                # A folder with unfinished files is looked at again, since they grow old without a change of it.
                is_settled = not has_partial and abs(time.time_ns() - changed) > _TICK_NS
                self._changed_ns[entry.name] = changed if is_settled else -1

    def _scan(self, folder: str) -> bool:
        """Whether unfinished files are left there."""
        seen, has_partial = set(), False
        for entry in list(os.scandir(self.root / folder)):
            with suppress(OSError):  # gone since, or not ours to touch: another process is at work here too
                if self._is_young_partial(entry):
                    has_partial = True
                elif (key := _key_of(entry.name)) is not None:
                    if key not in self.recency:
                        self.recency.use(key, entry.stat().st_mtime_ns)
                    seen.add(key)
        self.recency.forget(self._known.get(folder, set()) - seen)
        self._known[folder] = seen
        return has_partial

    def _is_young_partial(self, entry: os.DirEntry[str]) -> bool:
        """Whether it is an unfinished file that may have a writer. An old one is removed."""
        if not entry.name.endswith(PARTIAL):
            return False
        with suppress(OSError):  # gone since, or not ours to remove
            if time.time() - entry.stat().st_mtime <= self.grace_s:
                return True
            os.unlink(entry.path)
        return False

    def evict_to(self, num_blocks: int) -> Iterator[tuple[bytes, OSError | None]]:
        """Remove those used longest ago until so many are left. With each its error, where the system refused."""
        while len(self.recency) > num_blocks:
            oldest = self.recency.take_oldest()
            if oldest is None:
                return
            key, used_ns = oldest
            path = self.path_of(key)
            try:
                now_ns = os.stat(path).st_mtime_ns
                if now_ns > used_ns:  # another process used it
                    self.recency.use(key, now_ns)
                    continue
                os.unlink(path)
            except FileNotFoundError:
                continue  # another process evicted it
            except OSError as error:
                yield key, error
                continue
            yield key, None


def _key_of(name: str) -> bytes | None:
    if not name.endswith(SUFFIX) or name.startswith("."):
        return None
    try:
        return bytes.fromhex(name.removesuffix(SUFFIX))
    except ValueError:
        return None
