"""What the calls of attention share: their options, the way to the library, and the torch body, which is the definition.

Sequence s has n queries, the last of its tokens, and `seq_lens` counts after they were appended: query i sees positions up to
seq_len - n + i, and with a window only the last `window` of those, its own included. Without `causal` it sees the whole sequence;
calls refuse a window then (the C ABI has the pair: there every query sees the sequence's last `window` positions).
Query head h reads KV head h // group.
In a latent cache K is the latent and V its rotary part: a key is both, one after the other, and a value is the latent again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.gate import check_apart, check_memory
from kvx.layout.pointers import CachePointers
from kvx.ops import backend as backends
from kvx.ops import cells, compiled, door_table, native, scales, structs
from kvx.ops.cache_view import NO_SCALES, CacheView, Scales
from kvx.spec.cache_spec import CacheSpec
from kvx.tables import TABLES, PackedTable, Table

_call = native.entry("kvx_door_attention")
_IO = (torch.float16, torch.bfloat16, torch.float32)
_CAUSAL, _PLANNED, _LATENT, _FP8_PRODUCTS = 1, 2, 4, 8  # KVX_ATTENTION_*
RUN, PLAN, WORKSPACE = 0, 1, 2  # kvx_door_attention_t.step
# Of custom ops: a cache, and Options.
_CACHE = "Tensor[] cache, Tensor? k_pointers, Tensor[] beside, str spec"
_OPTIONS = (
    "float scale, bool causal, int window, float soft_cap, int max_query_len, int max_seq_len, bool planned, bool latent, "
    "bool fp8_products"
)


class Queries(NamedTuple):
    """What a call has besides the cache: its queries, and where results go. attention_decode describes them."""

    q: Tensor
    cu_seqlens: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    sinks: Tensor | None = None
    workspace: Tensor | None = None


class Options(NamedTuple):
    """What a call says besides its tensors."""

    scale: float  # multiplies q.k
    causal: bool
    window: int  # 0: none
    soft_cap: float  # 0: none
    max_query_len: int  # 0: the number of queries
    max_seq_len: int  # 0: as the table allows
    planned: bool = False
    latent: bool = False
    fp8_products: bool = False


def query_dim(spec: CacheSpec, latent: bool) -> int:
    return spec.head_dim + spec.kv[1].head_dim if latent else spec.head_dim


def value_dim(spec: CacheSpec, latent: bool) -> int:
    return spec.head_dim if latent else spec.kv[1].head_dim


def check_cache(call: str, q: Tensor, view: CacheView, table: Table, options: Options) -> None:
    """What every backend asks of cache, table, q and mask."""
    if isinstance(options.window, tuple | list):
        raise BadArgument(
            f"{call}(): window is {options.window}; it must be one number: how many positions a query sees, its own included. "
            "FlashAttention's window_size=(left, 0) is window=left + 1 here; there is no window to the right."
        )
    if options.window and not options.causal:
        raise BadArgument(
            f"{call}(): causal is False and window {options.window}. A window counts back from each query's own position, so it is "
            f"part of a causal mask: pass causal=True, window={options.window}; or causal=False, window=0, where every query sees "
            "the whole sequence."
        )
    if not isinstance(options.fp8_products, bool):
        raise BadArgument(f"{call}(): fp8_products is {options.fp8_products!r}; it must be True or False.")
    if options.latent:
        backends.require("attention_mla", view.spec)
    door_table.check(call, view, table)
    if q.dim() != 3 or q.dtype not in _IO:
        raise BadArgument(
            f"{call}(): q is {list(q.shape)} {q.dtype}; it must be [num_tokens, num_heads, head_dim] f16, bf16 or f32."
        )


def check_shapes(call: str, q: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, dim: int) -> None:
    """Sizes the library cannot tell from absent ones, and what the torch body would stretch."""
    if sinks is not None and tuple(sinks.shape) != (q.shape[1],):
        raise BadArgument(f"{call}(): sinks is {list(sinks.shape)}; it must be [num_heads] = [{q.shape[1]}].")
    if lse.shape != q.shape[:2] or out.shape[:2] != q.shape[:2] or out.shape[-1] != dim:
        raise BadArgument(
            f"{call}(): out is {list(out.shape)} and lse {list(lse.shape)}; q and the cache make them {[*q.shape[:2], dim]} and "
            f"{list(q.shape[:2])}."
        )


def attend(
    call: str, queries: Queries, view: CacheView, table: Table, options: Options, backend: str
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, cu, out, lse, sinks, workspace = queries
    spec = view.spec
    given = out is not None or lse is not None or sinks is not None
    covers = (out is not None and lse is not None) or _covers(q, cu)
    if out is None:
        shape = (*q.shape[:-1], value_dim(spec, options.latent))
        out = (torch.empty if covers else torch.zeros)(shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        lse = lse if covers else lse.fill_(-math.inf)
    if torch.compiler.is_compiling():
        torch.ops.kvx.attention(
            call, q, cu, out, lse, sinks, workspace, list(view.tensors), *compiled.as_addresses(view.pointers), spec.manifest_text,
            list(view.scales), view.errors, list(table.tensors), table.code, *options, backend,
        )  # fmt: skip
        return out, lse
    q = backends.as_tensor(call, "q", q)
    queries = Queries(q, cu, out, lse, sinks, workspace)
    check_cache(call, q, view, table, options)
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(
            call, backend, q=q, cache=view.tensors, table=table.tensors, cu_seqlens=cu, sinks=sinks, out=(out, lse),
            scales=view.optional,
        )  # fmt: skip
    if given:
        check_shapes(call, q, sinks, out, lse, value_dim(spec, options.latent))
    scales.require(call, view)
    chosen = backends.choose(call, backend, view.first, spec)
    if chosen == "torch":
        check_apart(call, out=(out, lse))
        if view.pointers is not None:
            view, table = _stacked(view, view.pointers, table)
        _attention_torch(call, queries, view, table, options)
        return out, lse
    if chosen == "cuda" and workspace is None:
        if options.planned:
            raise BadArgument(f"{call}(): planned is True and workspace None; the plan stands in the workspace it was made in.")
        size = workspace_bytes(queries, view, table, options)
        queries = queries._replace(workspace=torch.empty(size, dtype=torch.uint8, device=q.device))
    if chosen == "cuda" and backends.is_debug() and view.errors is None:
        with backends.ErrorCounter(call, view.first.device) as count:
            call_native(RUN, queries, view._replace(errors=count), table, options)
    else:
        call_native(RUN, queries, view, table, options)
    return out, lse


@compiled.register(
    "attention",
    "str call, Tensor q, Tensor? cu_seqlens, Tensor(a!) out, Tensor(b!) lse, Tensor? sinks, Tensor(c!)? workspace",
    f"{_CACHE}, Tensor?[] scales, Tensor(d!)? errors, Tensor[] table, int kind",
    _OPTIONS,
    "str backend",
)
def _attend_compiled(call: str, *rest: Any) -> None:
    queries = Queries(*rest[:6])
    cache, k_pointers, beside, text, given, errors, table, kind, *options, backend = rest[6:]
    spec = compiled.parse(text)
    view = CacheView(tuple(cache), spec, Scales(*given), errors, compiled.as_pointers(k_pointers, beside, spec))
    attend(call, queries, view, TABLES[kind](*table), Options(*options), backend)


def plan(queries: Queries, view: CacheView, table: Table, options: Options, backend: str) -> None:
    if torch.compiler.is_compiling():
        torch.ops.kvx.attention_plan(
            queries.q, queries.cu_seqlens, queries.workspace, list(view.tensors), *compiled.as_addresses(view.pointers),
            view.spec.manifest_text, view.errors, list(table.tensors), table.code, *options, backend,
        )  # fmt: skip
        return
    check_cache("attention_plan", queries.q, view, table, options)
    if backends.choose("attention_plan", backend, view.first) != "torch":
        call_native(PLAN, queries, view, table, options)


@compiled.register(
    "attention_plan",
    f"Tensor q, Tensor? cu_seqlens, Tensor(a!)? workspace, {_CACHE}, Tensor(b!)? errors, Tensor[] table, int kind",
    _OPTIONS,
    "str backend",
)
def _plan_compiled(q: Tensor, cu: Tensor | None, workspace: Tensor | None, *rest: Any) -> None:
    cache, k_pointers, beside, text, errors, table, kind, *options, backend = rest
    spec = compiled.parse(text)
    view = CacheView(tuple(cache), spec, NO_SCALES, errors, compiled.as_pointers(k_pointers, beside, spec))
    plan(Queries(q, cu, workspace=workspace), view, TABLES[kind](*table), Options(*options), backend)


def _covers(q: Tensor, cu: Tensor | None) -> bool:
    """Whether every row of q is some sequence's; of others nothing is written. Ranges follow each other, so their ends tell.

    Ends on a device are not waited for: outputs are then filled, two small launches more, and only where cu_seqlens is given.
    """
    if cu is None:
        return True
    if torch.compiler.is_compiling() or not cu.is_cpu or cu.dim() != 1 or cu.numel() < 1:
        return False
    return cu[0].item() == 0 and cu[-1].item() == len(q)


def workspace_bytes(queries: Queries, view: CacheView, table: Table, options: Options) -> int:
    """0 on the host."""
    if not queries.q.is_cuda:
        return 0
    asked = queries._replace(out=None, lse=None, sinks=None, workspace=None)
    return call_native(WORKSPACE, asked, view._replace(scales=NO_SCALES, errors=None), table, options)


def call_native(step: int, queries: Queries, view: CacheView, table: Table, o: Options) -> int:
    q, cu, *others = queries
    (hq, ho, hl, hs, hw, *rest), keep = native.handles(q, *others, *view.optional)
    extra = native.extra(rest)
    door = door_table.open_table(view, table, o.max_seq_len, cu)
    flags = (_CAUSAL if o.causal else 0) | (_PLANNED if o.planned else 0) | (_LATENT if o.latent else 0)
    flags |= _FP8_PRODUCTS if o.fp8_products else 0
    args = structs.AttentionArgs(hq, ho, hl, hs, hw, step, flags, o.window, o.max_query_len, 0, o.scale, o.soft_cap)
    status = _call(door.spec, *door.cache, door.address, native.address_of(extra), native.address_of(args), native.stream_of(q))
    del keep
    if status:
        native.raise_status(status)
    num_bytes: int = args.bytes
    return num_bytes


def _stacked(view: CacheView, caches: CachePointers, table: Table) -> tuple[CacheView, Table]:
    """Caches of their own as the blocks of one; those without an address are none."""
    assert isinstance(table, PackedTable)
    missing = ((caches.k == 0) | (caches.v == 0)).nonzero().flatten().to(table.block_table.dtype)
    ids = table.block_table.masked_fill(torch.isin(table.block_table, missing), -1)
    tensors = tuple(torch.stack(planes) for planes in zip(*caches.caches, strict=True))
    return view._replace(tensors=tensors, pointers=None), PackedTable(ids, table.seq_lens)


def _attention_torch(call: str, queries: Queries, view: CacheView, table: Table, o: Options) -> None:
    q, cu, out, lse, sinks, _ = queries
    assert out is not None
    assert lse is not None
    spec, errors = view.spec, view.errors
    _check(call, queries, spec, table.num_seqs, o)
    heads, group = spec.num_kv_heads, q.shape[1] // spec.num_kv_heads
    work = []
    for s, first, n, length in _ranges(call, table, q, cu, spec, errors, o):
        # The last and the first position each query sees.
        last = torch.arange(length - n, length, device=q.device) if o.causal else torch.full((n,), length - 1, device=q.device)
        low = (last - o.window + 1 if o.window else torch.zeros_like(last)).clamp(min=0)
        pos = torch.arange(min(int(low[0]), length), length, device=q.device)
        found = cells.find(view, table, torch.full_like(pos, s), pos)
        _report(call, found[0].is_bad | found[1].is_bad, errors, spec.num_blocks, s, pos)
        work.append((slice(first, first + n), pos, low, last, found))
    for rows, pos, low, last, found in work:
        k, v = (cells.read(view, table, i, found[i], torch.float32) for i in (0, 1))
        if o.latent:
            k, v = torch.cat((k, v), -1), k
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


def _check(call: str, queries: Queries, spec: CacheSpec, num_seqs: int, o: Options) -> None:
    q, cu, out, lse, sinks, _ = queries
    assert out is not None
    assert lse is not None
    tokens, heads, dim = q.shape
    if heads == 0 or heads % spec.num_kv_heads:
        raise BadArgument(
            f"{call}(): q has {heads} heads and the cache {spec.num_kv_heads}; the first is a multiple of the second."
        )
    if dim != query_dim(spec, o.latent):
        why = "spec.head_dim + spec.v_head_dim, latent and rotary part," if o.latent else "spec.head_dim"
        raise BadArgument(f"{call}(): q is {list(q.shape)}; {why} makes it {[tokens, heads, query_dim(spec, o.latent)]}.")
    want = [tokens, heads, value_dim(spec, o.latent)]
    if list(out.shape) != want or out.dtype not in _IO:
        raise BadArgument(f"{call}(): out is {list(out.shape)} {out.dtype}; q and the spec make it {want} f16, bf16 or f32.")
    if list(lse.shape) != want[:2] or lse.dtype != torch.float32:
        raise BadArgument(f"{call}(): lse is {list(lse.shape)} {lse.dtype}; it must be {want[:2]} float32.")
    if sinks is not None and (list(sinks.shape) != [heads] or sinks.dtype != torch.float32):
        raise BadArgument(f"{call}(): sinks is {list(sinks.shape)} {sinks.dtype}; it must be [{heads}] float32.")
    if cu is not None and (cu.dtype not in (torch.int32, torch.int64) or list(cu.shape) != [num_seqs + 1]):
        raise BadArgument(
            f"{call}(): cu_seqlens is {list(cu.shape)} {cu.dtype}; it must be int32 or int64 [{num_seqs + 1}], one more than the "
            "sequences."
        )
    if cu is None and (tokens % num_seqs if num_seqs else tokens):
        other = "With cu_seqlens they may differ." if o.latent else "attention_varlen takes different numbers."
        raise BadArgument(f"{call}(): q has {tokens} tokens for {num_seqs} sequences; every sequence has as many. {other}")
    if not math.isfinite(o.scale) or o.scale == 0:
        raise BadArgument(f"{call}(): scale is {o.scale}; it must be finite and not 0.")
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
