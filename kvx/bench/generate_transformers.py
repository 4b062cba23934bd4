"""transformers' model on our weights, and its greedy tokens: what `kvx bench generate` and the runner's tests compare with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvx.runner.gemm import unpack
from kvx.runner.model import Model

Prompts = Sequence[Sequence[int]]


def greedy(model: Any, prompts: Prompts, max_tokens: int, eos_id: int | None) -> list[list[int]]:
    """Its greedy tokens, of all prompts together; with `eos_id` up to and with that."""
    longest, pad = max(map(len, prompts)), 0
    ids = torch.tensor([[pad] * (longest - len(p)) + list(p) for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    model.generation_config.eos_token_id = eos_id
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=pad)
    rows = out[:, longest:].tolist()
    return [row[: row.index(eos_id) + 1] if eos_id in row else row for row in rows]


def model_of(model: Model) -> Any:
    """transformers' Llama on our weights. A test compares them with its own reading of the file, which takes 20 s."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    c, w = model.config, model.weights
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, max_position_embeddings=c.max_seq_len,
        rms_norm_eps=c.norm_eps, rope_theta=c.rope_theta, tie_word_embeddings=True,
    )  # fmt: skip
    tensors = {"model.embed_tokens.weight": w.embed, "lm_head.weight": w.embed, "model.norm.weight": w.norm}
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for i, layer in enumerate(w.layers):
        at = f"model.layers.{i}."
        for name, part in zip("qkv", unpack(layer.qkv).split([q, kv, kv]), strict=True):
            tensors[f"{at}self_attn.{name}_proj.weight"] = part
        tensors[f"{at}mlp.gate_proj.weight"], tensors[f"{at}mlp.up_proj.weight"] = unpack(layer.gate_up).chunk(2)
        tensors[f"{at}self_attn.o_proj.weight"] = unpack(layer.out)
        tensors[f"{at}mlp.down_proj.weight"] = unpack(layer.down)
        tensors[f"{at}input_layernorm.weight"], tensors[f"{at}post_attention_layernorm.weight"] = layer.norm, layer.mlp_norm
    theirs = AutoModelForCausalLM.from_config(config, dtype=model.dtype).to(w.embed.device).eval()
    theirs.load_state_dict(tensors)
    return theirs
