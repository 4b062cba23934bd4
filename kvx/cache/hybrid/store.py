"""LayerStore: one layer's memory. A window for each request; rows of entries in blocks, and the tails that entries are made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.cache.hybrid.drafts import Drafts
from kvx.cache.hybrid.schema import LayerSchema
from kvx.cache.hybrid.window import Window
from kvx.ops.entry.tail import Tail
from kvx.quant.rows import RowPages


@dataclass(frozen=True)
class LayerStore:
    """A layer that reads another's entries has that one's pages."""

    schema: LayerSchema
    window: Window
    tail: Tail | None = None
    index_tail: Tail | None = None
    entries: RowPages | None = None  # a page for each block
    index: RowPages | None = None
    drafts: Drafts | None = None
    index_drafts: Drafts | None = None

    @staticmethod
    def make(
        s: LayerSchema, *, block_tokens: int, num_blocks: int, num_slots: int, max_drafts: int, device: torch.device,
        owner: LayerStore | None = None,
    ) -> LayerStore:  # fmt: skip
        window = Window(s.window_codec, s.window, num_slots, max_drafts=max_drafts, device=device)
        if not s.ratio:
            return LayerStore(s, window)
        if owner is not None:
            return LayerStore(s, window, entries=owner.entries, index=owner.index)
        rows = block_tokens // s.ratio

        def tail(dim: int) -> Tail:
            return Tail(s.ratio, dim, num_slots, overlap=s.overlap, kind=s.tail, device=device)

        def drafts(of: Tail | None) -> Drafts | None:
            return Drafts(of, max_drafts) if of is not None and max_drafts else None

        main, index = tail(s.head_dim), tail(s.index_dim) if s.index_dim else None
        entries = RowPages.zeros(s.entry_codec, num_blocks, rows, device)
        keys = RowPages.zeros(s.index_codec, num_blocks, rows, device) if s.index_dim else None
        return LayerStore(s, window, main, index, entries, keys, drafts(main), drafts(index))

    def reset(self, slot: int) -> None:
        """As before the first token."""
        self.window.reset(slot)
        for tail in (self.tail, self.index_tail):
            if tail is not None:
                tail.reset(slot)
        for drafts in (self.drafts, self.index_drafts):
            if drafts is not None:
                drafts.reset(slot)

    @property
    def tensors(self) -> list[Tensor]:
        """Of its own."""
        tensors = [self.window.pages, self.window.positions]
        tensors += [t.state for t in (self.tail, self.index_tail) if t is not None]
        tensors += [t for d in (self.drafts, self.index_drafts) if d is not None for t in (d.saved, d.tokens)]
        if self.schema.has_entries:
            tensors += [p.pages for p in (self.entries, self.index) if p is not None]
        return tensors

    @property
    def memory_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)
