"""Small random caches with K and V, windows and states, and what stands behind them: for tests/fuzz/paged_states.py."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import numpy as np

import kvx
from kvx.cache.groups import Member
from kvx.cache.kinds import State
from kvx.spec import StateSpec, state_plane
from kvx.tiers import BlockKind, CacheTiers, HostTier, kept_specs
from tests.fuzz.paged_model import Contents, Numbers


class Backing:
    """What a cache evicts, as copies; it loses some by age, and with `share` one is damaged when it is loaded."""

    def __init__(self, contents: Contents, rng: random.Random, room: int, share: float) -> None:
        self.contents, self.rng, self.room, self.share = contents, rng, room, share
        self.blocks: list[dict[bytes, Any]] = [{} for _ in contents.groups]

    def offer(self, group: int, hashes: list[bytes], blocks: Numbers) -> None:
        where, kept = self.contents.groups[group], self.blocks[group]
        self.contents.assert_named(where, list(hashes), blocks)
        for name, block in zip(hashes, blocks.tolist(), strict=True):
            kept.pop(name, None)
            kept[name] = where.read(block)
            if len(kept) > self.room:
                del kept[next(iter(kept))]

    def find(self, group: int, hashes: list[bytes]) -> list[bool]:
        return [name in self.blocks[group] for name in hashes]

    def load(self, group: int, hashes: list[bytes], blocks: Numbers) -> int:
        for n, (name, block) in enumerate(zip(hashes, blocks.tolist(), strict=True)):
            if name not in self.blocks[group] or self.rng.random() < self.share:
                self.blocks[group].pop(name, None)
                self.contents.groups[group].fill_garbage(np.array([block]))
                return n
            self.contents.groups[group].write(block, self.blocks[group][name])
        return len(hashes)


def host_tiers(cache: kvx.PagedCache, stack: ExitStack, room: int) -> None:
    """Tiers in host memory, as an engine has them, with movers on threads of their own."""
    kept = kept_specs(cache, "")
    kinds = [BlockKind.of(spec) for spec in kept]
    tiers = [[stack.enter_context(HostTier(kind, room * kind.num_bytes))] for kind in kinds]
    stack.enter_context(CacheTiers(cache, tiers, kept=kept))


def make_cache(rng: random.Random) -> kvx.PagedCache:
    size, max_seqs = rng.choice([2, 3, 4]), rng.randint(2, 5)

    def kv(dim: int = 1) -> kvx.CacheSpec:
        return kvx.CacheSpec(rng.randint(4, 16), size, num_kv_heads=1, head_dim=dim, format="f32")

    def states(name: str, layers: tuple[int, ...], other: int) -> kvx.LayerGroup:
        blocks = rng.choice([2, max_seqs, max_seqs + 1, rng.randint(3, 14)])
        delta = state_plane("delta", "f32", head=1, row=2, column=2)
        spec = StateSpec(blocks, (state_plane("conv", rng.choice(["f16", "f32"]), channel=2, tap=rng.randint(1, 3)), delta))
        others = (Member((other,), StateSpec(blocks, (state_plane("conv", "f32", channel=3, tap=1),))),) if other else ()
        kind = State(snapshot_every=rng.choice([0, 1, 2, 3, 32]), snapshot_at_end=rng.random() < 0.6)
        return kvx.LayerGroup(name, layers, spec, kind=kind, others=others)

    groups = [kvx.LayerGroup("full", (0, 1)[: rng.randint(1, 2)], kv(rng.randint(1, 2)))] if rng.random() < 0.9 else []
    if rng.random() < 0.5 or not groups:
        groups.append(kvx.LayerGroup("sliding", (2,), kv(), window=rng.choice([1, 2, 5, 7])))
    groups.append(states("states", (1, 3)[: rng.randint(1, 2)], rng.choice([0, 5])))
    if rng.random() < 0.4:
        groups.append(states("more", (4,), 0))
    if rng.random() < 0.3:
        rng.shuffle(groups)
    return kvx.PagedCache(groups, max_seqs=max_seqs, max_seq_len=rng.randint(12, 32), max_tokens=64)
