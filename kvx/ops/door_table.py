"""A table, and the cache or the pools it leads into, as the native door reads them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from kvx.errors import BadArgument, Unsupported, a_type
from kvx.ops import native
from kvx.ops.cache_view import CacheView
from kvx.ops.cells import block_bytes
from kvx.ops.door_spec import door_spec, pointer_spec, pooled_door_spec
from kvx.ops.structs import TableArgs
from kvx.tables import KvOffsetsTable, PackedTable, PageCsrTable, RaggedTable, Table


class OpenTable(NamedTuple):
    spec: int  # address of the door's spec
    cache: tuple[int | None, int | None]  # cache tensors; none where the table leads into pools
    address: int  # of the TableArgs
    keep: Any  # must live as long as the call


def check(call: str, view: CacheView, table: Table) -> None:
    """The table is one, and the cache has the tensors it needs."""
    spec, pointers = view.spec, view.pointers
    if not isinstance(table, Table):
        raise BadArgument(
            f"{call}(): table is {a_type(table)}; it takes a block table with its lengths: "
            "kvx.PackedTable(block_table, seq_lens), or another of kvx.tables."
        )
    if pointers is not None:
        if spec is not pointers.spec and spec != pointers.spec:
            raise BadArgument(f"{call}(): spec is not that of the pointers; pass `spec=pointers.spec`.")
        if not isinstance(table, PackedTable):
            raise BadArgument(f"{call}(): table is {type(table).__name__}; caches behind pointers take what kvx.cache_table makes.")
    elif not isinstance(table, KvOffsetsTable):
        view.check_count()
    elif spec.block_bytes:
        raise Unsupported(
            f"{call}(): spec.block_bytes is {spec.block_bytes}; KV_OFFSETS tables count blocks that are as large as their content. "
            "Give a spec without it, or another table."
        )


def table_tensors(table: Table) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(indices, indptr, last_page_len, seq_lens)"""
    match table:
        case PackedTable():
            return table.block_table, None, None, table.seq_lens
        case RaggedTable():
            return table.indices, table.indptr, None, table.seq_lens
        case PageCsrTable():
            return table.indices, table.indptr, table.last_page_len, None
        case KvOffsetsTable():
            return table.offsets, None, None, table.seq_lens


def open_table(view: CacheView, table: Table, max_seq_len: int, cu: Tensor | None) -> OpenTable:
    (c0, c1, indices, indptr, last, lens, hcu), keep = native.handles(view.first, view.second, *table_tensors(table), cu)
    if view.pointers is not None:
        args = TableArgs(indices, None, None, lens, hcu, None, None, c0, c1, table.code, 1, max_seq_len, 0)
        return OpenTable(pointer_spec(view.pointers), (None, None), native.address_of(args), (args, keep))
    if isinstance(table, KvOffsetsTable):  # the cache tensors are pools, and blocks start where the table says
        door = pooled_door_spec(view.spec)
        args = TableArgs(
            indices, None, None, lens, hcu, c0, c1, None, None, table.code, table.beam_width, max_seq_len, block_bytes(view.spec)
        )  # fmt: skip
        return OpenTable(native.address_of(door), (None, None), native.address_of(args), (door, args, keep))
    args = TableArgs(indices, indptr, last, lens, hcu, None, None, None, None, table.code, 1, max_seq_len, 0)
    return OpenTable(door_spec(view.spec), (c0, c1), native.address_of(args), (args, keep))
