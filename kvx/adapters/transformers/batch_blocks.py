"""BatchBlocks: the blocks of a batch of sequences, one table for all layers of a kind (full, or one sliding window).

transformers counts in columns: every sequence of a batch has as many, and shorter ones are padded on the left. Blocks hold tokens
only: sequence s has its first token in column pads[s], which is its position 0. Which blocks a sequence has is a BlockTable's, as
in a PagedCache; here are the columns, and room that grows with the batch. Layers own the storage.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.cache.block_table import BlockTable
from kvx.cache.blocks import BlockAllocator
from kvx.cache.kinds import kind_of
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument
from kvx.tables import PackedTable

# Blocks a sequence gets beyond its prompt when nothing is reserved.
_SPARE_BLOCKS = 16
_NO_IDS = np.zeros(0, np.int32)  # transformers keeps the tokens


class Moves(NamedTuple):
    """What layers do before they write: first take over storage of another size, then copy blocks that were shared."""

    resized: NDArray[np.int64] | None  # block i is what block resized[i] was; None: as it is
    copies: list[tuple[int, int]]  # (source, destination)


class CopiedLater(BlockTable):
    """A table that notes which blocks are to be copied: layers do it."""

    copies: list[tuple[int, int]]

    def copy_block(self, source: int, destination: int) -> None:
        self.copies.append((source, destination))


class BatchBlocks:
    """Which blocks the sequences of a batch have. Nothing here knows what lies in them."""

    def __init__(self, *, block_size: int, window: int = 0, reserve: int = 0) -> None:
        self.block_size = block_size
        self.window = window  # 0: none; else blocks wholly behind it are released
        self.reserve = reserve  # tokens a sequence there is room for from the start
        self.keeps_past = False  # blocks behind the window stay until the next crop
        self.length = 0  # columns that have room
        self.is_started = False
        self.pads: NDArray[np.int64] = np.zeros(0, np.int64)
        self.device = torch.device("cpu")
        self._seqs: list[Sequence] = []  # row by row
        self._table = self._new_table(0, 0, BlockAllocator(0))
        self._slots: Tensor | None = None  # of the newest columns
        self._slots_of = (0, 0)

    def _new_table(self, num_seqs: int, width: int, allocator: BlockAllocator) -> CopiedLater:
        table = CopiedLater(kind_of(self.window), allocator, 0, (num_seqs, width, self.block_size))
        table.gives_back, table.copies = False, []  # release_behind() says when
        return table

    @property
    def batch_size(self) -> int:
        return len(self.pads)

    @property
    def num_blocks(self) -> int:
        return self._table.allocator.num_blocks

    @property
    def allocator(self) -> BlockAllocator:
        return self._table.allocator

    @property
    def seq_lens(self) -> NDArray[np.int64]:
        """Tokens of each sequence. A sequence that is all padding has none."""
        return np.maximum(self.length - self.pads, 0)

    @property
    def starts(self) -> NDArray[np.int64]:
        """The first logical block that each sequence still has."""
        return np.array([seq.starts[0] for seq in self._seqs], np.int64)

    def start(self, pads: NDArray[np.int64], device: torch.device) -> None:
        self.pads, self.device, self.is_started = pads.copy(), device, True
        self._seqs = [self._sequence(row) for row in range(len(pads))]
        self._table = self._new_table(len(pads), max(1, -(-self.reserve // self.block_size)), self.allocator)
        self._make_device_tables()

    def _sequence(self, row: int) -> Sequence:
        return Sequence(None, row, row, _NO_IDS, 1)

    def extend(self, n: int) -> Moves:
        """Room for n more columns, and what every layer must do to its storage before it writes."""
        if not self.keeps_past:
            self.release_behind()  # now, not after the last step: its queries saw as far back as the first of them did
        table, ends = self._table, np.maximum(self.length + n - self.pads, 0).tolist()
        growing = [(seq, end) for seq, end in zip(self._seqs, ends, strict=True) if end > seq.limit]
        growths = table.growths(growing)
        count = sum(growth.need for growth in growths)
        resized = self._resize(count)
        self._widen(max((-(-end // self.block_size) for end in ends), default=0))
        table.copies = []
        for (seq, end), growth in zip(growing, growths, strict=True):
            table.grow(seq, growth)
            seq.length, seq.limit = end, -(-end // self.block_size) * self.block_size
        for seq, end in zip(self._seqs, ends, strict=True):
            seq.length = end
        self.length += n
        self._upload(table=count > 0 or resized is not None)
        return Moves(resized, table.copies)

    def _widen(self, width: int) -> None:
        table = self._table
        if width > table.table.shape[1]:
            wider = np.full((self.batch_size, max(width, 2 * table.table.shape[1])), -1, np.int32)
            wider[:, : table.table.shape[1]] = table.table
            table.table = wider
            self._make_device_tables()

    def slots(self, start: int, n: int) -> Tensor:
        """[batch * n] int64, for columns start to start + n of each sequence; -1 for padding. Made once for all layers."""
        if self._slots is not None and self._slots_of == (start, n):
            return self._slots
        positions = np.arange(start, start + n)[None, :] - self.pads[:, None]
        at = np.maximum(positions, 0)
        blocks = np.take_along_axis(self._table.table, at // self.block_size, axis=1).astype(np.int64)
        slots = np.where(positions < 0, -1, blocks * self.block_size + at % self.block_size)
        self._slots, self._slots_of = _pinned(slots.reshape(-1), self.device).to(self.device, non_blocking=True), (start, n)
        return self._slots

    def table(self) -> PackedTable:
        """For attention: on a device tensors that stay where they are from step to step."""
        if self.device.type == "cpu":
            return PackedTable(torch.from_numpy(self._table.table), torch.from_numpy(self.seq_lens.astype(np.int32)))
        return PackedTable(self._device_table, self._device_lens)

    def table_from(self, column: int) -> tuple[PackedTable, NDArray[np.int64]]:
        """A table that begins near `column`, and the position each of its sequences begins at: what gather is to read."""
        first = np.maximum(np.maximum(column - self.pads, 0) // self.block_size, self.starts)
        ends = -(-self.seq_lens // self.block_size)
        width = max(1, int((ends - first).max()))
        at = np.minimum(first[:, None] + np.arange(width), self._table.table.shape[1] - 1)
        ids = torch.from_numpy(np.take_along_axis(self._table.table, at, axis=1)).to(self.device)
        begins = first * self.block_size
        lens = torch.from_numpy(np.maximum(self.seq_lens - begins, 0).astype(np.int32)).to(self.device)
        return PackedTable(ids, lens), begins

    def blocks_of(self, sequence: int) -> NDArray[np.int32]:
        """Its block ids in order; -1 behind the window."""
        seq = self._seqs[sequence]
        return self._table.table[seq.row, : self._table.num_blocks(seq, seq.length)].copy()

    def release_behind(self) -> None:
        """Give back the blocks that no later query's window reaches."""
        if self.window:
            for seq in self._seqs:
                self._table.leave_behind(seq, self._table.first_block(seq.length))

    def check_crop(self, length: int) -> None:
        """Refuse a length whose window is not here any more."""
        lens = np.maximum(length - self.pads, 0).tolist()
        if any(self._table.first_block(n) < seq.starts[0] for seq, n in zip(self._seqs, lens, strict=True)):
            raise BadArgument(
                f"KvxCache.crop(): to {length} of {self.length} tokens; layers of window {self.window} gave back the blocks of "
                "tokens that left it. Call activate_past_recording() before the tokens that may be taken back are run."
            )

    def crop(self, length: int) -> None:
        """Keep the first `length` columns."""
        for seq, n in zip(self._seqs, np.maximum(length - self.pads, 0).tolist(), strict=True):
            left = self._table.cut(seq, min(n, seq.length))
            seq.length = seq.limit = min(n, seq.length)  # growing asks whose the last block is
            self._table.let_go(seq, *left)
        self.length = length
        self._upload(table=False)

    def select(self, rows: NDArray[np.int64]) -> None:
        """Sequence i is what sequence rows[i] was; several may share blocks, until one of them writes."""
        old, allocator = self._seqs, self.allocator
        before = [self._table.held(seq).copy() for seq in old]
        for row in rows:
            allocator.retain(before[row])
        for ids in before:
            allocator.release(ids)
        made = []
        for row, source in enumerate(rows):
            seq = self._sequence(row)
            seq.length = seq.limit = old[source].length
            seq.starts = list(old[source].starts)
            made.append(seq)
        self._seqs, self.pads = made, self.pads[rows]
        self._table.table = np.ascontiguousarray(self._table.table[rows])
        self._make_device_tables()
        self._upload(table=True)

    def clear(self) -> None:
        """No sequences. The blocks stay, free."""
        for seq in self._seqs:
            self.allocator.release(self._table.held(seq))
        self._seqs, self.pads = [], np.zeros(0, np.int64)
        self.length, self.is_started, self._slots = 0, False, None

    def _resize(self, count: int) -> NDArray[np.int64] | None:
        """Make room for `count` blocks where there is none, and give it up where a window left most of a long prompt's.

        Twice as much in all, so that steps seldom pay for it. The old ids in the order of the new, if they changed.
        """
        used, each = self.allocator.num_used, -(-self.reserve // self.block_size) or _SPARE_BLOCKS
        if self.window:  # what a window holds, the blocks it begins and ends in, and one to write to
            each = min(each, -(-self.window // self.block_size) + 3)
        # At first the prompt's blocks and the spare ones, so that not the first token after it doubles them.
        spare = self.batch_size * each if not (self.num_blocks or self.reserve or self.window) else 0
        first = max(self.batch_size * each, used + count + spare)
        if count > self.allocator.num_free:
            size = max(2 * self.num_blocks, first)
        elif self.window and self.num_blocks > 4 * first:
            size = first
        else:
            return None
        counts = self.allocator.counts()
        old = np.arange(len(counts)) if size > len(counts) else np.flatnonzero(counts)
        new = BlockAllocator(size)
        ids = new.allocate(len(old))  # low ids first: 0 to len(old) - 1
        new.retain(np.repeat(ids, np.maximum(counts[old] - 1, 0)))
        new.release(ids[counts[old] == 0])
        renamed = np.full(len(counts) + 1, -1, np.int32)  # the last is that of -1
        renamed[old] = ids
        self._table.table[:] = renamed[self._table.table]
        self._table.allocator = new
        return old

    def _make_device_tables(self) -> None:
        if self.device.type != "cpu":
            self._device_table = torch.from_numpy(self._table.table).to(self.device)
            self._device_lens = torch.zeros(self.batch_size, dtype=torch.int32, device=self.device)

    def _upload(self, *, table: bool) -> None:
        """Lengths, and where they changed block ids, to where attention reads them."""
        self._slots = None
        if self.device.type != "cpu":
            self._device_lens.copy_(_pinned(self.seq_lens.astype(np.int32), self.device), non_blocking=True)
            if table:
                self._device_table.copy_(_pinned(self._table.table, self.device), non_blocking=True)


def _pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array where a copy to the device does not make the host wait. torch gives the memory out again when the copy is over."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host
