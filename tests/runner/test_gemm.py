"""Packed or not, a matrix multiplies as it would plainly."""

from __future__ import annotations

import pytest
import torch

from kvx.runner import gemm as gemms


@pytest.fixture(params=["packed", "plain"])
def matrix(request, monkeypatch):
    """[out, in], and the same as `gemm` takes it."""
    if request.param == "plain":
        monkeypatch.setattr(gemms, "_is_packed_here", lambda rows: False)
    elif not gemms._is_packed_here(torch.ones(1, 1)):
        pytest.skip("torch's BLAS here packs nothing")
    rows = torch.randn(48, 40, generator=torch.Generator().manual_seed(1))
    return rows, gemms.pack(rows)


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 65])
def test_x_times_a_matrix(matrix, num_rows):
    rows, packed = matrix
    x, bias, h = torch.randn(num_rows, 40), torch.randn(48), torch.randn(num_rows, 48)
    want = x.double() @ rows.t().double()
    torch.testing.assert_close(gemms.gemm(x, packed), want.float())
    torch.testing.assert_close(gemms.gemm(x, packed, bias), (want + bias).float())
    torch.testing.assert_close(gemms.gemm_add(h.clone(), x, packed), (want + h).float())


def test_unpack_gives_the_rows_back(matrix):
    rows, packed = matrix
    assert torch.equal(gemms.unpack(packed), rows)


def test_sixteen_bits_are_never_packed():
    rows = torch.randn(8, 4, dtype=torch.bfloat16)
    shared = gemms.pack(rows, may_share=True)
    assert shared.data_ptr() == rows.data_ptr()
    assert torch.equal(gemms.pack(rows), rows.t())
