"""Bad arguments of every public call of a cache: a KvxError, and nothing has changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvx
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema
from tests.cache.test_paged import make, snapshot

BAD = [None, -1, 10**6, 2**70, 1.5, float("nan"), "text", b"bytes", [], {}, [None], [-1], [2**40], [1.5], ["a"], [[1, 2]], object(),
       np.array([1.5]), np.zeros((2, 2), np.int32), torch.empty(3, dtype=torch.int64, device="meta"), (1, [2])]  # fmt: skip


def refused(call, *args, **options) -> bool:
    """False: it was taken."""
    try:
        call(*args, **options)
    except kvx.KvxError:
        return True
    return False


@pytest.fixture
def cache():
    made = make(24, window=6)
    for tokens in (list(range(20)), [50 + t for t in range(9)]):
        seq = made.admit(tokens)
        made.extend(seq, len(tokens))
        made.commit(seq)
    return made


def test_paged_cache(cache):
    seq, other = cache.sequences
    gone = cache.admit([1])
    cache.release(gone)
    foreign = make(8).admit([1])
    calls = {
        "admit": [(b,) for b in BAD if not (isinstance(b, list) and not b)],
        "append": [(seq, b) for b in BAD if not (isinstance(b, list) and not b)],
        "extend": [(seq, b) for b in BAD if not (isinstance(b, list) and not b)],
        "truncate": [(seq, b) for b in BAD],
        "blocks": [(seq, b) for b in BAD],
        "layer": [(b,) for b in BAD],
        "plan": [([(seq, b)],) for b in BAD] + [([(seq, 20)],)],  # whose first blocks the window gave back
    }
    for name in ("commit", "fork", "release", "blocks", "room", "bring_back"):
        calls.setdefault(name, []).extend((s,) for s in (*BAD, gone, foreign) if s is not None or name != "room")
    for name in ("append", "extend", "truncate"):
        calls[name] += [(s, n) for s in (*BAD, gone, foreign) for n in (1, [1])]
    calls["plan"] += [([(s, 1)],) for s in (*BAD, gone, foreign)]
    cache.extend(seq, [1])
    before, count = snapshot(cache), 0
    for name, all_args in calls.items():
        for args in all_args:
            assert refused(getattr(cache, name), *args), f"{name}{args}"
            count += 1
    for extra in BAD:
        assert isinstance(extra, bytes) or refused(cache.admit, [1, 2, 3], extra=extra)
    cache.check()
    assert snapshot(cache) == before
    assert count > 250
    assert other.length == 9


def test_prefix_cache(cache):
    p, before = cache.prefix, snapshot(cache)
    hashes = cache.sequences[0].hashes
    used = cache.blocks(cache.sequences[0])[-1:]
    for group, names, ids in (
        (5, hashes[:1], used), (-1, hashes[:1], used), ("a", hashes[:1], used), (0, hashes[:2], used), (0, [b"short"], used),
        (0, ["text"], used), (0, [hashes[0]], [99]), (0, [hashes[0]], [1.5]), (0, [b"1" * 16], [23]), (0, [b"1" * 16] * 2, [0, 0]),
    ):  # fmt: skip
        assert refused(p.put, group, names, ids), (group, names, ids)
    for windows in ((), (0,), (0, 6, 6)):
        assert refused(p.lookup, hashes, windows)
        assert refused(p.match, hashes, windows)
        assert refused(p.take, hashes, 1, windows)
    assert refused(p.take, hashes, 99, cache.kinds)
    assert refused(p.unpin, [b"1" * 16])
    cache.check()
    assert snapshot(cache) == before


def test_block_allocator():
    a = kvx.BlockAllocator(8)
    a.keep(a.allocate(3))
    a.release([2])
    before = (a.counts().tolist(), a.num_free, a.num_idle)
    for bad in BAD:
        assert refused(a.allocate, bad), bad
        for name in ("retain", "release", "keep", "forget"):
            if not (isinstance(bad, list) and not bad):
                assert refused(getattr(a, name), bad), (name, bad)
        assert refused(a.refs, bad)
        assert refused(a.is_kept, bad)
        assert refused(kvx.BlockAllocator, bad) or bad == 10**6
    for name, ids in (("release", [0, 0]), ("release", [2]), ("retain", [5]), ("keep", [7]), ("release", [0, 9])):
        assert refused(getattr(a, name), ids), (name, ids)
    a.check()
    assert (a.counts().tolist(), a.num_free, a.num_idle) == before


@pytest.mark.parametrize("size", ["max_seqs", "max_seq_len", "max_tokens"])
def test_sizes_of_a_cache(size):
    for bad in (-1, 1.5, "text", None):
        assert refused(make, 8, **{size: bad}), bad
    assert refused(make, 8, device="meta")


def test_hybrid_cache():
    schema = HybridSchema((LayerSchema(4, head_dim=64, window=8, window_rows="f32", entry_rows="f32"),), max_drafts=2)
    sizes = {"num_blocks": 4, "max_seqs": 3, "max_seq_len": 300}
    cache = HybridCache(schema, **sizes, prefix=True, num_snapshots=1)
    request, gone = cache.admit([5] * 250), cache.admit([])
    cache.prepare_forward([(request, 128)])
    cache.commit(request)
    cache.prepare_forward([(request, 72)])
    cache.release(gone)
    foreign = HybridCache(schema, **sizes).admit([])
    tensors = [cache.block_table, cache.num_shared, *cache.step, *(t for layer in cache.layers for t in layer.tensors)]
    before, content = snapshot(cache), [t.clone() for t in tensors]
    count = 0
    for bad in (*BAD, gone, foreign):
        one = (cache.release, cache.blocks, cache.block_ids, cache.slot, cache.commit, cache.fork, cache.bring_back)
        for call in one:
            assert refused(call, bad), bad
        for call in (cache.prepare_forward, cache.extend_all, cache.take_back):
            assert refused(call, [(bad, 1)]), bad
            if bad is not gone and bad is not foreign:
                assert refused(call, [(request, bad)]), bad
                assert refused(call, [(request, 1), (request, 1)])
        for call in (cache.truncate, cache.extend, cache.append):
            assert refused(call, bad, 1 if call is not cache.append else [1]), bad
        if bad is not gone and bad is not foreign:
            assert refused(cache.truncate, request, bad), bad
        count += 1
    for layer in (-1, 1, "a", None):
        assert refused(cache.acquire, layer)
        for group in (0, 1):
            assert refused(cache.planes, layer, group)
        assert refused(cache.planes, 0, layer if layer != 1 else 2)
    assert refused(cache.layer, 0), "it has no K and V"
    cache.check()
    assert snapshot(cache) == before
    for now, then in zip(tensors, content, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))
    assert count > 20
    for wrong in (
        {"max_seqs": 0},
        {"max_seq_len": -1},
        {"num_blocks": -1},
        {"num_snapshots": "a"},
        {"snapshot_every": 1.5},
        {"device": "meta"},
    ):
        assert refused(HybridCache, schema, **{**sizes, **wrong}), wrong
