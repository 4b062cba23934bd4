"""Handovers in tiers: full blocks by their names, which every engine makes alike from the tokens and the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from kvx.cache.names import naming
from kvx.errors import BadArgument
from kvx.handover.handover import Handover
from kvx.handover.part import Part, new_buffers
from kvx.layout.place import num_cache_buffers
from kvx.spec import CacheSpec, from_json
from kvx.tiers import Block, BlockKind, Tier, block_spec


def names(tokens: ArrayLike, block_size: int, model: str) -> list[bytes]:
    """Of every full block of these tokens: a chain of hashes that begins with the model."""
    hash_, chain, _ = naming("blake2b")
    data = np.ascontiguousarray(np.asarray(tokens), "<i4").tobytes()
    salt = model.encode()
    return chain(data, hash_(len(salt).to_bytes(8, "little") + salt), block_size)


def keep(handover: Handover, tiers: Sequence[Tier]) -> int:
    """Put its full blocks into a tier for each part. How many there are."""
    _check_tiers("keep", tiers, len(handover.parts))
    full = handover.num_tokens // handover.block_size
    keys = names(handover.tokens, handover.block_size, handover.model)
    waits = []
    for part, tier in zip(handover.parts, tiers, strict=True):
        blocks = [_block(part, n) for n in range(full - part.first_block)]
        waits.append(tier.put(keys[part.first_block : full], blocks))
    for w in waits:
        w.result()
    return full


def find(
    tokens: ArrayLike,
    tiers: Sequence[Tier],  # one for each part
    *,
    parts: Sequence[tuple[Sequence[int], int]],  # (layers of the model, window) of each
) -> Handover | None:
    """The longest beginning of these tokens that the tiers have, of whole blocks; None where there is none."""
    ids = np.asarray(tokens, np.int32)
    _check_tiers("find", tiers, len(parts))
    specs = [_spec(t.kind) for t in tiers]
    keys = names(ids, specs[0].block_size, specs[0].model)
    has = [t.has(keys).result() for t in tiers]
    n = len(keys)
    while n:
        firsts = [max(0, n * specs[0].block_size + 1 - w) // specs[0].block_size if w else 0 for _, w in parts]
        missing = [first + h[first:n].index(False) for first, h in zip(firsts, has, strict=True) if not all(h[first:n])]
        if not missing:
            made = _fetch(ids[: n * specs[0].block_size], tiers, specs, parts, keys[:n], firsts)
            if isinstance(made, Handover):
                return made
            missing = [made]
        n = min(missing)
    return None


def _fetch(
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    tiers: Sequence[Tier],
    specs: Sequence[CacheSpec],
    parts: Sequence[tuple[Sequence[int], int]],
    keys: list[bytes],
    firsts: list[int],
) -> Handover | int:
    """The handover, or the first block that is not to be had after all."""
    made = []
    for tier, spec, (layers, window), first in zip(tiers, specs, parts, firsts, strict=True):
        here = replace(spec, num_blocks=len(keys) - first)
        part = Part(here, tuple(layers), window, first, new_buffers(here))
        found = tier.get(keys[first:], [_block(part, n, tier.kind) for n in range(here.num_blocks)]).result()
        if None in found:
            return first + found.index(None)
        made.append(part.sealed(len(tokens)))
    return Handover(tokens, tuple(made))


def _block(part: Part, n: int, kind: BlockKind | None = None) -> Block:
    """One block of a part: its buffer, and its rows of the scales."""
    if num_cache_buffers(part.spec) != len(part.buffers):
        raise BadArgument(
            f"keep(): format {part.spec.format!r} has scales apart from the rows; a block is one run in a tier. "
            "Use a format with inline scales, or none: handover.convert(format=...)."
        )
    return (kind or BlockKind.of(block_spec(part.spec))).block([part.buffers[n]])


def _spec(kind: BlockKind) -> CacheSpec:
    return from_json(json.dumps(dict(kind.manifest)))


def _check_tiers(call: str, tiers: Sequence[Tier], parts: int) -> None:
    if len(tiers) != parts:
        raise BadArgument(f"{call}(): {len(tiers)} tiers for {parts} parts; each part has a tier of its own.")
