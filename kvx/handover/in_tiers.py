"""Handovers in tiers: full blocks by their names, which every engine makes alike from the tokens and the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from kvx.cache.names import naming
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument
from kvx.handover.facts import first_seen
from kvx.handover.handover import Handover
from kvx.handover.memory import has_scales, new_buffers
from kvx.handover.part import Part
from kvx.spec import CacheSpec, from_json
from kvx.tiers import BlockKind, Tier, block_spec


def names(tokens: ArrayLike, block_size: int, model: str) -> list[bytes]:
    """Of every full block of these tokens: a chain of hashes that begins with the model."""
    if not isinstance(block_size, int) or block_size < 1:
        raise BadArgument(f"names(): block_size is {block_size!r}; a block has a token or more.")
    if not isinstance(model, str):
        raise BadArgument(f"names(): model is {model!r}; it is the model's name.")
    by = naming("blake2b")
    return by.chain(token_ids("names()", tokens).astype("<i4").tobytes(), by.root(model.encode()), block_size)


def keep(handover: Handover, tiers: Sequence[Tier]) -> int:
    """Put its full blocks into a tier for each part. How many there are. Its content is checked first."""
    _check_tiers("keep", tiers, len(handover.parts))
    handover.require_kv("keep", "blocks of tiers here are K and V")
    for part in handover.parts:
        _require_whole_blocks("keep", part.kv)
    handover.check()
    size = handover.block_size
    full = handover.num_tokens // size
    keys = names(handover.tokens, size, handover.model)
    waits = []
    for part, tier in zip(handover.parts, tiers, strict=True):
        first = -(-part.first_token // size)  # a block that lacks its first tokens has no name
        kind = BlockKind.of(block_spec(part.spec))
        blocks = [kind.block([part.buffers[n - part.first_block]]) for n in range(first, full)]
        waits.append(tier.put(keys[first:full], blocks))
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
    ids = token_ids("find()", tokens)
    _check_tiers("find", tiers, len(parts))
    specs = [_spec(t.kind) for t in tiers]
    for spec in specs:
        _require_whole_blocks("find", spec)
    size, model = specs[0].block_size, specs[0].model
    for spec in specs:
        if (spec.block_size, spec.model) != (size, model):
            raise BadArgument(
                f"find(): a tier has blocks of {spec.block_size} of model {spec.model!r}; the first has blocks of {size} of "
                f"{model!r}. Parts of one handover share them."
            )
    keys = names(ids, size, model)
    has = [t.has(keys).result() for t in tiers]
    n = len(keys)
    while n:
        firsts = [first_seen(n * size, w) // size for _, w in parts]
        missing = [first + h[first:n].index(False) for first, h in zip(firsts, has, strict=True) if not all(h[first:n])]
        if not missing:
            made = _fetch(ids[: n * size], tiers, specs, parts, keys[:n], firsts)
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
        found = tier.get(keys[first:], [tier.kind.block([t]) for t in part.buffers]).result()
        if None in found:
            return first + found.index(None)
        made.append(part.sealed(len(tokens)))
    return Handover(tokens, tuple(made))


def _require_whole_blocks(call: str, spec: CacheSpec) -> None:
    if has_scales(spec):
        raise BadArgument(
            f"{call}(): format {spec.format!r} has scales apart from the rows; a block is one run in a tier. "
            "Use a format with inline scales, or none: handover.convert(format=...)."
        )


def _spec(kind: BlockKind) -> CacheSpec:
    return from_json(json.dumps(dict(kind.manifest)))


def _check_tiers(call: str, tiers: Sequence[Tier], parts: int) -> None:
    if not tiers or len(tiers) != parts:
        raise BadArgument(f"{call}(): {len(tiers)} tiers for {parts} parts; each part has a tier of its own.")
    for t in tiers:
        if not isinstance(t, Tier):
            raise BadArgument(f"{call}(): a tier is {type(t).__name__}; it is a Tier, such as a HostTier.")
    if len({id(t) for t in tiers}) != len(tiers):  # names are of tokens: two parts' blocks have the same
        raise BadArgument(f"{call}(): one tier is given for two parts; each part has a tier of its own.")
