"""kvx bench amax: largest magnitudes of a batch, against torch's abs().amax() and a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kvx
from kvx.bench.harness import COLD_BYTES, Row, time_calls


@dataclass(frozen=True)
class AmaxCase:
    tokens: int
    per: str = "tensor"
    heads: int = 8
    dim: int = 128

    @property
    def label(self) -> dict[str, Any]:
        return {"per": self.per, "tokens": self.tokens, "heads": self.heads, "dim": self.dim}


def cases(device: str) -> Iterator[AmaxCase]:
    for per in ("tensor", "head"):
        yield AmaxCase(65536 if device == "cuda" else 16384, per)


def run(case: AmaxCase, device: str, ceiling_gbps: float) -> Row:
    g = torch.Generator().manual_seed(0)
    size = case.tokens * case.heads * case.dim * 2  # read once; the output is a few bytes
    count = min(16, max(2, COLD_BYTES // size)) if device == "cuda" else 3
    xs = [torch.randn(case.tokens, case.heads, case.dim, generator=g).to(torch.bfloat16).to(device) for _ in range(count)]
    dims = (0, 2) if case.per == "head" else (0, 1, 2)
    want = xs[0].float().abs().amax(dims)
    if not torch.equal(kvx.amax(xs[0], case.per), want):
        raise AssertionError(f"amax differs from torch for {case}; nothing was timed")
    out = torch.zeros_like(want)
    ours = time_calls([partial(kvx.amax, x, case.per, out=out) for x in xs], device)
    peer = time_calls([partial(_torch_amax, x, dims) for x in xs], device)
    return Row("amax", case.label, size, ours, peer, ceiling_gbps)


def _torch_amax(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return x.abs().amax(dims)
