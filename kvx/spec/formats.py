"""Formats: what one token's bytes mean. One row each; codec, size, validator, native table and docs read the row.

A format is an element type, how many elements share a scale, the scale's type, and where scales stand. A computed scale is
`max(amax / qmax / tensor_scale, floor)` rounded to the scale's type, with amax over finite elements; elements are then
divided by the scale as stored, so that a reader's `element * scale` sees what the writer saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum

from kvx.errors import BadArgument
from kvx.spec.dtypes import DTYPES, DType


class Granularity(IntEnum):
    """How many elements share a scale. The numbers are the ABI's (kvx_scale_granularity_t)."""

    NONE = 0
    TENSOR = 1  # []
    BLOCK = 2  # [num_blocks]
    HEAD = 3  # [num_kv_heads]
    BLOCK_HEAD = 4  # [num_blocks, num_kv_heads]
    TOKEN_HEAD = 5  # [num_blocks, block_size, num_kv_heads]
    GROUP = 6  # [num_blocks, block_size, num_kv_heads, head_dim / group_size]

    @property
    def is_stored_per_token(self) -> bool:
        return self >= Granularity.TOKEN_HEAD


@dataclass(frozen=True)
class Format:
    name: str
    element: DType
    granularity: Granularity = Granularity.NONE
    scale: DType | None = None
    group_size: int = 0  # elements under one scale, GROUP only
    is_inline: bool = False  # scales follow the elements in the cell
    has_tensor_scale: bool = False  # one more f32 that multiplies every scale

    @property
    def is_in_bytes(self) -> bool:
        """Rows are no whole elements, two a byte or scales behind them: tensors that hold them are of bytes."""
        return self.is_inline or self.element.bits < 8

    @property
    def scale_floor(self) -> float:
        """The smallest scale ever stored, so that no row divides by zero. 1e-6 is vLLM's; 2**-9 is e4m3's smallest step."""
        if self.scale is None or self.scale.name == "e8m0":
            return 0.0
        return 2.0**-9 if self.scale.name == "fp8_e4m3" else 1e-6

    def num_groups(self, head_dim: int) -> int:
        return head_dim // self.group_size if self.group_size else 1

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of the scales of one (token, head) row; 0 when coarser scales are shared."""
        if self.scale is None or not self.granularity.is_stored_per_token:
            return 0
        return self.num_groups(head_dim) * self.scale.bits // 8

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one (token, head) row in the cache tensor: elements, and scales when they are inline."""
        return head_dim * self.element.bits // 8 + (self.scale_bytes(head_dim) if self.is_inline else 0)

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def named(name: str) -> Format:
        try:
            return FORMATS[name]
        except KeyError:
            near = [n for n in FORMATS if name and n.startswith(name[:4])]
            near = near or get_close_matches(name.lower(), FORMATS, n=4)
            found = f"Near it: {', '.join(near)}" if near else f"Known: {', '.join(FORMATS)}"
            raise BadArgument(f'format "{name}" does not exist. {found}.') from None


def _rows() -> list[Format]:
    f32, e4m3, e8m0 = DTYPES["f32"], DTYPES["fp8_e4m3"], DTYPES["e8m0"]
    rows = [Format(name, DTYPES[name]) for name in ("bf16", "f16", "f32", "f64")]
    for name in ("fp8_e4m3", "fp8_e5m2", "int8"):
        element = DTYPES[name]
        rows += [
            Format(name, element, Granularity.TENSOR, f32),
            Format(f"{name}_per_head", element, Granularity.HEAD, f32),
            Format(f"{name}_per_block", element, Granularity.BLOCK, f32),
            Format(f"{name}_per_block_head", element, Granularity.BLOCK_HEAD, f32),
        ]
    for name in ("fp8_e4m3", "fp8_e5m2", "int8", "int4"):
        row = Format(f"{name}_per_token_head", DTYPES[name], Granularity.TOKEN_HEAD, f32)
        rows += [row, Format(f"{row.name}_inline", row.element, row.granularity, f32, is_inline=True)]
    rows += [
        Format("int8_per_token_head_f16", DTYPES["int8"], Granularity.TOKEN_HEAD, DTYPES["f16"]),
        Format("nvfp4", DTYPES["e2m1"], Granularity.GROUP, e4m3, group_size=16, has_tensor_scale=True),
        Format("mxfp4", DTYPES["e2m1"], Granularity.GROUP, e8m0, group_size=32),
        Format("mxfp8", e4m3, Granularity.GROUP, e8m0, group_size=32),
        Format("int4_per_group", DTYPES["int4"], Granularity.GROUP, DTYPES["f16"], group_size=32),
        Format("fp8_e4m3_per_128", e4m3, Granularity.GROUP, f32, group_size=128),
        # The latent of DeepSeek's 656-byte MLA record (vLLM fp8_ds_mla, FlashMLA): 512 elements, then 4 scales.
        Format("fp8_e4m3_per_128_inline", e4m3, Granularity.GROUP, f32, group_size=128, is_inline=True),
    ]
    return rows


FORMATS: dict[str, Format] = {row.name: row for row in _rows()}
