"""Weights: a decoder's tensors, from a folder of safetensors or a GGUF file, under one set of names and in one type."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.runner.config import ModelConfig
from kvx.runner.gemm import pack
from kvx.runner.gguf_file import GgufFile

Progress = Callable[[int, int], None]  # layers done, of how many

# Transformers' names, and GGUF's where they differ.
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# llama.cpp stores these families' Q and K rows for pairs (2i, 2i + 1); we rotate (i, i + head_dim / 2), as Transformers does.
_INTERLEAVED = ("llama", "mistral", "smollm3")


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Matrices are [in, out], or packed (gemm.py); what goes with one input stands side by side: two GEMMs fewer."""

    norm: Tensor  # [hidden]
    qkv: Tensor  # [hidden, (num_heads + 2 * num_kv_heads) * head_dim]
    qkv_bias: Tensor | None
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    out: Tensor  # [num_heads * head_dim, hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]


@dataclass(frozen=True, eq=False)
class Weights:
    embed: Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor  # [hidden, vocab], or packed; the embedding's memory where they are tied and it is not
    inverse_frequencies: Tensor  # [head_dim / 2] f32


class SafetensorsFolder:
    """Reads tensors by Transformers' names, from one file or many."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / "model.safetensors.index.json"
        files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else ["model.safetensors"]
        missing = [f for f in files if not (folder / f).is_file()]
        if missing:
            raise BadArgument(f"{folder} has no {missing[0]}; a model folder has model.safetensors, or the files its index names.")
        self._files = [safe_open(str(folder / f), framework="pt") for f in files]
        self._at = {name: i for i, f in enumerate(self._files) for name in f.keys()}  # noqa: SIM118
        self.names = frozenset(self._at)

    def read(self, name: str) -> Tensor:
        if name not in self._at:
            raise BadArgument(f"the model's files have no {name}.")
        return self._files[self._at[name]].get_tensor(name)


class GgufWeights:
    """Reads tensors of a GGUF file by Transformers' names."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file, self._config = file, config

    def read(self, name: str) -> Tensor:
        base, kind = name.rsplit(".", 1)
        prefix = ""
        if base.startswith("model.layers."):
            number, base = base.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{number}."
        theirs = f"{prefix}{_GGUF_NAMES[base]}.{kind}"
        if theirs not in self._file.tensors:
            raise BadArgument(f"{self._file.path} has no {theirs}.")
        values = torch.from_numpy(self._file.read(theirs))
        heads = {"self_attn.q_proj": self._config.num_heads, "self_attn.k_proj": self._config.num_kv_heads}.get(base, 0)
        if heads and self._config.family in _INTERLEAVED:
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        return values

    def inverse_frequencies(self) -> Tensor:
        """Llama 3's scaling is a tensor here: what each frequency is divided by."""
        freq = self._config.inverse_frequencies()
        if "rope_freqs.weight" in self._file.tensors:
            freq = freq / torch.from_numpy(self._file.read("rope_freqs.weight"))
        return freq


def load_weights(
    source: SafetensorsFolder | GgufWeights, config: ModelConfig, *, dtype: torch.dtype, gemm_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu", progress: Progress = lambda done, total: None,
) -> Weights:  # fmt: skip
    """`gemm_dtype`: what matrices are kept in once they were rounded to dtype (model.py says when that is another)."""
    gemm = gemm_dtype or dtype

    def vector(name: str) -> Tensor:
        return source.read(name).to(device, dtype)

    def matrix(*names: str) -> Tensor:
        parts = [source.read(f"{n}.weight").to(device, dtype) for n in names]
        return pack(torch.cat(parts).to(gemm))

    layers = []
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        qkv = [f"{at}self_attn.{x}_proj" for x in "qkv"]
        layers.append(
            LayerWeights(
                norm=vector(at + "input_layernorm.weight"),
                qkv=matrix(*qkv),
                qkv_bias=torch.cat([vector(n + ".bias") for n in qkv]).to(gemm) if config.has_qkv_bias else None,
                q_norm=vector(at + "self_attn.q_norm.weight") if config.has_qk_norm else None,
                k_norm=vector(at + "self_attn.k_norm.weight") if config.has_qk_norm else None,
                out=matrix(at + "self_attn.o_proj"),
                mlp_norm=vector(at + "post_attention_layernorm.weight"),
                gate_up=matrix(at + "mlp.gate_proj", at + "mlp.up_proj"),
                down=matrix(at + "mlp.down_proj"),
            )
        )
        progress(i + 1, config.num_layers)
    embed = source.read("model.embed_tokens.weight").to(device, dtype).to(gemm)
    head = embed if config.is_tied else source.read("lm_head.weight").to(device, dtype).to(gemm)
    freq = source.inverse_frequencies() if isinstance(source, GgufWeights) else config.inverse_frequencies()
    return Weights(embed, tuple(layers), vector("model.norm.weight"), pack(head, may_share=head is embed), freq.to(device))


def random_weights(config: ModelConfig, *, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0) -> Weights:
    """A model of this shape that says nothing: for timing."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=generator)

    def ones(n: int) -> Tensor:
        return torch.ones(n, dtype=dtype, device=device)

    c = config
    q, kv, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    layers = tuple(
        LayerWeights(
            norm=ones(c.hidden_size),
            qkv=matrix(c.hidden_size, q + 2 * kv),
            qkv_bias=matrix(q + 2 * kv) if c.has_qkv_bias else None,
            q_norm=ones(c.head_dim) if c.has_qk_norm else None,
            k_norm=ones(c.head_dim) if c.has_qk_norm else None,
            out=matrix(q, c.hidden_size),
            mlp_norm=ones(c.hidden_size),
            gate_up=matrix(c.hidden_size, 2 * wide),
            down=matrix(wide, c.hidden_size),
        )
        for _ in range(c.num_layers)
    )
    embed = matrix(c.vocab_size, c.hidden_size)
    head = embed if c.is_tied else matrix(c.vocab_size, c.hidden_size)
    return Weights(embed, layers, ones(c.hidden_size), pack(head, may_share=head is embed), c.inverse_frequencies().to(device))
