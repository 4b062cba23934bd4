"""PagedModel: a transformers model served on one PagedCache says what it says alone, whoever shares the cache with it.

Tokens are compared in float32, the widest that K and V are stored in. Batches and padding change the order of sums, so logits agree
to 1e-6 of the largest, not to the bit; `alone` sees to it that no two candidates are nearer than 2e-5.
"""

from __future__ import annotations

import copy
import random
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.22", reason="states stand in the cache since transformers 5")

import kvx  # noqa: E402
from kvx.adapters.transformers import PagedModel, layer_groups  # noqa: E402
from kvx.cache.kinds import Sliding, State  # noqa: E402
from kvx.errors import BadArgument, Unsupported  # noqa: E402
from kvx.runner import Engine, Params  # noqa: E402
from tests.adapters.architectures import architectures, read_table  # noqa: E402
from tests.adapters.paged_models import PLAIN, STATES, alone, engine, prompts, tiny  # noqa: E402
from tests.adapters.served_architectures import REFUSED, SAME, summary  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
GREEDY = Params(max_tokens=8, ignore_eos=True)


def tokens(answers: list[Any]) -> list[list[int]]:
    return [list(a.tokens) for group in answers for a in group]


@pytest.mark.parametrize("name", STATES + PLAIN)
def test_requests_served_together_are_as_alone(name):
    """Six with a shared beginning: those that come after the first find it, and compute what is new."""
    served, asked = engine(name), prompts()
    assert tokens(served.generate(asked, GREEDY)) == [alone(name, p) for p in asked]
    counts = served.scheduler.counts
    assert counts.reused_tokens == 5 * 20  # five blocks of four: the first of those that differ is shared by none
    assert counts.computed_tokens == sum(map(len, asked)) - counts.reused_tokens + 6 * 7  # the last token is not computed
    assert counts.preemptions == 0
    served.cache.check()
    assert served.cache.num_seqs == 0


@pytest.mark.parametrize("name", STATES + PLAIN)
def test_few_blocks(name):
    """Requests are preempted and recomputed, from what is still there of them."""
    served, asked = engine(name, num_blocks=16, num_states=5, max_batch_tokens=11), prompts()
    assert tokens(served.generate(asked, GREEDY)) == [alone(name, p) for p in asked]
    assert served.scheduler.counts.preemptions > 0
    served.cache.check()


@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1", "Lfm2", "gemma3_text"])
def test_the_same_prompt_again_computes_only_what_is_new(name):
    served, prompt = engine(name, block_size=8), prompts()[2]  # 38 tokens
    (first,), before = served.generate([prompt], GREEDY)[0], served.scheduler.counts.computed_tokens
    assert before == len(prompt) + 7
    (again,) = served.generate([prompt], GREEDY)[0]
    assert again.tokens == first.tokens == tuple(alone(name, prompt))
    assert again.num_cached == 32
    assert served.scheduler.counts.computed_tokens - before == len(prompt) - 32 + 7
    turn = [*prompt, *first.tokens, 7, 8]  # what a user says next
    (said,) = served.generate([turn], GREEDY)[0]
    assert list(said.tokens) == alone(name, turn)
    assert said.num_cached == 40
    served.cache.check()


@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1", "Lfm2", "llama"])
def test_several_answers_of_one_prompt(name):
    """Forks: one state in the beginning, then each its own."""
    served, prompt = engine(name), prompts()[1]
    params = Params(max_tokens=8, n=3, temperature=1.0, seed=4, ignore_eos=True)
    got = tokens(served.generate([prompt], params))
    assert served.scheduler.counts.forks == 2
    assert len({tuple(t) for t in got}) > 1
    one = [t for i in range(3) for t in tokens(engine(name, prefix=False).generate([prompt], params))[i : i + 1]]
    assert got == one
    assert tokens(served.generate([prompt], Params(max_tokens=8, n=2, ignore_eos=True))) == [alone(name, prompt)] * 2
    served.cache.check()


@pytest.mark.parametrize("name", ["Lfm2", "FalconH1", "gemma3_text"])
def test_requests_that_come_and_go(name):
    """Random arrivals, prompts of three beginnings, cancelled requests, a cache that is too small for all."""
    rng = random.Random(8)
    served = engine(name, num_blocks=18, num_states=7, max_batch_tokens=23)
    pool = [p for seed in (1, 2, 3) for p in prompts((2, 7, 13), shared=14, seed=seed)]
    asked: dict[int, list[int]] = {}
    said: dict[int, list[int]] = {}
    gone: set[int] = set()
    for _ in range(160):
        if len(asked) < 40 and rng.random() < 0.4:
            prompt = rng.choice(pool)
            asked[served.add(prompt, Params(max_tokens=5, ignore_eos=True))] = prompt
        if asked and rng.random() < 0.04:
            request = rng.choice(list(asked))
            if served.cancel(request):
                gone.add(request)
        for piece in served.step():
            said.setdefault(piece.request, []).append(piece.token)
        served.cache.check()
    while not served.scheduler.is_idle:
        for piece in served.step():
            said.setdefault(piece.request, []).append(piece.token)
    assert len(asked) == 40
    assert gone
    assert (served.scheduler.counts.preemptions > 0) == (name != "gemma3_text")  # whose windows give back enough
    assert all(said[r] == alone(name, p, 5) for r, p in asked.items() if r not in gone)


def test_logits_of_every_token():
    """Of sequences that go through the model apart, in the rows of the batch; what drafts are verified by."""
    paged = engine("Qwen3Next").model
    cache, asked = paged.cache, prompts()[:2]
    seqs = [cache.admit(p) for p in asked]
    for seq in seqs:
        cache.extend(seq, seq.num_tokens)
    work = [(seq, seq.length) for seq in seqs]
    every = paged.forward(cache.plan(work), of_all=True)
    with torch.no_grad():
        want = torch.cat([tiny("Qwen3Next")(input_ids=torch.tensor([p])).logits[0] for p in asked])
    torch.testing.assert_close(every, want, rtol=0, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", ["Qwen3Next", "FalconH1", "Lfm2", "gemma3_text"])
def test_on_a_gpu(name):
    """On a model and a cache of its device, in f32: the tokens of the CPU."""
    model = copy.deepcopy(tiny(name)).cuda()
    groups = layer_groups(model.config, num_blocks=16, num_states=5, format="f32", block_size=4, state=State(snapshot_every=1))
    cache = kvx.PagedCache(groups, max_seqs=6, max_seq_len=96, max_tokens=128, device="cuda")
    served, asked = Engine(PagedModel(model, cache), max_batch_tokens=11), prompts()
    assert tokens(served.generate(asked, GREEDY)) == [alone(name, p) for p in asked]
    cache.check()


def test_step_by_step():
    """Without an engine: what a draft's fork computed leaves no trace."""
    model, prompt = tiny("Qwen3Next"), prompts()[0]
    cache = engine("Qwen3Next").cache
    paged = PagedModel(model, cache)
    seq = cache.admit(prompt)
    cache.extend(seq, len(prompt))
    logits = paged.forward(cache.plan([(seq, len(prompt))]))
    assert logits.shape == (1, 128)
    assert logits.dtype == torch.float32
    draft = cache.fork(seq)
    cache.extend(draft, [5, 6, 7])
    paged.forward(cache.plan([(draft, 3)]))
    cache.release(draft)
    said = []
    for _ in range(8):
        said.append(int(logits[0].argmax()))
        cache.extend(seq, said[-1:])
        logits = paged.forward(cache.plan([(seq, 1)], pad_seqs=3, pad_tokens=3))[:1]  # padding is nobody's
    assert said == alone("Qwen3Next", prompt)


def test_formats_are_the_caches():
    """K and V in int8, states in bf16: nearly the same logits."""
    model, prompt = tiny("FalconH1"), prompts()[2]
    want = engine("FalconH1")
    groups = layer_groups(model.config, num_blocks=32, num_states=8, format="int8_per_token_head", state_format="bf16")
    near = kvx.PagedCache(groups, max_seqs=2, max_seq_len=96)
    found = []
    for paged in (want.model, PagedModel(model, near)):
        seq = paged.cache.admit(prompt)
        for n in (30, len(prompt) - 30):
            paged.cache.extend(seq, n)
            logits = paged.forward(paged.cache.plan([(seq, n)]))
        found.append(logits)
    off = float((found[0] - found[1]).abs().max() / found[0].abs().max())
    assert 0 < off < 0.05
    stats = want.stats()
    assert stats["state_bytes_per_sequence"] == sum(
        sum(p.num_rows * p.row_bytes for p in m.spec.planes) * len(m.layers) for m in want.cache.groups[1].members
    )
    assert stats["kv_bytes_per_token"] == stats["unquantised_bytes_per_token"] == 2 * 2 * 2 * 16 * 4


def test_a_request_waits_for_what_another_computes():
    """Requests of one step cannot read what is only written in it: the second of two equal ones comes a step later."""
    served, prompt = engine("Lfm2"), prompts()[0]
    other = [9, *prompt]
    for p in (prompt, prompt, other):
        served.add(p, GREEDY)
    served.step()
    assert [c.request for c in served.scheduler.running] == [0, 2]
    while not served.scheduler.is_idle:
        served.step()
    assert served.scheduler.counts.reused_tokens == 20
    for name in ("Lfm2", "llama"):  # nothing will be found: nobody waits
        served = engine(name, prefix=False)
        for p in (prompt, prompt, other):
            served.add(p, GREEDY)
        served.step()
        assert [c.request for c in served.scheduler.running] == [0, 1, 2]


# --- refusals -------------------------------------------------------------------------------------------------------------


def cache_of(config: Any, **given: Any) -> kvx.PagedCache:
    return kvx.PagedCache(layer_groups(config, num_blocks=8, num_states=4, format="f32"), max_seqs=2, max_seq_len=64, **given)


def test_a_cache_of_another_model_is_refused():
    lfm2, llama = tiny("Lfm2"), tiny("llama")
    with pytest.raises(BadArgument, match=r"no K and V of layer 0\. Make the cache of layer_groups\(model\.config"):
        PagedModel(llama, cache_of(lfm2.config))
    spec = kvx.CacheSpec(8, 16, 2, 16, format="f32")
    with pytest.raises(BadArgument, match="the cache has no state of layer 0"):
        PagedModel(lfm2, kvx.PagedCache([kvx.LayerGroup("full", (1,), spec)], max_seqs=2, max_seq_len=64))
    with pytest.raises(BadArgument, match="the cache has K and V of layer 4; the model keeps none there"):
        PagedModel(llama, kvx.PagedCache([kvx.LayerGroup("full", range(5), spec)], max_seqs=2, max_seq_len=64))
    wide = kvx.CacheSpec(8, 16, 4, 16, format="f32")
    with pytest.raises(
        BadArgument, match=r"layer 0 of the cache has \(heads, key dim, value dim\) \(4, 16, 16\), of the model \(2,"
    ):
        PagedModel(llama, kvx.PagedCache([kvx.LayerGroup("full", range(4), wide)], max_seqs=2, max_seq_len=64))
    with pytest.raises(BadArgument, match="layer 0 of the cache sees a window of 8 tokens, of the model all tokens"):
        PagedModel(llama, kvx.PagedCache([kvx.LayerGroup("w", range(4), spec, kind=Sliding(8))], max_seqs=2, max_seq_len=64))
    groups = layer_groups(tiny("Bamba").config, num_blocks=8, num_states=4, format="f32")
    other = transformers.BambaConfig(**{**tiny("Bamba").config.to_dict(), "mamba_d_conv": 3})
    with pytest.raises(BadArgument, match=r"layer 0 of the cache has states .*'conv': \[176, 3\].*, of the model .*\[176, 2\]"):
        PagedModel(transformers.AutoModelForCausalLM.from_config(other).eval(), kvx.PagedCache(groups, max_seqs=2, max_seq_len=64))


def test_a_wrong_model_is_refused():
    llama = transformers.LlamaForCausalLM(tiny("llama").config).eval()
    cache = cache_of(llama.config)
    with pytest.raises(BadArgument, match="model is a str; it must be a transformers model"):
        PagedModel("llama", cache)
    with pytest.raises(BadArgument, match="cache is a DynamicCache; it must be a kvx"):
        PagedModel(llama, transformers.DynamicCache())
    with pytest.raises(BadArgument, match=r"in training mode.*model\.eval\(\)"):
        PagedModel(llama.train(), cache)
    paged = PagedModel(llama.eval(), cache)
    llama.train()
    seq = cache.admit([1, 2, 3])
    cache.extend(seq, 3)
    with pytest.raises(BadArgument, match=r"forward\(\): the model is in training mode"):
        paged.forward(cache.plan([(seq, 3)]))
    with pytest.raises(Unsupported, match=r"the model is torch.float64.*model\.float\(\)"):
        PagedModel(llama.eval().double(), cache)
    with pytest.raises(BadArgument, match=r'the model is on meta, the cache on cpu.*model\.to\("cpu"\)'):
        PagedModel(llama.float().to("meta"), cache)
    with pytest.raises(Unsupported, match=r"a LlamaModel gives no next token.*Load it with AutoModelForCausalLM"):
        PagedModel(tiny("llama").model, cache)
    with pytest.raises(BadArgument, match=r"add\(\): token ids are 3 to 120; the model has 0 to 119"):
        Engine(PagedModel(tiny("llama"), cache)).add([3, 120])


def test_what_transformers_cannot_go_on_with_is_refused():
    jamba = tiny("Jamba")
    with pytest.raises(Unsupported, match=r"several tokens of a jamba after others as if.*Its own generate\(\) runs it"):
        PagedModel(jamba, cache_of(jamba.config))
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=128, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                                decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16)
    ).eval()  # fmt: skip
    with pytest.raises(Unsupported, match="is an encoder and a decoder, with a cache for each"):
        PagedModel(bart, engine("llama").cache)
    config = transformers.Mamba2Config(
        hidden_size=16, expand=2, num_heads=4, head_dim=8, state_size=16, n_groups=1, num_hidden_layers=2, vocab_size=64
    )
    mamba = transformers.Mamba2ForCausalLM(config).eval()
    groups = layer_groups(config, num_blocks=8, num_states=4, format="f32")
    with pytest.raises(Unsupported, match=r"Mamba2ForCausalLM.*one of states alone runs by its own generate\(\)"):
        PagedModel(mamba, kvx.PagedCache(groups, max_seqs=2, max_seq_len=64, block_size=16))


def test_a_state_is_found_only_where_a_snapshot_is():
    """At a prompt's end, for who asks the same; where a request says so, for who shares it; every so many blocks, for all."""
    asked = prompts((5, 17, 9, 13))  # 21 tokens are shared; the first prompt, of 26, comes twice
    want = [alone("Qwen3Next", p) for p in asked]
    policies = (State(snapshot_every=0, snapshot_at_end=False), State(snapshot_every=0), State(), State(snapshot_every=5))
    for state, shared, reused in ((policies[0], (), 0), (policies[1], (), 24), (policies[2], (20,), 84), (policies[3], (), 84)):
        served = engine("Qwen3Next", state=state)
        params = Params(max_tokens=8, ignore_eos=True, snapshot_at=shared)
        assert tokens(served.generate(asked, params)) == want
        assert served.scheduler.counts.reused_tokens == reused
        served.cache.check()
    with pytest.raises(BadArgument, match=r"add\(\): snapshot_at is \(30,\), and the prompt has 26 tokens"):
        served.add(asked[0], Params(snapshot_at=(30,)))
    with pytest.raises(BadArgument, match="snapshot_at is 20; it must be a tuple of numbers of tokens"):
        Params(snapshot_at=20)


def test_the_example(capsys):
    runpy.run_path(str(ROOT / "examples" / "serve_hybrid.py"))["main"]()
    head, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert " ".join(head.split()) == "model requests prompt tokens reused computed preempted as Transformers alone"
    for row, name in zip(rows, ("Qwen3-Next", "Falcon-H1", "LFM2"), strict=True):
        model, requests, asked, reused, computed, preempted, *same = row.split()
        assert (model, requests, asked, " ".join(same)) == (name, "8", "493", "8 of 8")
        assert int(reused) == 336
        assert int(preempted) > 0
        assert int(computed) > 493 - 336 + 8 * 23  # some of it twice


@pytest.mark.skipif(
    not transformers.__version__.startswith("5.22."), reason="the table is of transformers 5.22; make sweep writes it"
)
def test_the_table_of_architectures():
    """`make sweep` runs all; here one of each kind, and none is anything but as alone or refused."""
    table = read_table((ROOT / "docs" / "state.md").read_text())
    assert set(table) == set(architectures())
    assert {outcome.split(":")[0] for outcome in table.values()} == {SAME, REFUSED, "not run"}
    for name in ("GitForCausalLM", "Gemma4ForConditionalGeneration", "Qwen2VLForConditionalGeneration", "InklingForCausalLM",
                 "MoshiForCausalLM", "MiniMaxForCausalLM", "BartForConditionalGeneration"):  # fmt: skip
        assert summary(name) == table[name], name
