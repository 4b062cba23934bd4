"""Mooncake: its store as a tier, its transfer engine after a plan. The master runs on loopback."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import kvx
from kvx.tiers import BlockKind, TierError
from kvx.tiers.mooncake_tier import MooncakeTier
from kvx.wires.mooncake.engine import MooncakeEngine
from kvx.wires.mooncake.offer import MooncakePuller
from kvx.wires.mooncake.store import MooncakeStore
from kvx.wires.nixl.agent import Remote
from kvx.wires.wire import Deadline
from tests.engines.wires import SECRET, mooncake_master, own_address
from tests.tiers.blocks import KIND, block, found, key, put

pytest.importorskip("mooncake.engine", exc_type=ImportError)  # the package may be there without the system's libibverbs1


@pytest.fixture(scope="module")
def master():
    with mooncake_master() as address:
        yield address


@pytest.fixture
def store(master):
    with MooncakeStore(master, segment_bytes=32 << 20, buffer_bytes=8 << 20) as store:
        yield store


def test_the_protocol(store):
    events = []
    with MooncakeTier(store, KIND, on_event=events.append) as tier:
        assert put(tier, 1, 2) == [True, True]
        assert put(tier, 2, 3) == [False, True]
        assert found(tier, 1, 2, 3, 4) == [True, True, True, False]
        assert tier.has([key(3), key(4)]).result() == [True, False]
        assert tier.drop([key(1), key(4)]).result() == [True, False]
        assert found(tier, 1) == [False]
        into = KIND.empty()
        assert tier.get([key(2)], [into]).result() == [into]
        assert all(torch.equal(a, b) for a, b in zip(into.buffers, block(key(2)).buffers, strict=True))
        assert (tier.num_blocks, tier.stats.stored, tier.stats.refused, tier.stats.errors) == (2, 3, 0, 0)
        assert [e.kind for e in events] == ["stored", "stored", "stored", "dropped"]
        tier.drop([key(2), key(3)]).result()
    assert store.num_registered == 0


@pytest.mark.parametrize("byte", [0, 316, 317, 333])  # either end of the block, and of its checksum
def test_a_wrong_byte_is_refused_and_forgotten(store, byte):
    with MooncakeTier(store, KIND) as tier:
        put(tier, 5)
        name = tier._name(key(5))
        content = bytearray(store.get(name))
        content[byte] ^= 1
        store.remove(name)
        store.put(name, bytes(content))
        assert found(tier, 5) == [False]
        assert (tier.stats.refused, tier.has([key(5)]).result()) == (1, [False])
        put(tier, 5)
        assert found(tier, 5) == [True]
        tier.drop([key(5)]).result()


def test_another_kind_is_not_found(store):
    other = BlockKind({**KIND.manifest, "model": "large"}, KIND.buffer_bytes)
    with MooncakeTier(store, KIND) as tier, MooncakeTier(store, other) as large:
        put(tier, 6)
        assert large.get([key(6)]).result() == [None]
        tier.drop([key(6)]).result()


def test_a_full_store_says_so_and_goes_on(store):
    kind = BlockKind({"model": "large blocks"}, (12 << 20,))
    with MooncakeTier(store, kind) as tier:
        one = kind.empty()
        one.buffers[0].zero_()
        with pytest.raises(TierError, match="the store is full"):
            tier.put([key(n) for n in range(9)], [one] * 9).result()
        assert tier.get([key(0)]).result()[0] is not None
        tier.drop([key(n) for n in range(9)]).result()


def test_a_store_is_joined_from_the_address_that_reaches_its_master(master):
    """On two machines "127.0.0.1" would be each other's."""
    address = own_address()
    if address == "127.0.0.1":
        pytest.skip("this machine has no address but loopback")
    far = f"{address}:{master.rpartition(':')[2]}"
    with MooncakeStore(far, segment_bytes=32 << 20, buffer_bytes=8 << 20) as owner, MooncakeStore(far) as other:
        assert (owner.host, other.host) == (address, address)
        owner.put("kvx/hello", b"across")
        assert other.get("kvx/hello") == b"across"
        owner.remove("kvx/hello")
    with MooncakeStore(master) as near:
        assert near.host == "127.0.0.1"


def test_an_owner_that_dies_is_a_miss(master):
    code = f"""
import sys, time
from kvx.wires.mooncake.offer import MooncakePuller
from kvx.wires.mooncake.store import MooncakeStore
from kvx.tiers.mooncake_tier import MooncakeTier
from tests.tiers.blocks import KIND, put
store = MooncakeStore({master!r}, segment_bytes=32 << 20)
put(MooncakeTier(store, KIND), 7)
print("ready", flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout.readline() == "ready\n"
        with MooncakeStore(master) as store, MooncakeTier(store, KIND) as tier:
            assert found(tier, 7) == [True]
            owner.kill()
            owner.wait()
            begin = time.monotonic()
            assert found(tier, 7) == [False]
            assert time.monotonic() - begin < 10
            assert tier.stats.errors + tier.stats.misses >= 1
    finally:
        owner.kill()
        owner.wait()


def test_a_master_without_a_prefill():
    with mooncake_master() as master:  # of its own: nobody ever gave it memory
        host, _, port = master.rpartition(":")
        want = f"no `kvx prefill --listen` answered at the store of {master} within 1 s. Is it running"
        begin = time.monotonic()
        with MooncakePuller(host, int(port), SECRET, Deadline(5)) as puller, pytest.raises(TierError, match=want):
            puller.ask({"model": "x"}, Deadline(1))
        assert time.monotonic() - begin < 5


def test_no_master():
    begin = time.monotonic()
    with pytest.raises(TierError, match="no mooncake_master answers at 127"):
        MooncakeStore("127.0.0.1:9")
    assert time.monotonic() - begin < 6


@pytest.mark.parametrize("op", ["read", "write"])
def test_the_transfer_engine_after_a_plan_is_convert(op):
    layouts = "layer kv | block token head dim", "block | head layer kv token dim"
    base = kvx.CacheSpec(num_blocks=6, block_size=4, num_kv_heads=4, head_dim=8, num_layers=3, format="f32", layout=layouts[0])
    specs = base, replace(base, layout=layouts[1])
    src, dst = map(kvx.allocate_buffers, specs)
    for t in src:
        t.random_(0, 255)
    want, plan = [t.clone() for t in dst], kvx.plan(*specs)
    kvx.convert(src, want, plan=plan, src_blocks=[4, 0], dst_blocks=[5, 1])
    near, far = (dst, src) if op == "read" else (src, dst)
    with MooncakeEngine() as here, MooncakeEngine() as there:
        here.register(near)
        there.register(far)
        remote = Remote(there.name, tuple(t.data_ptr() for t in far))
        assert getattr(here, op)(near, remote, plan.runs([4, 0], [5, 1])) == 2 * plan.unit_bytes
        with pytest.raises(TierError, match="no strided descriptors"):
            here.read(near, remote, plan.runs([4], [5], strided=True))
    assert all(torch.equal(a, b) for a, b in zip(dst, want, strict=True))
