"""Caches of transformers handed over: a text begun on one cache goes on with another, token for token."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from transformers import DynamicCache, StaticCache  # noqa: E402

from kvx import BadArgument, Damaged, Incompatible, Unsupported  # noqa: E402
from kvx import handover as handovers  # noqa: E402
from kvx.adapters.transformers import KvxCache, export_cache, import_cache  # noqa: E402
from kvx.adapters.transformers.handover import name_of  # noqa: E402
from tests.adapters.test_transformers_cache import FAMILIES, SIZES, check_blocks, model, prompts  # noqa: E402
from tests.runner import smollm  # noqa: E402

CACHES = ("dynamic", "static", "kvx")
TOKENS = 12


def empty(kind: str, config: Any, **options: Any):
    if kind == "static":
        return StaticCache(config=config, max_cache_len=128)
    return DynamicCache(config=config) if kind == "dynamic" else KvxCache(config, **{"block_size": 4, **options})


def run(made: Any, ids: torch.Tensor, cache: Any, **more: Any) -> torch.Tensor:
    """The logits after the last of [batch, n] ids, all of them computed."""
    with torch.no_grad():
        return made(ids, past_key_values=cache, use_cache=True, **more).logits[:, -1]


def go_on(made: Any, ids: torch.Tensor, cache: Any, n: int = TOKENS) -> list[int]:
    """The n greedy tokens after `ids` [count], of which the cache may have some."""
    with torch.inference_mode():
        out = made.generate(
            ids[None], attention_mask=torch.ones_like(ids)[None], past_key_values=cache, max_new_tokens=n, do_sample=False
        )
    return out[0, len(ids) :].tolist()


def family(name: str, implementation: str = "") -> Any:
    made = model(name)
    made.set_attn_implementation(implementation or FAMILIES[name].own)
    return made


def one_prompt(n: int = 37) -> torch.Tensor:
    return prompts((n,))["input_ids"][0]


@functools.cache
def prefilled(name: str, kind: str, n: int):
    """A handover of the first n tokens of one_prompt(), computed on a cache of this kind."""
    made, cache = family(name), empty(kind, family(name).config)
    ids = one_prompt()[:n]
    run(made, ids[None], cache)
    return export_cache(cache, ids, model=made.config, block_size=8)


@functools.cache
def alone(name: str, kind: str) -> list[int]:
    """What follows one_prompt() without a handover."""
    return go_on(family(name), one_prompt(), empty(kind, family(name).config))


@functools.cache
def caches_latents() -> bool:
    """Newer versions do; older ones cache K and V of every head, K's rows longer than V's."""
    made, cache = family("DeepseekV3"), DynamicCache()
    run(made, one_prompt()[None], cache)
    return cache.layers[0].keys.shape[1] == 1


# ---- one after the other


@pytest.mark.parametrize("b", CACHES)
@pytest.mark.parametrize("a", CACHES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "DeepseekV3"])
def test_goes_on_as_if_alone(name, a, b):
    """Layers that see all, all with a window, both, and MLA."""
    made, ids = family(name), one_prompt()
    if name == "DeepseekV3" and not caches_latents():
        if "static" in (a, b):
            pytest.skip("this version's StaticCache takes no rows of two sizes")
        with pytest.raises(Unsupported, match="layer 0 has rows of 24 in K and 12 in V, of 4 heads"):
            prefilled(name, a, len(ids) - 1)
        return
    handover = prefilled(name, a, len(ids) - 1)
    cache = import_cache(handover, empty(b, made.config), model=made.config, tokens=ids)
    assert int(cache.get_seq_length()) == len(ids) - 1
    assert go_on(made, ids, cache) == alone(name, b)
    windows = {"Llama": [0], "Mistral": [9], "Gemma3": [7, 0], "DeepseekV3": [0]}
    assert [part.window for part in handover.parts] == windows[name]
    for part in handover.parts:  # what no later token sees stays behind
        assert part.first_block == (max(0, len(ids) - part.window) // 8 if part.window else 0)


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_attention_reads_imported_blocks(name):
    made, ids = family(name, "kvx"), one_prompt()
    cache = import_cache(prefilled(name, "dynamic", 36), empty("kvx", made.config), tokens=ids)
    family(name, "kvx")  # the prefill changed it
    assert go_on(made, ids, cache) == go_on(made, ids, empty("kvx", made.config))
    check_blocks(cache)


@pytest.mark.parametrize("b", CACHES)
def test_of_a_whole_prompt_the_last_token_is_computed_again(b):
    made, ids = family("Llama"), one_prompt()
    handover = prefilled("Llama", "dynamic", len(ids))
    cache = import_cache(handover, empty(b, made.config), model=made.config, tokens=ids)
    assert int(cache.get_seq_length()) == len(ids) - 1
    assert go_on(made, ids, cache) == alone("Llama", b)


@pytest.mark.parametrize("b", CACHES)
def test_a_window_goes_on_where_it_ends(b):
    """A layer that let its oldest token go cannot take the newest back; it can take the next."""
    made, ids = family("Gemma3"), one_prompt()
    handover = prefilled("Gemma3", "dynamic", len(ids))
    with pytest.raises(Incompatible, match=r"after 36 tokens layer 0 \(window 7\) sees from token 30; .* has 31 to 36"):
        import_cache(handover, empty(b, made.config), model=made.config, tokens=ids)
    want = alone("Gemma3", b)
    longer = torch.cat((ids, torch.tensor(want[:1])))
    cache = import_cache(handover, empty(b, made.config), model=made.config, tokens=longer)
    assert go_on(made, longer, cache, TOKENS - 1) == want[1:]


def test_a_new_cache_from_a_config():
    made, ids = family("Gemma3"), one_prompt()
    cache = import_cache(prefilled("Gemma3", "kvx", 36), made.config, tokens=ids)
    assert isinstance(cache, DynamicCache)
    assert [layer.is_sliding for layer in cache.layers] == [True, False, True]
    assert go_on(made, ids, cache) == alone("Gemma3", "dynamic")
    assert cache.layers[0].keys.shape[2] == 6
    without = import_cache(prefilled("Gemma3", "kvx", 36), DynamicCache(), model=made.config, tokens=ids)  # all tokens a layer
    assert go_on(made, ids, without) == alone("Gemma3", "dynamic")
    with pytest.raises(Incompatible, match=r"after 36 tokens layer 0 \(window 7\) sees from token 30; .* has 31 to 36"):
        import_cache(prefilled("Gemma3", "dynamic", 37), DynamicCache(), model=made.config, tokens=ids)


def test_an_answer_moves_twice():
    """Midway through an answer, twice, through three kinds of cache."""
    made, ids = family("Llama"), one_prompt()
    text, cache = ids, empty("dynamic", made.config)
    for n, kind in ((3, "kvx"), (4, "static"), (5, "")):
        text = torch.cat((text, torch.tensor(go_on(made, text, cache, n))))
        if kind:
            handover = export_cache(cache, text[:-1], model="mine", padding=0)
            cache = import_cache(handover, empty(kind, made.config), model="mine", tokens=text)
    assert text[len(ids) :].tolist() == alone("Llama", "dynamic")


# ---- batches


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_one_of_a_left_padded_batch(name, kind):
    lengths, made = (23, 5, 12), family(name)
    batch = prompts(lengths)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    cache = empty(kind, made.config)
    if kind == "kvx":
        family(name, "kvx")  # whose mask tells the cache of the padding
    run(made, batch["input_ids"], cache, attention_mask=batch["attention_mask"], position_ids=positions)
    family(name)
    for i, n in enumerate(lengths):
        ids = batch["input_ids"][i, -n:]
        padding = None if kind == "kvx" else 23 - n
        handover = export_cache(cache, ids, model=made.config, sequence=i, padding=padding, block_size=4)
        want = go_on(made, ids, empty("dynamic", made.config), 6)
        longer = torch.cat((ids, torch.tensor(want[:1])))
        assert go_on(made, longer, import_cache(handover, made.config, tokens=longer), 5) == want[1:], f"sequence {i}"


def test_padding_is_not_guessed():
    made, batch = family("Llama"), prompts((9, 4))
    cache = empty("dynamic", made.config)
    run(made, batch["input_ids"], cache, attention_mask=batch["attention_mask"])
    with pytest.raises(BadArgument, match=r"4 tokens; the cache has 9 columns .* padding="):
        export_cache(cache, batch["input_ids"][1, -4:], model="m", sequence=1)
    with pytest.raises(BadArgument, match="4 tokens; the cache has 3"):
        export_cache(cache, batch["input_ids"][1, -4:], model="m", sequence=1, padding=6)
    with pytest.raises(BadArgument, match="sequence is 2; the cache has 2, 0 to 1"):
        export_cache(cache, batch["input_ids"][1], model="m", sequence=2)
    with pytest.raises(BadArgument, match="sequence is -1"):
        export_cache(cache, batch["input_ids"][1], model="m", sequence=-1)
    blocks = empty("kvx", made.config)
    run(made, batch["input_ids"], blocks, attention_mask=batch["attention_mask"])
    with pytest.raises(BadArgument, match="sequence is 2"):
        export_cache(blocks, batch["input_ids"][1], model="m", sequence=2)
    with pytest.raises(BadArgument, match="padding is 5; sequence 1 of this KvxCache has 0"):
        export_cache(blocks, batch["input_ids"][1], model="m", sequence=1, padding=5)


@pytest.mark.parametrize("kind", CACHES)
def test_a_beginning_of_what_is_there(kind):
    made, ids = family("Llama"), one_prompt()
    cache = empty(kind, made.config)
    run(made, ids[None], cache)
    handover = export_cache(cache, ids[:21], model=made.config, padding=0, block_size=8)
    assert handover.parts[0].content == prefilled("Llama", kind, len(ids)).cut(21).parts[0].content
    if kind == "dynamic":  # its window of 7 has 6 tokens; a static one has 7, and one token less to go on from
        sliding = empty(kind, family("Gemma3").config)
        run(family("Gemma3"), ids[None], sliding)
        with pytest.raises(BadArgument, match=r"after 36 tokens layer 0 \(window 7\) sees from token 30, and has them from 31"):
            export_cache(sliding, ids[:36], model="m", padding=0)


# ---- any shape


@pytest.mark.parametrize("seed", range(60))
def test_any_window_length_and_block_size(seed):
    """Random K and V without a model, fed in pieces: the next token sees what was put in, or the import is refused."""
    rng, made = random.Random(seed), torch.Generator().manual_seed(seed)
    window, heads, n, batch = rng.choice((2, 3, 5, 7, 16, 33)), rng.choice((1, 2, 3)), rng.randint(2, 70), rng.choice((1, 3))
    full, sliding = "full_attention", "sliding_attention"
    kinds = rng.choice(([sliding] * 2, [full] * 2, [sliding, full, sliding]))
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=len(kinds), layer_types=kinds, sliding_window=window, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=16, hidden_size=96, vocab_size=99,
    )  # fmt: skip
    a, b, sequence = rng.choice(CACHES), rng.choice(CACHES), rng.randrange(batch)
    cache = empty(a, config, block_size=rng.choice((1, 4, 16)))
    states = [torch.randn(2, batch, heads, n, 16, generator=made) for _ in kinds]
    # transformers 4.56 fills windows of a StaticCache in one piece.
    ends = sorted({n, *(rng.randint(1, n) for _ in range(0 if a == "static" else rng.choice((0, 1, 3))))})
    for start, end in zip([0, *ends], ends, strict=False):
        for i, x in enumerate(states):
            cache.update(*x[:, :, :, start:end], i, {"cache_position": torch.arange(start, end)})
    padding = 0 if a == "kvx" else rng.choice((0, rng.randint(0, n - 2)))
    ids = list(range(1, n - padding + 1))
    handover = export_cache(
        cache, ids, model=config, sequence=sequence, padding=padding, block_size=rng.choice((1, 4, 8, 16, 32))
    )  # fmt: skip
    handover = handovers.join(handover.convert(block_size=rng.choice((None, 1, 2, 16, 64))).shard(heads))
    tokens = ids + [7] * rng.randrange(2)
    length = len(tokens) - 1
    there = empty(b, config, block_size=rng.choice((1, 4, 16)))
    lacks = any(part.window and part.first_token > max(0, length + 1 - part.window) for part in handover.parts)
    if lacks:
        assert length < len(ids)
        with pytest.raises(Incompatible, match=f"after {length} tokens"):
            import_cache(handover, there, model=config, tokens=tokens)
        return
    import_cache(handover, there, model=config, tokens=tokens)
    for i, kind in enumerate(kinds):
        new = torch.randn(2, 1, heads, 1, 16, generator=made)
        got = torch.stack(there.update(*new, i, {"cache_position": torch.tensor([length])}))
        first = max(0, length + 1 - window) if kind == sliding else 0
        want = torch.cat((states[i][:, sequence : sequence + 1, :, padding + first : padding + length], new), dim=3)
        if length < got.shape[3]:
            got = got[:, :, :, : length + 1]  # what is behind is room
        assert torch.equal(got[:, :, :, -want.shape[3] :], want)


# ---- formats, shards, files


def test_blocks_of_one_format_move_as_they_are():
    made, ids = family("Llama"), one_prompt()
    for format in ("fp8_e4m3_per_token_head", "int8_per_token_head", "bf16"):
        cache = empty("kvx", made.config, format=format)
        run(made, ids[None], cache)
        handover = export_cache(cache, ids, model=made.config, block_size=8)
        assert handover.spec.format == format
        there = import_cache(handover, empty("kvx", made.config, format=format, block_size=16), dtype=torch.float32)
        again = export_cache(there, ids, model=made.config, block_size=8)
        assert again.parts[0].content == handover.parts[0].content
        plain = export_cache(import_cache(handover, made.config, dtype=torch.float32), ids, model=made.config, block_size=8)
        want = handover.convert(format="f32")
        assert plain.parts[0].content == want.parts[0].content


def test_types_are_converted():
    made, ids = family("Llama"), one_prompt()
    cache = import_cache(prefilled("Llama", "dynamic", 37), made.config, dtype=torch.bfloat16)
    assert cache.layers[2].keys.dtype == torch.bfloat16
    plain = import_cache(prefilled("Llama", "dynamic", 37), made.config)
    assert torch.equal(cache.layers[2].keys, plain.layers[2].keys.bfloat16())
    assert export_cache(cache, ids, model=made.config).spec.format == "bf16"
    with pytest.raises(BadArgument, match=r"dtype is torch\.float64; it must be torch\.float32"):
        import_cache(prefilled("Llama", "dynamic", 37), made.config, dtype=torch.float64)
    coded = prefilled("Llama", "dynamic", 37).convert(format="fp8_e4m3_per_token_head")
    with pytest.raises(BadArgument, match="nothing says what the model computes in: dtype="):
        import_cache(coded, DynamicCache(), model=name_of(made.config))
    assert import_cache(coded, DynamicCache(), model=name_of(made.config), dtype=torch.float32).get_seq_length() == 37


@functools.cache
def four_heads() -> Any:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4})
    made = transformers.LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return made


@pytest.mark.parametrize("b", CACHES)
def test_through_two_ranks_and_a_file(b, tmp_path):
    made, ids = four_heads(), one_prompt()
    cache = empty("dynamic", made.config)
    run(made, ids[None], cache)
    handover = export_cache(cache, ids, model=made.config)
    ranks = handover.shard(2)
    assert [(r.spec.head_start, r.spec.num_kv_heads) for r in ranks] == [(0, 2), (2, 2)]
    for rank in ranks:
        with pytest.raises(Incompatible, match=r"head_start is 2; here it is 0|num_kv_heads is 2; here it is 4"):
            import_cache(rank, made.config)
    handovers.save(tmp_path / "kept", handovers.join([r.convert(block_size=32) for r in ranks]).convert(block_size=128))
    loaded = handovers.load(tmp_path / "kept", model=name_of(made.config))
    there = import_cache(loaded, empty(b, made.config), model=made.config, tokens=ids)
    assert go_on(made, ids, there) == go_on(made, ids, empty(b, made.config))


# ---- what is refused


def test_another_model_is_not_read():
    made, ids = family("Llama"), one_prompt()
    handover = prefilled("Llama", "dynamic", 37)
    with pytest.raises(Incompatible, match=r"model is 'llama-3x64-kv2x16-v131'; here it is 'other'"):
        import_cache(handover, made.config, model="other")
    with pytest.raises(Incompatible, match=r"model is 'llama-.*; here it is 'qwen3-"):
        import_cache(handover, model("Qwen3").config)
    cache = empty("dynamic", made.config)
    run(made, ids[None], cache)
    named = export_cache(cache, ids, model="mine")

    def other(**fields: Any) -> Any:
        config = copy.deepcopy(made.config)
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    for fields, says in (
        ({"head_dim": 32}, "head_dim is 16; here it is 32"),
        ({"num_key_value_heads": 1}, "num_kv_heads is 2; here it is 1"),
        ({"num_hidden_layers": 2}, "num_layers of the handover is 3; here it is 2"),
    ):
        with pytest.raises(Incompatible, match=says):
            import_cache(named, other(**fields), model="mine")
    for kind in ("static", "kvx"):
        with pytest.raises(Incompatible, match="num_layers of the handover is 3; here it is 2"):
            import_cache(named, empty(kind, other(num_hidden_layers=2)), model="mine")
    early = empty("static", made.config)
    run(four_heads(), ids[None, :1], early)
    early.reset()
    with pytest.raises(Incompatible, match="num_kv_heads is 2; here it is 4"):
        import_cache(named, early, model="mine")
    with pytest.raises(BadArgument, match="a StaticCache does not say which model it is of"):
        import_cache(named, empty("static", made.config))
    assert import_cache(named, empty("static", made.config), model="mine").get_seq_length() == 37


@pytest.mark.parametrize("kind", CACHES)
def test_damage_is_seen_before_it_is_read(kind):
    made = family("Llama")
    handover = prefilled("Llama", "dynamic", 37)
    bad = copy.deepcopy(handover)
    part = bad.parts[0].buffers[2]
    part[11] ^= 1
    cache = empty(kind, made.config)
    with pytest.raises(Damaged, match="part 0"):
        import_cache(bad, cache, model=made.config)
    assert int(cache.get_seq_length()) == 0
    part[11] ^= 1
    import_cache(bad, cache, model=made.config)


def test_a_gpu_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match=r'^import_cache\(\): device is "cuda", and torch sees no CUDA device'):
        import_cache(prefilled("Llama", "dynamic", 37), family("Llama").config, device="cuda")


def test_other_tokens_are_refused():
    made, ids = family("Llama"), one_prompt()
    handover = prefilled("Llama", "dynamic", 37)
    wrong = ids.clone()
    wrong[30] += 1
    with pytest.raises(Incompatible, match=rf"token 30 is {int(wrong[30])}; of the handover it is {int(ids[30])}"):
        import_cache(handover, made.config, tokens=wrong)
    assert int(import_cache(handover, made.config, tokens=wrong[:30]).get_seq_length()) == 29
    with pytest.raises(BadArgument, match="tokens are 1; the last is computed"):
        import_cache(handover, made.config, tokens=ids[:1])
    with pytest.raises(BadArgument, match=r"tokens are int64 \[1, 37\]; they must be a row of ids"):
        import_cache(handover, made.config, tokens=ids[None])


def test_caches_that_cannot_be_handed_over():
    made, ids = family("Llama"), one_prompt()
    cache = empty("dynamic", made.config)
    for other in (transformers.EncoderDecoderCache(DynamicCache(), DynamicCache()), None):
        with pytest.raises(
            BadArgument, match=r"got (an EncoderDecoderCache|None); it takes a DynamicCache, a StaticCache or a KvxCache"
        ):
            export_cache(other, ids, model="m")
        with pytest.raises(BadArgument, match=r"got (an EncoderDecoderCache|None); it takes a DynamicCache"):
            import_cache(prefilled("Llama", "dynamic", 37), other, model=made.config)
    with pytest.raises(BadArgument, match="a DynamicCache without K and V"):
        export_cache(cache, ids, model="m")
    run(made, ids[None], cache)
    with pytest.raises(BadArgument, match=r"38 tokens; the cache has 37\. The last that generate"):
        export_cache(cache, [*ids.tolist(), 4], model="m")
    handover = prefilled("Llama", "dynamic", 37)
    with pytest.raises(BadArgument, match="with tokens in it"):
        import_cache(handover, cache, model=made.config)
    with pytest.raises(BadArgument, match="37 tokens; layer 0 of the cache has room for 36"):
        import_cache(handover, StaticCache(config=made.config, max_cache_len=36), model=made.config)

    class OtherLayer(type(cache.layers[0])):
        pass

    cache.layers[1].__class__ = OtherLayer
    with pytest.raises(Unsupported, match="layer 1 is a OtherLayer"):
        export_cache(cache, ids, model="m")


# ---- a real model


@functools.cache
def real_text() -> torch.Tensor:
    return torch.tensor(smollm.prompts(1)[0])


@functools.cache
def real_alone() -> list[int]:
    return go_on(real_model(), real_text(), empty("dynamic", real_model().config), 64)


def real_model() -> Any:
    made = smollm.reference()
    made.generation_config.eos_token_id = None
    return made


@smollm.needs_weights
@pytest.mark.parametrize(("a", "b"), [("dynamic", "static"), ("dynamic", "kvx"), ("kvx", "dynamic")])
def test_a_real_model_says_the_same(a, b):
    """SmolLM2, float32, greedy, 64 tokens."""
    made, ids = real_model(), real_text()
    cache = empty(a, made.config, block_size=16)
    run(made, ids[None], cache)
    handover = export_cache(cache, ids, model="SmolLM2-135M-Instruct")
    there = StaticCache(config=made.config, max_cache_len=256) if b == "static" else empty(b, made.config, block_size=32)
    there = import_cache(handover, there, model="SmolLM2-135M-Instruct", tokens=ids)
    assert go_on(made, ids, there, 64) == real_alone()


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason=f"transformers {transformers.__version__} has no Gemma 4")
def test_layers_that_differ_in_their_heads():
    """Gemma 4: layers that attend to all tokens have larger heads than those of a window, and the config has no one size."""
    config = transformers.Gemma4TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, global_head_dim=32, hidden_size=64, vocab_size=100, num_kv_shared_layers=0,
    )  # fmt: skip
    cache = transformers.DynamicCache(config=config)
    planes = [torch.randn(2, 1, 2, 7, dim) for dim in (16, 32)]
    for i, (k, v) in enumerate(planes):
        cache.update(k, v, i)
    handover = export_cache(cache, range(7), model=config)
    back = import_cache(handover, KvxCache(config, block_size=4))
    for layer, (k, v) in zip(back.layers, planes, strict=True):
        assert torch.equal(layer.keys, k)
        assert torch.equal(layer.values, v)
