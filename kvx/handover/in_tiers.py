"""Handovers in tiers: full blocks by their names, which every engine makes alike from the tokens and the model.

A state is kept under the name of the block that ends where it stands, so it is found there alone: what tiers have of a text with
states ends at the deepest position at which every part can go on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvx.cache.names import naming
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, a_type
from kvx.handover.facts import few, first_seen, is_state_part
from kvx.handover.handover import Handover
from kvx.handover.memory import has_scales, new_buffers
from kvx.handover.part import Part
from kvx.spec import Spec, StateSpec, spec_from_json
from kvx.tiers import BlockKind, Tier


def names(tokens: ArrayLike, block_size: int, model: str) -> list[bytes]:
    """Of every full block of these tokens: a chain of hashes that begins with the model."""
    if not isinstance(block_size, int) or block_size < 1:
        raise BadArgument(f"names(): block_size is {block_size!r}; a block has a token or more.")
    if not isinstance(model, str):
        raise BadArgument(f"names(): model is {model!r}; it must be the model's name.")
    by = naming("blake2b")
    return by.chain(token_ids("names()", tokens).astype("<i4").tobytes(), by.root(model.encode()), block_size)


def part_kind(spec: Spec, layers: Sequence[int], window: int = 0) -> BlockKind:
    """Of a part's blocks where the model has several parts, whose blocks may look alike: the manifest says which one it is."""
    kind = BlockKind.of(spec)
    return BlockKind({**kind.manifest, **part_fields(layers, window)}, kind.buffer_bytes)


def part_fields(layers: Sequence[int], window: int) -> dict[str, str | int]:
    return {"layers": ",".join(map(str, layers)), "window": window}


def keep(handover: Handover, tiers: Sequence[Tier], *, block_size: int = 0) -> int:
    """Put its full blocks into a tier for each part. How many there are. Its content is checked first.

    A handover with states stands where a block ends, or nobody could find them. `block_size` is for one of states alone. A tier's
    kind is `BlockKind.of(part.spec)`, or that of `part_kind`, by which engines that share a store tell parts apart.
    """
    if not isinstance(handover, Handover):
        raise BadArgument(f"keep(): handover is {a_type(handover)}; it must be a kvx.handover.Handover.")
    _check_tiers("keep", tiers, len(handover.parts))
    for part in handover.parts:
        _require_whole_blocks("keep", part.spec)
    size = _size("keep", handover.block_size, block_size)
    full = handover.num_tokens // size
    state = next((p for p in handover.parts if is_state_part(p)), None)
    if state is not None and handover.num_tokens % size:
        raise BadArgument(
            f"keep(): the state of layers {few(state.layers)} stands after {handover.num_tokens} tokens; in blocks of {size} a "
            f"state is found where one ends. Hand over the sequence after {full * size or size} tokens; nothing was kept."
        )
    handover.check()
    keys = names(handover.tokens, size, handover.model)
    waits = []
    for part, tier in zip(handover.parts, tiers, strict=True):
        kind = BlockKind.of(part.spec)
        if (told := part_kind(part.spec, part.layers, part.window)).text == tier.kind.text:
            kind = told
        if is_state_part(part):
            waits.append(tier.put(keys[full - 1 : full], [kind.block(part.buffers)]))
            continue
        first = -(-part.first_token // size)  # a block that lacks its first tokens has no name
        blocks = [kind.block([part.buffers[n - part.first_block]]) for n in range(first, full)]
        waits.append(tier.put(keys[first:full], blocks))
    for w in waits:
        w.result()
    return full


def find(
    tokens: ArrayLike,
    tiers: Sequence[Tier],  # one for each part
    *,
    parts: Sequence[tuple[Sequence[int], int] | tuple[Sequence[int], int, int]],  # (layers, window), of entries (layers, 0, tokens)
    block_size: int = 0,  # of states alone, whose tiers do not say it
) -> Handover | None:
    """The longest beginning of these tokens that the tiers have, of whole blocks; None where there is none.

    `parts` says of each tier what is in it: layers of the model and their window; of entries a third number, the tokens of a
    block. With states it is the deepest position that has one, and all that the other parts need there. Whoever goes on from
    `tokens` asks for all but the last: a state cannot be cut.
    """
    ids = token_ids("find()", tokens)
    _check_parts(parts)
    _check_tiers("find", tiers, len(parts))
    held = [
        _Held(_spec(t.kind), tuple(part[0]), part[1], part[2] if len(part) > 2 else 0) for t, part in zip(tiers, parts, strict=True)
    ]
    for h in held:
        _require_whole_blocks("find", h.spec)
    size, model = _size("find", next((h.tokens for h in held if h.tokens), 0), block_size), held[0].spec.model
    for h in held:
        if h.tokens not in (0, size) or h.spec.model != model:
            raise BadArgument(
                f"find(): a tier has blocks of {h.tokens} of model {h.spec.model!r}; the first has blocks of {size} of "
                f"{model!r}. Parts of one handover share them."
            )
    keys = names(ids, size, model)
    has = [t.has(keys).result() for t in tiers]
    n = len(keys)
    while n:
        firsts = [h.first(n, size) for h in held]
        missing = [first + h[first:n].index(False) for first, h in zip(firsts, has, strict=True) if not all(h[first:n])]
        if not missing:
            made = _fetch(ids[: n * size], tiers, held, keys[:n], firsts)
            if isinstance(made, Handover):
                return made
            missing = [made]
        n = min(missing)
    return None


def _check_parts(parts: Any) -> None:
    for part in parts if isinstance(parts, Sequence) else (parts,):
        is_part = isinstance(part, tuple) and len(part) in (2, 3) and isinstance(part[0], Sequence)
        if not is_part or any(type(n) is not int or n < 0 for n in (*part[0], *part[1:])):
            raise BadArgument(
                f"find(): parts has {str(part)[:80]}; of each tier it has (layers, window), the window 0 where all tokens are seen."
            )


class _Held(NamedTuple):
    """What a tier has of a part."""

    spec: Spec
    layers: tuple[int, ...]
    window: int
    block_tokens: int  # of entries

    @property
    def tokens(self) -> int:
        """Of a block; 0: a state."""
        return self.block_tokens if isinstance(self.spec, StateSpec) else self.spec.block_size

    def first(self, blocks: int, size: int) -> int:
        """The first of so many blocks that the token after them needs: of a state the last alone, which ends there."""
        return first_seen(blocks * size, self.window) // size if self.tokens else blocks - 1


def _fetch(
    tokens: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    tiers: Sequence[Tier],
    held: Sequence[_Held],
    keys: list[bytes],
    firsts: list[int],
) -> Handover | int:
    """The handover, or the first block that is not to be had after all."""
    made = []
    for tier, h, first in zip(tiers, held, firsts, strict=True):
        here = h.spec.replaced(num_blocks=len(keys) - first)
        if not h.tokens:
            here = here.replaced(positions=(len(tokens),))
        first_block = 0 if isinstance(here, StateSpec) else first
        part = Part(here, h.layers, h.window, first_block, new_buffers(here), block_tokens=h.block_tokens)
        found = tier.get(keys[first:], [tier.kind.block([t]) for t in part.buffers]).result()
        if None in found:
            return first + found.index(None)
        made.append(part.sealed(len(tokens)))
    return Handover(tokens, tuple(made))


def _size(call: str, of_parts: int, told: int) -> int:
    """Tokens of a block."""
    if type(told) is not int or told < 0 or (of_parts and told not in (0, of_parts)):
        raise BadArgument(
            f"{call}(): block_size is {told!r}; blocks of the parts have {of_parts or 'no'} tokens. It is for states alone."
        )
    if not of_parts and not told:
        raise BadArgument(
            f"{call}(): the parts are states, whose blocks have no tokens; say how many are between names: block_size=."
        )
    return of_parts or told


def _require_whole_blocks(call: str, spec: Spec) -> None:
    if has_scales(spec):
        raise BadArgument(
            f"{call}(): format {spec.of_kv.format!r} has scales apart from the rows; a block is one run in a tier. "
            "Use a format with inline scales, or none: handover.convert(format=...)."
        )


def _spec(kind: BlockKind) -> Spec:
    return spec_from_json(json.dumps({name: value for name, value in kind.manifest.items() if name not in ("layers", "window")}))


def _check_tiers(call: str, tiers: Sequence[Tier], parts: int) -> None:
    if not isinstance(tiers, Sequence):
        raise BadArgument(f"{call}(): tiers is {a_type(tiers)}; it must be a list, a Tier for each part.")
    if not tiers or len(tiers) != parts:
        raise BadArgument(f"{call}(): {len(tiers)} tiers for {parts} parts; each part has a tier of its own.")
    for t in tiers:
        if not isinstance(t, Tier):
            raise BadArgument(f"{call}(): a tier is {a_type(t)}; it must be a Tier, such as a HostTier.")
    if len({id(t) for t in tiers}) != len(tiers):  # names are of tokens: two parts' blocks have the same
        raise BadArgument(f"{call}(): one tier is given for two parts; each part has a tier of its own.")
