"""Formats and element types, row by row, against the numbers of include/kvx_abi.h."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import kvx
from kvx.spec import ALL_FORMATS, DTYPES, FORMATS, ROW_FORMATS, Granularity, RowRule

HEADER = (Path(__file__).parents[2] / "include" / "kvx_abi.h").read_text()


def enum(prefix: str) -> dict[str, int]:
    """Names and values of the header's enum whose values start with `prefix`."""
    return {name: int(value) for name, value in re.findall(rf"^\s*{prefix}(\w+) = (\d+)", HEADER, re.M)}


ABI_NAMES = {
    "f16": "F16",
    "bf16": "BF16",
    "f32": "F32",
    "fp8_e4m3": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "int8": "S8",
    "int4": "S4",
    "e2m1": "E2M1",
    "e8m0": "E8M0",
    "f64": "F64",
}


def test_dtype_codes_are_the_headers():
    codes = enum("KVX_DTYPE_")
    assert len(codes) == 16
    assert {name: t.code for name, t in DTYPES.items()} == {name: codes[abi] for name, abi in ABI_NAMES.items()}


def test_granularities_are_the_headers():
    want = {name.removeprefix("PER_"): value for name, value in enum("KVX_SCALE_GRANULARITY_").items()}
    assert {g.name: int(g) for g in Granularity} == want
    assert len(want) == 7


@pytest.mark.parametrize(
    ("name", "bits", "qmax"),
    [
        ("f16", 16, 0),
        ("bf16", 16, 0),
        ("f32", 32, 0),
        ("fp8_e4m3", 8, 448),
        ("fp8_e5m2", 8, 57344),
        ("int8", 8, 127),
        ("int4", 4, 7),
        ("e2m1", 4, 6),
        ("e8m0", 8, 0),
        ("f64", 64, 0),
    ],
)
def test_dtypes_by_hand(name, bits, qmax):
    t = DTYPES[name]
    assert (t.name, t.bits, t.qmax, t.is_quantised, str(t)) == (name, bits, qmax, qmax > 0, name)
    unit = getattr(torch, t.torch_name)
    assert unit.itemsize * 8 == max(bits, 8)
    assert t.arithmetic, "what a write does is part of the row"


class Row(NamedTuple):
    element: str
    bits: int
    granularity: str
    scale: str | None
    row_bytes: int  # head_dim 128
    scale_bytes: int  # head_dim 128
    group_size: int = 0
    is_inline: bool = False
    has_tensor_scale: bool = False
    scale_floor: float = 1e-6


ROWS = {
    "bf16": Row("bf16", 16, "NONE", None, 256, 0, scale_floor=0),
    "f16": Row("f16", 16, "NONE", None, 256, 0, scale_floor=0),
    "f32": Row("f32", 32, "NONE", None, 512, 0, scale_floor=0),
    "f64": Row("f64", 64, "NONE", None, 1024, 0, scale_floor=0),
    "fp8_e4m3": Row("fp8_e4m3", 8, "TENSOR", "f32", 128, 0),
    "fp8_e4m3_per_head": Row("fp8_e4m3", 8, "HEAD", "f32", 128, 0),
    "fp8_e4m3_per_block": Row("fp8_e4m3", 8, "BLOCK", "f32", 128, 0),
    "fp8_e4m3_per_block_head": Row("fp8_e4m3", 8, "BLOCK_HEAD", "f32", 128, 0),
    "fp8_e5m2": Row("fp8_e5m2", 8, "TENSOR", "f32", 128, 0),
    "fp8_e5m2_per_head": Row("fp8_e5m2", 8, "HEAD", "f32", 128, 0),
    "fp8_e5m2_per_block": Row("fp8_e5m2", 8, "BLOCK", "f32", 128, 0),
    "fp8_e5m2_per_block_head": Row("fp8_e5m2", 8, "BLOCK_HEAD", "f32", 128, 0),
    "int8": Row("int8", 8, "TENSOR", "f32", 128, 0),
    "int8_per_head": Row("int8", 8, "HEAD", "f32", 128, 0),
    "int8_per_block": Row("int8", 8, "BLOCK", "f32", 128, 0),
    "int8_per_block_head": Row("int8", 8, "BLOCK_HEAD", "f32", 128, 0),
    "fp8_e4m3_per_token_head": Row("fp8_e4m3", 8, "TOKEN_HEAD", "f32", 128, 4),
    "fp8_e4m3_per_token_head_inline": Row("fp8_e4m3", 8, "TOKEN_HEAD", "f32", 132, 4, is_inline=True),
    "fp8_e5m2_per_token_head": Row("fp8_e5m2", 8, "TOKEN_HEAD", "f32", 128, 4),
    "fp8_e5m2_per_token_head_inline": Row("fp8_e5m2", 8, "TOKEN_HEAD", "f32", 132, 4, is_inline=True),
    "int8_per_token_head": Row("int8", 8, "TOKEN_HEAD", "f32", 128, 4),
    "int8_per_token_head_inline": Row("int8", 8, "TOKEN_HEAD", "f32", 132, 4, is_inline=True),
    "int4_per_token_head": Row("int4", 4, "TOKEN_HEAD", "f32", 64, 4),
    "int4_per_token_head_inline": Row("int4", 4, "TOKEN_HEAD", "f32", 68, 4, is_inline=True),
    "int8_per_token_head_f16": Row("int8", 8, "TOKEN_HEAD", "f16", 128, 2),
    "nvfp4": Row("e2m1", 4, "GROUP", "fp8_e4m3", 64, 8, group_size=16, has_tensor_scale=True, scale_floor=2**-9),
    "mxfp4": Row("e2m1", 4, "GROUP", "e8m0", 64, 4, group_size=32, scale_floor=0),
    "mxfp8": Row("fp8_e4m3", 8, "GROUP", "e8m0", 128, 4, group_size=32, scale_floor=0),
    "int4_per_group": Row("int4", 4, "GROUP", "f16", 64, 8, group_size=32),
    "fp8_e4m3_per_128": Row("fp8_e4m3", 8, "GROUP", "f32", 128, 4, group_size=128),
    "fp8_e4m3_per_128_inline": Row("fp8_e4m3", 8, "GROUP", "f32", 132, 4, group_size=128, is_inline=True),
}


def test_every_row_is_described_here():
    assert set(ROWS) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_by_hand(name):
    f = FORMATS[name]
    got = Row(
        f.element.name,
        f.element.bits,
        f.granularity.name,
        f.scale and f.scale.name,
        f.row_bytes(128),
        f.scale_bytes(128),
        f.group_size,
        f.is_inline,
        f.has_tensor_scale,
        f.scale_floor,
    )
    assert got == ROWS[name]
    assert f.name == str(f) == name
    assert f.num_groups(128) == (128 // ROWS[name].group_size if ROWS[name].group_size else 1)


@pytest.mark.parametrize(
    ("name", "head_dim", "row_bytes", "scale_bytes"),
    [
        ("bf16", 80, 160, 0),
        ("fp8_e4m3_per_token_head_inline", 80, 84, 4),
        ("int4_per_token_head", 80, 40, 4),
        ("nvfp4", 80, 40, 5),
        ("mxfp4", 96, 48, 3),
        ("int4_per_group", 96, 48, 6),
        ("fp8_e4m3_per_128_inline", 512, 528, 16),
        ("f32", 1, 4, 0),
    ],
)
def test_other_head_dims(name, head_dim, row_bytes, scale_bytes):
    assert (FORMATS[name].row_bytes(head_dim), FORMATS[name].scale_bytes(head_dim)) == (row_bytes, scale_bytes)


def test_stored_per_token_are_token_head_and_group():
    assert [g.name for g in Granularity if g.is_stored_per_token] == ["TOKEN_HEAD", "GROUP"]


@pytest.mark.parametrize("name", FORMATS)
def test_named_finds_every_row(name):
    assert kvx.Format.named(name) is FORMATS[name]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mxfp6", "Similar names: mxfp4, mxfp8"),
        ("int8_per_row", f"Similar names: {', '.join(n for n in ROWS if n.startswith('int8'))}"),
        ("int3", "Similar names: int8"),
        ("gguf", f"Known: {', '.join(FORMATS)}"),
        ("", f"Known: {', '.join(FORMATS)}"),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(name, found):
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.Format.named(name)
    assert str(refused.value) == f'format "{name}" does not exist. {found}. `kvx inspect --formats` explains each.'


# ---- rows of pages; their bytes are in tests/hybrid/test_rows.py


def test_one_table_has_planes_and_rows():
    assert {**FORMATS, **ROW_FORMATS} == ALL_FORMATS
    assert FORMATS.keys() & ROW_FORMATS.keys() == {"bf16", "f32"}
    assert all((f.granularity == Granularity.GROUP) == (f.group_size > 0) for f in ALL_FORMATS.values())
    assert all(f.name == name and type(f) is kvx.Format for name, f in ALL_FORMATS.items())
    assert {f.scale_place for f in FORMATS.values()} == {"", "apart", "inline"}
    assert {f.scale_place for f in ROW_FORMATS.values()} == {"", "page end"}


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_row_formats_are_found_by_the_same_lookup(name):
    assert kvx.Format.named(name, of_rows=True) is ROW_FORMATS[name] is kvx.RowCodec(name, 512, 64).format
    if name not in FORMATS:
        with pytest.raises(
            kvx.BadArgument, match=f'format "{name}" is one of rows in pages; kvx.RowCodec takes it. Planes have bf16'
        ):
            kvx.CacheSpec(4, 16, 1, 128, format=name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("int8", f'format "int8" is one of planes; kvx.CacheSpec takes it. Rows in pages have {", ".join(ROW_FORMATS)}.'),
        ("fp8_v5", 'format "fp8_v5" does not exist. Similar names: fp8_v4, '),
        ("q8_0", f'format "q8_0" does not exist. Known: {", ".join(ROW_FORMATS)}.'),
        (None, f"RowCodec: format None has no RowRule; rows in pages have {', '.join(ROW_FORMATS)}."),
        (FORMATS["int8"], f"RowCodec: format int8 has no RowRule; rows in pages have {', '.join(ROW_FORMATS)}."),
    ],
)
def test_a_name_that_rows_do_not_have(name, message):
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.RowCodec(name, 512, 64)
    assert str(refused.value).startswith(message)


def test_row_flags_are_the_headers():
    flags = {"ROUND_FIRST": "rounds_first", "POWER_SCALE": "has_power_scale", "TIES_DOWN": "ties_down"}
    assert enum("KVX_ROWS_") == {name: RowRule(**{field: True}).flags for name, field in flags.items()}
    assert RowRule(rounds_first=True, ties_down=True).flags == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"granularity": Granularity.TENSOR}, "granularity is TENSOR and scale None"),
        ({"scale": DTYPES["f32"]}, "granularity is NONE and scale f32"),
        ({"group_size": 4}, "granularity is NONE and group_size 4"),
        ({"scale": DTYPES["f32"], "granularity": Granularity.HEAD, "rows": RowRule()}, "TOKEN_HEAD or GROUP"),
        (
            {"scale": DTYPES["f32"], "granularity": Granularity.TOKEN_HEAD, "rows": RowRule(), "is_inline": True},
            "at the page's end",
        ),
    ],
)
def test_fields_that_disagree_are_refused(fields, message):
    with pytest.raises(kvx.BadArgument, match=f"^format toy: .*{message}"):
        kvx.Format("toy", DTYPES["int8"], **fields)
