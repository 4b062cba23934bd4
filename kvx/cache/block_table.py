"""BlockTable: which blocks each sequence has, of one kind, and how that changes. It knows ids only: neither tokens nor content.

Every call answers for one sequence; a cache asks all its tables before it changes any. What stands in a row behind a sequence's
length is nobody's until the length changes, which is the last that does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Listing
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvx.cache.blocks import BlockAllocator, BlockIds
from kvx.cache.kinds import GroupKind
from kvx.cache.sequence import Sequence


class Growth(NamedTuple):
    """What a group does for a sequence that grows."""

    have: int  # columns in use before
    want: int  # and after
    is_copied: bool  # others read the last block: it is copied before it is written to
    need: int  # blocks it takes


class BlockTable:
    """Of a kind whose blocks hold tokens: one column a block."""

    def __init__(self, kind: GroupKind, allocator: BlockAllocator, index: int, shape: tuple[int, int, int]) -> None:
        max_seqs, max_blocks, self.block_size = shape
        self.kind, self.allocator = kind, allocator
        self.index = index  # of the group: which of a sequence's starts is its
        self.gives_back = kind.gives_back  # blocks that no later token sees, as a sequence grows
        # One row a sequence; -1: given back, or not yet there.
        self.table = np.full((max_seqs, kind.num_columns(max_blocks)), -1, np.int32)

    # --- what a sequence has ----------------------------------------------------------------------------------------------

    def num_blocks(self, seq: Sequence, length: int) -> int:
        """Columns in use at this length."""
        n = self.kind.num_blocks(length, self.block_size)
        return max(n, seq.num_ahead) if self.kind.is_ahead else n

    def held(self, seq: Sequence) -> NDArray[np.int32]:
        """The blocks that it holds a reference to, as a view."""
        return self.table[seq.row, seq.starts[self.index] : self.num_blocks(seq, seq.length)]

    # --- what is needed to grow -------------------------------------------------------------------------------------------

    def growth(self, seq: Sequence, end: int) -> Growth:
        """How it would grow to `end`. Nothing changes."""
        have, want = self.num_blocks(seq, seq.length), self.num_blocks(seq, end)
        # A last block that is full is not written to: most sequences that grow by a block stand so.
        is_copied = seq.length == seq.limit and have * self.block_size > seq.length and self.is_last_shared(seq)
        return Growth(have, want, is_copied, want - have + is_copied)

    def growths(self, ends: Listing[tuple[Sequence, int]]) -> list[Growth]:
        """How these would grow together. Where all who have a block are among them, the last to go on has it alone."""
        found = [self.growth(seq, end) for seq, end in ends]
        if len(ends) == 1:
            return found
        seen: Counter[int] = Counter()
        for i, ((seq, _), growth) in enumerate(zip(ends, found, strict=True)):
            if growth.is_copied:
                block = int(self.table[seq.row, growth.have - 1])
                seen[block] += 1
                if seen[block] > 1 and seen[block] == self.allocator.refs(block) and self.can_have_alone(block):
                    found[i] = growth._replace(need=growth.need - 1)
        return found

    def can_have_alone(self, block: int) -> bool:
        """Whether the only sequence that has it may write to it."""
        return not self.allocator.is_kept(block)

    def is_last_shared(self, seq: Sequence) -> bool:
        """Whether writing goes on in a block that others read: not where the last is full, or found ahead and not written."""
        have, bs = self.num_blocks(seq, seq.length), self.block_size
        if have * bs <= seq.length or (self.kind.is_ahead and seq.num_ahead * bs > seq.length):
            return False
        return self.allocator.is_shared(int(self.table[seq.row, have - 1]))

    def num_left_behind(self, seq: Sequence) -> int:
        """Blocks that growing gives back first, and that nobody else has."""
        if not self.gives_back:
            return 0
        first = min(self.num_blocks(seq, seq.length), self.first_block(seq.length))
        return self.allocator.num_single(self.table[seq.row, seq.starts[self.index] : max(seq.starts[self.index], first)])

    def room(self, seq: Sequence) -> int:
        """Tokens that one more extend can have here."""
        growth = self.growth(seq, seq.length)
        blocks = self.allocator.num_available + self.num_left_behind(seq) - growth.is_copied
        return (growth.have + blocks) * self.block_size - seq.length if blocks >= 0 else 0

    def grow(self, seq: Sequence, growth: Growth, num_reserved: int = 0) -> None:
        """Do it. `num_reserved` blocks are for others that grow at the same time: what can be done without is done without."""
        have, want, is_copied, _ = growth
        if self.gives_back:
            self.leave_behind(seq, min(have, self.first_block(seq.length)))
        if is_copied and self.is_last_shared(seq):  # another that had it may have gone on in a copy just now
            self.copy_on_write(seq, have - 1)
        if want == have + 1:
            self.table[seq.row, have] = self.allocator.allocate_one()
        elif want > have:
            self.table[seq.row, have:want] = self.allocator.allocate_checked(want - have)

    def copy_on_write(self, seq: Sequence, column: int) -> None:
        source = self.table[seq.row, column : column + 1].copy()
        block = self.allocator.allocate_one()
        self.copy_block(int(source[0]), block)
        self.on_copy(block)
        self.table[seq.row, column] = block
        self.allocator.release_checked(source)

    def copy_block(self, source: int, destination: int) -> None:
        """Its content: whoever has storage does it."""
        raise NotImplementedError

    def on_copy(self, block: int) -> None:
        """It has the content of another, and is nobody's yet."""

    # --- what can be seen -------------------------------------------------------------------------------------------------

    def first_block(self, length: int) -> int:
        """The first block that a token at position `length`, or any after it, sees."""
        return self.kind.first_block(length, self.block_size)

    def leave_behind(self, seq: Sequence, first: int) -> None:
        """Give back the blocks before `first`."""
        start = seq.starts[self.index]
        if first > start:
            left = self.table[seq.row, start:first].copy()
            seq.starts[self.index] = first
            self.table[seq.row, start:first] = -1
            self.allocator.release_checked(left)

    def why_not_cut(self, seq: Sequence, length: int) -> str:
        """Why a sequence cannot be cut to this length; "" where it can."""
        if not length or self.first_block(length) >= seq.starts[self.index]:
            return ""
        return (
            f"at length {length} group {self.allocator.name!r} (window {self.kind.window}) sees from block "
            f"{self.first_block(length)} on; blocks before {seq.starts[self.index]} were freed"
        )

    def cut(self, seq: Sequence, length: int, num_ahead: int = 0) -> tuple[int, BlockIds]:
        """What cutting it to `length` gives back: the first column, and the blocks from there on. Nothing changes."""
        keep, have = self.kind.num_blocks(length, self.block_size), self.num_blocks(seq, seq.length)
        first = max(keep, num_ahead if self.kind.is_ahead else 0, seq.starts[self.index])
        return first, self.table[seq.row, first:have].copy()

    def let_go(self, seq: Sequence, first: int, blocks: BlockIds) -> None:
        """Give back what cut() said, once the sequence is shorter."""
        if len(blocks):
            self.table[seq.row, first : first + len(blocks)] = -1
            self.allocator.release_checked(blocks)

    # --- what a prefix hit needs ------------------------------------------------------------------------------------------

    def hold(self, seq: Sequence, ids: BlockIds, blocks: int) -> None:
        """A new sequence begins with these, which have their references: its first `blocks` blocks, -1 where one is not needed."""
        self.table[seq.row, :blocks] = ids
        seq.starts[self.index] = self.kind.first_needed(blocks, self.block_size)

    def hold_after(self, seq: Sequence, first: int, ids: BlockIds) -> tuple[int, BlockIds]:
        """Put blocks after the sequence's own, of which those from `first` on are needed, behind its length.

        Where it begins once its length has changed, and what it gives back then.
        """
        have, end, start = seq.length // self.block_size, first + len(ids), seq.starts[self.index]
        self.table[seq.row, have:first] = -1
        self.table[seq.row, first:end] = ids
        seen = max(start, min(have, self.first_block(end * self.block_size)))
        return first if first > have else seen, self.table[seq.row, start:seen].copy()

    # --- what happens at a block's end ------------------------------------------------------------------------------------

    def nameable(self, seq: Sequence, first: int) -> tuple[int, BlockIds]:
        """From block `first` on: the first that may be found by its name, and the ids of it and those after, as a view."""
        first = max(first, seq.starts[self.index])
        return first, self.table[seq.row, first : self.kind.name_at(seq.length, self.block_size)]
