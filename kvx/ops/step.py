"""Step: which tokens the ops of a hybrid cache are given, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument


class Run(NamedTuple):
    """One sequence of a step: rows [begin, end) of [num_tokens, ...] tensors are its tokens, from position `start` on."""

    slot: int
    begin: int
    end: int
    start: int


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


def check_step(call: str, step: Step, num_tokens: int, num_slots: int) -> None:
    """For host memory: what the library checks too. Raised before anything is written."""
    ends, seen = step.cu_seqlens.tolist(), set()
    if any(a > b for a, b in pairwise(ends)) or ends[0] < 0 or ends[-1] > num_tokens:
        raise BadArgument(f"{call}(): cu_seqlens is {ends}; it does not fall and ends within the {num_tokens} tokens given.")
    for slot in step.slots.tolist():
        if slot >= num_slots or (slot >= 0 and slot in seen):
            raise BadArgument(f"{call}(): slot {slot} of {num_slots}: it is not there, or in the step twice.")
        seen.add(slot)
