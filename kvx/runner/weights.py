"""Weights: a decoder's tensors as the model takes them, in one type: loaded from a checkpoint, or random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvx.runner.checkpoint import GgufWeights, SafetensorsFolder, head_of
from kvx.runner.config import ModelConfig
from kvx.runner.gemm import pack

Progress = Callable[[int, int], None]  # layers done, of how many


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
    rows = source.read("model.embed_tokens.weight")
    head_rows = head_of(source, config, rows)
    embed = rows.to(device, dtype).to(gemm)
    head = embed if head_rows is None else head_rows.to(device, dtype).to(gemm)
    freq = source.inverse_frequencies() if isinstance(source, GgufWeights) else config.inverse_frequencies()
    return Weights(embed, tuple(layers), vector("model.norm.weight"), pack(head, may_share=head is embed), freq.to(device))


def random_weights(config: ModelConfig, *, dtype: torch.dtype, device: str | torch.device = "cpu", seed: int = 0) -> Weights:
    """A model of this shape that says nothing: for timing."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02, generator=generator)

    def matrix(fan_in: int, fan_out: int) -> Tensor:
        return normal(fan_out, fan_in).t()  # as a checkpoint has it

    def ones(n: int) -> Tensor:
        return torch.ones(n, dtype=dtype, device=device)

    c = config
    q, kv, wide = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    layers = tuple(
        LayerWeights(
            norm=ones(c.hidden_size),
            qkv=matrix(c.hidden_size, q + 2 * kv),
            qkv_bias=normal(q + 2 * kv) if c.has_qkv_bias else None,
            q_norm=ones(c.head_dim) if c.has_qk_norm else None,
            k_norm=ones(c.head_dim) if c.has_qk_norm else None,
            out=matrix(q, c.hidden_size),
            mlp_norm=ones(c.hidden_size),
            gate_up=matrix(c.hidden_size, 2 * wide),
            down=matrix(wide, c.hidden_size),
        )
        for _ in range(c.num_layers)
    )
    embed = normal(c.vocab_size, c.hidden_size)
    head = embed if c.is_tied else normal(c.vocab_size, c.hidden_size)
    return Weights(embed, layers, ones(c.hidden_size), pack(head, may_share=head is embed), c.inverse_frequencies().to(device))
