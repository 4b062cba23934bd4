"""topk: the definition's indices exactly, over ties, NaN, infinities and lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvx
from kvx.ops.entry.topk import topk
from tests import compare


def check(scores: Tensor, k: int, backend: str, **more: Tensor) -> None:
    compare.bitwise(topk(scores, k, **more, backend=backend), topk(scores, k, **more, backend="torch"), f"k {k}")


@pytest.mark.parametrize("k", [1, 2, 7, 64, 512, 1024, 2048])
@pytest.mark.parametrize("entries", [0, 1, 5, 511, 513, 3000, 20000])
def test_random_scores(native_backend, entries, k, generator):
    scores = torch.randn(5, entries, generator=generator).to(native_backend.device)
    check(scores, k, native_backend.name)


@pytest.mark.parametrize(("entries", "k"), [(70_000, 512), (70_000, 4096), (40_000, 9000), (300_000, 1024)])
def test_long_rows(native_backend, entries, k, generator):
    """More than one block of threads has; lengths end inside of any of them."""
    scores = torch.randn(3, entries, generator=generator).mul(50).round().to(native_backend.device)  # with ties
    check(scores, k, native_backend.name)
    lengths = torch.tensor([entries - 1, entries // 2 + 7, 20_001], dtype=torch.int32, device=native_backend.device)
    check(scores, k, native_backend.name, lengths=lengths)


@pytest.mark.parametrize("values", [1, 2, 17, 300])
@pytest.mark.parametrize("entries", [40, 2100, 9000])
def test_ties_go_to_the_lower_index(native_backend, entries, values, generator):
    scores = (
        torch.randint(-(values // 2), values - values // 2, (6, entries), generator=generator).float().to(native_backend.device)
    )
    for k in (1, 33, 512, 2048):
        check(scores, k, native_backend.name)
        check(scores * 0.0, k, native_backend.name)  # 0 and -0 are the same


@pytest.mark.parametrize("entries", [3, 700, 5000])
def test_odd_numbers(native_backend, entries, generator):
    scores = torch.randn(8, entries, generator=generator)
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, -0.0, 0.0, 1e-45, -1e-45, 3.4e38, -3.4e38])
    picks = torch.randint(0, len(odd), scores.shape, generator=generator)
    scores = torch.where(torch.rand(scores.shape, generator=generator) < 0.4, odd[picks], scores)
    scores[1], scores[2], scores[3] = torch.nan, -torch.inf, torch.inf
    scores[4, : entries - 1] = -torch.inf
    for k in (1, 4, 512):
        check(scores.to(native_backend.device), k, native_backend.name)


@pytest.mark.parametrize("order", ["rising", "falling", "close"])
def test_sorted_scores(native_backend, order):
    """Each above all before; and scores that differ in their last bits alone."""
    scores = torch.arange(6000.0).expand(3, -1)
    scores = {"rising": scores, "falling": -scores, "close": 1 + scores.remainder(977) * 2.0**-23}[order]
    check(scores.contiguous().to(native_backend.device), 512, native_backend.name)


@pytest.mark.parametrize("k", [3, 512])
def test_lengths(native_backend, k, generator):
    """Scores behind a token's length are not read."""
    lengths = [0, 1, 2, 3, 511, 512, 513, 2999, 3000, 5000, -4]
    scores = torch.randn(len(lengths), 3000, generator=generator)
    for row, n in enumerate(lengths):
        scores[row, max(0, n) :] = torch.inf
    at = torch.tensor(lengths, dtype=torch.int32, device=native_backend.device)
    check(scores.to(native_backend.device), k, native_backend.name, lengths=at)


def test_strides_and_outputs(native_backend, generator):
    wide = torch.full((4, 900), torch.inf, device=native_backend.device)
    wide[:, 50:850] = torch.randn(4, 800, generator=generator)
    out = torch.full((4, 40), 7, dtype=torch.int32, device=native_backend.device)
    got = topk(wide[:, 50:850], 30, out=out[:, 3:33], backend=native_backend.name)
    compare.bitwise(got.contiguous(), topk(wide[:, 50:850].contiguous(), 30, backend="torch"))
    assert (out[:, :3] == 7).all()
    assert (out[:, 33:] == 7).all()


def test_no_tokens(native_backend):
    assert topk(torch.zeros(0, 10, device=native_backend.device), 4, backend=native_backend.name).shape == (0, 4)


def _strided_bytes(device):
    """Made where it is used: a copy to a device has no gaps."""
    return torch.zeros(9, 2, dtype=torch.uint8, device=device)[:, 0]


@pytest.mark.parametrize(
    ("scores", "k", "more", "words"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), 2, {}, "scores are"),
        (torch.zeros(4), 2, {}, "scores are"),
        (torch.zeros(3, 4), 0, {}, "k 0"),
        (torch.zeros(4, 3).T, 2, {}, "columns adjacent"),
        (torch.zeros(3, 4), 2, {"lengths": torch.zeros(2, dtype=torch.int32)}, "lengths are"),
        (torch.zeros(3, 4), 2, {"lengths": torch.zeros(3, dtype=torch.int64)}, "lengths are"),
        (torch.zeros(3, 4), 2, {"lengths": torch.zeros((), dtype=torch.int32)}, "lengths"),
        (torch.zeros(3, 4), 2, {"workspace": torch.zeros(9)}, "workspace is .* adjacent uint8"),
        (torch.zeros(3, 4), 2, {"workspace": _strided_bytes}, "workspace is .* adjacent uint8"),
        (torch.zeros(3, 4), 2, {"out": torch.zeros(3, 3, dtype=torch.int32)}, "out is"),
    ],
)
def test_wrong_arguments(backend, scores, k, more, words):
    device = backend.device
    moved = {name: x(device) if callable(x) else x.to(device) for name, x in more.items()}
    with pytest.raises(kvx.BadArgument, match=words):
        topk(scores.to(device), k, **moved, backend=backend.name)


def test_workspace_bytes_takes_no_room_for_the_scores(native_backend):
    """2^38 scores are a TiB."""
    size = kvx.topk_workspace_bytes(1 << 18, 1 << 20, 4, native_backend.device)
    assert (size > 0) == (native_backend.device == "cuda")


def test_a_workspace_of_the_bytes_that_are_told(native_backend, generator):
    scores = torch.randn(3, 70_000, generator=generator).to(native_backend.device)
    size = kvx.topk_workspace_bytes(3, 70_000, 512, native_backend.device)
    check(scores, 512, native_backend.name, workspace=torch.empty(size, dtype=torch.uint8, device=native_backend.device))
