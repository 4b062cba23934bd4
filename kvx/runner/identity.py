"""Whose K and V they are: a name of a model on disk that other weights do not have, though they be of the same shape."""

from __future__ import annotations

import hashlib
from pathlib import Path

from kvx.handover.model import model_name
from kvx.runner.config import ModelConfig

_STEP, _SAMPLE_BYTES = 1 << 16, 1 << 12  # of each file: a page of every 64 KiB, so of every matrix and some norms; and the last


def identity(path: Path, config: ModelConfig, dtype: str) -> str:
    """The geometry, a digest of samples of the weights, and the type they are computed in."""
    state = hashlib.blake2b(repr(config).encode(), digest_size=8)
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        size = file.stat().st_size
        state.update(size.to_bytes(8, "little"))
        with file.open("rb", buffering=0) as f:
            for at in (*range(0, size, _STEP), max(0, size - _SAMPLE_BYTES)):
                f.seek(at)
                state.update(f.read(_SAMPLE_BYTES))
    geometry = model_name(
        config.family, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
        hidden_size=config.hidden_size, vocab_size=config.vocab_size,
    )  # fmt: skip
    return f"{geometry}-{state.hexdigest()}-{dtype}"
