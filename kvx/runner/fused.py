"""Small steps between GEMMs as one kernel each, on a GPU with Triton: at a few rows they are launches and little else."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_rms_norm(h, x, weight, out, eps, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(h + row + at, mask=inside, other=0.0) + tl.load(x + row + at, mask=inside, other=0.0)
    tl.store(h + row + at, new, mask=inside)
    y = new.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / width + eps) * w
    tl.store(out + row + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, width, block: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    gate = tl.load(gate_up + 2 * row * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + (2 * row + 1) * width + at, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    tl.store(out + row * width + at, (g / (1.0 + tl.exp(-g))).to(gate.dtype) * up, mask=inside)


def add_rms_norm(h: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """h += x, rounded to h's type; then h's norm."""
    rows, width = h.shape
    out = torch.empty_like(h)
    with torch.cuda.device(h.device):  # Triton launches on the current one
        _add_rms_norm[(rows,)](h, x, weight, out, eps, width, triton.next_power_of_2(width), num_warps=8)
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, (gate, up)]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    with torch.cuda.device(gate_up.device):
        _silu_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, 1024, num_warps=4)
    return out
