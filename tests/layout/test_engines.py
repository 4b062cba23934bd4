"""Every row's bytes equal goldens that others made: vLLM itself, and numpy from the engines' shapes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain, product
from math import lcm
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvx
from kvx.layout import ENGINES, EngineRow, Layout, engine
from kvx.layout.engine_row import ENGINE_NAMES
from kvx.layout.place import buffer_bytes, num_buffers, num_cache_buffers, places
from tests.golden import make_engines

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NUMPY = json.loads((GOLDEN / "engines.json").read_text())["cases"]
VLLM = json.loads((GOLDEN / "vllm_0_32_layouts.json").read_text())["cases"]
VLLM_CPU = json.loads((GOLDEN / "vllm_0_32_cpu.json").read_text())["cases"]
# Goldens of layouts that a row's notes spell and no row holds.
SPELLED = {"sglang.page_unified, 2 heads a group": "block head/2 layer kv token head%2 dim"}
SIZES = ("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim")


def everywhere(spec: kvx.CacheSpec) -> Iterator[tuple[int, ...]]:
    """(plane, layer, block, head, token, dim) of every unit."""
    for plane in range(spec.num_planes):
        sizes = (spec.num_layers, spec.num_blocks, spec.num_kv_heads, spec.block_size, spec.plane(plane).row_units)
        yield from ((plane, *index) for index in product(*map(range, sizes)))


def cache_bytes(spec: kvx.CacheSpec) -> tuple[int, ...]:
    """The layout's own buffers, without the scales behind them."""
    return buffer_bytes(spec)[: num_cache_buffers(spec)]


def fill(spec: kvx.CacheSpec, value: Callable[..., int]) -> list[list[int]]:
    """Buffers, a number for each unit. Fails where two units meet, where a unit is not aligned, and where a hole stays."""
    unit = spec.plane(0).unit_bytes
    buffers: list[list[int | None]] = [[None] * (size // unit) for size in cache_bytes(spec)]
    for plane, layer, block, head, token, dim in everywhere(spec):
        n, byte = places(spec)[plane].locate(layer=layer, block=block, token=token, head=head, dim=dim)
        assert byte % unit == 0
        assert buffers[n][byte // unit] is None, f"two units at byte {byte} of buffer {n}"
        buffers[n][byte // unit] = value(plane, layer, block, head, token, dim)
    assert all(x is not None for buffer in buffers for x in buffer), "a hole"
    return buffers  # type: ignore[return-value]


def running_index(spec: kvx.CacheSpec, planes: int) -> Callable[..., int]:
    def value(plane: int, layer: int, block: int, head: int, token: int, dim: int) -> int:
        index = ((layer * spec.num_blocks + block) * planes + plane) * spec.num_kv_heads + head
        return (index * spec.block_size + token) * spec.head_dim + dim

    return value


def filled(name: str, **sizes: int) -> list[list[int]]:
    spec = engine(name).spec(**sizes)
    return fill(spec, running_index(spec, 2))


@pytest.mark.parametrize("name", NUMPY)
def test_bytes_are_the_golden_ones(name):
    case = NUMPY[name]
    row = dataclasses.replace(engine(name.split(",")[0]), layout=SPELLED[name]) if name in SPELLED else engine(name)
    spec = row.spec(**{n: case[n] for n in SIZES}, v_head_dim=case.get("v_head_dim", 0))
    assert spec.num_planes == case["planes"]
    assert fill(spec, running_index(spec, case["planes"])) == case["buffers"]


def test_every_row_has_a_golden():
    assert set(NUMPY) - set(SPELLED) == set(ENGINES)


def test_goldens_are_what_their_script_makes():
    assert make_engines.text() == (GOLDEN / "engines.json").read_text()
    source = Path(make_engines.__file__).read_text()
    assert not re.search(r"^\s*(import|from) kvx", source, re.M), "goldens are made without what they check"


@pytest.mark.parametrize("case", VLLM, ids=lambda c: f"{c['layout']}-v{c['v_head_dim']}")
def test_named_layouts_are_as_vllm_makes_them(case):
    spec = engine(f"vllm.{case['layout'].lower()}").spec(
        num_layers=case["layers"],
        num_blocks=case["blocks"],
        block_size=case["tokens"],
        num_kv_heads=case["heads"],
        head_dim=case["head_dim"],
        format="f16",
        v_head_dim=case["v_head_dim"],
    )
    assert buffer_bytes(spec) == (case["allocation_bytes"],)
    assert fill(spec, running_index(spec, 2)) == [case["bytes"]]
    k, v = places(spec)
    block, head, token, dim = (stride * 2 for stride in case["view_strides_elements"])
    for place in (k, v):
        strides = {d.axis: d.stride for d in place.digits}
        assert strides == {"layer": case["layer_stride_bytes"], "block": block, "head": head, "token": token, "dim": dim}
    assert (k.offset, v.offset) == (0, case["head_dim"] * 2)
    assert case["block_stride_bytes"] == block


@pytest.mark.parametrize("fmt", ["bf16", "f32"])
@pytest.mark.parametrize(
    "case", VLLM_CPU, ids=lambda c: "-".join(str(c[n]) for n in ("row", "blocks", "heads", "tokens", "head_dim"))
)
def test_cpu_bytes_are_as_vllm_writes_them(case, fmt):
    spec = engine(case["row"]).spec(
        num_layers=1,
        num_blocks=case["blocks"],
        block_size=case["tokens"],
        num_kv_heads=case["heads"],
        head_dim=case["head_dim"],
        format=fmt,  # the order of elements is what vLLM's case gives; its width is ours
    )

    def value(plane: int, layer: int, block: int, head: int, token: int, dim: int) -> int:
        slot = block * case["tokens"] + token
        return (slot * case["heads"] + head) * case["head_dim"] + dim + 16384 * plane

    assert fill(spec, value) == [case["elements"]]


def test_vllms_own_goldens_cover_its_rows():
    assert {f"vllm.{case['layout'].lower()}" for case in VLLM} == {n for n, row in ENGINES.items() if row.versions == ">= 0.28"}
    assert {case["row"] for case in VLLM_CPU} == {"vllm.cpu", "vllm.cpu.amx", "vllm.cpu.arm"}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("sglang.page_unified", "dynamo.universal"),
        ("transformers.paged", "dynamo.operational.nhd"),
        ("tensorrt_llm", "dynamo.operational.hnd"),
        ("dynamo.block_stack.nhd", "dynamo.operational.nhd"),
        ("vllm.0.26.nhd", "vllm.lbnhc"),
        ("vllm.0.26.hnd", "vllm.lbhnc"),
        ("sglang.nhd", "sglang.layer_first"),
        ("flexkv.layerblock", "vllm.0.23"),
    ],
)
def test_engines_that_differ_only_in_allocations(a, b):
    """One row's buffers, end to end, are the other's."""
    sizes = dict(zip(SIZES, (2, 3, 4, 2, 8), strict=True))
    assert list(chain(*filled(a, **sizes))) == list(chain(*filled(b, **sizes)))


def multiple(row: EngineRow, name: str, fmt: str) -> int:
    """What the axis's size must be a multiple of."""
    spec, layout = kvx.CacheSpec(1, 1, 1, 8, format=fmt), Layout.parse(row.layout)
    factors = [plane.split_of(name) for plane in layout.planes.values()]
    return lcm(*(spec.plane(0).pack(f) if f else 1 for f in factors))


@st.composite
def specs(draw: st.DrawFn, row: EngineRow) -> kvx.CacheSpec:
    small, layout = st.integers(1, 3), Layout.parse(row.layout)
    is_whole = "%" not in row.layout and all(plane.order[-1].name == "dim" for plane in layout.planes.values())
    inline = ["int8_per_token_head_inline", "int4_per_token_head_inline"]  # scales stand behind whole rows
    fmt = draw(st.sampled_from(["bf16", "f32", "fp8_e4m3", *(inline if is_whole else [])]))
    dims = small.map(lambda n: n * (8 if fmt in inline else multiple(row, "dim", fmt)))
    may_differ = layout.num_buffers == 2 or layout.first.is_area or "(kv dim)" in row.layout
    return row.spec(
        num_layers=draw(small),
        num_blocks=draw(small),
        block_size=draw(small) * multiple(row, "token", fmt),
        num_kv_heads=row.num_kv_heads or draw(small) * multiple(row, "head", fmt),
        head_dim=draw(dims),
        format=fmt,
        v_head_dim=draw(dims) if may_differ else 0,
    )


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_no_two_elements_share_a_byte_and_no_byte_is_left(name, data):
    spec = data.draw(specs(ENGINES[name]))
    fill(spec, lambda *index: 0)
    rows = sum(plane.format.row_bytes(plane.head_dim) for plane in spec.planes)
    assert sum(cache_bytes(spec)) == spec.num_layers * spec.num_slots * spec.num_kv_heads * rows
    assert len(buffer_bytes(spec)) == num_buffers(spec)  # scales that stand apart come behind


@pytest.mark.parametrize("row", ENGINES.values(), ids=lambda row: row.name)
def test_a_row_is_in_words(row):
    assert re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", row.name)
    assert row.engine
    assert row.versions
    assert row.notes.endswith(".")
    assert Layout.parse(row.layout).has_layer
    assert ENGINES[row.name] is row is engine(row.name)
    assert bool(row.num_kv_heads) == ("MLA: " in row.notes)


def test_a_spec_of_a_row():
    spec = engine("vllm.0.23").spec(num_layers=2, num_blocks=3, block_size=16, num_kv_heads=8, head_dim=64, format="f16")
    assert spec == kvx.CacheSpec(3, 16, 8, 64, layout="layer | block kv token head dim", format="f16", num_layers=2)


def test_a_latent_row_has_one_head():
    sizes: dict[str, Any] = {"num_layers": 1, "num_blocks": 1, "block_size": 64, "head_dim": 576}
    assert engine("vllm.mla").spec(num_kv_heads=1, **sizes).num_planes == 1
    with pytest.raises(kvx.BadArgument) as refused:
        engine("vllm.mla").spec(num_kv_heads=8, **sizes)
    assert str(refused.value) == 'engine "vllm.mla": num_kv_heads is 8; a latent row belongs to no head. Give 1.'


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("vlm.0.23", "vllm.0.23, vllm.0.23.hnd, "),
        ("VLLM.0.2", "vllm.0.22.flash_attn, vllm.0.22.flash_attn.hnd, "),
        ("vlm", "vllm, "),
        ("page_head", "sglang.page_head. "),
        ("tgi", "tgi.flashinfer, tgi.flashdecoding, tgi.paged. "),
        ("dynamo.univers", "dynamo.universal, dynamo.universal.pp. "),
    ],
)
def test_a_wrong_name_names_those_near_it(name, near):
    with pytest.raises(kvx.BadArgument) as refused:
        engine(name)
    assert str(refused.value).startswith(f'engine "{name}" does not exist. Similar names: {near}')
    assert str(refused.value).endswith(f"`kvx layouts` lists all {len(ENGINES)}.")


@pytest.mark.parametrize("name", ["", "zzzz"])
def test_a_name_near_nothing(name):
    with pytest.raises(kvx.BadArgument) as refused:
        engine(name)
    assert str(refused.value) == f'engine "{name}" does not exist. `kvx layouts` lists all {len(ENGINES)}.'


def test_the_docs_print_every_row():
    def line(row: EngineRow) -> str:
        layout = row.layout.replace("|", "\\|")
        return f"| `{row.name}` | {row.engine} {row.versions} | `{layout}` | {row.block_size} | {row.dtypes} | {row.notes} |"

    text = (GOLDEN.parent.parent / "docs" / "layouts.md").read_text()
    table = text.split("| name | engine | layout | block size | types | notes |\n|---|---|---|---|---|---|\n")[1]
    assert table.splitlines() == [line(row) for row in ENGINES.values()]


def test_the_readme_counts_the_layouts_and_names_the_engines():
    text = (GOLDEN.parent.parent / "README.md").read_text()
    count, names = re.search(r"KVX knows (\d+) engine layouts .*? of ([^.]*(?:llama\.cpp)[^.]*)\.", text, re.S).groups()
    assert int(count) == len(ENGINES)
    assert not [name for name in ENGINE_NAMES.values() if name not in names]
    assert {row.engine for row in ENGINES.values()} == set(ENGINE_NAMES.values())


def test_the_docs_examples_are_layouts():
    text = (GOLDEN.parent.parent / "docs" / "layouts.md").read_text()
    examples = text.split("| string | what it says |\n|---|---|\n")[1].split("\n\n")[0].splitlines()
    assert len(examples) == 8
    for example in examples:
        Layout.parse(re.match(r"\| `(.*?)` \|", example).group(1).replace("\\|", "|"))
