"""Random conversions against an independent reading of docs/layouts.md, and random tensors at the gate.

    python -m tests.fuzz.conversions --cases 10000 --seed 0

Nothing of kvx.layout is used here but the public calls that are tried: a layout string is read by a few lines of its own, and where
an element lies is worked out index by index in numpy. A case is made by its number alone, so that a failure is a number.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import re
import sys
import time
from typing import Any

import numpy as np
import torch

import kvx

FORMATS = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8}
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
AXES = ("layer", "block", "kv", "token", "head", "dim")


# ---- the language, read once more


def words(text: str) -> list[str]:
    return [w for w in re.split(r"[\s()]+", text) if w]


def orders(layout: str) -> tuple[list[str], list[list[str]]]:
    """Axes that choose a buffer, and those inside it for K and for V: what follows kv there is K's area, then V's."""
    split = re.match(r"(.*?)kv\[K:(.*);\s*V:(.*)\]\s*$", layout)
    if split is None:
        left, _, inside = layout.partition("|") if "|" in layout else ("", "", layout)
        return words(left), [words(inside)] * 2
    front, k, v = split.groups()
    if "|" in k:
        return [*words(front.replace("|", " ")), "kv"], [words(k.replace("|", "")), words(v.replace("|", ""))]
    left, _, rest = front.partition("|") if "|" in front else ("", "", front)
    if "|" not in front and all(w == "layer" for w in words(front)):
        return [*words(front), "kv"], [words(k), words(v)]
    return words(left), [[*words(rest), "kv", *words(x)] for x in (k, v)]


def factor_of(word: str, item: int) -> int:
    factor = re.split("[/%]", word)[1]
    return 16 // item if factor == "x" else int(factor)


def places(layout: str, n: dict[str, int], item: int) -> np.ndarray:
    """[layer, block, kv, token, head, dim] -> (buffer, byte). Sizes in `n`; without a kv axis, n["kv"] is 1."""
    left, inside = orders(layout)
    index = np.indices([n[a] for a in AXES])
    at = dict(zip(AXES, index, strict=True))
    buffer = np.zeros_like(index[0])
    for word in left:
        buffer = buffer * n[word] + at[word]
    out = np.zeros_like(index[0])
    for plane in range(n["kv"]):
        step, offset, area = item, np.zeros_like(index[0]), 0
        for word in reversed(inside[plane]):
            name = re.split("[/%]", word)[0]
            if name == "kv":
                area = step
                offset += plane * area
                step *= 2
                continue
            size, digit = n[name], at[name]
            if "/" in word:
                size, digit = size // factor_of(word, item), digit // factor_of(word, item)
            elif "%" in word:
                size, digit = factor_of(word, item), digit % factor_of(word, item)
            offset += digit * step
            step *= size
        out = np.where(at["kv"] == plane, offset, out)
    return np.stack([buffer, out])


# ---- cases


def random_layout(r: random.Random) -> str:
    def shuffled(names: list[str]) -> list[str]:
        r.shuffle(names)
        return names

    if r.random() < 0.25:  # K and V with orders of their own, in buffers or areas
        front = r.choice(["layer kv[K: | {}; V: | {}]", "layer | block kv[K: {}; V: {}]", "layer | block head kv[K: {}; V: {}]"])
        rest = {"layer kv[K: | {}; V: | {}]": ["block", "token", "head", "dim"]}.get(front, ["token", "head", "dim"])
        rest = [a for a in rest if not (a == "head" and "block head" in front)]
        return front.format(*(" ".join(parted(shuffled(list(rest)), r)) for _ in range(2)))
    axes = shuffled(list(AXES))
    left = [a for a in axes if a in ("layer", "kv", "block") and r.random() < 0.4]
    inside = parted([a for a in axes if a not in left], r)
    if "kv" in inside and inside.index("kv") + 1 < len(inside) and inside[inside.index("kv") + 1] == "dim" and r.random() < 0.5:
        inside[inside.index("kv") : inside.index("kv") + 2] = ["(kv dim)"]
    return (" ".join(left) + " | " if left else "") + " ".join(inside)


def parted(axes: list[str], r: random.Random) -> list[str]:
    """Now and then an axis in two parts, the outer one anywhere before the inner."""
    if r.random() < 0.6:
        return axes
    name = r.choice([a for a in axes if a in ("token", "head", "dim")])
    factor = r.choice(["2", "4"]) if name != "dim" else r.choice(["2", "4", "8", "x"])
    at = axes.index(name)
    rest = axes[:at] + axes[at + 1 :]
    first, second = sorted((r.randint(0, len(rest)), r.randint(0, len(rest))))
    return [*rest[:first], f"{name}/{factor}", *rest[first:second], f"{name}%{factor}", *rest[second:]]


def random_spec(r: random.Random, like: dict[str, Any], num_blocks: int, block_size: int) -> kvx.CacheSpec:
    while True:
        try:
            return kvx.CacheSpec(num_blocks, block_size, layout=random_layout(r), **like)
        except kvx.BadArgument:  # a split that does not divide, or axes that cannot stand so
            continue


def sizes_of(spec: kvx.CacheSpec) -> dict[str, int]:
    found = (spec.num_layers, spec.num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_dim)
    return dict(zip(AXES, found, strict=True))


def filled(spec: kvx.CacheSpec, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, t.numel(), dtype=np.uint8) for t in kvx.allocate_buffers(spec)]


def convert_case(r: random.Random) -> str:
    """Another layout, block size and sharding of heads; some blocks of each, tokens up to a length."""
    fmt = r.choice(list(FORMATS))
    item, heads, layers = FORMATS[fmt], r.choice([1, 2, 4]), r.choice([1, 2, 3])
    like = {"num_kv_heads": heads, "head_dim": r.choice([8, 16, 24]), "num_layers": layers, "format": fmt}
    sizes = r.choice([(4, 4), (4, 8), (8, 4), (16, 4), (8, 8)])
    src, whole = random_spec(r, like, r.randint(3, 6), sizes[0]), random_spec(r, like, r.randint(3, 6), sizes[1])
    ranks = r.choice([n for n in (1, 2, 4) if heads % n == 0])
    try:
        dst = [whole.shard(ranks, i) for i in range(ranks)]
    except kvx.BadArgument:  # a split does not divide a rank's heads
        return "no such ranks"
    plan = kvx.plan(src, dst)
    tokens = r.randint(1, min(src.num_blocks * sizes[0], whole.num_blocks * sizes[1]))
    ids = [r.sample(range(s.num_blocks), -(-tokens // s.block_size)) for s in (src, whole)]
    a, b = filled(src, r.randrange(2**32)), [filled(s, r.randrange(2**32)) for s in dst]
    got = [[torch.from_numpy(x.copy()) for x in shard] for shard in b]
    tables = {"src_blocks": torch.tensor([ids[0]]), "dst_blocks": torch.tensor([ids[1]]), "seq_lens": torch.tensor([tokens])}
    kvx.convert([torch.from_numpy(x) for x in a], got, plan=plan, **tables, backend=r.choice(["auto", "torch"]))
    there, memory = addresses(src, a, item), np.concatenate(a)
    for spec, have, before in zip(dst, got, b, strict=True):
        here, want = addresses(spec, before, item), np.concatenate(before)
        mine = slice(spec.head_start, spec.head_start + spec.num_kv_heads)
        for t in range(tokens):
            to = here[:, ids[1][t // sizes[1]], :, t % sizes[1]]
            frm = there[:, ids[0][t // sizes[0]], :, t % sizes[0], mine]
            for byte in range(item):
                want[to + byte] = memory[frm + byte]
        if not np.array_equal(torch.cat(have).numpy(), want):
            return _wrong(f"{src.layout!r} {sizes} -> {spec.layout!r} rank of {ranks}, {like}")
    return "converted"


def addresses(spec: kvx.CacheSpec, buffers: list[np.ndarray], item: int) -> np.ndarray:
    """`places`, in all buffers one after the other."""
    buffer, byte = places(spec.layout, sizes_of(spec), item)
    begin = np.cumsum([0, *(len(b) for b in buffers)])
    return begin[buffer] + byte


def gate_case(r: random.Random) -> str:
    """A tensor stored in one order and shown in another, under a spec of a third: taken only if its memory is the spec's."""
    fmt, names = r.choice(list(FORMATS)), ["block", "kv", "token", "head", "dim"]
    n = {
        "block": r.choice([2, 3, 4]),
        "kv": 2,
        "token": r.choice([2, 4, 8]),
        "head": r.choice([1, 2, 4]),
        "dim": r.choice([4, 8, 16]),
    }
    said, stored, shown = (r.sample(names, 5) if r.random() < 0.6 else list(names) for _ in range(3))
    spec = kvx.CacheSpec(n["block"], n["token"], n["head"], n["dim"], layout=" ".join(said), format=fmt)
    count = math.prod(n.values())
    x = torch.arange(count).to(torch.float64).view([n[a] for a in names])  # the true content, every element another
    kind = r.choice([fmt] * 4 + [f for f in FORMATS if f != fmt])
    memory = x.permute([names.index(a) for a in stored]).contiguous().to(TYPES[kind])
    t = memory.permute([stored.index(a) for a in shown])
    if r.random() < 0.2:
        cut = r.randint(1, 4)
        t = t.flatten(0, cut) if t.is_contiguous() else t
    if r.random() < 0.1:
        t = torch.cat([t, t[:1]])
    if r.random() < 0.1:
        t = t.repeat_interleave(2, -1)[..., ::2]
    right = x.permute([names.index(a) for a in said]).contiguous().to(TYPES[fmt])
    looks_right = (t.shape, t.stride(), t.dtype) == (right.shape, right.stride(), right.dtype)
    try:
        got = kvx.digest([t], spec)
    except kvx.BadArgument:
        return _wrong(f"the spec's own tensor was refused: {spec.layout} {n}") if looks_right else "refused"
    if got == kvx.digest([right], spec):
        return "taken, rightly"
    as_merged = t.is_contiguous() and long_axes(t) in merged([n[a] for a in said])
    as_permuted = steps_of(t) == steps_of(right) and long_axes(t) not in merged([n[a] for a in said])
    if t.dtype is right.dtype and (as_merged or as_permuted):
        return "cannot be told"  # of the shape and strides of a right one with axes merged, or shown in an order only its own
    return _wrong(f"stored {stored}, shown {shown} {list(t.shape)} {t.stride()} {t.dtype} under {spec.layout!r} {fmt} {n}")


def long_axes(t: torch.Tensor) -> list[int]:
    return [size for size in t.shape if size > 1]


def steps_of(t: torch.Tensor) -> list[tuple[int, int]]:
    return sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1)


def merged(sizes: list[int]) -> list[list[int]]:
    """Every shape of these axes with some adjacent ones as one, without those of 1."""
    out: list[list[int]] = []
    for keep in itertools.product((True, False), repeat=len(sizes) - 1):
        shape = [sizes[0]]
        for size, is_cut in zip(sizes[1:], keep, strict=True):
            shape = [*shape, size] if is_cut else [*shape[:-1], shape[-1] * size]
        out.append([size for size in shape if size > 1])
    return out


def _wrong(what: str) -> str:
    raise AssertionError(what)


def run(cases: int, seed: int, *, gate_share: float = 0.5, seconds: float = math.inf) -> dict[str, int]:
    counts: dict[str, int] = {}
    began = time.monotonic()
    for number in range(seed, seed + cases):
        r = random.Random(number)
        try:
            outcome = gate_case(r) if r.random() < gate_share else convert_case(r)
        except Exception as error:
            raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
        outcome = outcome.partition(":")[0]
        counts[outcome] = counts.get(outcome, 0) + 1
        if time.monotonic() - began > seconds:
            break
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gate-share", type=float, default=0.5, help="share of cases that try the gate; the others convert")
    given = parser.parse_args()
    print(run(given.cases, given.seed, gate_share=given.gate_share), file=sys.stdout)


if __name__ == "__main__":
    main()
