"""Rows: how one vector of a hybrid cache is kept. In a page of B rows, elements come first and scales stand behind all of them:

    row 0's elements | row 1's | ... | row B-1's | row 0's scales | ... | row B-1's | padding

Engines agree on the bytes of a number, and not on those of a tile of zeros, nor on what is rounded before: each rule is a format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.quant import decode, encode, load_scale, round_scale
from kvx.quant.numbers import E2M1_MIDDLES, cast, pack_nibbles
from kvx.quant.scales import finite_amax
from kvx.spec.dtypes import DTYPES

WHOLE = -1  # a group of all coded elements


@dataclass(frozen=True)
class RowFormat:
    name: str
    element: str  # kvx.spec.dtypes' name
    group: int = 0  # elements under one scale; 0: there are none, WHOLE: one a row
    scale: str = ""  # its type
    keeps_rope: bool = False  # the rotary part, the last elements, stays bf16
    scale_multiple: int = 1  # a row's scales are padded to it, with zeros
    page_multiple: int = 1  # and pages to this
    least_amax: float = 0.0  # a tile's largest magnitude counts as no less
    least_scale: float = 0.0
    rounds_first: bool = False  # to bf16, before it is coded
    has_power_scale: bool = False  # the scale is raised to a power of two, whatever its type
    ties_down: bool = False  # e2m1 alone, and -0 becomes 0; else ties go to the even code

    @staticmethod
    def named(name: str) -> RowFormat:
        if name not in ROW_FORMATS:
            raise BadArgument(f'row format "{name}" does not exist. There are {", ".join(ROW_FORMATS)}.')
        return ROW_FORMATS[name]


# 448 e4m3 + 64 bf16 + 7 powers of two and a zero, as DeepSeek's own code and vLLM write it; FlashMLA reads it.
_V4 = RowFormat("fp8_v4", "fp8_e4m3", 64, "e8m0", True, 8, 576, least_amax=1e-4, rounds_first=True)
_MXFP4 = RowFormat("index_mxfp4", "e2m1", 32, "e8m0", least_amax=6 * 2.0**-126)
_NVFP4 = RowFormat("index_nvfp4", "e2m1", 16, "fp8_e4m3", least_scale=2.0**-9)
_INDEX_FP8 = RowFormat("index_fp8", "fp8_e4m3", WHOLE, "f32", least_amax=1e-4, has_power_scale=True)
ROW_FORMATS: dict[str, RowFormat] = {
    f.name: f
    for f in (
        RowFormat("f32", "f32"),
        RowFormat("bf16", "bf16"),
        _V4,
        replace(_V4, name="fp8_v4_sglang", rounds_first=False),
        replace(_V4, name="fp8_v4_sglang_triton", rounds_first=False, least_amax=1e-8),
        replace(_V4, name="fp8_v4_flashmla", least_amax=0.0, least_scale=1e-4),
        replace(_V4, name="fp8_v4_trtllm", page_multiple=1, least_amax=1e-8),
        # One f32 for all 448: what codes are multiplied by.
        RowFormat("fp8_entry", "fp8_e4m3", WHOLE, "f32", keeps_rope=True, least_amax=1e-8),
        replace(_NVFP4, name="nvfp4_entry"),  # V4.1's: the rotary part is coded too
        # Keys of the indexer.
        _MXFP4,
        replace(_MXFP4, name="index_mxfp4_sglang", least_amax=0.0, least_scale=1e-4, ties_down=True),
        _INDEX_FP8,
        replace(_INDEX_FP8, name="index_fp8_sglang", has_power_scale=False),
        _NVFP4,
    )
}


class RowCodec:
    """A format's rows of one width, and pages of them."""

    def __init__(self, format: RowFormat | str, dim: int, rope_dim: int = 0) -> None:
        self.format = f = RowFormat.named(format) if isinstance(format, str) else format
        self.dim, self.rope_dim = dim, rope_dim if f.keeps_rope else 0
        self._element = DTYPES[f.element]
        self._scale = DTYPES[f.scale] if f.scale else None
        self._coded = dim - self.rope_dim
        self.group = self._coded if f.group == WHOLE else f.group
        is_odd = rope_dim % 2 or self._coded % 2
        if not 0 <= rope_dim <= dim or self._coded <= 0 or (self.group and self._coded % self.group) or is_odd:
            raise BadArgument(
                f"RowCodec: {dim} elements with a rotary part of {rope_dim}; {f.name} codes {self._coded} of them in groups of "
                f"{self.group or 1}, which must divide them; both parts are even."
            )
        self.data_bytes = self._coded * self._element.bits // 8 + 2 * self.rope_dim
        scales = self._coded // self.group * self._scale.bits // 8 if self._scale is not None else 0
        self._scale_used = scales
        self.scale_bytes = -(-scales // f.scale_multiple) * f.scale_multiple

    @property
    def row_bytes(self) -> int:
        """Payload: without what pages are padded by."""
        return self.data_bytes + self.scale_bytes

    def page_bytes(self, rows: int) -> int:
        return -(-rows * self.row_bytes // self.format.page_multiple) * self.format.page_multiple

    # --- numbers <-> bytes -----------------------------------------------------------------------------------------------

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, dim] as bytes: [rows, data_bytes], [rows, scale_bytes]."""
        f = self.format
        x = x.to(torch.float32)
        if f.rounds_first:
            x = x.to(torch.bfloat16).to(torch.float32)
        coded, rope = x[:, : self._coded], x[:, self._coded :]
        rope_bytes = cast(rope, torch.bfloat16).contiguous().view(torch.uint8)
        if self._scale is None:
            data = encode(coded, self._element, None).contiguous().view(torch.uint8)
            return torch.cat((data, rope_bytes), -1), data.new_zeros(len(x), 0)
        tiles = coded.reshape(len(x), self._coded // self.group, self.group)
        units = self._scales_of(tiles)
        factors = load_scale(units, self._scale).unsqueeze(-1)
        codes = _e2m1_down(tiles / factors) if f.ties_down else encode(tiles, self._element, factors)
        scales = units.contiguous().view(torch.uint8).flatten(1)
        padded = scales.new_zeros(len(x), self.scale_bytes)
        padded[:, : self._scale_used] = scales
        return torch.cat((codes.flatten(1), rope_bytes), -1), padded

    def _scales_of(self, tiles: Tensor) -> Tensor:
        """[rows, tiles] of the scale's type. Divided by a tensor: by a number a device multiplies with its reciprocal."""
        f, of_scale = self.format, DTYPES[self.format.scale]
        scale = finite_amax(tiles, -1).clamp(min=f.least_amax) / torch.tensor(self._element.qmax, device=tiles.device)
        scale = scale.clamp(min=f.least_scale)
        if f.has_power_scale:
            scale = load_scale(round_scale(scale, DTYPES["e8m0"]), DTYPES["e8m0"])
        return round_scale(scale, of_scale)

    def decode(self, data: Tensor, scales: Tensor) -> Tensor:
        """[rows, dim] f32."""
        coded_bytes = self._coded * self._element.bits // 8
        codes, rope_bytes = data[:, :coded_bytes], data[:, coded_bytes:]
        rope = rope_bytes.contiguous().view(torch.bfloat16).to(torch.float32)
        if self._scale is None:
            kind = torch.float32 if self._element.name == "f32" else torch.bfloat16
            return torch.cat((codes.contiguous().view(kind).to(torch.float32), rope), -1)
        used = scales[:, : self._scale_used].contiguous()
        units = used.view(torch.float32) if self._scale.name == "f32" else used
        factors = load_scale(units, self._scale).unsqueeze(-1)
        tiles = codes.reshape(len(data), factors.shape[1], coded_bytes // factors.shape[1])
        return torch.cat((decode(tiles, self._element, factors, torch.float32).flatten(1), rope), -1)

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
