"""Admitted: the sequences of a cache, each with a row of every table. What must hold of them can be recomputed: to check it, and to
have it again after an interrupt."""

from __future__ import annotations

from collections.abc import Sequence as Listing

import numpy as np
from numpy.typing import NDArray

from kvx.cache.group_table import GroupTable
from kvx.cache.prefix import PrefixCache
from kvx.cache.sequence import Sequence
from kvx.errors import InternalError, OutOfBlocks


class Admitted:
    def __init__(self, owner: object, max_seqs: int, max_seq_len: int, groups: Listing[GroupTable]) -> None:
        self.tokens = np.zeros((max_seqs, max_seq_len), np.int32)  # pages of it exist once they are written to
        self.live: dict[int, Sequence] = {}
        self._owner, self._groups = owner, groups
        self.free_rows = list(range(max_seqs - 1, -1, -1))
        self._next_id = 0

    def new(self, call: str, out: list[Sequence]) -> Sequence:
        """Also put into `out`, before it lives: the caller has it wherever Ctrl-C comes."""
        if not self.free_rows:
            raise OutOfBlocks(f"{call}(): all {len(self.tokens)} sequences are in use (max_seqs). Release one first.")
        row = self.free_rows[-1]
        seq = Sequence(self._owner, self._next_id, row, self.tokens[row], len(self._groups))
        self._next_id += 1
        out.append(seq)
        del self.free_rows[-1]
        self.live[seq.id] = seq
        return seq

    def leave(self, seq: Sequence) -> None:
        del self.live[seq.id]
        self.free_rows.append(seq.row)

    def count_refs(self, group: int) -> NDArray[np.int64]:
        """Of every block of a group: the sequences that hold it, and its pins."""
        table = self._groups[group]
        refs = np.zeros(table.allocator.num_blocks, np.int64)
        for seq in self.live.values():
            np.add.at(refs, table.held(seq), 1)
        for block, pins in table.allocator.pins().items():
            refs[block] += pins
        return refs

    def mend(self) -> None:
        """After an interrupt: what follows from which sequences live, and from their lengths."""
        for seq in [s for s in self.live.values() if s.cache is not self._owner]:
            del self.live[seq.id]
        taken = {s.row for s in self.live.values()}
        self.free_rows[:] = [row for row in range(len(self.tokens) - 1, -1, -1) if row not in taken]
        for seq in self.live.values():
            seq.limit = seq.length  # extend asks whose the last block is
            for table, first in zip(self._groups, seq.starts, strict=True):
                table.table[seq.row, :first] = -1

    # --- what must hold ---------------------------------------------------------------------------------------------------

    def check(self, prefix: PrefixCache | None) -> None:
        """Every reference is a sequence's or a pin's, every table entry a block that is used, every name the hash of its tokens."""
        seqs = list(self.live.values())
        rows = sorted([*self.free_rows, *(s.row for s in seqs)])
        if rows != list(range(len(self.tokens))):
            raise InternalError(f"PagedCache.check(): rows are {rows}; each of {len(self.tokens)} is free or one sequence's.")
        for i, table in enumerate(self._groups):
            for seq in seqs:
                self._check_row(table, seq)
            refs = self.count_refs(i)
            wrong = np.flatnonzero(refs != table.allocator.counts())
            if len(wrong):
                b = int(wrong[0])
                raise InternalError(
                    f"PagedCache.check(): group {i}, block {b}: {refs[b]} owners, {table.allocator.refs(b)} references."
                )
            if prefix is None:  # which asks them too
                table.allocator.check_counts()
        for seq in seqs:
            self._check_sequence(seq, prefix)
        if prefix is not None:
            prefix.check_names()

    def _check_row(self, table: GroupTable, seq: Sequence) -> None:
        i, row, first, have = table.index, table.table[seq.row], seq.starts[table.index], table.num_blocks(seq, seq.length)
        if (row[first:have] < 0).any() or (row[:first] != -1).any() or first > have:
            raise InternalError(f"PagedCache.check(): group {i}, {seq}: blocks are {row[:have]}, held from {first} on.")
        if first > table.first_block(seq.length) and not table.kind.has_state:
            raise InternalError(f"PagedCache.check(): group {i}, {seq}: its window sees blocks before {first}.")

    def _check_sequence(self, seq: Sequence, prefix: PrefixCache | None) -> None:
        if not 0 <= seq.length <= seq.num_tokens <= self.tokens.shape[1]:
            raise InternalError(f"PagedCache.check(): {seq}: length, num_tokens and max_seq_len are not in order.")
        bs = self._groups[0].block_size
        if not seq.length <= seq.limit <= -(-seq.length // bs) * bs:
            raise InternalError(f"PagedCache.check(): {seq}: may write up to {seq.limit}.")
        if seq.limit > seq.length:
            for table in self._groups:
                if table.is_last_shared(seq):
                    raise InternalError(f"PagedCache.check(): {seq}: would write into a block that others read.")
        if prefix is not None:
            want = prefix.chain(seq.tokens[: len(seq.hashes) * bs].tobytes(), seq.root, seq.extras)
            if want != seq.hashes or seq.num_stored > min(len(seq.hashes) * bs, max(seq.length, seq.num_ahead * bs)):
                raise InternalError(f"PagedCache.check(): {seq}: its hashes are not those of its tokens.")
