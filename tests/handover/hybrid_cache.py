"""A hybrid model's cache without the model: K and V of full and sliding layers, convolutions and matrices of others, one with both.

What a step writes hangs on all tokens before it through the states, so a sequence that goes on from another's state shows every
byte of it that was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import kvx
from kvx.cache import Sequence as Seq
from kvx.cache.kinds import State
from kvx.handover import Handover
from kvx.handover.paged_cache import read_sequence
from kvx.layout.state_rows import state_row
from kvx.spec import PlaneSpec, StateSpec, state_plane

MODEL = "weights of a hybrid"
BS, WINDOW, HEADS, DIM = 8, 6, 4, 8
FULL, SLIDING, STATES = (1, 4), (3,), (0, 2, 4)  # layer 4 has K and V and a state


def planes(conv: str = "f32", delta: str = "f32") -> tuple[PlaneSpec, ...]:
    """x of 4 heads, and B and C of one group: those do not divide, and ranks have them twice."""
    shares = ((16, 4), (8, 8), (8, 8))
    return (
        state_plane("conv", conv, channel=32, tap=3, shares=shares),
        state_plane("delta", delta, head=4, row=4, column=8),
    )


def states(row: str = "", num_blocks: int = 6, of: Sequence[PlaneSpec] = (), rank: tuple[int, int] = (1, 0)) -> StateSpec:
    whole = StateSpec(num_blocks, tuple(of) or planes())
    mine = whole.shard(*rank)
    return mine if not row else state_row(row).spec(mine.planes, num_blocks=num_blocks)


def hybrid(
    spec: StateSpec | None = None,
    *,
    num_blocks: int = 12,
    rank: tuple[int, int] = (1, 0),
    split: bool = False,
    kind: State | None = None,
    format: str = "f32",
    **options: Any,
) -> kvx.PagedCache:
    """A cache, or a tensor parallel rank's. `split`: its states are in two groups."""
    kv = kvx.CacheSpec(num_blocks, BS, HEADS, DIM, format=format).shard(*rank)
    spec, kind = spec or states(rank=rank), kind or State(snapshot_every=1)
    groups = [kvx.LayerGroup("full", FULL, kv), kvx.LayerGroup("sliding", SLIDING, kv, window=WINDOW)]
    for n, layers in enumerate((STATES[:1], STATES[1:]) if split else (STATES,)):
        groups.append(kvx.LayerGroup(f"states {n}", layers, spec, kind=kind))
    return kvx.PagedCache(groups, **{"max_seqs": 3, "max_seq_len": 64, **options})


def tokens(n: int = 40, seed: int = 0) -> list[int]:
    return torch.randint(1, 99, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def run(cache: kvx.PagedCache, seq: Seq, end: int) -> None:
    """Token by token, up to `end`; what is there at a block's end may be found."""
    while seq.length < end:
        at, token = seq.length, int(seq.tokens[seq.length])
        cache.extend(seq, 1)
        batch = cache.plan([(seq, 1)])
        seen = 0.0
        for layer in range(5):
            for g, group in enumerate(cache.groups):
                if layer in group.layers and group.blocks_of.has_state:
                    seen = _step(cache, int(cache.blocks(seq, g)[0]), g, layer, token, seen)
                elif layer in group.layers:
                    rows = torch.arange(HEADS * DIM, dtype=torch.float32).view(1, HEADS, DIM).sin() * (token + layer) + at + seen
                    here = cache.layer(layer)
                    kvx.write(
                        here.cache, rows, -rows, slot_mapping=batch.slot_mapping(g), spec=here.spec, backend="torch", **here.scales
                    )
        cache.commit(seq)


def _step(cache: kvx.PagedCache, block: int, group: int, layer: int, token: int, seen: float) -> float:
    conv, delta = (cache.planes(layer, group).planes[name] for name in ("conv", "delta"))
    new = torch.arange(32, dtype=torch.float32).mul(0.3 * (layer + 1)).cos() * (token / 50) + seen / 7
    x = torch.cat((conv[block][:, 1:].contiguous().float(), new[:, None]), 1)
    conv[block] = x.to(conv.dtype)
    at = torch.arange(4 * 4 * 8, dtype=torch.float32).view(4, 4, 8).sin() + x[:16].sum(1).view(4, 4, 1) * x[16:].sum(1)[:8] / 16
    delta[block] = (delta[block].float() / 2 + at).to(delta.dtype)
    return float(delta[block].contiguous().float().mean())  # numbers are added in one order, whatever the layout


def begun(n: int, cache: kvx.PagedCache | None = None, ids: Sequence[int] = ()) -> tuple[kvx.PagedCache, Seq]:
    cache = cache or hybrid()
    seq = cache.admit(list(ids) or tokens())
    run(cache, seq, n)
    return cache, seq


def handed_over(n: int, cache: kvx.PagedCache | None = None, ids: Sequence[int] = ()) -> Handover:
    return read_sequence(*begun(n, cache, ids), model=MODEL, block_size=4)


def contents(handover: Handover) -> list[tuple[tuple[int, ...], str]]:
    return [(p.layers, str(p.content)) for p in handover.parts]
