"""Host memory that several processes see: a directory in memory, which goes with the engine that they are.

An engine's scheduler and its workers may be processes of their own, and a HostTier is one's alone. Blocks in such a directory are
files as on a disk (kvx/tiers/disk.py). The first process that ends in order removes it, since the others are ending too and may be
killed before they can. Each holds a lock in it, which the kernel takes back from one that was killed: what nobody holds any more
is removed by whoever comes next.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import time
from pathlib import Path

from kvx.errors import BadArgument, TierError
from kvx.spec.byte_size import byte_text
from kvx.tiers import TierOption

ROOT = Path("/dev/shm")
_YOUNG_S = 60.0  # who made a folder may not hold it yet


class SharedHost:
    """The folder of one engine, by a name that all its processes have."""

    def __init__(self, name: str, capacity_bytes: int) -> None:
        self.path = ROOT / f"{_mine()}{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
        _remove_abandoned(self.path)
        room = os.statvfs(ROOT)
        if capacity_bytes > room.f_bavail * room.f_frsize:
            raise BadArgument(
                f'tier "host:{byte_text(capacity_bytes)}": workers are processes of their own, and share host memory in {ROOT}, '
                f"which has {byte_text(room.f_bavail * room.f_frsize)} left. Give less, make it larger (docker run --shm-size), or "
                "give a directory: disk:DIR."
            )
        self.path.mkdir(mode=0o700, exist_ok=True)
        if self.path.is_symlink() or self.path.stat().st_uid != os.getuid():
            raise TierError(f"{self.path} is another user's; it was not used.")
        self._fd = os.open(self.path / "held", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        atexit.register(self.close)

    def option(self, capacity_bytes: int) -> TierOption:
        return TierOption("disk", capacity_bytes, self.path)

    def close(self) -> None:
        """The engine ends: what others of its processes still look for there is a miss."""
        atexit.unregister(self.close)
        fd, self._fd = self._fd, -1
        if fd >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(fd)


def _mine() -> str:
    return f"kvx-{os.getuid()}-"


def _remove_abandoned(but: Path) -> None:
    for path in ROOT.glob(f"{_mine()}*"):
        try:
            is_old = path != but and time.time() - path.stat().st_mtime > _YOUNG_S
            if is_old and not _is_held(path / "held"):
                shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:  # another removed it
            continue


def _is_held(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
