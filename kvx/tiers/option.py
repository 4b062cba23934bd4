"""A tier as people write it: host:2GB, disk:DIR, disk:DIR:100GB. The runner and other engines' adapters read the same words.

A directory has a folder for each kind of block, named by the kind's digest: models, formats, block sizes and ranks are kinds of
their own, and so never meet; engines that keep the same kind do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kvx.errors import BadArgument
from kvx.spec.byte_size import parse_bytes
from kvx.tiers.block import BlockKind
from kvx.tiers.disk import DiskTier
from kvx.tiers.host import HostTier
from kvx.tiers.tier import Tier

DISK_BYTES = 32 * 1000**3  # of a directory whose size is not said


@dataclass(frozen=True)
class TierOption:
    kind: str  # "host" or "disk"
    capacity_bytes: int
    path: Path | None = None  # of a disk

    @classmethod
    def parse(cls, text: str) -> TierOption:
        kind, _, rest = text.partition(":")
        if kind == "host" and rest:
            return cls("host", parse_bytes(rest, f'tier "{text}": the size'))
        if kind == "disk" and rest:
            folder, _, size = rest.rpartition(":")
            if not folder or not size[:1].isdigit():  # a colon of the folder's own, or none
                return cls("disk", DISK_BYTES, Path(rest))
            return cls("disk", parse_bytes(size, f'tier "{text}": the size'), Path(folder))
        raise BadArgument(f'tier "{text}" is none: it is host:SIZE, disk:DIR or disk:DIR:SIZE, like host:2GB or disk:/tmp/kv:50GB.')

    def share(self, part: int, whole: int) -> TierOption:
        """What one of several kinds has of it, by the bytes of their blocks."""
        return replace(self, capacity_bytes=self.capacity_bytes * part // whole)

    def open(self, kind: BlockKind, *, group: str = "", pin_memory: bool = False) -> Tier:
        """`group` tells layer groups apart whose blocks look alike."""
        if self.path is None:
            return HostTier(kind, self.capacity_bytes, pin_memory=pin_memory)
        return DiskTier(self.path / "-".join(filter(None, (kind.digest.hex(), group))), kind, self.capacity_bytes)
