"""GEMMs of a few rows on a Hopper GPU: exact up to rounding, and every row as if it were alone."""

from __future__ import annotations

import pytest
import torch

from kvx.ops import backend as backends

pytestmark = pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"cuda: {backends.reason_missing('cuda')}")

SHAPES = [  # rows, inputs, outputs
    *((rows, 4096, 4096) for rows in (1, 2, 8, 33, 64)),
    (64, 4096, 6144),
    (5, 576, 49152),  # SmolLM2's head
    (64, 12288, 1024),
    (17, 896, 9728),
    (64, 8, 16),
    (7, 72, 100),  # outputs and inputs that no tile divides
    (64, 1032, 4102),
]


@pytest.fixture(scope="module")
def few_rows():
    module = pytest.importorskip(
        "kvx.runner.few_rows", reason="Triton is not installed, or is older than 3.4", exc_type=ImportError
    )
    if not module.work_on(torch.device("cuda")):
        pytest.skip("the GPU is not a Hopper")
    return module


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SHAPES)
def test_against_float64(few_rows, rows, inputs, outputs, dtype):
    x, w = numbers(rows, inputs, dtype=dtype, seed=1), numbers(outputs, inputs, dtype=dtype, seed=2).t()
    bias = numbers(outputs, dtype=dtype, seed=3)
    assert few_rows.takes(x, w)
    want, size = x.double() @ w.double(), x.double().abs() @ w.double().abs()
    sums = inputs * 2.0**-23 * size  # of f32, whose last bit tensor cores may cut off
    half = torch.finfo(dtype).eps / 2
    got = few_rows.gemm(x, w)
    assert got.dtype == dtype
    assert ((got.double() - want).abs() <= half * want.abs() + 2 * sums + torch.finfo(dtype).tiny).all()
    biased = want + bias.double()
    off = (few_rows.gemm(x, w, bias).double() - biased).abs()
    assert (off <= half * biased.abs() + 2 * sums + torch.finfo(dtype).tiny).all()
    parts = few_rows.gemm_parts(x, w)
    assert parts.dtype == torch.float32
    assert parts.shape[1:] == (rows, outputs)
    assert ((parts.double().sum(0) - want).abs() <= sums).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "width"), [(64, 4096, 12288), (1, 1024, 3072), (9, 72, 40), (64, 896, 4870)])
def test_gate_and_up(few_rows, rows, inputs, width, dtype):
    fused = pytest.importorskip("kvx.runner.fused", reason="Triton is not installed")
    x, w = numbers(rows, inputs, dtype=dtype, seed=1), (numbers(2 * width, inputs, dtype=dtype, seed=2) / inputs**0.5).t()
    apart = fused.silu_mul(few_rows.gemm(x, w))
    # Sums in another order may round to a neighbour: of gate, of up, and of their product.
    torch.testing.assert_close(few_rows.gemm_silu_mul(x, w), apart, rtol=4 * torch.finfo(dtype).eps, atol=1e-4)


def test_rows_do_not_depend_on_each_other(few_rows):
    x, w = numbers(64, 1024, dtype=torch.bfloat16, seed=1), numbers(3072, 1024, dtype=torch.bfloat16, seed=2).t()
    all_rows = [few_rows.gemm(x, w), few_rows.gemm_parts(x, w).sum(0), few_rows.gemm_silu_mul(x, w)]
    for first, last in ((0, 1), (3, 20), (40, 64)):
        some = x[first:last]
        alone = [few_rows.gemm(some, w), few_rows.gemm_parts(some, w).sum(0), few_rows.gemm_silu_mul(some, w)]
        assert all(torch.equal(a, b[first:last]) for a, b in zip(alone, all_rows, strict=True))
    x[5] = torch.nan
    assert torch.equal(few_rows.gemm(x, w)[6:], all_rows[0][6:])
    assert few_rows.gemm(x, w)[5].isnan().all()


@pytest.mark.parametrize("rows", [64, 9])
def test_rows_of_a_wider_tensor(few_rows, rows):
    wide, w = numbers(rows, 3072, dtype=torch.bfloat16, seed=1), numbers(512, 1024, dtype=torch.bfloat16, seed=2).t()
    x = wide[:, 1024:2048]
    assert few_rows.takes(x, w)
    assert torch.equal(few_rows.gemm(x, w), few_rows.gemm(x.contiguous(), w))
    assert torch.equal(few_rows.gemm_silu_mul(x, w), few_rows.gemm_silu_mul(x.contiguous(), w))


def test_parts_are_added_up_by_the_norm(few_rows):
    fused = pytest.importorskip("kvx.runner.fused", reason="Triton is not installed")
    x, w = numbers(40, 4096, dtype=torch.bfloat16, seed=1), numbers(1024, 4096, dtype=torch.bfloat16, seed=2).t()
    h, weight = numbers(40, 1024, dtype=torch.bfloat16, seed=3), numbers(1024, dtype=torch.bfloat16, seed=4)
    parts = few_rows.gemm_parts(x, w)
    assert len(parts) > 1
    product = parts[0]
    for part in parts[1:]:
        product = product + part
    one, other = h.clone(), h.clone()
    assert torch.equal(fused.add_rms_norm(one, parts, weight, 1e-6), fused.add_rms_norm(other, product.bfloat16(), weight, 1e-6))
    assert torch.equal(one, other)


def test_what_is_left_to_torch(few_rows):
    x, w = numbers(8, 256, dtype=torch.bfloat16, seed=1), numbers(512, 256, dtype=torch.bfloat16, seed=2).t()
    assert few_rows.takes(x, w)
    assert few_rows.takes(numbers(8, 512, dtype=torch.bfloat16, seed=1)[:, :256], w)
    assert not few_rows.takes(x.repeat(9, 1), w), "more than 64 rows"
    assert not few_rows.takes(x[:0], w), "no rows"
    assert not few_rows.takes(x[:, :128], w), "another number of inputs"
    assert not few_rows.takes(x[:1].expand(8, -1), w), "one row over and over"
    assert not few_rows.takes(x, w.contiguous()), "the other order"
    assert not few_rows.takes(x.float(), w.float()), "f32"
    assert not few_rows.takes(x.half(), w), "two types"
    assert not few_rows.takes(x[:, 1:], w[1:]), "addresses that are no multiple of 16 bytes"
    assert not few_rows.takes(x[:, :252].contiguous(), w[:252]), "rows that are not"
