"""HybridModel: whole models on a hybrid cache say what transformers' own do, in any chunks, beside others, and again after them."""

from __future__ import annotations

import itertools
import random
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument
from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridSchema
from tests.hybrid import models
from tests.hybrid.test_cache import F32, cache_of, cuts

# Chunks change the order of sums; over four layers transformers differs from itself by up to 1e-5 of logits around 4.
CLOSE = {"rtol": 0, "atol": 5e-5}


@pytest.mark.parametrize("how", ["whole", "one_by_one", "random"])
@pytest.mark.parametrize("tiny", models.MODELS, ids=str)
@models.one_thread()
def test_logits_are_those_of_transformers(tiny, how):
    total = 134 if how == "one_by_one" else 260
    hybrid = HybridModel(models.make(tiny), cache_of(models.make(tiny), F32))
    request, ids = hybrid.cache.admit_request(), models.tokens(total)
    ends = cuts(random.Random(str(tiny)), total, how)
    got = [hybrid.forward(request, ids[a:b]) for a, b in itertools.pairwise(ends)]
    want = models.whole(tiny, 260).logits[:total]
    torch.testing.assert_close(torch.cat(got), want, **CLOSE)


@models.one_thread()
def test_texts_take_turns():
    """Three texts of different lengths in one cache, then another in the slot of the first that ended."""
    model = models.make(models.FLASH)
    hybrid = HybridModel(model, cache_of(model, F32, num_blocks=4))
    texts = [models.tokens(n, seed) for n, seed in ((40, 1), (135, 2), (17, 3), (130, 4))]
    rng, live, left = random.Random(0), {}, list(texts)
    while left or live:
        while left and len(live) < 3:
            live[hybrid.cache.admit_request()] = (left.pop(0), [])
        request = rng.choice(list(live))
        ids, got = live[request]
        got.append(hybrid.forward(request, ids[request.length : request.length + rng.choice((1, 4, 30))]))
        if request.length == len(ids):
            torch.testing.assert_close(torch.cat(got), models.run(model, ids).logits, **CLOSE)
            hybrid.cache.release_request(request)
            del live[request]
    assert hybrid.cache.allocator.num_used == 0


@models.one_thread()
def test_rows_of_fewer_bits_say_nearly_the_same():
    model, ids = models.make(models.WIDE), models.tokens(140)
    want = models.whole(models.WIDE, 140).logits
    for rows, bound in (("bf16", 0.02), ("fp8_entry", 0.2)):
        hybrid = HybridModel(model, cache_of(model, {"entry_rows": rows, "window_rows": rows, "index_rows": "bf16"}))
        got = hybrid.forward(hybrid.cache.admit_request(), ids)
        assert 0 < float((got - want).norm() / want.norm()) < bound, rows


def test_a_cache_of_another_model_is_refused():
    model = models.make(models.FLASH)
    schema = HybridSchema.of(models.config_of(models.PRO), **F32)
    with pytest.raises(BadArgument, match="4 layers on a cache of 3"):
        HybridModel(model, HybridCache(schema, num_blocks=1, max_requests=1, max_context=10))


def test_attention_is_given_back():
    """After a step the model is transformers' own again, also when the step broke."""
    model = models.make(models.FLASH)
    hybrid = HybridModel(model, cache_of(model, F32))
    hybrid.forward(hybrid.cache.admit_request(), models.tokens(5))
    with pytest.raises(IndexError):
        hybrid.forward(hybrid.cache.admit_request(), torch.tensor([10**6]))
    assert all("forward" not in vars(layer.self_attn) for layer in model.model.layers)


def test_the_example(capsys):
    models.library()
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "deepseek_v4.py"))
    example["main"]()
    said = capsys.readouterr().out
    assert "transformers' own cache says the same" in said
    assert "after 312 tokens, in 3 blocks of 128 tokens" in said
