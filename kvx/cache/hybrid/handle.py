"""LayerHandle: one layer of a cache during a step. Views are made with the cache: what a handle hands out was there before.

    handle = cache.acquire(layer, step)
    handle.write_swa(x, weight=..., cos=cos, sin=sin)        # the step's rows, into their windows
    handle.flush(projected, projected_keys, cos=cos, sin=sin)  # into tails; entries that close, into their pages
    swa, entries, keys = handle.read_swa_view(), handle.read_classical_view(), handle.read_indexer_view()

Nothing here looks at what is in a step: a captured graph replays with other positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.cache.hybrid.drafts import Drafts
from kvx.cache.hybrid.store import LayerStore
from kvx.errors import BadArgument
from kvx.ops.entry.append_swa import append_swa
from kvx.ops.entry.compress import compress
from kvx.ops.entry.step import Step
from kvx.ops.entry.tail import Tail
from kvx.quant.rows import RowPages

FRESH_ROWS = 64  # of a page of a step's own rows


@dataclass(frozen=True)
class SWAView:
    """Windows of all slots."""

    rows: RowPages  # a page for each slot: the row of position p is row p % rows.rows
    positions: Tensor  # [num_slots, ring] int32: whose each row is, -1: nobody's
    window: int  # a token sees so many positions, its own included


@dataclass(frozen=True)
class ClassicalView:
    """Entries of all requests."""

    rows: RowPages
    block_table: Tensor  # [num_slots, columns] int32: entry j of a slot is row j % rows.rows of page [slot, j // rows.rows]
    num_shared: Tensor  # [num_slots] int32: entries of tokens before this position are not written
    ratio: int  # token t reads entry j when (t + 1) // ratio > j


@dataclass(frozen=True)
class IndexerView:
    """The indexer's keys, one for each entry and at the same place."""

    rows: RowPages
    block_table: Tensor
    num_shared: Tensor
    ratio: int
    hadamard: bool  # keys are rotated: queries have to be


@dataclass(frozen=True)
class LayerViews:
    store: LayerStore
    swa: SWAView
    classical: ClassicalView | None
    indexer: IndexerView | None

    @staticmethod
    def make(store: LayerStore, block_table: Tensor, num_shared: Tensor) -> LayerViews:
        s, tables = store.schema, (block_table, num_shared)
        return LayerViews(
            store,
            SWAView(store.window.rows, store.window.positions, s.window),
            ClassicalView(store.entries, *tables, s.ratio) if store.entries is not None else None,
            IndexerView(store.index, *tables, s.ratio, s.hadamard) if store.index is not None else None,
        )


class Projected(NamedTuple):
    """What a compressor made of a step's tokens, and what it does to entries."""

    kv: Tensor  # [num_tokens, num_parts * dim]; with overlap (ovl, cur): for the next entry, and for its own
    score: Tensor  # the same
    bias: Tensor | None = None  # [ratio, num_parts * dim] f32: added to scores by place in the window
    weight: Tensor | None = None  # [dim]: RMSNorm of entries
    eps: float = 1e-6


class LayerHandle(NamedTuple):
    views: LayerViews
    step: Step
    backend: str

    def read_swa_view(self) -> SWAView:
        return self.views.swa

    def read_classical_view(self) -> ClassicalView | None:
        return self.views.classical

    def read_indexer_view(self) -> IndexerView | None:
        return self.views.indexer

    def write_swa(
        self,
        x: Tensor,  # [num_tokens, dim]
        *,
        weight: Tensor | None = None,  # [dim]: RMSNorm first
        eps: float = 1e-6,
        cos: Tensor | None = None,  # [max_positions, rope_dim / 2] f32: then rotation
        sin: Tensor | None = None,
    ) -> None:
        """The step's rows into their windows. Of several tokens a sequence: after they have attended (see fresh_rows)."""
        swa = self.views.swa
        append_swa(swa.rows, swa.positions, x, self.step, weight=weight, eps=eps, cos=cos, sin=sin, backend=self.backend)

    def fresh_rows(
        self, x: Tensor, *, weight: Tensor | None = None, eps: float = 1e-6, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> RowPages:
        """The same rows in pages of their own, for attention_sparse: in the ring a chunk's last would stand in place of rows that
        its first still see. The only thing here that is made anew."""
        codec = self.views.swa.rows.codec
        pages = torch.empty(-(-len(x) // FRESH_ROWS), codec.page_bytes(FRESH_ROWS), dtype=torch.uint8, device=x.device)
        fresh = RowPages(codec, pages, FRESH_ROWS)
        append_swa(fresh, None, x, self.step, weight=weight, eps=eps, cos=cos, sin=sin, backend=self.backend)
        return fresh

    def flush(
        self, entries: Projected, index: Projected | None = None, *, cos: Tensor | None = None, sin: Tensor | None = None
    ) -> None:
        """The step's tokens into the tails; entries they complete, and their keys, into their pages. Always runs: which windows
        close follows from positions, on the device."""
        store, view, keys = self.views.store, self.views.classical, self.views.indexer
        if view is None or store.tail is None:
            raise BadArgument("flush(): the layer has no entries of its own.")
        if (index is None) != (store.index_tail is None):
            raise BadArgument(
                f"flush(): index is {'not ' if index is None else ''}given, and the layer has {'an' if keys else 'no'} indexer."
            )
        self._compress(store.tail, store.drafts, view, entries, cos, sin)
        if index is not None and keys is not None and store.index_tail is not None:
            self._compress(store.index_tail, store.index_drafts, keys, index, cos, sin)

    def _compress(
        self,
        tail: Tail,
        drafts: Drafts | None,
        view: ClassicalView | IndexerView,
        p: Projected,
        cos: Tensor | None,
        sin: Tensor | None,
    ) -> None:
        if drafts is not None:
            drafts.keep(p.kv, p.score, self.step, p.bias)
        compress(
            tail, p.kv, p.score, view.rows, view.block_table, self.step, bias=p.bias, weight=p.weight, eps=p.eps, cos=cos, sin=sin,
            hadamard=isinstance(view, IndexerView) and view.hadamard, num_shared=view.num_shared, backend=self.backend,
        )  # fmt: skip
