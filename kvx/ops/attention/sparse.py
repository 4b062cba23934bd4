"""attention_sparse: queries over their window and over chosen entries; keys are values. The torch body is the definition."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import native
from kvx.ops.entry import fill
from kvx.ops.entry.compress import entry_slots
from kvx.ops.entry.finish import check_finish, check_turn, turn
from kvx.ops.entry.step import FLOATS, INT32_MAX, Run, Step, check_entries, check_step, check_table
from kvx.ops.structs import HEAD, TAIL, Array, RowsArgs, StepArgs
from kvx.quant.rows import RowPages


class SparseArgs(ctypes.Structure):
    """kvx_attention_sparse_args_t: the arguments of kvx_attention_sparse, as a C program fills them."""

    _fields_ = [
        *HEAD,
        *((name, Array) for name in ("q", "out", "lse", "sinks")),
        ("window", RowsArgs),
        ("positions", Array),
        ("fresh", RowsArgs),
        ("entries", RowsArgs),
        *((name, Array) for name in ("block_table", "selected", "cos", "sin")),
        ("step", StepArgs),
        *((name, ctypes.c_int64) for name in ("ratio", "window_tokens", "max_entries")),
        ("scale", ctypes.c_float),
        ("reserved32", ctypes.c_uint32),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_uint64),
        *TAIL,
    ]


class Reads(NamedTuple):
    """What the queries of a call may read, by its keywords."""

    window: RowPages
    positions: Tensor
    window_tokens: int
    fresh: RowPages | None
    entries: RowPages | None
    block_table: Tensor | None
    selected: Tensor | None
    ratio: int
    max_entries: int

    def pages(self) -> tuple[Tensor | None, ...]:
        return tuple(None if r is None else r.pages for r in (self.window, self.fresh, self.entries))


def attention_sparse(
    q: Tensor,  # [num_tokens, heads, dim] f16, bf16 or f32, rotated
    window: RowPages,  # a page for each slot, as in append_swa
    positions: Tensor,  # [num_slots, rows] int32
    step: Step,
    *,
    window_tokens: int,  # a token sees so many positions, its own included
    fresh: RowPages | None = None,  # rows of this step's tokens; None: they are in the window already (one token a sequence)
    entries: RowPages | None = None,
    block_table: Tensor | None = None,  # [num_slots, columns] int32, as in compress
    selected: Tensor
    | None = None,  # [num_tokens, k] int32: entries a token reads, negative: none, none twice; None: all up to its own
    ratio: int = 1,  # tokens of an entry
    max_entries: int = 0,  # no token has more; 0: as the block table allows
    sinks: Tensor | None = None,  # [heads] f32: takes weight and gives nothing
    scale: float | None = None,  # multiplies q . k; None: dim^-0.5
    cos: Tensor | None = None,  # [max_positions, rope_dim / 2] f32: out is turned back by its token's position
    sin: Tensor | None = None,
    out: Tensor | None = None,  # [num_tokens, heads, dim]; None: made, of q's type
    lse: Tensor | None = None,  # [num_tokens, heads] f32; None: made
    workspace: Tensor | None = None,  # uint8, attention_sparse_workspace_bytes; None: made
    errors: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse), lse natural and without the sink. Of tokens that are skipped or see nothing, out is 0 and lse -inf.

    A chunk of several tokens reads its own rows from `fresh`: in the window its last tokens would stand in place of rows that its
    first still see. Put it there (append_swa) after this call.
    """
    call = "attention_sparse"
    reads = Reads(window, positions, window_tokens, fresh, entries, block_table, selected, ratio, max_entries)
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(
            call, backend, q=q, pages=reads.pages(), positions=positions, step=step, block_table=block_table, selected=selected,
            sinks=sinks, angles=(cos, sin), out=(out, lse), errors=errors,
        )  # fmt: skip
    _check(call, q, reads)
    fill.check_workspace(call, workspace, window.pages)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(q) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
    chosen = backends.choose(call, backend, window.pages)
    if chosen != "torch":
        args = _args(q, reads, step, scale, errors)
        for name, x in (("out", out), ("lse", lse), ("sinks", sinks), ("cos", cos), ("sin", sin)):
            fill.array(getattr(args, name), name, x, window.pages)
        if chosen == "cuda":
            if workspace is None:
                size = fill.workspace_bytes("kvx_attention_sparse_workspace", args)
                workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
            args.workspace, args.workspace_bytes = workspace.data_ptr(), workspace.numel()
        native.call_struct("kvx_attention_sparse", args, native.stream_of(window.pages))
        return out, lse
    fill.check_errors(errors, window.pages)
    check_apart(call, out=(out, lse))
    _check_numbers(call, q, reads, sinks, out, lse)
    check_finish(call, window.codec.dim, None, cos, sin)
    if selected is not None and selected.shape[1] == 0:
        reads = reads._replace(entries=None, block_table=None)  # none is chosen, so none is looked up
    if reads.block_table is not None:
        check_table(call, reads.block_table, len(window.pages))
    check_step(call, step, len(q), len(window.pages))
    for run in step.runs():
        check_turn(call, cos, run.last)
        if reads.entries is not None and reads.block_table is not None:
            check_entries(call, reads.block_table, reads.entries, run.slot, 0, (run.last + 1) // ratio)
    out.zero_()
    lse.fill_(-torch.inf)
    for run in step.runs():
        tokens = slice(run.begin, run.end)
        at = torch.arange(run.start, run.start + run.end - run.begin, device=q.device)
        rows, row_positions = _window_rows(reads, run, at)
        distance = at[:, None] - row_positions[None, :]
        is_near = (distance >= 0) & (distance < window_tokens)
        keys, is_chosen = _entry_rows(reads, run, at)
        y, lse[tokens] = _attend(
            q[tokens], torch.cat((rows, keys)) if len(keys) else rows, torch.cat((is_near, is_chosen), 1), sinks, scale
        )  # fmt: skip
        out[tokens] = (turn(y, cos[at], sin[at], back=True) if cos is not None and sin is not None else y).to(out.dtype)
    return out, lse


def attention_sparse_workspace_bytes(
    q: Tensor, window: RowPages, positions: Tensor, step: Step, *, window_tokens: int, fresh: RowPages | None = None,
    entries: RowPages | None = None, block_table: Tensor | None = None, selected: Tensor | None = None, ratio: int = 1,
    max_entries: int = 0,
) -> int:  # fmt: skip
    """Bytes of workspace that a call with these needs at most, whatever is in them; 0 on the host."""
    reads = Reads(window, positions, window_tokens, fresh, entries, block_table, selected, ratio, max_entries)
    _check("attention_sparse_workspace_bytes", q, reads)
    if backends.choose("attention_sparse_workspace_bytes", "auto", window.pages) != "cuda":
        return 0
    args = _args(q, reads, step, 1.0)
    fill.array(args.out, "out", q, window.pages)  # only described
    return fill.workspace_bytes("kvx_attention_sparse_workspace", args)


def _args(q: Tensor, reads: Reads, step: Step, scale: float, errors: Tensor | None = None) -> SparseArgs:
    like = reads.window.pages
    args: SparseArgs = fill.start(SparseArgs(), like, errors)
    fill.array(args.q, "q", q, like)
    for name in ("positions", "block_table", "selected"):
        fill.array(getattr(args, name), name, getattr(reads, name), like)
    for name in ("window", "fresh", "entries"):
        fill.rows(getattr(args, name), name, getattr(reads, name), like)
    fill.step(args.step, step, like)
    args.ratio, args.window_tokens, args.max_entries, args.scale = reads.ratio, reads.window_tokens, reads.max_entries, scale
    return args


def _window_rows(reads: Reads, run: Run, at: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [n, dim] f32 that some token of the run may see, and their positions [n]."""
    window, positions, fresh = reads.window, reads.positions, reads.fresh
    last = run.start if fresh is not None else run.start + len(at)  # first position that is not looked for in the window
    wanted = torch.arange(max(0, run.start - reads.window_tokens + 1), last, device=at.device)
    wanted = wanted[positions[run.slot, wanted % window.rows] == wanted]
    rows = window.read(run.slot * window.rows + wanted % window.rows)
    if fresh is None:
        return rows, wanted
    return torch.cat((rows, fresh.read(torch.arange(run.begin, run.end, device=at.device)))), torch.cat((wanted, at))


def _entry_rows(reads: Reads, run: Run, at: Tensor) -> tuple[Tensor, Tensor]:
    """Entries [n, dim] f32 and which of them each token reads [tokens, n]."""
    entries, block_table, ratio = reads.entries, reads.block_table, reads.ratio
    if entries is None or block_table is None:
        return at.new_zeros(0, 1, dtype=torch.float32), at.new_zeros(len(at), 0, dtype=torch.bool)
    count = int(at[-1] + 1) // ratio
    slots = entry_slots(block_table[run.slot], entries, torch.arange(count, device=at.device))
    chosen = torch.arange(count, device=at.device) < ((at + 1) // ratio)[:, None]
    if reads.selected is not None:
        selected = reads.selected[run.begin : run.end]
        marked = torch.zeros(len(at), count + 1, dtype=torch.bool, device=at.device)
        marked.scatter_(1, torch.where((selected < 0) | (selected >= count), count, selected).long(), True)
        chosen = chosen & marked[:, :-1]
    return entries.read(slots), chosen & (slots >= 0)


def _attend(q: Tensor, keys: Tensor, seen: Tensor, sinks: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """q [tokens, heads, dim] over keys [n, dim], of which each token sees some [tokens, n]."""
    scores = torch.einsum("thd,nd->thn", q.float(), keys) * scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.float().expand_as(lse))
    has_none = (total == -torch.inf)[..., None]  # nothing seen, and no sink
    weights = (scores - total[..., None]).exp().masked_fill(~seen[:, None] | has_none, 0.0)
    # Of a row that is not seen nothing may enter, and 0 * NaN would: odd numbers are NaN where they are seen, and there alone.
    is_odd = ~keys.isfinite()
    out = torch.einsum("thn,nd->thd", weights, keys.masked_fill(is_odd, 0.0))
    return out.masked_fill((seen.float() @ is_odd.float() > 0)[:, None], torch.nan), lse


def _check(call: str, q: Tensor, reads: Reads) -> None:
    window, positions, _, fresh, entries, block_table, selected, *_ = reads
    dim = window.codec.dim
    if q.dim() != 3 or q.shape[2] != dim or q.dtype not in FLOATS:
        raise BadArgument(f"{call}(): q is {list(q.shape)} {q.dtype}; it must be [num_tokens, heads, {dim}] f16, bf16 or f32.")
    want = [len(window.pages), window.rows]
    if list(positions.shape) != want or positions.dtype != torch.int32:
        raise BadArgument(f"{call}(): positions are {list(positions.shape)} {positions.dtype}; they must be {want} int32.")
    if fresh is not None and (fresh.codec.dim != dim or fresh.num_rows < len(q)):
        raise BadArgument(f"{call}(): fresh has {fresh.num_rows} rows of {fresh.codec.dim}; {len(q)} tokens of {dim} need them.")
    if (entries is None) != (block_table is None) or (entries is None and selected is not None):
        raise BadArgument(f"{call}(): entries and block_table are given together, and selected with them.")
    if selected is not None and (selected.dim() != 2 or len(selected) != len(q) or selected.dtype != torch.int32):
        raise BadArgument(f"{call}(): selected is {list(selected.shape)} {selected.dtype}; it must be [{len(q)}, k] int32.")


def _check_numbers(call: str, q: Tensor, reads: Reads, sinks: Tensor | None, out: Tensor, lse: Tensor) -> None:
    """What the library checks too, for the torch body."""
    window, window_tokens, fresh, entries, ratio = reads.window, reads.window_tokens, reads.fresh, reads.entries, reads.ratio
    dim, (tokens, heads) = window.codec.dim, q.shape[:2]
    if not 1 <= window_tokens <= INT32_MAX:
        raise BadArgument(f"{call}(): window_tokens is {window_tokens}; it must be 1 or more.")
    if window.rows < window_tokens - (fresh is not None):
        raise BadArgument(f"{call}(): a window of {window_tokens} tokens in pages of {window.rows} rows.")
    if entries is not None and entries.codec.dim != dim:
        raise BadArgument(f"{call}(): entries have {entries.codec.dim} elements and rows of the window {dim}.")
    if entries is not None and not 1 <= ratio <= INT32_MAX:
        raise BadArgument(f"{call}(): ratio is {ratio}; it must be 1 or more.")
    if list(out.shape) != [tokens, heads, dim] or out.dtype not in FLOATS:
        raise BadArgument(
            f"{call}(): out has {list(out.shape)} {out.dtype}; it must be [{tokens}, {heads}, {dim}] f16, bf16 or f32."
        )
    if list(lse.shape) != [tokens, heads] or lse.dtype != torch.float32:
        raise BadArgument(f"{call}(): lse is {list(lse.shape)} {lse.dtype}; lse must be [{tokens}, {heads}] float32.")
    if sinks is not None and (list(sinks.shape) != [heads] or sinks.dtype != torch.float32):
        raise BadArgument(f"{call}(): sinks are {list(sinks.shape)} {sinks.dtype}; sinks must be [{heads}] float32.")
