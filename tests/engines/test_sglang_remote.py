"""KvxStorage over stores in other processes' memory: NIXL's and Mooncake's. What one instance wrote another finds, and SGLang goes
on when the store is gone."""

from __future__ import annotations

import signal
import sys
import time

import pytest
import torch

from kvx.errors import TierError, Unsupported
from kvx.wires.secret import HOME, read_or_make_secret
from tests.engines import sglang_pools as sgl
from tests.engines.sglang_pools import PoolHitPolicy, PoolName, PoolTransfer
from tests.engines.wires import free_port, store_server

WIRES = ("nixl", "mooncake")
TIMEOUT_S = 6.0  # more than Mooncake takes to say that its master is gone


@pytest.fixture(autouse=True)
def _at_home(tmp_path, monkeypatch):
    """Where the secret is; and a store that was lost is asked again soon."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for wire in WIRES:
        monkeypatch.setattr(f"kvx.tiers.{wire}_tier.AGAIN_S", 0.3)


@pytest.fixture(params=WIRES)
def store(request, tmp_path):
    with store_server(request.param, tmp_path) as made:
        yield made


def filled(layout: str):
    pool = sgl.mha_pool(layout)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape).abs() + 0.5)
    return pool


def test_one_instance_finds_what_another_wrote(store):
    pool, keys = filled("page_first"), sgl.keys(range(32), 4)
    where = pool.alloc(32)
    told = {"tiers": [store.tier], "layout": "canonical"}
    writer = sgl.backend("", pool, **told)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys, where) == [True] * 8
    other = sgl.mha_pool("layer_first")  # whatever its pool, since pages are canonical
    other.alloc(8)  # other places than the writer's
    reader, here = sgl.backend("", other, **told), other.alloc(32)
    assert reader.batch_exists([*keys, "0" * 64]) == 8
    assert reader.batch_get_v1(keys, here) == [True] * 8
    assert torch.equal(other.kv_buffer[:, :, here], pool.kv_buffer[:, where].transpose(1, 2))
    for each in (writer, reader):
        each.close()


@pytest.mark.parametrize("store", ["mooncake"], indirect=True)
def test_states(store):
    """A mamba pool beside K and V: each is a kind of its own, and a state is found where it stands."""
    kv, states, keys = filled("page_first"), sgl.mamba_pool(), sgl.keys(range(16), 4)
    states.temporal_buffer.normal_()
    slots = states.alloc(1)

    def registered(pool, mamba):
        made = sgl.StorageBackendFactory.create_backend("dynamic", sgl.config("", tiers=[store.tier]), pool)
        made.register_mem_pool_host(pool)
        made.register_mem_host_pool_v2(mamba, PoolName.MAMBA)
        made.on_host_pools_registered()
        return made

    writer, policy = registered(kv, states), PoolHitPolicy.TRAILING_PAGES
    told = [
        PoolTransfer(name=PoolName.KV, host_indices=kv.alloc(16), keys=keys),
        PoolTransfer(name=PoolName.MAMBA, host_indices=slots, keys=[keys[2]], hit_policy=policy),
    ]
    assert writer.batch_set_v2(told) == {PoolName.KV: [True] * 4, PoolName.MAMBA: [True]}
    others = sgl.mamba_pool()
    reader, here = registered(sgl.mha_pool("page_first"), others), others.alloc(2)[1:]
    wanted = [PoolTransfer(name=PoolName.MAMBA, host_indices=here, keys=[keys[3]], hit_policy=policy)]
    assert reader.batch_exists_v2(keys, wanted).kv_hit_pages == 3
    wanted[0].keys = [keys[2]]
    assert reader.batch_get_v2(wanted) == {PoolName.MAMBA: [True]}
    assert torch.equal(others.get_data_page(int(here[0])), states.get_data_page(int(slots[0])))
    for each in (writer, reader):
        each.close()


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_sglang_goes_on_when_the_store_is_gone(store, blow, caplog):
    """Misses in bounded time, and the store is used again when it is there again."""
    pool, keys = filled("page_first"), sgl.keys(range(32), 4)
    where, here = pool.alloc(16), pool.alloc(16)
    one = sgl.backend("", pool, tiers=[store.tier], timeout_s=TIMEOUT_S)
    assert all(one.batch_set_v1(keys[:4], where))
    before = pool.kv_buffer.clone()
    store.signal(blow)
    for _ in range(2):
        for call in (
            lambda: one.batch_exists(keys[:4]) == 0,
            lambda: one.batch_get_v1(keys[:4], here) == [False] * 4,
            lambda: one.batch_set_v1(keys[4:], where) == [False] * 4,
        ):
            begin = time.monotonic()
            assert call()
            assert time.monotonic() - begin < TIMEOUT_S + 2
    assert "counts as a miss" in caplog.text
    assert torch.equal(pool.kv_buffer, before)
    if blow == signal.SIGKILL:
        store.start()
    else:
        store.signal(signal.SIGCONT)
    until = time.monotonic() + 30
    while not all(one.batch_set_v1(keys[4:], where)):
        assert time.monotonic() < until
        time.sleep(0.2)
    assert one.batch_get_v1(keys[4:], here) == [True] * 4
    one.close()


@pytest.mark.parametrize("wire", WIRES)
def test_a_store_that_is_not_there_is_said_when_sglang_starts(wire, monkeypatch):
    pytest.importorskip({"nixl": "nixl._api", "mooncake": "mooncake.store"}[wire], exc_type=ImportError)
    read_or_make_secret(HOME)
    begin, pool, there = time.monotonic(), sgl.mha_pool("page_first"), f"127.0.0.1:{free_port()}"
    who = {"nixl": "no NixlServer answered", "mooncake": "no mooncake_master"}[wire]
    with pytest.raises(TierError, match=f"tier {wire}:{there}: {who} .*{there}"):
        sgl.backend("", pool, tiers=[f"{wire}:{there}:8MB"])
    assert time.monotonic() - begin < 10  # it waits 5 s at most; the machine may be busy
    monkeypatch.setitem(sys.modules, f"{wire}._api" if wire == "nixl" else "mooncake.store", None)
    with pytest.raises(Unsupported, match=f"tier {wire}:.*needs the package {wire}: pip install"):
        sgl.backend("", pool, tiers=[f"{wire}:127.0.0.1:{free_port()}:8MB"])
