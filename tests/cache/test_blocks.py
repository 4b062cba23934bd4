"""BlockAllocator against a model of sets and lists; check() after every call."""

from __future__ import annotations

import random

import numpy as np
import pytest

import kvx


class Model:
    """The same states, one block at a time."""

    def __init__(self, n: int) -> None:
        self.free, self.idle, self.refs, self.kept = set(range(n)), [], {}, set()

    def release(self, ids: list[int]) -> None:
        gone = []
        for b in ids:
            self.refs[b] -= 1
            if not self.refs[b]:
                del self.refs[b]
                gone.append(b)
        self.idle += [b for b in reversed(gone) if b in self.kept]
        self.free |= {b for b in gone if b not in self.kept}

    def retain(self, ids: list[int]) -> None:
        for b in ids:
            if b in self.idle:
                self.idle.remove(b)
            self.refs[b] = self.refs.get(b, 0) + 1

    def forget(self, ids: list[int]) -> None:
        for b in ids:
            self.kept.discard(b)
            if b in self.idle:
                self.idle.remove(b)
                self.free.add(b)


def same(a: kvx.BlockAllocator, m: Model) -> None:
    a.check()
    assert (a.num_free, a.num_idle, a.num_used) == (len(m.free), len(m.idle), len(m.refs))
    assert {b: a.refs(b) for b in range(a.num_blocks) if a.refs(b)} == m.refs


@pytest.mark.parametrize("seed", range(8))
def test_random_calls_match_the_model(seed):
    rng = random.Random(seed)
    n = rng.choice([1, 5, 17, 40])
    evicted: list[int] = []
    a, m = kvx.BlockAllocator(n, on_evict=lambda ids: evicted.extend(ids.tolist())), Model(n)
    for _ in range(400):
        used = sorted(m.refs)
        some = rng.sample(used, rng.randint(0, len(used)))
        op = rng.choice(["allocate", "one", "retain", "release", "release", "keep", "forget", "bad"])
        if op in ("allocate", "one"):
            want = 1 if op == "one" else rng.randint(0, n)
            oldest = m.idle[: max(0, want - len(m.free))]
            evicted.clear()
            if want > len(m.free) + len(m.idle):
                with pytest.raises(kvx.OutOfBlocks) as error:
                    a.allocate(want) if op == "allocate" else a.allocate_one()
                assert (error.value.needed, error.value.free, error.value.idle) == (want, len(m.free), len(m.idle))
            else:
                got = a.allocate(want).tolist() if op == "allocate" else [a.allocate_one()]
                assert len(set(got)) == want
                assert set(got) <= m.free | set(oldest)
                assert evicted == oldest
                m.forget(oldest)
                m.free -= set(got)
                m.refs |= dict.fromkeys(got, 1)
        elif op == "retain":
            some += rng.sample(m.idle, rng.randint(0, len(m.idle)))
            some += some[: rng.randint(0, len(some))] if used else []
            a.retain(some)
            m.retain(some)
        elif op == "release":
            some += [b for b in some if m.refs[b] > 1 and rng.random() < 0.3]
            a.release(some)
            m.release(some)
        elif op == "keep":
            a.keep(some)
            m.kept |= set(some)
        elif op == "forget":
            some = rng.sample(range(n), rng.randint(0, n))
            a.forget(some)
            m.forget(some)
        else:
            loose = sorted(m.free) + m.idle
            if loose:
                with pytest.raises(kvx.BadArgument, match="references"):
                    a.release([*some, rng.choice(loose)])
        same(a, m)


def test_later_blocks_are_evicted_before_earlier():
    a = kvx.BlockAllocator(6)
    first, second = a.allocate(3), a.allocate(3)
    a.keep(first)
    a.keep(second)
    a.release(first)
    a.release(second)
    order = [int(a.allocate_one()) for _ in range(6)]
    assert order == [*first.tolist()[::-1], *second.tolist()[::-1]]


def test_the_queue_is_tidied_up():
    a = kvx.BlockAllocator(4)
    ids = a.allocate(4)
    a.keep(ids)
    for _ in range(100):  # each leaves an entry behind
        a.release(ids)
        a.retain(ids)
        a.check()
    a.release(ids)
    assert a.allocate(4).tolist() == ids.tolist()[::-1]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([9], "block 9 is foreign"),
        ([-1], "block -1 is foreign"),
        ([0.5], "float64"),
        ([[0]], "shape"),
        ([0, 0], "released more often"),
    ],
    ids=["past", "negative", "float", "matrix", "twice"],
)
def test_bad_ids_are_refused_whole(ids, words):
    a = kvx.BlockAllocator(4)
    a.allocate(2)
    before = a.counts()
    with pytest.raises(kvx.BadArgument, match=words):
        a.release([1, *ids] if ids != [[0]] else ids)
    np.testing.assert_array_equal(a.counts(), before)
    a.check()


def test_free_blocks_have_nothing_to_retain_or_keep():
    a = kvx.BlockAllocator(2)
    for call in (a.retain, a.keep):
        with pytest.raises(kvx.BadArgument, match="block 1 is free"):
            call([1])
    with pytest.raises(kvx.BadArgument, match="n is -1"):
        a.allocate(-1)
    with pytest.raises(kvx.BadArgument, match="num_blocks is -3"):
        kvx.BlockAllocator(-3)
    with pytest.raises(kvx.BadArgument, match="foreign"):
        a.refs(2)


def test_check_finds_what_is_wrong():
    a = kvx.BlockAllocator(4)
    a.allocate(2)
    a._refs[0] = 0
    with pytest.raises(kvx.InternalError, match="block 0 is in 0 states"):
        a.check()
