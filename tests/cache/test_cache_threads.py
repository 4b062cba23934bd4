"""A cache from eight threads at once: nobody loses a block, and counts agree."""

from __future__ import annotations

import random
import sys
import threading

import numpy as np
import pytest

import kvx
from tests.cache.test_paged import make


@pytest.fixture(autouse=True)
def _often():
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def on_threads(work, count: int = 8) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(random.Random(number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("is_prefix", [True, False], ids=["prefix", "plain"])
def test_a_paged_cache(is_prefix):
    cache = make(48, window=6, max_seqs=16, prefix=is_prefix, max_events=10)
    base = list(range(40))

    def work(rng):
        for _ in range(150):
            try:
                seq = cache.admit(base[: rng.randint(1, 40)])
            except kvx.OutOfBlocks:
                continue
            try:
                cache.extend(seq, seq.num_tokens - seq.length)
                cache.commit(seq)
                for _ in range(6):
                    cache.extend(seq, [rng.randrange(50)])
                    cache.commit(seq)
                other = cache.fork(seq)
                try:
                    cache.extend(other, [1])
                finally:
                    cache.release(other)
                cache.truncate(seq, seq.length - 2)
                if is_prefix and rng.random() < 0.2:
                    cache.prefix.pin(seq.hashes[:1])
                    cache.prefix.clear()
                cache.stats()
                cache.room(seq)
                if rng.random() < 0.1:
                    cache.check()
            except kvx.OutOfBlocks:
                pass
            finally:
                cache.release(seq)

    on_threads(work)
    cache.check()
    assert cache.num_seqs == 0
    assert all(a.num_used == 0 for a in cache.allocators)


def test_an_allocator():
    a = kvx.BlockAllocator(64)

    def work(rng):
        for _ in range(300):
            try:
                ids = a.allocate(rng.randint(1, 10))
            except kvx.OutOfBlocks:
                continue
            a.retain(ids)
            a.keep(ids[:1])
            a.release(np.concatenate((ids, ids)))
            a.forget(ids[:1])

    on_threads(work)
    a.check()
    assert a.num_used == 0
    assert a.num_free + a.num_idle == 64


def test_a_prefix_cache_on_allocators_of_its_own():
    allocators = [kvx.BlockAllocator(24), kvx.BlockAllocator(24)]
    p = kvx.PrefixCache(allocators, 4)
    hashes = p.hashes(np.arange(64, dtype=np.int32))

    def work(rng):
        for _ in range(200):
            n = rng.randint(1, 8)
            found, held = p.match(hashes[:n], (0, 0))
            for group, a in enumerate(allocators):
                if found:
                    a.release(held[group])
                elif a.num_available > 16:
                    ids = a.allocate(1)
                    p.put(group, hashes[n : n + 1], ids)
                    a.release(ids)
            p.pin(hashes[:1])

    on_threads(work)
    p.check()
    p.clear()
    assert all(a.num_free == 24 for a in allocators)
