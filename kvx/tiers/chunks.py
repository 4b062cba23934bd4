"""Names and blocks cut into chunks that one staging area takes. A cache's blocks may have more or fewer tokens than the tiers'.

All of it is lazy: the first chunk is on its way while the next are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvx.errors import BadArgument, OutOfRange
from kvx.spec.cache_spec import Spec


class AlignedBlocks(NamedTuple):
    """The least that is whole on both sides: one block of the cache and its names, or one name and its blocks."""

    ids: list[int]
    names: list[bytes | None]  # None: not wanted


class Chunk(NamedTuple):
    """What one staging area takes."""

    ids: list[int]
    places: list[int]  # of each name that the ids have room for; -1: not wanted
    names: list[bytes]  # those wanted


def unknown(pairs: Iterable[AlignedBlocks], known: set[bytes]) -> Iterator[AlignedBlocks]:
    """Each name that is not known, once: they are known then."""
    for aligned in pairs:
        wanted: list[bytes | None] = []
        for name in aligned.names:
            wanted.append(None if name in known else name)
            known.add(name or b"")
        if any(wanted):
            yield AlignedBlocks(aligned.ids, wanted)


def chunks_of(pairs: Iterable[AlignedBlocks], area_blocks: int) -> Iterator[Chunk]:
    chunk = Chunk([], [], [])
    for aligned in pairs:
        if chunk.places and len(chunk.places) + len(aligned.names) > area_blocks:
            yield chunk
            chunk = Chunk([], [], [])
        chunk.ids.extend(aligned.ids)
        for name in aligned.names:
            chunk.places.append(-1 if name is None else len(chunk.names))
            if name is not None:
                chunk.names.append(name)
    if chunk.places:
        yield chunk


def aligned_blocks(call: str, names: Sequence[bytes], blocks: Sequence[int], spec: Spec, kept: Spec) -> Iterator[AlignedBlocks]:
    """Wrong ones are refused before the first."""
    ids, a, b = [int(i) for i in blocks], spec.block_size, kept.block_size
    if len(names) * b != len(ids) * a:
        raise BadArgument(f"{call}(): {len(names)} names of {b} tokens and {len(ids)} blocks of {a}; they have as many tokens.")
    if ids and not (min(ids) >= 0 and max(ids) < spec.num_blocks):
        raise OutOfRange(f"{call}(): blocks are {min(ids)} to {max(ids)}; the cache has 0 to {spec.num_blocks - 1}. Nothing moved.")
    m, k = max(1, b // a), max(1, a // b)
    return (AlignedBlocks(ids[i * m : (i + 1) * m], list(names[i * k : (i + 1) * k])) for i in range(len(names) // k))
