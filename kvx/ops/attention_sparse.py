"""attention_sparse: queries over their window and over chosen entries; keys are values. The torch body is the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import fill, native, structs
from kvx.ops.compress import entry_slots
from kvx.ops.finish import check_finish, check_turn, turn
from kvx.ops.step import FLOATS, INT32_MAX, Run, Step, check_entries, check_step, check_table
from kvx.quant.rows import RowPages


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
    if torch.is_grad_enabled() or backend == "torch":
        pages = [None if r is None else r.pages for r in (window, fresh, entries)]
        check_memory(
            call, q=q, pages=pages, positions=positions, step=step, block_table=block_table, selected=selected, sinks=sinks,
            angles=(cos, sin), out=(out, lse), errors=errors,
        )  # fmt: skip
    _check(call, q, window, positions, fresh, entries, block_table, selected)
    fill.check_workspace(call, workspace, window.pages)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(q) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
    chosen = backends.choose(call, backend, window.pages)
    if chosen != "torch":
        args = _args(q, window, positions, step, fresh, entries, block_table, selected, errors)
        args.ratio, args.window_tokens, args.max_entries, args.scale = ratio, window_tokens, max_entries, scale
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
    _check_numbers(call, q, window, window_tokens, fresh, entries, ratio, sinks, out, lse)
    check_finish(call, window.codec.dim, None, cos, sin)
    if selected is not None and selected.shape[1] == 0:
        entries, block_table = None, None  # none is chosen, so none is looked up
    if block_table is not None:
        check_table(call, block_table, len(window.pages))
    check_step(call, step, len(q), len(window.pages))
    for run in step.runs():
        check_turn(call, cos, run.last)
        if entries is not None and block_table is not None:
            check_entries(call, block_table, entries, run.slot, 0, (run.last + 1) // ratio)
    out.zero_()
    lse.fill_(-torch.inf)
    for run in step.runs():
        tokens = slice(run.begin, run.end)
        at = torch.arange(run.start, run.start + run.end - run.begin, device=q.device)
        rows, row_positions = _window_rows(window, positions, fresh, run, at, window_tokens)
        keys, chosen_ones = _entry_rows(entries, block_table, None if selected is None else selected[tokens], run, at, ratio)
        y, lse[tokens] = _attend(q[tokens], at, rows, row_positions, window_tokens, keys, chosen_ones, sinks, scale)
        out[tokens] = (turn(y, cos[at], sin[at], back=True) if cos is not None and sin is not None else y).to(out.dtype)
    return out, lse


def attention_sparse_workspace_bytes(
    q: Tensor, window: RowPages, positions: Tensor, step: Step, *, window_tokens: int, fresh: RowPages | None = None,
    entries: RowPages | None = None, block_table: Tensor | None = None, selected: Tensor | None = None, ratio: int = 1,
    max_entries: int = 0,
) -> int:  # fmt: skip
    """Bytes of workspace that a call with these needs at most, whatever is in them; 0 on the host."""
    _check("attention_sparse_workspace_bytes", q, window, positions, fresh, entries, block_table, selected)
    if backends.choose("attention_sparse_workspace_bytes", "auto", window.pages) != "cuda":
        return 0
    args = _args(q, window, positions, step, fresh, entries, block_table, selected)
    args.ratio, args.window_tokens, args.max_entries, args.scale = ratio, window_tokens, max_entries, 1.0
    fill.array(args.out, "out", q, window.pages)  # only described
    return fill.workspace_bytes("kvx_attention_sparse_workspace", args)


def _args(
    q: Tensor, window: RowPages, positions: Tensor, step: Step, fresh: RowPages | None, entries: RowPages | None,
    block_table: Tensor | None, selected: Tensor | None, errors: Tensor | None = None,
) -> structs.SparseArgs:  # fmt: skip
    like = window.pages
    args: structs.SparseArgs = fill.start(structs.SparseArgs(), like, errors)
    for name, x in (("q", q), ("positions", positions), ("block_table", block_table), ("selected", selected)):
        fill.array(getattr(args, name), name, x, like)
    for name, rows in (("window", window), ("fresh", fresh), ("entries", entries)):
        fill.rows(getattr(args, name), name, rows, like)
    fill.step(args.step, step, like)
    return args


def _window_rows(
    window: RowPages, positions: Tensor, fresh: RowPages | None, run: Run, at: Tensor, window_tokens: int
) -> tuple[Tensor, Tensor]:
    """Rows [n, dim] f32 that some token of the run may see, and their positions [n]."""
    last = run.start if fresh is not None else run.start + len(at)  # first position that is not looked for in the window
    wanted = torch.arange(max(0, run.start - window_tokens + 1), last, device=at.device)
    wanted = wanted[positions[run.slot, wanted % window.rows] == wanted]
    rows = window.read(run.slot * window.rows + wanted % window.rows)
    if fresh is None:
        return rows, wanted
    return torch.cat((rows, fresh.read(torch.arange(run.begin, run.end, device=at.device)))), torch.cat((wanted, at))


def _entry_rows(
    entries: RowPages | None, block_table: Tensor | None, selected: Tensor | None, run: Run, at: Tensor, ratio: int
) -> tuple[Tensor, Tensor]:
    """Entries [n, dim] f32 and which of them each token reads [tokens, n]."""
    if entries is None or block_table is None:
        return at.new_zeros(0, 1, dtype=torch.float32), at.new_zeros(len(at), 0, dtype=torch.bool)
    count = int(at[-1] + 1) // ratio
    slots = entry_slots(block_table[run.slot], entries, torch.arange(count, device=at.device))
    chosen = torch.arange(count, device=at.device) < ((at + 1) // ratio)[:, None]
    if selected is not None:
        marked = torch.zeros(len(at), count + 1, dtype=torch.bool, device=at.device)
        marked.scatter_(1, torch.where((selected < 0) | (selected >= count), count, selected).long(), True)
        chosen = chosen & marked[:, :-1]
    return entries.read(slots), chosen & (slots >= 0)


def _attend(
    q: Tensor, at: Tensor, rows: Tensor, row_positions: Tensor, window_tokens: int, entries: Tensor, chosen: Tensor,
    sinks: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    distance = at[:, None] - row_positions[None, :]
    seen = torch.cat(((distance >= 0) & (distance < window_tokens), chosen), 1)
    keys = torch.cat((rows, entries)) if len(entries) else rows
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


def _check(
    call: str, q: Tensor, window: RowPages, positions: Tensor, fresh: RowPages | None, entries: RowPages | None,
    block_table: Tensor | None, selected: Tensor | None,
) -> None:  # fmt: skip
    dim = window.codec.dim
    if q.dim() != 3 or q.shape[2] != dim or q.dtype not in FLOATS:
        raise BadArgument(f"{call}(): q is {list(q.shape)} {q.dtype}; it is [num_tokens, heads, {dim}] f16, bf16 or f32.")
    want = [len(window.pages), window.rows]
    if list(positions.shape) != want or positions.dtype != torch.int32:
        raise BadArgument(f"{call}(): positions are {list(positions.shape)} {positions.dtype}; they are {want} int32.")
    if fresh is not None and (fresh.codec.dim != dim or fresh.num_rows < len(q)):
        raise BadArgument(f"{call}(): fresh has {fresh.num_rows} rows of {fresh.codec.dim}; {len(q)} tokens of {dim} need them.")
    if (entries is None) != (block_table is None) or (entries is None and selected is not None):
        raise BadArgument(f"{call}(): entries and block_table are given together, and selected with them.")
    if selected is not None and (selected.dim() != 2 or len(selected) != len(q) or selected.dtype != torch.int32):
        raise BadArgument(f"{call}(): selected is {list(selected.shape)} {selected.dtype}; it is [{len(q)}, k] int32.")


def _check_numbers(
    call: str, q: Tensor, window: RowPages, window_tokens: int, fresh: RowPages | None, entries: RowPages | None, ratio: int,
    sinks: Tensor | None, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """What the library checks too, for the torch body."""
    dim, (tokens, heads) = window.codec.dim, q.shape[:2]
    if not 1 <= window_tokens <= INT32_MAX:
        raise BadArgument(f"{call}(): window_tokens is {window_tokens}; it is 1 or more.")
    if window.rows < window_tokens - (fresh is not None):
        raise BadArgument(f"{call}(): a window of {window_tokens} tokens in pages of {window.rows} rows.")
    if entries is not None and entries.codec.dim != dim:
        raise BadArgument(f"{call}(): entries have {entries.codec.dim} elements and rows of the window {dim}.")
    if entries is not None and not 1 <= ratio <= INT32_MAX:
        raise BadArgument(f"{call}(): ratio is {ratio}; it is 1 or more.")
    if list(out.shape) != [tokens, heads, dim] or out.dtype not in FLOATS:
        raise BadArgument(f"{call}(): out has {list(out.shape)} {out.dtype}; it is [{tokens}, {heads}, {dim}] f16, bf16 or f32.")
    if list(lse.shape) != [tokens, heads] or lse.dtype != torch.float32:
        raise BadArgument(f"{call}(): lse is {list(lse.shape)} {lse.dtype}; lse must be [{tokens}, {heads}] float32.")
    if sinks is not None and (list(sinks.shape) != [heads] or sinks.dtype != torch.float32):
        raise BadArgument(f"{call}(): sinks are {list(sinks.shape)} {sinks.dtype}; sinks must be [{heads}] float32.")
