"""The remote tier over NIXL, against a peer in another process: the protocol, and a peer that dies, is late or has a wrong byte."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from dataclasses import replace

import pytest

from kvx import Incompatible
from kvx.tiers import BlockKind, TierError, TierOption
from kvx.tiers.nixl_server import MAX_LEASES
from kvx.tiers.nixl_tier import NixlTier
from tests.engines.nixl_peer import Peer, peer
from tests.engines.wires import SECRET, store_server
from tests.tiers.blocks import KIND, found, key, put
from tests.wires.peers import OTHER, eventually

pytest.importorskip("nixl")


TIMEOUT_S = 2.0


def open_tier(p, **options) -> NixlTier:
    return NixlTier("127.0.0.1", p.port, KIND, secret=SECRET, timeout_s=TIMEOUT_S, retry_s=0.0, staging_blocks=3, **options)


@pytest.mark.parametrize("capacity", [1, 5])
def test_random_sequences_match_a_dict(capacity):
    rng, model, events = random.Random(capacity), OrderedDict(), []
    hits = evicted = 0
    with peer(capacity) as p, open_tier(p, on_event=events.append) as tier:
        for _ in range(60):
            numbers = [rng.randrange(9) for _ in range(rng.randrange(6))]
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
            assert tier.num_blocks == len(model)
        assert p.leases() == 0
        stats = tier.stats
    assert (stats.hits, stats.evicted, stats.errors, stats.refused) == (hits, evicted, 0, 0)
    assert sum(e.kind == "stored" for e in events) == stats.stored


def test_two_tiers_share_a_peer():
    with peer() as p, open_tier(p) as one, open_tier(p) as two:
        put(one, 1, 2)
        assert found(two, 1, 2, 3) == [True, True, False]
        assert put(two, 2, 3) == [False, True]
        assert found(one, 3) == [True]


def test_a_wrong_byte_is_refused_and_forgotten():
    events = []
    with peer(1) as p, open_tier(p, on_event=events.append) as tier:
        for byte in (0, 299, 316):  # of either buffer
            put(tier, 1)
            p.flip(0, byte)
            assert found(tier, 1) == [False]
            assert (tier.num_blocks, p.leases()) == (0, 0)
        assert (tier.stats.refused, tier.stats.hits) == (3, 0)
        assert [e.key for e in events if e.kind == "refused"] == [key(1)] * 3
        put(tier, 1)
        assert found(tier, 1) == [True]


@pytest.mark.parametrize("blow", [Peer.kill, Peer.stop], ids=["killed", "stopped"])
def test_a_peer_that_is_gone_is_a_miss_in_time_and_the_next_one_works(blow):
    with peer() as p, open_tier(p) as tier:
        put(tier, 1)
        blow(p)
        for call in ("get", "put", "has"):
            begin = time.monotonic()
            if call == "put":
                with pytest.raises(TierError):
                    put(tier, 2)
            else:
                assert (found(tier, 1) if call == "get" else tier.has([key(1)]).result()) == [False]
            assert time.monotonic() - begin < TIMEOUT_S + 1
        assert tier.stats.errors == 3
        p.kill()
        with peer(port=p.port):
            assert put(tier, 1, 2) == [True, True]
            assert found(tier, 1, 2) == [True, True]


def test_after_a_failure_calls_fail_at_once_for_a_while():
    with peer() as p, NixlTier("127.0.0.1", p.port, KIND, secret=SECRET, timeout_s=TIMEOUT_S, retry_s=60.0) as tier:
        p.kill()
        assert found(tier, 1) == [False]
        begin = time.monotonic()
        assert found(tier, 1) == [False]
        assert time.monotonic() - begin < 0.5


def test_a_client_that_never_writes_gives_its_slots_back():
    with peer(2, lease_s=0.5) as p, open_tier(p) as tier, open_tier(p) as other:
        with other._talk() as (link, deadline):
            lease = link.ask({"op": "put", "keys": [key(8).hex(), key(9).hex()]}, deadline)["lease"]  # and never writes
        assert p.leases() == 1
        with pytest.raises(TierError, match="no room"):
            put(tier, 1)
        with tier._talk() as (link, deadline), pytest.raises(TierError, match=f"lease {lease} is not this peer's"):
            link.ask({"op": "end", "lease": lease}, deadline)
        assert p.leases() == 1
        time.sleep(0.6)
        assert p.leases() == 0
        assert put(tier, 1, 2) == [True, True]


def test_a_client_that_goes_gives_its_slots_back_at_once():
    with peer(2, lease_s=60) as p, open_tier(p) as tier:
        with open_tier(p) as other, other._talk() as (link, deadline):
            link.ask({"op": "put", "keys": [key(8).hex(), key(9).hex()]}, deadline)  # and never writes
            assert p.leases() == 1
        eventually(lambda: p.leases() == 0)
        assert put(tier, 1, 2) == [True, True]


def test_leases_of_one_peer_have_an_end():
    with peer(2, lease_s=60) as p, open_tier(p) as tier:
        put(tier, 1)
        with tier._talk() as (link, deadline):
            for _ in range(MAX_LEASES):
                link.ask({"op": "get", "keys": [key(1).hex()]}, deadline)
            with pytest.raises(TierError, match="64 transfers that are not over, as many as may be"):
                link.ask({"op": "get", "keys": [key(1).hex()]}, deadline)
        with open_tier(p) as other:
            assert found(other, 1) == [True]


@pytest.mark.parametrize("body", [{}, {"op": "x"}, {"op": "get", "keys": [1]}, {"op": "commit"}, {"op": "end", "lease": True},
                                  {"op": "open", "kind": 7}, {"op": "commit", "lease": 1, "sums": []}], ids=str)  # fmt: skip
def test_what_is_not_understood_is_said_and_the_next_question_answered(body):
    with peer() as p, open_tier(p) as tier:
        with tier._talk() as (link, deadline), pytest.raises(TierError, match=r"not understood|not this peer's|no kind of block"):
            link.ask(body, deadline)
        assert put(tier, 1) == [True]
        assert found(tier, 1) == [True]


def test_another_secret_opens_nothing():
    with peer() as p:
        with pytest.raises(TierError, match=r"NixlServer at .* it has another secret"):
            NixlTier("127.0.0.1", p.port, KIND, secret=OTHER, timeout_s=TIMEOUT_S)
        with open_tier(p) as tier:
            assert put(tier, 1) == [True]


def test_another_kind_is_refused_by_name():
    other = BlockKind({**KIND.manifest, "model": "large"}, KIND.buffer_bytes)
    with peer() as p, pytest.raises(Incompatible, match="differ in model: 'small' here, 'large' there"):
        NixlTier("127.0.0.1", p.port, other, secret=SECRET, timeout_s=TIMEOUT_S)


def test_nobody_there():
    begin = time.monotonic()
    with pytest.raises(TierError, match=r"no NixlServer answered at 127\.0\.0\.1:9 within 1 s"):
        NixlTier("127.0.0.1", 9, KIND, secret=SECRET, timeout_s=1.0)
    assert time.monotonic() - begin < 2


def test_a_server_for_any_kind(tmp_path, monkeypatch):
    """`kvx store`: kinds and groups of layers have memory of their own, until none is left."""
    monkeypatch.setenv("HOME", str(tmp_path))  # where the secret is
    with store_server("nixl", tmp_path) as store:
        option, other = TierOption.parse(store.tier), BlockKind({**KIND.manifest, "model": "large"}, KIND.buffer_bytes)
        with option.open(KIND) as one, option.open(KIND, group="windows") as two, option.open(other) as three:
            put(one, 1)
            assert [found(tier, 1) for tier in (one, two, three)] == [[True], [False], [False]]
        with pytest.raises(TierError, match=r"a block takes 1000 bytes; 10 were asked for, and 4\d* of 64000000 are left"):
            replace(option, capacity_bytes=10).open(BlockKind({"model": "third"}, (1000,)))
