"""Ctrl-C at any line of the mover and of what calls it: no room, area or block is lost, and the next call works."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvx.cache import backing as backing_module
from kvx.tiers import HostTier, Mover, fetch, mover, room, transfer
from tests.cache.test_paged import assert_content, make
from tests.interrupts import interrupted_at_every_line
from tests.tiers.movers import KEPT, SPEC, content, filled, is_same, kind_of, names
from tests.tiers.test_cache_tiers import close, evicted, on_host

MOVING = (mover, transfer, room, fetch)


@pytest.fixture
def moved():
    """A mover through areas of its own, and its cache."""
    kind, cache = kind_of(), filled()
    with (
        HostTier(kind, 64 * kind.num_bytes) as tier,
        Mover(cache, SPEC, [tier], kept=KEPT, is_staged=True, max_in_flight_bytes=8 * kind.num_bytes) as m,
    ):
        yield cache, m


def assert_idle(m: Mover) -> None:
    m.settle()
    assert not m._coming
    assert (m._room._left, m._room._taken) == (8, {})
    assert m._transfer._free.qsize() == mover.NUM_AREAS
    assert not m._call_lock.locked()


def test_out_to_the_tiers(moved):
    cache, m = moved
    before = [content(cache, SPEC, b) for b in range(3)]
    count = 0
    for n in interrupted_at_every_line(lambda: m.offload(names(0, 1, 2), range(3)).result(10), *MOVING):
        assert_idle(m)
        m.tiers[0].drop(names(0, 1, 2)).result(10)
        count = n
    assert count > 40
    assert m.onboard(names(0, 1, 2), [20, 21, 22]) == 3
    assert all(is_same(want, content(cache, SPEC, 20 + b)) for b, want in enumerate(before))


def test_back_from_the_tiers(moved):
    cache, m = moved
    before = [content(cache, SPEC, b) for b in range(3)]
    m.offload(names(0, 1, 2), range(3)).result(10)
    count = 0
    for n in interrupted_at_every_line(lambda: m.onboard(names(0, 1, 2), [10, 11, 12]), *MOVING):
        assert_idle(m)
        count = n
    assert count > 40
    assert all(is_same(want, content(cache, SPEC, 10 + b)) for b, want in enumerate(before))


@pytest.mark.parametrize("window", [0, 6])
def test_a_prefix_that_comes_back(window):
    cache, tokens = make(12, window=window), list(range(29))
    tiers = on_host(cache)
    evicted(cache, tokens)
    hashes = cache.prefix.hashes(np.array(tokens, np.int32))
    seqs, count = [], 0
    for n in interrupted_at_every_line(lambda: seqs.append(cache.admit(tokens)), backing_module, mover, fetch):
        assert not cache.sequences
        assert [a.num_used for a in cache.allocators] == [0] * len(cache.groups)
        cache.check()
        if cache.prefix.ids(0, hashes).max() >= 0:
            evicted(cache, tokens)
        count = n
    assert count > 40
    assert seqs[0].length == 28
    assert_content(cache, seqs[0], tokens)
    cache.check()
    close(tiers)


def test_waiting_twice_gives_an_area_back_once(moved):
    _, m = moved
    held = m.memory.take(1)
    wait = m._transfer.send([0], [0], held)
    wait()
    wait()
    assert m._transfer._free.qsize() == mover.NUM_AREAS
    assert torch.equal(held[0].buffers[0].view(torch.float32)[:16], content(filled(), SPEC, 0)[0][:16])
