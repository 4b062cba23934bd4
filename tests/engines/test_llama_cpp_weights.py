"""The two copies of SmolLM2 that engines load have the numbers of the packaged file."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

from kvx.runner import small_model
from kvx.runner.open import open_model
from tests.engines.models import Smollm2


def test_both_copies_have_the_packaged_weights(small_model_copies: Smollm2) -> None:
    models = small_model_copies
    folder, gguf, packaged = (open_model(p).tensors for p in (models.folder, models.gguf, small_model()))
    names = folder.names  # type: ignore[union-attr]
    assert len(names) == 272
    for name in sorted(names):
        want = packaged.read(name)  # rows of Q and K in Transformers' order
        assert torch.equal(folder.read(name), want), name
        assert torch.equal(gguf.read(name), want), name


def test_both_copies_have_one_geometry(small_model_copies: Smollm2) -> None:
    models = small_model_copies
    a, b = (open_model(p).config for p in (models.folder, models.gguf))
    for field in ("family", "vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "is_tied"):
        assert getattr(a, field) == getattr(b, field)
    assert a.norm_eps == pytest.approx(b.norm_eps)  # the GGUF's is a float32
