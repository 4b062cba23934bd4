"""Pairs of blocks that a plan moves: ids at the source and ids at the destination, checked and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from kvx.errors import BadArgument, OutOfRange
from kvx.spec.cache_spec import Spec

Pairs = tuple[tuple[int, ...], tuple[int, ...]]


def pairs_of(blocks: tuple[Sequence[int], Sequence[int]] | None, src: Spec, dst: Spec) -> Pairs | None:
    """The blocks as tuples. A pair that is not to move is left out, so ids are those of blocks that exist."""
    if blocks is None:
        return None
    try:
        a, b = (tuple(map(index, ids)) for ids in blocks)
    except (TypeError, ValueError):
        raise BadArgument(
            f"plan(): blocks is {str(blocks)[:60]}; "
            "it must be (ids at src, ids at dst), two sequences of ints: blocks=([7, 3], [0, 1])."
        ) from None
    tokens = len(a) * src.block_size, len(b) * dst.block_size
    if tokens[0] != tokens[1]:
        raise BadArgument(
            f"plan(): blocks has {len(a)} ids at src, {tokens[0]} tokens, and {len(b)} at dst, {tokens[1]} tokens; "
            "both hold as many."
        )
    for name, ids, spec in (("src", a, src), ("dst", b, dst)):
        bad = next((i for i in ids if not 0 <= i < spec.num_blocks), None)
        if bad is not None:
            raise OutOfRange(f"plan(): blocks has {bad} at {name}, whose blocks are 0 to {spec.num_blocks - 1}.")
    seen: dict[int, int] = {}
    for n, i in enumerate(b):
        if seen.setdefault(i, n) != n:
            raise BadArgument(f"plan(): blocks has {i} at dst twice, at {seen[i]} and {n}; a block is written once. Drop one pair.")
    return a, b
