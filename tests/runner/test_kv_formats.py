"""Quantised K and V: a real model's perplexity on a fixed text stays within 1 % (int8) and 2 % (fp8) of the unquantised."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from kvx import BadArgument
from kvx.runner.model import kv_format_of
from tests.runner import smollm

TEXT = (
    "The lighthouse at the end of the harbour was built in 1843, after three ships had been lost on the rocks in a single winter. "
    "Its first keeper was a retired sailor who lived there with his wife and two daughters for almost thirty years. Every evening "
    "he climbed the narrow stairs, trimmed the wick, and lit the lamp; every morning he put it out again and wrote down the "
    "weather in a large leather book. The books are now kept in the town museum. They tell us when the herring came, when the "
    "first steamship passed, and how thick the ice was in the hard winter of 1855. Scientists have used them to study how the "
    "climate of the coast has changed. In the early years the lamp burned oil from whales, later it burned paraffin, and in 1921 "
    "it was connected to the electric grid. Today the light is controlled by a computer in the capital, two hundred miles away, "
    "and nobody lives in the tower any more. On clear days visitors can climb to the top and see the islands in the west. The "
    "guide likes to tell them about the night when the keeper's older daughter, who was then only fifteen, rowed out in a storm "
    "with her father and saved nine people from a sinking ship. She was given a silver medal by the queen, and a street in the "
    "town is named after her. When she was asked in her old age what she remembered of that night, she said that it had been "
    "very cold, and that she had been afraid of the dark water, but that the light behind her had shown her the way home."
)


@functools.cache
def perplexity(kv_format: str) -> float:
    """Over the text, in chunks of 64 tokens: every token attends to K and V as the cache gives them back."""
    engine = smollm.engine(kv_format=kv_format, max_batch_tokens=64)
    ids = engine.tokenizer.encode(TEXT)
    seq, total = engine.cache.admit(ids), 0.0
    for start in range(0, len(ids), 64):
        n = min(64, len(ids) - start)
        engine.cache.extend(seq, n)
        logits = engine.model.logits(engine.model.hidden(engine.cache.plan([(seq, n)])))
        following = torch.tensor(ids[start + 1 : start + n + 1])
        total += float(torch.nn.functional.cross_entropy(logits[: len(following)], following, reduction="sum"))
    return math.exp(total / (len(ids) - 1))


@smollm.needs_weights
@pytest.mark.parametrize(("kv_format", "bound"), [("f16", 1e-3), ("int8_per_token_head", 0.01), ("fp8_e4m3_per_token_head", 0.02)])
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
