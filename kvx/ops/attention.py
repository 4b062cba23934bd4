"""attention_decode, attention_varlen: queries over cached keys and values. The torch body below is the definition.

Sequence s has n queries, the last of its tokens, and `seq_lens` counts after they were appended: query i sees positions up to
seq_len - n + i, and with a window only the last `window` of those, its own included. Query head h reads KV head h // group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.ops import backend as backends
from kvx.ops import cells, compiled, door_table, native, scales
from kvx.spec.cache_spec import CacheSpec
from kvx.tables import Table

_IO = (torch.float16, torch.bfloat16, torch.float32)
_CAUSAL, _PLANNED = 1, 2  # KVX_ATTENTION_*
_RUN, _PLAN, _WORKSPACE = 0, 1, 2  # kvx_door_attention_t.step


class Options(NamedTuple):
    """What a call says besides its tensors."""

    scale: float  # multiplies q.k
    causal: bool
    window: int  # 0: none
    soft_cap: float  # 0: none
    max_query_len: int  # 0: the number of queries
    max_seq_len: int  # 0: as the table allows
    planned: bool = False


def attention_decode(
    q: Tensor,  # [num_tokens, num_heads, head_dim] f16, bf16 or f32; num_tokens / sequences of them each
    cache: Tensor | Sequence[Tensor],  # as in gather
    table: Table,
    *,
    spec: CacheSpec,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    scale: float | None = None,  # multiplies q.k; None: 1 / sqrt(head_dim)
    causal: bool = True,  # False: every query sees the whole sequence
    window: int = 0,  # positions a query sees, its own the last of them; 0: all
    soft_cap: float = 0.0,  # c > 0: c * tanh(score / c)
    sinks: Tensor | None = None,  # [num_heads] f32: a logit each, part of the sum and without a value
    out: Tensor | None = None,  # [num_tokens, num_heads, v_head_dim]; None: made, of q's type
    lse: Tensor | None = None,  # [num_tokens, num_heads] f32
    max_seq_len: int = 0,  # bound of the lengths, by which work is shared out; 0: as the table allows
    workspace: Tensor | None = None,  # attention_workspace_bytes(...) bytes on the device; None: allocated. The host needs none
    planned: bool = False,  # attention_plan has run on this workspace for these lengths
    errors: Tensor | None = None,  # one int64 on the device: bad block ids are added to it
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one or a few query tokens a sequence.

    `lse` is the natural logarithm of the sum of exponentials, without the sink: kvx.merge_attention combines parts by it. A
    query that sees nothing gives 0 and -inf. A block id outside the cache, at a position some query sees, raises OutOfRange on
    the host; on a device the position is not seen and is counted in `errors`. In a CUDA graph give `workspace` (and run
    attention_plan in it once a step): one allocated here lives in the graph's own pool.
    """
    options = Options(_scale(scale, q), causal, window, soft_cap, 0, max_seq_len, planned)
    extra = (k_scale, v_scale, k_tensor_scale, v_tensor_scale, None, None, errors)
    return _attend("attention_decode", q, cache, table, None, spec, extra, sinks, out, lse, workspace, options, backend)


def attention_varlen(
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    cache: Tensor | Sequence[Tensor],
    table: Table,
    *,
    cu_seqlens: Tensor,  # [batch + 1] int32 or int64: queries of sequence s are rows cu_seqlens[s] to cu_seqlens[s + 1]
    spec: CacheSpec,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_query_len: int = 0,  # bound of the queries of one sequence; 0: num_tokens
    max_seq_len: int = 0,
    workspace: Tensor | None = None,
    planned: bool = False,
    errors: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out, lse) of prefill chunks and decodes in one call; everything else as in attention_decode.

    Rows of q that are in no sequence's range are left alone, so that a graph can be captured for more tokens than a step has.
    """
    options = Options(_scale(scale, q), causal, window, soft_cap, max_query_len, max_seq_len, planned)
    extra = (k_scale, v_scale, k_tensor_scale, v_tensor_scale, None, None, errors)
    return _attend("attention_varlen", q, cache, table, cu_seqlens, spec, extra, sinks, out, lse, workspace, options, backend)


def attention_workspace_bytes(
    q: Tensor, cache: Tensor | Sequence[Tensor], table: Table, *, spec: CacheSpec, cu_seqlens: Tensor | None = None,
    causal: bool = True, window: int = 0, max_query_len: int = 0, max_seq_len: int = 0, backend: str = "auto",
) -> int:  # fmt: skip
    """Bytes of workspace calls of these shapes need: by sequences, heads and max_query_len, not by lengths. 0 on the host."""
    options = Options(1.0, causal, window, 0.0, max_query_len, max_seq_len)
    tensors = _opened("attention_workspace_bytes", q, cache, table, spec)
    if backends.choose("attention_workspace_bytes", backend, tensors[0]) == "torch":
        return 0
    return _workspace_bytes(tensors, table, q, cu_seqlens, spec, options)


def attention_plan(
    q: Tensor, cache: Tensor | Sequence[Tensor], table: Table, *, workspace: Tensor | None, spec: CacheSpec,
    cu_seqlens: Tensor | None = None, causal: bool = True, window: int = 0, max_query_len: int = 0, max_seq_len: int = 0,
    errors: Tensor | None = None, backend: str = "auto",
) -> None:  # fmt: skip
    """Share out the work of a step by the lengths on the device, into the workspace; each layer's call then says planned=True.

    One plan serves every layer of the same shapes, mask and table. Nothing waits. On the host, and on torch, there is nothing
    to plan.
    """
    options = Options(1.0, causal, window, 0.0, max_query_len, max_seq_len)
    tensors = _opened("attention_plan", q, cache, table, spec)
    if backends.choose("attention_plan", backend, tensors[0]) == "torch":
        return
    extra = (*(None,) * 6, errors)
    _native(_PLAN, tensors, table, q, None, None, cu_seqlens, spec, extra, None, workspace, options)


def _scale(scale: float | None, q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1] or 1) if scale is None else float(scale)


def _opened(call: str, q: Tensor, cache: Tensor | Sequence[Tensor], table: Table, spec: CacheSpec) -> tuple[Tensor, ...]:
    tensors = tuple(backends.as_tensor(call, "cache", c) for c in ((cache,) if isinstance(cache, Tensor) else cache))
    door_table.check(call, tensors, table, spec)
    if q.dim() != 3 or q.dtype not in _IO:
        raise BadArgument(f"{call}(): q is {list(q.shape)} {q.dtype}; it is [num_tokens, num_heads, head_dim] f16, bf16 or f32.")
    return tensors


def _attend(
    call: str, q: Tensor, cache: Tensor | Sequence[Tensor], table: Table, cu: Tensor | None, spec: CacheSpec,
    extra: tuple[Tensor | None, ...], sinks: Tensor | None, out: Tensor | None, lse: Tensor | None, workspace: Tensor | None,
    options: Options, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if out is None:
        out = torch.empty(*q.shape[:-1], spec.plane(1).head_dim, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if torch.compiler.is_compiling():
        compiled.attention(q, cache, table, cu, out, lse, spec, extra, sinks, workspace, options, backend)
        return out, lse
    q = backends.as_tensor(call, "q", q)
    tensors = _opened(call, q, cache, table, spec)
    scales.require(call, spec, extra)
    chosen = backends.choose(call, backend, tensors[0], spec)
    if chosen == "torch":
        _attention_torch(call, tensors, table, q, out, lse, cu, spec, extra, sinks, options)
        return out, lse
    if chosen == "cuda" and workspace is None:
        if options.planned:
            raise BadArgument(f"{call}(): planned is True and workspace None; the plan stands in the workspace it was made in.")
        size = _workspace_bytes(tensors, table, q, cu, spec, options)
        workspace = torch.empty(size, dtype=torch.uint8, device=q.device)
    if chosen == "cuda" and backends.is_debug() and extra[-1] is None:
        with backends.ErrorCounter(call, tensors[0].device) as count:
            _native(_RUN, tensors, table, q, out, lse, cu, spec, (*extra[:-1], count), sinks, workspace, options)
    else:
        _native(_RUN, tensors, table, q, out, lse, cu, spec, extra, sinks, workspace, options)
    return out, lse


def _workspace_bytes(
    tensors: tuple[Tensor, ...], table: Table, q: Tensor, cu: Tensor | None, spec: CacheSpec, options: Options
) -> int:
    return _native(_WORKSPACE, tensors, table, q, None, None, cu, spec, (None,) * 7, None, None, options) if q.is_cuda else 0


def _native(
    step: int, tensors: tuple[Tensor, ...], table: Table, q: Tensor, out: Tensor | None, lse: Tensor | None, cu: Tensor | None,
    spec: CacheSpec, extra: tuple[Tensor | None, ...], sinks: Tensor | None, workspace: Tensor | None, o: Options,
) -> int:  # fmt: skip
    opened = door_table.open_table(tensors, table, spec, o.max_seq_len, cu)
    (hq, ho, hl, hs, hw, *rest), keep = native.handles(q, out, lse, sinks, workspace, *extra)
    flags = (_CAUSAL if o.causal else 0) | (_PLANNED if o.planned else 0)
    args = native.AttentionArgs(hq, ho, hl, hs, hw, step, flags, o.window, o.max_query_len, 0, o.scale, o.soft_cap)
    more = native.Extra(*rest)
    status = native.attention_call(
        opened.spec, *opened.cache, opened.address, native.address_of(more), native.address_of(args), native.stream_of(q)
    )
    del keep
    if status:
        native.raise_status(status)
    return args.bytes


def _attention_torch(
    call: str, tensors: tuple[Tensor, ...], table: Table, q: Tensor, out: Tensor, lse: Tensor, cu: Tensor | None,
    spec: CacheSpec, extra: tuple[Tensor | None, ...], sinks: Tensor | None, o: Options,
) -> None:  # fmt: skip
    _check(call, table, q, out, lse, cu, spec, sinks, o)
    heads, group = spec.num_kv_heads, q.shape[1] // spec.num_kv_heads
    work = []
    for s, first, n, length in _ranges(call, table, q, cu, spec, extra[-1], o):
        # The last and the first position each query sees.
        last = torch.arange(length - n, length, device=q.device) if o.causal else torch.full((n,), length - 1, device=q.device)
        low = (last - o.window + 1 if o.window else torch.zeros_like(last)).clamp(min=0)
        pos = torch.arange(min(int(low[0]), length), length, device=q.device)
        found = cells.find(tensors, table, spec, torch.full_like(pos, s), pos)
        _report(call, found[0].is_bad | found[1].is_bad, extra[-1], spec.num_blocks, s, pos)
        work.append((slice(first, first + n), pos, low, last, found))
    for rows, pos, low, last, found in work:
        k, v = (cells.read(tensors, table, spec, i, found[i], torch.float32, extra[i], extra[2 + i]) for i in (0, 1))
        seen = (pos >= low[:, None]) & (pos <= last[:, None]) & found[0].is_found & found[1].is_found  # [query, position]
        scores = torch.einsum("nhgd,phd->hgnp", q[rows].float().unflatten(1, (heads, group)), k) * o.scale
        if o.soft_cap:
            scores = o.soft_cap * torch.tanh(scores / o.soft_cap)
        scores = scores.masked_fill(~seen, -math.inf)
        total = seen_sum = torch.logsumexp(scores, -1)  # -inf where nothing is seen
        if sinks is not None:
            total = torch.logaddexp(seen_sum, sinks.view(heads, group, 1))
        weights = torch.exp(scores - total[..., None]).masked_fill(~seen, 0)
        out[rows] = torch.einsum("hgnp,phd->nhgd", weights, v).flatten(1, 2).to(out.dtype)
        lse[rows] = seen_sum.permute(2, 0, 1).flatten(1)


def _check(
    call: str, table: Table, q: Tensor, out: Tensor, lse: Tensor, cu: Tensor | None, spec: CacheSpec, sinks: Tensor | None,
    o: Options,
) -> None:  # fmt: skip
    tokens, heads, dim = q.shape
    if heads == 0 or heads % spec.num_kv_heads:
        raise BadArgument(
            f"{call}(): q has {heads} heads and the cache {spec.num_kv_heads}; the first is a multiple of the second."
        )
    if dim != spec.head_dim:
        raise BadArgument(f"{call}(): q is {list(q.shape)}; spec.head_dim makes it {[tokens, heads, spec.head_dim]}.")
    want = [tokens, heads, spec.plane(1).head_dim]
    if list(out.shape) != want or out.dtype not in _IO:
        raise BadArgument(f"{call}(): out is {list(out.shape)} {out.dtype}; q and the spec make it {want} f16, bf16 or f32.")
    if list(lse.shape) != want[:2] or lse.dtype != torch.float32:
        raise BadArgument(f"{call}(): lse is {list(lse.shape)} {lse.dtype}; it is {want[:2]} float32.")
    if sinks is not None and (list(sinks.shape) != [heads] or sinks.dtype != torch.float32):
        raise BadArgument(f"{call}(): sinks is {list(sinks.shape)} {sinks.dtype}; it is [{heads}] float32.")
    if cu is not None and (cu.dtype not in (torch.int32, torch.int64) or list(cu.shape) != [table.num_seqs + 1]):
        raise BadArgument(
            f"{call}(): cu_seqlens is {list(cu.shape)} {cu.dtype}; it is int32 or int64 [{table.num_seqs + 1}], one more than the "
            "sequences."
        )
    if cu is None and (tokens % table.num_seqs if table.num_seqs else tokens):
        raise BadArgument(
            f"{call}(): q has {tokens} tokens for {table.num_seqs} sequences; every sequence has as many. "
            "attention_varlen takes different numbers."
        )
    if not math.isfinite(o.scale) or o.scale == 0:
        raise BadArgument(f"{call}(): scale is {o.scale}; it is finite and not 0.")
    if not math.isfinite(o.soft_cap) or o.soft_cap < 0 or min(o.window, o.max_query_len, o.max_seq_len) < 0:
        raise BadArgument(
            f"{call}(): soft_cap is {o.soft_cap}, window {o.window}, max_query_len {o.max_query_len}, max_seq_len {o.max_seq_len}; "
            "none is negative or infinite."
        )


def _ranges(
    call: str, table: Table, q: Tensor, cu: Tensor | None, spec: CacheSpec, errors: Tensor | None, o: Options
) -> list[tuple[int, int, int, int]]:
    """Sequence, first query, queries and length, of each sequence that has queries."""
    tokens, seqs = q.shape[0], table.num_seqs
    ends = torch.arange(seqs + 1) * (tokens // max(seqs, 1)) if cu is None else cu.cpu().long()
    lengths = table.lengths(spec.block_size).tolist()
    most = o.max_query_len or tokens
    ranges, bad = [], 0
    for s, (first, end, length) in enumerate(zip(ends[:-1].tolist(), ends[1:].tolist(), lengths, strict=True)):
        wrong = ""
        if first < 0 or end < first or end > tokens or (cu is not None and end - first > most):
            wrong = f"cu_seqlens[{s}..{s + 1}] is not a range of at most max_query_len {most} rows inside the {tokens} of q"
        elif length < 0:
            wrong = f"sequence {s} has a negative or impossible length"
        elif o.max_seq_len and length > o.max_seq_len:
            wrong = f"sequence {s} has {length} tokens; max_seq_len is {o.max_seq_len}"
        if wrong and (q.is_cpu or backends.is_debug()):
            raise OutOfRange(f"{call}(): {wrong}.")
        bad += bool(wrong)
        if not wrong and end > first:
            ranges.append((s, first, end - first, length))
    if errors is not None and bad:
        errors += bad
    return ranges


def _report(call: str, bad: Tensor, errors: Tensor | None, num_blocks: int, seq: int, pos: Tensor) -> None:
    if not bool(bad.any()):
        return
    if bad.is_cpu or backends.is_debug():
        at = int(pos[int(bad.nonzero()[0])])
        raise OutOfRange(
            f"{call}(): block_table of sequence {seq} has no block inside the cache (num_blocks {num_blocks}) for position {at}, "
            "which a query sees."
        )
    if errors is not None:
        errors += bad.sum()
