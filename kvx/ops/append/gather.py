"""gather: read sequences out of the cache, in order, dequantised. The torch body below is the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange, a_type
from kvx.layout.gate import check_apart, check_memory
from kvx.ops import backend as backends
from kvx.ops import cells, compiled, door_table, native, scales
from kvx.ops.cache_view import CacheView, scales_of
from kvx.quant.numbers import torch_dtype
from kvx.spec.cache_spec import CacheSpec
from kvx.tables import TABLES, Table

_call = native.entry("kvx_door_gather")
_IO = (torch.float16, torch.bfloat16, torch.float32)


def gather(
    cache: Tensor | Sequence[Tensor],  # as in write; KvOffsetsTable: the primary pool, or (primary, secondary)
    table: Table,
    *,
    spec: CacheSpec,
    max_seq_len: int | None = None,  # rows per sequence; None: the longest (reads seq_lens, so host only)
    cu_seqlens: Tensor | None = None,  # [batch + 1]: packed output [tokens, num_kv_heads, head_dim]
    dtype: torch.dtype | None = None,  # of the output; None: the cache's, or bfloat16 for a quantised one
    out: tuple[Tensor, Tensor] | None = None,  # K and V to fill; 3-D [batch * max_seq_len, ...] or 4-D
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    errors: Tensor | None = None,  # one int64 on the device: bad block ids are added to it
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """K and V of every sequence: [batch, max_seq_len, num_kv_heads, head_dim], zero past each length.

    With `cu_seqlens`, rows are packed: sequence s fills [cu_seqlens[s], cu_seqlens[s + 1]). A block id outside the cache
    raises OutOfRange on the host before anything is read; on a device its rows are zero and are counted in `errors`.
    """
    if not isinstance(table, Table):
        raise BadArgument(
            f"gather(): table is {a_type(table)}; it takes a block table with its lengths: "
            "kvx.PackedTable(block_table, seq_lens), or another of kvx.tables."
        )
    if torch.compiler.is_compiling():
        if max_seq_len is None:
            raise BadArgument("gather(): max_seq_len is None; under torch.compile give it, since lengths are not known then.")
        k, v = _outputs(cache, table, spec, max_seq_len, cu_seqlens, dtype, out)
        torch.ops.kvx.gather(
            compiled.as_list(cache), list(table.tensors), k, v, spec.manifest_text, table.code, max_seq_len, cu_seqlens,
            k_scale, v_scale, k_tensor_scale, v_tensor_scale, errors, backend,
        )  # fmt: skip
        return k, v
    view = CacheView.of("gather", cache, spec, scales_of(k_scale, v_scale, k_tensor_scale, v_tensor_scale), errors)
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(
            "gather", backend, cache=view.tensors, table=table.tensors, cu_seqlens=cu_seqlens, out=out, scales=view.optional
        )
    door_table.check("gather", view, table)
    if max_seq_len is None:
        lengths = table.lengths(spec.block_size)
        if not lengths.is_cpu:
            raise BadArgument("gather(): max_seq_len is None and the lengths are on a device; give it, so that nothing waits.")
        max_seq_len = max(1, int(lengths.max())) if lengths.numel() else 1
    scales.require("gather", view)
    k, v = _outputs(view.tensors, table, spec, max_seq_len, cu_seqlens, dtype, out)
    if backends.choose("gather", backend, view.first, spec) == "torch":
        check_apart("gather", out=(k, v))
        _gather_torch(view, table, k, v, max_seq_len, cu_seqlens)
    elif view.first.is_cuda and backends.is_debug() and errors is None:
        with backends.ErrorCounter("gather", view.first.device) as count:
            _gather_native(view._replace(errors=count), table, k, v, max_seq_len, cu_seqlens)
    else:
        _gather_native(view, table, k, v, max_seq_len, cu_seqlens)
    return k, v


_KEYWORDS = ("max_seq_len", "cu_seqlens", "k_scale", "v_scale", "k_tensor_scale", "v_tensor_scale", "errors", "backend")


@compiled.register(
    "gather",
    "Tensor[] cache, Tensor[] table, Tensor(a!) k, Tensor(b!) v, str spec, int kind, int max_seq_len, Tensor? cu_seqlens",
    "Tensor? k_scale, Tensor? v_scale, Tensor? k_tensor_scale, Tensor? v_tensor_scale, Tensor(c!)? errors, str backend",
)
def _gather_compiled(cache: list[Tensor], table: list[Tensor], k: Tensor, v: Tensor, spec: str, kind: int, *rest: Any) -> None:
    given = dict(zip(_KEYWORDS, rest, strict=True))
    gather(compiled.as_cache(cache), TABLES[kind](*table), spec=compiled.parse(spec), out=(k, v), **given)


def _outputs(
    cache: Tensor | Sequence[Tensor], table: Table, spec: CacheSpec, max_seq_len: int, cu: Tensor | None, dtype: torch.dtype | None,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if out is not None:
        return out
    first = cache if isinstance(cache, Tensor) else cache[0]
    element = spec.plane(0).format.element
    dtype = dtype or (torch.bfloat16 if element.is_quantised else torch_dtype(element))
    if dtype not in _IO:
        raise BadArgument(f"gather(): dtype is {dtype}; it must be float16, bfloat16 or float32.")
    if cu is not None and not torch.compiler.is_compiling():
        if not cu.is_cpu:
            raise BadArgument("gather(): cu_seqlens is on a device, so the number of rows is not known here; give `out`.")
        rows: tuple[int, ...] = (int(cu[-1]),)
    elif cu is not None:
        raise BadArgument("gather(): with cu_seqlens under torch.compile, give `out`.")
    else:
        rows = (table.num_seqs, max_seq_len)
    # Rows in front of the first sequence are nobody's, and are not written.
    new = torch.zeros if cu is not None and int(cu[0]) else torch.empty
    k, v = (new(*rows, spec.num_kv_heads, p.head_dim, dtype=dtype, device=first.device) for p in spec.kv)
    return k, v


def _gather_native(view: CacheView, table: Table, k: Tensor, v: Tensor, max_seq_len: int, cu: Tensor | None) -> None:
    opened = door_table.open_table(view, table, max_seq_len, cu)
    (hk, hv, *rest), keep = native.handles(k, v, *view.optional)
    extra, stream = native.extra(rest), native.stream_of(view.first)
    status = _call(opened.spec, *opened.cache, hk, hv, opened.address, native.address_of(extra), stream)
    del keep
    if status:
        native.raise_status(status)


def _gather_torch(view: CacheView, table: Table, k: Tensor, v: Tensor, max_seq_len: int, cu: Tensor | None) -> None:
    spec, errors = view.spec, view.errors
    seq, pos, rows = _positions(table, max_seq_len, cu, k, v, spec, errors)
    length = table.lengths(spec.block_size)
    inside = pos < length[seq]
    found = cells.find(view, table, seq[inside], pos[inside])
    bad = found[0].is_bad if found[0] is found[1] else torch.stack([c.is_bad for c in found])
    _report(bad, length < 0, errors, spec.num_blocks, seq[inside], pos[inside])
    for i, out in enumerate((k, v)):
        at = _index(out, rows)
        out[at] = 0  # packed output: rows in no sequence's range are left alone
        out[tuple(x[inside] for x in at)] = cells.read(view, table, i, found[i], out.dtype)


def _positions(
    table: Table, max_seq_len: int, cu: Tensor | None, k: Tensor, v: Tensor, spec: CacheSpec, errors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, position, output row) of every output row."""
    device = k.device
    for out, plane in zip((k, v), spec.kv, strict=True):
        want = {(table.num_seqs * max_seq_len,), (table.num_seqs, max_seq_len)}
        if out.dtype not in _IO:
            raise BadArgument(f"gather(): {plane.name} is {out.dtype}; it must be float16, bfloat16 or float32.")
        if list(out.shape[-2:]) != [spec.num_kv_heads, plane.head_dim] or (cu is None and tuple(out.shape[:-2]) not in want):
            raise BadArgument(
                f"gather(): {plane.name} is {list(out.shape)}; {table.num_seqs} sequences of {max_seq_len} do not fit."
            )
    if cu is None:
        seq = torch.arange(table.num_seqs, device=device).repeat_interleave(max_seq_len)
        pos = torch.arange(max_seq_len, device=device).repeat(table.num_seqs)
        return seq, pos, torch.arange(seq.shape[0], device=device)
    starts, counts = cu.to(torch.int64)[:-1], cu.to(torch.int64).diff()
    bad = (starts < 0) | (counts < 0) | (counts > max_seq_len) | (starts + counts > k.shape[0])
    if bool(bad.any()) and not (k.is_cpu or backends.is_debug()):
        if errors is not None:
            errors += bad.sum()
        counts = counts.masked_fill(bad, 0)
    elif bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise OutOfRange(
            f"gather(): cu_seqlens[{at}..{at + 1}] is not a range of at most max_seq_len {max_seq_len} rows "
            f"inside the {k.shape[0]} of the output."
        )
    seq = torch.repeat_interleave(torch.arange(table.num_seqs, device=device), counts)
    pos = torch.arange(seq.shape[0], device=device) - (counts.cumsum(0) - counts)[seq]
    return seq, pos, starts[seq] + pos


def _report(bad: Tensor, impossible: Tensor, errors: Tensor | None, num_blocks: int, seq: Tensor, pos: Tensor) -> None:
    if not bool(bad.any()) and not bool(impossible.any()):
        return
    if bad.is_cpu or backends.is_debug():
        if bool(impossible.any()):
            raise OutOfRange(f"gather(): sequence {int(impossible.nonzero()[0])} has a negative or impossible length.")
        at = int(bad.nonzero()[0, -1])
        raise OutOfRange(
            f"gather(): block_table of sequence {int(seq[at])} has no block inside the cache (num_blocks {num_blocks}) "
            f"for position {int(pos[at])}."
        )
    if errors is not None:
        errors += bad.sum() + impossible.sum()


def _index(out: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Rows of a result by its own dimensions, whatever its strides."""
    return (rows,) if out.dim() == 3 else (rows // out.shape[1], rows % out.shape[1])
