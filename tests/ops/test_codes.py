"""Codes of whole rows: every backend equals the definition at every 16-bit value, at every code's boundaries, for every length."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from kvx.quant import numbers
from kvx.spec import DTYPES
from tests import cases, compare

FORMATS = ("fp8_e4m3", "fp8_e5m2", "int8")
BLOCK = 64  # tokens
INF, NAN = float("inf"), float("nan")


@cache
def boundaries(name: str) -> Tensor:
    """Every code's value, the middle between it and the next, and an ulp of f32 to either side; what is odd about f32."""
    values = numbers.decode(torch.arange(256, dtype=torch.uint8), DTYPES[name], None, torch.float32)
    values = values[values.isfinite()].unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2])
    near = torch.cat([points, points.nextafter(torch.tensor(INF)), points.nextafter(torch.tensor(-INF))])
    odd = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e38, -3e38])
    return torch.cat([near, odd])


def check(backend, values: Tensor, *, format: str, io: str, head_dim: int, scale: float) -> None:
    """Rows of `head_dim` values, the last one filled up from the front: written and gathered as the definition does."""
    rows = -(-len(values) // head_dim)
    case = cases.Case(
        format=format, io=io, num_blocks=-(-rows // BLOCK) + 1, block_size=BLOCK, num_kv_heads=1, head_dim=head_dim, lens=(rows,)
    )
    made = case.make("cpu", torch.Generator().manual_seed(0))
    filled = values.repeat(-(-rows * head_dim // len(values)))[: rows * head_dim].view(rows, 1, head_dim)
    made.k[:rows], made.v[:rows] = filled, filled.flip(0)
    for name, tensor in made.scales.items():
        if tensor is not None and "_per_" not in format:
            tensor.fill_(scale if name == "k_scale" else -scale)
    want = made.clone()
    want.write("torch")
    made = made.to(backend.device)
    made.write(backend.name)
    what = f"{io} -> {format}, {head_dim} a row, scale {scale}"
    for name, tensor in made.tensors().items():
        compare.bitwise(tensor.cpu(), want.tensors()[name], f"{name}: {what}")
    for got, expected in zip(made.gather(backend.name), want.gather("torch"), strict=True):
        compare.bitwise(got.cpu(), expected, f"gathered: {what}")


@pytest.mark.parametrize("io", ["bf16", "f16"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_16_bit_value(native_backend, format, io):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(cases.IO[io])
    for scale in (1.0, 1 + 2**-8, 0.0123, 3e-38, 0.0, INF, NAN):  # the second: ties when gathered as bf16
        check(native_backend, values, format=format, io=io, head_dim=128, scale=scale)


@pytest.mark.parametrize("io", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_boundary_at_every_length(native_backend, format, io):
    for head_dim in range(1, 131):
        scale = 1.0 if head_dim % 2 else 0.37  # at 1 the boundaries are met exactly
        values = (boundaries(format) * scale).to(cases.IO[io])
        check(native_backend, values, format=format, io=io, head_dim=head_dim, scale=scale)


@pytest.mark.parametrize("io", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("format", FORMATS)
def test_scales_of_rows_at_every_length(native_backend, format, io):
    """The largest finite magnitude of a row, wherever it stands, beside NaN and infinities."""
    for head_dim in range(1, 131):
        values = boundaries(format).roll(head_dim).to(cases.IO[io])
        check(native_backend, values, format=f"{format}_per_token_head", io=io, head_dim=head_dim, scale=1.0)
