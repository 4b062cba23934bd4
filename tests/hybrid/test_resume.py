"""Going on: from an exported state, and from what earlier requests left behind. Logits are those of a cold run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument, OutOfBlocks
from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridPrefix, HybridSchema, put_state, take_state
from tests.hybrid import models
from tests.hybrid.hybrids import CLOSE, F32, answer, cache_of, check, hybrid_on, tokens


def feed(hybrid: HybridModel, request, ids: torch.Tensor, prefix: HybridPrefix | None = None, step: int = 64) -> torch.Tensor:
    """The rest of `ids`, in steps that end where blocks do."""
    got = []
    while request.length < len(ids):
        stop = min(len(ids), (request.length // step + 1) * step)
        got.append(hybrid.forward(request, ids[request.length : stop]))
        if prefix is not None:
            prefix.commit(request, ids.tolist())
    return torch.cat(got)


@pytest.mark.parametrize("at", [3, 129, 200, 256])
@models.one_thread()
def test_a_state_goes_on_in_another_cache(backend, at):
    ids, want = tokens(backend, 260), models.whole(models.FLASH, 260).logits
    first = hybrid_on(backend, models.FLASH)
    request = first.cache.admit_request()
    first.forward(request, ids[:at])
    state = take_state(first.cache, request)
    first.forward(request, tokens(backend, 40, 9))  # what was taken is a copy
    second = hybrid_on(backend, models.FLASH, num_blocks=7)
    other = second.cache.admit_request()
    second.forward(other, tokens(backend, 150, 5))
    got = second.forward(put_state(second.cache, state), ids[at:])
    check(backend, got, want[at:])
    assert {line["name"] for line in state.manifest()} == set(state.buffers)
    assert sum(line["bytes"] for line in state.manifest()) == state.num_bytes


@pytest.mark.parametrize(("policy", "start"), [("full", 256), (256, 256), (384, 192), ("zero", 192)])
@models.one_thread()
def test_a_second_request_goes_on_from_the_first(backend, policy, start):
    """It shares 256 tokens; without a checkpoint it computes some again: window x layers are 64 here."""
    ids, want, hybrid = tokens(backend, 300), answer(models.FLASH, 300), hybrid_on(backend, models.FLASH)
    prefix = HybridPrefix(hybrid.cache, policy=policy)
    first = prefix.admit(ids.tolist())
    assert (first.start, first.shared) == (0, 0)
    check(backend, feed(hybrid, first.request, ids, prefix), want)
    pages = [p.pages.clone() for layer in hybrid.cache.layers for p in (layer.entries, layer.index) if p is not None]
    blocks = hybrid.cache.blocks(first.request)[:2].tolist()
    hybrid.cache.release_request(first.request)

    second = prefix.admit(ids.tolist())
    assert (second.start, second.shared, second.is_exact) == (start, 256, True)
    assert hybrid.cache.blocks(second.request).tolist() == blocks
    got = feed(hybrid, second.request, ids, prefix)
    check(backend, got[256 - second.start :], want[256:])
    now = [p.pages for layer in hybrid.cache.layers for p in (layer.entries, layer.index) if p is not None]
    assert all(torch.equal(a[blocks], b[blocks]) for a, b in zip(pages, now, strict=True)), "shared entries were written"
    prefix.names.check()


@models.one_thread()
def test_a_bounded_replay_says_that_it_is_one():
    """One window again, as V4.1's: near, and not the same."""
    model, ids = models.make(models.FLASH), models.tokens(300)
    want = models.run(model, ids).logits
    hybrid = HybridModel(model, cache_of(model, F32))
    prefix = HybridPrefix(hybrid.cache, policy="zero", replay="bounded")
    feed(hybrid, prefix.admit(ids.tolist()).request, ids, prefix)
    second = prefix.admit(ids.tolist())
    assert (second.start, second.shared, second.is_exact) == (240, 256, False)
    got = feed(hybrid, second.request, ids, prefix)[16:]
    off = float((got - want[256:]).norm() / want[256:].norm())
    assert 1e-4 < off < 0.5


@models.one_thread()
def test_two_at_once_share_blocks_and_nothing_else():
    """The second comes while the first goes on: it reads a checkpoint, never the first one's ring."""
    model, ids = models.make(models.FLASH), models.tokens(200)
    other = torch.cat((ids[:150], models.tokens(80, seed=8)))
    hybrid = HybridModel(model, cache_of(model, F32))
    prefix = HybridPrefix(hybrid.cache)
    first = prefix.admit(ids.tolist())
    feed(hybrid, first.request, ids, prefix)
    second = prefix.admit(other.tolist())
    assert (second.start, second.shared) == (128, 128)
    assert second.request.slot != first.request.slot
    got = feed(hybrid, second.request, other, prefix)
    torch.testing.assert_close(got, models.run(model, other).logits[128:], **CLOSE)
    more = models.tokens(30, seed=2)
    got = hybrid.forward(first.request, more)
    torch.testing.assert_close(got, models.run(model, torch.cat((ids, more))).logits[200:], **CLOSE)
    assert hybrid.cache.allocator.num_used == 3


@models.one_thread()
def test_evicted_blocks_are_not_found():
    model = models.make(models.FLASH)
    hybrid = HybridModel(model, cache_of(model, F32, num_blocks=2))
    prefix = HybridPrefix(hybrid.cache)
    for seed in (1, 2, 1):
        ids = models.tokens(140, seed)
        resumed = prefix.admit(ids.tolist())
        assert resumed.shared == 0
        torch.testing.assert_close(feed(hybrid, resumed.request, ids, prefix), models.run(model, ids).logits, **CLOSE)
        hybrid.cache.release_request(resumed.request)


def test_other_states_are_refused():
    model = models.make(models.FLASH)
    cache = cache_of(model, F32)
    request = cache.admit_request()
    cache.prepare_forward([(request, 130)])
    with pytest.raises(BadArgument, match="not where a block of 128"):
        take_state(cache, request, entries=False)
    state = take_state(cache, request)
    with pytest.raises(BadArgument, match="version 2"):
        put_state(cache, replace(state, version=2))
    with pytest.raises(BadArgument, match=r"layer 0: window_rows is 'f32' in the state and 'bf16' in the cache"):
        put_state(cache_of(model, {**F32, "window_rows": "bf16"}), state)
    with pytest.raises(BadArgument, match="blocks of 128 tokens"):
        put_state(cache_of(model, F32, block_tokens=256), state)
    pro = HybridCache(HybridSchema.of(models.config_of(models.PRO), **F32), num_blocks=1, max_requests=1, max_context=10)
    with pytest.raises(BadArgument, match="4 layers, the cache 3"):
        put_state(pro, state)
    small = cache_of(model, F32, num_blocks=0)
    with pytest.raises(OutOfBlocks):
        put_state(small, state)
    assert len(small._free_slots) == 3, "the slot was given back"
    with pytest.raises(BadArgument, match="multiple of 128"):
        HybridPrefix(cache, policy=100)
