"""Going on: from an exported state, and from what earlier requests left behind. Logits are those of a cold run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument, OutOfBlocks
from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridPrefix, HybridSchema, LayerSchema, Projected, put_state, take_state
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
    request = first.cache.admit([])
    first.forward(request, ids[:at])
    state = take_state(first.cache, request)
    first.forward(request, tokens(backend, 40, 9))  # what was taken is a copy
    second = hybrid_on(backend, models.FLASH, num_blocks=7)
    other = second.cache.admit([])
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
    hybrid.cache.release(first.request)

    second = prefix.admit(ids.tolist())
    assert (second.start, second.shared, second.is_exact) == (start, 256, True)
    assert hybrid.cache.blocks(second.request).tolist() == blocks
    got = feed(hybrid, second.request, ids, prefix)
    check(backend, got[256 - second.start :], want[256:])
    now = [p.pages for layer in hybrid.cache.layers for p in (layer.entries, layer.index) if p is not None]
    assert all(torch.equal(a[blocks], b[blocks]) for a, b in zip(pages, now, strict=True)), "shared entries were written"
    prefix.names.check()


@pytest.mark.parametrize("window", [1, 2, 3])
@models.one_thread()
def test_an_exact_replay_beside_overlaps_longer_than_windows(window):
    """A CSA entry is made of eight tokens, four of them before its own: more than these windows reach back."""
    model, ids = models.make(models.Tiny(f"window{window}", (4, 4), window=window)), models.tokens(300)
    want = models.run(model, ids).logits
    hybrid = HybridModel(model, cache_of(model, F32))
    prefix = HybridPrefix(hybrid.cache, policy="zero")
    feed(hybrid, prefix.admit(ids.tolist()).request, ids, prefix)
    second = prefix.admit(ids.tolist())
    assert (second.start, second.shared, second.is_exact) == (256 - 4 - window, 256, True)
    got = feed(hybrid, second.request, ids, prefix)
    torch.testing.assert_close(got[256 - second.start :], want[256:], **CLOSE)
    hybrid.cache.check()


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
    longer = torch.cat((ids, ids[:200]))
    got = feed(hybrid, second.request, longer, prefix)[16 : 16 + 44]
    off = float((got - want[256:]).norm() / want[256:].norm())
    assert 1e-4 < off < 0.5
    # Blocks that it filled are nobody else's, and a copy of it remembers.
    assert prefix.admit(longer.tolist()).shared == 256
    again = HybridModel(model, cache_of(model, F32)).cache
    assert not put_state(again, take_state(hybrid.cache, second.request)).is_exact


def test_windows_alone_have_no_blocks_to_share():
    cache = HybridCache(HybridSchema((LayerSchema(),)), num_blocks=2, max_seqs=1, max_seq_len=256)
    with pytest.raises(BadArgument, match="no blocks to share"):
        HybridPrefix(cache)


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
        hybrid.cache.release(resumed.request)


def test_other_states_are_refused():
    model = models.make(models.FLASH)
    cache = cache_of(model, F32)
    request = cache.admit([])
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
    pro = HybridCache(HybridSchema.of(models.config_of(models.PRO), **F32), num_blocks=1, max_seqs=1, max_seq_len=10)
    with pytest.raises(BadArgument, match="4 layers, the cache 3"):
        put_state(pro, state)
    small = cache_of(model, F32, num_blocks=0)
    with pytest.raises(OutOfBlocks):
        put_state(small, state)
    assert len(small._free_slots) == 3, "the slot was given back"
    with pytest.raises(BadArgument, match="multiple of 128"):
        HybridPrefix(cache, policy=100)


# --- requests of a cache without a model ---------------------------------------------------------------------------------


def small_cache(num_layers: int = 2) -> HybridCache:
    """Windows of two blocks; with two layers an exact replay begins four blocks back, a bounded one two."""
    layer = LayerSchema(4, overlap=True, window=16, head_dim=16, rope_dim=0, **F32)
    return HybridCache(HybridSchema((layer,) * num_layers, block_tokens=8), num_blocks=16, max_seqs=3, max_seq_len=64)


def run_to(cache: HybridCache, request, length: int) -> None:
    num_tokens = length - request.length
    cache.prepare_forward([(request, num_tokens)])
    for i in range(len(cache.layers)):
        handle = cache.acquire(i, backend="torch")
        handle.write_swa(torch.randn(num_tokens, 16))
        handle.flush(Projected(torch.randn(num_tokens, 32), torch.randn(num_tokens, 32)))


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_no_checkpoint_of_windows_that_are_not_whole(replay):
    """A request that computes tokens again has only some of its window. After a bounded replay it never is exact."""
    cache, text = small_cache(), list(range(60))
    prefix = HybridPrefix(cache, replay=replay)
    first = prefix.admit(text)
    run_to(cache, first.request, 43)  # no block ends here: no checkpoint
    prefix.commit(first.request, text)
    second = prefix.admit(text)
    assert (second.start, second.shared, second.is_exact) == ((8, 40, True) if replay == "exact" else (24, 40, False))
    run_to(cache, second.request, 32)
    prefix.commit(second.request, text)
    assert not prefix.checkpoints
    assert prefix.admit(text[:34]).start == (0 if replay == "exact" else 16), "nobody goes on from there"
    for end in (40, 48):
        run_to(cache, second.request, end)
        prefix.commit(second.request, text)
        assert len(prefix.checkpoints) == ((end - 32) // 8 if replay == "exact" else 0)


def test_commit_is_of_a_live_request_and_its_tokens():
    cache, text = small_cache(1), list(range(40))
    prefix = HybridPrefix(cache, policy="full")
    first = prefix.admit(text).request
    run_to(cache, first, 20)
    cache.release(first)
    second = prefix.admit([99] * 40).request
    assert second.slot == first.slot
    run_to(cache, second, 24)
    with pytest.raises(BadArgument, match="was released"):
        prefix.commit(first, text)
    with pytest.raises(BadArgument, match=r"23 tokens are given; .* 3 full blocks of 8"):
        prefix.commit(second, [99] * 23)
    assert not first.names
    assert not second.names
    assert not prefix.checkpoints
    assert prefix.admit(text).shared == prefix.admit([99] * 40).shared == 0
    prefix.commit(second, [99] * 24)
    assert len(second.names) == 3


WRONG_BUFFERS = {
    "window": ("layer.0.window", lambda t: t[:3]),
    "positions": ("layer.1.positions", lambda t: t.long()),
    "tail": ("layer.0.tail", lambda t: torch.zeros(1, dtype=torch.float64)),
    "page_bytes": ("layer.1.entries", lambda t: t[:, :5]),
    "num_pages": ("layer.0.entries", lambda t: t[:0]),
    "missing_tail": ("layer.1.tail", lambda t: None),
    "missing_entries": ("layer.1.entries", lambda t: None),
    "unknown": ("layer.0.index", lambda t: torch.zeros(1)),
}


@pytest.mark.parametrize("what", WRONG_BUFFERS)
def test_states_with_other_buffers_are_refused(what):
    cache, (name, change) = small_cache(), WRONG_BUFFERS[what]
    request = cache.admit([])
    run_to(cache, request, 10)
    state = take_state(cache, request)
    cache.release(request)
    changed = {**state.buffers, name: change(state.buffers.get(name))}
    with pytest.raises(BadArgument, match=f"buffer {name} is .* after 10 tokens it is"):
        put_state(cache, replace(state, buffers={n: t for n, t in changed.items() if t is not None}))
    assert (len(cache._free_slots), cache.allocator.num_used) == (3, 0)
    assert put_state(cache, state).length == 10


def test_a_state_that_fails_half_way_gives_all_back(monkeypatch):
    cache = small_cache()
    request = cache.admit([])
    run_to(cache, request, 10)
    state = take_state(cache, request)
    cache.release(request)

    def fail(*_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr("kvx.cache.hybrid.state.put_slot", fail)
    with pytest.raises(RuntimeError, match="gone"):
        put_state(cache, state)
    assert (len(cache._free_slots), cache.allocator.num_used) == (3, 0)


def test_a_state_is_taken_when_the_replay_is_over():
    cache, text = small_cache(), list(range(60))
    prefix = HybridPrefix(cache, policy="zero")
    first = prefix.admit(text).request
    run_to(cache, first, 43)
    prefix.commit(first, text)
    second = prefix.admit(text).request
    run_to(cache, second, 16)
    with pytest.raises(BadArgument, match="whole only after 40"):
        take_state(cache, second)
    run_to(cache, second, 40)
    assert put_state(cache, take_state(cache, second)).num_blocks == 5
