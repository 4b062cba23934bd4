"""Ctrl-C at every point of every call of a cache: check() passes, the call happened or it did not, and the next one works."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

import kvx
from kvx.cache import (
    admitted,
    backing,
    batch,
    block_table,
    blocks,
    group_table,
    groups,
    guard,
    names,
    paged,
    prefix,
    recall,
    resuming,
    state_table,
)
from tests.cache.test_paged import BS, assert_content, make, write_step
from tests.interrupts import interrupted_by_another_process, signalled_at_every_point

CACHE = (
    admitted,
    backing,
    batch,
    block_table,
    blocks,
    group_table,
    groups,
    guard,
    names,
    paged,
    prefix,
    recall,
    resuming,
    state_table,
)
LONG = list(range(29))


class Kept:
    """A backing that has what was offered, as far as names go: blocks come back with whatever bytes."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()

    def offer(self, group, hashes, ids):
        self.names.update(hashes)

    def find(self, group, hashes):
        return [h in self.names for h in hashes]

    def load(self, group, hashes, ids):
        return len(hashes)


def crowded(window: int, is_prefix: bool, is_backed: bool = False) -> kvx.PagedCache:
    """Three sequences, two of which share blocks; names of a fourth, whose blocks the next one evicts."""
    cache = make(27 if is_prefix else 40, window=window, prefix=is_prefix, max_events=100)
    if is_backed:
        cache.attach(Kept())
    for tokens in (LONG, [50 + t for t in LONG], LONG, [100 + t for t in LONG]):
        seq = cache.admit(tokens)
        n = len(tokens) - seq.length
        cache.extend(seq, n)
        write_step(cache, seq, n, tokens)
        cache.commit(seq)
    cache.release(cache.sequences[-1])
    cache.fork(cache.sequences[0])
    if is_prefix:
        cache.prefix.pin(cache.sequences[1].hashes[:2])
    return cache


def truth(cache: kvx.PagedCache) -> tuple:
    seqs = [(s.id, s.length, s.num_tokens, s.tokens.tolist(), s.num_cached) for s in cache.sequences]
    return seqs, [] if cache.prefix is None else [sorted(p.items()) for p in cache.prefix._pins]


def _extend(n):
    return lambda c: c.extend(c.sequences[0], n)


CALLS = {
    "admit": lambda c: c.admit(list(range(200, 230))),
    "admit a prefix": lambda c: c.admit(LONG),
    "append": lambda c: c.append(c.sequences[0], [1, 2]),
    "extend by one": _extend([7]),
    "extend a copy": lambda c: c.extend(c.sequences[3], [7, 8]),
    "extend and evict": _extend(list(range(25))),
    "commit": lambda c: c.commit(c.sequences[0]),
    "fork": lambda c: c.fork(c.sequences[0]),
    "truncate": lambda c: c.truncate(c.sequences[1], 27),
    "release": lambda c: c.release(c.sequences[2]),
    "plan": lambda c: c.plan([(c.sequences[1], 1)]),
    "room": lambda c: c.room(c.sequences[1]),
    "stats": lambda c: c.stats(),
    "pin": lambda c: c.prefix.pin(c.sequences[0].hashes),
    "unpin": lambda c: c.prefix.unpin(c.sequences[1].hashes[:2]),
    "clear": lambda c: c.prefix.clear(),
    "lookup": lambda c: c.prefix.lookup(c.sequences[0].hashes, c.kinds),
    "put": lambda c: c.prefix.put(0, [b"0" * 16], c.blocks(c.sequences[0])[-1:]),
}
OF_NAMES = ("admit a prefix", "pin", "unpin", "clear", "lookup", "put")


@pytest.mark.parametrize("is_hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize(
    ("kind", "window", "name"),
    [(k, w, n) for k, w in (("plain", 0), ("prefix", 6), ("backed", 6)) for n in CALLS if k != "plain" or n not in OF_NAMES],
)
def test_ctrl_c_at_every_point_of_a_call(kind, window, name, is_hooked):
    call, before, after = CALLS[name], crowded(window, kind != "plain"), crowded(window, kind != "plain")
    call(after)
    may = (truth(before), truth(after))

    def prepare():
        made = crowded(window, kind != "plain", kind == "backed")
        return made, lambda: call(made)

    count = 0
    for made in signalled_at_every_point(prepare, *CACHE, is_hooked=is_hooked):
        made.check()
        got = truth(made)
        if name != "clear" and kind != "backed":  # names of groups go one after the other; a backing brings back more
            assert got[0] in (may[0][0], may[1][0])
            assert got[1] in (may[0][1], may[1][1])
        if name in ("admit", "admit a prefix", "fork"):
            assert got[0] == may[0][0]  # nobody has the new sequence
        if "extend" not in name:  # of which the new tokens were not written
            for seq in made.sequences:
                assert_content(made, seq, seq.tokens.tolist())
        made.extend(made.sequences[1], [3])
        made.release(made.admit([1, 2, 3]))
        for seq in made.sequences:
            made.release(seq)
        if made.prefix is not None:
            made.prefix.clear()
        made.check()
        assert all(a.num_free == a.num_blocks for a in made.allocators)
        count += 1
    assert count >= 1


OF_NEW = {
    "admit": lambda c, out: c.admit(list(range(200, 230)), out=out),
    "admit a prefix": lambda c, out: c.admit(LONG, out=out),
    "fork": lambda c, out: c.fork(c.sequences[0], out=out),
}


@pytest.mark.parametrize("name", OF_NEW)
def test_a_new_sequence_is_in_out_wherever_ctrl_c_comes(name):
    """Also when its result is lost on the way back, which the last points here are."""

    def prepare():
        made, out = crowded(6, True), []
        return (made, out), lambda: OF_NEW[name](made, out)

    lost = 0
    for made, out in signalled_at_every_point(prepare, *CACHE, sys.modules[__name__], is_hooked=True):
        made.check()
        there = [seq for seq in out if not seq.is_released]
        assert made.sequences[4:] == tuple(there)
        lost += len(there)
    assert lost


def test_out_is_a_list():
    cache = crowded(0, False)
    for call in (lambda: cache.admit([1], out=5), lambda: cache.fork(cache.sequences[0], out=())):
        with pytest.raises(kvx.BadArgument, match=r"\(\): out is .*; it must be a list"):
            call()
    assert cache.num_seqs == 4


ALLOCATOR = {
    "allocate": lambda a: a.allocate(1),
    "allocate and evict": lambda a: a.allocate(3),
    "retain": lambda a: a.retain([0, 1, 1, 4]),
    "release": lambda a: a.release([0, 1, 0]),
    "keep": lambda a: a.keep([0, 2]),
    "forget": lambda a: a.forget([1, 4, 5]),
}


def some_blocks() -> kvx.BlockAllocator:
    """Eight: 0 to 3 used, 0 twice; 4 to 6 idle; 7 free."""
    a = kvx.BlockAllocator(8)
    a.allocate(7)
    a.retain([0])
    a.keep([1, 4, 5, 6])
    a.release([4, 5, 6])
    return a


@pytest.mark.parametrize("name", ALLOCATOR)
def test_ctrl_c_at_every_point_of_an_allocators_call(name):
    after = some_blocks()
    ALLOCATOR[name](after)
    may = [some_blocks().counts().tolist(), after.counts().tolist()]

    def prepare():
        made = some_blocks()
        return made, lambda: ALLOCATOR[name](made)

    count = 0
    for made in signalled_at_every_point(prepare, blocks, guard):
        made.check()
        got = made.counts().tolist()
        assert got in may
        if "allocate" in name:
            assert got == may[0]  # nobody has the ids
        made.release(made.allocate(made.num_available))
        made.check()
        count += 1
    assert count > 2


@pytest.mark.parametrize("name", ["match", "take", "pin", "unpin"])
def test_ctrl_c_in_a_prefix_cache_on_allocators_of_its_own(name):
    def prepare():
        allocators = [kvx.BlockAllocator(8), kvx.BlockAllocator(8)]
        p = kvx.PrefixCache(allocators, BS)
        hashes = p.hashes(np.arange(16, dtype=np.int32))
        for group, a in enumerate(allocators):
            ids = a.allocate(4)
            p.put(group, hashes, ids)
            a.release(ids)
        p.pin(hashes[:2])
        calls = {"match": (hashes, (0, 0)), "take": (hashes, 3, (0, 0)), "pin": (hashes,), "unpin": (hashes[:2],)}
        return (p, allocators), lambda: getattr(p, name)(*calls[name])

    may = ([2, 2], [4, 4]) if name == "pin" else ([2, 2], [0, 0]) if name == "unpin" else ([2, 2],)
    count = 0
    for p, allocators in signalled_at_every_point(prepare, blocks, guard, prefix):
        p.check()
        assert [a.num_used for a in allocators] in may
        assert [len(pins) for pins in p._pins] == [a.num_used for a in allocators]
        p.clear()
        assert all(a.num_free == 8 for a in allocators)
        count += 1
    assert count > 2


def test_a_second_ctrl_c_while_things_are_counted_again():
    """The first breaks an extend, the second the counting: the next call counts."""

    def prepare():
        made = crowded(6, True)
        made._tables[1].table[made.sequences[0].row, 8] = made.allocators[1].allocate_one()  # as if broken off there
        made._guard.is_torn = True
        return made, lambda: made.room()

    count = 0
    for made in signalled_at_every_point(prepare, *CACHE):
        made.check()
        assert not made._guard.is_torn
        count += 1
    assert count > 50


def test_ctrl_c_from_another_process():
    interrupted(300)


def interrupted(wanted: int) -> None:
    cache, rng = make(40, window=6), random.Random(0)
    bases = [[rng.randrange(50) for _ in range(40)] for _ in range(2)]

    def work():
        cache.check()
        while True:
            seqs = cache.sequences
            op = rng.choice(["admit", "extend", "one", "fork", "truncate", "release", "pin", "clear"]) if seqs else "admit"
            try:
                if op == "admit":
                    cache.admit(rng.choice(bases)[: rng.randint(1, 40)])
                    continue
                seq = rng.choice(seqs)
                if op == "extend":
                    cache.extend(seq, seq.num_tokens - seq.length)
                    cache.commit(seq)
                elif op == "one":
                    cache.extend(seq, [rng.randrange(50)])
                    cache.commit(seq)
                elif op == "fork":
                    cache.fork(seq)
                elif op == "truncate":
                    cache.truncate(seq, rng.randint(0, seq.length))
                elif op == "pin":
                    cache.prefix.pin(seq.hashes[:1])
                elif op == "clear" and rng.random() < 0.1:
                    cache.prefix.clear()
                else:
                    cache.release(seq)
            except (kvx.OutOfBlocks, kvx.BadArgument):
                cache.release(rng.choice(cache.sequences)) if cache.sequences else None

    assert interrupted_by_another_process(work, wanted) == wanted
    cache.check()
    for seq in cache.sequences:
        cache.release(seq)
    cache.prefix.clear()
    assert all(a.num_free == a.num_blocks for a in cache.allocators)
