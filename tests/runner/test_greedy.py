"""A real model's greedy text is transformers', token for token, whatever the scheduler and the cache do on the way."""

from __future__ import annotations

import torch

from kvx.runner import Params
from tests.runner import smollm

pytestmark = smollm.needs_weights
PROMPTS, TOKENS = 6, 32


def said(engine, n: int = PROMPTS, max_tokens: int = TOKENS) -> list[tuple[int, ...]]:
    answers = engine.generate(smollm.prompts(n), Params(max_tokens=max_tokens))
    assert_empty(engine)
    return [a[0].tokens for a in answers]


def assert_empty(engine) -> None:
    engine.cache.check()
    assert engine.cache.num_seqs == 0


def assert_same(got, n: int = PROMPTS, max_tokens: int = TOKENS) -> None:
    """Every token; where one differs, by how much transformers preferred its own."""
    want = smollm.expected(n, max_tokens)
    assert len(got) == n
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        at = smollm.first_difference(ours, theirs)
        if at < len(theirs) or len(ours) != len(theirs):
            gap = smollm.gap(smollm.reference(), [*smollm.prompts(n)[i], *theirs[:at]], ours[at : at + 1])
            raise AssertionError(f"prompt {i}, token {at}: {ours[at:]} instead of {theirs[at:]}; its logit is {gap:.2e} below")


@smollm.long
def test_weights_are_those_transformers_reads():
    theirs, ours = smollm.their_own(), smollm.reference()
    a, b = theirs.state_dict(), ours.state_dict()
    assert a.keys() == b.keys()
    assert [name for name, t in a.items() if not torch.equal(t, b[name])] == []
    for name in ("rope_parameters", "rms_norm_eps", "hidden_act", "head_dim"):
        assert getattr(theirs.config, name) == getattr(ours.config, name)


def test_batch_with_prefix_hits():
    engine = smollm.engine()
    assert_same(said(engine))
    counts = engine.scheduler.counts
    assert counts.steps < TOKENS * 2, "all prompts run together"
    assert counts.reused_tokens > 0, "prompts of one step share their system prefix"
    assert counts.preemptions == counts.chunks == 0
    before = counts.reused_tokens
    assert_same(said(engine))  # again, on the blocks of the first time
    assert counts.reused_tokens - before > before


def test_without_prefix_cache():
    engine = smollm.engine(prefix=False)
    assert_same(said(engine))
    assert engine.scheduler.counts.reused_tokens == 0


def test_chunked_prefill_in_mixed_steps():
    engine = smollm.engine(max_batch_tokens=13, max_seqs=4, prefix=False)  # no divisor of anything
    assert_same(said(engine))
    counts = engine.scheduler.counts
    assert counts.chunks > 0
    assert counts.mixed_steps > 0


def test_preemption_when_blocks_run_out():
    engine = smollm.engine(num_blocks=14, max_batch_tokens=40)
    engine.scheduler.reserve_blocks = 0  # nothing is held back
    assert_same(said(engine))
    assert engine.scheduler.counts.preemptions > 0


def forked(engine, n: int, max_tokens: int, copies: int) -> list[list[tuple[int, ...]]]:
    """Each prompt's answers."""
    answers = engine.generate(smollm.prompts(n), Params(max_tokens=max_tokens, n=copies))
    assert_empty(engine)
    return [[a.tokens for a in group] for group in answers]


def test_fork_gives_each_answer_the_same_text():
    engine = smollm.engine()
    (answers,) = forked(engine, 1, TOKENS, 3)
    assert answers == [smollm.expected(PROMPTS, TOKENS)[0]] * 3
    assert engine.scheduler.counts.forks == 2


def drafted(engine, n: int, want) -> tuple[list[tuple[int, ...]], int]:
    """Texts by drafts of three tokens, of which the first is right: the others leave no trace. And how many were rolled back."""
    cache, model = engine.cache, engine.model
    seqs, texts, num_rolled_back = [], [], 0
    for ids in smollm.prompts(n):
        seq = cache.admit(ids)
        left = len(ids) - seq.length
        cache.extend(seq, left)
        texts.append([int(model.forward(cache.plan([(seq, left)])).argmax())])
        cache.commit(seq)
        seqs.append(seq)
    while going := [i for i in range(n) if len(texts[i]) < len(want[i])]:
        drafts = {i: [texts[i][-1], want[i][len(texts[i])], 5, 7] for i in going}
        for i in going:
            cache.extend(seqs[i], drafts[i])
        guesses = model.logits(model.hidden(cache.plan([(seqs[i], 4) for i in going]))).argmax(-1).view(-1, 4).tolist()
        for i, guess in zip(going, guesses, strict=True):
            num_right = next((k for k in range(3) if guess[k] != drafts[i][k + 1]), 3)
            texts[i] += guess[: 1 + num_right]
            cache.truncate(seqs[i], seqs[i].length - 3 + num_right)
            cache.commit(seqs[i])
            num_rolled_back += 3 - num_right
        cache.check()
    for seq in seqs:
        cache.release(seq)
    assert_empty(engine)
    return [tuple(text[: len(want[i])]) for i, text in enumerate(texts)], num_rolled_back


def test_drafts_that_were_wrong_are_rolled_back():
    texts, num_rolled_back = drafted(smollm.engine(), 2, smollm.expected(PROMPTS, TOKENS))
    assert texts == list(smollm.expected(PROMPTS, TOKENS)[:2])
    assert num_rolled_back >= TOKENS


@smollm.long
def test_twenty_prompts_of_64_tokens():
    """All of it, at full length."""
    n, length = 20, 64
    roomy = smollm.engine()
    assert_same(said(roomy, n, length), n, length)
    counts = roomy.scheduler.counts
    assert counts.steps < 3 * length, "16 at once"
    assert counts.reused_tokens > 0

    tight = smollm.engine(num_blocks=24, max_batch_tokens=48)
    tight.scheduler.reserve_blocks = 0
    assert_same(said(tight, n, length), n, length)
    counts = tight.scheduler.counts
    assert min(counts.preemptions, counts.chunks, counts.mixed_steps, counts.reused_tokens) > 0

    branching = smollm.engine()
    for answers in zip(*forked(branching, n, length, 2), strict=True):
        assert_same(answers, n, length)
    assert branching.scheduler.counts.forks > 0

    texts, num_rolled_back = drafted(smollm.engine(max_seqs=n), n, smollm.expected(n, length))
    assert_same(texts, n, length)
    assert num_rolled_back > n * length // 2
