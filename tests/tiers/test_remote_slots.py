"""The directory of a remote arena, alone: random requests, leases that run out, and every slot accounted for."""

from __future__ import annotations

import random

import pytest

from kvx.tiers.remote_slots import SlotDirectory
from kvx.wires.wire import WireError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seed", range(8))
def test_random_requests(seed):
    rng, clock = random.Random(seed), Clock()
    slots = SlotDirectory(6, lease_s=5.0, clock=clock)
    reads, writes, names = [], [], [bytes([n]) for n in range(10)]
    for _ in range(600):
        keys = rng.sample(names, rng.randrange(4))
        what = rng.choice(["read", "reserve", "commit", "end", "drop", "wait"])
        if what == "read":
            lease, found = slots.read(keys)
            assert [e is not None for e in found] == [k in slots for k in keys]
            assert bool(lease) == any(found)
            reads.append(lease)
        elif what == "reserve":
            lease, where = slots.reserve(keys)
            assert len({s for s in where if s >= 0}) == sum(s >= 0 for s in where)
            writes.append((lease, where))
        elif what == "commit" and writes:
            lease, where = writes.pop(rng.randrange(len(writes)))
            try:
                kept = slots.commit(lease, {s: "sum" for s in where if s >= 0})
                assert set(kept) <= set(where)
            except WireError:
                pass  # it ran out, or there was nothing to write
        elif what == "end" and reads:
            slots.end(reads.pop(rng.randrange(len(reads))))
        elif what == "drop":
            had = [k in slots for k in keys]
            assert [slots.drop(k) for k in keys] == had
        elif what == "wait":
            clock.now += rng.random() * 2
        slots.check()
    clock.now += 10
    assert slots.num_leases == 0
    slots.check()


def test_a_slot_that_is_read_is_not_taken():
    slots = SlotDirectory(1, lease_s=5.0)
    lease, where = slots.reserve([b"a"])
    assert (where, slots.commit(lease, {0: "sum"})) == ([0], [0])
    reading, found = slots.read([b"a"])
    assert found[0].checksum == "sum"
    assert slots.reserve([b"b"]) == (0, [-2])
    slots.drop(b"a")
    assert slots.reserve([b"b"]) == (0, [-2])  # dropped, and still being read
    slots.end(reading)
    assert slots.reserve([b"b"])[1] == [0]


def test_who_dies_while_writing_leaves_nothing():
    clock = Clock()
    slots = SlotDirectory(2, lease_s=5.0, clock=clock)
    lease, _ = slots.reserve([b"a", b"b"])
    clock.now = 5.0
    with pytest.raises(WireError, match="ran out"):
        slots.commit(lease, {0: "sum", 1: "sum"})
    assert (len(slots), slots.num_leases) == (0, 0)
    assert sorted(slots.reserve([b"c", b"d"])[1]) == [0, 1]


def test_two_who_write_one_name():
    slots = SlotDirectory(3, lease_s=5.0)
    (one, _), (two, _) = slots.reserve([b"a"]), slots.reserve([b"a"])
    assert len(slots.commit(two, dict.fromkeys(range(3), "two"))) == 1
    assert slots.commit(one, dict.fromkeys(range(3), "one")) == []
    assert slots.read([b"a"])[1][0].checksum == "two"
    slots.check()
