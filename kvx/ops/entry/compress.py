"""compress: a step's tokens into the sums of their entries; complete entries into their pages. The torch body is the definition."""

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
from kvx.ops.entry.step import FLOATS, Step, check_entries, check_step, check_table
from kvx.ops.entry.tail import Tail
from kvx.ops.structs import HEAD, TAIL, Array, FinishArgs, RowsArgs, StepArgs
from kvx.quant.rows import RowPages

_OVERLAP, _RUNNING, _HADAMARD = 1, 2, 4


class CompressArgs(ctypes.Structure):
    """kvx_compress_args_t: the arguments of kvx_compress, as a C program fills them."""

    _fields_ = [
        *HEAD,
        *((name, Array) for name in ("state", "kv", "score", "bias")),
        ("finish", FinishArgs),
        ("entries", RowsArgs),
        ("block_table", Array),
        ("num_shared", Array),
        ("step", StepArgs),
        ("ratio", ctypes.c_int64),
        *TAIL,
    ]


def compress(
    tail: Tail,  # of every slot: read and written
    kv: Tensor,  # [num_tokens, num_parts * dim] f16, bf16 or f32
    score: Tensor,  # the same
    entries: RowPages,
    block_table: Tensor,  # [num_slots, columns] int32: entry j of a slot is row j % rows of page [slot, j // rows]
    step: Step,
    *,
    bias: Tensor | None = None,  # [ratio, num_parts * dim] f32: added to scores by their place in the window
    weight: Tensor | None = None,  # [dim]: RMSNorm of entries
    eps: float = 1e-6,
    cos: Tensor | None = None,  # [max_positions, rope_dim / 2] f32: entry j turns as position j * ratio
    sin: Tensor | None = None,
    hadamard: bool = False,  # then rotate: keys of an indexer, before they are coded in four bits
    num_shared: Tensor
    | None = None,  # [num_slots] int32: entries of tokens before this position are there already, and not written
    errors: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Always the same work for the same shapes: which windows close follows from positions, on the device.

    An entry is, for each channel, the mean of its tokens' kv weighed by a softmax over their scores (kvx/ops/entry/tail.py);
    then normed, rotated, coded and put into its page. The tail keeps what the next step needs.
    """
    call = "compress"
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(
            call, backend, kv=kv, score=score, entries=entries.pages, block_table=block_table, step=step, bias=bias,
            finish=(weight, cos, sin), num_shared=num_shared, errors=errors,
        )  # fmt: skip
    _check(call, tail, kv, score, entries, bias, has_hadamard=hadamard)
    if backends.choose(call, backend, entries.pages) != "torch":
        like = entries.pages
        args = fill.start(CompressArgs(), like, errors)
        args.flags = _OVERLAP * tail.overlap | _RUNNING * tail.is_running | _HADAMARD * hadamard
        args.ratio = tail.ratio
        for name, x in (("state", tail.state), ("kv", kv), ("score", score), ("bias", bias), ("block_table", block_table)):
            fill.array(getattr(args, name), name, x, like)
        fill.array(args.num_shared, "num_shared", num_shared, like)
        fill.rows(args.entries, "entries", entries, like)
        fill.finish(args.finish, weight, cos, sin, eps, like)
        fill.step(args.step, step, like)
        native.call_struct("kvx_compress", args, native.stream_of(like))
        return
    ratio = tail.ratio
    fill.check_errors(errors, entries.pages)
    check_apart(call, entries=entries.pages)
    check_finish(call, tail.dim, weight, cos, sin, eps)
    check_table(call, block_table, len(tail.state))
    _check_shared(call, num_shared, len(tail.state))
    check_step(call, step, len(kv), len(tail.state))
    for run in step.runs():
        first, count = run.start // ratio, (run.last + 1) // ratio
        if count > first:
            check_turn(call, cos, (count - 1) * ratio)
            first = first if num_shared is None else max(first, int(num_shared[run.slot]) // ratio)
            check_entries(call, block_table, entries, run.slot, first, count)
    for run in step.runs():
        at = torch.arange(run.start, run.start + run.end - run.begin, device=kv.device)
        scores = score[run.begin : run.end].to(torch.float32)
        if bias is not None:
            scores = scores + bias[at % ratio]
        pooled = tail.take(run.slot, run.start, kv[run.begin : run.end], scores)
        numbers = torch.arange(run.start // ratio, run.start // ratio + len(pooled), device=kv.device)
        rows = finish_rows(pooled, numbers * ratio, weight, cos, sin, eps, has_hadamard=hadamard)
        slots = entry_slots(block_table[run.slot], entries, numbers)
        if num_shared is not None:
            slots = slots.masked_fill(numbers * ratio < num_shared[run.slot] // ratio * ratio, -1)
        entries.write(slots, rows)


def entry_slots(blocks: Tensor, entries: RowPages, numbers: Tensor) -> Tensor:
    """Where a request's entries stand; -1 where its table has no page. They were checked (check_entries)."""
    pages = blocks[numbers // entries.rows].long()
    return torch.where(pages < 0, -1, pages * entries.rows + numbers % entries.rows)


def _check(call: str, tail: Tail, kv: Tensor, score: Tensor, entries: RowPages, bias: Tensor | None, *, has_hadamard: bool) -> None:
    width = tail.num_parts * tail.dim
    if not 1 <= tail.ratio <= 4096:
        raise BadArgument(f"{call}(): ratio is {tail.ratio}; it must be 1 to 4096.")
    if kv.dim() != 2 or kv.shape[1] != width or kv.shape != score.shape:
        raise BadArgument(f"{call}(): kv is {list(kv.shape)}, score {list(score.shape)}; both are [num_tokens, {width}].")
    if kv.dtype not in FLOATS or score.dtype not in FLOATS:
        raise BadArgument(f"{call}(): kv is {kv.dtype}, score {score.dtype}; both are f16, bf16 or f32.")
    if entries.codec.dim != tail.dim:
        raise BadArgument(f"{call}(): entries have {entries.codec.dim} elements; the tail makes {tail.dim}.")
    if bias is not None and (list(bias.shape) != [tail.ratio, width] or bias.dtype != torch.float32):
        raise BadArgument(f"{call}(): bias is {list(bias.shape)} {bias.dtype}; it must be [{tail.ratio}, {width}] float32.")
    if has_hadamard and tail.dim & (tail.dim - 1):
        raise BadArgument(f"{call}(): dim is {tail.dim}; a Hadamard rotation takes a power of two.")


def _check_shared(call: str, num_shared: Tensor | None, num_slots: int) -> None:
    if num_shared is None:
        return
    if num_shared.dim() != 1 or len(num_shared) < num_slots or num_shared.dtype != torch.int32:
        raise BadArgument(f"{call}(): num_shared is {list(num_shared.shape)} {num_shared.dtype}; it must be [{num_slots}] int32.")
