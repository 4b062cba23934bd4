"""Resuming: where a new sequence goes on. What is there of its tokens in the cache, and in what stands behind it.

A prefix is found at the deepest position at which every group can go on: with all blocks of layers that see all tokens, the last
window of sliding ones, and for states a snapshot exactly there.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

import numpy as np
from numpy.typing import NDArray

from kvx.cache.backing import Backing
from kvx.cache.group_table import GroupTable
from kvx.cache.guard import Guard
from kvx.cache.kinds import State
from kvx.cache.names import BlockHash
from kvx.cache.prefix import PrefixCache
from kvx.cache.recall import Recall
from kvx.cache.sequence import Sequence


class Resuming:
    """Of one cache. Used under its lock."""

    def __init__(self, tables: Listing[GroupTable], max_seqs: int, guard: Guard) -> None:
        self._tables, self.block_size, self._guard = tables, tables[0].block_size, guard
        self._running = _join_states(tables, max_seqs)
        self._kinds = tuple(t.kind for t in tables)
        self._late = [t for t in tables if t.kind.is_ahead]  # their blocks come with entries, not with tokens

    def find(self, seq: Sequence, prefix: PrefixCache, root: BlockHash) -> None:
        """What the cache has of a new sequence's tokens, never all of them: the last is left to compute."""
        seq.root = root
        full = max(0, seq.num_tokens - 1) // self.block_size
        if not full:
            return
        data = seq.token_row[: full * self.block_size].tobytes()
        seq.hashes = prefix.chain(data, seq.root, seq.extras)
        n, found = prefix.find(seq.hashes, self._kinds)
        prefix.count(len(seq.hashes), n)
        if not n:
            return
        held: list[NDArray[np.int32]] = []
        prefix.hold_checked(found, n, self._kinds, held)
        for table, ids in zip(self._tables, held, strict=True):
            table.hold(seq, ids, n)
        seq.length = seq.num_cached = seq.limit = seq.num_stored = n * self.block_size

    def bring_back(self, seq: Sequence, prefix: PrefixCache, backing: Backing) -> int:
        """Blocks more than the sequence has, as far as the cache and its backing have them together."""
        bs, done = self.block_size, seq.length // self.block_size
        end = max(0, seq.num_tokens - 1) // bs
        if prefix.finder is not None and done < end and not seq.extra and not seq.extras:
            prefix.finder.look(seq.token_row[: end * bs], seq.hashes[:end], done)
        stretch = prefix.stretch(seq, done, end) if prefix.has_listeners and done < end else None
        recall = Recall(self._tables, prefix, backing, seq.hashes[done:end], done, stretch)
        try:
            count = recall.run()
            if count:
                self._hold_after(seq, recall, count)
        except BaseException:  # whatever a backing raises: there are references that are no sequence's
            self._guard.is_torn = True
            self._guard.mend()
            raise
        prefix.stats.tokens_brought += count * bs
        return count

    def _hold_after(self, seq: Sequence, recall: Recall, count: int) -> None:
        """The sequence goes on after `count` blocks more."""
        row, done = seq.row, recall.done
        held = [t.hold_after(seq, done + part.first, part.ids) for t, part in zip(self._tables, recall.parts, strict=True)]
        running = [recall.parts[t.index].ids[-1] for t in self._tables if t.kind.has_state]
        starts, length = [start for start, _ in held], (done + count) * self.block_size
        # From here on without a call: states, what is held and the position change together, wherever Ctrl-C comes.
        self._running[row] = running
        seq.starts = starts
        seq.length = seq.num_cached = seq.limit = seq.num_stored = length
        for table, (start, left) in zip(self._tables, held, strict=True):
            if not table.kind.has_state:
                table.table[row, :start] = -1
            table.allocator.release_checked(left)

    def run_ahead(self, seq: Sequence, prefix: PrefixCache) -> None:
        """Hold what is there behind the sequence's state. Where it has none, begin to compute it again.

        Only in a cache of entries and states: an entry that is there is not written again, K and V would be.
        """
        if not self._late:
            return
        states, tables = [t.kind for t in self._tables if isinstance(t.kind, State)], self._late
        if not states or len(tables) + len(states) != len(self._tables):
            return
        bs, have = self.block_size, seq.length // self.block_size
        ids = [prefix.ids(t.index, seq.hashes[: max(0, seq.num_tokens - 1) // bs]) for t in tables]
        n = min(int(np.argmax(np.append(found, -1) < 0)) for found in ids)
        if n <= have:
            return
        for table, found in zip(tables, ids, strict=True):
            table.table[seq.row, have:n] = table.allocator.retain_checked(found[have:n])
        seq.num_ahead, seq.num_stored = n, (n - 1) * bs  # where they end, the state may be left as a snapshot
        if seq.length or any(kind.replay < 0 for kind in states):  # on from a snapshot, or from the first token
            return
        start = max(0, n * bs - max(kind.replay for kind in states))
        starts = [1 if t.kind.has_state and start else seq.starts[t.index] for t in self._tables]
        is_exact = start == 0 or all(kind.is_replay_exact for kind in states)
        self._running[seq.row] = -1
        seq.length = seq.num_cached = seq.limit = start
        seq.starts, seq.is_exact, seq.whole_from = starts, is_exact, n * bs if start else 0


def _join_states(tables: Listing[GroupTable], max_seqs: int) -> NDArray[np.int32]:
    """[max_seqs, groups of states]: the tables of all of them in one array, so that a sequence's states change in one statement."""
    states = [t for t in tables if t.kind.has_state]
    running = np.full((max_seqs, len(states)), -1, np.int32)
    for n, table in enumerate(states):
        table.table = running[:, n : n + 1]
    return running
