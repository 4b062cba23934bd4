"""Tokens one by one, in random chunks or all at once: the same windows, the same entries, the same tails."""

from __future__ import annotations

import pytest
import torch

from kvx.ops.attention.sparse import attention_sparse
from kvx.ops.entry.append_swa import append_swa
from kvx.ops.entry.compress import compress
from kvx.ops.entry.step import Step
from kvx.ops.entry.tail import Tail
from kvx.quant.rows import RowCodec, RowPages
from tests import compare
from tests.hybrid.ops import hybrid_cases as cases

SLOTS, LENGTHS = (2, 0, 3), (301, 7, 140)
CLOSE = 1e-5  # of sums in another order


def cuts(how: str, generator: torch.Generator) -> list[list[int]]:
    """How many tokens of each sequence every step takes."""
    left, steps = list(LENGTHS), []
    while any(left):
        most = {"ones": 1, "random": int(torch.randint(1, 60, (), generator=generator)), "whole": max(LENGTHS)}[how]
        taken = [min(n, most if how != "random" else int(torch.randint(0, most + 1, (), generator=generator))) for n in left]
        left = [n - t for n, t in zip(left, taken, strict=True)]
        steps.append(taken)
    return steps


def steps_of(how: str, device: str, generator: torch.Generator):
    """(step, which tokens of all it takes)."""
    first = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    done = [0] * len(LENGTHS)
    for taken in cuts(how, generator):
        rows = [torch.arange(f + d, f + d + n) for f, d, n in zip(first, done, taken, strict=True)]
        yield Step.of(SLOTS, taken, done, device), torch.cat(rows).to(device)
        done = [d + n for d, n in zip(done, taken, strict=True)]


@pytest.mark.parametrize("how", ["ones", "random"])
@pytest.mark.parametrize("rows", [128, 131])
def test_windows(native_backend, rows, how, generator):
    device = native_backend.device
    x = cases.randn(generator, sum(LENGTHS), 512, dtype=torch.bfloat16, device=device)
    weight, (cos, sin) = cases.randn(generator, 512, device=device), cases.tables(64, device)

    def fill(how: str) -> tuple[RowPages, torch.Tensor]:
        window = cases.poisoned(RowCodec("fp8_v4", 512, 64), 4, rows, device)
        positions = torch.full((4, rows), -1, dtype=torch.int32, device=device)
        for step, at in steps_of(how, device, generator):
            append_swa(window, positions, x[at], step, weight=weight, cos=cos, sin=sin, backend=native_backend.name)
        return window, positions

    (got, at), (want, want_at) = fill(how), fill("whole")
    compare.bitwise(got.pages, want.pages, "window")
    compare.bitwise(at, want_at, "positions")


@pytest.mark.parametrize("how", ["ones", "random"])
@pytest.mark.parametrize(("kind", "ratio"), [("overlap", 4), ("ring", 4), ("ring", 128), ("running", 128), ("running", 4)])
def test_entries(native_backend, kind, ratio, how, generator):
    device = native_backend.device
    parts = 2 if kind == "overlap" else 1
    kv, score = (cases.randn(generator, sum(LENGTHS), parts * 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    bias, weight = cases.randn(generator, ratio, parts * 128, device=device), cases.randn(generator, 128, device=device)
    cos, sin = cases.tables(64, device)
    table = torch.arange(4 * 20, dtype=torch.int32, device=device).view(4, 20)

    def fill(how: str) -> tuple[RowPages, torch.Tensor]:
        tail = Tail(ratio, 128, 4, overlap=kind == "overlap", kind="ring" if kind == "ring" else "running", device=device)
        entries = cases.poisoned(RowCodec("f32", 128), 80, 4, device)
        for step, at in steps_of(how, device, generator):
            compress(
                tail,
                kv[at],
                score[at],
                entries,
                table,
                step,
                bias=bias,
                weight=weight,
                cos=cos,
                sin=sin,
                backend=native_backend.name,
            )
        return entries, tail.state

    (got, state), (want, want_state) = fill(how), fill("whole")
    torch.testing.assert_close(state, want_state, rtol=CLOSE, atol=CLOSE)
    at = torch.cat([4 * 20 * slot + torch.arange(n // ratio) for slot, n in zip(SLOTS, LENGTHS, strict=True)]).to(device)
    assert torch.isfinite(want.read(at)).all()
    torch.testing.assert_close(got.read(at), want.read(at), rtol=CLOSE, atol=CLOSE)
    rest = torch.ones(320, dtype=torch.bool)
    rest[at.cpu()] = False
    compare.bitwise(got.read(rest.nonzero().flatten().to(device)), want.read(rest.nonzero().flatten().to(device)), "rows of nobody")


@pytest.mark.parametrize("how", ["ones", "random"])
def test_attention(native_backend, how, generator):
    """A chunk reads its own rows from a workspace, and tokens before it from the window; one token reads all from the window."""
    device = native_backend.device
    codec = RowCodec("bf16", 64)
    q = cases.randn(generator, sum(LENGTHS), 4, 64, device=device)
    x = cases.randn(generator, sum(LENGTHS), 64, dtype=torch.bfloat16, device=device)

    def attend(how: str) -> torch.Tensor:
        window, out = cases.poisoned(codec, 4, 40, device), torch.zeros_like(q)
        positions = torch.full((4, 40), -1, dtype=torch.int32, device=device)
        for step, at in steps_of(how, device, generator):
            fresh = None if how == "ones" else cases.poisoned(codec, 8, 64, device)
            append_swa(
                window if fresh is None else fresh, positions if fresh is None else None, x[at], step, backend=native_backend.name
            )
            out[at] = attention_sparse(
                q[at], window, positions, step, window_tokens=40, fresh=fresh, backend=native_backend.name
            )[0]  # fmt: skip
            if fresh is not None:
                append_swa(window, positions, x[at], step, backend=native_backend.name)
        return out

    torch.testing.assert_close(attend(how), attend("whole"), rtol=CLOSE, atol=CLOSE)
