"""Random shapes of attention against float64: every format, layout, table and mask, rows of 1 to 512 elements.

    python -m tests.fuzz.attention --cases 5000 --seed 0 --device cuda

A case is made by its number alone, so that a failure is a number; it is printed as a Case of tests/ops, which runs by itself.
The bound is that of tests/ops/attention_cases.py, twice the error of the same sum done in the queries' type and a floor. There the
error is measured. Of a few results it may be small by luck, so here it is at least what rounding brings, in the worst case:
  out  weights may be rounded to the queries' type (docs/spec.md, 21.1), each by a share u of itself: u * sum of w |v|
  out  a score that is off by d, as lse's floor has it, makes weights off by a share of up to 2 d: 2 d * largest |v|
  lse  a soft cap's tanh is good to 4 steps of f32: 4 * 2^-24 of the cap
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import kvx
from tests import cases
from tests.ops import mla_cases
from tests.ops.attention_cases import EPS, Case, Made, close, error, magnitude, multiply

FORMATS = [name for name, f in kvx.FORMATS.items() if not f.element.is_moved_only]
USUAL = (64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
MOST_ELEMENTS, MOST_PRODUCTS = 150_000, 4_000_000  # of K and V in a case, and of its scores: a reference takes milliseconds


@dataclass(frozen=True)
class Asked:
    """A case and how it is called."""

    case: Case
    table: str = "packed"
    out: str = ""  # type of the result; "": made by the call, of the queries' type


def random_case(number: int) -> Asked:
    r = random.Random(number)
    while True:
        case = _latent(r) if r.random() < 0.08 else _plain(r)
        try:
            kvx.CacheSpec(
                4, case.block, case.kv_heads, case.dim, v_head_dim=case.v_dim, format=case.format, v_format=case.v_format,
                layout=cases.LAYOUTS.get(mla_cases.LAYOUTS.get(case.layout, case.layout), cases.LATENT),
            )  # fmt: skip
        except kvx.BadArgument:  # a row that is no whole number of groups or bytes, or planes that a layout has no place for
            continue
        both = case.dim + (case.v_dim or case.dim)
        rows = sum(case.lens) * case.kv_heads * both
        products = sum(n * m for n, m in zip(case.lens, case.counts, strict=True)) * case.heads * both
        if rows <= MOST_ELEMENTS and products <= MOST_PRODUCTS:
            return Asked(case, r.choice(("packed", "packed", "int64", "ragged", "page_csr")), r.choice(("", "", "", "f32", "bf16")))


def _dim(r: random.Random, formats: tuple[str, ...]) -> int:
    """A width that the formats have: usual ones, and any up to 512."""
    unit = 1
    for name in formats:
        f = kvx.FORMATS[name]
        unit = math.lcm(unit, f.group_size or 1, 8 // min(f.element.bits, 8))
    dim = r.choice((r.choice(USUAL), r.choice(USUAL), r.randint(1, 16), r.randint(1, 128), r.randint(1, 512)))
    return max(unit, dim // unit * unit)


def _plain(r: random.Random) -> Case:
    fmt = r.choice(FORMATS)
    v_format = r.choice(FORMATS) if r.random() < 0.15 else ""
    dim, kv_heads = _dim(r, (fmt,) if v_format else (fmt, v_format or fmt)), r.choice((1, 1, 2, 2, 3, 4))
    v_dim = _dim(r, (v_format or fmt,)) if v_format or r.random() < 0.35 else 0
    return Case(
        **_sequences(r), heads=kv_heads * r.choice((1, 1, 2, 3, 4, 4, 5, 7, 8, 16, 20)), kv_heads=kv_heads, dim=dim, v_dim=v_dim,
        block=r.choice((1, 2, 3, 4, 5, 7, 8, 16, 16, 16, 32, 48, 64, 128)), format=fmt, v_format=v_format,
        layout=r.choice(("NHD", "HND", *cases.LAYOUTS)), io=r.choice(("bf16", "bf16", "f16", "f32")), **_mask(r),
        scale=r.choice((0.0, 0.0, 0.0, 0.3, -0.05)),
    )  # fmt: skip


def _latent(r: random.Random) -> mla_cases.Case:
    fmt, v_format = r.choice((("bf16", ""), ("f16", ""), ("f32", ""), (mla_cases.RECORD, "bf16"), ("fp8_e4m3_per_128", "f16")))
    dim = r.choice((512, 256, 128) if "128" in fmt else (512, 256, 128, 64, 96, 33))
    return mla_cases.Case(
        **_sequences(r), **_mask(r), heads=r.choice((1, 3, 8, 16, 32)), dim=dim, v_dim=r.choice((64, 32, 16, 20)), format=fmt,
        v_format=v_format, block=r.choice((1, 16, 64)), layout=r.choice(("one", "two", "hnd")), io=r.choice(("bf16", "f16", "f32")),
    )  # fmt: skip


def _sequences(r: random.Random) -> dict[str, Any]:
    """Lengths, and queries of each sequence: decode, prompts, chunks of them, or all of these in a batch."""
    lens = tuple(r.choice((0, 1, 2, r.randint(3, 40), r.randint(10, 200), r.randint(100, 700))) for _ in range(r.randint(1, 4)))
    kind = r.choice(("decode", "decode", "prefill", "mixed"))
    if kind == "decode":
        return {"lens": lens, "queries": r.choice((1, 1, 1, 2, 3, 5))}
    chunks = [r.choice((n, min(n, r.randint(1, 40)), min(n, 17), 1)) for n in lens]
    if kind == "mixed":
        chunks = [c if r.random() < 0.5 else r.choice((0, 1, 1, 2)) for c in chunks]
    return {"lens": lens, "queries": tuple(chunks)}


def _mask(r: random.Random) -> dict[str, Any]:
    causal = r.random() < 0.8
    return {
        "causal": causal,
        "window": r.choice((0, 0, 0, 1, 2, r.randint(3, 40), r.randint(20, 300), 10**6)) if causal else 0,
        "soft_cap": r.choice((0.0, 0.0, 0.0, 0.5, 5.0, 30.0)),
        "sinks": r.random() < 0.25,
    }


# ---- the answer


def answer(made: Made, dtype: torch.dtype) -> tuple[Tensor, Tensor, float, float]:
    """out, lse, the largest sum of magnitudes behind a score, and the largest of weights times magnitudes of values."""
    c, q, device = made.case, made.q, made.q.device
    k, v = (x.to(device) for x in (made.k, made.v))
    lens, counts = (torch.tensor(x, device=device) for x in (c.lens, c.counts))
    most, place = max(c.counts), torch.arange(k.shape[1], device=device)
    query = torch.arange(most, device=device)
    own = (lens - counts)[:, None] + query  # [sequence, query]: its position
    last = own if c.causal else (lens - 1)[:, None].expand_as(own)
    seen = (place <= last[..., None]) & (place < lens[:, None, None])
    if c.window:
        seen &= place > last[..., None] - c.window
    is_there = query < counts[:, None]
    rows = q.new_zeros(len(c.lens), most, *q.shape[1:])
    rows[is_there] = q
    inside = (place < lens[:, None])[..., None, None]
    k, v = (torch.where(inside, x, 0).to(dtype) for x in (k, v))  # what is past a length may be NaN
    rows = rows.to(dtype).unflatten(2, (k.shape[2], -1))
    scale = c.scale or k.shape[-1] ** -0.5
    scores = multiply("snhgd,sphd->shgnp", rows, k) * scale
    reach, is_exact = 0.0, dtype == torch.float64  # magnitudes are asked of the exact answer alone
    if is_exact:
        reach = magnitude((torch.einsum("snhgd,sphd->shgnp", rows.abs(), k.abs()) * abs(scale)) * seen[:, None, None])
    if c.soft_cap:
        scores = c.soft_cap * torch.tanh(scores / c.soft_cap)
    scores = scores.masked_fill(~seen[:, None, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    total = lse
    if made.sinks is not None:
        total = torch.logaddexp(lse, made.sinks.to(dtype).view(1, *scores.shape[1:3], 1))
    weights = torch.exp(scores - total[..., None]).masked_fill(~seen[:, None, None], 0)
    out = multiply("shgnp,sphd->snhgd", weights, v).flatten(2, 3)[is_there]
    size = magnitude(torch.einsum("shgnp,sphd->snhgd", weights, v.abs())) if is_exact else 0.0
    return out, lse.permute(0, 3, 1, 2).flatten(2)[is_there], reach, size


def check(made: Made, out: Tensor, lse: Tensor) -> float:
    """Raises where a result is further off than the bound; returns the largest share of it that one is off."""
    want, want_lse, reach, size = answer(made, torch.float64)
    theirs, their_lse, _, _ = answer(made, made.q.dtype)
    score = math.sqrt(made.k.shape[-1]) * EPS * reach + 4 * EPS * made.case.soft_cap
    largest = magnitude(made.v.nan_to_num()) if made.v.numel() else 0.0
    step = torch.finfo(made.q.dtype).eps / 2
    bound = 2 * max(error(theirs, want), step * size) + (4 * EPS + 2 * score) * largest
    bound += torch.finfo(out.dtype).eps / 2 * magnitude(want)
    lse_bound = 2 * error(their_lse, want_lse) + score + 4 * EPS * max(1.0, magnitude(want_lse))
    close("out", out, want, bound)
    close("lse", lse, want_lse, lse_bound)
    return max(error(out, want) / max(bound, 1e-300), error(lse, want_lse) / lse_bound)


def run_case(asked: Asked, backend: str, device: str, number: int = 0) -> float:
    made = asked.case.make(device, torch.Generator().manual_seed(number))
    packed, block = made.table, asked.case.block
    table = {
        "packed": lambda: packed,
        "int64": lambda: kvx.PackedTable(packed.block_table.long(), packed.seq_lens.long()),
        "ragged": lambda: kvx.to_ragged(packed, block),
        "page_csr": lambda: kvx.to_page_csr(packed, block),
    }[asked.table]()
    more = {}
    if asked.out:
        more["out"] = torch.full((*made.q.shape[:2], made.v.shape[-1]), 7.0, dtype=cases.IO[asked.out], device=device)
    return check(made, *made.run(backend, table=table, **more))


def run(num_cases: int, seed: int, backend: str, *, stop: bool = True) -> dict[str, Any]:
    """How many of each kind ran and how near the bound the worst of them is. `stop`: at the first that is wrong."""
    device = "cuda" if backend == "cuda" else "cpu"
    counts: dict[str, Any] = {"decode": 0, "varlen": 0, "latent": 0}
    nearest, wrong = (0.0, -1), []
    for number in range(seed, seed + num_cases):
        asked = random_case(number)
        try:
            share = run_case(asked, backend, device, number)
        except Exception as problem:
            message = f"case {number} on {backend}: {type(problem).__name__}: {problem}\n  {asked}"
            if stop:
                raise AssertionError(message) from problem
            print(message, flush=True)
            wrong.append(number)
            continue
        nearest = max(nearest, (share, number))
        is_latent = isinstance(asked.case, mla_cases.Case)
        counts["latent" if is_latent else "decode" if isinstance(asked.case.queries, int) else "varlen"] += 1
    return {**counts, "wrong": wrong, "nearest to its bound": f"{nearest[0]:.2f} of it, case {nearest[1]}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="the backend that computes")
    given = parser.parse_args()
    began = time.monotonic()
    found = run(given.cases, given.seed, given.device, stop=False)
    print(found, f"{time.monotonic() - began:.0f} s")
    sys.exit(1 if found["wrong"] else 0)


if __name__ == "__main__":
    main()
