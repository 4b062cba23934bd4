"""States of a hybrid cache: forks and snapshots are nobody's to change, the oldest go first, and whoever has a state can go on."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument, OutOfBlocks
from kvx.cache.hybrid import HybridCache, HybridSchema, LayerSchema
from tests import compare
from tests.hybrid import models
from tests.hybrid.hybrids import F32, answer, check, feed, hybrid_on, same, state_of, tokens
from tests.hybrid.test_resume import num_snapshots, run_to, small_cache

TEXT = list(range(60))


# --- forks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [6, 128, 131])
@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
@models.one_thread()
def test_forks_are_each_as_if_alone(backend, prefix, at):
    """Two forks and their origin go on with texts of their own, in one step and one after the other."""
    hybrid = hybrid_on(backend, models.FLASH, max_seqs=3, num_blocks=6, prefix=prefix)
    cache = hybrid.cache
    start = tokens(backend, at, 3)
    origin = cache.admit(start.tolist() if prefix else [])
    hybrid.forward(origin, start)
    if prefix:
        cache.commit(origin)
    seed = {origin: 5, cache.fork(origin): 6, cache.fork(origin): 7}
    assert len({cache.slot(seq) for seq in seed}) == 1
    texts = {seq: torch.cat((start, tokens(backend, 150 - at, n))) for seq, n in seed.items()}
    got, rng = {seq: [] for seq in seed}, random.Random(at)
    while live := [seq for seq in seed if seq.length < len(texts[seq])]:
        chosen = live if len(got[origin]) == 0 else rng.sample(live, rng.randint(1, len(live)))
        parts = [texts[seq][seq.length : seq.length + rng.choice((1, 3, 40))] for seq in chosen]
        for seq, logits in zip(chosen, hybrid.forward(chosen, parts), strict=True):
            got[seq].append(logits)
            cache.commit(seq)
        cache.check()
    assert len({cache.slot(seq) for seq in seed}) == 3
    for seq, text in texts.items():
        check(backend, torch.cat(got[seq]), models.run(models.make(models.FLASH), text.cpu()).logits[at:])


def test_a_fork_that_goes_on_leaves_the_others_state():
    cache = small_cache(max_seqs=3, num_snapshots=0)
    first = cache.admit(TEXT)
    run_to(cache, first, 13)
    before, slot, pages = state_of(cache, cache.slot(first)), cache.slot(first), cache.layers[0].entries.pages
    page = pages[int(cache.block_ids(first)[-1])].clone()
    forks = [cache.fork(first), cache.fork(first)]
    for fork in forks:
        run_to(cache, fork, 22)
    assert len({slot, *(cache.slot(fork) for fork in forks)}) == 3
    assert cache.slot(first) == slot
    assert same(state_of(cache, slot), before)
    compare.bitwise(pages[int(cache.block_ids(first)[-1])], page, "the block that they had together")
    cache.check()


def test_the_last_of_the_forks_goes_on_in_place():
    """In one step, with as many states as there are sequences: the last has the state alone by then, and nothing is copied."""
    cache = small_cache(max_seqs=3, num_snapshots=0, num_blocks=4)
    first = cache.admit(TEXT[:20])
    run_to(cache, first, 13)
    forks = [cache.fork(first), cache.fork(first)]
    slot, last = cache.slot(first), int(cache.block_ids(first)[-1])
    cache.prepare_forward([(seq, 1) for seq in (*forks, first)])
    assert cache.slot(first) == slot
    assert int(cache.block_ids(first)[-1]) == last
    assert sorted(cache.slot(seq) for seq in (first, *forks)) == [0, 1, 2]
    assert [a.num_used for a in cache.allocators] == [3, 4]
    cache.check()


# --- snapshots -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_snapshots_kept", [1, 4])
@models.one_thread()
def test_a_snapshot_is_not_changed_by_whoever_goes_on_from_it(backend, num_snapshots_kept):
    """Its owner goes on, others are found there and go on: in copies. Compared byte by byte, and by logits."""
    hybrid = hybrid_on(backend, models.FLASH, prefix=True, num_snapshots=num_snapshots_kept)
    cache, ids, want = hybrid.cache, tokens(backend, 150), answer(models.FLASH, 150)
    owner = cache.admit(ids.tolist())
    feed(hybrid, owner, ids[:128])
    slot = cache.slot(owner)
    before, name = state_of(cache, slot), owner.hashes[0]
    feed(hybrid, owner, ids)
    assert cache.slot(owner) != slot
    others = [cache.admit([*ids[:128].tolist(), *TEXT]), cache.admit(ids.tolist())]
    assert [(seq.length, cache.slot(seq)) for seq in others] == [(128, slot)] * 2
    hybrid.forward(others[0], torch.tensor(TEXT, device=ids.device) % models.VOCAB)
    check(backend, feed(hybrid, others[1], ids), want[128:])
    assert cache.prefix.ids(0, [name]).tolist() == [slot]
    assert same(state_of(cache, slot), before)
    cache.check()


def test_a_snapshot_is_given_up_where_no_state_is_left():
    """One state for one sequence: it goes on in it, and nobody finds it any more."""
    cache = small_cache(max_seqs=1, num_snapshots=0)
    seq = cache.admit(TEXT)
    run_to(cache, seq, 8)
    cache.commit(seq)
    assert num_snapshots(cache) == 1
    slot = cache.slot(seq)
    before = state_of(cache, slot)
    cache.prepare_forward([(seq, 3)])
    assert cache.slot(seq) == slot
    assert same(state_of(cache, slot), before)
    assert num_snapshots(cache) == 0
    cache.check()
    cache.release(seq)
    again = cache.admit(TEXT)
    assert (again.length, again.num_ahead) == (0, 1), "its entries are still there"


def test_snapshots_are_evicted_by_age():
    """Those that were found last stay longest."""
    cache = small_cache(max_seqs=1, num_snapshots=3)
    texts = [[number] * 9 for number in range(5)]

    def use(number: int) -> int:
        """Where it begins."""
        seq = cache.admit(texts[number])
        start = seq.length
        if start < 8:
            run_to(cache, seq, 8)
        cache.commit(seq)
        cache.release(seq)
        cache.check()
        return start

    assert [use(number) for number in (0, 1, 2, 3)] == [0] * 4  # four states, each a snapshot now
    assert use(0) == 8  # the oldest is the newest again
    assert use(4) == 0  # takes the place of 1
    assert num_snapshots(cache) == 4
    assert cache.prefix.stats.evicted == 1
    starts = {}
    for number in (0, 2, 3, 4):
        starts[number] = use(number)
    assert starts == {0: 8, 2: 8, 3: 8, 4: 8}
    seq = cache.admit(texts[1])
    assert (seq.length, seq.num_ahead) == (0, 1), "of 1 the entries are left"


# --- the pool of states --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshots", [0, 1, 3])
@given(rng=st.randoms(use_true_random=False))
def test_whoever_has_a_state_can_go_on(snapshots, rng):
    """Sequences come, are found, fork, commit and go, in any order. There are blocks of entries enough: no step is ever refused,
    and no sequence sees another's positions in its windows."""
    cache = small_cache(1, max_seqs=4, num_snapshots=snapshots, num_blocks=32, snapshot_every=rng.choice((1, 2)))
    texts = [[number] * 64 for number in range(2)]
    begun = {}  # of each sequence: the first position that is in its windows; of one on a snapshot all are
    for _ in range(30):
        what, live = rng.choice(("admit", "fork", "step", "step", "step", "release")), list(begun)
        if what == "admit" and len(live) < 4:
            seq = cache.admit(rng.choice(texts))
            begun[seq] = seq.length if cache.slot(seq) < 0 else 0
        elif what == "fork" and live and len(live) < 4:
            origin = rng.choice(live)
            begun[cache.fork(origin)] = begun[origin]
        elif what == "release" and live:
            del begun[gone := rng.choice(live)]
            cache.release(gone)
        elif what == "step" and live:
            step(cache, rng, rng.sample(live, rng.randint(1, len(live))))
        cache.check()
        assert cache.allocators[0].num_used <= len(begun)
        for seq, first in begun.items():
            if cache.slot(seq) >= 0:
                held = cache.layers[0].window.positions[cache.slot(seq)]
                assert sorted(held[held >= 0].tolist()) == list(range(max(first, seq.length - 16), seq.length))


def step(cache: HybridCache, rng: random.Random, chosen: list) -> None:
    work = [(seq, min(rng.choice((1, 3, 8 - seq.length % 8, 16)), 63 - seq.length)) for seq in chosen]
    work = [(seq, n) for seq, n in work if n > 0]
    cache.prepare_forward(work)
    cache.acquire(0, backend="torch").write_swa(torch.zeros(sum(n for _, n in work), 16))
    for seq, _ in work:
        if rng.random() < 0.7:
            cache.commit(seq)


def test_out_of_blocks_changes_nothing():
    """Of a step of several, one has no room: lengths, tables, states, names and the step are as they were."""
    cache = small_cache(1, max_seqs=3, num_snapshots=0, num_blocks=6)
    stands_on_snapshot, fork_of, fresh = cache.admit(TEXT), None, None
    run_to(cache, stands_on_snapshot, 16)
    cache.commit(stands_on_snapshot)
    fork_of = cache.fork(stands_on_snapshot)
    fresh = cache.admit([7] * 60)
    seqs = [stands_on_snapshot, fork_of, fresh]

    def standing() -> tuple:
        seen = [(s.length, s.limit, s.num_tokens, list(s.starts), cache.slot(s), cache.block_ids(s).tolist()) for s in seqs]
        names = [sorted(zip(*map(list, cache.prefix.named(group)), strict=True)) for group in (0, 1)]
        return seen, names, [a.counts().tolist() for a in cache.allocators], [a.num_idle for a in cache.allocators]

    before = standing()
    tensors = [cache.block_table, cache.num_shared, *cache.step, *(t for layer in cache.layers for t in layer.tensors)]
    copies = [t.clone() for t in tensors]
    for work in ([(seqs[0], 4), (seqs[1], 40), (seqs[2], 9)], [(seqs[2], 44)], [(seqs[0], 20), (seqs[1], 9), (seqs[2], 4)]):
        with pytest.raises(OutOfBlocks, match=r"prepare_forward\(\).*entries"):
            cache.prepare_forward(work)
        assert standing() == before
        for now, then in zip(tensors, copies, strict=True):
            compare.bitwise(now, then, "a table, the step or a layer")
        cache.check()
    cache.prepare_forward([(seqs[0], 4), (seqs[1], 4), (seqs[2], 9)])
    cache.check()


def test_the_next_token_needs_a_block_that_is_not_there_yet():
    """Blocks come with entries: a block's first three tokens have none. extend() and append() give it as prepare_forward() does."""
    for prefix in (False, True):
        cache = small_cache(1, prefix=prefix)
        seq = cache.admit([])
        for length in range(1, 20):
            cache.extend(seq, [5])
            assert len(cache.block_ids(seq)) == cache.schema.blocks(length)
            cache.check()
        cache.append(seq, [1] * 6)
        for length in range(20, 26):
            cache.extend(seq, 1)
            assert len(cache.block_ids(seq)) == cache.schema.blocks(length)
            cache.check()


def test_a_sequence_without_tokens_has_no_slot():
    """Not that of the one before it in the same row: a step with none of its tokens touches nobody's drafts."""
    cache = small_cache(1, max_seqs=2)
    first, second = cache.admit(TEXT), cache.admit([])
    run_to(cache, first, 5)
    slot = cache.slot(first)
    cache.release(first)
    cache.append(second, [1])
    cache.prepare_forward([(second, 1)])
    empty = cache.admit(TEXT)
    assert (cache.slot(second), cache.slot(empty)) == (slot, -1)
    assert cache.prepare_forward([(empty, 0), (second, 0)]).slots.tolist() == [-1, slot]
    assert cache.slot(empty) == -1
    cache.check()


def test_a_pinned_snapshot_is_not_given_up():
    """Somebody said that it stays: whoever stands on it waits for a state, and nothing has changed."""
    cache = small_cache(1, max_seqs=1, num_snapshots=0)
    seq = cache.admit(TEXT)
    run_to(cache, seq, 8)
    cache.commit(seq)
    cache.prefix.pin(seq.hashes[:1])
    before = state_of(cache, cache.slot(seq))
    assert cache.room(seq) == 0
    with pytest.raises(OutOfBlocks, match="windows"):
        cache.prepare_forward([(seq, 1)])
    assert (seq.length, num_snapshots(cache)) == (8, 1)
    assert same(state_of(cache, cache.slot(seq)), before)
    cache.prefix.unpin(seq.hashes[:1])
    assert cache.room(seq) > 0
    cache.prepare_forward([(seq, 1)])
    assert (seq.length, num_snapshots(cache)) == (9, 0)
    cache.check()


@pytest.mark.parametrize("replay", ["exact", "bounded"])
def test_a_sequence_that_computes_its_state_again_is_not_cut(replay):
    """What it has in between is no state of any tokens. From the beginning it may."""
    layer = LayerSchema(4, overlap=True, window=16, head_dim=16, rope_dim=0, **F32)
    cache = HybridCache(
        HybridSchema((layer,), block_tokens=8),
        num_blocks=16,
        max_seqs=2,
        max_seq_len=64,
        prefix=True,
        snapshot_every=0,
        replay=replay,
    )
    first = cache.admit(list(range(60)))
    cache.prepare_forward([(first, 48)])
    cache.commit(first)
    second = cache.admit(list(range(60)))
    assert 0 < second.length < second.num_ahead * 8 == second.whole_from
    for length in (second.length, second.length - 1):
        with pytest.raises(BadArgument, match=r"whole only after 48|tokens from"):
            cache.truncate(second, length)
    cache.truncate(second, 0)
    assert (second.length, second.num_ahead, second.whole_from, second.is_exact) == (0, 0, 0, True)
    cache.check()
