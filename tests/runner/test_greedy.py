"""A real model's greedy text is transformers', token for token, whatever the scheduler and the cache do on the way."""

from __future__ import annotations

import os

import pytest
import torch

from kvx.runner import Params
from tests.runner import smollm

pytestmark = smollm.needs_weights
PROMPTS, TOKENS = 6, 32


def said(engine, n: int = PROMPTS, max_tokens: int = TOKENS) -> list[tuple[int, ...]]:
    answers = engine.generate(smollm.prompts(n), Params(max_tokens=max_tokens))
    engine.cache.check()
    assert engine.cache.num_seqs == 0
    return [a[0].tokens for a in answers]


def test_weights_are_those_transformers_reads():
    theirs, ours = smollm.reference().state_dict(), smollm.base().model.weights
    assert torch.equal(theirs["model.embed_tokens.weight"], ours.embed)
    for i in (0, 29):
        at = f"model.layers.{i}."
        qkv = torch.cat([theirs[f"{at}self_attn.{x}_proj.weight"] for x in "qkv"])
        gate_up = torch.cat([theirs[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        layer = ours.layers[i]
        assert torch.equal(qkv.t(), layer.qkv)
        assert torch.equal(gate_up.t(), layer.gate_up)
        assert torch.equal(theirs[f"{at}self_attn.o_proj.weight"].t(), layer.out)
        assert torch.equal(theirs[f"{at}mlp.down_proj.weight"].t(), layer.down)
        assert torch.equal(theirs[f"{at}input_layernorm.weight"], layer.norm)


def test_batch_with_prefix_hits():
    engine = smollm.engine()
    assert said(engine) == list(smollm.expected(PROMPTS, TOKENS))
    counts = engine.scheduler.counts
    assert counts.reused_tokens > 0, "prompts of one step share their system prefix"
    assert counts.preemptions == counts.chunks == 0
    before = counts.reused_tokens
    assert said(engine) == list(smollm.expected(PROMPTS, TOKENS)), "again, on the blocks of the first time"
    assert counts.reused_tokens - before > before


def test_without_prefix_cache():
    engine = smollm.engine(prefix=False)
    assert said(engine) == list(smollm.expected(PROMPTS, TOKENS))
    assert engine.scheduler.counts.reused_tokens == 0


def test_chunked_prefill_in_mixed_steps():
    engine = smollm.engine(max_batch_tokens=13, max_seqs=4, prefix=False)  # no divisor of anything
    assert said(engine) == list(smollm.expected(PROMPTS, TOKENS))
    counts = engine.scheduler.counts
    assert counts.chunks > 0
    assert counts.mixed_steps > 0


def test_preemption_when_blocks_run_out():
    engine = smollm.engine(num_blocks=14, max_batch_tokens=40)
    engine.scheduler.reserve_blocks = 0  # nothing is held back
    assert said(engine) == list(smollm.expected(PROMPTS, TOKENS))
    assert engine.scheduler.counts.preemptions > 0


def test_fork_gives_each_answer_the_same_text():
    engine = smollm.engine()
    (answers,) = engine.generate(smollm.prompts(1), Params(max_tokens=TOKENS, n=3))
    assert [a.tokens for a in answers] == [smollm.expected(PROMPTS, TOKENS)[0]] * 3
    assert engine.scheduler.counts.forks == 2
    engine.cache.check()


def test_drafts_that_were_wrong_are_rolled_back():
    """Three tokens of a draft, of which the first is right: the others leave no trace."""
    engine = smollm.engine()
    cache, model = engine.cache, engine.model
    (ids,), want = smollm.prompts(1), smollm.expected(PROMPTS, TOKENS)[0]
    seq = cache.admit(ids)
    cache.extend(seq, len(ids))
    got = [int(model.forward(cache.plan([(seq, len(ids))])).argmax())]
    while len(got) < len(want):
        draft = [got[-1], want[len(got)] if len(got) < len(want) else 0, 5, 7]
        cache.extend(seq, draft)
        guesses = model.logits(model.hidden(cache.plan([(seq, 4)]))).argmax(-1).tolist()
        kept = 1 + next((i for i in range(3) if guesses[i] != draft[i + 1]), 3)
        got += guesses[:kept]
        cache.truncate(seq, seq.length - 4 + kept)
        cache.commit(seq)
        cache.check()
    assert tuple(got[: len(want)]) == want
    cache.release(seq)
    cache.check()


@pytest.mark.skipif("KVX_TEST_LONG" not in os.environ, reason="minutes; KVX_TEST_LONG=1 runs it")
def test_twenty_prompts_of_64_tokens():
    want = list(smollm.expected(20, 64))
    assert said(smollm.engine(), 20, 64) == want
    tight = smollm.engine(num_blocks=24, max_batch_tokens=48)
    tight.scheduler.reserve_blocks = 0
    assert said(tight, 20, 64) == want
    counts = tight.scheduler.counts
    assert counts.preemptions > 0
    assert counts.chunks > 0
    assert counts.mixed_steps > 0
    assert counts.reused_tokens > 0
