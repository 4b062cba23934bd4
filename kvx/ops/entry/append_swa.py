"""append_swa: rows of a step's tokens into the windows of their requests. The torch body below is the definition."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import native
from kvx.ops.entry import fill
from kvx.ops.entry.finish import check_finish, check_turn, finish_rows
from kvx.ops.entry.step import FLOATS, INT32_MAX, Step, check_step
from kvx.ops.structs import HEAD, TAIL, Array, FinishArgs, RowsArgs, StepArgs
from kvx.quant.rows import RowPages


class AppendSwaArgs(ctypes.Structure):
    """kvx_append_swa_args_t: the arguments of kvx_append_swa, as a C program fills them."""

    _fields_ = [
        *HEAD,
        ("window", RowsArgs),
        ("positions", Array),
        ("x", Array),
        ("finish", FinishArgs),
        ("step", StepArgs),
        *TAIL,
    ]


def append_swa(
    window: RowPages,  # a page for each slot: the row of position p is row p % rows of it
    positions: Tensor | None,  # [num_slots, rows] int32, whose token each row is. None: rows of this step alone, token t is row t
    x: Tensor,  # [num_tokens, dim] f16, bf16 or f32
    step: Step,
    *,
    weight: Tensor | None = None,  # [dim]: RMSNorm first; None: x is normed
    eps: float = 1e-6,
    cos: Tensor | None = None,  # [max_positions, rope_dim / 2] f32: then its last elements turn; None: x is rotated
    sin: Tensor | None = None,
    errors: Tensor | None = None,  # one int64 on the device: counts slots and positions outside, which are skipped
    backend: str = "auto",
) -> None:
    """Norm, rotate and code the step's rows, and put them where their positions say.

    Of more tokens than a window has rows, the last are kept. Without `positions` the pages are a workspace of the step: what a
    chunk's own queries read before its last rows take the place of the window's (attention_sparse's `fresh`).
    """
    call = "append_swa"
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(
            call, backend, window=window.pages, positions=positions, x=x, step=step, finish=(weight, cos, sin), errors=errors
        )
    _check(call, window, positions, x)
    if backends.choose(call, backend, window.pages) != "torch":
        args = fill.start(AppendSwaArgs(), window.pages, errors)
        fill.rows(args.window, "window", window, window.pages)
        fill.array(args.positions, "positions", positions, window.pages)
        fill.array(args.x, "x", x, window.pages)
        fill.finish(args.finish, weight, cos, sin, eps, window.pages)
        fill.step(args.step, step, window.pages)
        native.call_struct("kvx_append_swa", args, native.stream_of(window.pages))
        return
    fill.check_errors(errors, window.pages)
    check_apart(call, window=window.pages, positions=positions)
    check_finish(call, window.codec.dim, weight, cos, sin, eps)
    check_step(call, step, len(x), len(window.pages) if positions is not None else INT32_MAX)
    for run in step.runs():
        check_turn(call, cos, run.last)
    for run in step.runs():
        first = max(run.begin, run.end - window.rows) if positions is not None else run.begin
        at = torch.arange(run.start + first - run.begin, run.start + run.end - run.begin, device=x.device)
        rows = finish_rows(x[first : run.end].to(torch.float32), at, weight, cos, sin, eps)
        if positions is None:
            window.write(torch.arange(first, run.end, device=x.device), rows)
        else:
            window.write(run.slot * window.rows + at % window.rows, rows)
            positions[run.slot, at % window.rows] = at.to(torch.int32)


def _check(call: str, window: RowPages, positions: Tensor | None, x: Tensor) -> None:
    dim = window.codec.dim
    if x.dim() != 2 or x.shape[1] != dim or x.dtype not in FLOATS:
        raise BadArgument(f"{call}(): x is {list(x.shape)} {x.dtype}; it must be [num_tokens, {dim}] f16, bf16 or f32.")
    want = [len(window.pages), window.rows]
    if positions is not None and (list(positions.shape) != want or positions.dtype != torch.int32):
        raise BadArgument(f"{call}(): positions are {list(positions.shape)} {positions.dtype}; they must be {want} int32.")
    if positions is None and len(x) > window.num_rows:
        raise BadArgument(f"{call}(): {len(x)} tokens for {window.num_rows} rows. With positions, pages are windows of slots.")
