"""Drawn tokens have the shares that the parameters ask for."""

from __future__ import annotations

import pytest
import torch

from kvx.runner.sample import Draw, sample

LOGITS = torch.tensor([0.1, 2.0, 1.0, -1.0, 1.5])


def shares(draw: Draw, n: int = 4000) -> torch.Tensor:
    """Of each id, over draws spread evenly: the inverse of a distribution gives its shares back almost exactly."""
    draws = [draw._replace(uniform=(i + 0.5) / n) for i in range(n)]
    return torch.bincount(sample(LOGITS.expand(n, -1), draws), minlength=5) / n


def test_greedy_takes_the_likeliest():
    assert sample(LOGITS[None], [Draw()]).tolist() == [1]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_temperature(temperature):
    torch.testing.assert_close(shares(Draw(temperature)), (LOGITS / temperature).softmax(0), atol=1e-3, rtol=0)


def test_top_k_leaves_the_others_their_ratio():
    want = LOGITS.softmax(0)
    want[[0, 3]] = 0
    torch.testing.assert_close(shares(Draw(1.0, top_k=3)), want / want.sum(), atol=1e-3, rtol=0)


def test_top_p_keeps_the_fewest_that_reach_it():
    p = LOGITS.softmax(0)
    want = p.clone()
    want[[0, 2, 3]] = 0
    edge = float(p[1])  # the first alone falls short of a bit more than its own share
    torch.testing.assert_close(shares(Draw(1.0, top_p=edge + 0.01)), want / want.sum(), atol=1e-3, rtol=0)
    assert shares(Draw(1.0, top_p=edge - 0.01))[1] == 1


def test_top_k_comes_before_top_p():
    """Of the two likeliest the first has 62 %: a share of 60 % is that one, though of all five it has 43 %."""
    assert shares(Draw(1.0, top_k=2, top_p=0.6))[1] == 1


def test_rows_have_their_own_parameters():
    rows = LOGITS.expand(4, -1)
    draws = [Draw(), Draw(1.0, uniform=0.999999), Draw(1.0, top_k=1, uniform=0.9), Draw(0.01, uniform=0.5)]
    assert sample(rows, draws).tolist() == [1, 3, 1, 1]


def test_random_numbers_pass_a_chi_square_test():
    generator = torch.Generator().manual_seed(1)
    n = 5000
    numbers = torch.rand(n, generator=generator).tolist()
    seen = torch.bincount(sample(LOGITS.expand(n, -1), [Draw(1.0, uniform=u) for u in numbers]), minlength=5)
    want = LOGITS.softmax(0) * n
    assert float(((seen - want) ** 2 / want).sum()) < 18.5  # 4 degrees of freedom: one in a thousand


def test_infinite_logits_are_never_drawn():
    row = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]])
    got = {int(sample(row, [Draw(1.0, uniform=u)])) for u in (0.0, 0.25, 0.5, 0.75, 0.99999997)}
    assert got == {1, 3}
