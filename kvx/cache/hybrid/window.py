"""Windows: the last tokens' rows of each request, in a ring. The row of position p stands in place p mod ring, whoever writes it.

A ring is the window and as many rows more as drafts may be taken back: what a draft writes over is then out of every window.
kvx.ops.entry.append_swa writes rings, kvx.ops.attention.sparse reads them.
"""

from __future__ import annotations

from torch import Tensor

from kvx.quant.rows import RowCodec, RowPages


class Window:
    def __init__(self, codec: RowCodec, window: int, pages: Tensor, positions: Tensor) -> None:
        self.window, self.ring = window, positions.shape[1]
        self.rows = RowPages(codec, pages, self.ring)  # uint8 [num_slots, page_bytes]: a page for each slot
        self.positions = positions  # [num_slots, ring] int32, of each place's row; -1: none
        self.reset()

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
