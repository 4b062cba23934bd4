"""Manifests: a spec goes through JSON unchanged, and what is not ours is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvx
from kvx.spec.from_manifest import require_same
from tests import cases

LAYOUT = "layer kv | block token head dim"
SPEC = kvx.CacheSpec(
    num_blocks=64,
    block_size=16,
    num_kv_heads=8,
    head_dim=128,
    layout=LAYOUT,
    format="nvfp4",
    v_head_dim=64,
    num_layers=4,
    layer_start=12,
    head_start=8,
    model="acme/kv-70b",
)
DIGEST = "abb13b1ed759a7b25a90bdf3cfc0e4c5"
TEXT = (
    f'{{"kvx_manifest": 1, "digest": "{DIGEST}", "num_blocks": 64, "block_size": 16, "num_kv_heads": 8, '
    f'"head_dim": 128, "layout": "{LAYOUT}", "format": "nvfp4", "v_head_dim": 64, "v_format": "", '
    '"num_layers": 4, "layer_start": 12, "head_start": 8, "model": "acme/kv-70b"}'
)
CHANGES = {
    "num_blocks": 65,
    "block_size": 32,
    "num_kv_heads": 4,
    "head_dim": 64,
    "layout": "layer kv | block head token dim",
    "format": "mxfp4",
    "v_head_dim": 0,
    "v_format": "nvfp4",
    "num_layers": 5,
    "layer_start": 0,
    "head_start": 16,
    "model": "",
    "block_bytes": 16384,
}
APART = [text for text in cases.LAYOUTS.values() if text.startswith("kv")]
WHOLE = [text for text in cases.LAYOUTS.values() if "%" not in text]


@st.composite
def specs(draw: st.DrawFn) -> kvx.CacheSpec:
    layout = draw(st.sampled_from(list(cases.LAYOUTS.values())))
    formats = list(kvx.FORMATS)
    if layout not in WHOLE:  # packs cut rows, and old vLLM's V ends in tokens: whole bytes without scales behind them
        formats = [f for f, row in kvx.FORMATS.items() if not row.is_inline and row.element.bits >= 8]
    has_layer = draw(st.booleans())
    dims = st.integers(1, 16).map(lambda n: 128 * n)
    v = {}
    if layout in APART:
        v = {"v_head_dim": draw(st.just(0) | dims), "v_format": draw(st.sampled_from(["", *formats]))}
    return kvx.CacheSpec(
        num_blocks=draw(st.integers(1, 2**28)),
        block_size=draw(st.integers(1, 2**10)),
        num_kv_heads=draw(st.integers(1, 256)),
        head_dim=draw(dims),
        layout=f"layer {layout}" if has_layer else layout,
        format=draw(st.sampled_from(formats)),
        num_layers=draw(st.integers(1, 3)) if has_layer else 1,
        layer_start=draw(st.integers(0, 128)),
        head_start=draw(st.integers(0, 128)),
        model=draw(st.text(max_size=20)),
        **v,
    )


@given(specs(), st.sampled_from([None, 0, 2]))
def test_round_trip(spec, indent):
    text = kvx.to_json(spec, indent=indent)
    again = kvx.from_json(text)
    assert again == spec
    assert kvx.to_json(again, indent=indent) == text
    assert json.loads(text)["digest"] == kvx.spec.digest(again)


@given(specs(), specs(), st.booleans())
def test_digests_are_equal_as_specs_are(a, b, is_same):
    b = replace(a) if is_same else b
    assert (kvx.spec.digest(a) == kvx.spec.digest(b)) == (a == b)


def test_golden_digest_and_text():
    """What other machines have on disk: when this changes, the manifest version does too."""
    assert kvx.spec.digest(SPEC) == DIGEST
    assert kvx.to_json(SPEC) == TEXT
    assert kvx.from_json(TEXT) == SPEC


def test_order_of_fields_does_not_matter():
    data = json.loads(TEXT)
    assert kvx.from_json(json.dumps(dict(reversed(data.items())))) == SPEC


def test_four_fields_by_hand_are_enough():
    text = '{"kvx_manifest": 1, "num_blocks": 2, "block_size": 4, "num_kv_heads": 1, "head_dim": 8}'
    assert kvx.from_json(text) == kvx.CacheSpec(2, 4, 1, 8)


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changed_after_writing_is_found(name):
    changed = json.dumps({**json.loads(TEXT), name: CHANGES[name]})
    made = kvx.spec.digest(kvx.CacheSpec(**{**{f: getattr(SPEC, f) for f in CHANGES}, name: CHANGES[name]}))
    with pytest.raises(kvx.Incompatible) as refused:
        kvx.from_json(changed)
    assert str(refused.value) == (
        f"from_json(): the digest is {DIGEST!r} and the fields make {made!r}; a field was changed after it was written."
    )
    assert made != DIGEST


def test_a_changed_digest_is_found():
    with pytest.raises(kvx.Incompatible, match=f"the digest is '0000' and the fields make '{DIGEST}'"):
        kvx.from_json(TEXT.replace(DIGEST, "0000"))


def test_an_unknown_field_is_named():
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.from_json(json.dumps({**json.loads(TEXT), "pages": 3}))
    assert str(refused.value) == (
        "from_json(): unknown field 'pages'; fields are num_blocks, block_size, num_kv_heads, head_dim, "
        "layout, format, v_head_dim, v_format, num_layers, layer_start, head_start, model, block_bytes."
    )


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "num_kv_heads", "head_dim"])
def test_a_missing_field_is_named(name):
    data = json.loads(TEXT)
    del data[name]
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.from_json(json.dumps(data))
    assert str(refused.value) == f"from_json(): field {name!r} is missing."


@pytest.mark.parametrize("version", [0, 2, "1", None, [1]], ids=str)
def test_another_version_is_incompatible(version):
    with pytest.raises(kvx.Incompatible) as refused:
        kvx.from_json(json.dumps({**json.loads(TEXT), "kvx_manifest": version}))
    assert str(refused.value) == f"from_json(): manifest version is {version!r}; this library reads 1."


def test_a_later_version_is_said_before_its_new_fields():
    with pytest.raises(kvx.Incompatible, match="manifest version is 2"):
        kvx.from_json(json.dumps({**json.loads(TEXT), "kvx_manifest": 2, "sharding": "tp 4"}))


@pytest.mark.parametrize("text", ["", "{", TEXT[:-1], "kvx", TEXT + "x"], ids=["empty", "open", "cut", "word", "tail"])
def test_not_json(text):
    with pytest.raises(kvx.BadArgument, match=r"^from_json\(\): not JSON: .* \(char \d+\)\.$"):
        kvx.from_json(text)


@pytest.mark.parametrize("text", ["{}", "[]", "1", "null", '"kvx_manifest"', '{"num_blocks": 4}'])
def test_not_a_manifest(text):
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.from_json(text)
    assert str(refused.value) == 'from_json(): no "kvx_manifest" field; this is not a KVX manifest.'


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("num_blocks", 0, "num_blocks is 0; it must be 1 or more."),
        ("num_blocks", "64", "num_blocks is '64'; it must be an int."),
        ("head_dim", 128.0, "head_dim is 128.0; it must be an int."),
        ("block_size", None, "block_size is None; it must be an int."),
        ("v_head_dim", 8, "v head_dim 8 is not a multiple of nvfp4's group of 16."),
    ],
)
def test_the_rules_of_a_spec_hold_for_what_is_read(name, value, sentence):
    with pytest.raises(kvx.BadArgument) as refused:
        kvx.from_json(json.dumps({**json.loads(TEXT), name: value}))
    assert str(refused.value) == f"CacheSpec: {sentence}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(TEXT.replace(f'"{LAYOUT}"', "5"), id="layout_number"),
        pytest.param(TEXT.replace('"nvfp4"', "5"), id="format_number"),
        pytest.param(TEXT.replace('"acme/kv-70b"', "5"), id="model_number"),
        pytest.param(TEXT.replace('"num_layers": 4', '"num_layers": 4.0'), id="layers_not_an_int"),
        pytest.param(TEXT.replace('"nvfp4"', '["nvfp4"]'), id="format_list"),
        pytest.param(TEXT.replace('"kvx_manifest": 1', '"kvx_manifest": true'), id="version_true"),
        pytest.param(TEXT.replace('"num_blocks": 64', '"num_blocks": ' + "9" * 5000), id="number_of_5000_digits"),
        pytest.param("[" * 100_000, id="nested_too_deep"),
    ],
)
def test_hostile_text_raises_ours(text):
    with pytest.raises(kvx.KvxError):
        kvx.from_json(text)


@pytest.mark.parametrize("name", CHANGES)
def test_require_same_names_the_differing_field(name):
    mine = {field: getattr(SPEC, field) for field in CHANGES}
    theirs = kvx.CacheSpec(**{**mine, name: CHANGES[name]})
    with pytest.raises(kvx.Incompatible) as refused:
        require_same(SPEC, theirs)
    assert str(refused.value) == f"manifests differ in {name}: {mine[name]!r} here, {CHANGES[name]!r} there."


def test_require_same_takes_equals():
    assert require_same(SPEC, kvx.from_json(kvx.to_json(SPEC))) is None


def test_require_same_names_the_first_of_several():
    with pytest.raises(kvx.Incompatible, match=r"^manifests differ in block_size: 16 here, 32 there\.$"):
        require_same(SPEC, replace(SPEC, block_size=32, head_dim=64, model=""))
