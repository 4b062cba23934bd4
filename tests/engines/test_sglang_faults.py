"""KvxStorage while disks are full or slow: SGLang reads nothing wrong, waits a bounded time, goes on.

test_killed_writers.py kills it while it writes.
"""

from __future__ import annotations

import errno
import os
import time

import pytest
import torch

import kvx.tiers.block_io as block_io
import kvx.tiers.disk as disk
from tests.engines import sglang_pools as sgl


def test_a_full_disk(tmp_path, monkeypatch, caplog):
    """What does not fit is not kept and said; what was kept before is found; with room again it goes on."""
    pool = sgl.mha_pool("page_first")
    pool.kv_buffer.normal_()
    store, where = sgl.backend(tmp_path, pool), pool.alloc(32)
    keys = sgl.keys(range(32), 4)
    assert store.batch_set_v1(keys[:2], where[:8]) == [True, True]
    write = block_io.write_block

    def full(file, key, block):
        file.write(b"x" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(block_io, "write_block", full)
    assert store.batch_set_v1(keys, where) == [True, True] + [False] * 6
    assert "No space left on device" in caplog.text
    assert store.batch_exists(keys) == 2
    assert store.batch_get_v1(keys[:3], pool.alloc(12)) == [True, True, False]
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".partial")]
    monkeypatch.setattr(block_io, "write_block", write)
    assert store.batch_set_v1(keys, where) == [True] * 8
    assert store.batch_exists(keys) == 8


@pytest.mark.parametrize("call", ["_store", "_fetch", "_holds"])
def test_a_slow_disk(tmp_path, monkeypatch, caplog, call):
    """A call takes as long as it may and is a miss. Pages that the engine has taken back by then are not touched."""
    pool = sgl.mha_pool("page_first")
    pool.kv_buffer.normal_()
    keys, where = sgl.keys(range(32), 4), pool.alloc(32)
    store = sgl.backend(tmp_path, pool, timeout_s=0.3)
    assert all(store.batch_set_v1(keys[:4], where[:16]))
    fast, is_slow = getattr(disk.DiskTier, call), True

    def slow(self, *args):
        if is_slow:
            time.sleep(4)
        return fast(self, *args)

    monkeypatch.setattr(disk.DiskTier, call, slow)
    here = pool.alloc(16)
    before = pool.kv_buffer.clone()
    began = time.monotonic()
    if call == "_fetch":
        assert store.batch_get_v1(keys[:4], here) == [False] * 4
    elif call == "_holds":
        assert store.batch_exists(keys) == 0
    else:
        assert store.batch_set_v1(keys[4:], where[16:]) == [False] * 4
    assert time.monotonic() - began < 3.0
    assert "did not answer in 0.3 s" in caplog.text
    began = time.monotonic()
    if call != "_holds":  # others do not wait behind it
        for _ in range(3):
            assert store.batch_get_v1(keys[:4], here) == ([False] * 4 if call == "_fetch" else [True] * 4)
            pool.kv_buffer.copy_(before)
            assert store.batch_set_v1(keys[4:], where[16:]) == ([False] * 4 if call == "_store" else [True] * 4)
        assert time.monotonic() - began < 3.0
    pool.kv_buffer.copy_(before)
    is_slow, until = False, time.monotonic() + 60
    time.sleep(4)
    while not all(store.batch_set_v1(keys[4:], where[16:])) and time.monotonic() < until:
        time.sleep(0.1)
    while store.batch_exists(keys) < 8 and time.monotonic() < until:
        time.sleep(0.1)
    assert torch.equal(pool.kv_buffer, before)
    while (found := store.batch_get_v1(keys[:4], here)) != [True] * 4 and time.monotonic() < until:
        time.sleep(0.1)
    assert found == [True] * 4


def test_a_page_that_was_damaged(tmp_path):
    pool = sgl.mha_pool("page_first")
    pool.kv_buffer.normal_()
    keys, where = sgl.keys(range(16), 4), pool.alloc(16)
    store = sgl.backend(tmp_path, pool)
    assert all(store.batch_set_v1(keys, where))
    (path,) = tmp_path.rglob(f"{keys[1]}.kvx")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.batch_get_v1(keys, pool.alloc(16)) == [True, False, True, True]
    assert store.batch_exists(keys) == 1
    assert all(store.batch_set_v1(keys, where))  # it is written anew
    assert store.batch_exists(keys) == 4


def test_less_room_than_pages(tmp_path):
    """The oldest leave; those that are found are whole."""
    pool = sgl.mha_pool("page_first")
    pool.kv_buffer.normal_()
    keys, where = sgl.keys(range(128), 4), pool.alloc(128)
    store = sgl.backend(tmp_path, pool, tiers=[f"disk:{tmp_path}:100KB"])
    for n in range(0, 32, 4):
        assert all(store.batch_set_v1(keys[n : n + 4], where[4 * n : 4 * n + 16]))
    found = [store.exists(key) for key in keys]
    assert found[-4:] == [True] * 4
    assert not any(found[:8])
    assert store.batch_get_v1(keys[-4:], pool.alloc(16)) == [True] * 4
