"""Engines' caches for the tests of handovers: random content, and every row of it found by the axis definition alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import torch

import kvx
from kvx.handover import Handover, Source, export_blocks
from kvx.layout.buffers import bytes_of
from kvx.layout.place import Place, scale_places, tensor_scale_buffers
from kvx.spec import Granularity
from tests.ops import layouts

MODEL = "small"
PLAIN = "layer kv | block token head dim"
LATENT = "layer | block token head dim"


@dataclass
class Engine:
    """One sequence in a paged cache, its ranks side by side."""

    specs: list[kvx.CacheSpec]
    buffers: list[list[torch.Tensor]]
    blocks: list[int]

    @staticmethod
    def new(spec: kvx.CacheSpec, num_tokens: int, rng: random.Random, *, tp: int = 1, first_token: int = 0) -> Engine:
        """Blank, with the sequence's blocks anywhere in it, and -1 for those wholly before its first token."""
        need = -(-num_tokens // spec.block_size)
        behind = first_token // spec.block_size
        spec = replace(spec, num_blocks=need + rng.randrange(3))
        ids = rng.sample(range(spec.num_blocks), need)
        specs = [spec.shard(tp, rank) for rank in range(tp)]
        engine = Engine(specs, [kvx.allocate_buffers(s) for s in specs], [-1] * behind + ids[behind:])
        for s, buffers in zip(specs, engine.buffers, strict=True):
            for t in shared_scales(s, buffers):  # those that every engine here has: of a layer, and of a head of it
                layers = torch.arange(s.num_layers) + 1.0
                t.copy_(layers if t.dim() == 1 else layers[:, None] + torch.arange(s.num_kv_heads) / 8 + s.head_start / 8)
        return engine

    def fill(self, rng: random.Random) -> Engine:
        """With any bits, scales of tokens and blocks too. Heads that ranks share have the same."""
        seed = rng.randrange(2**31)
        for spec, buffers in zip(self.specs, self.buffers, strict=True):
            g = torch.Generator().manual_seed(seed + spec.head_start)
            shared = {t.data_ptr() for t in shared_scales(spec, buffers)}
            for t in (t for t in buffers if t.data_ptr() not in shared):
                bytes_of(t).copy_(torch.randint(0, 256, (bytes_of(t).numel(),), dtype=torch.uint8, generator=g))
        return self

    def sources(self, **fields) -> list[Source]:
        pairs = zip(self.specs, self.buffers, strict=True)
        return [Source(buffers, spec, self.blocks, **fields) for spec, buffers in pairs]

    def rows(self, num_tokens: int, first_token: int = 0) -> dict[tuple[int, int], np.ndarray]:
        """(plane, head) -> [layer, token, bytes]: elements, then scales, as they are stored."""
        found = {}
        tokens = np.arange(first_token, num_tokens)
        for spec, buffers in zip(self.specs, self.buffers, strict=True):
            block = np.array(self.blocks)[tokens // spec.block_size]
            assert block.min() >= 0
            flat = [bytes_of(t) for t in buffers]
            for plane in range(spec.num_planes):
                read = layouts.read(spec, flat, plane)[:, block, tokens % spec.block_size]  # [layer, token, head, dim, unit]
                parts = [read.reshape(*read.shape[:3], -1)]
                place = scale_places(spec)[plane]
                if place is not None:
                    parts.append(_scales(spec, place, flat, block, tokens % spec.block_size))
                if spec.plane(plane).format.has_tensor_scale:
                    scale = flat[tensor_scale_buffers(spec)[plane]].view(spec.num_layers, 4).numpy()
                    parts.append(np.broadcast_to(scale[:, None, None], (*read.shape[:3], 4)))
                rows = np.concatenate(parts, -1)
                for head in range(spec.num_kv_heads):
                    found[plane, spec.head_start + head] = rows[:, :, head]
        return found


def shared_scales(spec: kvx.CacheSpec, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of whole tensors, [num_layers], and of heads, [num_layers, num_kv_heads]."""
    found = [b for b in tensor_scale_buffers(spec) if b >= 0]
    for place, plane in zip(scale_places(spec), spec.planes, strict=False):
        if place is not None and plane.format.granularity in (Granularity.TENSOR, Granularity.HEAD):
            found.append(place.buffer)
    return [buffers[n] for n in found]


def _scales(spec: kvx.CacheSpec, place: Place, flat: list[torch.Tensor], block: np.ndarray, token: np.ndarray) -> np.ndarray:
    """[layer, token, head, bytes]"""
    digits = {d.axis: d for d in place.digits}
    groups = digits["dim"].size if "dim" in digits else 1
    at = np.zeros((spec.num_layers, len(token), spec.num_kv_heads, groups, place.unit_bytes), np.int64)
    index = {
        "layer": np.arange(spec.num_layers)[:, None, None, None, None],
        "block": block[None, :, None, None, None],
        "token": token[None, :, None, None, None],
        "head": np.arange(spec.num_kv_heads)[None, None, :, None, None],
        "dim": np.arange(groups)[None, None, None, :, None],
    }
    for axis, d in digits.items():
        at = at + index[axis] * d.stride
    at = at + np.arange(place.unit_bytes)
    return flat[place.buffer].numpy()[at].reshape(*at.shape[:3], -1)


def same(a: dict[tuple[int, int], np.ndarray], b: dict[tuple[int, int], np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert np.array_equal(a[key], b[key]), f"plane and head {key} differ"


def small(
    rng: random.Random,
    *,
    num_tokens: int = 0,
    heads: int = 4,
    layers: int = 3,
    format: str = "bf16",
    block_size: int = 4,
    window: int = 0,
    planes: int = 2,
) -> Handover:
    """A handover of random content."""
    n = num_tokens or rng.randrange(5, 40)
    spec = kvx.CacheSpec(
        1, 4, heads, 32, layout=PLAIN if planes == 2 else LATENT, format=format, num_layers=layers, model=MODEL
    )  # fmt: skip
    first = max(0, min(n - 1, n + 1 - window)) if window else 0
    engine = Engine.new(spec, n, rng, first_token=first).fill(rng)
    tokens = [rng.randrange(1000) for _ in range(n)]
    return export_blocks(tokens, engine.sources(window=window, first_token=first), block_size=block_size)
