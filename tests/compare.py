"""Comparison by bits, with the worst place printed."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(_BITS[x.element_size()]).cpu()


def bitwise(got: Tensor, want: Tensor, what: str = "tensor") -> None:
    assert got.shape == want.shape, f"{what}: shape {list(got.shape)}, expected {list(want.shape)}"
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}"
    a, b = bits(got), bits(want)
    if torch.equal(a, b):
        return
    wrong = a != b
    at = tuple(int(i) for i in wrong.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} differ; first at {list(at)}: "
        f"got {got[at].item()} (0x{int(a[at]) & 0xFFFFFFFF:x}), expected {want[at].item()} (0x{int(b[at]) & 0xFFFFFFFF:x})"
    )
