"""Ranks' shards become one handover again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from kvx.errors import BadArgument, Damaged, Incompatible, a_type
from kvx.handover.handover import Handover
from kvx.handover.memory import new_buffers
from kvx.handover.part import Part
from kvx.handover.plane_parts import moved_planes
from kvx.handover.scales import require_one_scale
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert
from kvx.ops.move.digest import Digest
from kvx.spec import CacheSpec, PlaneSpec, Share, Spec, StateSpec

_SAME = ("model", "num_blocks", "block_size", "head_dim", "v_head_dim", "format", "v_format")


def join(shards: Sequence[Handover]) -> Handover:
    """The handover that was cut into these ranks' shards, in any order. Every head of it must be there.

    Shards that shard() made know the content of the whole, so that a missing one is found; those that were exported rank by rank
    do not, and may each be there once.
    """
    if not shards:
        raise BadArgument("join(): no shards; there is one or more.")
    first = shards[0]
    for n, s in enumerate(shards):
        if not isinstance(s, Handover):
            raise BadArgument(f"join(): shard {n} is {a_type(s)}; it must be a Handover, as shard() makes.")
        s.check()
        if not np.array_equal(s.tokens, first.tokens) or s.whole != first.whole or len(s.parts) != len(first.parts):
            raise Incompatible(f"join(): shard {n} is of other tokens or of another handover than shard 0. It was not read.")
    parts = [_joined([s.parts[i] for s in shards], first, i) for i in range(len(first.parts))]
    return Handover(first.tokens, tuple(parts))


def _joined_planes(shards: list[Part], first: Handover, i: int) -> Part:
    """Of entries and states: every share of an axis is put together again; ranks may have the same."""
    a = shards[0]
    ranks: list[Part] = []
    for n, p in enumerate(shards):
        if (p.layers, p.block_tokens, p.spec.num_blocks, p.spec.model) != (
            a.layers,
            a.block_tokens,
            a.spec.num_blocks,
            a.spec.model,
        ):
            raise Incompatible(f"join(): shard {n} is of other layers, blocks or another model than shard 0. It was not read.")
        if _unshared(p.spec) != _unshared(a.spec):
            raise Incompatible(f"join(): shard {n} has other planes than shard 0. It was not read.")
        same = next((r for r in ranks if r.spec == p.spec), None)
        if same is not None and same.content != p.content:
            raise Incompatible(f"join(): shard {n} has the same share as another, and other content. It was not read.")
        if same is None:
            ranks.append(p)
    _require_all_shares(ranks)
    spec = a.spec.replaced(planes=tuple(_whole_plane([r.spec.planes[k] for r in ranks]) for k in range(a.spec.num_planes)))
    part, ids = replace(a, spec=spec, buffers=new_buffers(spec)), list(range(spec.num_blocks))
    buffers = [t for r in ranks for t in r.buffers]
    convert(buffers, list(part.buffers), plan=plan([r.spec for r in ranks], spec), src_blocks=ids, dst_blocks=ids)
    part = part.sealed(first.num_tokens)
    if first.whole and part.content != first.whole[i]:
        raise Damaged(f"join(): the shards make content {part.content}; the whole had {first.whole[i]}. A shard is missing.")
    for n, r in enumerate(ranks):  # of what several ranks have, one was taken
        if len(ranks) > 1 and moved_planes(part, (r.spec,))[0].content != r.content:
            raise Incompatible(
                f"join(): rank {n} of {len(ranks)} has other content in a share that another rank has too. It was not read."
            )
    return part


def _require_all_shares(ranks: list[Part]) -> None:
    """Incompatible where a share of an axis has a hole: a rank of it is missing."""
    for k, plane in enumerate(ranks[0].spec.planes):
        for j in range(len(plane.shares)):
            held = sorted({(s.first, s.first + s.size) for s in (r.spec.planes[k].shares[j] for r in ranks)})
            for (_, end), (first, _) in pairwise(held):
                if first > end:
                    raise Incompatible(f"join(): {plane.name} has no {plane.shard_axis} {end} to {first - 1}: a shard is missing.")


def _unshared(spec: Spec) -> list[tuple[object, ...]]:
    return [(p.name, p.format, p.shard_axis, [a for a in p.axes if a[0] != p.shard_axis], len(p.shares)) for p in spec.planes]


def _whole_plane(planes: list[PlaneSpec]) -> PlaneSpec:
    shares = []
    for same in zip(*(p.shares for p in planes), strict=True):
        first, end = min(s.first for s in same), max(s.first + s.size for s in same)
        shares.append(Share(first, end - first, same[0].unit))
    axes = {**planes[0].sizes, planes[0].shard_axis: sum(s.size for s in shares)}
    return replace(planes[0], axes=tuple(axes.items()), shares=tuple(shares))


def _joined(shards: list[Part], first: Handover, i: int) -> Part:
    if any(isinstance(p.spec, StateSpec) for p in shards):
        return _joined_planes(shards, first, i)
    ranks = _ranks(shards, has_whole=bool(first.whole))
    p, start = ranks[0], ranks[0].kv.head_start
    spec = replace(p.kv, num_kv_heads=ranks[-1].kv.head_start + ranks[-1].kv.num_kv_heads - start)
    part = replace(p, spec=spec, buffers=new_buffers(spec))
    here = torch.arange(spec.num_blocks, dtype=torch.int32)
    convert(
        [t for r in ranks for t in r.buffers],
        list(part.buffers),
        plan=plan([r.spec for r in ranks], spec),
        src_blocks=here,
        dst_blocks=here,
    )
    part = part.sealed(first.num_tokens)
    want = first.whole[i] if first.whole else sum((r.content for r in ranks), Digest())
    if part.content != want:
        held = ", ".join(_heads(r.kv) for r in ranks)
        raise Damaged(f"join(): heads {held} make content {part.content}; the whole had {want}. {_missing(shards)}")
    return part


def _ranks(shards: list[Part], *, has_whole: bool) -> list[Part]:
    """One for each run of heads, in their order."""
    found: dict[int, Part] = {}
    for n, p in enumerate(shards):
        for what in _SAME:
            a, b = getattr(shards[0].kv, what), getattr(p.kv, what)
            if a != b:
                raise Incompatible(f"join(): shard {n} has {what} {b!r}; shard 0 has {a!r}. It was not read.")
        if (p.layers, p.window, p.first_token) != (shards[0].layers, shards[0].window, shards[0].first_token):
            raise Incompatible(f"join(): shard {n} is of other layers, another window or another first token than shard 0.")
        there = found.get(p.kv.head_start)
        if there is not None and (not has_whole or there.content != p.content or there.spec != p.spec):
            raise Incompatible(f"join(): heads {_heads(p.kv)} are there twice: shard {n} is of the same rank as another.")
        found[p.kv.head_start] = p
    ranks = [found[h] for h in sorted(found)]
    for a, b in pairwise(ranks):
        end = a.kv.head_start + a.kv.num_kv_heads
        if end != b.kv.head_start:
            what = "missing" if end < b.kv.head_start else "there twice"
            raise Incompatible(f"join(): heads {_heads(a.kv)} and then {_heads(b.kv)}: some are {what}.")
    require_one_scale("join", [(r.kv, r.buffers) for r in ranks])
    return ranks


def _missing(shards: list[Part]) -> str:
    seen: dict[int, int] = {}
    for n, p in enumerate(shards):
        if seen.setdefault(p.kv.head_start, n) != n:
            return f"Shard {n} has the same heads as shard {seen[p.kv.head_start]}, and one with others is missing."
    return "A shard is missing."


def _heads(spec: CacheSpec) -> str:
    return f"{spec.head_start} to {spec.head_start + spec.num_kv_heads - 1}"
