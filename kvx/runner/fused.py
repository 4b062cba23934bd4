"""Small steps between GEMMs as one kernel each, on a GPU with Triton: at a few rows they are launches and little else.

From Hopper on they are launched before the kernel ahead of them has ended, and let the next one start before they wait for that. So
whatever comes next and is launched early has to wait before it reads anything that a step computes; few_rows.py waits first of all.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # before Triton 3.4: then nothing is launched early
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def _add_rms_norm(h, x, weight, out, eps, plane, parts, width: tl.constexpr, block: tl.constexpr, is_early: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    if is_early:
        gdc_launch_dependents()
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if is_early:
        gdc_wait()
    x += row + at
    product = tl.load(x, mask=inside, other=0.0)
    for _ in range(1, parts):
        x += plane
        product += tl.load(x, mask=inside, other=0.0)
    old = tl.load(h + row + at, mask=inside, other=0.0)
    new = old + product.to(old.dtype)
    tl.store(h + row + at, new, mask=inside)
    y = new.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / width + eps) * w
    tl.store(out + row + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, width, block: tl.constexpr, is_early: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    inside = at < width
    if is_early:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + 2 * row * width + at, mask=inside, other=0.0)
    up = tl.load(gate_up + (2 * row + 1) * width + at, mask=inside, other=0.0)
    g = gate.to(tl.float32)
    tl.store(out + row * width + at, (g / (1.0 + tl.exp(-g))).to(gate.dtype) * up, mask=inside)


def work_on(device: torch.device) -> bool:
    return device.type == "cuda"


@cache
def _starts_early(device: torch.device) -> bool:
    return gdc_wait is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def _early(is_early: bool) -> dict[str, bool]:
    """Options of a launch. Triton for ROCm refuses this one, whatever its value."""
    return {"launch_pdl": True} if is_early else {}


def add_rms_norm(h: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """h += x, rounded to h's type; then h's norm. x may be parts [parts, rows, width], which are added up first, in their order."""
    rows, width = h.shape
    parts = x.shape[0] if x.dim() == 3 else 1
    out, is_early = torch.empty_like(h), _starts_early(h.device)
    with torch.cuda.device(h.device):  # Triton launches on the current one
        _add_rms_norm[(rows,)](
            h, x, weight, out, eps, rows * width, parts, width, triton.next_power_of_2(width), is_early, num_warps=8,
            **_early(is_early),
        )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, (gate, up)]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out, is_early = gate_up.new_empty(rows, width), _starts_early(gate_up.device)
    with torch.cuda.device(gate_up.device):
        _silu_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, 1024, is_early, num_warps=4, **_early(is_early))
    return out
