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
