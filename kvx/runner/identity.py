"""Whose K and V a runner's are: a name that other weights do not have, though they be of the same shape."""

from __future__ import annotations

from pathlib import Path

from kvx.identity import model_name, weights_identity
from kvx.runner.config import ModelConfig


def identity(path: Path, config: ModelConfig, dtype: str) -> str:
    """The geometry, to be read by people, and the weights' own name: another engine of the same files and type has the same."""
    geometry = model_name(
        config.family, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        hidden_size=config.hidden_size, vocab_size=config.vocab_size,
    )  # fmt: skip
    return f"{geometry}-{weights_identity(path, dtype=dtype)}"
