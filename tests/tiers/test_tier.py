"""The protocol, of every tier alike: against a dict that forgets the least recently used."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.layout.device_memory import host_bytes
from kvx.tiers import Block, HostTier
from tests.tiers.blocks import KIND, block, found, is_right, key, open_tier, put


@pytest.fixture(params=["host", "disk"])
def make(request, tmp_path):
    tiers = []

    def make(num_blocks: int = 8, **options):
        tiers.append(open_tier(request.param, tmp_path / "tier", num_blocks, **options))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [1, 5])
def test_random_sequences_match_a_dict(make, seed, capacity):
    rng, model, events = random.Random(seed), OrderedDict(), []
    tier = make(capacity, on_event=events.append)
    hits = evicted = 0
    for _ in range(150):
        numbers = [rng.randrange(9) for _ in range(rng.randrange(4))]
        what = rng.choice(["put", "get", "has", "drop"])
        want = []
        for n in numbers:
            there = n in model
            want.append(there if what != "put" else not there)
            if what == "drop":
                model.pop(n, None)
            elif what != "has" and (there or what == "put"):
                model[n] = True
                model.move_to_end(n)
                if len(model) > capacity:
                    model.popitem(last=False)
                    evicted += 1
            hits += what == "get" and there
        if what == "put":
            assert put(tier, *numbers) == want
        elif what == "get":
            assert found(tier, *numbers) == want
        else:
            assert getattr(tier, what)([key(n) for n in numbers]).result() == want
        assert tier.num_blocks == len(model) <= capacity
    stats = tier.stats
    assert (stats.hits, stats.evicted, stats.errors, stats.refused) == (hits, evicted, 0, 0)
    assert stats.bytes_out == hits * KIND.num_bytes
    assert stats.bytes_in == stats.stored * KIND.num_bytes
    assert sum(e.kind == "stored" for e in events) == stats.stored
    assert sum(e.kind == "evicted" for e in events) == evicted


def test_many_threads_at_once(make):
    tier, wrong = make(6, max_pending=3), []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            n = rng.randrange(12)
            futures = [tier.put([key(n)], [block(key(n))]), tier.get([key(n)]), tier.drop([key(n + 1)])]
            futures[0].result(), futures[2].result()
            got = futures[1].result()[0]
            if (got is not None and not is_right(key(n), got)) or tier.num_blocks > 6:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert tier.stats.errors == tier.stats.refused == 0


def test_get_into_the_callers_memory(make):
    tier = make()
    put(tier, 1)
    into = [KIND.empty(), KIND.empty()]
    got = tier.get([key(1), key(2)], into=into).result()
    assert got[0] is into[0]
    assert got[1] is None
    assert is_right(key(1), into[0])


def test_callers_may_reuse_their_memory_afterwards(make):
    tier, mine = make(), block(key(1))
    tier.put([key(1)], [mine]).result()
    mine.buffers[0].zero_()
    assert found(tier, 1) == [True]


def test_a_block_of_another_kind_is_refused(make):
    tier = make()
    with pytest.raises(kvx.Incompatible, match="model"):
        tier.put([key(1)], [Block(replace(KIND, manifest={**KIND.manifest, "model": "x"}), block(key(1)).buffers)])
    assert tier.num_blocks == 0


def test_malformed_arguments(make):
    tier, good = make(), block(key(1))
    for keys, blocks in [
        ([b""], [good]),
        ([bytes(65)], [good]),
        (["ab"], [good]),
        ([key(1)], []),
        ([key(1)], [b"xx"]),
        ([key(1)], None),
        (None, [good]),
        (7, [good]),
        ([key(1)], [Block(KIND, good.buffers[:1])]),
        ([key(1)], [Block(KIND, (good.buffers[0][:-1], good.buffers[1]))]),
        ([key(1)], [Block(KIND, (good.buffers[0].view(torch.int8), good.buffers[1]))]),
        ([key(1)], [Block(KIND, (torch.zeros(600, dtype=torch.uint8)[::2], good.buffers[1]))]),
    ]:
        with pytest.raises(kvx.BadArgument):
            tier.put(keys, blocks)
    with pytest.raises(kvx.BadArgument, match="a block is a bytes; it must be a Block"):
        tier.put([key(1)], [b"xx"])
    with pytest.raises(kvx.BadArgument, match="keys is 7; it must be a list of names"):
        tier.has(7)
    with pytest.raises(kvx.BadArgument, match="capacity_bytes"):
        make(0)


def test_what_is_no_kind_and_no_capacity():
    for kind in (None, kvx.CacheSpec(1, 4, 2, 8), "small"):
        with pytest.raises(
            kvx.BadArgument, match=r"HostTier: kind is .*; it must be a BlockKind\. BlockKind\.of\(spec\) makes one"
        ):
            HostTier(kind, 1 << 20)
    for capacity in (None, 2e9):
        with pytest.raises(kvx.BadArgument, match=f"HostTier: capacity_bytes is {capacity!r}; it must be a whole number of bytes"):
            HostTier(KIND, capacity)


def test_a_host_tier_is_not_larger_than_the_host():
    with pytest.raises(kvx.BadArgument, match=r"HostTier: capacity_bytes is 1000000000\.0 GB; the host has [0-9.]+ GB"):
        HostTier(KIND, 10**18)
    HostTier(KIND, host_bytes()).close()  # nothing is taken before blocks come


def test_close_waits_for_what_is_in_flight_and_takes_no_more(make):
    gate = threading.Event()
    tier = make(64, on_event=lambda _: gate.wait(10))
    futures = [tier.put([key(n)], [block(key(n))]) for n in range(8)]
    threading.Timer(0.05, gate.set).start()
    tier.close()
    assert all(f.done() and f.result() == [True] for f in futures)
    with pytest.raises(kvx.BadArgument, match="closed"):
        tier.has([key(1)])


def test_what_is_in_flight_is_bounded(make):
    gate, running = threading.Event(), threading.Event()
    tier = make(64, max_pending=2, on_event=lambda _: gate.wait(10))

    def fill() -> None:
        for n in range(3):
            tier.put([key(n)], [block(key(n))])
        running.set()

    thread = threading.Thread(target=fill)
    thread.start()
    assert not running.wait(0.1)  # the third waits
    gate.set()
    assert running.wait(10)
    thread.join()


def test_host_hands_what_it_evicts_to_the_callback(tmp_path):
    events = []
    with open_tier("host", tmp_path, 2, on_event=events.append) as tier:
        put(tier, 1, 2, 3)
    (gone,) = [e for e in events if e.kind == "evicted"]
    assert gone.key == key(1)
    assert is_right(key(1), gone.block)


@pytest.mark.parametrize("model", ["", "qwen3-4x64-kv2x16-v128"])
def test_every_tier_that_others_find_wants_the_weights_name(model):
    from kvx.tiers.mooncake_tier import MooncakeTier
    from kvx.tiers.nixl_server import NixlServer
    from kvx.tiers.nixl_tier import NixlTier

    kind = replace(KIND, manifest={**KIND.manifest, "model": model})
    for open_it in (
        lambda: NixlTier("127.0.0.1", 9, kind, secret=None),
        lambda: NixlServer("127.0.0.1", 9, kind, 1 << 20, secret=None),
        lambda: MooncakeTier(None, kind),
    ):
        with pytest.raises(kvx.BadArgument, match=r"others find its blocks again.*kvx\.weights_identity"):
            open_it()
