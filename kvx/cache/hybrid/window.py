"""Windows: the last tokens' rows of each request, in a ring. The row of position p stands in place p mod ring, whoever writes it.

A ring is the window and as many rows more as drafts may be taken back: what a draft writes over is then out of every window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.cache.hybrid.rows import RowCodec


class Window:
    def __init__(
        self, codec: RowCodec, window: int, num_slots: int, *, max_drafts: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        self.codec, self.window, self.ring = codec, window, window + max_drafts
        self.pages = torch.zeros(num_slots, codec.page_bytes(self.ring), dtype=torch.uint8, device=device)
        self.positions = torch.full((num_slots, self.ring), -1, dtype=torch.int32, device=device)  # of each place's row; -1: none

    def reset(self, slot: int | slice = slice(None)) -> None:
        self.positions[slot] = -1
        self.pages[slot] = 0

    def write(self, slot: int, start: int, rows: Tensor) -> None:
        """Rows of positions from `start` on. Of more than the ring holds, the last."""
        first = max(0, len(rows) - self.ring)
        positions = torch.arange(start + first, start + len(rows), device=rows.device)
        places = positions % self.ring
        self.codec.write(self.pages, self.ring, slot * self.ring + places, rows[first:])
        self.positions[slot, places] = positions.to(torch.int32)

    def before(self, slot: int, position: int) -> tuple[Tensor, Tensor]:
        """What a token at `position` sees of those before it: rows [n, dim] f32 in order, and their positions [n]."""
        wanted = torch.arange(max(0, position - self.window + 1), position, device=self.pages.device)
        places = wanted % self.ring
        wanted = wanted[self.positions[slot, places] == wanted]
        return self.codec.read(self.pages, self.ring, slot * self.ring + wanted % self.ring), wanted

    def truncate(self, slot: int, length: int) -> None:
        """Take back the rows from position `length` on."""
        positions = self.positions[slot]
        positions[positions >= length] = -1
