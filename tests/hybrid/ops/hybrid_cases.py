"""Steps, rows and tables that tests of hybrid ops share. What no op may read is poison: unused rows and pages, tokens of nobody."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.ops.entry.step import Run, Step
from kvx.quant.rows import RowCodec, RowPages
from kvx.spec import ROW_FORMATS

NAN_BYTE = 0x7F  # NaN as e4m3; 0x7f7f is a large bf16, so pages of it are seen wherever they are read
FAR = 100_000
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


@dataclass(frozen=True)
class Batch:
    """A step in numbers. `behind` tokens belong to no sequence."""

    name: str
    slots: tuple[int, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    behind: int = 0
    num_slots: int = 6

    def __str__(self) -> str:
        return self.name

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) + self.behind

    def step(self, device: str | torch.device) -> Step:
        return Step.of(self.slots, self.lengths, self.starts, device)

    def runs(self) -> list[Run]:
        return list(self.step("cpu").runs())


BATCHES = [
    Batch("decode", (2, 0, 5), (1, 1, 1), (7, 1000, FAR)),
    Batch("skipped", (2, -1, 5, -3), (1, 2, 1, 1), (127, 0, FAR - 1, 4), behind=2),
    Batch("mixed", (1, -1, 4, 0, 3), (1, 3, 0, 301, 7), (5003, 9, 0, 0, 250), behind=3),
    Batch("chunks", (3, 1), (530, 64), (FAR - 77, 61)),
    Batch("nobody", (-1, 2), (3, 0), (0, 50), behind=1),
    Batch("no_sequence", (), (), (), behind=2),
]


def codecs(
    formats: tuple[str, ...] = tuple(ROW_FORMATS), dims: tuple[tuple[int, int], ...] = ((512, 64), (64, 16), (128, 0))
) -> list:
    """(format, dim, rope_dim) of all that can be."""
    made = []
    for name in formats:
        for dim, rope_dim in dims:
            try:
                RowCodec(name, dim, rope_dim)
            except BadArgument:
                continue
            made.append((name, dim, rope_dim))
    return made


@lru_cache
def tables(rope_dim: int, device: str) -> tuple[Tensor, Tensor]:
    """cos and sin of every position a batch has."""
    angles = torch.arange(FAR + 600, dtype=torch.float32)[:, None] * 10_000 ** (
        -torch.arange(rope_dim // 2) / max(1, rope_dim // 2)
    )
    return angles.cos().to(device), angles.sin().to(device)


def poisoned(codec: RowCodec, num_pages: int, rows: int, device: str) -> RowPages:
    pages = RowPages.zeros(codec, num_pages, rows, device)
    pages.pages.fill_(NAN_BYTE)
    return pages


def clone(rows: RowPages) -> RowPages:
    return RowPages(rows.codec, rows.pages.clone(), rows.rows)


def randn(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def tokens(
    batch: Batch, generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """[num_tokens, *shape]; rows of tokens that nobody reads are NaN."""
    x = randn(generator, batch.num_tokens, *shape)
    x[~owned(batch)] = torch.nan
    return x.to(device=device, dtype=dtype)


def owned(batch: Batch) -> Tensor:
    mine = torch.zeros(batch.num_tokens, dtype=torch.bool)
    for run in batch.runs():
        mine[run.begin : run.end] = True
    return mine


def table(
    batch: Batch, rows: int, ratio: int, generator: torch.Generator, device: str, *, missing: float = 0.0
) -> tuple[Tensor, int]:
    """(block table for every run's entries, pages there are). Columns behind what a run needs are 2^30; some pages are missing."""
    needs = {run.slot: -(-(run.start + run.end - run.begin) // (ratio * rows)) for run in batch.runs()}
    columns = max(needs.values(), default=0) + 1
    total = sum(needs.values()) + 2
    ids = torch.randperm(total, generator=generator).tolist()
    blocks = torch.full((batch.num_slots, columns), 2**30, dtype=torch.int32)
    for slot, need in needs.items():
        for column in range(need):
            is_missing = float(torch.rand((), generator=generator)) < missing
            blocks[slot, column] = -1 if is_missing else ids.pop()
    return blocks.to(device), total
