"""Names and blocks cut into parts that one area takes. A cache's blocks may have more or fewer tokens than the tiers' have.

All of it is lazy: the first part is on its way while the next are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvx.errors import BadArgument, OutOfRange
from kvx.spec.cache_spec import CacheSpec


class Group(NamedTuple):
    """The least that is whole on both sides: one block of the cache and its names, or one name and its blocks."""

    ids: list[int]
    names: list[bytes | None]  # None: not wanted


class Part(NamedTuple):
    """What one area takes."""

    ids: list[int]
    places: list[int]  # of each name that the ids have room for; -1: not wanted
    names: list[bytes]  # those wanted


def unknown(groups: Iterable[Group], known: set[bytes]) -> Iterator[Group]:
    """Each name that is not known, once: they are known then."""
    for group in groups:
        wanted: list[bytes | None] = []
        for name in group.names:
            wanted.append(None if name in known else name)
            known.add(name or b"")
        if any(wanted):
            yield Group(group.ids, wanted)


def parts_of(groups: Iterable[Group], area_blocks: int) -> Iterator[Part]:
    part = Part([], [], [])
    for group in groups:
        if part.places and len(part.places) + len(group.names) > area_blocks:
            yield part
            part = Part([], [], [])
        part.ids.extend(group.ids)
        for name in group.names:
            part.places.append(-1 if name is None else len(part.names))
            if name is not None:
                part.names.append(name)
    if part.places:
        yield part


def groups_of(call: str, names: Sequence[bytes], blocks: Sequence[int], spec: CacheSpec, kept: CacheSpec) -> Iterator[Group]:
    """Wrong ones are refused before the first."""
    ids, a, b = [int(i) for i in blocks], spec.block_size, kept.block_size
    if len(names) * b != len(ids) * a:
        raise BadArgument(f"{call}(): {len(names)} names of {b} tokens and {len(ids)} blocks of {a}; they have as many tokens.")
    if ids and not (min(ids) >= 0 and max(ids) < spec.num_blocks):
        raise OutOfRange(f"{call}(): blocks are {min(ids)} to {max(ids)}; the cache has 0 to {spec.num_blocks - 1}. Nothing moved.")
    m, k = max(1, b // a), max(1, a // b)
    return (Group(ids[i * m : (i + 1) * m], list(names[i * k : (i + 1) * k])) for i in range(len(names) // k))
