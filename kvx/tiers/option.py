"""A tier as people write it: host:2GB, disk:DIR:100GB, nixl:HOST:PORT:20GB, mooncake:HOST:PORT. The runner and other engines'
adapters read the same words.

A directory has a folder for each kind of block, named by the kind's digest: models, formats, block sizes and ranks are kinds of
their own, and so never meet; engines that keep the same kind do. The other stores tell kinds apart in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from kvx.errors import BadArgument, KvxError, TierError
from kvx.spec.byte_size import parse_bytes
from kvx.tiers.block import BlockKind
from kvx.tiers.disk import DiskTier
from kvx.tiers.host import HostTier
from kvx.tiers.pack_file import most_blocks
from kvx.tiers.packs import PackTier, pack_kind
from kvx.tiers.tier import Tier

DISK_BYTES = 32 * 1000**3  # of a directory whose size is not said
TIERS = "host:SIZE, disk:DIR, disk:DIR:SIZE, nixl:HOST:PORT:SIZE, mooncake:HOST:PORT or mooncake:HOST:PORT:SIZE"


@dataclass(frozen=True)
class TierOption:
    """A tier as people write it: `host:2GB`, `disk:DIR`, `disk:DIR:50GB`, `nixl:10.0.0.7:5700:20GB`, `mooncake:10.0.0.7:50051`."""

    kind: str  # "host", "disk", "nixl" or "mooncake"
    capacity_bytes: int  # of mooncake: what each process gives to the store
    path: Path | None = None  # of a disk
    address: str = ""  # HOST:PORT of `kvx store` (nixl), or of a mooncake_master

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
        if kind in ("nixl", "mooncake") and rest:
            return cls._at_an_address(kind, text, rest)
        raise BadArgument(f'tier "{text}" is none: it is {TIERS}, like host:2GB or disk:/tmp/kv:50GB.')

    @classmethod
    def _at_an_address(cls, kind: str, text: str, rest: str) -> TierOption:
        from kvx.wires.address import host_and_port

        address, colon, size = rest.rpartition(":")
        if not colon or size.isdecimal():  # a port: a size has a unit
            address, size = rest, ""
        try:
            host, _ = host_and_port(address)
        except BadArgument as error:  # which of several tiers it is
            raise BadArgument(f'tier "{text}": {error}') from None
        if host.count(":") == 1:  # an IPv6 address has more
            raise BadArgument(f'tier "{text}": {address.rpartition(":")[2]} reads as a port; a size has a unit, like 20GB.')
        if kind == "nixl" and not size:
            raise BadArgument(f'tier "{text}": how much of that memory it takes is not said; it is {text}:SIZE, like {text}:20GB.')
        return cls(kind, _size(text, size) if size else 0, address=address)

    @property
    def is_host(self) -> bool:
        """In this process's own memory: no other process finds it."""
        return self.kind == "host"

    def share(self, part: int, whole: int) -> TierOption:
        """What one of several kinds has of it, by the bytes of their blocks. All kinds are in one store of Mooncake."""
        if self.kind == "mooncake":
            return self
        return replace(self, capacity_bytes=self.capacity_bytes * part // whole)

    def open(
        self,
        kind: BlockKind,
        *,
        group: str = "",  # tells layer groups apart whose blocks look alike
        pin_memory: bool = False,
        direct: bool = False,  # of a directory: past the system's cache
        packed: bool = False,  # of a directory: several to a file, where a block is so small that it gains by that
    ) -> Tier:
        if self.path is not None:
            return self._open_folder(self.path, kind, group, direct=direct, packed=packed)
        if self.is_host:
            return HostTier(kind, self.capacity_bytes, pin_memory=pin_memory)
        try:
            return self._open_remote(kind, group)
        except KvxError as error:  # which of several tiers it is
            what, hint = (TierError, self._hint) if isinstance(error, TierError) else (type(error), "")
            raise what(f"tier {self.kind}:{self.address}: {error}{hint}") from error

    def _open_folder(self, path: Path, kind: BlockKind, group: str, *, direct: bool, packed: bool) -> Tier:
        if packed and most_blocks(kind) > 1:
            folder = "-".join(filter(None, (pack_kind(kind).digest.hex(), group)))
            return PackTier(path / folder, kind, self.capacity_bytes, direct=direct)
        return DiskTier(path / "-".join(filter(None, (kind.digest.hex(), group))), kind, self.capacity_bytes, direct=direct)

    @property
    def _hint(self) -> str:
        return f" Is `kvx store --listen {self.address} --size SIZE` running there?" if self.kind == "nixl" else ""

    def _open_remote(self, kind: BlockKind, group: str) -> Tier:
        """Their packages are loaded when they are chosen. A missing one, or nobody who answers, is said at once or in 5 s."""
        if self.kind == "mooncake":
            from kvx.tiers.mooncake_tier import MooncakeTier

            return MooncakeTier.join(self.address, kind, segment_bytes=self.capacity_bytes, group=group)
        from kvx.tiers.nixl_tier import AGAIN_S, ArenaAsk, NixlTier
        from kvx.wires.address import host_and_port
        from kvx.wires.nixl.agent import load
        from kvx.wires.secret import HOME, read_secret

        load()  # before the secret is looked for
        ask = ArenaAsk(self.capacity_bytes, group)
        return NixlTier(*host_and_port(self.address), kind, secret=read_secret(HOME), ask=ask, retry_s=AGAIN_S)


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
        if text[:1].isdigit() or not tier.startswith("disk:"):
            raise
        raise BadArgument(f"{error} A folder with a colon in its name ends in a slash: {tier}/.") from None
    if size < 1:
        raise BadArgument(f'tier "{tier}": the size is "{text}", less than a byte; it has room for a block or more, like 2GB.')
    return size
