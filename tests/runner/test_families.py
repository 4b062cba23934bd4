"""Small random models of each family, from a safetensors folder: the same tokens as transformers, whatever the schedule."""

from __future__ import annotations

import json
import random

import pytest
import torch

from kvx import BadArgument, Unsupported
from kvx.runner import Engine, Params
from kvx.runner.config import config_of_json

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")
SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama_scaled": ("Llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
}


def make(name: str, folder):
    kind, extra = FAMILIES[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **extra)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for w in model.parameters():  # far from uniform answers, so that no two logits are nearly the same
            w.mul_(1.0 if w.dim() == 1 else 5.0)
            if w.dim() == 1:
                w.add_(0.1 * torch.randn_like(w))
    model.save_pretrained(folder)
    return model


def greedy(model, ids: list[int], n: int) -> tuple[int, ...]:
    with torch.inference_mode():
        out = model.generate(
            input_ids=torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=n,
            do_sample=False,
        )
    return tuple(out[0, len(ids) :].tolist())


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_are_transformers(name, tmp_path):
    model = make(name, tmp_path)
    engine = Engine.load(tmp_path, num_blocks=24, block_size=8, max_seqs=3, max_batch_tokens=17)
    rng = random.Random(name)
    prompts = [[rng.randrange(3, 128) for _ in range(n)] for n in (40, 3, 25, 11)]
    answers = engine.generate(prompts, Params(max_tokens=12))
    assert [a[0].tokens for a in answers] == [greedy(model, p, 12) for p in prompts]
    engine.cache.check()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make("llama", folder)
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_same_tokens(llama, seed):
    """Prompts with shared beginnings, greedy and drawn, one answer and several; few blocks, small steps, a check after each."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 128) for _ in range(30)]
    prompts = [stem[: rng.randrange(31)] + [rng.randrange(3, 128) for _ in range(rng.randrange(1, 20))] for _ in range(10)]
    params = [
        Params(max_tokens=rng.randrange(1, 30), temperature=rng.choice((0.0, 0.8)), seed=rng.randrange(99), n=rng.choice((1, 1, 3)))
        for _ in prompts
    ]
    alone = Engine.load(llama, num_blocks=64, block_size=4, max_seqs=4, prefix=False)
    want = [[a.tokens for a in alone.generate([p], q)[0]] for p, q in zip(prompts, params, strict=True)]

    engine = Engine.load(llama, num_blocks=26, block_size=4, max_seqs=rng.randrange(2, 6), max_batch_tokens=rng.randrange(5, 40))
    engine.scheduler.reserve_blocks = rng.randrange(2)
    got: dict[tuple[int, int], list[int]] = {}
    todo = list(zip(prompts, params, strict=True))
    while todo or not engine.scheduler.is_idle:
        if todo and rng.random() < 0.4:
            engine.add(*todo.pop(0))
        if engine.scheduler.is_idle:
            continue
        for piece in engine.step():
            got.setdefault((piece.request, piece.index), []).append(piece.token)
        engine.cache.check()
    assert [[tuple(got[i, k]) for k in range(q.n)] for i, q in enumerate(params)] == want
    assert engine.cache.num_seqs == 0


def test_leaving_a_stream_gives_everything_back(llama):
    engine = Engine.load(llama, num_blocks=64, block_size=4)
    for piece in engine.stream([[5, 6, 7], [8, 9]], Params(max_tokens=20, ignore_eos=True)):
        if piece.request == 1:
            break
    assert engine.cache.num_seqs == 0
    assert engine.scheduler.is_idle
    engine.cache.check()
    assert len(engine.generate([[5, 6, 7]], Params(max_tokens=5, ignore_eos=True))[0][0].tokens) == 5


def test_a_step_that_breaks_leaves_no_names_behind(llama, monkeypatch):
    """Blocks are named before they are written; after Ctrl-C in between nobody may find them."""
    engine = Engine.load(llama, num_blocks=64, block_size=4)
    want = engine.generate([list(range(3, 30))], Params(max_tokens=4))[0][0].tokens
    engine.reset()

    def stop(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "hidden", stop)
        with pytest.raises(KeyboardInterrupt):
            engine.generate([list(range(3, 30))])
    assert engine.cache.num_seqs == 0
    answer = engine.generate([list(range(3, 30))], Params(max_tokens=4))[0][0]
    assert (answer.tokens, answer.num_cached) == (want, 0)


def test_prompts_that_cannot_be_answered(llama):
    engine = Engine.load(llama, num_blocks=4, block_size=4)
    with pytest.raises(BadArgument, match="the context is 16"):
        engine.add(list(range(3, 20)))
    with pytest.raises(BadArgument, match=r"^add\(\): there are 0 tokens"):
        engine.add([])
    with pytest.raises(BadArgument, match=r"^add\(\): tokens\[1\] is 4\.7; "):  # and never 4
        engine.add([3, 4.7])
    with pytest.raises(BadArgument, match=r"^add\(\): tokens\[0\] is -1; "):
        engine.add([-1])
    with pytest.raises(BadArgument, match="0 to 127"):
        engine.add([128])
    with pytest.raises(BadArgument, match="no tokenizer"):
        engine.add("text")
    assert engine.generate([list(range(3, 18))], Params(max_tokens=9))[0][0].finish == "length"  # the last position is used


def test_a_context_longer_than_the_models_is_refused(llama):
    with pytest.raises(BadArgument, match="max_seq_len is 257; the model's own context is 256 tokens"):
        Engine.load(llama, num_blocks=64, block_size=8, max_seq_len=257)
    assert Engine.load(llama, num_blocks=64, block_size=8).max_seq_len == 256


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sixteen_bits_stay_near(llama, dtype):
    """The same model in 16 bits: logits move by what the type's rounding explains, and no more."""
    ids = list(range(3, 60))
    exact, rounded = (Engine.load(llama, dtype=d, num_blocks=64, block_size=4) for d in ("f32", dtype))
    rows = []
    for engine in (exact, rounded):
        seq = engine.cache.admit(ids)
        engine.cache.extend(seq, len(ids))
        rows.append(engine.model.forward(engine.cache.plan([(seq, len(ids))])))
    step = torch.finfo(rounded.model.dtype).eps
    assert float((rows[0] - rows[1]).norm() / rows[0].norm()) < 16 * step


def test_unknown_families_are_refused(tmp_path):
    with pytest.raises(Unsupported, match="model_type is 'bert'"):
        config_of_json({"model_type": "bert"})
    with pytest.raises(Unsupported, match="sliding_window is 64"):
        config_of_json({"model_type": "mistral", "sliding_window": 64})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BadArgument, match=r"has no model\.safetensors"):
        Engine.load(tmp_path)


@pytest.mark.parametrize(
    ("args", "fields", "words"),
    [
        ((None,), {}, r"Engine\.load\(\): path is None; it must be a folder with config\.json"),
        ((7,), {}, "path is 7"),
        (("model",), {"num_blocks": "many"}, "num_blocks is 'many'; it must be 1 or more"),
        (("model",), {"tiers": [5]}, 'tier "5" is none'),
    ],
    ids=["no_path", "number", "no_count", "no_tier"],
)
def test_what_is_not_loaded(args, fields, words):
    with pytest.raises(BadArgument, match=words):
        Engine.load(*args, **fields)
