"""Batch: what one step's ops take, in device buffers whose addresses never change, so that a CUDA graph can read them.

Host arrays are filled first. On the host they are the buffers; for a device they are pinned, and sent without waiting. There are
two sets of them, so that filling the next does not disturb a copy under way.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvx.cache.group_table import GroupTable
from kvx.cache.sequence import Sequence
from kvx.errors import BadArgument
from kvx.tables import PackedTable


class Buffer:
    """A device tensor and the host arrays that it is filled from."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._hosts = [self.tensor] if device.type == "cpu" else [torch.zeros(shape, dtype=dtype).pin_memory() for _ in "ab"]
        self._arrays: list[NDArray[Any]] = [host.numpy() for host in self._hosts]

    def array(self, turn: int) -> NDArray[Any]:
        return self._arrays[turn % len(self._arrays)]

    def send(self, turn: int, n: int) -> None:
        """The first `n` rows to the device."""
        if len(self._hosts) > 1 and n:
            self.tensor[:n].copy_(self._hosts[turn % 2][:n], non_blocking=True)


class TableBuffer(Buffer):
    """A block table [max_seqs, max_blocks]. Only the columns in use are sent: packed, then spread on the device."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        super().__init__(shape, torch.int32, device)
        self._packed = torch.zeros(shape[0] * shape[1], dtype=torch.int32, device=device) if device.type != "cpu" else None

    def fill(self, turn: int, table: NDArray[np.int32], rows: NDArray[np.int64], width: int) -> None:
        n = len(rows)
        if self._packed is None:
            self.array(turn)[:n, :width] = table[rows, :width]
            return
        used = n * width
        np.take(table[:, :width], rows, axis=0, out=self.array(turn).reshape(-1)[:used].reshape(n, width), mode="clip")
        self._packed[:used].copy_(self._hosts[turn % 2].view(-1)[:used], non_blocking=True)
        self.tensor[:n, :width].copy_(self._packed[:used].view(n, width))


class Batch:
    """Views of one step's buffers, good until the next `plan`. Padding: slots are -1, lengths 0, cu_seqlens repeat the last."""

    __slots__ = ("_slots", "_tables", "cu_seqlens", "last", "max_query_len", "max_seq_len", "num_seqs", "num_tokens", "positions",
                 "seq_lens", "tokens")  # fmt: skip

    num_seqs: int  # with padding
    num_tokens: int  # with padding
    max_query_len: int  # of a sequence of this batch
    max_seq_len: int
    tokens: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    cu_seqlens: Tensor  # [num_seqs + 1] int32: queries of sequence s are rows cu_seqlens[s] to cu_seqlens[s + 1]
    seq_lens: Tensor  # [num_seqs] int32, this step's tokens included
    last: Tensor  # [num_seqs] int64: the row of each sequence's last query; 0 where padded

    def slot_mapping(self, group: int = 0) -> Tensor:
        """[num_tokens] int64: where this step's K and V go."""
        return self._slots[group]

    def state_blocks(self, group: int) -> Tensor:
        """[num_seqs] int32: the block of each sequence's state, which the step reads and changes. What pads it is anything."""
        return self._tables[group].block_table[:, 0]

    def table(self, group: int = 0) -> PackedTable:
        """Over [num_seqs, max_blocks] int32; entries behind a window are -1, and those past a sequence's blocks anything."""
        return self._tables[group]

    _slots: list[Tensor]
    _tables: list[PackedTable]


class BatchBuffers:
    """The buffers of one PagedCache, and how a step's work is put into them."""

    def __init__(self, groups: Listing[GroupTable], max_seqs: int, max_tokens: int, device: torch.device) -> None:
        self.max_seqs, self.max_tokens, self._groups = max_seqs, max_tokens, groups
        self._block_size = groups[0].block_size

        def buffer(n: int, dtype: torch.dtype) -> Buffer:
            return Buffer((n,), dtype, device)

        self._tokens, self._positions = buffer(max_tokens, torch.int64), buffer(max_tokens, torch.int64)
        self._slots = [buffer(max_tokens, torch.int64) for _ in groups]
        self._cu_seqlens, self._seq_lens = buffer(max_seqs + 1, torch.int32), buffer(max_seqs, torch.int32)
        self._last = buffer(max_seqs, torch.int64)
        self._tables = [TableBuffer((max_seqs, g.table.shape[1]), device) for g in groups]
        self._turn = 0
        # What must have happened before a set of host arrays is filled again: the copies out of it.
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._is_cuda = device.type == "cuda"

    def fill(
        self,
        work: Listing[tuple[Sequence, int]],
        tokens: NDArray[np.int32],
        pad_seqs: int,
        pad_tokens: int,
    ) -> Batch:
        self._turn ^= 1
        turn, bs = self._turn, self._block_size
        self._wait(turn)
        num_seqs = len(work)
        rows = np.array([s.row for s, _ in work], np.int64)
        lengths = np.array([s.length for s, _ in work], np.int64)
        counts = np.array([n for _, n in work], np.int64)
        ends = counts.cumsum()
        num_tokens = int(ends[-1]) if num_seqs else 0
        all_seqs, all_tokens = max(num_seqs, pad_seqs), max(num_tokens, pad_tokens)
        if all_seqs > self.max_seqs or all_tokens > self.max_tokens:
            raise BadArgument(
                f"plan(): {all_seqs} sequences and {all_tokens} tokens; buffers were made for max_seqs={self.max_seqs} and "
                f"max_tokens={self.max_tokens}. Plan less at once, or make the cache with more."
            )
        if num_tokens == num_seqs:  # decode: a query each
            seq_rows, position = rows, lengths - 1
        else:
            seq_rows = rows.repeat(counts)
            position = np.arange(num_tokens) + (lengths - ends).repeat(counts)

        lens, cu, last = self._seq_lens.array(turn), self._cu_seqlens.array(turn), self._last.array(turn)
        lens[:num_seqs], lens[num_seqs:all_seqs] = lengths, 0
        cu[0] = 0
        cu[1 : num_seqs + 1], cu[num_seqs + 1 : all_seqs + 1] = ends, num_tokens
        last[:num_seqs], last[num_seqs:all_seqs] = ends - 1, 0
        ids, at = self._tokens.array(turn), self._positions.array(turn)
        ids[:num_tokens], ids[num_tokens:all_tokens] = tokens[seq_rows, position], 0
        at[:num_tokens], at[num_tokens:all_tokens] = position, 0
        block, offset = np.divmod(position, bs)
        max_len = int(lengths.max()) if num_seqs else 0
        width = -(-max_len // bs)
        for group, slots, table in zip(self._groups, self._slots, self._tables, strict=True):
            if group.kind.has_state:
                table.fill(turn, group.table, rows, 1)
                continue
            slot = slots.array(turn)
            # A block behind the window is -1: its slots are negative, which skips them.
            slot[:num_tokens] = group.table[seq_rows, block] * np.int64(bs) + offset
            slot[num_tokens:all_tokens] = -1
            slots.send(turn, all_tokens)
            table.fill(turn, group.table, rows, width)
        self._tokens.send(turn, all_tokens)
        self._positions.send(turn, all_tokens)
        self._cu_seqlens.send(turn, all_seqs + 1)
        self._seq_lens.send(turn, all_seqs)
        self._last.send(turn, all_seqs)
        self._mark(turn)
        return self._views(all_seqs, all_tokens, int(counts.max()) if num_seqs else 0, max_len)

    def _views(self, num_seqs: int, num_tokens: int, max_query_len: int, max_seq_len: int) -> Batch:
        batch = Batch()
        batch.num_seqs, batch.num_tokens, batch.max_query_len, batch.max_seq_len = num_seqs, num_tokens, max_query_len, max_seq_len
        batch.tokens, batch.positions = self._tokens.tensor[:num_tokens], self._positions.tensor[:num_tokens]
        batch.cu_seqlens, batch.seq_lens = self._cu_seqlens.tensor[: num_seqs + 1], self._seq_lens.tensor[:num_seqs]
        batch.last = self._last.tensor[:num_seqs]
        batch._slots = [s.tensor[:num_tokens] for s in self._slots]
        batch._tables = [PackedTable(t.tensor[:num_seqs], batch.seq_lens) for t in self._tables]
        return batch

    def _wait(self, turn: int) -> None:
        event = self._sent[turn]
        if event is not None:
            event.synchronize()

    def _mark(self, turn: int) -> None:
        if self._is_cuda:
            event = self._sent[turn] or torch.cuda.Event()
            event.record()
            self._sent[turn] = event
