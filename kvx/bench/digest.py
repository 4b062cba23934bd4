"""kvx bench digest: the content digest of whole caches, against the speed at which memory can be read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import kvx
from kvx.bench.convert import LAYOUTS
from kvx.bench.harness import Row, time_calls
from kvx.layout.place import buffer_bytes
from kvx.ops.move.digest import add_digest

CEILINGS = ("read",)


@dataclass(frozen=True)
class DigestCase:
    layout: str
    tokens: int = 16
    blocks: int = 128
    layers: int = 80

    @property
    def label(self) -> dict[str, Any]:
        return {"layout": self.layout, "block": self.tokens, "blocks": self.blocks, "layers": self.layers}

    @property
    def spec(self) -> kvx.CacheSpec:
        return kvx.CacheSpec(self.blocks, self.tokens, 8, 128, layout=LAYOUTS[self.layout], num_layers=self.layers)


def cases(device: str) -> Iterator[DigestCase]:
    for layout in ("nhd", "vllm.0.26-nhd", "trtllm", "packed-k"):
        yield DigestCase(layout, layers=80 if device == "cuda" else 32)


def run(case: DigestCase, device: str, ceiling_gbps: float) -> Row:
    spec = case.spec
    sets = []
    for n in range(2 if device == "cuda" else 1):
        torch.manual_seed(n)
        sets.append([torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256) for size in buffer_bytes(spec)])
    small = kvx.digest(sets[0], spec, blocks=[0, case.blocks - 1])
    plain = kvx.CacheSpec(case.blocks, case.tokens, 8, 128, layout=LAYOUTS["nhd"], num_layers=case.layers)
    other = kvx.allocate_buffers(plain, device)
    kvx.convert(sets[0], other, plan=kvx.plan(spec, plain), src_blocks=[0, case.blocks - 1], dst_blocks=[1, 2])
    if kvx.digest(other, plain, blocks=[1, 2]) != small:
        raise AssertionError("the digest differs between layouts; nothing was timed")
    out = torch.zeros(2, dtype=torch.int64, device=device)
    ids = torch.arange(case.blocks)
    ours = time_calls([partial(add_digest, out, s, spec, ids, None) for s in sets], device)
    return Row("digest", case.label, spec.cache_bytes, ours, None, ceiling_gbps, ceiling="read")
