"""StateTable: a group of states at work. A sequence has one running block, in the only column.

Where it is a snapshot that others may find, or a fork's, the next step goes on in a copy. A sequence that has none, though it has
tokens (its state is to be computed again), says so by starts: 1.
"""

from __future__ import annotations

from kvx.cache.block_table import Growth
from kvx.cache.blocks import BlockIds
from kvx.cache.group_table import GroupTable
from kvx.cache.kinds import State
from kvx.cache.sequence import Sequence


class StateTable(GroupTable):
    kind: State

    def growth(self, seq: Sequence, end: int) -> Growth:
        have, want = self.num_blocks(seq, seq.length), self.num_blocks(seq, end)
        is_new = want > 0 and seq.starts[self.index] >= have
        is_copied = not is_new and want > 0 and seq.length == seq.limit and self.is_last_shared(seq)
        # A snapshot that is this sequence's alone can be given up: where no block is left, it goes on in it.
        is_others = is_copied and self.allocator.refs(int(self.table[seq.row, 0])) > 1
        return Growth(have, want, is_copied, int(is_new or is_others))

    def is_last_shared(self, seq: Sequence) -> bool:
        return len(held := self.held(seq)) > 0 and self.allocator.is_shared(int(held[0]))

    def room(self, seq: Sequence) -> int:
        return 2**31 if self.growth(seq, seq.length + 1).need <= self.allocator.num_available else 0

    def grow(self, seq: Sequence, growth: Growth, num_reserved: int = 0) -> None:
        is_room = self.allocator.num_available > num_reserved
        if not growth.is_copied:
            if growth.need:
                self._begin(seq)
        elif self.is_last_shared(seq):  # another that had it may have gone on in a copy just now
            if growth.need or is_room:
                self.copy_on_write(seq, 0)
            else:
                self.allocator.evict_used(int(self.table[seq.row, 0]))

    def can_have_alone(self, block: int) -> bool:
        """A snapshot can be given up."""
        return True

    def on_copy(self, block: int) -> None:
        if self.kind.on_new is not None:
            self.kind.on_new(block, True)

    def _begin(self, seq: Sequence) -> None:
        """As before the first token."""
        block = self.allocator.allocate_one()
        if self.kind.on_new is not None:
            self.kind.on_new(block, False)
        else:
            self.clear_block(block)
        self.table[seq.row, 0] = block
        seq.starts[self.index] = 0

    def why_not_cut(self, seq: Sequence, length: int) -> str:
        if not length:
            return ""
        if length < seq.whole_from:
            return (
                f"group {self.group.name!r} computes a state again, which is whole only after {seq.whole_from} tokens: what it had "
                f"at {length} is not"
            )
        if seq.length - length <= self.kind.max_cut:
            return ""
        back = f"it goes back by at most {self.kind.max_cut} tokens" if self.kind.max_cut else "it cannot go back"
        return f"group {self.group.name!r} has a state, which stands at {seq.length}: {back}"

    def hold(self, seq: Sequence, ids: BlockIds, blocks: int) -> None:
        self.table[seq.row, 0] = ids[-1]
        seq.starts[self.index] = 0 if ids[-1] >= 0 else 1

    def hold_after(self, seq: Sequence, first: int, ids: BlockIds) -> tuple[int, BlockIds]:
        """The block of a later position is put into the table when the length changes, and not before."""
        return 0, self.held(seq).copy()

    def nameable(self, seq: Sequence, first: int) -> tuple[int, BlockIds]:
        """The running block, where it stands at a block's end."""
        full = self.kind.name_at(seq.length, self.block_size)
        is_there = full > first and seq.length >= seq.whole_from and self.kind.is_due(full, seq.snapshots)
        return max(0, full - 1), self.held(seq)[: int(is_there)]
