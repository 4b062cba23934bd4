"""Formats: what one token's bytes mean. One row each; codec, size, validator, native table and docs read the row.

A format is an element type, how many elements share a scale, the scale's type, and where scales stand. A computed scale is
`max(amax / qmax / tensor_scale, floor)` rounded to the scale's type, with amax over finite elements; elements are then
divided by the scale as stored, so that a reader's `element * scale` sees what the writer saw.

Formats of planes are what a CacheSpec takes. Formats of rows (`rows`) are those of a hybrid cache's pages, which have the scales
of all rows behind the elements of all rows (kvx/quant/rows.py). Their arithmetic is kvx/quant, by the names of kvx/spec/dtypes.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
class RowRule:
    """How an engine codes a row that stands in a page. Engines agree on the bytes of a number, and not on those of a group of
    zeros, nor on what is rounded before: each such rule is a format."""

    keeps_rope: bool = False  # the rotary part, the last elements, stays bf16
    scale_multiple: int = 1  # a row's scales are padded to it, with zeros
    page_multiple: int = 1  # and pages to this
    least_amax: float = 0.0  # a group's largest magnitude counts as no less
    least_scale: float = 0.0
    rounds_first: bool = False  # to bf16, before it is coded
    has_power_scale: bool = False  # the scale is raised to a power of two, whatever its type
    ties_down: bool = False  # e2m1 alone, and -0 becomes 0; else ties go to the even code

    @property
    def flags(self) -> int:
        """The ABI's (kvx_row_flags_t)."""
        return self.rounds_first | self.has_power_scale << 1 | self.ties_down << 2


@dataclass(frozen=True)
class Format:
    name: str
    element: DType
    granularity: Granularity = Granularity.NONE
    scale: DType | None = None
    group_size: int = 0  # elements under one scale, GROUP only
    is_inline: bool = False  # scales follow the elements in the cell
    has_tensor_scale: bool = False  # one more f32 that multiplies every scale
    rows: RowRule | None = None  # rows of pages may have it, by this rule

    def __post_init__(self) -> None:
        if (self.scale is None) != (self.granularity == Granularity.NONE):
            raise BadArgument(f"format {self}: granularity is {self.granularity.name} and scale {self.scale}; both or neither.")
        if self.group_size and self.granularity != Granularity.GROUP:  # 0 with GROUP: a plan's row, whose groups stand in the plan
            raise BadArgument(f"format {self}: granularity is {self.granularity.name} and group_size {self.group_size}.")
        if not self.is_of_planes and (self.is_inline or self.has_tensor_scale or not self.granularity.is_stored_per_token):
            raise BadArgument(f"format {self}: rows in pages have their own scales, TOKEN_HEAD or GROUP, at the page's end.")

    @property
    def is_of_planes(self) -> bool:
        """A CacheSpec may have it: its scales, if it has any, stand apart or inline."""
        return self.rows is None or self.scale is None

    @property
    def scale_place(self) -> str:
        """Where scales stand: "" (there are none), "apart", "inline" or "page end"."""
        if self.scale is None:
            return ""
        return "inline" if self.is_inline else "apart" if self.is_of_planes else "page end"

    @property
    def is_in_bytes(self) -> bool:
        """Rows are no whole elements, two a byte or scales behind them: tensors that hold them are of bytes."""
        return self.is_inline or self.element.bits < 8

    @property
    def scale_floor(self) -> float:
        """The smallest scale ever stored, so that no row divides by zero. 1e-6 is vLLM's; 2**-9 is e4m3's smallest step."""
        if self.rows is not None:
            return self.rows.least_scale
        if self.scale is None or self.scale.name == "e8m0":
            return 0.0
        return 2.0**-9 if self.scale.name == "fp8_e4m3" else 1e-6

    def num_groups(self, head_dim: int) -> int:
        return head_dim // self.group_size if self.group_size else 1

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of the scales of one (token, head) row; 0 when coarser scales are shared."""
        if self.scale is None or not self.granularity.is_stored_per_token:
            return 0
        multiple = self.rows.scale_multiple if self.rows is not None else 1
        return -(-self.num_groups(head_dim) * self.scale.bits // 8 // multiple) * multiple

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one (token, head) row in the cache tensor: elements, and scales when they are inline."""
        return head_dim * self.element.bits // 8 + (self.scale_bytes(head_dim) if self.is_inline else 0)

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def named(name: str, *, of_rows: bool = False) -> Format:
        """The format of that name that planes can have, or with of_rows that rows of pages can."""
        name, known = format_name(name), ROW_FORMATS if of_rows else FORMATS
        if not isinstance(name, str):
            raise BadArgument(f'format is {name!r}; it must be the name of one, such as "bf16" or "fp8", or a torch dtype.')
        if name in known:
            return known[name]
        if name in ALL_FORMATS:
            raise BadArgument(
                f'format "{name}" is one of rows in pages; kvx.RowCodec takes it. Planes have {", ".join(FORMATS)}.'
                if known is FORMATS
                else f'format "{name}" is one of planes; kvx.CacheSpec takes it. Rows in pages have {", ".join(ROW_FORMATS)}.'
            )
        near = [n for n in known if name and n.startswith(name[:4])]
        near = near or get_close_matches(name.lower(), known, n=4)
        found = f"Similar names: {', '.join(near)}" if near else f"Known: {', '.join(known)}"
        raise BadArgument(f'format "{name}" does not exist. {found}. `kvx inspect --formats` explains each.')


# What engines, torch and people call them.
_OTHER_NAMES = {
    "fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "e4m3": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2", "e5m2": "fp8_e5m2",
    "bfloat16": "bf16", "float16": "f16", "fp16": "f16", "half": "f16",
    "float32": "f32", "fp32": "f32", "float": "f32", "float64": "f64", "fp64": "f64", "double": "f64",
}  # fmt: skip


def format_name(name: str) -> str:
    """The name of the row that is meant: "fp8" is fp8_e4m3, torch.float16 is f16. What means none comes back as it is."""
    text = str(name).strip().lower().removeprefix("torch.").replace("-", "_")
    text = _OTHER_NAMES.get(text, text)
    return text if text in ALL_FORMATS else name


def _of_planes() -> list[Format]:
    f32, e4m3, e8m0 = DTYPES["f32"], DTYPES["fp8_e4m3"], DTYPES["e8m0"]
    rows = [
        Format(name, DTYPES[name], rows=RowRule() if name in ("bf16", "f32") else None) for name in ("bf16", "f16", "f32", "f64")
    ]
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


def _of_rows() -> list[Format]:
    """For the entries of a compressed cache, its window, and the keys of its indexer."""
    f32, e4m3, e8m0, e2m1 = DTYPES["f32"], DTYPES["fp8_e4m3"], DTYPES["e8m0"], DTYPES["e2m1"]
    group, whole = Granularity.GROUP, Granularity.TOKEN_HEAD

    def v4(name: str, rule: RowRule) -> Format:
        """448 e4m3 + 64 bf16 + 7 powers of two and a zero. DeepSeek's own code and vLLM write it as `said`; FlashMLA reads it."""
        return Format(name, e4m3, group, e8m0, 64, rows=rule)

    said = RowRule(True, 8, 576, least_amax=1e-4, rounds_first=True)
    least_step = RowRule(least_scale=2.0**-9)
    return [
        v4("fp8_v4", said),
        v4("fp8_v4_sglang", replace(said, rounds_first=False)),
        v4("fp8_v4_sglang_triton", replace(said, rounds_first=False, least_amax=1e-8)),
        v4("fp8_v4_flashmla", replace(said, least_amax=0.0, least_scale=1e-4)),
        v4("fp8_v4_trtllm", replace(said, page_multiple=1, least_amax=1e-8)),
        # One f32 for all 448: what codes are multiplied by.
        Format("fp8_entry", e4m3, whole, f32, rows=RowRule(keeps_rope=True, least_amax=1e-8)),
        Format("nvfp4_entry", e2m1, group, e4m3, 16, rows=least_step),  # V4.1's: the rotary part is coded too
        # Keys of the indexer.
        Format("index_mxfp4", e2m1, group, e8m0, 32, rows=RowRule(least_amax=6 * 2.0**-126)),
        Format("index_mxfp4_sglang", e2m1, group, e8m0, 32, rows=RowRule(least_scale=1e-4, ties_down=True)),
        Format("index_fp8", e4m3, whole, f32, rows=RowRule(least_amax=1e-4, has_power_scale=True)),
        Format("index_fp8_sglang", e4m3, whole, f32, rows=RowRule(least_amax=1e-4)),
        Format("index_nvfp4", e2m1, group, e4m3, 16, rows=least_step),
    ]


ALL_FORMATS: dict[str, Format] = {row.name: row for row in (*_of_planes(), *_of_rows())}
FORMATS: dict[str, Format] = {name: row for name, row in ALL_FORMATS.items() if row.is_of_planes}
ROW_FORMATS: dict[str, Format] = {name: row for name, row in ALL_FORMATS.items() if row.rows is not None}
