"""BatchBlocks: the blocks of a batch of sequences, one table for all layers of a kind (full, or one sliding window).

transformers counts in columns: every sequence of a batch has as many, and shorter ones are padded on the left. Blocks hold tokens
only: sequence s has its first token in column pads[s], which is its position 0. Layers own the storage; this owns the ids.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.cache.blocks import BlockAllocator
from kvx.errors import BadArgument
from kvx.tables import PackedTable

# Blocks a sequence gets beyond its prompt when nothing is reserved.
_SPARE_BLOCKS = 16


class Moves(NamedTuple):
    """What layers do before they write: first take over storage of another size, then copy blocks that were shared."""

    resized: NDArray[np.int64] | None  # block i is what block resized[i] was; None: as it is
    copies: list[tuple[int, int]]  # (source, destination)


class BatchBlocks:
    """Which blocks the sequences of a batch have. Nothing here knows what lies in them."""

    def __init__(self, *, block_size: int, window: int = 0, reserve: int = 0) -> None:
        self.block_size = block_size
        self.window = window  # 0: none; else blocks wholly behind it are released
        self.reserve = reserve  # tokens a sequence there is room for from the start
        self.keeps_past = False  # blocks behind the window stay until the next crop
        self.length = 0  # columns that have room
        self.allocator = BlockAllocator(0)
        self.pads: NDArray[np.int64] = np.zeros(0, np.int64)
        self.starts: NDArray[np.int64] = np.zeros(0, np.int64)  # first logical block each sequence still has
        self.is_started = False
        self.device = torch.device("cpu")
        self._slots: Tensor | None = None  # of the newest columns
        self._slots_of = (0, 0)

    @property
    def batch_size(self) -> int:
        return len(self.pads)

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def seq_lens(self) -> NDArray[np.int64]:
        """Tokens of each sequence. A sequence that is all padding has none."""
        return np.maximum(self.length - self.pads, 0)

    def start(self, pads: NDArray[np.int64], device: torch.device) -> None:
        self.pads = pads.copy()
        self.starts = np.zeros(len(pads), np.int64)
        self.device = device
        self.is_started = True
        self._set_table(np.zeros((len(pads), max(1, -(-self.reserve // self.block_size))), np.int32))

    def extend(self, n: int) -> Moves:
        """Room for n more columns, and what every layer must do to its storage before it writes."""
        if not self.keeps_past:
            self.release_behind()  # now, not after the last step: its queries saw as far back as the first of them did
        have, need = self._ends(self.length), self._ends(self.length + n)
        shared = self._shared_tails()
        count = int((need - have).sum()) + len(shared)
        resized = self._resize(count)
        width = int(need.max(initial=0))
        if width > self._ids.shape[1]:
            wider = np.zeros((self.batch_size, max(width, 2 * self._ids.shape[1])), np.int32)
            wider[:, : self._ids.shape[1]] = self._ids
            self._set_table(wider)
        fresh = self.allocator.allocate(count)
        pairs = []
        ids = self._ids
        for place, block in zip(shared, fresh, strict=False):
            pairs.append((int(ids[place]), int(block)))
            ids[place] = block
        self.allocator.release([source for source, _ in pairs])
        rest, taken = fresh[len(shared) :], 0
        for s in np.flatnonzero(need > have):
            step = int(need[s] - have[s])
            ids[s, have[s] : need[s]] = rest[taken : taken + step]
            taken += step
        self.length += n
        self._upload(table=count > 0 or resized is not None)
        return Moves(resized, pairs)

    def slots(self, start: int, n: int) -> Tensor:
        """[batch * n] int64, for columns start to start + n of each sequence; -1 for padding. Made once for all layers."""
        if self._slots is not None and self._slots_of == (start, n):
            return self._slots
        positions = np.arange(start, start + n)[None, :] - self.pads[:, None]
        at = np.maximum(positions, 0)
        blocks = np.take_along_axis(self._ids, at // self.block_size, axis=1).astype(np.int64)
        slots = np.where(positions < 0, -1, blocks * self.block_size + at % self.block_size)
        self._slots, self._slots_of = _pinned(slots.reshape(-1), self.device).to(self.device, non_blocking=True), (start, n)
        return self._slots

    def table(self) -> PackedTable:
        """For attention: tensors that stay where they are from step to step."""
        return PackedTable(self._table, self._lens)

    def table_from(self, column: int) -> tuple[PackedTable, NDArray[np.int64]]:
        """A table that begins near `column`, and the position each of its sequences begins at: what gather is to read."""
        first = np.maximum(np.maximum(column - self.pads, 0) // self.block_size, self.starts)
        width = max(1, int((self._ends(self.length) - first).max()))
        at = np.minimum(first[:, None] + np.arange(width), self._ids.shape[1] - 1)
        ids = torch.from_numpy(np.take_along_axis(self._ids, at, axis=1)).to(self.device)
        begins = first * self.block_size
        lens = torch.from_numpy(np.maximum(self.seq_lens - begins, 0).astype(np.int32)).to(self.device)
        return PackedTable(ids, lens), begins

    def blocks_of(self, sequence: int) -> NDArray[np.int32]:
        """Its block ids in order; -1 behind the window."""
        ids = self._ids[sequence, : self._ends(self.length)[sequence]].copy()
        ids[: self.starts[sequence]] = -1
        return ids

    def release_behind(self) -> None:
        """Give back the blocks that no later query's window reaches."""
        if not self.window:
            return
        first = np.maximum(self.seq_lens - self.window + 1, 0) // self.block_size
        for s in np.flatnonzero(first > self.starts):
            self.allocator.release(self._ids[s, self.starts[s] : first[s]])
            self.starts[s] = first[s]

    def check_crop(self, length: int) -> None:
        """Refuse a length whose window is not here any more."""
        lens = np.maximum(length - self.pads, 0)
        needed = np.maximum(lens - self.window + 1, 0) // self.block_size if self.window else self.starts
        if (needed < self.starts).any():
            raise BadArgument(
                f"KvxCache.crop(): to {length} of {self.length} tokens; layers of window {self.window} gave back the blocks of "
                "tokens that left it. Call activate_past_recording() before the tokens that may be taken back are run."
            )

    def crop(self, length: int) -> None:
        """Keep the first `length` columns."""
        have, keep = self._ends(self.length), np.maximum(self._ends(length), self.starts)
        for s in np.flatnonzero(have > keep):
            self.allocator.release(self._ids[s, keep[s] : have[s]])
        self.length = length
        self._upload(table=False)

    def select(self, rows: NDArray[np.int64]) -> None:
        """Sequence i is what sequence rows[i] was; several may share blocks, until one of them writes."""
        ends = self._ends(self.length)
        before = [self._ids[s, self.starts[s] : ends[s]] for s in range(self.batch_size)]
        for s in rows:
            self.allocator.retain(before[s])
        for ids in before:
            self.allocator.release(ids)
        self.pads, self.starts = self.pads[rows], self.starts[rows]
        self._set_table(self._ids[rows])
        self._upload(table=True)

    def clear(self) -> None:
        """No sequences. The blocks stay, free."""
        ends = self._ends(self.length)
        for s in range(self.batch_size):
            self.allocator.release(self._ids[s, self.starts[s] : ends[s]])
        self.pads = self.starts = np.zeros(0, np.int64)
        self.length, self.is_started, self._slots = 0, False, None

    def _ends(self, length: int) -> NDArray[np.int64]:
        """Logical blocks of each sequence at so many columns."""
        return -(-np.maximum(length - self.pads, 0) // self.block_size)

    def _shared_tails(self) -> list[tuple[int, int]]:
        """(sequence, logical block) of partial last blocks that must be copied: all of a block's users but the last."""
        lens, found = self.seq_lens, []
        users: dict[int, int] = {}
        for s in np.flatnonzero(lens % self.block_size):
            at = int(lens[s]) // self.block_size
            block = int(self._ids[s, at])
            users[block] = users.get(block, self.allocator.refs(block)) - 1
            if users[block] > 0:
                found.append((int(s), at))
        return found

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
        renamed = np.zeros(max(len(counts), 1), np.int32)
        renamed[old] = ids
        self._ids[:] = renamed[self._ids]
        self.allocator = new
        return old

    @property
    def _ids(self) -> NDArray[np.int32]:
        """[batch, width] block ids, to read and write; `_upload` brings them to a device."""
        return self._host_table.numpy()

    def _set_table(self, ids: NDArray[np.int32]) -> None:
        # On the host the tables are one memory, and one object, so that a deep copy of both stays so.
        self._host_table = torch.from_numpy(np.ascontiguousarray(ids))
        self._host_lens = torch.zeros(len(ids), dtype=torch.int32)
        self._table, self._lens = self._host_table.to(self.device), self._host_lens.to(self.device)

    def _upload(self, *, table: bool) -> None:
        """Lengths, and where they changed block ids, to where attention reads them."""
        self._slots = None
        self._host_lens.copy_(torch.from_numpy(self.seq_lens))
        if self.device.type != "cpu":
            self._lens.copy_(_pinned(self._host_lens.numpy(), self.device), non_blocking=True)
            if table:
                self._table.copy_(_pinned(self._ids, self.device), non_blocking=True)


def _pinned(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array where a copy to the device does not make the host wait. torch gives the memory out again when the copy is over."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host
