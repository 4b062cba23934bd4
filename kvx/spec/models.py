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
}

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
    found = f"Near it: {', '.join(near)}" if near else f"Known: {', '.join(MODELS)}"
    raise BadArgument(
        f'size(): "{name}" is neither a file or folder here nor a known model. {found}. '
        "Any other model: give its config.json, or the folder that has it."
    )
