"""Tails: entries are the same however tokens are cut into chunks, and slots know nothing of each other."""

from __future__ import annotations

import random

import pytest
import torch

from kvx import BadArgument
from kvx.ops.entry.tail import SCORE, Tail
from tests.hybrid import golden
from tests.hybrid.golden import Projected

KINDS = {
    "csa": {"ratio": 4, "overlap": True},
    "hca": {"ratio": 16},
    "hca_ring": {"ratio": 16, "kind": "ring"},
    "half": {"ratio": 2},
    "every_token": {"ratio": 1},
}
DIM, TOKENS = 12, 133


def projected(tail: Tail, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (TOKENS, tail.num_parts * DIM)
    return torch.randn(shape, generator=generator), 3 * torch.randn(shape, generator=generator)


def answer(tail: Tail, kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """All at once, in f64."""
    halves = [Projected(k, s) for k, s in zip(kv.double().split(DIM, 1), score.double().split(DIM, 1), strict=True)]
    return golden.pool_windows(halves[-1], tail.ratio, halves[0] if tail.overlap else None)


def chunks(rng: random.Random, total: int) -> list[int]:
    parts = []
    while sum(parts) < total:
        parts.append(min(rng.choice((1, 1, 2, 3, 5, 17, 40)), total - sum(parts)))
    return parts


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", ["whole", "one_by_one", "random"])
def test_entries_are_those_of_the_whole_text(name, cut, generator):
    tail = Tail(dim=DIM, num_slots=3, **KINDS[name])
    kv, score = projected(tail, generator)
    parts = {"whole": [TOKENS], "one_by_one": [1] * TOKENS, "random": chunks(random.Random(name), TOKENS)}[cut]
    got, at = [], 0
    for n in parts:
        new = tail.take(1, at, kv[at : at + n], score[at : at + n])
        assert len(new) == (at + n) // tail.ratio - at // tail.ratio
        got.append(new)
        at += n
    torch.testing.assert_close(torch.cat(got).double(), answer(tail, kv, score), rtol=0, atol=2e-6)


def test_a_window_handed_on_by_the_wrong_projection_would_be_seen(generator):
    """What a window gives to the next entry is not what it gave to its own: entries after the first are far off."""
    tail = Tail(4, DIM, 1, overlap=True)
    kv, score = projected(tail, generator)
    want = answer(tail, kv, score)
    wrong = answer(tail, kv[:, DIM:].repeat(1, 2), score[:, DIM:].repeat(1, 2))
    assert torch.equal(wrong[0], want[0])
    assert float((wrong[1:] - want[1:]).norm() / want[1:].norm()) > 0.5


@pytest.mark.parametrize("name", KINDS)
def test_slots_are_apart_and_start_anew(name, generator):
    tail = Tail(dim=DIM, num_slots=3, **KINDS[name])
    fresh = tail.state.clone()
    kv, score = projected(tail, generator)
    tail.take(0, 0, kv[:39], score[:39])
    assert torch.equal(tail.state[1:], fresh[1:])
    if tail.ratio > 1:
        assert not torch.equal(tail.state[0], fresh[0])
    tail.reset(0)
    assert torch.equal(tail.state, fresh)
    again = tail.take(0, 0, kv, score)
    torch.testing.assert_close(again.double(), answer(tail, kv, score), rtol=0, atol=2e-6)


def test_at_a_whole_block_only_the_overlap_is_left(generator):
    """What a request needs to go on from there."""
    csa, hca = Tail(4, DIM, 1, overlap=True), Tail(16, DIM, 1)
    for tail in (csa, hca):
        fresh = tail.state.clone()
        kv, score = projected(tail, generator)
        tail.take(0, 0, kv[:64], score[:64])
        assert torch.equal(tail.state[:, 1:], fresh[:, 1:])
    assert torch.equal(hca.state, torch.tensor([[[-torch.inf], [0.0], [0.0]]]).expand_as(hca.state))
    assert torch.isfinite(csa.state[0, 0, :, SCORE]).all()


def test_a_snapshot_takes_drafts_back(generator):
    tail = Tail(4, DIM, 1, overlap=True)
    kv, score = projected(tail, generator)
    tail.take(0, 0, kv[:30], score[:30])
    before = tail.state[0].clone()
    tail.take(0, 30, torch.randn(7, 2 * DIM, generator=generator), torch.zeros(7, 2 * DIM))
    tail.state[0] = before
    rest = tail.take(0, 30, kv[30:], score[30:])
    torch.testing.assert_close(rest.double(), answer(tail, kv, score)[7:], rtol=0, atol=2e-6)


def test_wrong_shapes_are_refused(generator):
    with pytest.raises(BadArgument, match="running and ring"):
        Tail(4, 8, 1, kind="stack")
    with pytest.raises(BadArgument, match=r"3 tokens take \[3, 16\]"):
        Tail(4, 8, 1, overlap=True).take(0, 0, torch.zeros(3, 8), torch.zeros(3, 8))
