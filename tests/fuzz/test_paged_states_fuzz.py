"""The first calls of tests/fuzz/paged_states.py, in every run of the tests; and that they see a cache that is broken."""

from __future__ import annotations

import numpy as np
import pytest

from kvx import PagedCache
from kvx.cache.block_table import BlockTable
from kvx.cache.kinds import Sliding
from kvx.cache.state_table import StateTable
from tests.fuzz import paged_states


def test_random_calls_leave_every_block_as_it_must_be():
    seen = paged_states.run(4000, 0)
    for what in ("hits", "snapshots", "brought back", "evicted", "drafts", "out of blocks", "truncate refused"):
        assert seen[what] > 10, what


def not_copied(monkeypatch):
    """A sequence goes on in the snapshot itself."""
    grow = StateTable.grow
    monkeypatch.setattr(StateTable, "grow", lambda self, seq, growth, *n: None if growth.is_copied else grow(self, seq, growth, *n))


def named_a_block_off(monkeypatch):
    nameable = StateTable.nameable

    def off(self, seq, first):
        at, ids = nameable(self, seq, first)
        return max(0, at - 1), ids

    monkeypatch.setattr(StateTable, "nameable", off)


def read_after_it_was_given_back(monkeypatch):
    """Windows end a block early."""
    monkeypatch.setattr(Sliding, "first_block", lambda self, n, size: np.maximum(0, n - self.window + 1 + size) // size)


def left_after_a_copy(monkeypatch):
    """A sequence that has a copy goes on where it was."""
    copy = BlockTable.copy_on_write

    def stay(self, seq, column):
        block = self.table[seq.row, column]
        copy(self, seq, column)
        self.table[seq.row, column] = block

    monkeypatch.setattr(BlockTable, "copy_on_write", stay)


def not_cleared(monkeypatch):
    monkeypatch.setattr(StateTable, "clear_block", lambda self, block: None)


@pytest.mark.parametrize("damage", [not_copied, named_a_block_off, read_after_it_was_given_back, left_after_a_copy, not_cleared])
def test_a_broken_cache_is_seen_by_its_contents(monkeypatch, damage):
    """Without check(), which sees most of these too."""
    monkeypatch.setattr(PagedCache, "check", lambda self: None)
    damage(monkeypatch)
    with pytest.raises(AssertionError, match=r"^call \d+ of the cache that begins with \d+: "):
        paged_states.run(5000, 0)
