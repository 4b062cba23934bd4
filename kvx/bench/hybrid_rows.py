"""Cases of kvx bench hybrid that put rows into a cache: windows of requests, and entries made of several tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvx.ops.entry.append_swa import append_swa
from kvx.ops.entry.compress import compress
from kvx.ops.entry.finish import turn
from kvx.ops.entry.step import Step
from kvx.ops.entry.tail import Tail
from kvx.quant.rows import RowCodec, RowPages

DIM, ROPE, WINDOW, BLOCK = 512, 64, 128, 128
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Calls:
    """One set of buffers: the timed call, its check beside the definition, and torch's own way where there is one."""

    call: Callable[[], object]
    check: Callable[[], None]
    peer: Callable[[], object] | None = None


def step_of(batch: int, length: int, starts: list[int], device: str) -> Step:
    return Step.of(list(range(batch)), [length] * batch, starts, device)


@cache
def tables(positions: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin, which layers of a model share."""
    angle = torch.rand(positions, ROPE // 2, generator=torch.Generator().manual_seed(99)) * 6.3
    return angle.cos().to(device), angle.sin().to(device)


def differ(what: str, case: object) -> AssertionError:
    return AssertionError(f"{what} differs from the definition for {case}; nothing was timed")


@dataclass(frozen=True)
class AppendSwa:
    """A prompt's first tokens into windows, or one token of each of many requests."""

    batch: int
    length: int
    op = "append_swa"
    ceiling = "copy"
    flops = 0

    @property
    def label(self) -> dict[str, Any]:
        return {"batch": self.batch, "length": self.length, "rows": "fp8_v4", "dim": DIM, "io": "bf16"}

    @property
    def starts(self) -> list[int]:
        return [0] * self.batch if self.length > 1 else [37 * i % 4096 for i in range(self.batch)]

    @property
    def bytes(self) -> int:
        """x, rows and their positions; of cos and sin each position that comes, once."""
        places = {start + i for start in self.starts for i in range(self.length)}
        return self.batch * self.length * (2 * DIM + RowCodec("fp8_v4", DIM, ROPE).row_bytes + 4) + len(places) * 4 * ROPE

    def make(self, device: str, seed: int) -> Calls:
        g = torch.Generator().manual_seed(seed)
        window = RowPages.zeros(RowCodec("fp8_v4", DIM, ROPE), self.batch, WINDOW, device)
        positions = torch.full((self.batch, WINDOW), -1, dtype=torch.int32, device=device)
        x = torch.randn(self.batch * self.length, DIM, generator=g).bfloat16().to(device)
        step = step_of(self.batch, self.length, self.starts, device)
        cos, sin = tables(max(self.starts) + self.length, device)
        how: dict[str, Any] = {"weight": (torch.randn(DIM, generator=g) * 0.1 + 1).bfloat16().to(device), "cos": cos, "sin": sin}
        call = partial(append_swa, window, positions, x, step, **how)

        def check() -> None:
            call()
            want = RowPages.zeros(window.codec, self.batch, WINDOW, device)
            placed = torch.full_like(positions, -1)
            append_swa(want, placed, x, step, **how, backend="torch")
            if not torch.equal(window.pages, want.pages) or not torch.equal(positions, placed):
                raise differ(self.op, self)

        at = torch.tensor([start + i for start in self.starts for i in range(self.length)], device=device)
        slots = torch.arange(self.batch, device=device).repeat_interleave(self.length) * WINDOW + at % WINDOW

        def peer() -> None:
            eager_write(window, slots, x, at, **how)
            positions.view(-1)[slots] = at.to(torch.int32)

        return Calls(call, check, peer)


# dim, ratio, overlap, row format: what a chunk is projected to in CSA, its indexer, and HCA.
_COMPRESSORS = {
    "csa": (512, 4, True, "fp8_v4"),
    "index": (128, 4, True, "index_mxfp4"),
    "hca": (512, 128, False, "fp8_v4"),
}


@dataclass(frozen=True)
class Compress:
    kind: str
    batch: int
    length: int
    io: str
    op = "compress"
    ceiling = "copy"
    flops = 0

    @property
    def label(self) -> dict[str, Any]:
        dim, ratio, overlap, rows = _COMPRESSORS[self.kind]
        tail = "overlap" if overlap else "running"
        return {
            "kind": self.kind, "batch": self.batch, "length": self.length, "dim": dim, "ratio": ratio, "tail": tail, "rows": rows,
            "io": self.io,
        }  # fmt: skip

    @property
    def starts(self) -> list[int]:
        """A prompt's, or requests at any place of a window: of 128 neighbours each closes another's."""
        return [0] * self.batch if self.length > 1 else [4096 + 37 * i % 4096 for i in range(self.batch)]

    @property
    def num_entries(self) -> int:
        ratio = _COMPRESSORS[self.kind][1]
        return sum((start + self.length) // ratio - start // ratio for start in self.starts)

    @property
    def bytes(self) -> int:
        """kv and score; rows of entries. State: what an open window keeps is written, and what a closing one kept is read."""
        dim, ratio, overlap, _ = _COMPRESSORS[self.kind]
        parts = 2 if overlap else 1
        moved = self.batch * self.length * 2 * parts * dim * DTYPES[self.io].itemsize
        moved += self.num_entries * _codec(self.kind).row_bytes
        for start in self.starts:
            before, after = start % ratio, (start + self.length) % ratio
            closes = before + self.length >= ratio
            if not overlap:  # largest score, sum and mean: read where a window was open, written always
                moved += 3 * dim * 4 * ((before > 0) + 1)
                continue
            row = 2 * dim * 4  # a token's kv and score in one projection
            moved += row * 2 * (after if closes else self.length)
            moved += row * (2 * before + 2 * ratio) * closes  # the window's own, and the ones before it, read and replaced
        return moved

    def make(self, device: str, seed: int) -> Calls:
        g = torch.Generator().manual_seed(seed)
        dim, ratio, overlap, _ = _COMPRESSORS[self.kind]
        tail = Tail(ratio, dim, self.batch, overlap=overlap, device=device)
        width, tokens = tail.num_parts * dim, self.batch * self.length
        kv, score = (torch.randn(tokens, width, generator=g).to(DTYPES[self.io]).to(device) for _ in range(2))
        end = max(self.starts) + self.length
        rows = BLOCK // ratio
        columns = -(-end // BLOCK)
        table = torch.randperm(self.batch * columns, generator=g).to(torch.int32).view(self.batch, columns).to(device)
        entries = RowPages.zeros(_codec(self.kind), self.batch * columns, rows, device)
        step = step_of(self.batch, self.length, self.starts, device)
        cos, sin = tables(end, device)
        bias = torch.randn(ratio, width, generator=g).to(device)
        how: dict[str, Any] = {"weight": (torch.randn(dim, generator=g) * 0.1 + 1).bfloat16().to(device), "cos": cos, "sin": sin}
        given = {**how, "bias": bias, "hadamard": self.kind == "index"}
        call = partial(compress, tail, kv, score, entries, table, step, **given)

        def check() -> None:
            """Weights of a mean are powers of e, which backends round on their own: a code in a hundred may be its neighbour."""
            call()
            want = RowPages.zeros(entries.codec, len(entries.pages), rows, device)
            kept = Tail(ratio, dim, self.batch, overlap=overlap, device=device)
            compress(kept, kv, score, want, table, step, **given, backend="torch")
            written = max(1, self.num_entries * entries.codec.row_bytes)
            if int((entries.pages != want.pages).sum()) > written / 100 + 1:
                raise differ("compress's entries", self)
            if not torch.allclose(tail.state, kept.state, rtol=1e-4, atol=1e-4):
                raise differ("compress's state", self)

        return Calls(call, check, self._peer(kv, score, bias, entries, table, how) if self.length > 1 and self.batch == 1 else None)

    def _peer(
        self, kv: Tensor, score: Tensor, bias: Tensor, entries: RowPages, table: Tensor, how: dict[str, Any]
    ) -> Callable[[], None] | None:
        """Whole windows in torch's steps; the indexer's, which ends in four bits, has none."""
        dim, ratio, overlap, rows = _COMPRESSORS[self.kind]
        if rows != "fp8_v4":
            return None
        at = torch.arange(len(kv) // ratio, device=kv.device)
        slots = table[0][at // entries.rows].long() * entries.rows + at % entries.rows

        def run() -> None:
            values = kv.float().view(-1, ratio, kv.shape[1])
            scores = score.float().view(-1, ratio, kv.shape[1]) + bias
            if overlap:
                values = torch.cat((F.pad(values[:-1, :, :dim], (0, 0, 0, 0, 1, 0)), values[..., dim:]), 1)
                before = F.pad(scores[:-1, :, :dim], (0, 0, 0, 0, 1, 0), value=-torch.inf)
                scores = torch.cat((before, scores[..., dim:]), 1)
            eager_write(entries, slots, (scores.softmax(1) * values).sum(1), at * ratio, **how)

        return run


def _codec(kind: str) -> RowCodec:
    dim, _, _, rows = _COMPRESSORS[kind]
    return RowCodec(rows, dim, ROPE if rows == "fp8_v4" else 0)


def eager_write(pages: RowPages, slots: Tensor, x: Tensor, at: Tensor, *, weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    """fp8_v4 rows in torch's own steps: norm, rotation, amax of tiles, power of two, cast, scattered copies."""
    x = F.rms_norm(x.float(), (x.shape[-1],), weight.float(), 1e-6)
    x = turn(x, cos[at], sin[at]).bfloat16()
    tiles = x[:, : DIM - ROPE].float().unflatten(1, (-1, pages.codec.group))
    power = (tiles.abs().amax(-1).clamp(min=1e-4) / 448).log2().ceil()
    codes = (tiles / power.exp2()[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
    data, scales = pages.codec.parts(pages.pages, pages.rows)
    page, row = slots // pages.rows, slots % pages.rows
    data[page, row] = torch.cat((codes, x[:, DIM - ROPE :].contiguous().view(torch.uint8)), 1)
    scales[page, row] = F.pad((power + 127).to(torch.uint8), (0, 1))
