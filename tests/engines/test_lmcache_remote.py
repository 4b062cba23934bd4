"""KvxStoragePlugin over stores in other processes' memory: NIXL's and Mooncake's."""

from __future__ import annotations

import signal
import time

import pytest
import torch

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")

from kvx.wires.secret import HOME, read_or_make_secret
from tests.engines import lmcache_parts as lmc
from tests.engines.lmcache_parts import CHUNK, Lmcache, some_tokens
from tests.engines.wires import free_port, store_server

WIRES = ("nixl", "mooncake")
TIMEOUT_S = 6.0  # more than Mooncake takes to say that its master is gone


@pytest.fixture(autouse=True)
def _at_home(tmp_path, monkeypatch):
    """Where the secret is; and a store that was lost is asked again soon."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for wire in WIRES:
        monkeypatch.setattr(f"kvx.tiers.{wire}_tier.AGAIN_S", 0.3)


@pytest.fixture(scope="module")
def loop():
    with lmc.running_loop() as made:
        yield made


@pytest.mark.parametrize("wire", WIRES)
def test_lmcache_finds_its_chunks_and_goes_on_when_the_store_is_gone(wire, loop, tmp_path, caplog):
    with store_server(wire, tmp_path) as store:
        told = {"kvx.tiers": [store.tier], "kvx.timeout_s": TIMEOUT_S}
        a = Lmcache("", loop, extra=told)
        keys = a.keys(some_tokens(6 * CHUNK))
        objects = a.objects(len(keys))
        a.put(keys[:4], objects[:4])
        b = Lmcache("", loop, extra=told)  # another connection: nothing is known but the store
        assert b.kvx.batched_contains(keys) == 4
        found = b.kvx.batched_get_blocking(keys[:4])
        assert all(torch.equal(x.tensor, y.tensor) for x, y in zip(found, objects[:4], strict=True))
        store.signal(signal.SIGKILL)
        begin = time.monotonic()
        assert b.kvx.batched_contains(keys) == 0
        assert b.kvx.batched_get_blocking(keys[:2]) == [None, None]
        b.put(keys[4:], objects[4:])  # which ends, and is not kept
        assert time.monotonic() - begin < 3 * (TIMEOUT_S + 1)
        assert "counts as a miss" in caplog.text
        assert [obj.get_ref_count() for obj in objects] == [1] * len(objects)  # LMCache's own, which we gave back
        store.start()
        until = time.monotonic() + 30
        while b.kvx.batched_contains(keys[4:]) < 2:
            assert time.monotonic() < until
            time.sleep(0.3)
            b.put(keys[4:], objects[4:])
        assert torch.equal(b.kvx.get_blocking(keys[5]).tensor, objects[5].tensor)
        for each in (a, b):
            each.close()


@pytest.mark.parametrize("wire", WIRES)
def test_a_store_that_is_not_there_is_said_when_lmcache_starts(wire, loop, caplog):
    pytest.importorskip({"nixl": "nixl._api", "mooncake": "mooncake.store"}[wire], exc_type=ImportError)
    read_or_make_secret(HOME)
    there, begin = f"127.0.0.1:{free_port()}", time.monotonic()
    one = Lmcache("", loop, extra={"kvx.tiers": [f"{wire}:{there}:8MB"]})  # which logs an error, and goes on without the plugin
    assert one.kvx is None
    assert f"tier {wire}:{there}: no " in caplog.text
    assert time.monotonic() - begin < 10  # it waits 5 s at most; the machine may be busy
    one.close()
