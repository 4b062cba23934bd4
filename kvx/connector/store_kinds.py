"""What else a store has of the same tokens: blocks of other layouts, formats, shards and block sizes, which a reader converts.

A directory has a folder for each kind of block. Those of one model whose planes are the reader's, and whose shards together hold
its layers and heads, are a family: any of them will do. States are sought likewise, by the shares of their planes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from kvx.connector.store_names import BLOCK_SIZE, NAMES, Alias, Scheme, alias_schemes, any_spec_of, read_alias
from kvx.errors import KvxError
from kvx.handover.memory import has_scales
from kvx.layout.plan import Plan, plan
from kvx.spec import CacheSpec, Spec, StateSpec
from kvx.tiers import Block, BlockKind, DiskTier, Tier, TierOption
from kvx.tiers.directory import read_manifest

REFRESH_S = 1.0
_OF_A_SHARD = ("layer_start", "num_layers", "head_start", "num_kv_heads")
Span = tuple[int, int]  # of layers or heads: the first, and one past the last


@dataclass(frozen=True, eq=False)
class Family:
    """Shards that together hold what the reader wants, each in a tier."""

    scheme: Scheme
    specs: tuple[Spec, ...]  # of one block
    tiers: tuple[Tier, ...]
    layers: Span  # that the reader wants; its memory may have more, which no engine fills
    _plans: dict[tuple[int, Spec], Plan] = field(default_factory=dict, repr=False)

    def has(self, names: Sequence[bytes]) -> list[bool]:
        return [all(found) for found in zip(*(tier.has_now(names) for tier in self.tiers), strict=True)]

    def get(self, names: Sequence[bytes]) -> list[tuple[Block, ...] | None]:
        """Of each name a block of every shard."""
        found = [tier.get_now(names) for tier in self.tiers]
        return [None if None in blocks else tuple(b for b in blocks if b is not None) for blocks in zip(*found, strict=True)]

    def plan(self, count: int, dst: Spec) -> Plan:
        """From so many blocks of every shard, shard after shard."""
        if (count, dst) not in self._plans:
            shards = [s.replaced(num_blocks=count) for s in self.specs]
            self._plans[count, dst] = plan(shards, dst, layers=self.layers, partial=True)
        return self._plans[count, dst]


class OtherKinds:
    """Looked for in directories, at most once a second."""

    def __init__(self, options: Sequence[TierOption], mine: BlockKind, spec: Spec, own: Scheme) -> None:
        self._options = [option for option in options if option.path is not None]
        self._mine, self._spec, self._own = mine, spec, own
        self._beside = _beside(mine)
        self._lock = threading.Lock()
        self._tiers: dict[Path, tuple[BlockKind, Tier] | None] = {}  # folder -> its blocks; None: not for this reader
        self._families: list[Family] = []
        self._aliases: list[tuple[Scheme, Tier]] = []  # records for the reader's pages, and the blocks that they lead to
        self._sizes: set[int] = set()  # of blocks of the same model's K and V by KVX's names
        self._looked_s = -REFRESH_S

    def families(self, scheme: Scheme) -> list[Family]:
        return [f for f in self.every_family() if f.scheme in (scheme, Scheme(scheme.names, 0))]

    def every_family(self) -> list[Family]:
        self._look()
        return self._families

    def rule_sizes(self) -> list[int]:
        """Tokens of the blocks that the same model's K and V have by KVX's names: the names under which states may be."""
        self._look()
        return sorted(self._sizes)

    def schemes(self) -> dict[Scheme, dict[Path, list[Tier]]]:
        """Whose blocks there are, and how large, whether they are all of the reader's heads or not: by directory, their tiers."""
        self._look()
        found: dict[Scheme, dict[Path, list[Tier]]] = {}
        for folder, kept in self._tiers.items():
            if kept is not None and alias_schemes(kept[0]) is None:
                found.setdefault(Scheme.of(kept[0]), {}).setdefault(folder.parent, []).append(kept[1])
        return found

    def alias(self, name: bytes) -> list[tuple[Alias, Scheme, Family]]:
        """Blocks of other schemes that have the tokens of this page, as far as records say."""
        self._look()
        found = []
        for scheme, tier in self._aliases:
            (block,) = tier.get_now([name])
            if block is not None:
                found += [(read_alias(block), scheme, family) for family in self.families(scheme)]
        return found

    def _look(self) -> None:
        with self._lock:
            if time.monotonic() - self._looked_s < REFRESH_S:
                return
            for option in self._options:
                assert option.path is not None
                for folder in sorted(option.path.iterdir()) if option.path.is_dir() else ():
                    if folder not in self._tiers and folder.is_dir():
                        self._open(folder, option)
            self._sort()
            self._looked_s = time.monotonic()

    def _open(self, folder: Path, option: TierOption) -> None:
        try:
            kind = read_manifest(folder)
            if kind is None:  # being made
                return
            is_mine = is_plain(folder, kind) and self._may_read(kind)
            scheme = Scheme.of(kind)
            if not scheme.names and scheme.block_size > 0 and kind.manifest.get("model") == self._spec.model:
                self._sizes.add(scheme.block_size)
            self._tiers[folder] = (kind, DiskTier(folder, kind, option.capacity_bytes, threads=2)) if is_mine else None
        except (KvxError, OSError):  # another's, damaged or not to be read: not this reader's to mend
            self._tiers[folder] = None

    def _may_read(self, kind: BlockKind) -> bool:
        # A state of the reader's own kind may stand there under the name of a block of another size.
        is_own = kind.text == self._mine.text and not (isinstance(self._spec, StateSpec) and not self._own.names)
        if is_own or kind.manifest.get("model") != self._mine.manifest.get("model"):
            return False
        schemes = alias_schemes(kind)
        if schemes is not None:
            return schemes[0] == self._own
        found = any_spec_of(kind)
        return found is not None and _beside(kind) == self._beside and _matches(found[0], self._spec)

    def _sort(self) -> None:
        kept = [found for found in self._tiers.values() if found is not None]
        self._aliases = [(schemes[1], tier) for kind, tier in kept if (schemes := alias_schemes(kind)) is not None]
        found = [(spec[0], Scheme.of(kind), tier) for kind, tier in kept if (spec := any_spec_of(kind)) is not None]
        self._families = list(_of_kv(found, self._spec) if isinstance(self._spec, CacheSpec) else _of_states(found, self._spec))

    def close(self) -> None:
        for found in self._tiers.values():
            if found is not None:
                found[1].close()


def _of_kv(kept: Collection[tuple[Spec, Scheme, Tier]], wanted: CacheSpec) -> Iterator[Family]:
    # Of blocks that differ in their layers and heads alone: by both, since two directories may have the same.
    alike: dict[tuple[Scheme, tuple[object, ...]], dict[Span, dict[Span, tuple[CacheSpec, Tier]]]] = {}
    for spec, scheme, tier in kept:
        assert isinstance(spec, CacheSpec)
        rest = tuple(getattr(spec, f.name) for f in fields(spec) if f.compare and f.name not in _OF_A_SHARD)
        alike.setdefault((scheme, rest), {}).setdefault(_layers(spec), {})[_heads(spec)] = (spec, tier)
    for (scheme, _), by_layers in alike.items():
        ranks = {layers: _chains(by_heads, _heads(wanted)) for layers, by_heads in by_layers.items()}
        for stages in _chains([layers for layers, found in ranks.items() if found], _layers(wanted)):
            for choice in zip(*(ranks[layers] for layers in stages), strict=False):  # of one stage each of its chains
                shards = [by_layers[layers][heads] for layers, chain in zip(stages, choice, strict=True) for heads in chain]
                yield Family(scheme, tuple(s for s, _ in shards), tuple(t for _, t in shards), _layers(wanted))


def _of_states(kept: Collection[tuple[Spec, Scheme, Tier]], wanted: Spec) -> Iterator[Family]:
    """Ranks of one number have shares of the same sizes. Whether they are all that is wanted, the planner says."""
    alike: dict[tuple[Scheme, tuple[object, ...]], dict[object, tuple[Spec, Tier]]] = {}
    for spec, scheme, tier in kept:
        sizes = spec.layout, _layers(spec), tuple(p.axes for p in spec.planes)
        alike.setdefault((scheme, sizes), {})[tuple(p.shares for p in spec.planes)] = (spec, tier)
    for (scheme, _), ranks in alike.items():
        specs, tiers = zip(*ranks.values(), strict=True)
        family = Family(scheme, specs, tiers, _layers(wanted))
        try:
            family.plan(1, wanted)
        except KvxError:  # a rank's state is not there yet
            continue
        yield family


def _layers(spec: Spec) -> Span:
    return spec.layer_start, spec.layer_start + spec.num_layers


def _heads(spec: CacheSpec) -> Span:
    return spec.head_start, spec.head_start + spec.num_kv_heads


def _chains(spans: Collection[Span], wanted: Span) -> list[list[Span]]:
    """Spans that follow each other without gap or overlap and hold the wanted one: a chain for each width, of spans no wider.

    Ranks may have unequal shares: two of three heads have two and one. Ways to mix several numbers of ranks are not listed: there
    are hundreds of thousands of them where a directory has blocks of 1, 2, 4, ... 32 ranks.
    """
    found: list[list[Span]] = []
    for most in sorted({end - start for start, end in spans}, reverse=True):
        chain, at = list[Span](), wanted[0]
        while at < wanted[1]:
            fitting = [s for s in spans if s[1] - s[0] <= most and (s[0] == at or (not chain and s[0] < at < s[1]))]
            if not fitting:
                break
            chain.append(max(fitting, key=lambda s: s[1] - s[0]))
            at = chain[-1][1]
        else:
            if chain not in found:
                found.append(chain)
    return found


def is_plain(folder: Path, kind: BlockKind) -> bool:
    """Whether its kind says all. A folder with a group behind the digest has layers that look like another group's."""
    return folder.name == kind.digest.hex()


def _beside(kind: BlockKind) -> dict[str, str | int]:
    found = any_spec_of(kind)
    return {} if found is None else {name: value for name, value in found[1].items() if name not in (NAMES, BLOCK_SIZE)}


def _matches(theirs: Spec, mine: Spec) -> bool:
    """Whether blocks of theirs hold what mine wants, or some of its layers and heads."""
    if not _meet(_layers(theirs), _layers(mine)):
        return False
    if isinstance(theirs, CacheSpec) and isinstance(mine, CacheSpec):
        rows = [(p.name, p.head_dim) for p in theirs.planes] == [(p.name, p.head_dim) for p in mine.planes]
        return rows and _meet(_heads(theirs), _heads(mine)) and not has_scales(theirs)
    # States of another type are left alone: nobody has compared what a model says after one that was rounded.
    return type(theirs) is type(mine) and _rows(theirs) == _rows(mine)


def _meet(a: Span, b: Span) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _rows(spec: Spec) -> list[tuple[object, ...]]:
    return [(p.name, p.format, *(axis for axis in p.axes if axis[0] != p.shard_axis)) for p in spec.planes]
