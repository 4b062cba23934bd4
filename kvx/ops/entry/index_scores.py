"""index_scores: how much each entry matters to a token, by the indexer's keys. The torch body below is the definition."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import native
from kvx.ops.entry import fill
from kvx.ops.entry.compress import entry_slots
from kvx.ops.entry.finish import hadamard as rotate
from kvx.ops.entry.step import FLOATS, Step, check_entries, check_step, check_table
from kvx.ops.structs import HEAD, TAIL, Array, RowsArgs, StepArgs
from kvx.quant.rows import RowPages


class IndexScoresArgs(ctypes.Structure):
    """kvx_index_scores_args_t: the arguments of kvx_index_scores, as a C program fills them."""

    _fields_ = [
        *HEAD, ("q", Array), ("weights", Array), ("keys", RowsArgs), ("block_table", Array), ("scores", Array), ("step", StepArgs),
        ("ratio", ctypes.c_int64), *TAIL,
    ]  # fmt: skip


def index_scores(
    q: Tensor,  # [num_tokens, heads, dim] f16, bf16, f32, or float8_e4m3fn whose scales are in the weights
    weights: Tensor,  # [num_tokens, heads] f32
    keys: RowPages,
    block_table: Tensor,  # [num_slots, columns] int32, as in compress
    step: Step,
    *,
    ratio: int,  # tokens of an entry
    hadamard: bool = False,  # keys were rotated: rotate q too
    max_entries: int = 0,  # columns of the result; 0: as the block table allows
    out: Tensor | None = None,  # [num_tokens, max_entries] f32 to fill, columns adjacent
    errors: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """[num_tokens, max_entries] f32: the sum over heads of weight * max(q . key, 0). -inf for entries a token may not read: it
    reads entry j when (position + 1) // ratio > j. Of skipped tokens all is -inf.

    Products and sums are f32 in any order: backends agree within dim * 2^-22 of the sum of magnitudes. e4m3 queries on e4m3 keys
    are multiplied on Hopper's tensor cores as they are, which keep 13 bits of a sum: within 2^-12 of it there.
    """
    call = "index_scores"
    dim = keys.codec.dim
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(
            call, backend, q=q, weights=weights, keys=keys.pages, block_table=block_table, step=step, out=out, errors=errors
        )
    if q.dim() != 3 or q.shape[2] != dim or q.dtype not in (*FLOATS, torch.float8_e4m3fn):
        raise BadArgument(
            f"{call}(): q is {list(q.shape)} {q.dtype}; it must be [num_tokens, heads, {dim}] f16, bf16, f32 or float8_e4m3fn."
        )
    if weights.shape != q.shape[:2] or weights.dtype != torch.float32:
        raise BadArgument(f"{call}(): weights are {list(weights.shape)} {weights.dtype}; q makes them {list(q.shape[:2])} float32.")
    if ratio < 1:
        raise BadArgument(f"{call}(): ratio is {ratio}; it must be 1 or more.")
    check_table(call, block_table, 0)
    if out is None:
        out = q.new_empty(len(q), max_entries or block_table.shape[1] * keys.rows, dtype=torch.float32)
    if hadamard:
        q = rotate(q).to(torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32)
    if backends.choose(call, backend, keys.pages) != "torch":
        like = keys.pages
        args = fill.start(IndexScoresArgs(), like, errors)
        args.ratio = ratio
        for name, x in (("q", q), ("weights", weights), ("block_table", block_table), ("scores", out)):
            fill.array(getattr(args, name), name, x, like)
        fill.rows(args.keys, "keys", keys, like)
        fill.step(args.step, step, like)
        native.call_struct("kvx_index_scores", args, native.stream_of(like))
        return out
    fill.check_errors(errors, keys.pages)
    is_wide = out.dim() == 2 and len(out) == len(q) and (out.shape[1] <= 1 or out.stride(1) == 1)
    if not is_wide or out.dtype != torch.float32:
        raise BadArgument(
            f"{call}(): scores are {list(out.shape)} {out.dtype}, strides {list(out.stride())}; they must be [{len(q)}, entries] "
            "float32, columns adjacent."
        )
    check_apart(call, out=out)
    check_step(call, step, len(q), len(block_table))
    for run in step.runs():
        check_entries(call, block_table, keys, run.slot, 0, min(out.shape[1], (run.last + 1) // ratio))
    out.fill_(-torch.inf)
    for run in step.runs():
        visible = (torch.arange(run.start + 1, run.start + 1 + run.end - run.begin, device=q.device)) // ratio
        count = min(int(visible[-1]), out.shape[1])
        numbers = torch.arange(count, device=q.device)
        slots = entry_slots(block_table[run.slot], keys, numbers)
        products = torch.einsum("thd,jd->thj", q[run.begin : run.end].float(), keys.read(slots)).relu()
        scores = torch.einsum("th,thj->tj", weights[run.begin : run.end], products)
        hidden = (numbers >= visible[:, None]) | (slots < 0)
        out[run.begin : run.end, :count] = scores.masked_fill(hidden, -torch.inf)
    return out
