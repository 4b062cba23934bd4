"""Where engines keep the elements of recurrent states, by their own index formulas, in numpy and without KVX.

A model's states are arrays [layer, block, ...]: `conv`, `conv2` [channel, tap], `ssm` [head, head dim, state size] or [channel,
state size], `delta` [head, key, value]. `addresses` says of each element in which tensor of an engine it lies, at which byte.
Formulas are those of transformers 5.22, vLLM 0.32, SGLang 0.5.23 and llama.cpp of 2026-10, as they were read and run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ENGINES = ("transformers", "vllm.sd", "vllm.ds", "sglang", "sglang.kimi", "sglang.host", "sglang.kimi.host", "llama_cpp")


class Plane(NamedTuple):
    name: str
    shape: tuple[int, ...]  # of one layer's state of one sequence: [C, taps], [H, rows, columns] or [C, columns]
    item: int  # bytes of an element
    shares: tuple[tuple[int, int], ...]  # (size, unit) of parts of the first axis that ranks share out one by one

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * self.item


class Where(NamedTuple):
    tensor: np.ndarray  # [layer, block, ...]
    byte: np.ndarray


def rank_part(plane: Plane, ranks: int, rank: int) -> list[int]:
    """What a rank holds of the first axis: its units of every part; of a part with fewer units than ranks one that others have."""
    out: list[int] = []
    first = 0
    for size, unit in plane.shares:
        units = size // unit
        mine = range(rank * units // ranks, (rank + 1) * units // ranks) if units >= ranks else [rank // (ranks // units)]
        out += [first + u * unit + i for u in mine for i in range(unit)]
        first += size
    return out


def tensor_bytes(engine: str, planes: Sequence[Plane], layers: int, blocks: int, page: int = 0) -> list[int]:
    """The sizes of an engine's tensors, in order."""
    total = sum(p.bytes for p in planes)
    if engine == "transformers":
        extra = [p.shape[0] * p.item if p.name.startswith("conv") else 0 for p in planes]
        return [blocks * (p.bytes + more) for _ in range(layers) for p, more in zip(planes, extra, strict=True)]
    if engine == "llama_cpp":
        return [blocks * p.bytes for _ in range(layers) for p in planes]
    if engine.startswith("vllm"):
        return [blocks * (page or total)] * layers
    if engine.endswith(".host"):
        return [blocks * layers * total]
    return [layers * blocks * p.bytes for p in planes]


def addresses(engine: str, planes: Sequence[Plane], n: int, layers: int, blocks: int, page: int = 0) -> Where:
    """Of every element of plane n. `planes` are in the order of names; `page`: bytes of vLLM's pages, 0 where they are full."""
    p = planes[n]
    lay, blk, *index = np.ogrid[tuple(slice(size) for size in (layers, blocks, *p.shape))]
    inner, elements = _inside(engine, p, index)
    if engine in ("transformers", "llama_cpp"):  # a tensor for each plane of a layer, [batch or cell, ...]
        tensor, byte = lay * len(planes) + n, (blk * elements + inner) * p.item
    elif engine.startswith("vllm"):  # a tensor of pages for each layer: convolutions, then the matrix
        before = sum(q.bytes for q in planes[:n])
        tensor, byte = lay, blk * (page or sum(q.bytes for q in planes)) + before + inner * p.item
    elif engine.endswith(".host"):  # one tensor: the matrix of all layers, then the convolutions of all layers, one by one
        matrices = [q for q in planes if not q.name.startswith("conv")]
        before = (sum(q.bytes for q in matrices + list(planes[:n])) * layers) if p.name.startswith("conv") else 0
        byte = blk * sum(q.bytes for q in planes) * layers + before + (lay * elements + inner) * p.item
        tensor = np.zeros_like(byte)
    else:  # SGLang's pools: [layers, slots, ...]
        tensor, byte = np.full((1, 1), n), ((lay * blocks + blk) * elements + inner) * p.item
        tensor = tensor.reshape([1] * byte.ndim)
    shape = (layers, blocks, *p.shape)
    return Where(np.broadcast_to(tensor, shape), np.broadcast_to(byte, shape))


def _inside(engine: str, p: Plane, index: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """The number of an element in one state, and how many elements a state has in memory."""
    count = int(np.prod(p.shape))
    if p.name.startswith("conv"):
        (c, t), (channels, taps) = index, p.shape
        if engine == "transformers":  # [channels, kernel]: one column more, the oldest, which nobody reads
            return c * (taps + 1) + 1 + t, channels * (taps + 1)
        if engine in ("vllm.sd", "sglang.kimi", "sglang.kimi.host"):
            return t * channels + c, count
        return c * taps + t, count
    if len(p.shape) == 2:
        return index[0] * p.shape[1] + index[1], count
    (h, row, column), (_, rows, columns) = index, p.shape
    if p.name == "delta" and engine != "transformers":  # [heads, value, key]
        return (h * columns + column) * rows + row, count
    return (h * rows + row) * columns + column, count
