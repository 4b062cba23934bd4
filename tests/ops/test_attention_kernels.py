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
    LATENT_DIMS,
    MOST_DIMS,
    MOST_F32_ROWS,
    MOST_PREFILL_DIMS,
    QUERIES,
    SMALL,
    UNDER_F32,
    attention_kernel,
    listed_kernels,
)
from tests import cases

NATIVE = Path(__file__).resolve().parents[2] / "native" / "attention"
COARSE = ("", "_per_head", "_per_block", "_per_block_head", "_per_token_head", "_per_token_head_inline")
FAST = [
    "bf16", "f16", "int8_per_token_head_f16", "int4_per_token_head", "int4_per_token_head_inline",
    *(f"{e}{s}" for e in ("fp8_e4m3", "fp8_e5m2", "int8") for s in COARSE), *SMALL,
]  # fmt: skip
# What runs on the general kernel: a format that gets a fast one moves up, and one that loses it fails. fp8_e4m3_per_128 has one
# scale a row at head_dim 128, and several above that.
GENERAL = {"f32": "f32"}
PER_128 = ("fp8_e4m3_per_128", "fp8_e4m3_per_128_inline")


def spec(fmt: str, dim: int = 128, v_dim: int = 0, layout: str = kvx.NHD) -> kvx.CacheSpec:
    return kvx.CacheSpec(4, 16, 2, dim, v_head_dim=v_dim, format=fmt, layout=layout)


def has_groups(fmt: str, dim: int, v_dim: int) -> bool:
    """A row's elements are whole groups of those under one scale."""
    return all(d % max(kvx.FORMATS[fmt].group_size, 1) == 0 for d in (dim, v_dim or dim))


@pytest.mark.parametrize("fmt", FAST)
@pytest.mark.parametrize(("dim", "v_dim"), HEAD_SIZES)
def test_listed_head_sizes_and_formats_decode_fast(dim, v_dim, fmt):
    if not has_groups(fmt, dim, v_dim):
        return  # no cache can have it
    for layout in (kvx.NHD, kvx.HND, "block token head (kv dim)"):
        kernel = attention_kernel(spec(fmt, dim, v_dim, layout))
        assert kernel.is_fast, f"{fmt} of {dim}/{v_dim or dim}: {kernel}"


@pytest.mark.parametrize("fmt", FAST)
@pytest.mark.parametrize(("dim", "v_dim"), HEAD_SIZES)
def test_listed_head_sizes_and_formats_prefill_fast_on_hopper(dim, v_dim, fmt):
    if not has_groups(fmt, dim, v_dim):
        return  # no cache can have it
    kernel = attention_kernel(spec(fmt, dim, v_dim), "prefill")
    assert kernel.is_fast == (dim <= 256 or not (fmt in SMALL or fmt.startswith("int4"))), str(kernel)
    on_another = attention_kernel(spec(fmt, dim, v_dim), "prefill", arch=80)
    assert on_another.name == ("portable" if dim <= 256 else "general"), str(on_another)
    assert "Hopper's (sm_90)" in on_another.why


@pytest.mark.parametrize("fmt", SMALL)
def test_scales_along_rows(fmt):
    for layout in (kvx.NHD, kvx.HND, "block token head (kv dim)"):
        for dim in (32, 64, 96, 128, 256, 512):
            for queries in ("bf16", "f16"):
                assert attention_kernel(spec(fmt, dim, layout=layout), queries=queries).is_fast
    assert "under queries in f32" in attention_kernel(spec(fmt), queries="f32").why
    assert "over 256" in attention_kernel(spec(fmt, 512), "prefill").why
    assert "under f16 queries" in attention_kernel(spec(fmt), "prefill", queries="f16").why


def is_promised(fmt: str, dim: int, v_dim: int, kind: str, queries: str) -> bool:
    """Which combinations of a listed head size, a format and a type of queries have a fast kernel on Hopper. One that loses it
    fails; one that gets it is written down here."""
    most, element = max(dim, v_dim), kvx.FORMATS[fmt].element
    if fmt in GENERAL or (fmt in PER_128 and most > 128):
        return False
    if kind == "decode":
        return queries != "f32" or (element.name in UNDER_F32 and fmt not in SMALL)
    if queries == "f32" or (queries == "f16" and (fmt in SMALL or fmt == "bf16")):
        return False
    return most <= 256 or fmt == queries or (element.bits == 8 and fmt not in SMALL and queries == "bf16")


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
            assert kernel.name in ("fast", "portable", "general"), "the kernel of last resort is for no listed size"
            assert kernel.is_fast or kernel.why
        assert "% of read" in x.decode.share


def test_every_format_is_listed():
    known = {name for name, f in kvx.FORMATS.items() if not f.element.is_moved_only}
    assert known == {*FAST, *GENERAL, *PER_128}
    for fmt in PER_128:
        assert attention_kernel(spec(fmt)).is_fast
        assert "128 elements" in attention_kernel(spec(fmt, 256)).why


@pytest.mark.parametrize("fmt", GENERAL)
def test_what_is_not_fast_says_why(fmt):
    kernel = attention_kernel(spec(fmt))
    assert (kernel.name, kernel.kind) == ("general", "decode")
    assert GENERAL[fmt] in kernel.why
    assert "% of read" in str(kernel)


@pytest.mark.parametrize(
    ("of", "queries", "why"),
    [
        (spec("bf16", 33), "", "no multiples of 4 bytes"),
        (spec("int8", 70), "", "no multiples of 4 bytes"),
        (spec("int4_per_token_head", 100), "", "no multiples of 4 bytes"),
        (kvx.CacheSpec(4, 16, 2, 128, format="nvfp4", v_format="mxfp4"), "", "K is nvfp4 and V mxfp4"),
        (spec("bf16", layout="kv | block head dim/x token dim%x"), "", "not contiguous"),
        (spec("bf16", 576), "", "over 512"),
        (kvx.CacheSpec(4, 16, 2, 128, format="fp8_e4m3", v_format="int8"), "", "K is fp8_e4m3 and V int8"),
    ],
)
def test_shapes_that_are_not_fast_say_why(of, queries, why):
    kernel = attention_kernel(of, queries=queries)
    assert why in kernel.why
    assert kernel.name == ("row" if of.head_dim > 512 else "general")


@pytest.mark.parametrize("fmt", ["bf16", "f16", "fp8_e4m3", "int8_per_token_head", "int8_per_token_head_f16"])
def test_queries_in_f32_decode_fast_in_few_rows(fmt):
    kernel = attention_kernel(spec(fmt), queries="f32")
    assert kernel.is_fast
    assert "up to 8 query rows per KV head" in str(kernel)
    assert attention_kernel(spec(fmt), "prefill", queries="f32").name == "general"


def test_shares_of_two_formats_are_not_claimed():
    mixed = kvx.CacheSpec(4, 16, 2, 128, format="fp8_e4m3_per_token_head", v_format="fp8_e4m3")
    assert str(attention_kernel(mixed)) == "the fast decode kernel"
    assert str(attention_kernel(mixed, "prefill")) == "the fast prefill kernel"
    assert "of read" not in str(attention_kernel(mixed, queries="f32"))


def test_rows_at_multiples_of_four_bytes():
    for fmt, dim in (("bf16", 100), ("int8", 72), ("int4_per_token_head", 40), ("nvfp4", 80)):
        assert attention_kernel(spec(fmt, dim)).is_fast
    assert attention_kernel(spec("int8", 72), "prefill").is_fast
    assert "multiples of 8" in attention_kernel(spec("int8", 100), "prefill").why
    assert "multiples of 8" in attention_kernel(spec("bf16", 100), "prefill").why


def test_f16_caches_take_bf16_queries():
    assert attention_kernel(spec("f16", 512), queries="bf16").is_fast
    assert attention_kernel(spec("f16", 256), "prefill", queries="bf16").is_fast
    assert not attention_kernel(spec("f16", 512), "prefill", queries="bf16").is_fast


def test_bf16_caches_take_f16_queries_in_decode():
    for dim in (64, 128, 256, 512):
        assert attention_kernel(spec("bf16", dim), queries="f16").is_fast
    assert "bf16 cache under f16" in attention_kernel(spec("bf16"), "prefill", queries="f16").why


def test_prompts_that_hoppers_kernel_refuses():
    """Rows of up to 256 elements, each of which is one number of 16 bits."""

    def name(of: kvx.CacheSpec, queries: str = "") -> str:
        kernel = attention_kernel(of, "prefill", queries=queries)
        assert kernel.is_fast or kernel.why
        return kernel.name

    for fmt in ("bf16", "fp8_e4m3", "mxfp8", "mxfp4"):
        assert name(spec(fmt, 256), "f16") == ("fast" if fmt == "fp8_e4m3" else "portable")
        assert name(spec(fmt, 256), "f32") == "general"
        assert name(spec(fmt, 512), "f16") == "general"
    assert name(spec("nvfp4"), "f16") == "portable"  # four digits of e2m1 times a scale's four
    assert name(spec("int4_per_group"), "f16") == "general"  # of a scale in f16 there are too many
    assert name(spec("bf16", layout="kv | block head dim/x token dim%x")) == "portable"
    assert name(spec("bf16", 33)) == name(spec("int8", 100)) == name(spec("f16", 33), "bf16") == "portable"
    assert name(spec("fp8_e4m3_per_128", 256)) == "portable"
    assert name(kvx.CacheSpec(4, 16, 2, 128, format="bf16", v_format="fp8_e4m3")) == "portable"
    assert name(kvx.CacheSpec(4, 16, 2, 128, format="f16", v_format="fp8_e4m3")) == "general"
    assert name(spec("f32")) == "general"


def latent(fmt: str = "bf16", dim: int = 512, rotary: int = 64, layout: str = cases.LATENT, rotary_format: str = "bf16"):
    return kvx.CacheSpec(4, 64, 1, dim, v_head_dim=rotary, layout=layout, format=fmt, v_format=rotary_format)


RECORD = "fp8_e4m3_per_128_inline"


@pytest.mark.parametrize("layout", [cases.LATENT, kvx.NHD, kvx.HND])
def test_latents_of_bf16_are_fast_on_every_gpu(layout):
    assert attention_kernel(latent(layout=layout), "mla").is_fast
    for arch in (80, 89, 100, 120):
        elsewhere = attention_kernel(latent(layout=layout), "mla", arch=arch)
        assert elsewhere.name == "portable"
        assert f"this is sm_{arch}; more than 16 queries" in elsewhere.why


@pytest.mark.parametrize(
    ("of", "queries", "arch", "why"),
    [
        (latent(RECORD), "bf16", 80, "for records of 656 bytes is Hopper's (sm_90), this is sm_80"),
        (latent(RECORD, layout=kvx.NHD), "bf16", 90, f"bf16 queries over a latent in {RECORD}"),
        (latent("fp8_e4m3", layout=kvx.NHD), "bf16", 90, "over a latent in fp8_e4m3 and a rotary part in bf16; fast kernels take"),
        (latent(), "f16", 90, "f16 queries over a latent in bf16"),
        (latent("f16", rotary_format="f16"), "", 90, "f16 queries over a latent in f16 and a rotary part in f16"),
        (latent(dim=256), "", 90, "a latent of 256 and a rotary part of 64 elements"),
        (latent(rotary=32), "", 80, "a latent of 512 and a rotary part of 32 elements"),
    ],
)
def test_other_latents_say_why_they_are_slow(of, queries, arch, why):
    kernel = attention_kernel(of, "mla", queries=queries, arch=arch)
    assert (kernel.name, kernel.share) == ("row", "under 1 % of read")
    assert why in kernel.why


def test_records_are_fast_on_hopper():
    assert attention_kernel(latent(RECORD), "mla").is_fast


def test_the_table_is_that_of_the_sources():
    """Limits stand in the sources too: who moves one there moves it here."""

    def number(file: str, name: str) -> int:
        return int(re.search(rf"\b{name} = (\d+)", (NATIVE / file).read_text())[1])

    assert number("decode/table.cuh", "kMostWideDims") == MOST_DIMS
    assert number("prefill/table.cuh", "kMostSplitPrefillDims") == MOST_DIMS
    assert number("prefill/table.cuh", "kMostWidePrefillDims") == MOST_PREFILL_DIMS
    assert number("cuda/attention.cuh", "kMostRows") == 2 * MOST_F32_ROWS
    assert number("any/load.cuh", "kMostAnyDims") == MOST_DIMS
    latents = re.search(r"kLatentDim = (\d+), kRopeDim = (\d+)", (NATIVE / "attention.h").read_text())
    assert tuple(map(int, latents.groups())) == LATENT_DIMS
    assert number("any/table.cuh", "kMostPromptDims") == MOST_PREFILL_DIMS


def test_wrong_questions():
    with pytest.raises(kvx.BadArgument, match="decode, prefill or mla"):
        attention_kernel(spec("bf16"), "mixed")
    with pytest.raises(kvx.BadArgument, match="bf16, f16, f32"):
        attention_kernel(spec("bf16"), queries="int8")


def test_support_says_which_kernel(monkeypatch):
    monkeypatch.setattr(backends, "reason_missing", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "the fast decode kernel" in str(kvx.supports("attention_decode", spec("bf16"), "cuda"))
    answer = kvx.supports("attention_varlen", spec("nvfp4", 512), "cuda")
    assert answer
    assert [k.name for k in answer.kernels] == ["fast", "general"]
    assert [k.name for k in kvx.supports("attention_mla", latent(), "cuda").kernels] == ["fast"]
    assert "rows of 512 elements, over 256" in str(answer)
    assert kvx.supports("gather", spec("nvfp4"), "cuda").kernels == ()


def test_inspect_support_lists_kernels():
    facts = json.loads(CliRunner().invoke(app, ["inspect", "--support", "--json"]).stdout)
    rows = {row["format"]: row for row in facts["attention on cuda"]}
    assert rows["bf16"]["decode"].startswith("the fast decode kernel")
    assert rows["mxfp4"]["prefill"].startswith("the fast prefill kernel")
    assert "general kernel" in rows["f32"]["prefill"]
    of = {(x["format"], x["queries"], x["head_dim"], x["v_head_dim"]): x for x in facts["attention on cuda by head size"]}
    assert of["bf16", "bf16", 192, 128]["prefill"] == "the fast prefill kernel, 39 to 73 % of 790 TFLOP/s"
    assert of["bf16", "f16", 256, 256]["prefill"] == "the portable kernel: a bf16 cache under f16 queries"
    assert "up to 8 query rows" in of["fp8_e4m3", "f32", 64, 64]["decode"]
    assert of["fp8_e4m3", "f32", 64, 64]["prefill"].endswith("queries in f32")
    latents = {row["latent"]: row for row in facts["attention_mla on cuda"]}
    assert set(latents) == {"bf16", RECORD, "f16"}
    assert latents["bf16"]["hopper"].startswith("the fast mla kernel, 87 to 91 % of read")
    assert latents[RECORD]["hopper"].startswith("the fast mla kernel, 51 % of read")
    assert latents["bf16"]["other"].startswith("the portable kernel: ")
    assert "row kernel" in latents[RECORD]["other"]
    assert "row kernel" in latents["f16"]["hopper"]


def test_inspect_support_shows_kernels_by_head_size(monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")  # a row of the table on one line
    shown = CliRunner().invoke(app, ["inspect", "--support"]).stdout
    lines = [[c.strip() for c in line.split("│")[1:-1]] for line in shown.splitlines()]
    rows = {name: cells[1:] for cells in lines if len(cells) == 7 for name in cells[0].split(", ")}
    assert rows["bf16"] == ["all", "all", "all", "all", "none", "none"]  # decode under bf16, f16, f32; prefill
    assert rows["f16"] == ["all", "all", "all", "up to 256", "all", "none"]
    assert rows["fp8_e4m3_per_block"] == rows["int8_per_token_head_f16"] == ["all", "all", "all", "all", "up to 256", "none"]
    assert rows["fp8_e5m2_per_block"] == ["all", "all", "none", "all", "up to 256", "none"]
    assert rows["f32"] == ["none"] * 6
    assert rows["nvfp4"] == ["all", "all", "none", "up to 256", "none", "none"]
    assert rows["fp8_e4m3_per_128"] == ["up to 128", "up to 128", "up to 128", "up to 128", "up to 128", "none"]
