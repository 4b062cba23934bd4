"""Cases of kvx bench hybrid that read a cache: scores of an indexer, the highest of them, and attention over the rows they name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvx.bench.hybrid_rows import BLOCK, DIM, DTYPES, ROPE, WINDOW, Calls, differ, step_of, tables
from kvx.ops.attention.sparse import attention_sparse
from kvx.ops.entry.index_scores import index_scores
from kvx.ops.entry.step import Step
from kvx.ops.entry.topk import topk, topk_workspace_bytes
from kvx.quant.rows import RowCodec, RowPages

INDEX_DIM, INDEX_HEADS, INDEX_RATIO = 128, 64, 4


def fill(pages: RowPages, seed: int) -> None:
    """Random rows, coded: a few thousand of them over and over."""
    count = max(1, 4096 // pages.rows)
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(count * pages.rows, pages.codec.dim, generator=g).to(pages.pages.device)
    parts = pages.codec.encode(rows)
    for to, part in zip(pages.codec.parts(pages.pages, pages.rows), parts, strict=True):
        unit = part.view(count, pages.rows, -1)
        for first in range(0, len(to), count):
            to[first : first + count] = unit[: len(to) - first]


def paged_entries(codec: RowCodec, batch: int, entries: int, rows: int, seed: int, device: str) -> tuple[RowPages, Tensor]:
    """Entries of requests and their block table, no two pages neighbours but by chance."""
    columns = -(-entries // rows)
    pages = RowPages.zeros(codec, batch * columns, rows, device)
    fill(pages, seed)
    ids = torch.randperm(batch * columns, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    return pages, ids.view(batch, columns).to(device)


@dataclass(frozen=True)
class IndexScores:
    """A token of each request over all of its entries' keys."""

    batch: int
    entries: int
    keys: str
    q: str
    op = "index_scores"
    ceiling = "read"

    @property
    def label(self) -> dict[str, Any]:
        rows = BLOCK // INDEX_RATIO
        return {
            "batch": self.batch, "entries": self.entries, "keys": self.keys, "q": self.q, "heads": INDEX_HEADS, "dim": INDEX_DIM,
            "page": rows,
        }  # fmt: skip

    @property
    def bytes(self) -> int:
        """Keys, pages' numbers, queries and weights; and the scores, written."""
        rows = BLOCK // INDEX_RATIO
        entry = RowCodec(self.keys, INDEX_DIM).row_bytes + 4
        token = INDEX_HEADS * (INDEX_DIM * DTYPES[self.q].itemsize + 4)
        return self.batch * (self.entries * entry + self.entries // rows * 4 + token)

    @property
    def flops(self) -> int:
        return self.batch * self.entries * INDEX_HEADS * (2 * INDEX_DIM)

    def make(self, device: str, seed: int) -> Calls:
        g = torch.Generator().manual_seed(seed)
        codec = RowCodec(self.keys, INDEX_DIM)
        keys, table = paged_entries(codec, self.batch, self.entries, BLOCK // INDEX_RATIO, seed, device)
        q = torch.randn(self.batch, INDEX_HEADS, INDEX_DIM, generator=g).to(DTYPES[self.q]).to(device)
        weights = torch.randn(self.batch, INDEX_HEADS, generator=g).to(device)
        out = torch.empty(self.batch, self.entries, device=device)
        step = step_of(self.batch, 1, [self.entries * INDEX_RATIO - 1] * self.batch, device)
        call = partial(index_scores, q, weights, keys, table, step, ratio=INDEX_RATIO, max_entries=self.entries, out=out)

        def check() -> None:
            call()
            want = index_scores(
                q[:2], weights[:2], keys, table, _first(step, 2), ratio=INDEX_RATIO, max_entries=self.entries, backend="torch"
            )
            # Of the sum of magnitudes 2^-12 may be lost where products are added in 13 bits; here it is of the largest score.
            if not float((out[:2] - want).abs().max()) <= 0.01 * float(want.abs().max()):
                raise differ(self.op, self)

        return Calls(call, check, self._peer(q, weights, keys, table) if seed < 2 else None)

    def _peer(self, q: Tensor, weights: Tensor, keys: RowPages, table: Tensor) -> Callable[[], Tensor]:
        """torch's matmuls over keys that are decoded and in order already."""
        slots = table[:, :, None].long() * keys.rows + torch.arange(keys.rows, device=q.device)
        kind = _matmul_dtype(q)
        rows = torch.stack([keys.read(s.flatten()).to(kind) for s in slots])
        heads, w = q.to(kind), weights.to(kind)[:, None]
        return lambda: torch.bmm(w, torch.bmm(heads, rows.transpose(1, 2)).relu_())


@dataclass(frozen=True)
class Topk:
    batch: int
    entries: int
    k: int
    op = "topk"
    ceiling = "read"
    flops = 0

    @property
    def label(self) -> dict[str, Any]:
        return {"batch": self.batch, "entries": self.entries, "k": self.k}

    @property
    def bytes(self) -> int:
        return self.batch * (self.entries + self.k) * 4

    def make(self, device: str, seed: int) -> Calls:
        scores = torch.randn(self.batch, self.entries, generator=torch.Generator().manual_seed(seed)).to(device)
        out = torch.empty(self.batch, self.k, dtype=torch.int32, device=device)
        size = topk_workspace_bytes(self.batch, self.entries, self.k, device)
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        call = partial(topk, scores, self.k, out=out, workspace=workspace)

        def check() -> None:
            call()
            if not torch.equal(out, topk(scores, self.k, backend="torch")):
                raise differ(self.op, self)

        return Calls(call, check, partial(torch.topk, scores, self.k))


@dataclass(frozen=True)
class Sparse:
    """A token of each request over its window and over selected entries; `selected` 0: over all of them."""

    batch: int
    heads: int
    selected: int
    entries: int = 4096
    ratio: int = 4
    op = "attention_sparse"
    ceiling = "read"

    @property
    def label(self) -> dict[str, Any]:
        return {
            "batch": self.batch, "heads": self.heads, "window": WINDOW, "selected": self.selected or "all", "entries": self.entries,
            "ratio": self.ratio, "rows": "fp8_v4", "q": "bf16",
        }  # fmt: skip

    @property
    def num_rows(self) -> int:
        """That a token reads."""
        return WINDOW + (self.selected or self.entries)

    @property
    def bytes(self) -> int:
        """Rows that are read, queries and out, numbers of selected entries."""
        row = RowCodec("fp8_v4", DIM, ROPE).row_bytes
        return self.batch * (self.num_rows * row + 2 * self.heads * DIM * 2 + self.selected * 4 + WINDOW * 4)

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.num_rows * DIM

    def make(self, device: str, seed: int) -> Calls:
        g = torch.Generator().manual_seed(seed)
        codec = RowCodec("fp8_v4", DIM, ROPE)
        at = self.entries * self.ratio - 1
        window = RowPages.zeros(codec, self.batch, WINDOW, device)
        fill(window, seed + 100)
        last = torch.arange(at - WINDOW + 1, at + 1)
        positions = torch.empty(WINDOW, dtype=torch.int32)
        positions[last % WINDOW] = last.to(torch.int32)
        positions = positions.repeat(self.batch, 1).to(device)
        entries, table = paged_entries(codec, self.batch, self.entries, max(1, BLOCK // self.ratio), seed, device)
        chosen = [torch.randperm(self.entries, generator=g)[: self.selected] for _ in range(self.batch)]
        selected = torch.stack(chosen).to(torch.int32).to(device) if self.selected else None
        q = torch.randn(self.batch, self.heads, DIM, generator=g).bfloat16().to(device)
        step = step_of(self.batch, 1, [at] * self.batch, device)
        cos, sin = tables(at + 1, device)
        given: dict[str, Any] = {
            "window_tokens": WINDOW, "entries": entries, "block_table": table, "ratio": self.ratio, "cos": cos, "sin": sin,
            "sinks": torch.randn(self.heads, generator=g).to(device), "max_entries": self.entries,
        }  # fmt: skip
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
        call = partial(attention_sparse, q, window, positions, step, selected=selected, out=out, lse=lse, **given)

        def check() -> None:
            call()
            some = None if selected is None else selected[:2]
            want, want_lse = attention_sparse(
                q[:2].float(), window, positions, _first(step, 2), selected=some, **given, backend="torch"
            )
            for got, expected in ((out, want), (lse, want_lse)):
                if not float((got[:2].float() - expected).abs().max()) <= 0.02 * float(expected.abs().max()):
                    raise differ(self.op, self)

        return Calls(call, check, self._peer(q, window, entries, table, selected) if seed < 4 else None)

    def _peer(self, q: Tensor, window: RowPages, entries: RowPages, table: Tensor, selected: Tensor | None) -> Callable[[], Tensor]:
        """torch's matmuls and softmax over rows that are decoded and together already; no sink, nothing turned back."""
        kind, rows = _matmul_dtype(q), []
        for s in range(self.batch):
            numbers = torch.arange(self.entries, device=q.device) if selected is None else selected[s].long()
            slots = table[s][numbers // entries.rows].long() * entries.rows + numbers % entries.rows
            mine = window.read(s * WINDOW + torch.arange(WINDOW, device=q.device))
            rows.append(torch.cat((mine, entries.read(slots))).to(kind))
        kv, heads = torch.stack(rows), q.to(kind)
        return lambda: torch.bmm((torch.bmm(heads, kv.transpose(1, 2)) * DIM**-0.5).softmax(-1), kv)


def _matmul_dtype(q: Tensor) -> torch.dtype:
    """What torch multiplies fastest: many CPUs have no bf16."""
    return torch.bfloat16 if q.is_cuda else torch.float32


def _first(step: Step, count: int) -> Step:
    return Step(step.slots[:count], step.cu_seqlens[: count + 1], step.starts[:count])
