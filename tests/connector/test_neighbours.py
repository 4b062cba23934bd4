"""What others wrote of the same tokens: taken over by who has the tokens, and led to for who has hashes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvx
from kvx import CacheSpec
from kvx.adapters.engine_names import namer_of
from kvx.adapters.sglang.names import SGLANG, page_names
from kvx.connector.groups import parts_of
from kvx.connector.neighbours import Neighbours
from kvx.connector.scheduler import SchedulerSide
from kvx.connector.store_kinds import REFRESH_S, _chains
from kvx.connector.store_names import Scheme, alias_kind, named_kind, read_alias
from kvx.connector.tier_stack import TierStack, open_tier
from kvx.handover import NEUTRAL, names
from kvx.tiers import BlockKind, TierOption
from tests.connector.groups import a_group

MODEL = "weights-of-a-test"
TOKENS = [(n * 41 + n // 3) % 251 for n in range(100)]
H, D, L = 4, 8, 2


@pytest.fixture(autouse=True)
def _look_at_once(monkeypatch):
    monkeypatch.setattr("kvx.connector.store_kinds.REFRESH_S", 0.0)
    assert REFRESH_S > 0


def a_spec(block_size: int, *, heads: tuple[int, int] = (0, H), layout: str = NEUTRAL, format: str = "f32") -> CacheSpec:
    return CacheSpec(
        1, block_size, heads[1] - heads[0], D, layout=layout, format=format, num_layers=L, model=MODEL, head_start=heads[0]
    )  # fmt: skip


def truth(spec: CacheSpec, first_token: int) -> list[torch.Tensor]:
    """A block of these tokens, in the spec's own layout: a number for each token, layer, head, plane and element."""
    plain = spec.replaced(layout="layer kv | block token head dim", format="f32")
    t = torch.arange(first_token, first_token + spec.block_size).view(-1, 1, 1).float()
    h = torch.arange(spec.head_start, spec.head_start + spec.num_kv_heads).view(1, -1, 1) * 1000
    d = torch.arange(D).view(1, 1, -1) * 0.125
    made = [t + h + d + layer * 10000 + plane * 100000 for layer in range(L) for plane in range(2)]
    out = kvx.allocate_buffers(spec)
    kvx.convert([x.unsqueeze(0).contiguous() for x in made], out, plan=kvx.plan(plain, spec))
    return out


def write(folder: Path, spec: CacheSpec, scheme: str = "", count: int = 1000) -> None:
    """Blocks of the text, as another engine keeps them."""
    kind = named_kind(BlockKind.of(spec), scheme)
    made = page_names(TOKENS, spec.block_size) if scheme else names(TOKENS, spec.block_size, MODEL)
    with TierOption.parse(f"disk:{folder}").open(kind) as tier:
        blocks = [kind.block(truth(spec, n * spec.block_size)) for n in range(len(made[:count]))]
        tier.put(made[:count], blocks).result()


class Reader:
    def __init__(self, folder: Path, spec: CacheSpec) -> None:
        self.spec, options = spec, [TierOption.parse(f"disk:{folder}")]
        kind = BlockKind.of(spec)
        self.stack = TierStack(kind, [open_tier(o, kind) for o in options])
        self.one = Neighbours(options, self.stack, spec, namer_of=namer_of)
        self.names = names(TOKENS, spec.block_size, MODEL)

    def take_over(self) -> int:
        return self.one.take_over(TOKENS, self.names)

    def check(self, count: int) -> None:
        for n, block in enumerate(self.stack.get(self.names)):
            assert (block is not None) == (n < count)
            if block is not None:
                want = torch.cat([t.view(-1).view(torch.uint8) for t in truth(self.spec, n * self.spec.block_size)])
                assert torch.equal(block.buffers[0].view(-1), want)


@pytest.mark.parametrize(
    ("block_size", "theirs", "count"),
    [
        (16, a_spec(16, layout="block | layer kv token head dim"), 6),  # another layout
        (16, a_spec(32), 6),
        (32, a_spec(8), 3),
        (24, a_spec(16), 4),  # neither divides the other
        (16, a_spec(64), 4),
    ],
)
@pytest.mark.parametrize("scheme", ["", SGLANG])
def test_blocks_of_others_are_taken_over(tmp_path, block_size, theirs, count, scheme):
    write(tmp_path, theirs, scheme)
    reader = Reader(tmp_path, a_spec(block_size))
    assert reader.take_over() == count
    reader.check(count)
    assert reader.take_over() == 0  # they are its own now


def test_ranks(tmp_path):
    for heads in ((0, 2), (2, 4)):
        write(tmp_path / "two", a_spec(16, heads=heads))
    one = Reader(tmp_path / "two", a_spec(16))
    assert one.take_over() == 6
    one.check(6)
    write(tmp_path / "one", a_spec(16), SGLANG)
    for heads in ((0, 1), (3, 4)):
        rank = Reader(tmp_path / "one", a_spec(32, heads=heads))
        assert rank.take_over() == 3
        rank.check(3)


def test_layers_that_lie_apart(tmp_path):
    """As LMCache writes layer by layer, and stages of a pipeline theirs: all of them together are the block."""
    for layer in range(L):
        spec = a_spec(16).replaced(num_layers=1, layer_start=layer)
        kind = BlockKind.of(spec)
        whole, made = a_spec(16), names(TOKENS, 16, MODEL)
        blocks = []
        for n in range(len(made)):
            out = kvx.allocate_buffers(spec)
            kvx.convert(truth(whole, n * 16), out, plan=kvx.plan(whole, spec, partial=True))
            blocks.append(kind.block(out))
        assert Reader(tmp_path, a_spec(32)).take_over() == 0  # one of them alone is not
        with TierOption.parse(f"disk:{tmp_path}").open(kind) as tier:
            tier.put(made, blocks).result()
    reader = Reader(tmp_path, a_spec(32))
    assert reader.take_over() == 3
    reader.check(3)


def test_a_rank_that_is_missing_is_a_miss(tmp_path):
    write(tmp_path, a_spec(16, heads=(0, 2)))
    assert Reader(tmp_path, a_spec(16)).take_over() == 0


def test_what_was_rounded_does_not_come_under_names_of_what_was_not(tmp_path):
    write(tmp_path, a_spec(16, format="bf16"))
    assert Reader(tmp_path, a_spec(16)).take_over() == 0


def test_a_damaged_block_is_not_taken_over(tmp_path):
    write(tmp_path, a_spec(16), SGLANG)
    (path,) = tmp_path.rglob(f"{page_names(TOKENS, 16)[2].hex()}.kvx")
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    reader = Reader(tmp_path, a_spec(16))
    reader.take_over()
    assert [b is not None for b in reader.stack.get(reader.names)] == [True, True, False, True, True, True]


@pytest.mark.parametrize(("block_size", "page_size", "count"), [(16, 4, 24), (16, 16, 6), (16, 32, 3), (24, 16, 6), (8, 64, 1)])
def test_an_engine_that_has_hashes_alone_is_led_to_blocks(tmp_path, block_size, page_size, count):
    reader = Reader(tmp_path, a_spec(block_size))
    assert reader.one.lead(TOKENS, reader.names) == 0  # nobody looks for other names there
    write(tmp_path, a_spec(page_size), SGLANG, count=0)
    assert reader.one.lead(TOKENS, reader.names) == 0  # and no block is there
    write(tmp_path, a_spec(block_size))
    assert reader.one.lead(TOKENS, reader.names) == count
    assert reader.one.lead(TOKENS, reader.names) == 0
    kind = alias_kind(MODEL, Scheme(SGLANG, page_size), Scheme("", block_size))
    with TierOption.parse(f"disk:{tmp_path}").open(kind) as tier:
        found = tier.get(page_names(TOKENS, page_size)[:count]).result()
    for n, block in enumerate(found):
        first = n * page_size // block_size
        assert read_alias(block).names == tuple(reader.names[first : -(-(n + 1) * page_size // block_size)])


def test_pages_that_they_have_need_no_record(tmp_path):
    write(tmp_path, a_spec(16))
    write(tmp_path, a_spec(16), SGLANG, count=4)
    reader = Reader(tmp_path, a_spec(16))
    assert reader.one.lead(TOKENS, reader.names) == 2


def test_a_scheduler_takes_over_before_it_looks_and_leads_when_a_request_ends(tmp_path):
    write(tmp_path, a_spec(16), SGLANG, count=4)
    reader = Reader(tmp_path, a_spec(16))
    group = a_group((0, 1), block_size=16, num_kv_heads=H, head_dim=D)
    side = SchedulerSide(parts_of([group]), [[reader.stack]], block_size=16, model=MODEL, neighbours=[[reader.one]])
    side.add("r", TOKENS)
    assert side.matched("r", 0) == 64
    write(tmp_path, a_spec(16))  # what the request computed
    side.drop("r")
    assert reader.one.lead(TOKENS, reader.names) == 0


def test_a_store_that_fails_is_no_error(tmp_path, monkeypatch, caplog):
    write(tmp_path, a_spec(16), SGLANG)
    reader = Reader(tmp_path, a_spec(16))
    monkeypatch.setattr("kvx.connector.neighbours.aliases", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert reader.take_over() == 0
    assert reader.one.lead(TOKENS, reader.names) == 0
    assert "did not take over blocks" in caplog.text


def test_a_directory_of_many_numbers_of_ranks_has_few_families():
    """Of 1, 2, 4, ... 32 ranks there are half a million ways to mix them; one for each is enough. Unequal shares go together."""
    spans = {(first, first + width) for width in (1, 2, 4, 8, 16, 32) for first in range(0, 32, width)}
    assert [len(chain) for chain in _chains(spans, (0, 32))] == [1, 2, 4, 8, 16, 32]
    assert _chains(spans, (5, 7))[:2] == [[(0, 32)], [(0, 16)]]
    assert _chains([(0, 2), (2, 3)], (0, 3)) == [[(0, 2), (2, 3)]]
    assert _chains([(0, 2), (3, 4)], (0, 4)) == []
