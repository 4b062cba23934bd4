"""Blocks between an engine's caches and tiers: what is found, loaded and saved, step by step. A small fake stands for an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvx import BadArgument, CacheSpec
from kvx.connector.groups import Group, PartGroups, Segment, parts_of
from kvx.connector.jobs import Job, complete, needed, tables
from kvx.connector.scheduler import SchedulerSide
from kvx.connector.settings import Settings
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.connector.worker import PartMover, runs_of
from kvx.tiers import TierOption
from tests.connector.groups import a_group

H, D, BLOCKS = 2, 8, 24


def segments_of(group: Group, part: PartGroups) -> list[Segment]:
    """A layer each."""
    spec = CacheSpec(BLOCKS, group.block_size, H, D, layout="layer | block head token (kv dim)", format="f32", num_layers=1)
    places = [part.layers.index(n) for n in group.layers]
    return [Segment(group, group.layers[n : n + 1], replace(spec, layer_start=at), n, False) for n, at in enumerate(places)]


class FakeEngine:
    """A cache [block, head, token, K|V] a layer, in groups with tables of their own, and a connector's two sides.

    `groups` are (window, layers).
    """

    def __init__(self, folder: Path, groups: list[tuple[int, tuple[int, ...]]], *, size: int, kept: int, format: str = "") -> None:
        self.size = size
        self.groups = [
            a_group(layers, index=n, block_size=size, num_kv_heads=H, head_dim=D, window=window)
            for n, (window, layers) in enumerate(groups)
        ]
        self.parts = parts_of(self.groups)
        self.caches = {name: torch.zeros(BLOCKS, H, size, 2 * D) for g in self.groups for name in g.layer_names}
        self.movers, stacks = [], []
        for part in self.parts:
            spec = part.tier_spec(block_size=kept, model="fake", format=format)
            kind = part.kind(spec, len(self.parts))
            stack = TierStack(kind, [open_tier(TierOption("disk", 10**9, folder), kind)])
            stacks.append([stack])
            segments = [s for g in part.groups for s in segments_of(g, part)]
            self.movers.append(PartMover(part, spec, stack, runs_of(segments, self.caches)))
        self.side = SchedulerSide(self.parts, stacks, block_size=kept, model="fake")

    def truth(self, name: str, token: int, value: int) -> torch.Tensor:
        """What the model computes for a token: [head, K|V]. Small integers, exact in every format."""
        layer = int(name.split(".")[1])
        return torch.tensor([[float((token * 5 + value + layer * 3 + h * 2) % 13 - 6)] * 2 * D for h in range(H)])

    def step(self, tokens: list[int], blocks: list[list[int]], *, computed: int = 0, external: int = 0, new: int | None = None):
        """One request's step: load, compute, save. Its blocks are told whole."""
        self.side.add("r", tokens)
        self.side.allocated("r", blocks, external)
        new = len(tokens) - computed if new is None else new
        work = self.side.scheduled("r", blocks, is_whole=True, num_computed=computed, num_new=new)
        if work.load:
            assert [m.load(work.load) for m in self.movers] == [[]] * len(self.movers)
        for group in self.groups:
            for name in group.layer_names:
                for t in range(computed, computed + new):
                    block = blocks[group.index][t // self.size]
                    self.caches[name][block, :, t % self.size] = self.truth(name, t, tokens[t])
        return sum(m.save(work.save) for m in self.movers) if work.save else 0

    def check(self, tokens: list[int], blocks: list[list[int]], end: int) -> int:
        """That every token with memory has its K and V; how many there were."""
        seen = 0
        for group in self.groups:
            for name in group.layer_names:
                for t in range(end):
                    block = blocks[group.index][t // self.size]
                    if block:
                        assert torch.equal(self.caches[name][block, :, t % self.size], self.truth(name, t, tokens[t])), (name, t)
                        seen += 1
        return seen


TOKENS = [int(x) for x in torch.randint(0, 1000, (110,), generator=torch.Generator().manual_seed(3))]


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (32, 16), (32, 32)], ids=str)
def test_another_engine_finds_what_one_saved(tmp_path, sizes):
    kept = 16
    a = FakeEngine(tmp_path, [(0, (0, 1, 2))], size=sizes[0], kept=kept)
    a.step(TOKENS, [[5, 3, 9, 1, 2, 7, 8]])
    b = FakeEngine(tmp_path, [(0, (0, 1, 2))], size=sizes[1], kept=kept)
    b.side.add("r", TOKENS)
    found = b.side.matched("r", 0)
    assert found == 96
    table = [[11, 4, 6, 2, 1, 3, 10]]
    b.step(TOKENS, table, computed=found, external=found)
    assert b.check(TOKENS, table, len(TOKENS)) == 3 * len(TOKENS)
    assert b.caches["layers.0.attn"][12].abs().sum() == 0  # nothing but its own blocks was touched


def test_tier_blocks_may_be_larger_than_the_engines(tmp_path):
    a = FakeEngine(tmp_path, [(0, (0,))], size=16, kept=64)
    assert a.step(TOKENS, [[5, 3, 9, 1, 2, 7, 8]]) == 1
    b = FakeEngine(tmp_path, [(0, (0,))], size=16, kept=64)
    b.side.add("r", TOKENS)
    assert b.side.matched("r", 0) == 64
    assert b.side.matched("r", 32) == 32
    table = [[11, 4, 6, 2, 1, 3, 10]]
    for block in table[0][:2]:  # computed here before, and shared: they must not be written
        b.caches["layers.0.attn"][block] = 77.0
    b.step(TOKENS, table, computed=64, external=32)
    assert (b.caches["layers.0.attn"][table[0][:2]] == 77.0).all()
    for t in range(32, len(TOKENS)):
        assert torch.equal(b.caches["layers.0.attn"][table[0][t // 16], :, t % 16], b.truth("layers.0.attn", t, TOKENS[t]))


def test_a_token_is_left_to_compute_and_others_share_only_a_beginning(tmp_path):
    a = FakeEngine(tmp_path, [(0, (0,))], size=16, kept=16)
    a.step(TOKENS[:64], [[5, 3, 9, 1]])
    a.side.add("same", TOKENS[:64])
    assert a.side.matched("same", 0) == 48
    a.side.add("longer", TOKENS[:65])
    assert a.side.matched("longer", 0) == 64
    a.side.add("other", [*TOKENS[:40], 7, *TOKENS[41:]])
    assert a.side.matched("other", 0) == 32
    a.side.add("none", TOKENS[1:])
    assert a.side.matched("none", 0) == 0


def test_a_backend_that_only_decodes_after_a_cache(tmp_path):
    a = FakeEngine(tmp_path, [(0, (0,))], size=16, kept=16)
    a.step(TOKENS[:64], [[5, 3, 9, 1]])
    a.side.is_decode_only = True
    for length, found in ((65, 64), (66, 0), (64, 0), (33, 32)):
        a.side.add(f"{length}", TOKENS[:length])
        assert a.side.matched(f"{length}", 0) == found


def test_a_damaged_block_is_a_miss_before_anyone_counts_on_it(tmp_path):
    a = FakeEngine(tmp_path, [(0, (0,))], size=16, kept=16)
    a.step(TOKENS, [[5, 3, 9, 1, 2, 7, 8]])
    a.side.add("r2", TOKENS)
    third = a.side._requests["r"].names[2]
    (path,) = tmp_path.rglob(f"{third.hex()}.kvx")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert a.side.matched("r2", 0) == 32
    assert not path.exists()


HYBRID = [(0, (2, 5)), (20, (0, 3)), (20, (1, 4))]


def test_windows_need_only_what_the_next_token_sees(tmp_path):
    a = FakeEngine(tmp_path, HYBRID, size=16, kept=16)
    tables_a = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16, 17, 18, 19, 20, 21]]
    a.step(TOKENS, tables_a)
    b = FakeEngine(tmp_path, HYBRID, size=16, kept=16)
    b.side.add("r", TOKENS)
    found = b.side.matched("r", 0)
    assert found == 96
    # After 96 tokens a window of 20 sees from 77 on: blocks 0 to 3 have no memory.
    tables_b = [[7, 6, 5, 4, 3, 2, 1], [0, 0, 0, 0, 8, 9, 10], [0, 0, 0, 0, 11, 12, 13]]
    b.step(TOKENS, tables_b, computed=found, external=found)
    assert b.check(TOKENS, tables_b, len(TOKENS)) == 2 * 110 + 4 * (110 - 64)
    assert all(c[0].abs().sum() == 0 for c in b.caches.values())  # the null block


def test_what_left_a_window_is_not_saved_from_a_stale_table(tmp_path):
    """A tier's block of 64 tokens ends when its first blocks are long given back, and hold another request's rows."""
    a = FakeEngine(tmp_path, HYBRID, size=16, kept=64)
    blocks = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16, 17, 18, 19, 20, 21]]
    a.step(TOKENS, blocks, computed=0, new=50)
    assert a.movers[1].stack.tiers[0].num_blocks == 0
    a.step(TOKENS, blocks, computed=50, new=20)
    assert a.movers[0].stack.tiers[0].num_blocks == 1
    assert a.movers[1].stack.tiers[0].num_blocks == 0  # tokens 0 to 15 were given back before this step
    a.side.add("again", TOKENS)
    assert a.side.matched("again", 0) == 0


def test_what_is_gone_when_it_is_read_is_said(tmp_path):
    a = FakeEngine(tmp_path, [(0, (0,))], size=16, kept=16)
    a.step(TOKENS, [[5, 3, 9, 1, 2, 7, 8]])
    names = a.side._requests["r"].names
    a.movers[0].stack.tiers[0].drop([names[4]]).result()
    assert a.movers[0].load(Job("x", 0, 96, tuple(names[:6]), ((11, 12, 13, 14, 15, 16),))) == [4]


def test_what_is_computed_again_is_saved_again(tmp_path):
    a = FakeEngine(tmp_path, [(0, (0,))], size=16, kept=16)
    blocks = [[5, 3, 9, 1, 2, 7, 8]]
    assert a.step(TOKENS, blocks) == 6
    names = a.side._requests["r"].names
    a.movers[0].stack.tiers[0].drop([names[1], names[4]]).result()
    assert a.step(TOKENS, blocks, computed=48) == 1


def test_blocks_are_smaller_in_a_format_with_inline_scales(tmp_path):
    a = FakeEngine(tmp_path, [(0, (0, 1))], size=16, kept=16, format="fp8_e4m3_per_token_head_inline")
    a.step(TOKENS, [[5, 3, 9, 1, 2, 7, 8]])
    b = FakeEngine(tmp_path, [(0, (0, 1))], size=16, kept=16, format="fp8_e4m3_per_token_head_inline")
    b.step(TOKENS, [[11, 4, 6, 2, 1, 3, 10]], computed=96, external=96)
    for name, cache in b.caches.items():
        want = torch.stack([b.truth(name, t, TOKENS[t]) for t in range(16)], 1)
        torch.testing.assert_close(cache[11], want, rtol=2**-3, atol=2**-6)
    assert (
        FakeEngine(tmp_path, [(0, (0, 1))], size=16, kept=16).movers[0].stack.tiers[0].num_blocks == 0
    )  # another kind, its own folder


def test_tables_run_over_the_same_tokens():
    job = Job("r", 32, 96, tuple(bytes([n]) for n in range(4)), ((7, 0, 9, 4),))
    t = tables(job, 0, engine_size=32, tier_size=16)
    assert t.engine == [-1, 9]
    assert t.tier == [0, 1, 2, 3]
    assert needed(t, 32, 16) == complete(t, 32, 16) == [False, False, True, True]
    t = tables(job, 0, engine_size=8, tier_size=16)
    assert len(t.engine) == 2 * len(t.tier)
    job = Job("r", 16, 48, (b"a", b"b"), ((1, 2, 0, 4),))
    t = tables(job, 0, engine_size=16, tier_size=32)
    assert (t.engine, t.tier) == ([-1, 2, -1, -1], [0, 1])
    assert (needed(t, 16, 32), complete(t, 16, 32)) == ([True, False], [False, False])


def test_settings():
    s = Settings.read({"tiers": ["host:1GB", "disk:/var/kv", "disk:/a:b:200MiB"], "model": "m", "block_size": 32})
    assert s.tiers == (
        TierOption("host", 10**9),
        TierOption("disk", 32 * 10**9, Path("/var/kv")),
        TierOption("disk", 200 * 2**20, Path("/a:b")),
    )
    assert s.tiers[0].share(1, 4) == TierOption("host", 250 * 10**6)
    for wrong, says in (
        ({"tiers": ["host"]}, "it is host:SIZE, disk:DIR"),
        ({"tiers": ["ram:1GB"]}, 'tier "ram:1GB" is none'),
        ({"tiers": []}, "it must be a list of them"),
        ({"tiers": "host:1GB"}, "it must be a list of them"),
        ({"tiers": ["host:1GB"], "blocksize": 3}, "'blocksize' is not known"),
        ({"tiers": ["host:1GB"], "block_size": "32"}, "block_size is '32'"),
    ):
        with pytest.raises(BadArgument, match=says):
            Settings.read(wrong)
    theirs = {"tiers": ["host:1GB"], "spec_name": "KvxOffloadingSpec"}
    assert Settings.read(theirs, foreign=("spec_name",)).tiers == (TierOption("host", 10**9),)
    with pytest.raises(BadArgument, match="'spec_name' is not known"):
        Settings.read(theirs)


def test_host_memory_is_one_for_both_sides():
    (part,) = parts_of([a_group(block_size=32)])
    kind = part.kind(part.tier_spec(block_size=16, model="m"), 1)
    a, b = (open_tier(TierOption("host", 10**6), kind) for _ in range(2))
    assert a is b
    other = part.kind(part.tier_spec(block_size=16, model="n"), 1)
    assert open_tier(TierOption("host", 10**6), other) is not a
