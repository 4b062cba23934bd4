"""GEMMs of the model: which type they run in, how a matrix is kept, and x times it."""

from __future__ import annotations

import os

import torch
from torch import Tensor

# oneDNN's kernels on Arm write /tmp/perf-PID.map for profilers and leave it there, unless this says no before the first of them.
if "DNNL_JIT_PROFILE" not in os.environ:  # its older name
    os.environ.setdefault("ONEDNN_JIT_PROFILE", "0")


def gemm_dtype(dtype: torch.dtype, device: str | torch.device) -> torch.dtype:
    """What GEMMs run in. A CPU without 16-bit arithmetic takes 100 times as long for them as for f32: then weights and inputs
    are rounded to dtype and multiplied as f32, which is what such a GEMM computes, up to the order of its sums."""
    if torch.device(device).type != "cpu" or dtype == torch.float32:
        return dtype
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return dtype if dtype == torch.bfloat16 and ask is not None and ask() else torch.float32


def pack(rows: Tensor, *, may_share: bool = False) -> Tensor:
    """A matrix of [out, in] as `gemm` takes it: [in, out], or in oneDNN's own order where torch's BLAS would pack it in every call.

    That is OpenBLAS, on Arm: with 8 rows SmolLM2's GEMMs take 65 ms a step that way and 50 packed (Neoverse N1, 2 cores). With
    one row they take 29 and 32. The two ops are those of torch's own Inductor. On a GPU it stays as it is: GEMMs take either order,
    and few_rows.py this one.
    `may_share`: not a copy where nothing is packed, as for a head that is the embedding too.
    """
    if _is_packed_here(rows):
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(rows.contiguous())
        return packed
    return rows.t() if may_share or rows.is_cuda else rows.t().contiguous()


def unpack(w: Tensor) -> Tensor:
    """[out, in] again."""
    return w.to_dense() if w.is_mkldnn else w.t()


def gemm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, out] of x [rows, in]."""
    if w.is_mkldnn:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")
        return y
    return x @ w if bias is None else torch.addmm(bias, x, w)


def gemm_add(h: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """h + x times the matrix, into h."""
    return h.add_(gemm(x, w)) if w.is_mkldnn else h.addmm_(x, w)


def _is_packed_here(rows: Tensor) -> bool:
    return (
        rows.is_cpu
        and rows.dtype == torch.float32
        and not torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
