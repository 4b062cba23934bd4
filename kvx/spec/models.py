"""Known models: the fields of their config.json that decide what a KV cache holds. A row is a config like any other's file."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from kvx.errors import BadArgument

Config = dict[str, Any]


def _plain(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, **fields: Any) -> Config:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **fields,
    }


def _latent(model_type: str, layers: int, **fields: Any) -> Config:
    return {"model_type": model_type, "num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64, **fields}


def _v4(layers: int, ratios: list[int]) -> Config:
    return {
        "model_type": "deepseek_v4",
        "num_hidden_layers": layers,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "sliding_window": 128,
        "compress_ratios": [*ratios, 0],  # the last is the draft layer's (MTP), which num_hidden_layers does not count
        "index_head_dim": 128,
    }


def _gdn(model_type: str, layers: int, hidden: int, heads: int, kv_heads: int, value_heads: int, **fields: Any) -> Config:
    """Qwen's hybrids: three layers of a gated delta net, then one that attends."""
    return _plain(
        model_type, layers, hidden, heads, kv_heads, 256, full_attention_interval=4, linear_num_key_heads=16,
        linear_num_value_heads=value_heads, linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, **fields,
    )  # fmt: skip


def _mamba2(heads: int, dim: int, size: int, groups: int, **fields: Any) -> Config:
    return {
        "mamba_n_heads": heads, "mamba_d_head": dim, "mamba_d_state": size, "mamba_n_groups": groups, "mamba_d_conv": 4, **fields,
    }  # fmt: skip


def _every(n: int, count: int, layer: str, others: str) -> list[str]:
    return [layer if i % n == n - 1 else others for i in range(count)]


_NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"

MODELS: dict[str, Config] = {
    "SmolLM2-135M": _plain("llama", 30, 576, 9, 3, 64),
    "Llama-3.1-8B": _plain("llama", 32, 4096, 32, 8, 128),
    "Llama-3.1-70B": _plain("llama", 80, 8192, 64, 8, 128),
    "Llama-3.1-405B": _plain("llama", 126, 16384, 128, 8, 128),
    "Qwen2.5-7B": _plain("qwen2", 28, 3584, 28, 4, 128, use_sliding_window=False),
    "Qwen2.5-72B": _plain("qwen2", 80, 8192, 64, 8, 128, use_sliding_window=False),
    "Qwen3-8B": _plain("qwen3", 36, 4096, 32, 8, 128, use_sliding_window=False),
    "Qwen3-32B": _plain("qwen3", 64, 5120, 64, 8, 128, use_sliding_window=False),
    "Qwen3-235B-A22B": _plain("qwen3_moe", 94, 4096, 64, 4, 128, use_sliding_window=False),
    "Mistral-7B-v0.1": _plain("mistral", 32, 4096, 32, 8, 128, sliding_window=4096),
    "Gemma-2-9B": _plain("gemma2", 42, 3584, 16, 8, 256, sliding_window=4096),
    "Gemma-2-27B": _plain("gemma2", 46, 4608, 32, 16, 128, sliding_window=4096),
    "Gemma-3-27B": _plain("gemma3_text", 62, 5376, 32, 16, 128, sliding_window=1024, sliding_window_pattern=6),
    "GPT-OSS-20B": _plain("gpt_oss", 24, 2880, 64, 8, 64, sliding_window=128),
    "GPT-OSS-120B": _plain("gpt_oss", 36, 2880, 64, 8, 64, sliding_window=128),
    "DeepSeek-V2-Lite": _latent("deepseek_v2", 27),
    "DeepSeek-V3": _latent("deepseek_v3", 61),
    "DeepSeek-V3.2": _latent("deepseek_v32", 61, index_head_dim=128),
    "Kimi-K2": _latent("kimi_k2", 61),
    "DeepSeek-V4-Flash": _v4(43, [0, 0, *[4, 128] * 20, 4]),
    "DeepSeek-V4-Pro": _v4(61, [128, 128, *[4, 128] * 29, 4]),
    "Llama-4-Scout": _plain("llama4_text", 48, 5120, 40, 8, 128, attention_chunk_size=8192),
    "Gemma-3n-E4B": _plain(
        "gemma3n_text", 35, 2048, 8, 2, 256, sliding_window=512, num_kv_shared_layers=15,
        layer_types=_every(5, 35, "full_attention", "sliding_attention"),
    ),
    "Gemma-4-E4B": _plain(
        "gemma4_text", 42, 2560, 8, 2, 256, sliding_window=512, global_head_dim=512, attention_k_eq_v=False,
        num_kv_shared_layers=18, layer_types=_every(6, 42, "full_attention", "sliding_attention"),
    ),
    "Gemma-4-31B": _plain(
        "gemma4_text", 60, 5376, 32, 16, 256, sliding_window=1024, global_head_dim=512, num_global_key_value_heads=4,
        attention_k_eq_v=True, layer_types=_every(6, 60, "full_attention", "sliding_attention"),
    ),
    "Qwen3-Next-80B-A3B": _gdn("qwen3_next", 48, 2048, 16, 2, 32),
    "Qwen3.5-27B": _gdn("qwen3_5_text", 64, 5120, 24, 4, 48, mamba_ssm_dtype="float32"),
    "Qwen3.5-35B-A3B": _gdn("qwen3_5_moe_text", 40, 2048, 16, 2, 32, mamba_ssm_dtype="float32"),
    "Qwen3.8-27B": _gdn("qwen3_5_text", 64, 5120, 24, 4, 48, mamba_ssm_dtype="float32"),
    "Kimi-Linear-48B-A3B": _latent(
        "kimi_linear", 27,
        linear_attn_config={
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
        },
    ),
    "Olmo-Hybrid-7B": _plain(
        "olmo_hybrid", 32, 3840, 30, 30, 128, layer_types=_every(4, 32, "full_attention", "linear_attention"),
        linear_num_key_heads=30, linear_num_value_heads=30, linear_key_head_dim=96, linear_value_head_dim=192,
        linear_conv_kernel_dim=4,
    ),
    "Nemotron-H-8B": _plain(
        "nemotron_h", 52, 4096, 32, 8, 128, hybrid_override_pattern=_NEMOTRON_H_8B, mamba_num_heads=128, mamba_head_dim=64,
        ssm_state_size=128, n_groups=8, conv_kernel=4,
    ),
    "Falcon-H1-34B": _plain("falcon_h1", 72, 5120, 20, 4, 128, mamba_d_ssm=4096, **_mamba2(32, 128, 256, 2)),
    "Granite-4.0-H-Small": _plain(
        "granitemoehybrid", 40, 4096, 32, 8, 128, layer_types=(["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
        **_mamba2(128, 64, 128, 1, mamba_expand=2),
    ),
    "Bamba-9B": _plain(
        "bamba", 32, 4096, 32, 8, 128, attn_layer_indices=[9, 18, 27], **_mamba2(128, 64, 128, 1, mamba_expand=2),
    ),
    "Zamba2-2.7B": _plain(
        "zamba2", 54, 2560, 32, 32, 160, mamba_ngroups=1, n_mamba_heads=80, mamba_d_state=64, mamba_d_conv=4, mamba_expand=2,
        layers_block_type=["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for i in range(54)],
    ),
    "Jamba-v0.1": _plain(
        "jamba", 32, 4096, 32, 8, 128, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2,
    ),
    "LFM2-1.2B": _plain("lfm2", 16, 2048, 32, 8, 64, full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_L_cache=3),
    "RecurrentGemma-2B": _plain(
        "recurrent_gemma", 26, 2560, 10, 1, 256, attention_window_size=2048, lru_width=2560, conv1d_width=4,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    "Mamba-2.8B": {
        "model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560, "state_size": 16, "expand": 2, "conv_kernel": 4,
    },
    "Mamba-Codestral-7B-v0.1": {
        "model_type": "mamba2", "num_hidden_layers": 64, "hidden_size": 4096, "num_heads": 128, "head_dim": 64, "state_size": 128,
        "n_groups": 8, "expand": 2, "conv_kernel": 4,
    },
}  # fmt: skip

# model_types whose bytes were compared: with the caches Transformers 5.22 makes (tests/spec/test_size_families.py), or by hand.
CHECKED_TYPES = frozenset(
    (
        "afmoe",
        "apertus",
        "arcee",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "bamba",
        "beam",
        "biogpt",
        "bitnet",
        "bloom",
        "codegen",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cosmos3_edge_text",
        "cpmant",
        "ctrl",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "deepseek_v4",
        "diffllama",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "falcon",
        "falcon_h1",
        "falcon_mamba",
        "flex_olmo",
        "flint",
        "fuyu",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "glm_ocr_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_neox_japanese",
        "gpt_oss",
        "gptj",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hrm_text",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "hyperclovax",
        "inkling_text",
        "jais2",
        "jamba",
        "kimi_k2",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lfm2",
        "lfm2_moe",
        "llama",
        "llama4_text",
        "mamba",
        "mamba2",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax",
        "minimax_m2",
        "ministral",
        "ministral3",
        "mistral",
        "mixtral",
        "mllama_text_model",
        "molmo2_text",
        "mpt",
        "muse_glimmer_text",
        "muse_spark_text",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "opt",
        "persimmon",
        "phi",
        "phi3",
        "phi4_multimodal",
        "phimoe",
        "qwen2",
        "qwen2_5_vl_text",
        "qwen2_moe",
        "qwen2_vl_text",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_vl_moe_text",
        "qwen3_vl_text",
        "recurrent_gemma",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "vaultgemma",
        "youtu",
        "zamba",
        "zamba2",
        "zaya",
    )
)

_BY_LOWER = {name.lower(): name for name in MODELS}
_SAME_CONFIG = ("-instruct", "-it", "-base", "-chat")  # tuned on the same architecture


def known(name: str) -> str:
    """The table's name for it: any case, with or without the owner in front and `-Instruct` or the like behind."""
    lower = name.lower().rsplit("/", 1)[-1]
    for ending in _SAME_CONFIG:
        lower = lower.removesuffix(ending)
    if lower in _BY_LOWER:
        return _BY_LOWER[lower]
    near = [_BY_LOWER[match] for match in get_close_matches(lower, _BY_LOWER, n=4, cutoff=0.5)]
    found = f"Similar names: {', '.join(near)}" if near else f"Known: {', '.join(MODELS)}"
    raise BadArgument(
        f'size(): "{name}" is neither a file or folder here nor a known model. {found}. '
        "Any other model: give its config.json, or the folder that has it."
    )
