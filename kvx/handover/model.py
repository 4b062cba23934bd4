"""A name for a model that has none: its geometry. Two models of one geometry share it, so a name of your own is better."""

from __future__ import annotations


def model_name(
    kind: str,  # llama, qwen3, ...
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    hidden_size: int,
    vocab_size: int,
) -> str:
    return f"{kind}-{num_layers}x{hidden_size}-kv{num_kv_heads}x{head_dim}-v{vocab_size}"
