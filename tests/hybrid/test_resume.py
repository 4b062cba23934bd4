"""Going on from what earlier requests left behind: entries, snapshots of states, and tokens computed again. Logits are those of a
cold run."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument
from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema, Projected
from tests.hybrid import models
from tests.hybrid.hybrids import CLOSE, F32, answer, cache_of, check, feed, hybrid_on, tokens


def found(seq) -> tuple[int, int, bool]:
    """Where it begins to compute, the tokens whose entries are there, and whether windows will be as if all had been computed."""
    return seq.length, max(seq.length, seq.num_ahead * seq.cache.block_size), seq.is_exact


def num_snapshots(cache: HybridCache) -> int:
    return len(cache.prefix.named(0)[0])


@pytest.mark.parametrize("num_snapshots", [0, 4])
@pytest.mark.parametrize(("every", "start"), [(1, 256), (2, 256), (3, 192), (0, 192)])
@models.one_thread()
def test_a_second_request_goes_on_from_the_first(backend, every, start, num_snapshots):
    """It shares 256 tokens; without a snapshot it computes some again: window x layers are 64 here."""
    ids, want = tokens(backend, 300), answer(models.FLASH, 300)
    hybrid = hybrid_on(backend, models.FLASH, prefix=True, snapshot_every=every, num_snapshots=num_snapshots)
    cache = hybrid.cache
    first = cache.admit(ids.tolist())
    assert found(first) == (0, 0, True)
    check(backend, feed(hybrid, first, ids), want)
    pages = [p.pages.clone() for layer in cache.layers for p in (layer.entries, layer.index) if p is not None]
    blocks = cache.block_ids(first)[:2].tolist()
    cache.release(first)

    second = cache.admit(ids.tolist())
    assert found(second) == (start, 256, True)
    assert cache.block_ids(second).tolist() == blocks
    got = feed(hybrid, second, ids)
    check(backend, got[256 - start :], want[256:])
    now = [p.pages for layer in cache.layers for p in (layer.entries, layer.index) if p is not None]
    assert all(torch.equal(a[blocks], b[blocks]) for a, b in zip(pages, now, strict=True)), "shared entries were written"
    cache.check()


@pytest.mark.parametrize("window", [1, 2, 3])
@models.one_thread()
def test_an_exact_replay_beside_overlaps_longer_than_windows(window):
    """A CSA entry is made of eight tokens, four of them before its own: more than these windows reach back."""
    model, ids = models.make(models.Tiny(f"window{window}", (4, 4), window=window)), models.tokens(300)
    want = models.run(model, ids).logits
    hybrid = HybridModel(model, cache_of(model, F32, prefix=True, snapshot_every=0))
    feed(hybrid, hybrid.cache.admit(ids.tolist()), ids)
    second = hybrid.cache.admit(ids.tolist())
    start = 256 - 4 - window
    assert found(second) == (start, 256, True)
    got = feed(hybrid, second, ids)
    torch.testing.assert_close(got[256 - start :], want[256:], **CLOSE)
    hybrid.cache.check()


@models.one_thread()
def test_a_bounded_replay_says_that_it_is_one():
    """One window again, as V4.1's: near, and not the same."""
    model, ids = models.make(models.FLASH), models.tokens(300)
    want = models.run(model, ids).logits
    hybrid = HybridModel(model, cache_of(model, F32, max_seqs=4, prefix=True, snapshot_every=0, replay="bounded"))
    cache = hybrid.cache
    feed(hybrid, cache.admit(ids.tolist()), ids)
    second = cache.admit(ids.tolist())
    assert found(second) == (240, 256, False)
    longer = torch.cat((ids, ids[:200]))
    got = feed(hybrid, second, longer)[16 : 16 + 44]
    off = float((got - want[256:]).norm() / want[256:].norm())
    assert 1e-4 < off < 0.5
    # Blocks that it filled are nobody else's, and a fork of it remembers.
    assert found(cache.admit(longer.tolist()))[:2] == (240, 256)
    fork = cache.fork(second)
    assert not fork.is_exact
    hybrid.forward(fork, ids[:12])
    cache.commit(fork)
    assert len(cache.prefix.named(1)[0]) == 2
    cache.check()


@pytest.mark.parametrize("every", [1, 0])
def test_windows_alone_are_found_by_their_snapshots(every):
    """Without entries there is nothing else to be found by, and no telling how far to go back."""
    schema = HybridSchema((LayerSchema(window=16, head_dim=16, rope_dim=0, window_rows="f32"),), block_tokens=8)
    cache = HybridCache(schema, num_blocks=0, max_seqs=2, max_seq_len=64, prefix=True, num_snapshots=2, snapshot_every=every)
    assert [g.name for g in cache.stats().groups] == ["windows"]
    text = list(range(40))
    first = cache.admit(text)
    for end in (8, 21, 24, 30):
        run_to(cache, first, end)
        cache.commit(first)
    assert num_snapshots(cache) == 2 * every
    second = cache.admit(text)
    assert found(second) == (24 * every, 24 * every, True)
    run_to(cache, second, 33)
    positions = cache.layers[0].window.positions[cache.slot(second)].tolist()
    assert sorted(positions) == list(range(17, 33))
    assert len(cache.block_ids(second)) == 0
    cache.check()


@models.one_thread()
def test_two_at_once_share_blocks_and_nothing_else():
    """The second comes while the first goes on: it reads a snapshot, never the first one's ring."""
    model, ids = models.make(models.FLASH), models.tokens(200)
    other = torch.cat((ids[:150], models.tokens(80, seed=8)))
    hybrid = HybridModel(model, cache_of(model, F32, prefix=True))
    cache = hybrid.cache
    first = cache.admit(ids.tolist())
    feed(hybrid, first, ids)
    second = cache.admit(other.tolist())
    assert found(second) == (128, 128, True)
    assert cache.slot(second) != cache.slot(first)
    got = feed(hybrid, second, other)
    torch.testing.assert_close(got, models.run(model, other).logits[128:], **CLOSE)
    more = models.tokens(30, seed=2)
    got = hybrid.forward(first, more)
    torch.testing.assert_close(got, models.run(model, torch.cat((ids, more))).logits[200:], **CLOSE)
    assert cache.allocators[1].num_used == 3
    cache.check()


@models.one_thread()
def test_evicted_blocks_are_not_found():
    """A snapshot that is still there is of no use without the entries before it."""
    model = models.make(models.FLASH)
    hybrid = HybridModel(model, cache_of(model, F32, num_blocks=2, prefix=True, num_snapshots=4))
    for turn, seed in enumerate((1, 2, 1)):
        ids = models.tokens(140, seed)
        seq = hybrid.cache.admit(ids.tolist())
        assert found(seq) == (0, 0, True)
        torch.testing.assert_close(feed(hybrid, seq, ids), models.run(model, ids).logits, **CLOSE)
        hybrid.cache.release(seq)
        hybrid.cache.check()
        assert (len(hybrid.cache.prefix.named(1)[0]), num_snapshots(hybrid.cache)) == (1, min(2, turn + 1))


@models.one_thread()
def test_evicted_snapshots_are_computed_again():
    """Entries are there and their states are not: as if none had been left."""
    model, ids = models.make(models.FLASH), models.tokens(300)
    hybrid = HybridModel(model, cache_of(model, F32, max_seqs=2, prefix=True))
    cache = hybrid.cache
    first = cache.admit(ids.tolist())
    want = feed(hybrid, first, ids)
    cache.release(first)
    assert num_snapshots(cache) == 1  # of two states one went on
    others = [cache.admit(models.tokens(9, seed).tolist()) for seed in (1, 2)]
    hybrid.forward(others, [models.tokens(9, seed) for seed in (1, 2)])
    assert num_snapshots(cache) == 0
    for other in others:
        cache.release(other)
    second = cache.admit(ids.tolist())
    assert found(second) == (192, 256, True)
    torch.testing.assert_close(feed(hybrid, second, ids)[64:], want[256:], **CLOSE)


# --- requests of a cache without a model ---------------------------------------------------------------------------------


def small_cache(num_layers: int = 2, **options) -> HybridCache:
    """Windows of two blocks; with two layers an exact replay begins four blocks back, a bounded one two."""
    layer = LayerSchema(4, overlap=True, window=16, head_dim=16, rope_dim=0, **F32)
    options = {"num_blocks": 16, "max_seqs": 4, "max_seq_len": 64, "prefix": True, "num_snapshots": 4, **options}
    return HybridCache(HybridSchema((layer,) * num_layers, block_tokens=8), **options)


def run_to(cache: HybridCache, request, length: int) -> None:
    num_tokens = length - request.length
    cache.prepare_forward([(request, num_tokens)])
    for i, store in enumerate(cache.layers):
        handle = cache.acquire(i, backend="torch")
        handle.write_swa(torch.randn(num_tokens, 16))
        if store.tail is not None:
            handle.flush(Projected(torch.randn(num_tokens, 32), torch.randn(num_tokens, 32)))


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_no_snapshot_of_windows_that_are_not_whole(replay):
    """A request that computes tokens again has only some of its window. After a bounded replay it never is exact."""
    cache, text = small_cache(replay=replay), list(range(60))
    first = cache.admit(text)
    run_to(cache, first, 43)  # no block ends here: no snapshot
    cache.commit(first)
    second = cache.admit(text)
    assert found(second) == ((8, 40, True) if replay == "exact" else (24, 40, False))
    run_to(cache, second, 32)
    cache.commit(second)
    assert num_snapshots(cache) == 0
    assert cache.admit(text[:34]).length == (0 if replay == "exact" else 16), "nobody goes on from there"
    for end in (40, 48):
        run_to(cache, second, end)
        cache.commit(second)
        cache.check()
        assert num_snapshots(cache) == ((end - 32) // 8 if replay == "exact" else 0)
        assert len(cache.prefix.named(1)[0]) == (end // 8 if replay == "exact" else 5)
    assert cache.admit(text).length == (48 if replay == "exact" else 24)


def test_a_snapshot_may_be_left_behind_what_was_found():
    """From a snapshot on through entries that are there: their end is the next place to leave one."""
    cache, text = small_cache(), list(range(60))
    first = cache.admit(text)
    for end in (8, 40):
        run_to(cache, first, end - 3)
        run_to(cache, first, end)
        if end == 8:
            cache.commit(first)
    run_to(cache, first, 43)
    cache.commit(first)
    second = cache.admit(text)
    assert found(second) == (8, 40, True)
    for end, want in ((24, 1), (40, 2), (48, 3)):
        run_to(cache, second, end)
        cache.commit(second)
        cache.check()
        assert num_snapshots(cache) == want
    assert found(cache.admit(text)) == (48, 48, True)


def test_commit_is_of_a_live_request_and_its_tokens():
    cache, text = small_cache(1), list(range(40))
    first = cache.admit(text)
    run_to(cache, first, 20)
    slot = cache.slot(first)
    cache.release(first)
    second = cache.admit([99] * 23)
    run_to(cache, second, 23)
    assert cache.slot(second) == slot
    with pytest.raises(BadArgument, match="was released"):
        cache.commit(first)
    with pytest.raises(BadArgument, match=r"1 tokens more make 24; 23 of .* are known. .*append\(\)"):
        cache.prepare_forward([(second, 1)])
    assert cache.prefix.num_blocks == 0
    assert found(cache.admit(text)) == found(cache.admit([99] * 40)) == (0, 0, True)
    cache.append(second, [99])
    run_to(cache, second, 24)
    assert cache.prefix.num_blocks == 0
    cache.commit(second)
    assert [len(cache.prefix.named(group)[0]) for group in (0, 1)] == [1, 3]


@pytest.mark.parametrize("wrong", [{"replay": "some"}, {"num_snapshots": -1}, {"num_snapshots": 1.5}, {"snapshot_every": -1}])
def test_options_that_are_none_are_refused(wrong):
    with pytest.raises(BadArgument, match=f"{next(iter(wrong))} is"):
        small_cache(**wrong)
