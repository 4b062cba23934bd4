"""A tier as people write it: host:2GB, disk:DIR, disk:DIR:100GB. The runner and other engines' adapters read the same words.

A directory has a folder for each kind of block, named by the kind's digest: models, formats, block sizes and ranks are kinds of
their own, and so never meet; engines that keep the same kind do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
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
    """A tier as people write it: `host:2GB`, `disk:DIR`, `disk:DIR:50GB`."""

    kind: str  # "host" or "disk"
    capacity_bytes: int
    path: Path | None = None  # of a disk

    @classmethod
    def parse(cls, text: str) -> TierOption:
        """What stands after the last colon is a size, unless a slash is in it: a folder with a colon in its name ends in one."""
        kind, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        if kind == "host" and rest:
            return cls("host", _size(text, rest))
        if kind == "disk" and rest:
            folder, colon, size = rest.rpartition(":")
            if not colon or "/" in size:
                return cls("disk", DISK_BYTES, Path(rest))
            if folder:
                return cls("disk", _size(text, size), Path(folder))
        raise BadArgument(f'tier "{text}" is none: it is host:SIZE, disk:DIR or disk:DIR:SIZE, like host:2GB or disk:/tmp/kv:50GB.')

    def share(self, part: int, whole: int) -> TierOption:
        """What one of several kinds has of it, by the bytes of their blocks."""
        return replace(self, capacity_bytes=self.capacity_bytes * part // whole)

    def open(self, kind: BlockKind, *, group: str = "", pin_memory: bool = False, direct: bool = False) -> Tier:
        """`group` tells layer groups apart whose blocks look alike; `direct` is a DiskTier's."""
        if self.path is None:
            return HostTier(kind, self.capacity_bytes, pin_memory=pin_memory)
        return DiskTier(self.path / "-".join(filter(None, (kind.digest.hex(), group))), kind, self.capacity_bytes, direct=direct)


def open_tiers(
    options: Sequence[TierOption], kinds: Sequence[BlockKind], groups: Sequence[str], *, pin_memory: bool = False
) -> list[list[Tier]]:
    """The options opened for every kind of block. Kinds share a size by the bytes of their blocks, and a directory by folders."""
    whole = sum(kind.num_bytes for kind in kinds)
    names = groups if len(kinds) > 1 else [""]
    with ExitStack() as stack:  # closed again where one cannot be opened
        opened = [
            [stack.enter_context(o.share(kind.num_bytes, whole).open(kind, group=name, pin_memory=pin_memory)) for o in options]
            for kind, name in zip(kinds, names, strict=True)
        ]
        stack.pop_all()
    return opened


def _size(tier: str, text: str) -> int:
    try:
        size = parse_bytes(text, f'tier "{tier}": the size')
    except BadArgument as error:
        if text[:1].isdigit() or not tier.startswith("disk"):
            raise
        raise BadArgument(f"{error} A folder with a colon in its name ends in a slash: {tier}/.") from None
    if size < 1:
        raise BadArgument(f'tier "{tier}": the size is "{text}", less than a byte; it has room for a block or more, like 2GB.')
    return size
