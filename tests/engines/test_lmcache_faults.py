"""KvxStoragePlugin while processes are killed and disks are full, slow or damaged: LMCache reads nothing wrong, and goes on."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

pytest.importorskip("lmcache", reason="the package lmcache is not installed here; `make engines` makes .venv-lmcache, which has it")
import kvx.tiers.block_io as block_io
import kvx.tiers.disk as disk
from tests.engines import lmcache_parts as lmc
from tests.engines.lmcache_parts import CHUNK, Lmcache, some_tokens

BATCH = 8


@pytest.fixture(scope="module")
def loop():
    with lmc.running_loop() as made:
        yield made


@pytest.fixture
def started(loop, tmp_path):
    made = []

    def start(**how) -> Lmcache:
        made.append(Lmcache(tmp_path, loop, **how))
        return made[-1]

    yield start
    for one in made:
        one.close()


def fill(obj, n: int) -> None:
    """What chunk `n` holds, and nothing else does."""
    flat = obj.tensor.view(-1)
    flat.copy_(torch.arange(flat.numel()) % 31 + n % 97)


def write_on(folder: str, first: int, tell) -> None:
    """Chunks from `first` on, until it is killed. Each batch that was kept is told."""
    torch.set_num_threads(1)
    with lmc.running_loop() as loop:
        one, n = Lmcache(folder, loop), first
        objects = one.objects(BATCH)
        while True:
            keys = [lmc.a_key(n + i) for i in range(BATCH)]
            for i, obj in enumerate(objects):
                fill(obj, n + i)
            one.put(keys, objects)
            if one.kvx.batched_contains(keys) == BATCH:
                tell.send(n)
            n += BATCH


def test_killed_while_it_writes(started, tmp_path):
    """8 times: nothing that was told is lost, and every chunk that is found has its own content."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engines.lmcache_parts"])
    rng, told, firsts = random.Random(7), [], []
    for trial in range(8):
        ours, theirs = context.Pipe(duplex=False)
        firsts.append(trial * 100_000)
        child = context.Process(target=write_on, args=(str(tmp_path), firsts[-1], theirs))
        child.start()
        theirs.close()
        assert ours.poll(90), "the writer wrote nothing"
        time.sleep(rng.random() * 0.15)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        while ours.poll():
            try:
                told.append(ours.recv())
            except EOFError:
                break
    assert len(told) >= 8
    one, seen = started(), 0
    (want,) = one.objects(1)
    begun = [max(n for n in told if n < first + 100_000) + BATCH for first in firsts]  # which it was killed in
    for n in (*told, *begun):
        found = one.kvx.batched_get_blocking([lmc.a_key(n + i) for i in range(BATCH)])
        assert n in begun or None not in found
        for i, obj in enumerate(found):
            if obj is not None:
                fill(want, n + i)
                assert torch.equal(obj.tensor, want.tensor), (n, i)
                obj.ref_count_down()
                seen += 1
    assert seen >= len(told) * BATCH
    assert not one.kvx.contains(lmc.a_key(999_999_999))


def test_a_full_disk(started, tmp_path, monkeypatch, caplog):
    """What does not fit is not kept and said; what was kept before is found; with room again it goes on."""
    one = started()
    keys, objects = one.keys(some_tokens(6 * CHUNK)), one.objects(6)
    one.put(keys[:2], objects[:2])
    write = block_io.write_block

    def full(file, key, block):
        file.write(b"x" * 100)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(block_io, "write_block", full)
    done = []
    one.kvx.batched_submit_put_task(keys, objects, on_complete_callback=done.append)[0].result(20)
    assert done == keys[:2]
    assert "No space left on device" in caplog.text
    assert one.kvx.batched_contains(keys) == 2
    assert [obj is None for obj in one.kvx.batched_get_blocking(keys[:3])] == [False, False, True]
    assert not [p for p in tmp_path.rglob("*") if p.name.endswith(".partial")]
    assert {obj.get_ref_count() for obj in objects} == {1}
    monkeypatch.setattr(block_io, "write_block", write)
    one.put(keys, objects)
    assert one.kvx.batched_contains(keys) == 6


@pytest.mark.parametrize("call", ["_store", "_fetch", "_holds"])
def test_a_hanging_disk(started, monkeypatch, caplog, call):
    """A call takes as long as it may and is a miss. LMCache's memory is given back when the late call has ended."""
    one = started(extra={"kvx.timeout_s": 0.3})
    keys, objects = one.keys(some_tokens(4 * CHUNK)), one.objects(4)
    one.put(keys[:2], objects[:2])
    assert one.kvx.batched_contains(keys) == 2
    fast, is_slow = getattr(disk.DiskTier, call), True

    def slow(self, *args):
        if is_slow:
            time.sleep(3)
        return fast(self, *args)

    monkeypatch.setattr(disk.DiskTier, call, slow)
    began = time.monotonic()
    if call == "_fetch":
        assert one.kvx.batched_get_blocking(keys[:2]) == [None, None]
        assert one.run(one.kvx.batched_get_non_blocking("lookup", keys[:2])) == []
    elif call == "_holds":
        assert one.kvx.batched_contains(keys) == 0
        assert not one.kvx.contains(keys[0])
    else:
        one.put(keys[2:], objects[2:])
        assert one.kvx.batched_contains(keys) == 2
        assert None not in one.kvx.batched_get_blocking(keys[:2])  # reads do not wait behind it
    assert time.monotonic() - began < 2.5
    assert "did not answer in 0.3 s" in caplog.text
    assert {obj.get_ref_count() for obj in objects[: 2 if call == "_store" else 4]} == {1}
    before, is_slow = [obj.tensor.clone() for obj in objects], False
    time.sleep(3)
    assert all(torch.equal(obj.tensor, was) for obj, was in zip(objects, before, strict=True))
    assert {obj.get_ref_count() for obj in objects} == {1}  # what the late call still had is LMCache's again
    assert not any(map(one.kvx.exists_in_put_tasks, keys))
    one.put(keys, objects)
    assert one.kvx.batched_contains(keys) == 4
    assert None not in one.kvx.batched_get_blocking(keys)


def test_a_damaged_chunk_is_a_miss_and_written_anew(started, tmp_path):
    one = started()
    keys, objects = one.keys(some_tokens(3 * CHUNK)), one.objects(3)
    one.put(keys, objects)
    (path,) = tmp_path.rglob(f"{keys[1].chunk_hash % 2**64:016x}.kvx")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [obj is None for obj in one.kvx.batched_get_blocking(keys)] == [False, True, False]
    assert one.kvx.batched_contains(keys) == 1
    one.put(keys, objects)
    assert torch.equal(one.kvx.get_blocking(keys[1]).tensor, objects[1].tensor)


def test_less_room_than_chunks(started, tmp_path):
    """The oldest leave; those that are found are whole."""
    one = started(extra={"kvx.tiers": [f"disk:{tmp_path}:100KB"]})
    keys, objects = one.keys(some_tokens(20 * CHUNK)), one.objects(20)
    for n in range(0, 20, 4):
        one.put(keys[n : n + 4], objects[n : n + 4])
    found = [one.kvx.contains(key) for key in keys]
    assert found[-4:] == [True] * 4
    assert not any(found[:4])


def test_lmcache_without_memory_is_a_miss(started, caplog):
    one = started(extra={"kvx.timeout_s": 0.2}, max_local_cpu_size=0.002)
    keys, objects = one.keys(some_tokens(CHUNK)), one.objects(1)
    one.put(keys, objects)
    held = []
    while (obj := one.cpu.allocate(torch.Size(one.shape()), torch.bfloat16, busy_loop=False)) is not None:
        held.append(obj)
    assert one.kvx.get_blocking(keys[0]) is None
    assert "LMCache has memory for 0 of 1 chunks" in caplog.text
    for obj in held:
        obj.ref_count_down()
    assert one.kvx.get_blocking(keys[0]) is not None
