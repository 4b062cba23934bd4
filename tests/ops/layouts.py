"""Layouts drawn at random, and the oracle of conversions: every element placed by the axis definition alone, no planner."""

from __future__ import annotations

import random

import numpy as np
import torch

import kvx
from kvx.layout.place import buffer_bytes, places


def random_layout(rng: random.Random, *, kv: bool = True, block_size: int = 8, heads: int = 4, dim: int = 8) -> str:
    """Any order of axes, any bar, sometimes a split of token, head or dim, sometimes K and V in orders of their own."""
    axes = ["layer", "block", "token", "head", "dim"]
    splits = {"token": (2, 4, block_size), "head": (2, heads), "dim": (2, 4)}

    def inner(names: list[str]) -> list[str]:
        words = []
        for name in names:
            if name in splits and rng.random() < 0.2:
                factor = rng.choice(splits[name])
                words += [f"{name}/{factor}", f"{name}%{factor}"]
            else:
                words.append(name)
        rng.shuffle(words)
        return words

    left = [a for a in ("layer", "block") if rng.random() < 0.3]
    rest = [a for a in axes if a not in left]
    if kv and rng.random() < 0.25:  # kv[...]
        outside = [a for a in rest if a in ("layer", "block", "head") and rng.random() < 0.5]
        inside = [a for a in rest if a not in outside]
        rng.shuffle(outside)
        bar = " | " if left else ""
        if not left and all(a == "layer" for a in outside):
            outside = ["block", *(a for a in outside if a != "block")]
            inside = [a for a in inside if a not in outside]
        return f"{' '.join(left)}{bar}{' '.join(outside)} kv[K: {' '.join(inner(inside))}; V: {' '.join(inner(inside))}]"
    words = inner(rest)
    if kv:
        if rng.random() < 0.3:
            left.append("kv")
        else:
            words.insert(rng.randrange(len(words) + 1), "kv")
    rng.shuffle(left)
    return (" ".join(left) + " | " if left else "") + " ".join(words)


def random_buffers(spec: kvx.CacheSpec, seed: int, device: str = "cpu") -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=g).to(device) for size in buffer_bytes(spec)]


def element_bytes(spec: kvx.CacheSpec, plane: int) -> tuple[np.ndarray, np.ndarray]:
    """(buffer, byte) of every unit of K or V: arrays [layer, block, token, head, dim]."""
    place = places(spec)[plane]
    sizes = (spec.num_layers, spec.num_blocks, spec.block_size, spec.num_kv_heads, spec.plane(plane).row_units)
    index = dict(zip(("layer", "block", "token", "head", "dim"), np.indices(sizes), strict=True))
    buffer, byte = np.full(sizes, place.buffer), np.full(sizes, place.offset)
    for d in place.digits:
        i = index[d.axis] // d.divisor % d.size
        buffer, byte = buffer + i * d.step, byte + i * d.stride
    return buffer, byte


def read(spec: kvx.CacheSpec, buffers: list[torch.Tensor], plane: int) -> np.ndarray:
    """Every unit's bytes: [layer, block, token, head, dim, unit]."""
    flat, starts = _joined(buffers)
    buffer, byte = element_bytes(spec, plane)
    at = (starts[buffer] + byte)[..., None] + np.arange(places(spec)[plane].unit_bytes)
    return flat[at]


def write(spec: kvx.CacheSpec, buffers: list[torch.Tensor], plane: int, values: np.ndarray, kept: np.ndarray) -> None:
    flat, starts = _joined(buffers)
    buffer, byte = element_bytes(spec, plane)
    at = (starts[buffer] + byte)[..., None] + np.arange(places(spec)[plane].unit_bytes)
    flat[at[kept]] = values[kept]
    for b, start in zip(buffers, starts, strict=True):
        b.copy_(torch.from_numpy(flat[start : start + b.numel()]))


def _joined(buffers: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    flat = np.concatenate([b.cpu().numpy() for b in buffers])
    return flat, np.cumsum([0, *(b.numel() for b in buffers)])[:-1]


def expected(
    src: list[kvx.CacheSpec],
    src_buffers: list[list[torch.Tensor]],
    dst: list[kvx.CacheSpec],
    dst_buffers: list[list[torch.Tensor]],
    src_table: list[list[int]],
    dst_table: list[list[int]],
    seq_lens: list[int],
) -> list[list[torch.Tensor]]:
    """What `dst_buffers` hold after the conversion, by coordinates: model layer, model head, sequence, position."""
    out = [[b.cpu().clone() for b in shard] for shard in dst_buffers]
    for plane in range(src[0].num_planes):
        known: dict[tuple[int, int], np.ndarray] = {}  # (layer, head) -> [block, token, dim, unit]
        for spec, buffers in zip(src, src_buffers, strict=True):
            values = read(spec, buffers, plane)
            for layer in range(spec.num_layers):
                for head in range(spec.num_kv_heads):
                    known.setdefault((layer + spec.layer_start, head + spec.head_start), values[layer, :, :, head])
        for spec, buffers in zip(dst, out, strict=True):
            values = read(spec, buffers, plane)
            kept = np.zeros(values.shape[:5], dtype=bool)
            for layer in range(spec.num_layers):
                for head in range(spec.num_kv_heads):
                    rows = known[layer + spec.layer_start, head + spec.head_start]
                    for a, b, length in zip(src_table, dst_table, seq_lens, strict=True):
                        for pos in range(length):
                            s, d = a[pos // src[0].block_size], b[pos // spec.block_size]
                            if s < 0 or d < 0:
                                continue
                            values[layer, d, pos % spec.block_size, head] = rows[s, pos % src[0].block_size]
                            kept[layer, d, pos % spec.block_size, head] = True
            write(spec, buffers, plane, values, kept)
    return out
