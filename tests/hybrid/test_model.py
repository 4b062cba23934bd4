"""HybridModel: whole models on a hybrid cache say what transformers' own do, in any chunks, beside others, and again after them."""

from __future__ import annotations

import copy
import itertools
import random
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument, OutOfBlocks
from kvx.adapters.transformers.deepseek_v4 import HybridModel
from kvx.cache.hybrid import HybridCache, HybridSchema
from kvx.ops import backend as backends
from tests.hybrid import models
from tests.hybrid.hybrids import DEVICE_CLOSE, F32, answer, cache_of, check, cuts, hybrid_on, model_on, tokens


@pytest.mark.parametrize("how", ["whole", "one_by_one", "random"])
@pytest.mark.parametrize("tiny", models.MODELS, ids=str)
@models.one_thread()
def test_logits_are_those_of_transformers(backend, tiny, how):
    total, hybrid = 134 if how == "one_by_one" else 260, hybrid_on(backend, tiny)
    request, ids = hybrid.cache.admit([]), tokens(backend, total)
    ends = cuts(random.Random(str(tiny)), total, how)
    got = [hybrid.forward(request, ids[a:b]) for a, b in itertools.pairwise(ends)]
    check(backend, torch.cat(got), models.whole(tiny, 260).logits[:total])


@pytest.mark.parametrize("tiny", [models.FLASH, models.HASHED], ids=str)
@models.one_thread()
def test_a_batch_of_different_lengths(backend, tiny):
    """Steps of several requests, some a token and some a chunk, in an order that changes: each as if it were alone."""
    hybrid, rng = hybrid_on(backend, tiny, num_blocks=12, max_seqs=5), random.Random(5)
    texts = [(260, 1), (3, 2), (131, 3), (17, 4), (129, 5)]
    left = {hybrid.cache.admit([]): (tokens(backend, *text), text, []) for text in texts}
    while left:
        chosen = rng.sample(list(left), rng.randint(1, len(left)))
        parts = [left[r][0][r.length : r.length + rng.choice((1, 1, 2, 16, 60))] for r in chosen]
        for request, logits in zip(chosen, hybrid.forward(chosen, parts), strict=True):
            ids, text, got = left[request]
            got.append(logits)
            if request.length == len(ids):
                check(backend, torch.cat(got), answer(tiny, *text))
                del left[request]


@pytest.mark.skipif(backends.reason_missing("cuda") is not None, reason=f"the device: {backends.reason_missing('cuda')}")
@pytest.mark.parametrize("rows", ["f32", "bf16", "fp8_entry"])
def test_the_device_says_what_the_definition_says(rows):
    """The same steps on the same device by kernels and by their torch definition."""
    model, kept = model_on(models.WIDE, "cuda"), {"entry_rows": rows, "window_rows": rows, "index_rows": "f32"}
    logits = []
    for backend in ("cuda", "torch"):
        hybrid = HybridModel(model, cache_of(model, kept), backend=backend)
        requests = [hybrid.cache.admit([]) for _ in range(2)]
        ids = [models.tokens(n, n).cuda() for n in (200, 140)]
        for step in (130, 5, 1, 1, 1):
            logits += hybrid.forward(requests, [part[r.length : r.length + step] for part, r in zip(ids, requests, strict=True)])
    got, want = (torch.cat(part) for part in (logits[: len(logits) // 2], logits[len(logits) // 2 :]))
    assert float((got - want).norm() / want.norm()) < DEVICE_CLOSE


def test_requests_and_ids_go_together():
    hybrid = HybridModel(models.make(models.FLASH), cache_of(models.make(models.FLASH), F32))
    with pytest.raises(BadArgument, match="1 requests and ids of 2"):
        hybrid.forward([hybrid.cache.admit([])], [models.tokens(2), models.tokens(2)])


@models.one_thread()
def test_ids_are_those_that_the_cache_knows():
    """By them blocks get their names: another text under them would be found by whoever asks for the first."""
    model = models.make(models.FLASH)
    hybrid, ids = HybridModel(model, cache_of(model, F32, num_blocks=2, prefix=True)), models.tokens(200)
    cache, want = hybrid.cache, models.run(model, ids).logits
    request, other = cache.admit(ids[:50].tolist()), cache.admit(models.tokens(130, 1).tolist())
    with pytest.raises(BadArgument, match=r"those known after its length are .*truncate"):
        hybrid.forward([other, request], [models.tokens(130, 1), (ids[:50] + 1) % models.VOCAB])
    hybrid.forward(request, ids[:30])
    with pytest.raises(BadArgument, match="Nothing changed"):
        hybrid.forward(request, torch.cat((ids[30:49], ids[:3])))
    assert (request.length, request.num_tokens) == (30, 50)
    hybrid.forward(other, models.tokens(130, 1))
    with pytest.raises(OutOfBlocks):
        hybrid.forward(request, ids[30:])
    assert (request.length, request.tokens.tolist()) == (30, ids.tolist()), "known, and not computed"
    cache.release(other)
    torch.testing.assert_close(hybrid.forward(request, ids[30:]), want[30:], rtol=0, atol=5e-5)
    cache.commit(request)
    assert request.hashes == cache.prefix.hashes(ids[:128].int().numpy())
    cache.append(request, [1, 2, 3])
    cache.truncate(request, 200)
    assert hybrid.forward(request, ids[:2]).shape[0] == 2
    cache.check()


@models.one_thread()
def test_texts_take_turns(backend):
    """Three texts of different lengths in one cache, then another in the slot of the first that ended."""
    hybrid = hybrid_on(backend, models.FLASH, num_blocks=4)
    texts = [(40, 1), (135, 2), (17, 3), (130, 4)]
    rng, live, left = random.Random(0), {}, list(texts)
    while left or live:
        while left and len(live) < 3:
            live[hybrid.cache.admit([])] = (left.pop(0), [])
        request = rng.choice(list(live))
        text, got = live[request]
        ids = tokens(backend, *text)
        got.append(hybrid.forward(request, ids[request.length : request.length + rng.choice((1, 4, 30))]))
        if request.length == len(ids):
            check(backend, torch.cat(got), answer(models.FLASH, *text))
            hybrid.cache.release(request)
            del live[request]
    assert [a.num_used for a in hybrid.cache.allocators] == [0, 0]


@models.one_thread()
def test_rows_of_fewer_bits_say_nearly_the_same(backend):
    want = models.whole(models.WIDE, 140).logits
    for rows, bound in (("bf16", 0.02), ("fp8_entry", 0.2)):
        hybrid = hybrid_on(backend, models.WIDE, {"entry_rows": rows, "window_rows": rows, "index_rows": "bf16"})
        got = hybrid.forward(hybrid.cache.admit([]), tokens(backend, 140)).cpu()
        assert 0 < float((got - want).norm() / want.norm()) < bound, rows


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch saying it has no bf16 instructions
@models.one_thread()
def test_a_model_in_bf16(backend):
    """Projections come in bf16; norms, rotations and sums of the cache are float32. Off by what bf16 is, over four layers."""
    model = copy.deepcopy(model_on(models.FLASH, backend.device)).to(torch.bfloat16)
    hybrid = HybridModel(model, cache_of(model, {**F32, "window_rows": "bf16", "entry_rows": "bf16"}), backend=backend.name)
    request, ids = hybrid.cache.admit([]), tokens(backend, 140)
    got = torch.cat([hybrid.forward(request, part) for part in ids.split([100, 1, 1, 38])]).float().cpu()
    want = models.whole(models.FLASH, 140).logits
    assert 1e-4 < float((got - want).norm() / want.norm()) < 0.1


def test_a_cache_of_another_model_is_refused():
    model = models.make(models.FLASH)
    schema = HybridSchema.of(models.config_of(models.PRO), **F32)
    with pytest.raises(BadArgument, match="4 layers on a cache of 3"):
        HybridModel(model, HybridCache(schema, num_blocks=1, max_seqs=1, max_seq_len=10))


def test_attention_is_given_back():
    """After a step the model is transformers' own again, also when the step broke."""
    model = models.make(models.FLASH)
    hybrid = HybridModel(model, cache_of(model, F32))
    hybrid.forward(hybrid.cache.admit([]), models.tokens(5))
    with pytest.raises(IndexError):
        hybrid.forward(hybrid.cache.admit([]), torch.tensor([10**6]))
    assert all("forward" not in vars(layer.self_attn) for layer in model.model.layers)


def test_the_example(capsys):
    models.library()
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "deepseek_v4.py"))
    example["main"]()
    said = capsys.readouterr().out
    assert "transformers' own cache says the same" in said
    assert "after 312 tokens, in 3 blocks of 128 tokens" in said
    assert "entries of 256 tokens are there; tokens 192 to 255 are computed again" in said
    assert "logits from token 256 on are the same" in said
