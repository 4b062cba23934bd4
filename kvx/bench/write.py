"""kvx bench write: K and V of a batch into scattered blocks, against torch's index_copy_ and a plain copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import kvx
from kvx.bench.harness import COLD_BYTES, LAYOUTS, Row, time_calls


@dataclass(frozen=True)
class WriteCase:
    tokens: int
    layout: str = "NHD"
    format: str = "bf16"
    slots: str = "blocks"  # blocks: random blocks, tokens in order; random: every token anywhere
    heads: int = 8
    dim: int = 128
    block: int = 16

    @property
    def label(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "layout": self.layout,
            "tokens": self.tokens,
            "slots": self.slots,
            "heads": self.heads,
            "dim": self.dim,
            "block": self.block,
        }

    @property
    def spec(self) -> kvx.CacheSpec:
        blocks = max(64, 2 * self.tokens // self.block)
        return kvx.CacheSpec(blocks, self.block, self.heads, self.dim, layout=LAYOUTS[self.layout], format=self.format)


def cases(device: str) -> Iterator[WriteCase]:
    large = (16384, 65536) if device == "cuda" else (16384,)
    for tokens in large:
        for layout in ("NHD", "HND", "fused"):
            yield WriteCase(tokens, layout)
        yield WriteCase(tokens, "NHD", slots="random")
        yield WriteCase(tokens, "HND", slots="random")
        for fmt in (
            "fp8_e4m3",
            "fp8_e4m3_per_head",
            "fp8_e4m3_per_token_head",
            "int8_per_token_head",
            "fp8_e4m3_per_token_head_inline",
            "nvfp4",
        ):
            yield WriteCase(tokens, "HND", fmt)
        yield WriteCase(tokens, "NHD", "fp8_e4m3")
        yield WriteCase(tokens, "NHD", "fp8_e4m3_per_token_head")
    for tokens in (64, 1024) if device == "cuda" else (64,):
        yield WriteCase(tokens, "NHD")
        yield WriteCase(tokens, "NHD", "fp8_e4m3_per_token_head")


@dataclass
class WriteInputs:
    """Buffers of one call; several sets rotate so that none is cached."""

    storage: kvx.Storage
    k: Tensor
    v: Tensor
    slots: Tensor


def make_set(case: WriteCase, device: str, seed: int) -> WriteInputs:
    g = torch.Generator().manual_seed(seed)
    spec = case.spec
    if case.slots == "random":
        slots = torch.randperm(spec.num_slots, generator=g)[: case.tokens]
    else:
        blocks = torch.randperm(spec.num_blocks, generator=g)[: -(-case.tokens // case.block)]
        slots = (blocks[:, None] * case.block + torch.arange(case.block)).flatten()[: case.tokens]
    k, v = (torch.randn(case.tokens, case.heads, case.dim, generator=g).to(torch.bfloat16).to(device) for _ in range(2))
    return WriteInputs(kvx.allocate(spec, device), k, v, slots.to(device))


def moved_bytes(case: WriteCase) -> int:
    """IO read once, cells written once, slots read once; scales stored per token are in token_bytes."""
    return case.tokens * (2 * case.heads * case.dim * 2 + case.spec.token_bytes + 8)


def run(case: WriteCase, device: str, ceiling_gbps: float) -> Row:
    spec, size = case.spec, moved_bytes(case)
    count = min(16, max(2, COLD_BYTES // size)) if device == "cuda" else 3
    sets = [make_set(case, device, seed) for seed in range(count)]
    check(sets[0], spec)

    def call(s: WriteInputs) -> None:
        kvx.write(s.storage.cache, s.k, s.v, slot_mapping=s.slots, spec=spec, **s.storage.scales())

    calls = [partial(call, s) for s in sets]
    ours = time_calls(calls, device)
    peer = None
    if case.format == "bf16" and case.layout == "NHD":
        flat = [[c.view(-1, case.heads, case.dim) for c in s.storage.cache] for s in sets]

        def index_copy(s: WriteInputs, f: list[Tensor]) -> None:
            f[0].index_copy_(0, s.slots, s.k)
            f[1].index_copy_(0, s.slots, s.v)

        peer = time_calls([partial(index_copy, s, f) for s, f in zip(sets, flat, strict=True)], device)
    return Row("write", case.label, size, ours, peer, ceiling_gbps)


def check(s: WriteInputs, spec: kvx.CacheSpec) -> None:
    """The timed buffers hold what the definition puts there."""
    kvx.write(s.storage.cache, s.k, s.v, slot_mapping=s.slots, spec=spec, **s.storage.scales())
    want = kvx.allocate(spec, s.k.device)
    kvx.write(want.cache, s.k, s.v, slot_mapping=s.slots, spec=spec, backend="torch", **want.scales())
    pairs = [(s.storage.cache, want.cache), (s.storage.k_scale, want.k_scale), (s.storage.v_scale, want.v_scale)]
    for got, expected in pairs:
        for a, b in zip(_list(got), _list(expected), strict=True):
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                raise AssertionError(f"write differs from the definition for {spec}; nothing was timed")


def _list(x: Any) -> list[Tensor]:
    return [] if x is None else [x.reshape(-1)] if isinstance(x, Tensor) else [t.reshape(-1) for t in x]
