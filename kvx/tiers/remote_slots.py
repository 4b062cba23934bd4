"""The directory of an arena that peers read and write: which slot has which block, and who is at work on it.

A peer gets a lease before it touches a slot. One that dies lets its lease run out. One that is slower than its lease may meet
another block in its slot: the checksum that travels with every block tells.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvx.wires.wire import WireError


class SlotEntry(NamedTuple):
    slot: int
    checksum: str


@dataclass
class _Lease:
    until_s: float
    slots: list[int]  # held
    keys: dict[int, bytes] = field(default_factory=dict)  # of slots that are being written


class SlotDirectory:
    """Not thread-safe: its owner serves one request at a time."""

    def __init__(self, num_slots: int, *, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_slots, self.lease_s, self._clock = num_slots, lease_s, clock
        self._entries: OrderedDict[bytes, SlotEntry] = OrderedDict()  # the least recently used first
        self._free = list(range(num_slots))
        self._holders = [0] * num_slots  # leases on each slot
        self._named: set[int] = set()  # slots of entries
        self._leases: dict[int, _Lease] = {}
        self._numbers = itertools.count(1)
        self.evicted: list[bytes] = []  # names that made room, until somebody takes note

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def leases(self) -> set[int]:
        """Those that did not run out."""
        self.expire()
        return set(self._leases)

    @property
    def num_leases(self) -> int:
        return len(self.leases)

    def read(self, keys: Sequence[bytes]) -> tuple[int, list[SlotEntry | None]]:
        """A lease on the slots of these names, and where they are. 0: none is there."""
        self.expire()
        found = [self._entries.get(key) for key in keys]
        for key, entry in zip(keys, found, strict=True):
            if entry is not None:
                self._entries.move_to_end(key)
        return self._lease([e.slot for e in found if e is not None]), found

    def reserve(self, keys: Sequence[bytes]) -> tuple[int, list[int]]:
        """A lease on slots to write these names into; -1 where a block is there already, -2 where there is no room."""
        self.expire()
        slots: list[int] = []
        coming: set[bytes] = set()
        for key in keys:
            if key in self._entries:
                self._entries.move_to_end(key)
            slots.append(-1 if key in self._entries or key in coming else self._take())
            coming.add(key)
        taken = {slot: key for slot, key in zip(slots, keys, strict=True) if slot >= 0}
        number = self._lease(list(taken))
        if number:
            self._leases[number].keys = taken
        return number, slots

    def commit(self, number: int, checksums: dict[int, str]) -> list[int]:
        """The slots of a lease are written: their names can be read from now on. Which of them are."""
        self.expire()
        if number not in self._leases:
            raise WireError(f"lease {number} ran out before its blocks were written: they were discarded.")
        kept = []
        for slot, key in self._leases[number].keys.items():
            if slot in checksums and key not in self._entries:
                self._entries[key] = SlotEntry(slot, checksums[slot])
                self._named.add(slot)
                kept.append(slot)
        self.end(number)
        return kept

    def drop(self, key: bytes) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._named.discard(entry.slot)
        if not self._holders[entry.slot]:
            self._free.append(entry.slot)
        return True

    def end(self, number: int) -> None:
        """Give back a lease. What it had begun to write is gone."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return
        for slot in lease.slots:
            self._holders[slot] -= 1
            if not self._holders[slot] and slot not in self._named:
                self._free.append(slot)

    def expire(self) -> None:
        now = self._clock()
        for number in [n for n, lease in self._leases.items() if lease.until_s <= now]:
            self.end(number)

    def check(self) -> None:
        """Every slot is free, named or leased; counts are what the leases make."""
        held = [slot for lease in self._leases.values() for slot in lease.slots]
        assert self._holders == [held.count(slot) for slot in range(self.num_slots)]
        named = [e.slot for e in self._entries.values()]
        assert len(set(named)) == len(named)
        assert set(named) == self._named
        assert len(set(self._free)) == len(self._free)
        assert set(self._free) | set(named) | set(held) == set(range(self.num_slots))
        assert not set(self._free) & (set(named) | set(held))

    def _take(self) -> int:
        """A free slot, or that of the block used longest ago which nobody holds; -2: all are held."""
        if not self._free:
            oldest = next((key for key, e in self._entries.items() if not self._holders[e.slot]), None)
            if oldest is None:
                return -2
            self.drop(oldest)
            self.evicted.append(oldest)
        return self._free.pop()

    def _lease(self, slots: list[int]) -> int:
        if not slots:
            return 0
        number = next(self._numbers)
        self._leases[number] = _Lease(self._clock() + self.lease_s, slots)
        for slot in slots:
            self._holders[slot] += 1
        return number
