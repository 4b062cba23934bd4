"""Caches with known content, and movers on them, for the tests."""

from __future__ import annotations

from dataclasses import replace

import torch

import kvx
from kvx.tiers import BlockKind, Mover, block_spec
from tests.tiers.blocks import key

NEUTRAL = "block | head layer kv token dim"
SPEC = kvx.CacheSpec(24, 8, 2, 16, num_layers=3, layout="layer kv | block token head dim", format="f32", model="small")
KEPT = block_spec(replace(SPEC, layout=NEUTRAL))


def filled(spec: kvx.CacheSpec = SPEC, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(t.numel() // 4, generator=generator).view(torch.uint8) for t in kvx.allocate_buffers(spec)]


def names(*numbers: int) -> list[bytes]:
    return [key(n) for n in numbers]


def content(buffers: list[torch.Tensor], spec: kvx.CacheSpec, block: int) -> list[torch.Tensor]:
    """K and V of one block, every layer."""
    return [t.view(torch.float32).view(spec.num_blocks, -1)[block].clone() for t in buffers]


def is_same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def through(
    mover: Mover, cache: list[torch.Tensor], numbers: list[int], blocks: list[int], spec: kvx.CacheSpec = SPEC
) -> list[bool]:
    """Overwrite these blocks, bring them back by their names, and tell which are as they were."""
    before = [content(cache, SPEC, b) for b in blocks]
    for t in cache:
        t.view(torch.float32).view(SPEC.num_blocks, -1)[blocks] = float("nan")
    came = mover.onboard(names(*numbers), blocks)
    assert came == len(numbers)
    return [is_same(want, content(cache, SPEC, b)) for want, b in zip(before, blocks, strict=True)]


def kind_of(kept: kvx.CacheSpec = KEPT) -> BlockKind:
    return BlockKind.of(kept)
