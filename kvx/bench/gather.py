"""kvx bench gather: whole sequences out of scattered blocks, against torch's index_select and a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kvx
from kvx.bench.harness import COLD_BYTES, LAYOUTS, Row, time_calls


@dataclass(frozen=True)
class GatherCase:
    batch: int
    length: int
    layout: str = "NHD"
    format: str = "bf16"
    heads: int = 8
    dim: int = 128
    block: int = 16

    @property
    def label(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "layout": self.layout,
            "batch": self.batch,
            "length": self.length,
            "heads": self.heads,
            "dim": self.dim,
            "block": self.block,
        }

    @property
    def spec(self) -> kvx.CacheSpec:
        blocks = self.batch * -(-self.length // self.block) + 8
        return kvx.CacheSpec(blocks, self.block, self.heads, self.dim, layout=LAYOUTS[self.layout], format=self.format)


def cases(device: str) -> Iterator[GatherCase]:
    batch, length = (64, 4096) if device == "cuda" else (16, 1024)
    for layout in ("NHD", "HND", "fused"):
        yield GatherCase(batch, length, layout)
    for fmt in ("fp8_e4m3", "fp8_e4m3_per_token_head", "int8_per_token_head", "nvfp4"):
        yield GatherCase(batch, length, "HND", fmt)
    yield GatherCase(batch, length - 5, "NHD")
    if device == "cuda":
        yield GatherCase(8, 512, "NHD")


def run(case: GatherCase, device: str, ceiling_gbps: float) -> Row:
    spec = case.spec
    g = torch.Generator().manual_seed(0)
    per_seq = -(-case.length // case.block)
    tokens = case.batch * case.length
    size = tokens * (2 * case.heads * case.dim * 2 + spec.token_bytes)
    sets = []
    for _ in range(min(16, max(2, COLD_BYTES // size)) if device == "cuda" else 2):
        storage = kvx.allocate(spec, device)
        for c in (storage.cache,) if isinstance(storage.cache, torch.Tensor) else storage.cache:
            c.view(torch.uint8).random_(0, 120)  # no NaN, and not zeros, which can run faster than real data
        ids = torch.randperm(spec.num_blocks, generator=g)[: case.batch * per_seq].view(case.batch, per_seq)
        table = kvx.PackedTable(
            ids.to(torch.int32).to(device), torch.full((case.batch,), case.length, dtype=torch.int32, device=device)
        )
        out = tuple(
            torch.empty(case.batch, case.length, case.heads, case.dim, dtype=torch.bfloat16, device=device) for _ in range(2)
        )
        sets.append((storage, table, out))

    def call(storage: kvx.Storage, table: kvx.PackedTable, out: Any, backend: str = "auto") -> None:
        kvx.gather(storage.cache, table, spec=spec, max_seq_len=case.length, out=out, backend=backend, **storage.scales())

    storage, table, out = sets[0]
    call(*sets[0])
    part = kvx.PackedTable(table.block_table[:2], table.seq_lens[:2])  # the definition builds index tensors: two sequences suffice
    want = kvx.gather(
        storage.cache,
        part,
        spec=spec,
        max_seq_len=case.length,
        dtype=torch.bfloat16,
        backend="torch",
        **storage.scales(),
    )
    for a, b in zip(out, want, strict=True):
        if not torch.equal(a[:2].view(torch.int16), b.view(torch.int16)):
            raise AssertionError(f"gather differs from the definition for {spec}; nothing was timed")
    ours = time_calls([partial(call, *s) for s in sets], device)
    peer = None
    if case.format == "bf16" and case.layout == "NHD" and case.length % case.block == 0:

        def select(storage: kvx.Storage, table: kvx.PackedTable, out: Any) -> None:
            for c, o in zip(storage.cache, out, strict=True):
                torch.index_select(c, 0, table.block_table.view(-1), out=o.view(-1, *c.shape[1:]))

        peer = time_calls([partial(select, *s) for s in sets], device)
    return Row("gather", case.label, size, ours, peer, ceiling_gbps)
