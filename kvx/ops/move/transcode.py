"""Rows that change their format on the way, in torch: the definition of a plan's cells. convert.py drives it, unit by unit."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from kvx.layout.box import Box, Cell, CellFormat, Side
from kvx.quant.numbers import decode, encode, torch_dtype
from kvx.quant.scales import finite_amax, load_scale, round_scale, scale_from_amax
from kvx.spec.dtypes import DTYPES
from kvx.spec.formats import Format, Granularity

_TYPES = {t.code: t for t in DTYPES.values()}
BY_BLOCK = (Granularity.BLOCK, Granularity.BLOCK_HEAD)


def format_of(row: CellFormat) -> Format:
    element, scale = _TYPES[row.dtype], _TYPES[row.scale_dtype] if row.granularity else None
    return Format("", element, Granularity(row.granularity), scale)


class Rows:
    """The rows of one box and one unit: where each starts, where its scale stands, which layer it is of."""

    def __init__(self, box: Box, a: int, b: int, a_token: int, b_token: int, tokens: int):
        assert box.cell is not None
        self.cell: Cell = box.cell
        index = torch.tensor(list(product(*(range(d.size) for d in box.digits))), dtype=torch.int64).view(-1, len(box.digits))
        steps = {name: torch.tensor([getattr(d, name) for d in box.digits], dtype=torch.int64) for name in box.digits[0]._fields}
        index = index[(index * steps["token"]).sum(-1) < tokens]
        self.layer = (index * steps["layer"]).sum(-1)
        self.src = _starts(box.src, a, a_token, index, steps["src"], steps["src_step"])
        self.dst = _starts(box.dst, b, b_token, index, steps["dst"], steps["dst_step"])
        self.src_scale = _scales(self.cell.src, self.src[1], a, a_token, (index * steps["src_scale"]).sum(-1))
        self.dst_scale = _scales(self.cell.dst, self.dst[1], b, b_token, (index * steps["dst_scale"]).sum(-1))

    def read(self, buffers: list[Tensor]) -> Tensor:
        """f32 [rows, head_dim]; floats of 16 bits widen exactly."""
        row, fmt = self.cell.src, format_of(self.cell.src)
        units = _gather(buffers, self.src, _element_bytes(row, self.cell.head_dim))
        if fmt.element.bits >= 16:
            units = units.view(torch_dtype(fmt.element))
        return decode(units, fmt.element, self._factor(buffers, row, self.src, self.src_scale), torch.float32)

    def scale(self, buffers: list[Tensor], amax: Tensor) -> None:
        """Store the scales that these largest magnitudes [rows, groups] make."""
        row, fmt = self.cell.dst, format_of(self.cell.dst)
        assert fmt.scale is not None
        stored = round_scale(scale_from_amax(amax, fmt, self._tensor_scale(buffers, row)), fmt.scale)
        _scatter(buffers, self._scale_rows(row, self.dst, self.dst_scale), self._scale_bytes(row), stored.view(torch.uint8))

    def write(self, buffers: list[Tensor], x: Tensor) -> None:
        """Encode under the scales as stored."""
        row, fmt = self.cell.dst, format_of(self.cell.dst)
        units = encode(x, fmt.element, self._factor(buffers, row, self.dst, self.dst_scale))
        _scatter(buffers, self.dst, _element_bytes(row, self.cell.head_dim), units.contiguous().view(torch.uint8))

    def amax(self, x: Tensor) -> Tensor:
        return finite_amax(x.unflatten(-1, (-1, self.cell.dst.group_size)), -1)

    def scale_ids(self) -> list[tuple[int, int]]:
        """Which scale of the destination each row is under: (buffer, byte)."""
        return [(self.cell.dst.scale_buffer, at) for at in self.dst_scale.tolist()]

    @property
    def granularity(self) -> Granularity:
        return Granularity(self.cell.dst.granularity)

    def _scale_rows(self, row: CellFormat, starts: tuple[Tensor, Tensor], scale: Tensor) -> tuple[Tensor, Tensor]:
        return (starts[0] if row.is_inline else torch.full_like(scale, row.scale_buffer)), scale

    def _scale_bytes(self, row: CellFormat) -> Tensor:
        size = _TYPES[row.scale_dtype].bits // 8
        return (torch.arange(self.cell.head_dim // row.group_size)[:, None] * row.scale_group + torch.arange(size)).flatten()

    def _tensor_scale(self, buffers: list[Tensor], row: CellFormat) -> Tensor | None:
        if row.tensor_scale_buffer < 0:
            return None
        return buffers[row.tensor_scale_buffer].view(torch.float32)[self.layer + row.first_layer][:, None]

    def _factor(self, buffers: list[Tensor], row: CellFormat, starts: tuple[Tensor, Tensor], scale: Tensor) -> Tensor | None:
        if not row.granularity:
            return None
        kind = _TYPES[row.scale_dtype]
        units = _gather(buffers, self._scale_rows(row, starts, scale), self._scale_bytes(row))
        if kind.bits > 8:
            units = units.view(torch_dtype(kind))
        factor, tensor = load_scale(units, kind), self._tensor_scale(buffers, row)
        return (factor if tensor is None else factor * tensor).repeat_interleave(row.group_size, dim=-1)


def _starts(side: Side, block: int, token: int, index: Tensor, stride: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """(buffer, byte) of each row."""
    start = (
        side.offset
        + block * side.block
        + token // side.token_split * side.token_outer
        + token % side.token_split * side.token_inner
    )
    return side.buffer + block * side.block_step + (index * step).sum(-1), start + (index * stride).sum(-1)


def _scales(row: CellFormat, start: Tensor, block: int, token: int, moved: Tensor) -> Tensor:
    if row.is_inline:
        return start + row.scale_offset
    return row.scale_offset + block * row.scale_block + token * row.scale_token + moved


def _element_bytes(row: CellFormat, head_dim: int) -> Tensor:
    """The bytes of a row's elements, from its start."""
    bits = _TYPES[row.dtype].bits
    d = torch.arange(0, head_dim, 2 if bits == 4 else 1)
    inside = d % row.pack // 2 if bits == 4 else d % row.pack * row.dim_inner
    return ((d // row.pack * row.dim_outer + inside)[:, None] + torch.arange(max(1, bits // 8))).flatten()


def _gather(buffers: list[Tensor], rows: tuple[Tensor, Tensor], offsets: Tensor) -> Tensor:
    out = torch.empty(len(rows[0]), len(offsets), dtype=torch.uint8, device=buffers[0].device)
    for n in rows[0].unique().tolist():
        mine = (rows[0] == n).to(out.device)
        out[mine] = buffers[n][(rows[1][mine.cpu()][:, None] + offsets).to(out.device)]
    return out


def _scatter(buffers: list[Tensor], rows: tuple[Tensor, Tensor], offsets: Tensor, values: Tensor) -> None:
    for n in rows[0].unique().tolist():
        mine = rows[0] == n
        at = (rows[1][mine][:, None] + offsets).to(buffers[n].device)
        buffers[n][at] = values[mine.to(values.device)].view(at.shape)
