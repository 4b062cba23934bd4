"""The registry and the conformance vectors: what other projects read."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import zlib
from itertools import product

import jsonschema
import pytest
from typer.testing import CliRunner

from kvx.cli.main import app
from kvx.errors import KvxError
from kvx.layout import ENGINES, Layout
from kvx.layout.place import places
from kvx.layout.registry import registry, schema
from kvx.layout.state_rows import STATE_ROWS
from kvx.layout.vector_cases import SEED, random_layout
from kvx.layout.vectors import to_text, vectors
from kvx.spec import CacheSpec
from kvx.spec.formats import FORMATS


@pytest.fixture(scope="module")
def found():
    return registry()


@pytest.fixture(scope="module")
def given():
    return vectors()


def test_the_registry_is_of_its_schema(found):
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(json.dumps(found)), schema())


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("layout", ""),
        ("name", "vLLM 0.23"),
        ("formats", []),
        ("constraints", {}),
        ("other_names", [{"name": "NHD"}]),
        ("planes", ["q"]),
    ],
)
def test_the_schema_refuses_what_is_none(found, where, value):
    changed = json.loads(json.dumps(found))
    changed["engines"][3][where] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, schema())


def test_every_row_is_there(found):
    assert [row["name"] for row in found["engines"]] == list(ENGINES)
    assert [row["name"] for row in found["states"]] == list(STATE_ROWS)
    assert [row["name"] for row in found["formats"]] == list(FORMATS)
    for row in found["engines"]:
        assert (row["layout"], row["versions"]) == (ENGINES[row["name"]].layout, ENGINES[row["name"]].versions)


def row_of(found, name):
    return next(row for row in found["engines"] if row["name"] == name)


def test_other_names_are_those_of_the_engines(found):
    names = {(row["name"], one["project"]): one["name"] for row in found["engines"] for one in row["other_names"][::-1]}
    assert names["vllm.lbhnc", "vLLM"] == "LBHNC"
    assert names["vllm.0.26.nhd", "LMCache"] == "NL_X_NB_BS_NH_CS"
    assert names["sglang.nhd", "LMCache"] == "TWO_X_NL_X_NBBS_NH_HS"
    assert names["tensorrt_llm", "LMCache"] == "NB_NL_TWO_NH_BS_HS"
    assert names["lmcache.2ltd", "LMCache"] == "KV_2LTD"
    for row in found["engines"]:  # vLLM's five letters spell the layout
        for one in row["other_names"]:
            if one["project"] == "vLLM" and len(one["name"]) == 5:
                words = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "(kv dim)"}
                assert row["layout"] == " ".join(words[letter] for letter in one["name"])


def test_constraints_are_numbers_where_the_rule_is_one(found):
    rules = {name: row_of(found, name)["constraints"] for name in ENGINES}
    assert rules["vllm.0.23"]["block_size"] == {"text": "multiple of 16", "multiple_of": 16}
    assert rules["vllm.0.22.flashinfer_hnd"]["block_size"]["one_of"] == [16, 32, 64]
    assert rules["tensorrt_llm"]["block_size"]["power_of_two"]
    assert rules["vllm.mla"]["num_kv_heads"] == 1
    assert rules["tgi.paged"]["splits"] == {"dim": {"k": "x"}}


def test_formats_are_those_the_layout_can_hold(found):
    assert set(row_of(found, "vllm.lbnhc")["formats"]) == set(FORMATS)
    assert "int8_per_token_head_inline" not in row_of(found, "tgi.paged")["formats"]
    assert "bf16" in row_of(found, "tgi.paged")["formats"]


# ---- vectors


def test_vectors_are_of_every_row_and_format(given):
    names = [case["name"] for case in given["places"]]
    assert len(set(names)) == len(names)
    assert {name.split()[1] for name in names if name.startswith("engine ")} == set(ENGINES)
    assert {name.split()[1] for name in names if name.startswith("state ")} == set(STATE_ROWS)
    random_ones = [case for case in given["places"] if case["name"].startswith("random ")]
    assert len({case["layout"] for case in random_ones}) >= 300
    assert {plane["format"] for case in random_ones for plane in case["planes"]} == set(FORMATS)
    for what in ("(", "/", "kv[K: |", "plane[", "+1", "%x"):
        assert any(what in case["layout"] for case in random_ones), what
    assert any(case["block_bytes"] for case in random_ones)


def test_vectors_are_the_same_every_time(given):
    """Another process, with another hash of strings."""
    code = "import zlib; from kvx.layout.vectors import *; print(zlib.crc32(to_text(vectors()).encode()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert int(done.stdout) == zlib.crc32(to_text(given).encode())
    assert json.loads(to_text(given)) == json.loads(json.dumps(given))


@pytest.mark.parametrize("number", range(0, 60, 7))
def test_a_vector_is_what_locate_says_of_every_element(given, number):
    case = [case for case in given["places"] if "spec" in case][number]
    spec = CacheSpec(layout=case["layout"], block_bytes=case["block_bytes"], **case["spec"])
    for plane, place, want in zip(spec.planes, places(spec), case["planes"], strict=True):
        sizes = dict(want["axes"])
        bits, crc = plane.format.element.bits, 0
        points = {tuple(point): where for point, *where in want["elements"]}
        for point in product(*map(range, sizes.values())):
            index = dict(zip(sizes, point, strict=True))
            index["dim"] = index["dim"] * bits // (8 * plane.unit_bytes)
            buffer, byte = place.locate(**index)
            crc = zlib.crc32(buffer.to_bytes(8, "little") + byte.to_bytes(8, "little"), crc)
            if point in points:
                assert points[point][:2] == [buffer, byte]
        assert crc == want["crc32"]


def test_what_is_refused_is_refused_by_its_sentence(given):
    for case in given["refused"]:
        with pytest.raises(KvxError) as error:
            CacheSpec(layout=case["layout"], **case["spec"]) if "spec" in case else Layout.parse(case["layout"])
        assert str(error.value) == case["error"]
    assert len({case["error"].split("\n")[0] for case in given["refused"] if "spec" not in case}) > 40


def test_random_layouts_are_mostly_ones_that_can_be_read():
    r = random.Random(SEED)
    read = 0
    for _ in range(200):
        try:
            Layout.parse(random_layout(r))
            read += 1
        except KvxError:
            continue
    assert read > 120


# ---- the command


def run(*args: str) -> str:
    done = CliRunner().invoke(app, ["layouts", *args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_the_command_writes_each(tmp_path, given):
    assert json.loads(run("--schema")) == schema()
    some = json.loads(run("--json", "tgi"))
    assert [row["name"] for row in some["engines"]] == ["tgi.flashinfer", "tgi.flashdecoding", "tgi.paged"]
    path = tmp_path / "vectors.json"
    assert "places" in run("--vectors", str(path))
    assert path.read_text() == to_text(given)
    with pytest.raises(KvxError, match="three files"):
        run("--vectors", "--json")
