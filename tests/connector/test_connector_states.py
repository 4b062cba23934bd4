"""States between an engine's pages and tiers: kept where a step ends at a block's end, found there alone. A fake is the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvx.connector.groups import Group, PartGroups, Segment, parts_of
from kvx.connector.scheduler import SchedulerSide
from kvx.connector.states import StateMover
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.connector.worker import runs_of
from kvx.handover import names
from kvx.layout.state_rows import state_row
from kvx.spec import StateSpec, state_plane
from kvx.tiers import TierOption

PLANES = (state_plane("conv", "f32", channel=4, tap=2), state_plane("ssm", "f32", head=2, row=2, column=3))
CONTENT = StateSpec(1, PLANES).block_content_bytes
PAGE, BLOCKS, SIZE = 128, 12, 16
TOKENS = [(n * 31 + n // 5) % 97 for n in range(80)]


def a_group(index: int, layers: tuple[int, ...], *, keeps_states: bool, block_size: int) -> Group:
    layer_names = tuple(f"layers.{n}.mixer" for n in layers)
    return Group(
        index, layer_names, layers, block_size, 0, 0, 0, "f32", 0, is_latent=False, planes=PLANES, keeps_states=keeps_states
    )  # fmt: skip


class FakeEngine:
    """Two groups of states, of one layer and two, with padded pages. With `keeps_states` each block's end has its own place."""

    def __init__(self, folder: Path, *, keeps_states: bool = True, kept: int = SIZE) -> None:
        size = SIZE if keeps_states else 1024
        self.groups = [a_group(n, layers, keeps_states=keeps_states, block_size=size) for n, layers in enumerate(((1,), (0, 3)))]
        (self.part,) = parts_of(self.groups)
        self.pages = {name: torch.zeros(BLOCKS, PAGE, dtype=torch.int8) for g in self.groups for name in g.layer_names}
        spec = self.part.state_spec(model="fake-weights")
        kind = self.part.kind(spec, 1)
        self.stack = TierStack(kind, [open_tier(TierOption("disk", 10**9, folder), kind)])
        views = {name: t.as_strided((BLOCKS, 1, 1, CONTENT), (PAGE, CONTENT, CONTENT, 1)) for name, t in self.pages.items()}
        segments = [s for g in self.groups for s in segments_of(g, self.part)]
        self.mover = StateMover(self.part, spec, self.stack, runs_of(segments, views))
        self.side = SchedulerSide([self.part], [[self.stack]], block_size=kept, model="fake-weights")

    def truth(self, name: str, num_tokens: int) -> torch.Tensor:
        seed = sum(TOKENS[:num_tokens]) * 7 + num_tokens + int(name.split(".")[1]) * 1000
        return (torch.arange(CONTENT) * 5 + seed).to(torch.int8)

    def put(self, table: list[int], num_tokens: int) -> None:
        """What the model leaves after so many tokens."""
        for g in self.groups:
            for name in g.layer_names:
                self.pages[name][table[(num_tokens - 1) // g.block_size], :CONTENT] = self.truth(name, num_tokens)

    def step(self, table: list[int], *, computed: int, new: int, external: int = 0, known: int = len(TOKENS)) -> int:
        """How many states are new in the tiers."""
        self.side.add("r", self.told(known))
        self.side.allocated("r", [table, table], external)
        work = self.side.scheduled("r", [table, table], is_whole=True, num_computed=computed, num_new=new)
        if work.load:
            assert self.mover.load(work.load) == []
            assert self.holds(table, computed)
            last = table[(computed + new - 1) // self.groups[0].block_size]  # where the model will go on
            assert all(torch.equal(self.pages[n][last, :CONTENT], self.truth(n, computed)) for n in self.pages)
        self.put(table, computed + new)
        return self.mover.save(work.save) if work.save else 0

    def told(self, known: int) -> list[int]:
        r = self.side._requests.get("r")
        if r is not None:
            r.tokens[:] = TOKENS[:known]
        return TOKENS[:known]

    def holds(self, table: list[int], num_tokens: int) -> bool:
        block = table[(num_tokens - 1) // self.groups[0].block_size]
        return all(torch.equal(self.pages[n][block, :CONTENT], self.truth(n, num_tokens)) for n in self.pages)

    def found(self, count: int) -> int:
        self.side.add("asks", TOKENS[:count])
        matched = self.side.matched("asks", 0)
        self.side.drop("asks")
        return matched


def segments_of(group: Group, part: PartGroups) -> list[Segment]:
    spec = state_row("vllm.sd").spec(PLANES, num_blocks=BLOCKS, block_bytes=PAGE)
    return [
        Segment(group, (layer,), replace(spec, layer_start=part.layers.index(layer)), n, False)
        for n, layer in enumerate(group.layers)
    ]


@pytest.mark.parametrize("keeps_states", [True, False])
def test_a_state_comes_back_where_it_stood(tmp_path, keeps_states):
    table = [3, 4, 5, 6] if keeps_states else [3]
    one = FakeEngine(tmp_path, keeps_states=keeps_states)
    assert one.found(60) == 0
    assert one.step(table, computed=0, new=32) == 1  # the state after 16 was nowhere
    assert one.step(table, computed=32, new=7) == 0
    assert [one.found(n) for n in (16, 17, 32, 33, 60)] == [0, 0, 0, 32, 32]
    other = FakeEngine(tmp_path, keeps_states=keeps_states)
    there = [7, 8, 9] if keeps_states else [7]
    assert other.found(60) == 32
    assert other.step(there, computed=32, new=5, external=32) == 0
    assert other.step(there, computed=37, new=11) == 1
    assert FakeEngine(tmp_path, keeps_states=keeps_states).found(60) == 48


def test_what_pads_a_page_is_not_written(tmp_path):
    one = FakeEngine(tmp_path)
    one.step([3], computed=0, new=16)
    other = FakeEngine(tmp_path)
    for t in other.pages.values():
        t.fill_(0x5A)
    other.step([7, 8], computed=16, new=3, external=16)
    assert all((t[:, CONTENT:] == 0x5A).all() and (t[:7] == 0x5A).all() and (t[9:] == 0x5A).all() for t in other.pages.values())


def test_a_name_that_comes_a_step_late(tmp_path):
    """Async scheduling: the token that ends a block is known when the next step is scheduled. Where the state stays, it is kept."""
    for keeps_states, kept in ((True, 1), (False, 0)):
        table = [3, 4] if keeps_states else [3]
        one = FakeEngine(tmp_path / str(keeps_states), keeps_states=keeps_states)
        assert one.step(table, computed=0, new=15, known=15) == 0
        assert one.step(table, computed=15, new=1, known=15) == 0
        assert one.step(table, computed=16, new=1, known=16) == kept
        assert FakeEngine(tmp_path / str(keeps_states), keeps_states=keeps_states).found(60) == 16 * kept


@pytest.mark.parametrize(("kept", "ends"), [(8, [16, 32, 48]), (32, [32])])
def test_other_blocks_in_the_tiers(tmp_path, kept, ends):
    one = FakeEngine(tmp_path, kept=kept)
    assert [one.step([3, 4, 5, 6], computed=n, new=16) for n in (0, 16, 32)] == [int(n in ends) for n in (16, 32, 48)]
    assert FakeEngine(tmp_path, kept=kept).found(60) == ends[-1]
    there = one.stack.has([names(TOKENS, kept, "fake-weights")[n // kept - 1] for n in ends])
    assert all(there)  # under the name of the block that ends where it stands: docs/store.md


def test_a_state_that_left_or_is_damaged_is_a_miss(tmp_path):
    one = FakeEngine(tmp_path)
    for n in (0, 16):
        one.step([3, 4], computed=n, new=16)
    (path,) = tmp_path.rglob(f"{names(TOKENS, SIZE, 'fake-weights')[1].hex()}.kvx")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    other = FakeEngine(tmp_path)
    assert other.found(60) == 16
    other.side.add("r", TOKENS)
    other.side.allocated("r", [[7, 8], [7, 8]], 32)
    work = other.side.scheduled("r", [[7, 8], [7, 8]], is_whole=True, num_computed=32, num_new=1)
    assert other.mover.load(work.load) == [1]


def test_ranks_have_kinds_of_their_own():
    (part,) = parts_of([a_group(0, (0,), keeps_states=True, block_size=SIZE)])
    a, b = (part.kind(part.state_spec(model="m", num_ranks=2, rank=r), 1) for r in range(2))
    assert len({a.digest, b.digest, part.kind(part.state_spec(model="m"), 1).digest}) == 3
