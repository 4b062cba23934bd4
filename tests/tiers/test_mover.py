"""Mover: what went to the tiers comes back, whatever was between; what cannot be kept is said, and nothing is lost track of."""

from __future__ import annotations

import gc
import random
import threading
import time
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.tiers import DiskTier, HostTier, Mover, TierError
from kvx.tiers.block_file import file_bytes
from kvx.tiers.memory import HostMemory
from tests.tiers.blocks import files
from tests.tiers.movers import KEPT, NEUTRAL, SPEC, content, filled, is_same, kind_of, names, through


@pytest.fixture
def make(tmp_path):
    """A mover on tiers of so many blocks each."""
    opened = []

    def make(host: int = 0, disk: int = 0, *, cache=None, spec=SPEC, kept=KEPT, **options):
        kind, tiers = kind_of(kept), []
        if host:
            tiers.append(HostTier(kind, host * kind.num_bytes))
        if disk:
            tiers.append(DiskTier(tmp_path / "tier", kind, disk * file_bytes(kind)))
        cache = filled(spec) if cache is None else cache
        opened.append(Mover(cache, spec, tiers, kept=kept, **options))
        opened.extend(tiers)
        return cache, opened[-1 - len(tiers)]

    yield make
    for thing in opened:
        thing.close()


def assert_held(memory: HostMemory, num_blocks: int) -> None:
    """A thread that is done with a block may hold it a moment longer, and an error until it is collected."""
    end = time.monotonic() + 5
    while memory.num_held != num_blocks and time.monotonic() < end:
        gc.collect()
    assert memory.num_held == num_blocks


WAYS = {"host": {"host": 24}, "disk": {"disk": 24}, "both": {"host": 4, "disk": 24}}


@pytest.mark.parametrize("is_staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("way", WAYS)
def test_blocks_come_back_as_they_were(make, way, is_staged):
    cache, mover = make(**WAYS[way], is_staged=is_staged, max_in_flight_bytes=24 * kind_of().num_bytes)
    numbers, blocks = list(range(20)), random.Random(1).sample(range(24), 20)
    assert mover.offload(names(*numbers), blocks).result(10) == 20
    assert mover.find(names(*numbers, 99, 3)) == 20
    assert through(mover, cache, numbers, blocks) == [True] * 20
    assert through(mover, cache, numbers[3:9], blocks[10:16]) == [False] * 6  # other blocks have their content now
    assert mover.offload(names(*numbers), blocks).result(10) == 0 or way == "both"
    mover.settle()
    stats = mover.stats
    assert stats.onboarded == 26
    assert sum(stats.hits) == 26 or way == "both"  # some were between the two
    assert (stats.failed, stats.missed, stats.dropped) == (0, 0, 0)
    assert stats.offloaded_bytes == stats.offloaded * kind_of().num_bytes
    if way == "both":
        assert stats.handed_down >= 16


@pytest.mark.parametrize("block_size", [2, 4, 8, 16, 24])
@pytest.mark.parametrize("is_staged", [False, True], ids=["direct", "staged"])
def test_blocks_of_another_size(make, block_size, is_staged):
    kept = replace(KEPT, block_size=block_size)
    cache, mover = make(48 * 4, kept=kept, is_staged=is_staged, max_in_flight_bytes=16 * kind_of(kept).num_bytes)
    blocks = random.Random(2).sample(range(24), 12)
    numbers = range(12 * 8 // block_size)
    assert mover.offload(names(*numbers), blocks).result(10) == len(numbers)
    assert through(mover, cache, list(numbers), blocks) if block_size == 8 else True
    before = [content(cache, SPEC, b) for b in blocks]
    for t in cache:
        t.zero_()
    assert mover.onboard(names(*numbers), blocks) == len(numbers)
    assert all(is_same(want, content(cache, SPEC, b)) for want, b in zip(before, blocks, strict=True))


def test_a_beginning_of_a_block_comes_alone(make):
    """Names are of 2 tokens, blocks of 8: seven names came, so the first block is whole and the second has 6 tokens of its own."""
    kept = replace(KEPT, block_size=2)
    cache, mover = make(64, kept=kept)
    before = [t.clone() for t in cache]
    mover.offload(names(*range(8)), [5, 6]).result(10)
    mover.tiers[0].drop(names(7)).result()
    for t in cache:
        t.view(torch.float32).fill_(7)
    assert mover.find(names(*range(8))) == 7
    assert mover.onboard(names(*range(8)), [9, 10]) == 7
    assert mover.stats.missed == 1
    for t, was in zip(cache, before, strict=True):
        now, then = (x.view(torch.float32).view(24, 8, -1) for x in (t, was))
        assert torch.equal(now[9], then[5])
        assert torch.equal(now[10, :6], then[6, :6])
        assert (now[10, 6:] == 7).all()


@pytest.mark.parametrize(
    ("spec_format", "kept_format", "error"),
    [
        ("f32", "bf16", 2**-8),
        ("f32", "fp8_e4m3_per_token_head_inline", 2**-4),
        ("f32", "int8_per_token_head_inline", 0.02),
        ("bf16", "f32", 0),
    ],
)
def test_formats_change_on_the_way(make, spec_format, kept_format, error):
    spec, kept = replace(SPEC, format=spec_format), replace(KEPT, format=kept_format)
    kind = torch.float32 if spec_format == "f32" else torch.bfloat16
    cache = [t.view(torch.float32).to(kind).view(torch.uint8) for t in filled()]
    before = [t.clone() for t in cache]
    _, mover = make(24, cache=cache, spec=spec, kept=kept)
    mover.offload(names(*range(24)), range(24)).result(10)
    for t in cache:
        t.zero_()
    assert mover.onboard(names(*range(24)), range(24)) == 24
    for t, was in zip(cache, before, strict=True):
        a, b = t.view(kind).double().view(-1, 16), was.view(kind).double().view(-1, 16)
        assert ((a - b).abs() <= error * b.abs().amax(1, keepdim=True)).all()
        assert error == 0 or not torch.equal(a, b)


def test_what_a_full_queue_drops_is_counted(make):
    events, gate = [], threading.Event()
    _, mover = make(1, 24, on_event=events.append, max_in_flight_bytes=2 * kind_of().num_bytes)
    mover.tiers[1].listen(lambda _: gate.wait(10))
    done = [mover.offload(names(n), [n]) for n in range(8)]  # none waits for the disk
    assert [d.result(10) for d in done] == [1] * 8
    gate.set()
    mover.settle()
    stats = mover.stats
    assert stats.dropped > 0
    assert stats.handed_down + stats.dropped == 7
    assert next(e for e in events if e.kind == "dropped").detail == "2 blocks are on their way down already"
    kept = mover.has(names(*range(8)))
    assert sum(kept) == 8 - stats.dropped
    assert kept[7]


def test_a_block_on_its_way_down_is_found(make):
    gate = threading.Event()
    cache, mover = make(1, 24)
    mover.tiers[1].listen(lambda _: gate.wait(10))
    mover.offload(names(0, 1, 2), [0, 1, 2]).result(10)
    assert through(mover, cache, [0, 1, 2], [0, 1, 2]) == [True] * 3
    gate.set()


def test_a_damaged_block_is_a_miss(make, tmp_path):
    cache, mover = make(disk=24)
    mover.offload(names(*range(6)), range(6)).result(10)
    path = next(p for p in files(tmp_path / "tier") if p.stem == names(3)[0].hex())
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    assert mover.find(names(*range(6))) == 6
    assert mover.onboard(names(*range(6)), range(6, 12)) == 3
    assert all(is_same(content(cache, SPEC, n), content(cache, SPEC, n + 6)) for n in range(3))
    assert mover.find(names(*range(6))) == 3
    assert mover.stats.missed == 1


class Failing(HostTier):
    """Says no to some calls."""

    what = ""

    def _store(self, key, block):
        if self.what == "put":
            raise OSError("no room at all")
        return super()._store(key, block)

    def _fetch(self, key, into):
        if self.what == "get":
            raise OSError("no such device")
        return super()._fetch(key, into)

    def _holds(self, key):
        if self.what == "has":
            raise OSError("no answer")
        return super()._holds(key)


def test_a_failing_tier_leaves_everything_as_it_was():
    kind, events = kind_of(), []
    with Failing(kind, 24 * kind.num_bytes) as tier, Mover(filled(), SPEC, [tier], kept=KEPT, on_event=events.append) as mover:
        mover.offload(names(1), [1]).result(10)
        tier.what = "put"
        failing = mover.offload(names(2, 3), [2, 3])
        with pytest.raises(TierError, match=f"{names(2)[0].hex()}: no room at all"):
            failing.result(10)
        tier.what = "get"
        assert mover.onboard(names(1), [5]) == 0
        tier.what = "has"
        assert mover.find(names(1)) == 0
        tier.what = ""
        assert mover.find(names(1, 2)) == 1
        assert mover.offload(names(2, 3), [2, 3]).result(10) == 2
        assert mover.onboard(names(1, 2, 3), [5, 6, 7]) == 3
        assert [e.kind for e in events].count("failed") == 2
        assert mover.stats.failed == 2
    del failing  # its error holds the blocks
    assert_held(tier.memory, 3)


def test_what_is_in_flight_is_bounded_and_close_waits_for_it():
    kind, gate, sent = kind_of(), threading.Event(), []
    tier = HostTier(kind, 24 * kind.num_bytes, on_event=lambda _: gate.wait(10))
    mover = Mover(filled(), SPEC, [tier], kept=KEPT, max_in_flight_bytes=4 * kind.num_bytes)

    def fill() -> None:
        for n in range(8):
            sent.append(mover.offload(names(n), [n]))

    thread = threading.Thread(target=fill)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    assert len(sent) == 4
    gate.set()
    thread.join(10)
    mover.close()
    assert [d.result(0) for d in sent] == [1] * 8
    for call in (mover.offload, mover.onboard):
        with pytest.raises(kvx.BadArgument, match="closed"):
            call(names(1), [1])
    mover.close()
    tier.close()


@pytest.mark.parametrize("is_staged", [False, True], ids=["direct", "staged"])
def test_an_interrupt_leaks_nothing(make, monkeypatch, is_staged):
    _, mover = make(24, is_staged=is_staged, max_in_flight_bytes=4 * kind_of().num_bytes)
    for name in ("memory.take", "_transfer.send", "_landing.submit"):
        owner, method = name.rsplit(".", 1)
        target = getattr(mover, owner)
        for is_after in (False, True):
            real = getattr(target, method)

            def interrupted(*args, real=real, is_after=is_after):
                if is_after and "submit" not in str(real):
                    real(*args)
                raise KeyboardInterrupt

            with monkeypatch.context() as patch:
                patch.setattr(target, method, interrupted)
                if name == "_transfer.send" and is_after and is_staged:
                    continue  # between its return and ours nothing can be held
                with pytest.raises(KeyboardInterrupt):
                    mover.offload(names(1, 2, 3, 4), [1, 2, 3, 4])
    assert_held(mover.memory, 0)
    for _ in range(6):  # more than there is room for, were any of it lost
        assert mover.offload(names(1, 2, 3, 4), [1, 2, 3, 4]).result(10) in (0, 4)
        mover.tiers[0].drop(names(1, 2, 3, 4)).result()
    assert mover.stats.offloaded == 24
    mover.settle()
    assert_held(mover.memory, 0)


def test_what_on_event_raises_is_the_futures():
    def refuse(event):
        raise ValueError("not today")

    kind = kind_of()
    with HostTier(kind, 24 * kind.num_bytes) as tier, Mover(filled(), SPEC, [tier], kept=KEPT, on_event=refuse) as mover:
        with pytest.raises(ValueError, match="not today"):
            mover.offload(names(1), [1]).result(10)
        assert mover.find(names(1)) == 1


def test_what_on_event_raises_does_not_stop_demotion(make):
    def refuse(event):
        if event.kind == "handed down":
            raise ValueError("not today")

    _, mover = make(1, 24, on_event=refuse)
    mover.offload(names(*range(6)), range(6)).result(10)
    mover.settle()
    assert mover.stats.handed_down == 5
    assert mover.find(names(*range(6))) == 6


def test_a_tier_below_that_fails_loses_only_its_own(tmp_path):
    kind = kind_of()
    with HostTier(kind, kind.num_bytes) as host, Failing(kind, 24 * kind.num_bytes) as below:
        below.what = "put"
        with Mover(filled(), SPEC, [host, below], kept=KEPT) as mover:
            assert mover.offload(names(*range(4)), range(4)).result(10) == 4
            mover.settle()
            assert mover.stats.dropped == 3
            with pytest.raises(TierError, match="no room at all"):
                mover.save(names(9), [9])
            below.what = ""
            assert mover.save(names(9), [9]) == 2
            assert below.num_blocks == 2


def test_malformed_arguments(make):
    cache, mover = make(8)
    with pytest.raises(kvx.BadArgument, match="2 names of 8 tokens and 1 blocks of 8"):
        mover.offload(names(1, 2), [1])
    with pytest.raises(kvx.OutOfRange, match="blocks are 3 to 24; the cache has 0 to 23"):
        mover.onboard(names(1, 2), [3, 24])
    for kept, words in (
        (replace(KEPT, block_size=3), "one is a multiple of the other"),
        (replace(KEPT, layout="kv | block head token dim", num_layers=1), "is not one run"),
        (replace(KEPT, format="fp8_e4m3_per_token_head"), "inline scales"),
    ):
        with pytest.raises(kvx.BadArgument, match=words):
            make(8, kept=kept)
    with pytest.raises(kvx.BadArgument, match="max_in_flight_bytes is 5"):
        make(8, max_in_flight_bytes=5)
    with pytest.raises(kvx.BadArgument, match="tiers is empty"):
        make()
    with HostTier(kind_of(replace(KEPT, model="other")), 1 << 20) as other, pytest.raises(kvx.Incompatible, match="model"):
        Mover(cache, SPEC, [other], kept=KEPT)


def test_random_calls_match_a_dict(make):
    """Several layers of tiers, small ones, so that blocks demotion, rise and are lost; what comes is always right."""
    rng = random.Random(5)
    cache, mover = make(3, 9, max_in_flight_bytes=6 * kind_of().num_bytes, is_staged=True)
    truth: dict[int, list[torch.Tensor]] = {}
    came = 0
    for step in range(150):
        numbers = rng.sample(range(16), rng.randint(1, 5))
        blocks = rng.sample(range(24), len(numbers))
        if rng.random() < 0.5:
            fresh = filled(seed=step)
            for t, new in zip(cache, fresh, strict=True):
                for b in blocks:
                    t.view(24, -1)[b] = new.view(24, -1)[b]
            for n, b in zip(numbers, blocks, strict=True):
                if n in truth:  # a name is always of the same content
                    for t, was in zip(cache, truth[n], strict=True):
                        t.view(torch.float32).view(24, -1)[b] = was
                truth.setdefault(n, content(cache, SPEC, b))
            mover.offload(names(*numbers), blocks)
            for t in cache:
                t.view(torch.float32).view(24, -1)[blocks] = -1.0
        else:
            n = mover.onboard(names(*numbers), blocks)
            came += n
            for number, b in list(zip(numbers, blocks, strict=True))[:n]:
                assert is_same(content(cache, SPEC, b), truth[number])
    assert came > 50
    mover.close()
    stats = mover.stats
    assert stats.failed == 0
    assert stats.promoted > 0
    assert stats.handed_down > 0
    assert_held(mover.memory, mover.tiers[0].num_blocks)


def test_memory_is_reused_and_read_by_whoever_holds_it(make):
    _, mover = make(2)
    mover.offload(names(0, 1), [0, 1]).result(10)
    (held,) = mover.tiers[0].get(names(0)).result()
    before = held.buffers[0].clone()
    for n in range(2, 24):
        mover.offload(names(n), [n]).result(10)
    assert torch.equal(held.buffers[0], before)
    assert_held(mover.memory, 3)
    del held
    assert_held(mover.memory, 2)
    assert len(mover.memory._slabs) <= 3


def test_specs_may_be_shards(make):
    """One spec a layer, as a PagedCache has its tensors."""
    cache = filled()
    shards = [replace(SPEC, num_layers=1, layer_start=i, layout="kv | block token head dim") for i in range(3)]
    _, mover = make(24, cache=cache, spec=shards, kept=replace(KEPT, layout=NEUTRAL))
    mover.offload(names(*range(12)), range(12)).result(10)
    assert through(mover, cache, list(range(12)), list(range(12))) == [True] * 12
