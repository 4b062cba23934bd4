"""Quantised K and V: a real model's perplexity on a fixed text stays within 1 % (int8) and 2 % (fp8) of the unquantised."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch

from kvx import BadArgument
from kvx.runner.model import kv_format_of
from tests.runner import smollm

TEXT = (Path(__file__).parent / "perplexity.txt").read_text()  # written for this test, so that no model has seen it
TOKENS = 1024


@functools.cache
def perplexity(kv_format: str) -> float:
    """Over the text, in chunks of 128 tokens: every token attends to K and V as the cache gives them back."""
    engine, step = smollm.engine(kv_format=kv_format_of(kv_format, "f32")), 128
    ids = engine.tokenizer.encode(TEXT)[:TOKENS]
    assert len(ids) == TOKENS
    seq, total = engine.cache.admit(ids), 0.0
    for start in range(0, len(ids), step):
        n = min(step, len(ids) - start)
        engine.cache.extend(seq, n)
        logits = engine.model.logits(engine.model.hidden(engine.cache.plan([(seq, n)])))
        following = torch.tensor(ids[start + 1 : start + n + 1])
        total += float(torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="sum"))
    return math.exp(total / (len(ids) - 1))


@smollm.needs_weights
@pytest.mark.parametrize(("kv_format", "bound"), [("int8", 0.01), ("fp8", 0.02)])
def test_perplexity_stays(kv_format, bound):
    plain, coded = perplexity("bf16"), perplexity(kv_format)
    print(f"\n{kv_format}: {coded:.4f}, bf16 {plain:.4f}, {coded / plain - 1:+.3%}")
    assert 2 < plain < 30
    assert abs(coded / plain - 1) < bound


def test_short_names():
    assert kv_format_of("auto", "bf16") == "bf16"
    assert kv_format_of("int8", "f32") == "int8_per_token_head"
    assert kv_format_of("fp8", "f32") == "fp8_e4m3_per_token_head"
    with pytest.raises(BadArgument, match="does not exist"):
        kv_format_of("int7", "f32")
    with pytest.raises(BadArgument, match="measured beforehand"):
        kv_format_of("fp8_e4m3_per_head", "f32")
