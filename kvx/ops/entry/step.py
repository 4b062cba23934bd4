"""Step: which tokens the ops of a hybrid cache are given, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.quant.rows import RowPages

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INT32_MAX = 2**31 - 1


class Run(NamedTuple):
    """One sequence of a step: rows [begin, end) of [num_tokens, ...] tensors are its tokens, from position `start` on."""

    slot: int
    begin: int
    end: int
    start: int

    @property
    def last(self) -> int:
        """The position of its last token."""
        return self.start + self.end - self.begin - 1


class Step(NamedTuple):
    """Sequences side by side, int32 and where the cache lives. Sequence s has rows [cu_seqlens[s], cu_seqlens[s + 1]) of every
    [num_tokens, ...] tensor, at positions starts[s] and on; slots[s] is its request's place in the cache, negative: skipped, as are
    tokens behind the last sequence. A slot is in a step once. Fixed addresses and changed contents replay in a graph.
    """

    slots: Tensor  # [num_seqs]
    cu_seqlens: Tensor  # [num_seqs + 1]
    starts: Tensor  # [num_seqs]

    @staticmethod
    def of(slots: Sequence[int], lengths: Sequence[int], starts: Sequence[int], device: str | torch.device = "cpu") -> Step:
        """From numbers: a slot, how many tokens, and the first one's position, for each sequence."""
        if not len(slots) == len(lengths) == len(starts) or any(n < 0 for n in (*lengths, *starts)):
            raise BadArgument(
                f"Step.of(): slots {list(slots)}, lengths {list(lengths)}, starts {list(starts)}: "
                "as many of each, none negative but slots."
            )
        ends = [0]
        for n in lengths:
            ends.append(ends[-1] + n)
        slots_, ends_, starts_ = (torch.tensor(x, dtype=torch.int32, device=device) for x in (list(slots), ends, list(starts)))
        return Step(slots_, ends_, starts_)

    def places(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token its sequence, its place there, and whether it is in the step at all. On the device; int64, int64, bool."""
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=self.slots.device)
        seqs = torch.searchsorted(self.cu_seqlens[1:], tokens, right=True).clamp(max=len(self.slots) - 1)
        is_there = (tokens < self.cu_seqlens[-1]) & (self.slots[seqs] >= 0)
        return seqs, torch.where(is_there, tokens - self.cu_seqlens[seqs], 0).long(), is_there

    def positions(self, num_tokens: int) -> Tensor:
        """[num_tokens] int64, 0 for tokens that are skipped. On the device."""
        seqs, places, is_there = self.places(num_tokens)
        return torch.where(is_there, self.starts[seqs] + places, 0)

    def runs(self) -> Iterator[Run]:
        """The sequences that are there, read on the host."""
        ends = self.cu_seqlens.tolist()
        for i, (slot, start) in enumerate(zip(self.slots.tolist(), self.starts.tolist(), strict=True)):
            if slot >= 0 and ends[i + 1] > ends[i]:
                yield Run(slot, ends[i], ends[i + 1], start)


# What the library checks too, for the torch bodies: the same errors, before anything is written.


def check_step(call: str, step: Step, num_tokens: int, num_slots: int) -> None:
    num_seqs = len(step.slots) if step.slots.dim() == 1 else 0
    for name, x, count in zip(Step._fields, step, (num_seqs, num_seqs + 1, num_seqs), strict=True):
        if list(x.shape) != [count] or x.dtype != torch.int32:
            raise BadArgument(f"{call}(): step.{name} is {list(x.shape)} {x.dtype}; it must be [{count}] int32.")
    seen: set[int] = set()
    spans = pairwise(step.cu_seqlens.tolist())
    for seq, (slot, start, (begin, end)) in enumerate(zip(step.slots.tolist(), step.starts.tolist(), spans, strict=True)):
        if not 0 <= begin <= end <= num_tokens:
            raise _outside(call, f"sequence {seq} ends at token {end} of {num_tokens}, or before it begins")
        if slot >= num_slots:
            raise _outside(call, f"sequence {seq} has slot {slot}; there are {num_slots}")
        if slot < 0:
            continue
        if not 0 <= start <= INT32_MAX - (end - begin):
            raise _outside(call, f"sequence {seq} starts at position {start}; {INT32_MAX} is the last")
        if slot in seen:
            raise _outside(call, f"sequence {seq} has slot {slot}, which is in the step before (of {num_slots} slots)")
        seen.add(slot)


def check_table(call: str, block_table: Tensor, num_slots: int) -> None:
    if block_table.dim() != 2 or len(block_table) < num_slots or block_table.dtype != torch.int32:
        raise BadArgument(
            f"{call}(): block_table is {list(block_table.shape)} {block_table.dtype}; it must be int32 [slots, columns] with "
            f"{num_slots} rows or more."
        )


def check_entries(call: str, block_table: Tensor, entries: RowPages, slot: int, first: int, count: int) -> None:
    """Entries [first, count) of a slot have a place in its table, and the pages it names are there."""
    rows, columns = entries.rows, block_table.shape[1]
    if count > columns * rows:
        raise _outside(call, f"entry {count - 1} of slot {slot}: its table has {columns} pages of {rows}")
    begin = first // rows
    for column, page in enumerate(block_table[slot, begin : -(-count // rows)].tolist(), begin):
        if first < count and page >= len(entries.pages):
            raise _outside(call, f"block_table[{slot}, {column}] is {page}; there are {len(entries.pages)} pages")


def _outside(call: str, what: str) -> OutOfRange:
    return OutOfRange(f"{call}(): {what}. Nothing was written.")
