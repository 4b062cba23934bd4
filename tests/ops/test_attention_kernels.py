"""Which CUDA kernel a shape gets, without a device: a listed head size and format that has no fast one fails here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvx
from kvx.cli.main import app
from kvx.ops import backend as backends
from kvx.ops.attention.kernels import (
    HEAD_SIZES,
    MOST_DIMS,
    MOST_PREFILL_DIMS,
    MOST_SMALL_DIMS,
    QUERIES,
    SMALL,
    attention_kernel,
    listed_kernels,
)

NATIVE = Path(__file__).resolve().parents[2] / "native" / "attention"
COARSE = ("", "_per_head", "_per_block", "_per_block_head", "_per_token_head")
FAST = ["bf16", "f16", *(f"{e}{s}" for e in ("fp8_e4m3", "int8") for s in COARSE), "fp8_e5m2", "fp8_e5m2_per_head"]
# SMALL ones have a fast decode kernel, of rows of up to 128. What runs on the general kernel: a format that gets a fast one moves
# up, and one that loses it fails.
GENERAL = {
    "f32": "f32", "int8_per_token_head_f16": "f16",
    "int8_per_token_head_inline": "16 bytes", "fp8_e4m3_per_token_head_inline": "16 bytes",
    "fp8_e5m2_per_token_head_inline": "16 bytes", "int4_per_token_head_inline": "int4", "fp8_e4m3_per_128_inline": "16 bytes",
    "fp8_e5m2_per_block": "e5m2", "fp8_e5m2_per_block_head": "e5m2", "fp8_e5m2_per_token_head": "e5m2",
}  # fmt: skip


def spec(fmt: str, dim: int = 128, v_dim: int = 0, layout: str = kvx.NHD) -> kvx.CacheSpec:
    return kvx.CacheSpec(4, 16, 2, dim, v_head_dim=v_dim, format=fmt, layout=layout)


@pytest.mark.parametrize("fmt", FAST)
@pytest.mark.parametrize(("dim", "v_dim"), HEAD_SIZES)
def test_listed_head_sizes_and_formats_decode_fast(dim, v_dim, fmt):
    for layout in (kvx.NHD, kvx.HND, "block token head (kv dim)"):
        kernel = attention_kernel(spec(fmt, dim, v_dim, layout))
        assert kernel.is_fast, f"{fmt} of {dim}/{v_dim or dim}: {kernel}"


@pytest.mark.parametrize("fmt", FAST)
@pytest.mark.parametrize(("dim", "v_dim"), HEAD_SIZES)
def test_listed_head_sizes_and_formats_prefill_fast_on_hopper(dim, v_dim, fmt):
    kernel = attention_kernel(spec(fmt, dim, v_dim), "prefill")
    assert kernel.is_fast == (dim <= 256 or fmt in ("bf16", "f16")), str(kernel)
    assert attention_kernel(spec(fmt, dim, v_dim), "prefill", arch=80).name == "general"


@pytest.mark.parametrize("fmt", SMALL)
def test_small_elements_and_scales_along_rows_decode_fast(fmt):
    for layout in (kvx.NHD, kvx.HND, "block token head (kv dim)"):
        for dim in (32, 64, 96, 128):
            for queries in ("bf16", "f16"):
                assert attention_kernel(spec(fmt, dim, layout=layout), queries=queries).is_fast
    assert "over 128" in attention_kernel(spec(fmt, 256)).why
    assert "in f32" in attention_kernel(spec(fmt), queries="f32").why
    assert attention_kernel(spec(fmt), "prefill").name == "general"


def is_promised(fmt: str, dim: int, v_dim: int, kind: str, queries: str) -> bool:
    """Which combinations of a listed head size, a format and a type of queries have a fast kernel on Hopper. One that loses it
    fails; one that gets it is written down here."""
    most = max(dim, v_dim)
    if queries == "f32" or fmt in GENERAL:
        return False
    if fmt == "fp8_e4m3_per_128":
        return most == 128
    if fmt in SMALL:
        return kind == "decode" and most <= 128 and dim % 32 == 0
    if kind == "decode" or fmt == queries:
        return True
    return most <= 256 and (fmt, queries) != ("bf16", "f16")


def test_listed_combinations_have_the_kernels_that_are_promised():
    found = listed_kernels()
    assert {(x.head_dim, x.v_head_dim) for x in found} == set(HEAD_SIZES)
    assert {x.format for x in found} == {name for name, f in kvx.FORMATS.items() if not f.element.is_moved_only}
    assert {x.queries for x in found} == set(QUERIES)
    for x in found:
        for kernel in (x.decode, x.prefill):
            promised = is_promised(x.format, x.head_dim, x.v_head_dim, kernel.kind, x.queries)
            assert kernel.is_fast == promised, (
                f"{x.format} of {x.head_dim}/{x.v_head_dim}, {x.queries} queries, {kernel.kind}: {kernel}"
            )
            assert kernel.name in ("fast", "general"), "the kernel of last resort is for no listed size"
            assert kernel.is_fast or kernel.why
        assert "% of read" in x.decode.share


def test_every_format_is_listed():
    known = {name for name, f in kvx.FORMATS.items() if not f.element.is_moved_only}
    at_128 = {"fp8_e4m3_per_128"}  # one scale a row there
    assert known == {*FAST, *SMALL, *GENERAL, *at_128}
    assert attention_kernel(spec("fp8_e4m3_per_128")).is_fast
    assert "128 elements" in attention_kernel(spec("fp8_e4m3_per_128", 256)).why


@pytest.mark.parametrize("fmt", GENERAL)
def test_what_is_not_fast_says_why(fmt):
    kernel = attention_kernel(spec(fmt))
    assert (kernel.name, kernel.kind) == ("general", "decode")
    assert GENERAL[fmt] in kernel.why
    assert "% of read" in str(kernel)


@pytest.mark.parametrize(
    ("of", "queries", "why"),
    [
        (spec("f16"), "f32", "queries in f32"),
        (spec("bf16", 100), "", "no multiples of 8"),
        (spec("int8", 72), "", "no multiples of 16"),
        (spec("nvfp4", 80), "", "no multiples of 32"),
        (spec("int4_per_token_head", 48), "", "no multiples of 32"),
        (kvx.CacheSpec(4, 16, 2, 128, format="nvfp4", v_format="mxfp4"), "", "elements are e2m1"),
        (spec("bf16", layout="kv | block head dim/x token dim%x"), "", "not contiguous"),
        (spec("bf16", 576), "", "over 512"),
        (kvx.CacheSpec(4, 16, 2, 128, format="fp8_e4m3", v_format="int8"), "", "K is fp8_e4m3 and V int8"),
    ],
)
def test_shapes_that_are_not_fast_say_why(of, queries, why):
    kernel = attention_kernel(of, queries=queries)
    assert why in kernel.why
    assert kernel.name == ("row" if of.head_dim > 512 else "general")


def test_f16_caches_take_bf16_queries():
    assert attention_kernel(spec("f16", 512), queries="bf16").is_fast
    assert attention_kernel(spec("f16", 256), "prefill", queries="bf16").is_fast
    assert not attention_kernel(spec("f16", 512), "prefill", queries="bf16").is_fast


def test_bf16_caches_take_f16_queries_in_decode():
    for dim in (64, 128, 256, 512):
        assert attention_kernel(spec("bf16", dim), queries="f16").is_fast
    assert "bf16 cache under f16" in attention_kernel(spec("bf16"), "prefill", queries="f16").why


def test_the_table_is_that_of_the_sources():
    """Limits stand in the sources too: who moves one there moves it here."""

    def number(file: str, name: str) -> int:
        return int(re.search(rf"\b{name} = (\d+)", (NATIVE / file).read_text())[1])

    assert number("decode/table.cuh", "kMostWideDims") == MOST_DIMS
    assert number("prefill/table.cuh", "kMostSplitPrefillDims") == MOST_DIMS
    assert number("prefill/table.cuh", "kMostWidePrefillDims") == MOST_PREFILL_DIMS
    assert number("decode/table.cuh", "kMostNarrowDims") == MOST_SMALL_DIMS
    assert number("any/any.cuh", "kMostAnyDims") == MOST_DIMS


def test_wrong_questions():
    with pytest.raises(kvx.BadArgument, match="decode or prefill"):
        attention_kernel(spec("bf16"), "mixed")
    with pytest.raises(kvx.BadArgument, match="bf16, f16, f32"):
        attention_kernel(spec("bf16"), queries="int8")


def test_support_says_which_kernel(monkeypatch):
    monkeypatch.setattr(backends, "reason_missing", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "the fast decode kernel" in str(kvx.supports("attention_decode", spec("bf16"), "cuda"))
    answer = kvx.supports("attention_varlen", spec("nvfp4"), "cuda")
    assert answer
    assert [k.name for k in answer.kernels] == ["fast", "general"]
    assert "elements are e2m1" in str(answer)
    assert kvx.supports("gather", spec("nvfp4"), "cuda").kernels == ()


def test_inspect_support_lists_kernels():
    facts = json.loads(CliRunner().invoke(app, ["inspect", "--support", "--json"]).stdout)
    rows = {row["format"]: row for row in facts["attention on cuda"]}
    assert rows["bf16"]["decode"].startswith("the fast decode kernel")
    assert "general kernel" in rows["mxfp4"]["prefill"]
    of = {(x["format"], x["queries"], x["head_dim"], x["v_head_dim"]): x for x in facts["attention on cuda by head size"]}
    assert of["bf16", "bf16", 192, 128]["prefill"] == "the fast prefill kernel"
    assert of["bf16", "f16", 256, 256]["prefill"].startswith("the general kernel: a bf16 cache under f16 queries")
    assert of["fp8_e4m3", "f32", 64, 64]["decode"].endswith("queries in f32")


def test_inspect_support_shows_kernels_by_head_size(monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    shown = CliRunner().invoke(app, ["inspect", "--support"]).stdout
    rows = {cells[1]: cells[2:4] for line in shown.splitlines() if len(cells := [c.strip() for c in line.split("│")]) == 5}
    assert rows["bf16 (bf16), f16 (f16)"] == ["all", "all"]
    assert rows["bf16 (f16)"] == ["all", "none"]
    assert rows["fp8_e4m3_per_128 (bf16 f16)"] == ["128", "128"]
