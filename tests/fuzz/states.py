"""Random recurrent states between every two engines' rows and over ranks, against the engines' own index formulas.

    python -m tests.fuzz.states --cases 5000 --seed 0

tests/fuzz/state_memory.py is an independent reading of where each engine has each element. A case is made by its number alone: its
rows and ranks go through all pairs of engines and of 1, 2, 4 and 8 ranks, its shapes are random. Every byte of the destination is
held against what it must be, and what no element belongs to (padding, other blocks, a column nobody reads) must be as it was.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

import numpy as np
import torch

import kvx
from kvx.layout.state_rows import state_row
from kvx.spec import StateSpec, state_plane
from tests.fuzz.state_memory import ENGINES, Plane, addresses, rank_part, tensor_bytes

RANKS = (1, 2, 4, 8)
ITEMS = {"f32": 4, "bf16": 2, "f16": 2}
TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
PAIRS = [(a, b, m, n) for m in RANKS for n in RANKS for a in ENGINES for b in ENGINES]
random.Random(0).shuffle(PAIRS)  # so that some of them in a row are of every kind


def random_planes(r: random.Random) -> tuple[list[Plane], dict[str, str]]:
    """A convolution over x, B, C or q, k, v, a second one, and a matrix a head; some of them. Groups may be fewer than ranks.

    With their formats, by name.
    """
    heads, groups, dim, size = r.choice([8, 16]), r.choice([1, 2, 4, 8]), r.choice([1, 2, 3, 5]), r.choice([1, 2, 4, 6])
    conv_type, matrix_type = r.choice([("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("f16", "f32")])
    found = []
    if r.random() < 0.9:
        groups_of = ((heads * dim, dim), (groups * size, size), (groups * size, size))
        shares = r.choice([groups_of, groups_of[::-1], ((heads * dim, dim),)])
        found.append(("conv", (sum(n for n, _ in shares), r.randint(1, 4)), conv_type, shares))
        if r.random() < 0.25:
            found.append(("conv2", (heads * size, r.randint(1, 3)), conv_type, ((heads * size, size),)))
    matrix = r.choice(["delta", "delta", "ssm", "ssm", "ssm of channels", ""]) if found else r.choice(["delta", "ssm"])
    if matrix == "ssm of channels":
        found.append(("ssm", (heads * dim, size), matrix_type, ((heads * dim, 1),)))
    elif matrix:
        found.append((matrix, (heads, dim, size), matrix_type, ((heads, 1),)))
    return [Plane(name, shape, ITEMS[fmt], shares) for name, shape, fmt, shares in found], {f[0]: f[2] for f in found}


def spec_planes(planes: list[Plane], formats: dict[str, str]) -> list[kvx.spec.PlaneSpec]:
    out = []
    for p in planes:
        axes = ("channel", "tap") if p.name.startswith("conv") else ("head", "row", "column")[-len(p.shape) :]
        axes = ("channel", "column") if axes == ("row", "column") else axes
        out.append(state_plane(p.name, formats[p.name], shares=p.shares, **dict(zip(axes, p.shape, strict=True))))
    return out


class Side:
    """One side of a conversion: its ranks' specs, and what the formulas say of their memory."""

    def __init__(self, r: random.Random, engine: str, ranks: int, planes: list[Plane], formats: dict[str, str], layers: int):
        self.engine, self.layers, self.blocks = engine, layers, r.randint(2, 5)
        planes = [p._replace(item=ITEMS[formats[p.name]]) for p in planes]
        whole = state_row(engine).spec(spec_planes(planes, formats), num_blocks=self.blocks, num_layers=layers)
        self.parts = [[rank_part(p, ranks, i) for p in planes] for i in range(ranks)]
        self.planes = [
            [p._replace(shape=(len(mine), *p.shape[1:])) for p, mine in zip(planes, part, strict=True)] for part in self.parts
        ]
        content = [sum(p.bytes for p in mine) for mine in self.planes]
        is_padded = engine.startswith("vllm") and r.random() < 0.5
        self.pages = [n + r.choice([4, 64, 256]) - n % 4 if is_padded else 0 for n in content]
        self.specs: list[StateSpec] = []
        for i, page in enumerate(self.pages):
            mine = whole.shard(ranks, i)
            self.specs.append(state_row(engine).spec(mine.planes, num_blocks=self.blocks, num_layers=layers, block_bytes=page))
        self.sizes = [
            tensor_bytes(engine, mine, layers, self.blocks, page) for mine, page in zip(self.planes, self.pages, strict=True)
        ]

    def where(self, rank: int, n: int) -> np.ndarray:
        """Of plane n's elements [layer, block, ...] at a rank: their bytes in all its tensors one after the other."""
        found = addresses(self.engine, self.planes[rank], n, self.layers, self.blocks, self.pages[rank])
        begin = np.cumsum([0, *self.sizes[rank]])
        return begin[found.tensor] + found.byte

    def put(self, memory: list[np.ndarray], blocks: list[int], content: list[np.ndarray]) -> None:
        """Bytes of the planes' elements [layer, block, ..., byte] into these blocks of every rank's memory."""
        for rank, mine in enumerate(memory):
            for n, x in enumerate(content):
                at = self.where(rank, n)[:, blocks]
                for byte in range(x.shape[-1]):
                    mine[at + byte] = x[:, :, self.parts[rank][n]][..., byte]

    def tensors(self, memory: list[np.ndarray]) -> list[torch.Tensor]:
        """Of all ranks, in order: copies, aligned as engines' are."""
        parts = (np.split(x, np.cumsum(sizes)[:-1]) for x, sizes in zip(memory, self.sizes, strict=True))
        return [torch.from_numpy(x.copy()) for part in parts for x in part]


def random_content(rng: np.random.Generator, shape: tuple[int, ...], src: str, dst: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of elements as they are at the source and as they must be at the destination."""
    if src == dst:  # any bits
        x = rng.integers(0, 256, (*shape, ITEMS[src]), dtype=np.uint8)
        return x, x
    there = torch.from_numpy(rng.standard_normal((*shape, 1)).astype(np.float32)).to(TYPES[src])
    a, b = (x.contiguous().view(torch.uint8).numpy() for x in (there, there.to(TYPES[dst])))
    return a, b


def convert_case(number: int) -> str:
    r, rng = random.Random(number), np.random.default_rng(number)
    src_engine, dst_engine, src_ranks, dst_ranks = PAIRS[number % len(PAIRS)]
    layers = r.randint(1, 3)
    while True:
        planes, formats = random_planes(r)
        others = {name: r.choice(list(ITEMS)) for name in formats} if r.random() < 0.2 else formats
        try:
            src = Side(r, src_engine, src_ranks, planes, formats, layers)
            dst = Side(r, dst_engine, dst_ranks, planes, others, layers)
        except kvx.BadArgument as error:  # a convolution of an odd number of 16-bit elements before a matrix of f32
            if "not aligned" not in str(error):
                raise
            continue
        break
    count = r.randint(1, min(src.blocks, dst.blocks))
    ids = r.sample(range(src.blocks), count), r.sample(range(dst.blocks), count)
    made = [random_content(rng, (layers, count, *p.shape), formats[p.name], others[p.name]) for p in planes]
    there, got = ([rng.integers(0, 256, sum(sizes), dtype=np.uint8) for sizes in side.sizes] for side in (src, dst))
    want = [memory.copy() for memory in got]
    src.put(there, ids[0], [x for x, _ in made])
    dst.put(want, ids[1], [x for _, x in made])
    source, target = src.tensors(there), dst.tensors(got)
    kvx.convert(source, target, plan=kvx.plan(src.specs, dst.specs, blocks=ids), backend=r.choice(["auto", "torch"]))
    done = np.split(torch.cat(target).numpy(), np.cumsum([len(x) for x in want])[:-1])
    for rank, (have, right) in enumerate(zip(done, want, strict=True)):
        if not np.array_equal(have, right):
            bad = int(np.flatnonzero(have != right)[0])
            raise AssertionError(f"rank {rank} of {dst_engine}: byte {bad} is {have[bad]}, not {right[bad]}; {dst.specs[rank]}")
    least = min(size // unit for p in planes for size, unit in p.shares)
    what = "converted, groups replicated" if least < max(src_ranks, dst_ranks) else "converted"
    if what == "converted" and others == formats:
        one, other = (kvx.digest(t, side.specs, blocks=b) for t, side, b in ((source, src, ids[0]), (target, dst, ids[1])))
        assert one == other, f"digests of {src_engine} and {dst_engine} differ"
        what = "converted, digests equal"
    return what if others == formats else f"{what}, another format"


def run(cases: int, seed: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for number in range(seed, seed + cases):
        try:
            counts[convert_case(number)] += 1
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    began = time.monotonic()
    print(dict(run(given.cases, given.seed)), f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
