"""Rows: how one vector of a hybrid cache is kept. In a page of B rows, elements come first and scales stand behind all of them:

    row 0's elements | row 1's | ... | row B-1's | row 0's scales | ... | row B-1's | padding

Their formats stand with all others in kvx/spec/formats.py; a format's RowRule says how an engine codes a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.quant import decode, encode, load_scale, round_scale
from kvx.quant.numbers import E2M1_MIDDLES, cast, pack_nibbles, torch_dtype
from kvx.quant.scales import finite_amax
from kvx.spec.dtypes import DTYPES, DType
from kvx.spec.formats import ROW_FORMATS, Format


class RowCodec:
    """A format's rows of one width, and pages of them."""

    def __init__(self, format: Format | str, dim: int, rope_dim: int = 0) -> None:
        self.format = f = Format.named(format, of_rows=True) if isinstance(format, str) else format
        if not isinstance(f, Format) or f.rows is None:
            raise BadArgument(f"RowCodec: format {str(f)[:100]} has no RowRule; rows in pages have {', '.join(ROW_FORMATS)}.")
        self.dim, self.rope_dim, self.rule = dim, rope_dim if f.rows.keeps_rope else 0, f.rows
        self._coded = dim - self.rope_dim
        self.group = 0 if f.scale is None else f.group_size or self._coded
        is_odd = rope_dim % 2 or self._coded % 2
        if not 0 <= rope_dim <= dim or self._coded <= 0 or (self.group and self._coded % self.group) or is_odd:
            raise BadArgument(
                f"RowCodec: {dim} elements with a rotary part of {rope_dim}; {f.name} codes {self._coded} of them in groups of "
                f"{self.group or 1}, which must divide them; both parts are even."
            )
        self.data_bytes = f.row_bytes(self._coded) + 2 * self.rope_dim
        self.scale_bytes = f.scale_bytes(self._coded)

    @property
    def row_bytes(self) -> int:
        """Payload: without what pages are padded by."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, rows: int) -> int:
        return -(-rows * self.row_bytes // self.rule.page_multiple) * self.rule.page_multiple

    # --- numbers <-> bytes -----------------------------------------------------------------------------------------------

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, dim] as bytes: [rows, data_bytes], [rows, scale_bytes]."""
        f = self.format
        x = x.to(torch.float32)
        if self.rule.rounds_first:
            x = x.to(torch.bfloat16).to(torch.float32)
        coded, rope = x[:, : self._coded], x[:, self._coded :]
        rope_bytes = cast(rope, torch.bfloat16).contiguous().view(torch.uint8)
        if f.scale is None:
            data = encode(coded, f.element, None).contiguous().view(torch.uint8)
            return torch.cat((data, rope_bytes), -1), data.new_zeros(len(x), 0)
        tiles = coded.reshape(len(x), self._coded // self.group, self.group)
        units = self._scales_of(tiles, f.scale)
        factors = load_scale(units, f.scale).unsqueeze(-1)
        codes = _e2m1_down(tiles / factors) if self.rule.ties_down else encode(tiles, f.element, factors)
        scales = units.contiguous().view(torch.uint8).flatten(1)
        padded = scales.new_zeros(len(x), self.scale_bytes)
        padded[:, : scales.shape[1]] = scales
        return torch.cat((codes.flatten(1), rope_bytes), -1), padded

    def _scales_of(self, tiles: Tensor, kind: DType) -> Tensor:
        """[rows, tiles] of the scale's type. Divided by a tensor: by a number a device multiplies with its reciprocal."""
        largest = finite_amax(tiles, -1).clamp(min=self.rule.least_amax)
        scale = largest / torch.tensor(self.format.element.qmax, device=tiles.device)
        scale = scale.clamp(min=self.rule.least_scale)
        if self.rule.has_power_scale:
            scale = load_scale(round_scale(scale, DTYPES["e8m0"]), DTYPES["e8m0"])
        return round_scale(scale, kind)

    def decode(self, data: Tensor, scales: Tensor) -> Tensor:
        """[rows, dim] f32."""
        f = self.format
        coded_bytes = f.row_bytes(self._coded)
        codes, rope_bytes = data[:, :coded_bytes], data[:, coded_bytes:]
        rope = rope_bytes.contiguous().view(torch.bfloat16).to(torch.float32)
        if f.scale is None:
            return torch.cat((codes.contiguous().view(torch_dtype(f.element)).to(torch.float32), rope), -1)
        num_groups = f.num_groups(self._coded)
        used = scales[:, : num_groups * f.scale.bits // 8].contiguous()
        factors = load_scale(used.view(torch_dtype(f.scale)), f.scale).unsqueeze(-1)
        tiles = codes.reshape(len(data), num_groups, coded_bytes // num_groups)
        return torch.cat((decode(tiles, f.element, factors, torch.float32).flatten(1), rope), -1)

    # --- pages -----------------------------------------------------------------------------------------------------------

    def parts(self, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Views of pages [pages, page_bytes] of bytes: elements [pages, rows, data_bytes], scales [pages, rows, scale_bytes]."""
        if pages.dtype != torch.uint8 or pages.dim() != 2 or pages.shape[1] < rows * self.row_bytes:
            raise BadArgument(
                f"{self.format.name}: pages are {pages.dtype} {list(pages.shape)}; {rows} rows take uint8 "
                f"[pages, {self.page_bytes(rows)}]."
            )
        split = rows * self.data_bytes
        scales = pages[:, split : split + rows * self.scale_bytes]
        return pages[:, :split].view(-1, rows, self.data_bytes), scales.view(len(pages), rows, self.scale_bytes)

    def write(self, pages: Tensor, rows: int, slots: Tensor, x: Tensor) -> None:
        """x [n, dim] to slots [n]: page * rows + row. A negative slot is skipped."""
        kept = slots >= 0
        page, row = slots[kept] // rows, slots[kept] % rows
        data, scales = self.encode(x[kept])
        to_data, to_scales = self.parts(pages, rows)
        to_data[page, row] = data
        to_scales[page, row] = scales

    def read(self, pages: Tensor, rows: int, slots: Tensor) -> Tensor:
        """[n, dim] f32 of slots [n]; zeros where a slot is negative."""
        at = slots.clamp(min=0)
        data, scales = self.parts(pages, rows)
        x = self.decode(data[at // rows, at % rows], scales[at // rows, at % rows])
        return x.masked_fill((slots < 0).unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class RowPages:
    """Rows in memory: uint8 pages [num_pages, page_bytes] of `rows` rows each. A slot is page * rows + row."""

    codec: RowCodec
    pages: Tensor
    rows: int

    @staticmethod
    def zeros(codec: RowCodec, num_pages: int, rows: int, device: str | torch.device = "cpu") -> RowPages:
        return RowPages(codec, torch.zeros(num_pages, codec.page_bytes(rows), dtype=torch.uint8, device=device), rows)

    @property
    def num_rows(self) -> int:
        return len(self.pages) * self.rows

    def write(self, slots: Tensor, x: Tensor) -> None:
        self.codec.write(self.pages, self.rows, slots, x)

    def read(self, slots: Tensor) -> Tensor:
        return self.codec.read(self.pages, self.rows, slots)


def _e2m1_down(x: Tensor) -> Tensor:
    """Codes of e2m1, ties to the smaller magnitude and without -0, two a byte."""
    codes = torch.zeros_like(x, dtype=torch.uint8)
    for middle in E2M1_MIDDLES:
        codes += (x.abs() > middle).to(torch.uint8)
    return pack_nibbles(codes | ((x < 0) & (codes > 0)).to(torch.uint8) << 3)
