"""GEMMs of up to 64 rows, on a Hopper GPU with Triton: those of decode steps, which take at best as long as reading their weights.

cuBLAS takes a quarter longer with 64 rows: it starts when the kernel before has ended, and adds up what it splits in a kernel of
its own. These kernels are launched before that, and what they split is added up by the norm that comes next (fused.py). Weights
come by Hopper's copy engine (TMA). A row's result does not depend on the other rows.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 64
_OUTPUTS = 64  # of a block of threads


@triton.jit
def _load_rows(x, x_tiles, rows, x_row, depth, k, is_whole: tl.constexpr, tokens: tl.constexpr, inputs: tl.constexpr):
    # Boxes with rows that do not exist are slow: with one row, a step that takes 4.6 ms took 6.7.
    if is_whole:
        return x_tiles.load([0, k])
    token, at = tl.arange(0, tokens), k + tl.arange(0, inputs)
    return tl.load(x + token[:, None] * x_row + at[None, :], mask=(token < rows)[:, None] & (at < depth)[None, :], other=0.0)


@triton.jit
def _gemm(
    x, x_tiles, w_tiles, bias, out, rows, x_row, depth, width, steps,
    is_whole: tl.constexpr, tokens: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr, stages: tl.constexpr,
    has_bias: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    gdc_wait()
    gdc_launch_dependents()
    sums = tl.zeros((tokens, outputs), tl.float32)
    for i in tl.range(0, steps, num_stages=stages):
        k = (part * steps + i) * inputs
        rows_of_x = _load_rows(x, x_tiles, rows, x_row, depth, k, is_whole, tokens, inputs)
        sums = tl.dot(rows_of_x, w_tiles.load([tile * outputs, k]).T, sums)
    token, n = tl.arange(0, tokens), tile * outputs + tl.arange(0, outputs)
    if has_bias:
        sums += tl.load(bias + n, mask=n < width, other=0.0).to(tl.float32)[None, :]
    at = (part * rows + token).to(tl.int64)[:, None] * width + n[None, :]
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=(token < rows)[:, None] & (n < width)[None, :])


@triton.jit
def _gemm_silu_mul(
    x, x_tiles, w_tiles, out, rows, x_row, depth, width, steps,
    is_whole: tl.constexpr, tokens: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    gdc_wait()
    gdc_launch_dependents()
    gate, up = tl.zeros((tokens, outputs), tl.float32), tl.zeros((tokens, outputs), tl.float32)
    for i in tl.range(0, steps, num_stages=stages):
        k = i * inputs
        rows_of_x = _load_rows(x, x_tiles, rows, x_row, depth, k, is_whole, tokens, inputs)
        gate = tl.dot(rows_of_x, w_tiles.load([tile * outputs, k]).T, gate)
        up = tl.dot(rows_of_x, w_tiles.load([width + tile * outputs, k]).T, up)
    kind = out.dtype.element_ty
    g = gate.to(kind).to(tl.float32)
    y = (g / (1.0 + tl.exp(-g))).to(kind) * up.to(kind)
    token, n = tl.arange(0, tokens), tile * outputs + tl.arange(0, outputs)
    tl.store(out + token.to(tl.int64)[:, None] * width + n[None, :], y, mask=(token < rows)[:, None] & (n < width)[None, :])


def work_on(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def takes(x: Tensor, w: Tensor) -> bool:
    """`w` is [in, out] with an output's weights side by side, as checkpoints have them."""
    return (
        0 < x.shape[0] <= MAX_ROWS
        and x.shape[1] == w.shape[0] <= x.stride(0)
        and x.dtype == w.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and w.stride(0) == x.stride(1) == 1
        and w.stride(1) % 8 == x.stride(0) % 8 == 0
        and (x.data_ptr() | w.data_ptr()) % 16 == 0
    )


def gemm(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """[rows, out] of x [rows, in]."""
    return _run_gemm(x, w, bias, 1, x.dtype)[0]


def gemm_parts(x: Tensor, w: Tensor) -> Tensor:
    """[parts, rows, out] in f32, to be added up: where outputs are too few for all multiprocessors, inputs are shared out too."""
    parts = max(1, min(8, _num_sms(x.device) // triton.cdiv(w.shape[1], _OUTPUTS)))
    return _run_gemm(x, w, None, parts, torch.float32)


def gemm_silu_mul(x: Tensor, w: Tensor) -> Tensor:
    """silu(gate) * up of x times [in, (gate, up)], each rounded as if it stood alone."""
    (rows, depth), width = x.shape, w.shape[1] // 2
    out = x.new_empty(rows, width)
    outputs, inputs, stages = _OUTPUTS // 2, 64, 4
    x_tiles, w_tiles = _tiles(x, MAX_ROWS, inputs), _tiles(w.t(), outputs, inputs)
    with torch.cuda.device(x.device):  # Triton launches on the current one
        _gemm_silu_mul[(triton.cdiv(width, outputs),)](
            x, x_tiles, w_tiles, out, rows, x.stride(0), depth, width, triton.cdiv(depth, inputs),
            rows == MAX_ROWS, MAX_ROWS, outputs, inputs, stages, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out


def _run_gemm(x: Tensor, w: Tensor, bias: Tensor | None, parts: int, dtype: torch.dtype) -> Tensor:
    (rows, depth), width = x.shape, w.shape[1]
    blocks = triton.cdiv(width, _OUTPUTS)
    # A block of threads on each multiprocessor with as many tiles under way as fit; or three of them, if there are so many.
    inputs, stages = (128, 5) if blocks * parts <= _num_sms(x.device) else (64, 4)
    out = torch.empty(parts, rows, width, dtype=dtype, device=x.device)
    x_tiles, w_tiles = _tiles(x, MAX_ROWS, inputs), _tiles(w.t(), _OUTPUTS, inputs)
    with torch.cuda.device(x.device):
        _gemm[(blocks, parts)](
            x, x_tiles, w_tiles, w if bias is None else bias, out, rows, x.stride(0), depth, width,
            triton.cdiv(depth, inputs * parts), rows == MAX_ROWS, MAX_ROWS, _OUTPUTS, inputs, stages, bias is not None,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
    return out


def _tiles(rows: Tensor, height: int, width: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(rows, [height, width])


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
