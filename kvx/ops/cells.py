"""Positions of sequences -> cells of the cache -> numbers, in torch: what the definitions of gather and attention read with.

Where a table leads and whether that is an error is found first, for K and V; reading then gives zeros for what is not there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvx.layout.planes import plane_maps, pooled_strides, views
from kvx.ops import scales
from kvx.ops.cache_view import CacheView
from kvx.quant.numbers import decode, torch_dtype
from kvx.spec.cache_spec import CacheSpec
from kvx.tables import KvOffsetsTable, Table


class Cells(NamedTuple):
    """K's or V's cells of some positions."""

    pool: Tensor  # which cache tensor: 1 is the secondary pool of KV_OFFSETS
    block: Tensor
    offset: Tensor
    is_found: Tensor
    is_bad: Tensor  # not found, and not because the table says "no block"


def find(view: CacheView, table: Table, seq: Tensor, pos: Tensor) -> tuple[Cells, Cells]:
    """Cells of positions `pos` of sequences `seq`. K's and V's are one object unless the table names them apart."""
    spec = view.spec
    offset = pos % spec.block_size
    if not isinstance(table, KvOffsetsTable):
        found = table.find(seq, pos, spec.block_size, spec.num_blocks)
        both = Cells(torch.zeros_like(pos), found.k_block, offset, found.is_found, found.is_bad)
        return both, both
    per_block = block_bytes(spec)
    held = [t.numel() * t.element_size() // per_block for t in view.tensors[1:]] or [0]
    bound = torch.tensor([spec.num_blocks, *held], device=pos.device)
    k_value, v_value, in_table = table.rows(seq, pos, spec.block_size)
    cells = []
    for value in (k_value, v_value):
        secondary, index = (value < 0).long(), value & 0x7FFFFFFF
        none = in_table & (value == -1)
        good = in_table & ~none & (index < bound[secondary])
        cells.append(Cells(secondary, index, offset, good, ~good & ~none))
    return cells[0], cells[1]


def read(view: CacheView, table: Table, index: int, cells: Cells, dtype: torch.dtype) -> Tensor:
    """K (0) or V (1) of the cells as numbers [N, num_kv_heads, head_dim]; zero where nothing is."""
    tensors, spec = view.tensors, view.spec
    plane = spec.plane(index)
    out = torch.zeros(cells.block.shape[0], spec.num_kv_heads, plane.head_dim, dtype=dtype, device=cells.block.device)
    pooled = isinstance(table, KvOffsetsTable)
    for which in range(len(tensors) if pooled else 1):
        mine = cells.is_found & (cells.pool == which)
        block, offset = cells.block[mine], cells.offset[mine]
        rows = _pool_view(tensors[which], spec, index) if pooled else views(tensors, spec)[index]
        if rows.dim() == 5 and not pooled:
            rows = rows.permute(0, 3, 1, 2, 4)
        units = rows[block, offset].flatten(2)
        factor = scales.read(view, index, block, offset)
        out[mine] = decode(units, plane.format.element, factor, dtype)
    return out


def block_bytes(spec: CacheSpec) -> int:
    """KV_OFFSETS: bytes of one layer's K (or V) block, the larger of the two."""
    return spec.block_size * spec.num_kv_heads * max(p.format.row_bytes(p.head_dim) for p in spec.kv)


def _pool_view(pool: Tensor, spec: CacheSpec, index: int) -> Tensor:
    """Bytes of a pool as [block, token, head, dim], or [block, token, head, dim/x, dim%x] for split layouts."""
    per_block, flat = block_bytes(spec), pool.reshape(-1).view(torch.uint8)
    num_blocks = flat.numel() // per_block
    elements = flat[: num_blocks * per_block].view(torch_dtype(spec.plane(index).format.element))
    m, strides = plane_maps(spec)[index], pooled_strides(spec)[index]
    step = {**dict(zip(m.axes, strides, strict=True)), "block": elements.numel() // max(num_blocks, 1)}
    size = {**dict(zip(m.axes, m.sizes, strict=True)), "block": num_blocks}
    axes = ("block", "token", "head", *(a for a in m.axes if a.startswith("dim")))
    return elements.as_strided([size[a] for a in axes], [step[a] for a in axes])
