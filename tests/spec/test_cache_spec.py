"""CacheSpec: every rule refuses with the field and its value; sizes and scale shapes by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest

import kvx
from kvx.spec import validate

BASE = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_dim": 64}
FUSED = "block token head (kv dim)"
AREAS = "block head kv[K: token dim; V: dim token]"
STACKED = "block kv token head dim"
OLD_VLLM = "kv[K: | block head dim/x token dim%x; V: | block head dim token]"
AMX = "layer | block head kv[K: token/16 dim/2 token%16 dim%2; V: dim/16 token/2 dim%16 token%2]"
LIMIT = 2**30


def make(**changes: object) -> kvx.CacheSpec:
    return kvx.CacheSpec(**{**BASE, **changes})


def unchecked(**changes: object) -> kvx.CacheSpec:
    """A spec whose rules have not run, so that a rule can be asked alone."""
    spec = object.__new__(kvx.CacheSpec)
    defaults = {f.name: f.default for f in dataclasses.fields(kvx.CacheSpec) if f.init}
    for name, value in {**defaults, **BASE, **changes}.items():
        object.__setattr__(spec, name, value)
    return spec


@dataclass(frozen=True)
class Broken:
    rule: str
    message: str
    changes: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.rule, *(f"{n}={v}".replace(" ", "_") for n, v in self.changes.items())])


def broken(rule: str, message: str, **changes: object) -> Broken:
    return Broken(rule, message, changes)


BROKEN = [
    *(
        broken("fields_are_ints", f"{name} is {value!r}; it must be an int.", **{name: value})
        for name in (
            *("num_blocks", "block_size", "num_kv_heads", "head_dim", "v_head_dim"),
            *("num_layers", "layer_start", "head_start", "block_bytes"),
        )
        for value in (16.0, "16", None, True)
    ),
    *(broken("geometry_is_positive", f"num_blocks is {value}; it must be 1 or more.", num_blocks=value) for value in (0, -1)),
    *(
        broken("geometry_is_positive", f"{name} is {value}; it must be 1 or more and under 1073741824.", **{name: value})
        for name in ("block_size", "num_kv_heads", "head_dim", "num_layers")
        for value in (0, -3, LIMIT)
    ),
    *(
        broken("geometry_is_positive", f"{name} is {value}; it must be 0 or more and under 1073741824.", **{name: value})
        for name in ("layer_start", "head_start")
        for value in (-1, LIMIT)
    ),
    *(
        broken("geometry_is_positive", f"v_head_dim is {value}; it must be 1 or more, or 0 for head_dim.", v_head_dim=value)
        for value in (-1, LIMIT)
    ),
    broken(
        "formats_exist",
        'format "int4" does not exist. Similar names: int4_per_token_head, int4_per_token_head_inline, int4_per_group. '
        "`kvx inspect --formats` explains each.",
        format="int4",
    ),
    broken(
        "formats_exist",
        'format "nvfp5" does not exist. Similar names: nvfp4. `kvx inspect --formats` explains each.',
        v_format="nvfp5",
    ),
    broken(
        "formats_exist",
        f'format "q8_0" does not exist. Known: {", ".join(kvx.FORMATS)}. `kvx inspect --formats` explains each.',
        format="q8_0",
    ),
    broken(
        "layout_reads",
        'layout: unknown axis "page"\n'
        "  kv | page token head dim\n"
        "       ^^^^\n"
        "  Axes are layer block kv token head dim; `dim/8 token dim%8` splits, `( )` fuses, `|` ends an allocation.",
        layout="kv | page token head dim",
    ),
    broken(
        "layout_reads",
        "num_layers is 2 and layout 'kv | block token head dim' has no layer axis. Write `layer` where it stands.",
        num_layers=2,
    ),
    broken(
        "layout_reads",
        "layout 'block plane[conv: channel tap]' names the planes conv; a CacheSpec has K and V. Write `kv`.",
        layout="block plane[conv: channel tap]",
    ),
    broken(
        "splits_divide",
        f"block_size 24 is not a multiple of the 16 that layout {AMX!r} splits token by.",
        block_size=24,
        layout=AMX,
    ),
    broken(
        "splits_divide",
        "block_size 12 is not a multiple of the 8 that layout 'kv | block head token/x dim token%x' splits token by.",
        block_size=12,
        layout="kv | block head token/x dim token%x",
    ),
    broken(
        "splits_divide",
        "num_kv_heads 6 is not a multiple of the 4 that layout 'block head/4 kv token head%4 dim' splits head by.",
        num_kv_heads=6,
        layout="block head/4 kv token head%4 dim",
    ),
    broken(
        "rows_are_whole_bytes",
        "k head_dim 33 is odd, and int4_per_token_head stores two elements a byte.",
        head_dim=33,
        format="int4_per_token_head",
    ),
    broken(
        "rows_are_whole_bytes",
        "v head_dim 15 is odd, and nvfp4 stores two elements a byte.",
        v_head_dim=15,
        v_format="nvfp4",
    ),
    broken("groups_divide_dim", "k head_dim 24 is not a multiple of nvfp4's group of 16.", head_dim=24, format="nvfp4"),
    broken(
        "groups_divide_dim",
        "v head_dim 48 is not a multiple of mxfp8's group of 32.",
        v_head_dim=48,
        v_format="mxfp8",
    ),
    broken(
        "packs_divide_dim",
        "k head_dim 60 is not a multiple of the layout's pack of 8.",
        head_dim=60,
        layout=kvx.hnd_packed(),
    ),
    broken(
        "packs_divide_dim",
        "v head_dim 24 is not a multiple of the layout's pack of 16.",
        v_head_dim=24,
        v_format="fp8_e4m3",
        layout=kvx.hnd_packed(),
    ),
    broken(
        "packs_divide_dim",
        "the layout's pack of 1 cuts a byte of mxfp4 in two.",
        format="mxfp4",
        layout=kvx.hnd_packed(1),
    ),
    broken(
        "packs_divide_dim",
        "int8_per_token_head_inline keeps its scales behind whole rows; layout 'kv | block head dim/8 token dim%8' splits them.",
        format="int8_per_token_head_inline",
        layout=kvx.hnd_packed(8),
    ),
    broken(
        "bytes_of_a_row_are_adjacent",
        "k format int8_per_token_head_inline keeps its scales behind the row, so dim must be the last axis; "
        "layout 'kv | block head dim token' ends otherwise.",
        format="int8_per_token_head_inline",
        layout="kv | block head dim token",
    ),
    broken(
        "bytes_of_a_row_are_adjacent",
        f"v format mxfp4 stores two elements a byte, so dim must be the last axis; layout {OLD_VLLM!r} ends otherwise.",
        v_format="mxfp4",
        layout=OLD_VLLM,
    ),
    broken(
        "shared_tensors_share_a_type",
        f"layout {FUSED!r} puts K and V in one tensor; format bf16 and v_format f16 differ in type.",
        v_format="f16",
        layout=FUSED,
    ),
    broken(
        "shared_tensors_share_a_type",
        f"layout {STACKED!r} puts K and V in one tensor; format fp8_e4m3 and v_format bf16 differ in type.",
        format="fp8_e4m3",
        v_format="bf16",
        layout=STACKED,
    ),
    broken(
        "shared_tensors_share_a_type",
        f"layout {AREAS!r} puts K and V in one tensor of bytes, since int8_per_token_head_inline and bf16 differ; "
        "dim must be whole and the last axis there.",
        format="int8_per_token_head_inline",
        v_format="bf16",
        layout=AREAS,
    ),
    broken(
        "inline_scales_are_aligned",
        "K rows of 3 bytes in cells of 35 leave bf16 of v unaligned.",
        head_dim=6,
        v_head_dim=16,
        format="int4_per_token_head",
        v_format="bf16",
        layout=FUSED,
    ),
    broken("names_are_strings", "layout is 5; it must be a string.", layout=5),
    broken("names_are_strings", "v_format is None; it must be a string.", v_format=None),
    broken("names_are_strings", "model is 70; it must be a string.", model=70),
    broken(
        "shared_tensors_have_one_row_size",
        f"layout {STACKED!r} gives K and V rows of one size; K's has 128 units and V's 32. "
        "Fuse them, `(kv dim)`, or keep them apart, `kv | ...`.",
        layout=STACKED,
        head_dim=128,
        v_head_dim=32,
    ),
    broken(
        "inline_scales_are_aligned",
        "k rows of 6 int8 leave int8_per_token_head_inline's inline scale unaligned.",
        head_dim=6,
        format="int8_per_token_head_inline",
    ),
    broken(
        "inline_scales_are_aligned",
        "v rows of 12 int4 leave int4_per_token_head_inline's inline scale unaligned.",
        v_head_dim=12,
        v_format="int4_per_token_head_inline",
    ),
    broken("geometry_is_positive", "block_bytes is -1; it must be 0 or more.", block_bytes=-1),
    broken(
        "padding_holds_a_block",
        "block_bytes is 8192 and layout '(block token) head (kv dim)' has no blocks to pad: right of `|`, block stands alone with "
        "nothing but layer outside it. Set 0.",
        layout="(block token) head (kv dim)",
        block_bytes=8192,
    ),
    broken(
        "padding_holds_a_block",
        "block_bytes is 8190; a block of this cache has 8192. Set 0 where blocks are not padded.",
        layout=FUSED,
        block_bytes=8190,
    ),
    broken("padding_holds_a_block", "block_bytes is 8193; it must be a multiple of the 2 bytes of bf16.", block_bytes=8193),
    broken(
        "cache_fits_addresses",
        "the cache would have 1152921504606846976 bytes; addresses end at 2**60.",
        num_blocks=2**60 // (16 * 512),
    ),
    broken(
        "allocations_are_few",
        "layout 'layer kv | block token head dim' makes 4,194,306 allocations; at most 4,194,304. "
        "Fewer axes left of `|` make fewer.",
        layout="layer kv | block token head dim",
        num_layers=2**21 + 1,
    ),
    broken("fields_are_ints", "num_blocks is a number of 71 bits; addresses end at 2**60.", num_blocks=2**70),
    broken("names_are_strings", "model has 5,000 characters; it has at most 4,096.", model="m" * 5000),
    broken("names_are_strings", "model is '\\ud800', with half a character; it must be text that UTF-8 can hold.", model="\ud800"),
]


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_a_broken_rule_is_refused_with_field_and_value(case):
    with pytest.raises(kvx.BadArgument) as refused:
        make(**case.changes)
    assert str(refused.value).removeprefix("CacheSpec: ") == case.message


@pytest.mark.parametrize("case", BROKEN, ids=str)
def test_the_first_rule_to_break_is_the_one_named(case):
    spec = unchecked(**case.changes)
    for rule in validate.RULES:
        try:
            sentence = rule(spec)
        except kvx.BadArgument as error:
            sentence = str(error)
        if sentence:
            assert (rule.__name__, sentence) == (case.rule, case.message)
            return
    pytest.fail("no rule broke")


def test_every_rule_has_a_case():
    assert {case.rule for case in BROKEN} == {rule.__name__ for rule in validate.RULES}


@pytest.mark.parametrize(
    "changes",
    [
        {"num_blocks": 2**60 // (16 * 512) - 1},
        {"block_size": 1, "num_kv_heads": 1, "head_dim": 1, "num_blocks": 1},
        {"head_dim": LIMIT - 1},
        {"head_dim": 33, "format": "int8_per_token_head"},
        {"head_dim": 8, "format": "int4_per_token_head_inline"},
        {"layout": kvx.hnd_packed(2), "format": "mxfp4"},
        {"layout": OLD_VLLM, "format": "mxfp4", "v_format": "mxfp8"},
        {"layout": "kv | block head dim token", "format": "int8_per_token_head"},
        {"v_format": "f16"},
        {"layout": AMX, "num_layers": validate.MOST_ALLOCATIONS, "layer_start": LIMIT - 1, "head_start": LIMIT - 1},
        {"layout": "layer | block head kv[K: dim token; V: token dim]", "v_head_dim": 32},
        {"layout": "layer | block token head dim", "num_kv_heads": 1, "head_dim": 576, "num_layers": 61},
        {"layout": FUSED, "format": "fp8_e4m3", "v_format": "nvfp4"},
        {"layout": FUSED, "format": "int8_per_token_head_inline", "v_format": "fp8_e5m2"},
    ],
    ids=str,
)
def test_just_inside_the_rules_is_a_spec(changes):
    spec = make(**changes)
    assert {name: getattr(spec, name) for name in changes} == changes


def test_layout_errors_are_layout_errors():
    with pytest.raises(kvx.LayoutError):
        make(layout="kv | block token head")


GAPS = [
    pytest.param({"layout": 5}, id="layout_not_a_string"),
    pytest.param({"layout": None}, id="layout_none"),
    pytest.param({"format": 5}, id="format_not_a_string"),
    pytest.param({"format": ["bf16"]}, id="format_unhashable"),
    pytest.param({"v_format": None}, id="v_format_none"),
    pytest.param({"layout": "kv | block head dim/00 token dim%00"}, id="split_by_00"),
    pytest.param({"layout": STACKED, "v_head_dim": 32}, id="one_tensor_two_dims"),
    pytest.param({"layout": STACKED, "format": "fp8_e4m3", "v_format": "nvfp4"}, id="one_tensor_two_row_sizes"),
    pytest.param({"layout": "(kv head) block token dim", "v_head_dim": 32}, id="kv_head_two_dims"),
    pytest.param({"layout": "block token (kv head dim)", "v_head_dim": 32}, id="kv_head_dim_two_dims"),
    pytest.param(
        {"layout": FUSED, "head_dim": 6, "format": "int8", "v_head_dim": 8, "v_format": "int8_per_token_head_inline"},
        id="inline_scale_unaligned_behind_k",
    ),
    pytest.param(
        {"layout": FUSED, "head_dim": 8, "format": "int8_per_token_head_inline", "v_head_dim": 6, "v_format": "int8"},
        id="inline_scale_unaligned_in_the_second_cell",
    ),
]


@pytest.mark.parametrize("changes", GAPS)
def test_what_no_backend_can_serve_is_refused_when_made(changes):
    with pytest.raises(kvx.BadArgument):
        make(**changes)


def test_frozen_hashable_equal():
    spec, same = make(), make()
    assert spec.planes  # cached on one of the two: equality and hash must not see it
    assert spec == same
    assert hash(spec) == hash(same)
    assert {spec: "kept"}[same] == "kept"
    for f in dataclasses.fields(spec):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(spec, f.name, getattr(spec, f.name))


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 5},
        {"block_size": 8},
        {"num_kv_heads": 3},
        {"head_dim": 128},
        {"layout": kvx.HND},
        {"format": "f16"},
        {"v_head_dim": 32},
        {"v_format": "f32"},
        {"layer_start": 1},
        {"head_start": 1},
        {"model": "acme/kv-70b"},
    ],
    ids=str,
)
def test_every_field_tells_specs_apart(change):
    assert make(**change) != make()
    assert len({make(**change), make(), make(**change)}) == 2


def test_num_layers_tells_specs_apart():
    assert make(layout=f"layer {kvx.NHD}", num_layers=2) != make(layout=f"layer {kvx.NHD}")


def test_defaults():
    spec = make()
    assert (spec.layout, spec.format, spec.v_head_dim, spec.v_format) == ("kv | block token head dim", "bf16", 0, "")
    assert (spec.num_layers, spec.layer_start, spec.head_start, spec.model) == (1, 0, 0, "")
    assert spec.num_slots == 64


def test_every_layer_and_each_plane_is_counted():
    spec = make(layout=f"layer {kvx.NHD}", num_layers=3)
    assert (spec.num_planes, spec.token_bytes, spec.cache_bytes) == (2, 512, 3 * 64 * 512)
    latent = make(layout="layer | block token head dim", num_kv_heads=1, head_dim=576, num_layers=3)
    assert (latent.num_planes, latent.token_bytes, latent.cache_bytes) == (1, 1152, 3 * 64 * 1152)


@pytest.mark.parametrize(
    ("heads", "tp_size", "want"),
    [
        (8, 1, [(8, 0)]),
        (8, 2, [(4, 0), (4, 4)]),
        (8, 8, [(1, n) for n in range(8)]),
        (2, 4, [(1, 0), (1, 0), (1, 1), (1, 1)]),
        (6, 3, [(2, 0), (2, 2), (2, 4)]),
    ],
)
def test_shards_of_a_spec(heads, tp_size, want):
    """(heads, first head) of each rank; everything else stays."""
    spec = make(num_kv_heads=heads, head_start=16, layer_start=3, layout=f"layer {kvx.NHD}", num_layers=2)
    shards = [spec.shard(tp_size, rank) for rank in range(tp_size)]
    assert [(s.num_kv_heads, s.head_start - 16) for s in shards] == want
    assert {dataclasses.replace(s, num_kv_heads=heads, head_start=16) for s in shards} == {spec}


@pytest.mark.parametrize(
    ("tp_size", "tp_rank", "message"),
    [
        (2, 2, "shard(): tp_rank is 2 of tp_size 2."),
        (2, -1, "shard(): tp_rank is -1 of tp_size 2."),
        (0, 0, "shard(): tp_rank is 0 of tp_size 0."),
        (
            3,
            0,
            "shard(): 8 KV heads over 3 ranks: neither divides the other. "
            "Give each rank's spec its own num_kv_heads and head_start.",
        ),
    ],
)
def test_a_shard_that_cannot_be_is_refused(tp_size, tp_rank, message):
    with pytest.raises(kvx.BadArgument) as refused:
        make(num_kv_heads=8).shard(tp_size, tp_rank)
    assert str(refused.value) == message


# 4 blocks of 16 tokens, 2 heads, head_dim 64: bytes a token takes = 2 heads * (K row + V row), and the scales' shape.
SIZES = {
    "bf16": (2 * (128 + 128), None),
    "f16": (2 * (128 + 128), None),
    "f32": (2 * (256 + 256), None),
    "fp8_e4m3": (2 * (64 + 64), ()),
    "fp8_e5m2_per_head": (2 * (64 + 64), (2,)),
    "int8_per_block": (2 * (64 + 64), (4,)),
    "fp8_e4m3_per_block_head": (2 * (64 + 64), (4, 2)),
    "int8_per_token_head": (2 * (68 + 68), (4, 16, 2)),
    "int8_per_token_head_inline": (2 * (68 + 68), None),
    "int8_per_token_head_f16": (2 * (66 + 66), (4, 16, 2)),
    "int4_per_token_head": (2 * (36 + 36), (4, 16, 2)),
    "int4_per_token_head_inline": (2 * (36 + 36), None),
    "int4_per_group": (2 * (32 + 4 + 32 + 4), (4, 16, 2, 2)),
    "nvfp4": (2 * (32 + 4 + 32 + 4), (4, 16, 2, 4)),
    "mxfp4": (2 * (32 + 2 + 32 + 2), (4, 16, 2, 2)),
    "mxfp8": (2 * (64 + 2 + 64 + 2), (4, 16, 2, 2)),
}


@pytest.mark.parametrize("fmt", SIZES)
def test_sizes_by_hand(fmt):
    spec, (token_bytes, scale_shape) = make(format=fmt), SIZES[fmt]
    assert spec.token_bytes == token_bytes
    assert spec.cache_bytes == 64 * token_bytes
    assert spec.scale_shape(0) == spec.scale_shape(1) == scale_shape


def test_v_has_a_head_dim_and_a_format_of_its_own():
    spec = make(v_head_dim=128, v_format="int8_per_token_head")
    k, v = spec.planes
    assert (k.name, k.head_dim, k.format) == ("k", 64, kvx.FORMATS["bf16"])
    assert (v.name, v.head_dim, v.format) == ("v", 128, kvx.FORMATS["int8_per_token_head"])
    assert (spec.plane(0), spec.plane(1)) == (k, v)
    assert spec.token_bytes == 2 * (128 + 132)
    assert spec.cache_bytes == 64 * 520
    assert (spec.scale_shape(0), spec.scale_shape(1)) == (None, (4, 16, 2))


def test_groups_follow_each_planes_head_dim():
    spec = make(format="nvfp4", v_head_dim=32)
    assert (spec.scale_shape(0), spec.scale_shape(1)) == ((4, 16, 2, 4), (4, 16, 2, 2))
    assert spec.token_bytes == 2 * (32 + 4 + 16 + 2)


def test_v_is_as_k_unless_said():
    k, v = make(format="mxfp8").planes
    assert (v.head_dim, v.format) == (k.head_dim, k.format) == (64, kvx.FORMATS["mxfp8"])


@pytest.mark.parametrize(
    ("fmt", "unit_bytes", "row_units", "x"),
    [
        ("f32", 4, 64, 4),
        ("bf16", 2, 64, 8),
        ("fp8_e4m3", 1, 64, 16),
        ("int8_per_token_head_inline", 1, 68, 16),
        ("int4_per_token_head_inline", 1, 36, 32),
        ("nvfp4", 1, 32, 32),
    ],
)
def test_units_of_a_row(fmt, unit_bytes, row_units, x):
    plane = make(format=fmt).plane(0)
    assert (plane.unit_bytes, plane.row_units) == (unit_bytes, row_units)
    assert (plane.pack("x"), plane.pack("4")) == (x, 4)
