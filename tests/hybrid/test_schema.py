"""Schemas: layers of each kind, entries and blocks by position, and bytes as the papers and the allocations have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import kvx
from kvx import BadArgument, Unsupported
from kvx.cache.hybrid import HybridSchema, LayerSchema

CSA = LayerSchema(4, overlap=True, bias=True, index_dim=128)
HCA = LayerSchema(128, bias=True)
SWA = LayerSchema()


def test_kinds():
    assert [layer.kind for layer in (CSA, HCA, SWA)] == ["CSA", "HCA", "SWA"]
    counts = {
        name: [layer.kind for layer in HybridSchema.of(f"DeepSeek-V4-{name.capitalize()}").layers] for name in ("flash", "pro")
    }
    assert [counts["flash"].count(k) for k in ("CSA", "HCA", "SWA")] == [21, 20, 2]
    assert [counts["pro"].count(k) for k in ("CSA", "HCA", "SWA")] == [30, 31, 0]
    assert counts["flash"][2] == counts["pro"][2] == "CSA"


def test_bytes_of_a_layer():
    assert CSA.block_bytes(128) == (32 * 584 + 32 * 68, 19008 + 32 * 68)
    assert HCA.block_bytes(128) == (584, 1152)
    assert SWA.block_bytes(128) == (0, 0)
    assert CSA.tail_floats() * 4 == 60 * 1024  # 48 KiB of the entry's, 12 of its key's
    assert HCA.tail_floats() * 4 == 6 * 1024
    assert LayerSchema(128, tail="ring").tail_floats() * 4 == 512 * 1024
    assert SWA.request_bytes() == (128 * 584, 74880 + 4 * 128)


@pytest.mark.parametrize(
    ("name", "token", "request_mib", "resume_mib"), [("flash", 3514.25, 4.41, 3.48), ("pro", 5031.4375, 6.29, 4.93)]
)
def test_totals_of_the_models(name, token, request_mib, resume_mib):
    schema = HybridSchema.of(f"DeepSeek-V4-{name.capitalize()}")
    assert schema.token_bytes[0] == token
    assert round(schema.request_bytes.payload / 2**20, 2) == request_mib
    assert round(schema.resume_bytes / 2**20, 2) == resume_mib
    size = kvx.size(f"DeepSeek-V4-{name.capitalize()}", format="fp8_ds_mla", state="tight", block_size=128)
    assert (size.token_bytes, size.fixed_bytes) == (token, schema.request_bytes.payload)


@pytest.mark.parametrize(("rows", "token"), [("index_nvfp4", 3535.25), ("index_fp8", 3850.25)])
def test_other_keys_of_the_indexer(rows, token):
    assert HybridSchema.of("DeepSeek-V4-Flash", index_rows=rows).token_bytes[0] == token


def test_bf16_rows_and_one_scale_an_entry():
    assert HybridSchema.of("DeepSeek-V4-Flash", entry_rows="bf16", index_rows="bf16").token_bytes[0] == 6880
    assert round(HybridSchema.of("DeepSeek-V4-Flash", entry_rows="fp8_entry", index_rows="index_nvfp4").token_bytes[0], 1) == 3513.6


def test_padding_costs_less_in_larger_blocks():
    shares = []
    for tokens in (128, 256, 512):
        payload, allocated = HybridSchema.of("DeepSeek-V4-Flash", block_tokens=tokens).token_bytes
        shares.append(allocated / payload)
    assert shares[0] > shares[1] > shares[2] > 1.0


def test_entries_and_blocks_by_position():
    """The token that closes a window sees the entry it closed."""
    assert [CSA.entries(t + 1) for t in (0, 2, 3, 4, 7)] == [0, 0, 1, 1, 2]
    assert [HCA.entries(t + 1) for t in (126, 127, 254, 255)] == [0, 1, 1, 2]
    schema = HybridSchema.of("DeepSeek-V4-Flash")
    assert [schema.blocks(n) for n in (0, 3, 4, 128, 131, 132)] == [0, 0, 1, 1, 1, 2]
    assert HybridSchema((HCA, SWA)).blocks(255) == 1
    assert HybridSchema((SWA,)).blocks(10**6) == 0


@pytest.mark.parametrize(
    ("layers", "reach"),
    [
        ((replace(CSA, window=2),), 4),  # the overlap reaches further than the window
        ((replace(SWA, window=3), replace(CSA, window=1)), 7),
        ((replace(CSA, window=2), replace(SWA, window=9)), 11),
        ((CSA, HCA, SWA), 384),
    ],
)
def test_how_far_back_an_exact_replay_goes(layers, reach):
    assert HybridSchema(layers).reach == reach


def test_block_budget_rounds_up():
    schema = HybridSchema.of("DeepSeek-V4-Flash")
    assert schema.block_budget(1000, 1, headroom=1.0) == 8
    assert schema.block_budget(1024, 4, headroom=1.0) == 32
    assert schema.block_budget(1024, 4) == 36
    assert schema.memory_bytes(10, 2).payload == 10 * schema.block_bytes.payload + 2 * schema.request_bytes.payload


def test_other_generations_are_data():
    """Ratios 1 and 2 without overlap, owners that others read, 288-byte rows: three half-rate owners and one of full rate."""
    half = LayerSchema(2, index_dim=128, entry_rows="nvfp4_entry")
    full = LayerSchema(1, index_dim=128, entry_rows="nvfp4_entry")
    schema = HybridSchema((half, LayerSchema(2, index_dim=128, entry_rows="nvfp4_entry", owner=0), half, half, full))
    assert schema.token_bytes[0] == 890
    assert schema.layers[1].block_bytes(128) == (0, 0)


def test_from_a_transformers_config():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no deepseek_v4")
    config = transformers.DeepseekV4Config(
        num_hidden_layers=3, compress_ratios=[0, 4, 128], sliding_window=16, head_dim=64, qk_rope_head_dim=16, index_head_dim=32
    )
    schema = HybridSchema.of(config, entry_rows="f32", window_rows="f32", index_rows="f32")
    assert [layer.kind for layer in schema.layers] == ["SWA", "CSA", "HCA"]
    assert (schema.layers[1].window, schema.layers[1].head_dim, schema.layers[1].rope_dim, schema.layers[1].index_dim) == (
        16,
        64,
        16,
        32,
    )


CONFIG = {"num_hidden_layers": 2, "sliding_window": 8, "head_dim": 64}
WRONG = {
    "ratio": (lambda: LayerSchema(-4), "ratio is 0 or more"),
    "tail": (lambda: LayerSchema(4, tail="stack"), "running or ring"),
    "index_without_entries": (lambda: LayerSchema(index_dim=128), "ratio 0 has none"),
    "block": (lambda: HybridSchema((CSA, HCA), block_tokens=64), "a multiple of 128"),
    "no_layers": (lambda: HybridSchema(()), "0 layers"),
    "owner": (lambda: HybridSchema((LayerSchema(4, owner=0),)), "an earlier one"),
    "owner_ratio": (lambda: HybridSchema((CSA, replace(CSA, ratio=8, owner=0))), "ratio is 8 here and 4 there"),
    "owner_without_entries": (lambda: HybridSchema((HCA, LayerSchema(owner=0))), "ratio is 0 here and 128 there"),
    "owner_head_dim": (lambda: HybridSchema((CSA, replace(CSA, head_dim=256, owner=0))), "head_dim is 256 here and 512 there"),
    "owner_rope_dim": (lambda: HybridSchema((CSA, replace(CSA, rope_dim=32, owner=0))), "rope_dim is 32 here and 64 there"),
    "owner_rows": (lambda: HybridSchema((CSA, replace(CSA, entry_rows="bf16", owner=0))), "entry_rows is 'bf16' here"),
    "owner_keys": (lambda: HybridSchema((CSA, replace(CSA, index_rows="bf16", owner=0))), "index_rows is 'bf16' here"),
    "owner_without_keys": (lambda: HybridSchema((HCA, replace(HCA, index_dim=128, owner=0))), "index_dim is 128 here and 0 there"),
    "drafts": (lambda: HybridSchema((CSA,), max_drafts=-1), "max_drafts is -1"),
    "model": (lambda: HybridSchema.of("DeepSeek-V4-Max"), "DeepSeek-V4"),
    "config": (lambda: HybridSchema.of(CONFIG), "compress_ratios"),
    "ratio_of_no_kernel": (lambda: LayerSchema(8192), "up to 4096"),
    "unknown_ratio": (lambda: HybridSchema.of(CONFIG | {"compress_ratios": [0, 8]}), "layer 1 .* compresses 8 tokens"),
    "csa_without_keys": (lambda: HybridSchema.of(CONFIG | {"compress_ratios": [0, 4]}), "no index_head_dim"),
    "budget": (lambda: HybridSchema((CSA,)).block_budget(0, 1), "none is under 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_schemas_are_refused(name):
    make, words = WRONG[name]
    with pytest.raises((BadArgument, Unsupported), match=words):
        make()
