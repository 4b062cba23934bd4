"""ModelConfig: the shape of a decoder, from a Transformers config.json or the metadata of a GGUF file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, Unsupported

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's: frequencies slower than a wavelength of the old context are divided by `factor`, those between blend."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    old_context: int


@dataclass(frozen=True)
class ModelConfig:
    family: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotates: tuple[bool, ...] = ()  # per layer; (): all do
    has_qkv_bias: bool = False  # Qwen2
    has_qk_norm: bool = False  # Qwen3
    is_tied: bool = False  # the head is the embedding
    eos_ids: tuple[int, ...] = ()

    def inverse_frequencies(self) -> Tensor:
        """[head_dim / 2] f32, as Transformers computes them."""
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        freq: Tensor = 1.0 / (self.rope_theta**powers)
        s = self.rope_scaling
        if s is None:
            return freq
        length = 2 * math.pi / freq
        low, high = s.old_context / s.low_freq_factor, s.old_context / s.high_freq_factor
        blend = (s.old_context / length - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        between = (1 - blend) * freq / s.factor + blend * freq
        return torch.where(length > low, freq / s.factor, torch.where(length < high, freq, between))

    def does_rotate(self, layer: int) -> bool:
        return not self.rotates or self.rotates[layer]


def config_of_folder(folder: Path) -> ModelConfig:
    """From config.json, as Transformers 4 and 5 write it."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadArgument(f"{folder} has no config.json; a model folder has one, beside *.safetensors. Or name a .gguf file.")
    try:
        return config_of_json(json.loads(path.read_text()))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(f"{path} cannot be read as a decoder's config: {error!r}.") from error


def config_of_json(c: Mapping[str, Any]) -> ModelConfig:
    family = c.get("model_type", "")
    _check_family(family, "model_type")
    # Qwen's configs name a window that is off; Mistral's is on where there is one.
    window = c.get("sliding_window") if c.get("use_sliding_window", family == "mistral") else None
    if window:
        raise Unsupported(f"sliding_window is {window}; this runner's layers are full. The cache has windows: kvx.LayerGroup.")
    for key in ("attention_bias", "mlp_bias"):
        if c.get(key) and family != "qwen2":
            raise Unsupported(f"{key} is true; the runner has biases of QKV alone, and in qwen2 alone.")
    layers, heads = int(c["num_hidden_layers"]), int(c["num_attention_heads"])
    rope = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    eos = c.get("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=int(c["vocab_size"]),
        hidden_size=int(c["hidden_size"]),
        intermediate_size=int(c["intermediate_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(c.get("num_key_value_heads") or heads),
        head_dim=int(c.get("head_dim") or c["hidden_size"] // heads),
        max_seq_len=int(c["max_position_embeddings"]),
        norm_eps=float(c.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope),
        rotates=tuple(bool(x) for x in c["no_rope_layers"]) if family == "smollm3" and c.get("no_rope_layers") else (),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        is_tied=bool(c.get("tie_word_embeddings", False)),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind != "llama3":
        raise Unsupported(f'rope_type is "{kind}"; the runner has default and llama3.')
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, context = (rope[n] for n in names)
    return RopeScaling(float(factor), float(low), float(high), int(context))


def config_of_gguf(m: Mapping[str, Any], names: frozenset[str]) -> ModelConfig:
    """From metadata and the names of tensors: a file without `output.weight` ties its head."""
    family = m.get("general.architecture", "")
    _check_family(family, "general.architecture")

    def get(key: str, default: Any = None) -> Any:
        value = m.get(f"{family}.{key}", default)
        if value is None:
            raise BadArgument(f"the GGUF has no {family}.{key}; a decoder's does.")
        return value

    heads, hidden, layers = get("attention.head_count"), get("embedding_length"), get("block_count")
    if m.get(f"{family}.rope.scaling.type", "none") != "none":
        raise Unsupported(
            f"{family}.rope.scaling.type is {m[f'{family}.rope.scaling.type']!r}; the runner has none and rope_freqs."
        )
    return ModelConfig(
        family=family,
        vocab_size=m.get(f"{family}.vocab_size") or len(m["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=get("attention.key_length", hidden // heads),
        max_seq_len=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        # llama.cpp has no key for it: every fourth layer of SmolLM3 goes without.
        rotates=tuple((i + 1) % 4 != 0 for i in range(layers)) if family == "smollm3" else (),
        has_qkv_bias="blk.0.attn_q.bias" in names,
        has_qk_norm="blk.0.attn_q_norm.weight" in names,
        is_tied="output.weight" not in names,
        eos_ids=(m["tokenizer.ggml.eos_token_id"],) if "tokenizer.ggml.eos_token_id" in m else (),
    )


def _check_family(family: str, key: str) -> None:
    if family not in FAMILIES:
        raise Unsupported(f"{key} is {family!r}; the runner has {', '.join(FAMILIES)}. Other models: kvx.adapters.transformers.")
