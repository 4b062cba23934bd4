"""kvx.size: bytes worked out by hand, published numbers, DeepSeek-V4's totals, and what real caches and Transformers say."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import kvx
from kvx.errors import BadArgument, KvxError, Unsupported
from kvx.spec.config_fields import DEFAULTS
from kvx.spec.models import MODELS
from kvx.spec.size import size_formats

LLAMA = MODELS["Llama-3.1-8B"]

# (model, format) -> bytes one more token costs a long request: layers x (K + V heads x row) each.
TOKEN_BYTES = {
    ("SmolLM2-135M", "bf16"): 30 * 2 * 3 * 64 * 2,  # 23,040
    ("Llama-3.1-8B", "bf16"): 131_072,  # 32 x 2 x 8 x 256: the 128 KiB everybody knows
    ("Llama-3.1-8B", "fp8_e4m3"): 65_536,
    ("Llama-3.1-8B", "int8_per_token_head"): 32 * 2 * 8 * (128 + 4),  # 67,584: a scale of 4 bytes a row
    ("Llama-3.1-8B", "int8_per_token_head_inline"): 67_584,  # the same scale, in the row
    ("Llama-3.1-8B", "int8_per_token_head_f16"): 32 * 2 * 8 * (128 + 2),
    ("Llama-3.1-8B", "int8_per_block_head"): 65_536 + 32 * 2 * 8 * 4 // 16,  # a scale a head in each block of 16
    ("Llama-3.1-8B", "nvfp4"): 32 * 2 * 8 * (64 + 8),  # 36,864
    ("Llama-3.1-8B", "mxfp4"): 32 * 2 * 8 * (64 + 4),
    ("Llama-3.1-70B", "bf16"): 327_680,
    ("Llama-3.1-405B", "bf16"): 516_096,  # DeepSeek-V3's hardware paper, table 1: 516.096 KB
    ("Qwen2.5-7B", "bf16"): 57_344,
    ("Qwen2.5-72B", "bf16"): 327_680,  # the same table: 327.680 KB
    ("Qwen3-8B", "bf16"): 147_456,
    ("Qwen3-32B", "bf16"): 262_144,
    ("Qwen3-235B-A22B", "bf16"): 192_512,
    ("Mistral-7B-v0.1", "bf16"): 0,  # every layer has the window
    ("Gemma-2-9B", "bf16"): 21 * 2 * 8 * 512,  # 172,032: half the layers
    ("Gemma-2-27B", "bf16"): 23 * 2 * 16 * 256,  # 188,416
    ("Gemma-3-27B", "bf16"): 10 * 2 * 16 * 256,  # 81,920: layers 6, 12, ... 60 of 62
    ("GPT-OSS-20B", "bf16"): 12 * 2 * 8 * 128,  # 24,576
    ("GPT-OSS-120B", "bf16"): 36_864,
    ("DeepSeek-V2-Lite", "bf16"): 27 * 576 * 2,  # 31,104
    ("DeepSeek-V3", "bf16"): 70_272,  # 61 x 576 x 2; the same table: 70.272 KB
    ("DeepSeek-V3", "fp8_e4m3"): 61 * 576,
    ("DeepSeek-V3", "fp8_ds_mla"): 61 * 656,
    ("DeepSeek-V3", "fp8_e4m3_per_128_inline"): 61 * 656,  # the same record by the name of its latent's format
    ("DeepSeek-V3", "nvfp4_ds_mla"): 61 * 352,
    ("DeepSeek-V3.2", "fp8_ds_mla"): 48_068,  # 61 x (656 + 132)
    ("DeepSeek-V3.2", "bf16"): 85_888,  # 61 x (1152 + 256): 83.9 GiB at 1 Mi tokens, as vLLM's V4 note has it
    ("Kimi-K2", "bf16"): 70_272,
    ("DeepSeek-V4-Flash", "fp8_ds_mla"): 3514.25,  # 21 x (584 + 68) / 4 + 20 x 584 / 128
    ("DeepSeek-V4-Flash", "bf16"): 6880,
    ("DeepSeek-V4-Pro", "fp8_ds_mla"): 5031.4375,  # 30 x 652 / 4 + 31 x 584 / 128
    ("DeepSeek-V4-Pro", "bf16"): 9848,  # 9.62 GiB at 1 Mi tokens, as vLLM's V4 note has it
    ("Llama-4-Scout", "bf16"): 12 * 4096,  # every fourth layer; the others have a chunk
    ("Gemma-3n-E4B", "bf16"): 4 * 2 * 2 * 512,  # layers 5, 10, 15, 20 of the 20 that do not share
    ("Gemma-4-E4B", "bf16"): 4 * 2 * 2 * 1024,  # layers 6, 12, 18, 24 of the 24 that do not share
    ("Gemma-4-31B", "bf16"): 10 * 2 * 4 * 1024,  # 4 heads of 512 where all is seen
    ("Qwen3-Next-80B-A3B", "bf16"): 12 * 2 * 2 * 512,
    ("Qwen3.5-27B", "bf16"): 16 * 2 * 4 * 512,
    ("Qwen3.5-35B-A3B", "bf16"): 10 * 2 * 2 * 512,
    ("Qwen3.8-27B", "bf16"): 16 * 2 * 4 * 512,
    ("Kimi-Linear-48B-A3B", "bf16"): 7 * 576 * 2,
    ("Olmo-Hybrid-7B", "bf16"): 8 * 2 * 30 * 256,
    ("Nemotron-H-8B", "bf16"): 4 * 4096,
    ("Falcon-H1-34B", "bf16"): 144 * 1024,  # 72 layers, all of them
    ("Granite-4.0-H-Small", "bf16"): 4 * 4096,
    ("Bamba-9B", "bf16"): 3 * 4096,
    ("Zamba2-2.7B", "bf16"): 9 * 2 * 32 * 320,
    ("Jamba-v0.1", "bf16"): 4 * 4096,
    ("LFM2-1.2B", "bf16"): 6 * 2 * 8 * 128,
    ("RecurrentGemma-2B", "bf16"): 0,
    ("Mamba-2.8B", "bf16"): 0,
    ("Mamba-Codestral-7B-v0.1", "bf16"): 0,
}
KIB = 1024


@pytest.mark.parametrize(("model", "format"), TOKEN_BYTES, ids=lambda x: x)
def test_token_bytes(model, format):
    assert kvx.size(model, format).token_bytes == TOKEN_BYTES[model, format]


def test_every_known_model_has_its_bytes_here():
    assert {model for model, _ in TOKEN_BYTES} == set(MODELS)


# Fixed bytes: window layers x blocks of 16 that a window can touch (ceil((w - 1) / 16) + 1) x block.
FIXED_BYTES = {
    "Llama-3.1-8B": 0,
    "Mistral-7B-v0.1": 257 * 16 * 131_072,  # a window of 4,096 touches 257 blocks
    "Gemma-2-9B": 257 * 16 * 172_032,
    "Gemma-3-27B": 65 * 16 * 52 * 2 * 16 * 256,
    "GPT-OSS-20B": 9 * 16 * 24_576,
    "GPT-OSS-120B": 9 * 16 * 36_864,
    "DeepSeek-V3": 0,
    "Llama-4-Scout": 36 * 8192 * 4096,
    "Gemma-3n-E4B": 16 * 33 * 16 * 2 * 2 * 512,
    "Gemma-4-E4B": 20 * 33 * 16 * 2 * 2 * 512,
    "Gemma-4-31B": 50 * 65 * 16 * 2 * 16 * 512,
    # States: channels x 3 taps in bf16, then matrices in f32.
    "Qwen3-Next-80B-A3B": 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4),
    "Qwen3.8-27B": 153_944_064,  # as SGLang #40706 has it: 153.9 MB
    "Qwen3.5-35B-A3B": 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4),
    "Kimi-Linear-48B-A3B": 20 * (3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4),
    "Olmo-Hybrid-7B": 24 * (30 * (2 * 96 + 192) * 3 * 2 + 30 * 96 * 192 * 4),
    "Nemotron-H-8B": 24 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
    "Falcon-H1-34B": 72 * (5120 * 3 * 2 + 4096 * 256 * 4),
    "Granite-4.0-H-Small": 36 * ((8192 + 2 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
    "Bamba-9B": 29 * ((8192 + 2 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
    "Zamba2-2.7B": 54 * ((5120 + 2 * 64) * 3 * 2 + 5120 * 64 * 4),
    "Jamba-v0.1": 28 * 8192 * (3 * 2 + 16 * 4),
    "LFM2-1.2B": 10 * 2048 * 2 * 2,  # 2 taps, no matrix
    "RecurrentGemma-2B": 8 * 129 * 16 * 2 * 512 + 18 * 2560 * (3 * 2 + 4),
    "Mamba-2.8B": 64 * 5120 * (3 * 2 + 16 * 4),
    "Mamba-Codestral-7B-v0.1": 64 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
}


@pytest.mark.parametrize("model", FIXED_BYTES, ids=str)
def test_fixed_bytes(model):
    assert kvx.size(model).fixed_bytes == FIXED_BYTES[model]


def test_a_request_is_whole_blocks():
    s = kvx.size("Llama-3.1-8B")
    assert [s.request_bytes(n) // 131_072 for n in (1, 15, 16, 17, 8192)] == [16, 16, 16, 32, 8192]
    assert kvx.size("Llama-3.1-8B", block_size=1).request_bytes(17) == 17 * 131_072
    assert kvx.size("Llama-3.1-8B", block_size=256).request_bytes(257) == 512 * 131_072


def test_a_window_grows_until_it_is_full():
    s = kvx.size("GPT-OSS-20B")  # 12 layers of all tokens, 12 of the last 128
    assert s.request_bytes(16) == 16 * 24 * 2048
    assert s.request_bytes(128) == 128 * 24 * 2048
    assert s.request_bytes(129) == 144 * 24 * 2048  # the ninth block, while the first is still read
    assert s.request_bytes(145) == (160 + 144) * 12 * 2048
    assert s.request_bytes(131_072) == s.fixed_bytes + 131_072 * 24_576


def test_most_blocks_of_a_window_is_what_a_walk_finds():
    for window in (1, 2, 15, 16, 17, 18, 128, 130):
        for block in (1, 16, 48):
            s = kvx.size({**LLAMA, "model_type": "mistral", "sliding_window": window}, block_size=block)
            most = max((n - 1) // block - max(0, n - window) // block + 1 for n in range(1, 600))
            assert s.fixed_bytes == s.groups[0].max_blocks * s.groups[0].block_bytes
            assert s.groups[0].max_blocks == most, (window, block)


@pytest.mark.parametrize("window", [17, 32, 40])
def test_a_paged_cache_holds_as_many_blocks(window):
    spec = kvx.CacheSpec(num_blocks=64, block_size=16, num_kv_heads=1, head_dim=64)
    cache = kvx.PagedCache([kvx.LayerGroup("all", (0,), spec, window=window)], max_seqs=1, max_seq_len=256, prefix=False)
    sequence, most = cache.admit(list(range(200))), 0
    for _ in range(200):
        cache.extend(sequence, 1)
        most = max(most, cache.allocators[0].num_used)
    config = {"model_type": "mistral", "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 64, "sliding_window": window}
    assert kvx.size(config).groups[0].max_blocks == most


@pytest.mark.parametrize(
    ("model", "tp", "want"),
    [
        ("Llama-3.1-70B", 8, 327_680 // 8),
        ("Llama-3.1-70B", 16, 327_680 // 8),  # a head on two ranks each
        ("Qwen3-235B-A22B", 8, 192_512 // 4),
        ("DeepSeek-V3", 8, 70_272),  # latents are on every rank
        ("DeepSeek-V4-Pro", 8, 9848),
    ],
    ids=str,
)
def test_tensor_parallel(model, tp, want):
    assert kvx.size(model, tp=tp).token_bytes == want


def test_deepseek_v4_totals():
    """Each number of the derivation: what blocks hold, what a request's state holds."""
    flash, pro = (kvx.size(f"DeepSeek-V4-{m}", "fp8_ds_mla") for m in ("Flash", "Pro"))
    assert [(g.name, g.num_layers) for g in flash.groups] == [("SWA", 2), ("CSA", 21), ("HCA", 20)]
    assert [(g.name, g.num_layers) for g in pro.groups] == [("CSA", 30), ("HCA", 31)]
    assert flash.block_size == 128
    assert [g.block_bytes // g.num_layers for g in flash.groups] == [0, 18_688 + 2176, 584]
    assert flash.index_format == "mxfp4"
    ring = [3139 + 1344 + 336 + 10_240, 4453 + 1920 + 480 + 15_872]  # KiB: windows, CSA sums of entries and index, HCA sums
    assert [s.fixed_bytes for s in (flash, pro)] == [n * KIB for n in ring]
    tight = [kvx.size(f"DeepSeek-V4-{m}", "fp8_ds_mla", state="tight") for m in ("Flash", "Pro")]
    assert [s.fixed_bytes for s in tight] == [(3139 + 1008 + 252 + 120) * KIB, (4453 + 1440 + 360 + 186) * KIB]
    for index, want in (("nvfp4", (3535.25, 5061.4375)), ("fp8_e4m3_per_128", (3850.25, 5511.4375))):
        got = tuple(kvx.size(f"DeepSeek-V4-{m}", "fp8_ds_mla", index_format=index).token_bytes for m in ("Flash", "Pro"))
        assert got == want
    v32 = kvx.size("DeepSeek-V3.2", "fp8_ds_mla").token_bytes
    assert round(100 * flash.token_bytes / v32, 2) == 7.31
    assert round(100 * pro.token_bytes / v32, 2) == 10.47
    assert round(flash.token_bytes * 2**20 / 2**30, 2) == 3.43
    assert round(pro.token_bytes * 2**20 / 2**30, 2) == 4.91
    # A prefix others go on from keeps its windows and the halves that reach into the next entry.
    assert sum(g.resume_bytes for g in flash.groups) == (3139 + 21 * 20) * KIB
    assert sum(g.resume_bytes for g in pro.groups) == (4453 + 30 * 20) * KIB
    assert flash.request_bytes(129) == flash.fixed_bytes + 2 * 128 * 3514.25  # 129 tokens: two blocks, not one


def test_a_shared_prefix_counts_once():
    s = kvx.size("Llama-3.1-8B")
    assert s.total_bytes(2048, 64, 1000) == (992 + 64 * (2048 - 992)) * 131_072  # 62 whole blocks
    assert s.total_bytes(2048, 64, 15) == s.total_bytes(2048, 64)
    assert s.fit_requests(s.total_bytes(2048, 64, 1000), 2048, 1000) == 64
    assert s.fit_requests(s.total_bytes(2048, 64, 1000) - 1, 2048, 1000) == 63
    oss = kvx.size("GPT-OSS-20B")  # of the prefix, window layers keep the 8 blocks that the next token reads
    assert oss.total_bytes(2048, 4, 1024) == ((1024 + 128) + 4 * (1024 + 144)) * 24_576
    with pytest.raises(BadArgument, match="shared_prefix is 2048 and context 2048"):
        s.total_bytes(2048, 2, 2048)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "GPT-OSS-20B", "DeepSeek-V4-Flash"], ids=str)
@pytest.mark.parametrize(("requests", "shared"), [(1, 0), (7, 0), (7, 1000)])
def test_what_fits_fits_and_no_more(model, requests, shared):
    s, memory = kvx.size(model), 10**9
    longest = s.fit_context(memory, requests, shared)
    assert longest % s.block_size == 0
    assert s.total_bytes(longest, requests, shared) <= memory < s.total_bytes(longest + 1, requests, shared)
    assert s.fit_requests(memory, longest, shared) >= requests > s.fit_requests(memory, longest + 1, shared)


def test_nothing_fits_and_everything_fits():
    assert kvx.size("Llama-3.1-8B").fit_context(16 * 131_072 - 1) == 0
    assert kvx.size("Llama-3.1-8B").fit_context(16 * 131_072) == 16
    assert kvx.size("Llama-3.1-8B").fit_requests(0, 100) == 0
    mistral = kvx.size("Mistral-7B-v0.1")
    assert mistral.fit_context(mistral.fixed_bytes) is None  # every length
    assert mistral.fit_context(mistral.fixed_bytes - 1) == 256 * 16


@pytest.mark.parametrize("format", [f for f in kvx.FORMATS if f != "f64"], ids=str)  # f64 only converts
def test_bytes_are_those_of_a_real_cache(format):
    spec = kvx.CacheSpec(num_blocks=3, block_size=16, num_kv_heads=2, head_dim=128, format=format)
    storage = kvx.allocate(spec)
    caches = storage.cache if isinstance(storage.cache, (tuple, list)) else [storage.cache]
    scales = [t for n, t in storage.scales().items() if t is not None and not n.endswith("tensor_scale")]
    per_block = [t for t in scales if t.ndim and t.shape[0] == spec.num_blocks]  # the others are the whole cache's
    total = sum(t.numel() * t.element_size() for t in [*caches, *per_block])
    s = kvx.size({"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 128}, format)
    assert 3 * s.block_bytes == total


# What Transformers makes of configs that do not say layer_types.
PATTERNS = {
    "gemma2": {"num_hidden_layers": 5},
    "gemma3_text": {"num_hidden_layers": 13, "sliding_window": 512},
    "gemma3_text-pattern": {"num_hidden_layers": 13, "sliding_window": 512, "sliding_window_pattern": 4},
    "gpt_oss": {"num_hidden_layers": 5},
    "cohere2": {"num_hidden_layers": 9},
    "qwen2": {"num_hidden_layers": 8, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3},
    "qwen2-off": {"num_hidden_layers": 8, "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 3},
    "qwen3": {"num_hidden_layers": 30, "use_sliding_window": True, "sliding_window": 64},
    "llama4_text": {"num_hidden_layers": 9},
    "deepseek_v3": {"num_hidden_layers": 3},
    "deepseek_v32": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("name", PATTERNS, ids=str)
def test_layers_are_as_transformers_has_them(name):
    transformers = pytest.importorskip("transformers")
    model_type = name.split("-")[0]
    config = transformers.AutoConfig.for_model(model_type, **PATTERNS[name])
    fields = config.to_dict()
    written = {k: v for k, v in fields.items() if k not in ("layer_types", "no_rope_layers")} | PATTERNS[name]
    got, want = kvx.size(written), kvx.size(config)
    assert sorted(got.groups, key=lambda g: g.name) == sorted(want.groups, key=lambda g: g.name)
    if fields.get("layer_types"):
        full = sum("sliding" not in t and "chunked" not in t for t in fields["layer_types"])  # others have had several names
        assert sum(g.num_layers for g in got.groups if not g.window) == full
    assert sum(g.num_layers for g in got.groups) == config.num_hidden_layers


def test_gemma_3_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig()
    for field, value in DEFAULTS["gemma3_text"].items():
        assert getattr(config, field, getattr(config, f"_{field}", None)) == value
    published = {
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024},
    }
    assert kvx.size(published).token_bytes == 5 * 2 * 4 * 512


def test_deepseek_v4_from_layer_types():
    flash = MODELS["DeepSeek-V4-Flash"]
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    config = {k: v for k, v in flash.items() if k not in ("compress_ratios", "qk_rope_head_dim")}
    config["layer_types"] = [names[r] for r in flash["compress_ratios"][:43]]
    assert kvx.size(config, "fp8_ds_mla").groups == kvx.size("DeepSeek-V4-Flash", "fp8_ds_mla").groups


def test_other_attentions():
    mqa = {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True}
    assert kvx.size(mqa).token_bytes == 40 * 2 * 128 * 2
    mha = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    assert kvx.size(mha).token_bytes == 524_288  # Llama 2 7B
    chunked = {**LLAMA, "model_type": "llama4_text", "num_hidden_layers": 48, "attention_chunk_size": 8192}
    s = kvx.size(chunked)
    assert [(g.name, g.num_layers) for g in s.groups] == [("chunked", 36), ("full", 12)]
    assert s.fixed_bytes == 36 * 8192 * 4096  # chunks begin where blocks do
    # A prefix that ends with a chunk leaves nothing of it to read.
    assert s.total_bytes(20_000, 2, 8192) == 12 * 8192 * 4096 + 2 * (36 * 8192 + 12 * 11_808) * 4096
    idle = {**LLAMA, "model_type": "phi3", "sliding_window": 262_144, "max_position_embeddings": 131_072}
    assert kvx.size(idle).token_bytes == 131_072  # a window that hides nothing
    shared = {**LLAMA, "num_kv_shared_layers": 12}
    assert kvx.size(shared).token_bytes == 20 * 4096


def test_sources(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for source in (tmp_path, str(tmp_path), tmp_path / "config.json"):
        assert kvx.size(source).token_bytes == 131_072
        assert kvx.size(source).model == tmp_path.name
    for name in ("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct"):
        assert kvx.size(name).model == "Llama-3.1-8B"


def test_formats_that_rows_can_take():
    assert size_formats("Llama-3.1-8B") == ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4"]
    assert size_formats("DeepSeek-V3") == ["bf16", "fp8_e4m3", "int8_per_token_head", "fp8_ds_mla", "nvfp4"]
    assert size_formats({**LLAMA, "head_dim": 72}) == ["bf16", "fp8_e4m3", "int8_per_token_head"]
    for model in MODELS:
        for format in size_formats(model, every=True):
            assert kvx.size(model, format).fit_requests(10**12, 4096) > 0


ERRORS = {
    "unknown name": (("Llama-3.1-9B",), {}, r"Similar names: Llama-3.1-8B"),
    "no file": (("x/config.json",), {}, r"x/config.json does not exist"),
    "not a model": ((7,), {}, r"model is 7; it takes"),
    "no layers": (
        ({"model_type": "llama"},),
        {},
        r"the config of llama has no num_hidden_layers \(nor n_layer, n_layers, num_layers\)",
    ),
    "no heads": (({"model_type": "llama", "num_hidden_layers": 2},), {}, r"has no num_attention_heads"),
    "no hidden": (({"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2},), {}, r"has no hidden_size"),
    "no rope": (({"model_type": "deepseek_v3", "num_hidden_layers": 2, "kv_lora_rank": 512},), {}, r"has no qk_rope_head_dim"),
    "no ratios": (({**MODELS["DeepSeek-V4-Pro"], "compress_ratios": None},), {}, r"has no compress_ratios \(nor layer_types\)"),
    "few ratios": (({**MODELS["DeepSeek-V4-Pro"], "compress_ratios": [4]},), {}, r"does not list its 61 layers"),
    "bad ratio": (({**MODELS["DeepSeek-V4-Pro"], "compress_ratios": [-1] * 61},), {}, r"compress ratio -1"),
    "text for a number": (({**LLAMA, "num_hidden_layers": "32"},), {}, r"num_hidden_layers of llama is '32'"),
    "too many layers": (({**LLAMA, "num_hidden_layers": 10**9},), {}, r"it takes 1 to 10000"),
    "all shared": (({**LLAMA, "num_kv_shared_layers": 32},), {}, r"leaves no layer"),
    "format": (("Llama-3.1-8B", "fp9"), {}, r'format "fp9" does not exist'),
    "format of another type": (
        ("Llama-3.1-8B", 4096),
        {},
        r"Llama-3.1-8B in 4096: format is 4096; it must be the name of one, such as",
    ),
    "record": (("Llama-3.1-8B", "fp8_ds_mla"), {}, r"in fp8_ds_mla: K 8 x 128 has no record of that name. Llama-3.1-8B takes bf16"),
    "head_dim": (
        ({**LLAMA, "head_dim": 72}, "nvfp4"),
        {},
        r"head_dim 72 is not a multiple of nvfp4's group of 16. llama takes bf16, fp8",
    ),
    "index": (("Llama-3.1-8B",), {"index_format": "mxfp4"}, r"has no indexer"),
    "tp": (("SmolLM2-135M",), {"tp": 2}, r"tp is 2 and SmolLM2-135M has 3 KV heads: neither divides the other"),
    "tp 0": (("SmolLM2-135M",), {"tp": 0}, r"tp is 0; it takes a whole number of 1 or more"),
    "block": (("DeepSeek-V4-Pro",), {"block_size": 64}, r"takes a multiple of 128"),
    "state": (("DeepSeek-V4-Pro",), {"state": "loose"}, r"it takes ring or tight"),
    "state_format": (("Qwen3-Next-80B-A3B",), {"state_format": "fp8_e4m3"}, r"state_format is 'fp8_e4m3'; it takes bf16, f16, f32"),
    "no matrices": (("LFM2-1.2B",), {"state_format": "f32"}, r"LFM2-1.2B keeps no recurrent matrices. Leave it out"),
    "tp of states": (
        ({**MODELS["Qwen3-Next-80B-A3B"], "num_key_value_heads": 6, "num_attention_heads": 6},),
        {"tp": 6},
        r"conv has 16 units of 128 channels over 6 ranks: neither divides the other",
    ),
    "kernel": (({**MODELS["LFM2-1.2B"], "conv_L_cache": 1},), {}, r"has a kernel of 1; it takes 2 or more"),
    "expand": (({**MODELS["Jamba-v0.1"], "mamba_expand": "wide"},), {}, r"mamba_expand of jamba is 'wide'"),
}


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_errors_say_what_is_wrong(case):
    args, options, sentence = ERRORS[case]
    with pytest.raises(BadArgument, match=sentence) as error:
        kvx.size(*args, **options)
    assert str(error.value).startswith("size(): ")


UNSUPPORTED = {
    "brand_new": ({"mamba_d_state": 6}, r"brand_new.* has recurrent layers \(mamba_d_state\) and does not say which"),
    "bamba": ({"mamba_d_state": 128}, r"recurrent layers"),
    "newer": ({"layer_types": ["linear_attention"] * 32}, r"has no layer with K and V of its tokens \(32 linear_attention\)"),
    "unlimited_ocr": ({"layer_types": ["reference_sliding_attention"] * 32}, r"has layers of type reference_sliding_attention"),
    "kimi_linear": ({"linear_attn_config": {"head_dim": 128}}, r"recurrent layers"),
    "t5": ({"is_encoder_decoder": True}, r"cross attention"),
    "exaone4": ({"sliding_window": 4096, "sliding_window_pattern": "LLLG"}, r"in letters"),
    "deepseek_v4": ({"compress_ratios": [2] * 32, "sliding_window": 128}, r"compresses 2 tokens into one"),
}


@pytest.mark.parametrize("model_type", UNSUPPORTED, ids=str)
def test_what_it_does_not_count_is_refused(model_type):
    fields, sentence = UNSUPPORTED[model_type]
    with pytest.raises(Unsupported, match=sentence):
        kvx.size({**LLAMA, "model_type": model_type, **fields})


@pytest.mark.parametrize("text", ["", "[", "[1]", "\udc80", "[" * 100_000], ids=["empty", "cut", "list", "bytes", "deep"])
def test_files_that_are_no_config(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadArgument, match=r"config\.json"):
        kvx.size(path)


_JUNK = ["Qwen2.5-7B", "Gemma-3-27B", "DeepSeek-V3.2", "DeepSeek-V4-Flash", "Qwen3-Next-80B-A3B", "Falcon-H1-34B", "Jamba-v0.1"]


@pytest.mark.parametrize(
    "model", [*_JUNK, "Kimi-Linear-48B-A3B", "Zamba2-2.7B", "RecurrentGemma-2B", "Mamba-Codestral-7B-v0.1"], ids=str
)
def test_junk_in_a_field_is_a_sentence(model):
    extra = {
        "layer_types": None,
        "compress_rates": None,
        "no_rope_layers": None,
        "max_position_embeddings": None,
        "text_config": None,
    }
    for field in {**MODELS[model], **extra}:
        for junk in ("x", -1, 0, [], {}, [None] * 100, 1.5, True, 10**30, None):
            with suppress(KvxError):  # any other error fails the test
                assert kvx.size({**MODELS[model], field: junk}).request_bytes(100) > 0


def test_sizes_need_no_torch():
    """The arithmetic is plain Python: loading it alone does not pull torch in."""
    code = (
        "import sys, types; p = types.ModuleType('kvx'); p.__path__ = [sys.argv[1]]; sys.modules['kvx'] = p\n"
        "from kvx.spec.size import size; print(size('Llama-3.1-8B').token_bytes, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(Path(kvx.__file__).parent)], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["131072.0", "False"], done.stderr
