"""Drafts: what it takes to have a tail as it was after some of a step's tokens. Tails only go forward.

Before a step the tails of its slots are put aside, and its tokens' projections are stored. To take drafts back, the tail is put
back and goes over the tokens that were accepted. Rows and entries need nothing: what drafts wrote is written over before anyone may
read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.ops.entry.compress import compress
from kvx.ops.entry.step import Step
from kvx.ops.entry.tail import KV, SCORE, Tail
from kvx.quant.rows import RowPages


class AcceptedTokens(NamedTuple):
    """Of each slot whose drafts are taken back, the tokens of its last step that stay."""

    slots: Tensor  # [num_seqs] int64
    step: Step  # the tokens that stay, packed
    rows: Tensor  # [num_tokens] int64: whose they are
    places: Tensor  # [num_tokens] int64: which of the step they were

    @staticmethod
    def of(slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], device: torch.device) -> AcceptedTokens:
        pairs = [(slot, i) for slot, count in zip(slots, counts, strict=True) for i in range(count)]
        rows, places = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        return AcceptedTokens(
            torch.tensor(slots, dtype=torch.int64, device=device), Step.of(slots, counts, starts, device), rows, places
        )


class Drafts:
    def __init__(self, tail: Tail, max_drafts: int) -> None:
        num_slots, device = len(tail.state), tail.state.device
        self.tail, self.room = tail, max_drafts + 1  # a step has a token that is no draft
        # The last row of each is for sequences that are skipped: nobody reads it.
        self.saved = torch.zeros(num_slots + 1, *tail.state.shape[1:], dtype=torch.float32, device=device)
        self.tokens = torch.zeros(num_slots + 1, self.room, 2, tail.num_parts * tail.dim, dtype=torch.float32, device=device)
        self.starts = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)  # of what is saved; -1: nothing is

    def reset(self, slot: int | slice = slice(None)) -> None:
        """What is saved is of a request that has left."""
        self.starts[slot] = -1

    def keep(self, kv: Tensor, score: Tensor, step: Step, bias: Tensor | None = None) -> None:
        """Before a step's tokens go into the tail. The same work whatever the step has, all of it on the device."""
        nobody = len(self.saved) - 1
        slots = torch.where(step.slots < 0, nobody, step.slots).long()
        self.saved[slots] = self.tail.state[step.slots.clamp(min=0).long()]
        self.starts[slots] = step.starts
        seqs, places, is_there = step.places(len(kv))
        rows = torch.where(is_there & (places < self.room), slots[seqs], nobody)
        scores = score.to(torch.float32)
        if bias is not None:
            scores = scores + bias[(step.starts[seqs] + places) % self.tail.ratio]
        self.tokens[rows, places.clamp(max=self.room - 1)] = torch.stack((kv.to(torch.float32), scores), 1)

    def take_back(self, accepted: AcceptedTokens, entries: RowPages, block_table: Tensor, *, backend: str = "auto") -> None:
        # A step that was prepared and never came here put no tail aside, and changed none: what is saved is of an earlier one.
        is_saved = self.starts[accepted.slots] == accepted.step.starts
        now, saved = self.tail.state[accepted.slots], self.saved[accepted.slots]
        self.tail.state[accepted.slots] = torch.where(is_saved.view(-1, *[1] * (now.ndim - 1)), saved, now)
        if not len(accepted.rows):
            return
        step = accepted.step._replace(slots=torch.where(is_saved, accepted.step.slots, -1))
        tokens = self.tokens[accepted.rows, accepted.places]
        # Entries that these tokens complete were written by the step: all count as shared.
        written = torch.full((len(block_table),), torch.iinfo(torch.int32).max, dtype=torch.int32, device=block_table.device)
        compress(self.tail, tokens[:, KV], tokens[:, SCORE], entries, block_table, step, num_shared=written, backend=backend)
