"""Windows: the last tokens' rows of each request, in a ring. The row of position p stands in place p mod ring, whoever writes it.

A ring is the window and as many rows more as drafts may be taken back: what a draft writes over is then out of every window.
kvx.ops.entry.append_swa writes rings, kvx.ops.attention.sparse reads them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.quant.rows import RowCodec, RowPages


class Window:
    def __init__(
        self, codec: RowCodec, window: int, num_slots: int, *, max_drafts: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        self.window, self.ring = window, window + max_drafts
        self.rows = RowPages.zeros(codec, num_slots, self.ring, device)  # a page for each slot
        self.positions = torch.full((num_slots, self.ring), -1, dtype=torch.int32, device=device)  # of each place's row; -1: none

    @property
    def codec(self) -> RowCodec:
        return self.rows.codec

    @property
    def pages(self) -> Tensor:
        return self.rows.pages

    def reset(self, slot: int | slice = slice(None)) -> None:
        self.positions[slot] = -1
        self.pages[slot] = 0

    def truncate(self, lengths: Tensor) -> None:
        """Take back the rows from these positions on, [num_slots] int32."""
        self.positions.masked_fill_(self.positions >= lengths[:, None], -1)
