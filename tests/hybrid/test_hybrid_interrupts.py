"""Ctrl-C at every point of a hybrid cache's calls, and calls from several threads: check() passes and nothing is lost."""

from __future__ import annotations

import random
import threading

import pytest
import torch

import kvx
from kvx.cache import blocks, guard, prefix
from kvx.cache.hybrid import HybridCache, HybridPrefix, HybridSchema, LayerSchema, Projected, put_state, take_state
from kvx.cache.hybrid import cache as cache_module
from kvx.cache.hybrid import prefix as prefix_module
from kvx.cache.hybrid import state as state_module
from tests.interrupts import signalled_at_every_point

HYBRID = (cache_module, prefix_module, state_module, blocks, guard, prefix)
F32 = {"window_rows": "f32", "entry_rows": "f32"}
SCHEMA = HybridSchema((LayerSchema(4, overlap=True, head_dim=8, rope_dim=0, window=4, **F32),), block_tokens=8, max_drafts=2)
TOKENS = list(range(20))


def fed(cache: HybridCache, work) -> None:
    """A step of these requests, with projections that hang on positions."""
    step = cache.prepare_forward(work)
    at = torch.cat([torch.arange(r.length - n, r.length) for r, n in work]).float()
    x = at[:, None].expand(-1, 16).contiguous()
    cache.acquire(0, step).flush(Projected(x, x / 7))
    cache.acquire(0, step).write_swa(x[:, :8].contiguous())


def made() -> tuple[HybridCache, HybridPrefix, list]:
    cache = HybridCache(SCHEMA, num_blocks=7, max_seqs=4, max_seq_len=48)
    names = HybridPrefix(cache)
    first = names.admit(TOKENS).request
    for _ in range(2):
        fed(cache, [(first, 8)])
        names.commit(first, TOKENS)
    fed(cache, [(first, 3)])
    second = cache.admit([])
    fed(cache, [(second, 9)])
    fed(cache, [(second, 2)])
    return cache, names, [first, second, take_state(cache, second)]


def rows(cache: HybridCache, slot: int) -> torch.Tensor:
    store = cache.layers[0]
    return torch.cat([store.window.positions[slot].float().flatten(), store.tail.state[slot].flatten().nan_to_num()])


CALLS = {
    "admit_request": lambda c, n, r: c.admit([]),
    "prepare_forward": lambda c, n, r: c.prepare_forward([(r[0], 9), (r[1], 9)]),
    "truncate": lambda c, n, r: c.truncate([(r[1], 9), (r[0], 17)]),
    "release": lambda c, n, r: c.release(r[0]),
    "put_state": lambda c, n, r: put_state(c, r[2]),
    "admit": lambda c, n, r: n.admit(TOKENS),
    "commit": lambda c, n, r: n.commit(r[1], [7] * 11),
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_at_every_point_of_a_call(name):
    def standing(cache, requests):
        return [(r.length, r.num_blocks, r.draft_start) for r in requests[:2]], len(cache._free_slots), cache.allocator.num_used

    before, after = made(), made()
    CALLS[name](*after)
    may = [standing(c, r) for c, _, r in (before, after)]
    content = [[rows(c, r[i].slot) for i in (0, 1)] for c, _, r in (before, after)]

    def prepare():
        state = made()
        return state, lambda: CALLS[name](*state)

    count = 0
    for cache, names, requests in signalled_at_every_point(prepare, *HYBRID):
        cache.check()
        names.names.check()
        got = standing(cache, requests)
        assert got in may
        if name in ("admit_request", "put_state", "admit"):
            assert got == may[0]  # nobody has the new request
        if name == "truncate":  # windows and tails are as the lengths say: all of it or nothing
            want = content[may.index(got)]
            assert all(torch.equal(rows(cache, r.slot), w) for r, w in zip(requests[:2], want, strict=True))
        cache.release(cache.admit([]))
        for request in requests[:2]:
            if not request.is_released:
                cache.release(request)
        cache.check()
        assert cache.allocator.num_used == 0
        names.names.clear()
        assert cache.allocator.num_free == 7
        count += 1
    assert count > 3


def test_from_several_threads():
    cache = HybridCache(SCHEMA, num_blocks=24, max_seqs=16, max_seq_len=48)
    names, errors = HybridPrefix(cache, policy="zero"), []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(30):
                try:
                    request = names.admit(TOKENS[: rng.randint(1, 20)]).request
                except kvx.OutOfBlocks:
                    continue
                try:
                    cache.prepare_forward([(request, rng.randint(1, 20))])
                    cache.check()
                except kvx.OutOfBlocks:
                    pass
                finally:
                    cache.release(request)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    cache.check()
    assert cache.allocator.num_used == 0
    assert len(cache._free_slots) == 16
