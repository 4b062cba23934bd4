"""A KvxCache and attention "kvx" where things are unusual: the same as transformers' own caches, or refused with the reason."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402

from kvx import BadArgument, Unsupported  # noqa: E402
from kvx.adapters.transformers import KvxCache, attend, export_cache  # noqa: E402
from kvx.adapters.transformers.mask import CausalMask, MaskStates  # noqa: E402
from tests.adapters.paged_models import tiny  # noqa: E402
from tests.adapters.test_transformers_cache import SIZES, VOCAB, cache_of, check_blocks, generate, model, prompts  # noqa: E402

IS_5 = int(transformers.__version__.split(".")[0]) >= 5
only_5 = pytest.mark.skipif(not IS_5, reason=f"transformers {transformers.__version__} has not what this is about; 5 has")
before_5_22 = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 22),
    reason=f"of transformers 5.22; this is {transformers.__version__}",
)


@torch.no_grad()
def randomised(made):
    """The usual start is so even that every token is the same."""
    torch.manual_seed(7)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return made.eval()


def run(made, implementation, cache=None, lengths=(11, 6), **options):
    made.set_attn_implementation(implementation)
    given = {} if cache is None else {"past_key_values": cache}
    return made.generate(**prompts(lengths), **given, **{"max_new_tokens": 8, "do_sample": False, **options}).tolist()


# ---- models with an encoder


def encoder_decoder(name):
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
    if name == "T5":
        config = transformers.T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, **ids)
        return randomised(transformers.T5ForConditionalGeneration(config))
    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 96))
    }
    config = transformers.BartConfig(vocab_size=VOCAB, d_model=64, **sizes, **ids, forced_eos_token_id=None)
    return randomised(transformers.BartForConditionalGeneration(config))


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_an_encoder_decoder_model_is_refused_one_cache(name):
    made = encoder_decoder(name)
    with pytest.raises(Unsupported, match=r"keeps two caches.*EncoderDecoderCache\(KvxCache\(model.config\), DynamicCache"):
        run(made, "eager", KvxCache(made.config))
    ids = prompts((9,))["input_ids"]
    with torch.no_grad(), pytest.raises(Unsupported, match=r"gets K and V of two modules of one model.*EncoderDecoderCache"):
        made(input_ids=ids, decoder_input_ids=ids, past_key_values=KvxCache(made.config))


@only_5
def test_generate_refuses_one_cache_before_the_encoder_runs(monkeypatch):
    made = encoder_decoder("Bart")
    monkeypatch.setattr(type(made), "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(Unsupported, match=r"generate\(\): past_key_values is a KvxCache of an encoder-decoder model"):
        run(made, "eager", KvxCache(made.config))


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "kvx"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_the_decoder_of_an_encoder_decoder_model(options, implementation):
    made = encoder_decoder("Bart")
    want = run(made, "eager", **options)
    assert len({*want[0]}) > 2, "a model that repeats one token shows nothing"
    for cross in (DynamicCache(), KvxCache(made.config)):
        cache = KvxCache(made.config, block_size=4)
        assert run(made, implementation, EncoderDecoderCache(cache, cross), **options) == want
        check_blocks(cache)


# ---- gradients


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
def test_gradients_are_refused(implementation):
    made, ids = model("Llama"), prompts((7,))["input_ids"]
    made.set_attn_implementation(implementation)
    cache = cache_of("Llama")
    with pytest.raises(Unsupported, match=r"layer 0 require gradients.*no_grad.*DynamicCache"):
        made(ids, past_key_values=cache)
    with torch.no_grad():
        assert made(ids, past_key_values=cache).logits.shape == (1, 7, VOCAB), "the refusal left something behind"
    frozen = copy.deepcopy(made).requires_grad_(False)
    assert frozen(ids, past_key_values=cache_of("Llama")).logits.shape == (1, 7, VOCAB)
    frozen.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)  # queries alone, as with a LoRA on them
    if implementation == "kvx":
        with pytest.raises(Unsupported, match="queries or sinks require gradients"):
            frozen(ids, past_key_values=cache_of("Llama"))


@torch.no_grad()
def test_a_window_without_causality_is_refused_with_the_module():
    """Nothing says which keys such queries see. One query is the last token, causal or not."""
    cache = KvxCache(transformers.MistralConfig(**SIZES, sliding_window=4, attn_implementation="kvx"))
    key, value = cache.update(torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16), 0)
    assert key.layer.window == 4
    layer, q = torch.nn.Linear(1, 1), torch.randn(1, 4, 3, 16)
    with pytest.raises(Unsupported, match=r"Linear is not causal and has a window of 4 tokens.*attn_implementation='sdpa'"):
        attend(layer, q, key, value, None, is_causal=False)
    out = [attend(layer, q[:, :, -1:], key, value, None, is_causal=causal)[0] for causal in (False, True)]
    assert torch.equal(*out)


def test_attention_without_a_cache_keeps_gradients():
    """Of the sinks too."""
    q, k, v = (torch.randn(1, heads, 5, 16, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True)
    out, _ = attend(torch.nn.Identity(), q, k, v, None, s_aux=sinks)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.abs().sum() > 0 for x in (q, k, v, sinks))


def test_gradient_checkpointing_trains_as_without_a_cache():
    inputs = prompts((7,))
    grads = []
    for given in ({"use_cache": False}, {"past_key_values": cache_of("Llama")}):
        made = copy.deepcopy(model("Llama")).train()
        made.set_attn_implementation("sdpa")
        if "past_key_values" in given:
            made.gradient_checkpointing_enable()
        made(**inputs, **given, labels=inputs["input_ids"]).loss.backward()
        grads.append(made.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*grads)


# ---- masks


@only_5
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral", "Gemma3"])
@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no_mask"])
def test_masks_made_ahead_of_forward(name, masked):
    """generate() makes them itself for a cache of a fixed size, whose last columns no token has yet."""
    inputs = prompts((11, 6) if masked else (11,))
    inputs = inputs if masked else {"input_ids": inputs["input_ids"]}
    want = generate(name, "eager", inputs)
    assert generate(name, "kvx", inputs, cache_implementation="static", disable_compile=True).tolist() == want.tolist()


@only_5
def test_a_model_that_changes_its_mask():
    """Doge cuts the mask and adds to it; PaliGemma makes it ahead, with tokens that see each other both ways."""
    config = transformers.DogeConfig(**{**SIZES, "keep_window_size": 16})
    made = randomised(transformers.DogeForCausalLM(config))
    want = run(made, "eager")
    assert run(made, "kvx", KvxCache(config)) == run(made, "eager", KvxCache(config)) == want


@only_5
def test_a_model_that_adds_the_mask_is_refused():
    """GIT takes attn_implementation="kvx", and attends by itself: a mask of booleans would be added to its scores."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}
    made = randomised(transformers.GitForCausalLM(transformers.GitConfig(vision_config=vision, **sizes)))
    want = run(made, "eager")
    assert run(made, "eager", KvxCache(made.config)) == want
    for cache in (None, KvxCache(made.config)):
        with pytest.raises(Unsupported, match=r"adds the mask to its scores.*attn_implementation='eager'"):
            run(made, "kvx", cache)


def test_a_mask_is_what_sdpa_would_get():
    mask = MaskStates.make((2, 3, 7), torch.device("cpu"), CausalMask(4, 7, torch.tensor([0, 5]).numpy()))
    assert mask.shape == (2, 1, 3, 7)
    assert mask.dtype == torch.bool
    want = torch.zeros(2, 1, 3, 7, dtype=torch.bool)
    for row, query in enumerate((4, 5, 6)):
        want[0, 0, row, query - 3 : query + 1] = True
        want[1, 0, row, 5 : query + 1] = True
    assert torch.equal(mask & True, want)
    assert torch.equal(mask[:, :, :2, 1:] | False, want[:, :, :2, 1:])
    for same in (mask.contiguous(), mask[:, :, :, :7], mask.detach(), mask.to(torch.bool), mask[..., : 7 + 3]):
        assert isinstance(same, MaskStates)
        assert same.causal is mask.causal
    assert "window=4" in repr(mask)


def test_padding_with_holes_as_the_tokenizer_made_it():
    """[batch, columns], from a model that makes no masks of its own."""
    q, k, v = (torch.randn(2, heads, 6, 16) for heads in (4, 2, 2))
    holes = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    got, _ = attend(torch.nn.Identity(), q, k, v, holes)
    seen = torch.ones(6, 6, dtype=torch.bool).tril() & holes.bool()[:, None, None, :]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(got, want.transpose(1, 2))


# ---- a cache of another model


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 3 calls.*LlamaConfig whose num_hidden_layers is 2"),
        ({"num_hidden_layers": 5}, "num_hidden_layers is 3 calls"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 2 calls"),
        ({"head_dim": 32}, "head_dim is 16 calls"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 4}, "cache was made from"),
    ],
)
def test_a_cache_of_another_config(change, says, implementation):
    config = transformers.LlamaConfig(**SIZES)
    for name, value in change.items():
        setattr(config, name, value)
    if "layer_types" in change:
        config.model_type = "mistral"  # Llama itself has no windows
    with pytest.raises(BadArgument, match=says):
        generate("Llama", implementation, prompts((9, 5)), KvxCache(config))


def test_an_equal_config_is_the_same_model():
    """One that was read apart from the model. How the model attends, its own says."""
    cache = KvxCache(transformers.LlamaConfig(**SIZES), block_size=4)
    assert generate("Llama", "kvx", prompts((9, 5)), cache).tolist() == generate("Llama", "sdpa", prompts((9, 5))).tolist()
    assert cache.pads.tolist() == [0, 4], "padding is not stored where attention reads the blocks"


def test_tokens_of_another_model():
    """Two models of one geometry, as a model and its fine-tune."""
    cache, inputs = cache_of("Llama"), prompts((9,))
    generate("Llama", "sdpa", inputs, cache)
    other = copy.deepcopy(model("Llama"))
    with torch.no_grad():
        with pytest.raises(BadArgument, match=r"has 22 tokens of another model.*reset"):
            other(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache)
        cache.reset()
        other(inputs["input_ids"], past_key_values=cache)
    assert cache.get_seq_length() == 9


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
@pytest.mark.parametrize("seen", [0, 6])
def test_a_forward_that_was_interrupted(implementation, seen, monkeypatch):
    made, ids = model("Llama"), prompts((12,))["input_ids"]
    made.set_attn_implementation(implementation)
    cache = cache_of("Llama")
    with torch.no_grad():
        want = made(ids).logits[:, seen:]
        if seen:
            made(ids[:, :seen], past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(made.model.layers[1].mlp, "forward", lambda x: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                made(ids[:, seen:], past_key_values=cache)
        with pytest.raises(BadArgument, match=r"layer 0 has 12 tokens, layer 2 \d+: the forward before this did not finish"):
            made(ids[:, seen:], past_key_values=cache)
        cache.crop(seen) if seen else cache.reset()
        got = made(ids[:, seen:], past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    check_blocks(cache)


# ---- layers that keep something else


@only_5
@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("RecurrentGemma", {"num_hidden_layers": 3}, "layers 0, 1 are 'recurrent', which keeps a recurrent or convolution state"),
        pytest.param(
            "DeepseekV32",
            {"num_hidden_layers": 2},
            "'indexed_attention', which keeps keys of an indexer",
            marks=before_5_22,
        ),
        ("Mamba", {}, "has no num_attention_heads: its model keeps a state instead of K and V"),
    ],
)
def test_layers_that_keep_more_or_less_than_k_and_v(name, options, says):
    with pytest.raises(Unsupported, match=rf"KvxCache\(\): .*{name}Config.*{says}.*Leave past_key_values out"):
        KvxCache(getattr(transformers, f"{name}Config")(**options))


def test_states_need_a_newer_transformers(monkeypatch):
    class Layer:
        def __init__(self, config=None):
            """As in transformers 5.8."""

    monkeypatch.setattr(transformers.cache_utils, "LinearAttentionLayer", Layer)
    with pytest.raises(Unsupported, match=r"layers 0, 3 are '\w+', which is cached by newer versions of transformers \(5.22"):
        KvxCache(tiny("NemotronH"))


@pytest.mark.parametrize(
    ("name", "empty", "keeps"), [("gemma4_text", 2, "K and V of 2"), ("NemotronH", 1, "K and V of 1, states of 2")]
)
def test_layers_that_keep_nothing(name, empty, keeps):
    """Those that read the K and V of an earlier layer, and those without attention: transformers 5.23 lists them."""
    if not hasattr(transformers.cache_utils, "DummyLayer"):
        pytest.skip("transformers before 5.23 has no layers that keep nothing")
    here = tiny(name)
    cache = KvxCache(here)
    with pytest.raises(BadArgument, match=rf"layer {empty} keeps nothing by its config, and now K and V come of it"):
        cache.update(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8), empty)
    for filled in (cache, DynamicCache(config=here.config)):
        with pytest.raises(BadArgument, match="it must be a cache that a model has filled"):
            export_cache(filled, [1, 2, 3], model=here.config)
    with torch.no_grad():
        here(torch.arange(1, 30)[None].repeat(3, 1), past_key_values=cache)
    assert f"sequences: 3 of 29 tokens, layers: 4, {keeps}, format: the model's dtype" in repr(cache)


# ---- what else generate() and callers do


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models(dtype):
    made = copy.deepcopy(model("Llama")).to(dtype)
    want = run(made, "sdpa")
    for implementation in ("eager", "sdpa", "kvx"):
        assert run(made, implementation, KvxCache(made.config)) == want


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
@pytest.mark.parametrize(
    "options",
    [{"prompt_lookup_num_tokens": 3}, {"num_return_sequences": 3, "do_sample": True}, {"prefill_chunk_size": 4}],
    ids=["prompt_lookup", "several_answers", "chunks"],
)
def test_ways_to_generate(options, implementation):
    if "prefill_chunk_size" in options and not IS_5:
        pytest.skip(f"transformers {transformers.__version__} does not cut prompts by prefill_chunk_size for caches of others")
    inputs = prompts((11,))
    plain = {k: v for k, v in options.items() if k in ("num_return_sequences", "do_sample")}
    want = generate("Mistral", "sdpa", inputs, **plain)
    assert generate("Mistral", implementation, inputs, cache_of("Mistral"), **options).tolist() == want.tolist()


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
def test_inputs_embeds(implementation):
    inputs = prompts((11, 6))
    inputs["inputs_embeds"] = model("Llama").get_input_embeddings()(inputs.pop("input_ids")).detach()
    want = generate("Llama", "sdpa", inputs)
    assert generate("Llama", implementation, inputs, cache_of("Llama")).tolist() == want.tolist()


def test_use_cache_false_is_what_dynamic_cache_makes_of_it():
    inputs = prompts((9,))
    want = generate("Llama", "sdpa", inputs, DynamicCache(config=model("Llama").config), use_cache=False)
    for implementation in ("sdpa", "kvx"):
        assert generate("Llama", implementation, inputs, cache_of("Llama"), use_cache=False).tolist() == want.tolist()


@only_5
def test_two_caches_at_once_are_transformers_to_refuse():
    with pytest.raises(ValueError, match="Passing both `cache_implementation`"):
        generate("Llama", "kvx", prompts((5,)), cache_of("Llama"), cache_implementation="static")


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
def test_a_compiled_model(implementation):
    """In pieces: torch breaks the graph where the cache keeps its blocks."""
    made = randomised(transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "num_hidden_layers": 1})))
    made.set_attn_implementation(implementation)
    ids, cache = prompts((6,))["input_ids"], KvxCache(made.config, block_size=4)
    compiled = torch.compile(made, backend="eager")
    with torch.no_grad():
        want = made(ids).logits
        got = [compiled(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 6))]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-4)


# ---- copies


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
@pytest.mark.parametrize("format", ["", "int8_per_token_head"])
@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_a_pickled_cache_is_the_same_cache(name, format, implementation):
    inputs = prompts((13, 6))
    cache = cache_of(name, format=format)
    generate(name, implementation, inputs, cache, num_beams=2)  # beams share blocks
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False), copy.deepcopy(cache)]
    made, batch = model(name), cache.num_sequences
    mask = inputs["attention_mask"].repeat_interleave(batch // 2, 0)
    mask = torch.cat((mask, torch.ones(batch, cache.get_seq_length() - 13 + 5, dtype=torch.int64)), 1)
    ids = torch.arange(5 * batch).view(batch, 5) % VOCAB
    with torch.no_grad():
        want = made(ids, attention_mask=mask, past_key_values=cache).logits
        for other in copies:
            assert torch.equal(made(ids, attention_mask=mask, past_key_values=other).logits, want)
            check_blocks(other)


def test_an_empty_cache_is_pickled():
    cache = pickle.loads(pickle.dumps(cache_of("Llama")))
    assert generate("Llama", "kvx", prompts((9,)), cache).tolist() == generate("Llama", "sdpa", prompts((9,))).tolist()


def test_a_shallow_copy_is_refused():
    with pytest.raises(BadArgument, match=r"write into the same blocks.*deepcopy"):
        copy.copy(cache_of("Llama"))


def test_tensors_that_cannot_be_stored():
    k = torch.zeros(1, 2, 3, 16)
    for key, value in ((k, k.half()), (k.to("meta"), k.to("meta")), (k, k.to("meta"))):
        with pytest.raises(BadArgument, match="both are of one type on one device that has memory"):
            cache_of("Llama").update(key, value, 0)
