"""KvxCache and attn_implementation="kvx" against transformers' own DynamicCache, on tiny random models."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

transformers = pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx import BadArgument, KvxError, Unsupported  # noqa: E402
from kvx.adapters.transformers import KvxCache, attend, read_latents  # noqa: E402
from kvx.adapters.transformers.attention import attend_dense  # noqa: E402
from kvx.adapters.transformers.mask import CausalMask, MaskStates, left_padding, make_mask  # noqa: E402

VOCAB = 131
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Family:
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    own: str = "sdpa"  # the implementation DynamicCache's tokens come from

    def __str__(self) -> str:
        return self.name


FAMILIES = {
    f.name: f
    for f in (
        Family("Llama"),
        Family("Qwen2"),
        Family("Qwen3"),
        Family("Mistral", {"sliding_window": 9}),
        Family("GPT2"),  # tells attention that it is not causal when there is a mask
        Family(
            "Gemma2",
            {
                "sliding_window": 10,
                "attn_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 16,
                "hidden_activation": "gelu_pytorch_tanh",
            },
            "eager",
        ),
        Family(
            "Gemma3",
            {
                "sliding_window": 7,
                "layer_types": ALTERNATING,
                "query_pre_attn_scalar": 16,
            },
        ),
        Family(
            "GptOss",
            {
                "sliding_window": 8,
                "num_local_experts": 2,
                "num_experts_per_tok": 2,
                "layer_types": ALTERNATING,
            },
            "eager",
        ),
        Family(
            "DeepseekV3",
            {
                "num_key_value_heads": 4,
                "q_lora_rank": 24,
                "kv_lora_rank": 32,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 12,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_group": 2,
                "topk_group": 1,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
                "head_dim": 8,
            },
        ),
    )
}
NAMES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"), "GPT2": ("GPT2Config", "GPT2LMHeadModel")}


@functools.cache
def model(name: str):
    config_name, class_name = NAMES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, config_name)(**{**SIZES, **FAMILIES[name].options})
    torch.manual_seed(7)
    made = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    for parameter in made.parameters():  # the usual start is so even that every token is the same
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
        elif parameter.shape[0] == SIZES["num_attention_heads"]:  # sinks
            torch.nn.init.normal_(parameter, std=1.0)
    return made


def prompts(lengths: tuple[int, ...], seed: int = 3) -> dict[str, torch.Tensor]:
    """Left-padded token ids and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, n in enumerate(lengths):
        ids[i, -n:] = torch.randint(2, VOCAB, (n,), generator=generator)
        mask[i, -n:] = 1
    return {"input_ids": ids, "attention_mask": mask}


def generate(name: str, implementation: str, inputs: dict[str, torch.Tensor], cache: KvxCache | None = None, **options: Any):
    made = model(name)
    made.set_attn_implementation(implementation)
    torch.manual_seed(0)
    given = {} if cache is None else {"past_key_values": cache}
    return made.generate(**inputs, **given, **{"max_new_tokens": 14, "do_sample": False, **options})


def cache_of(name: str, **options: Any) -> KvxCache:
    return KvxCache(model(name).config, **{"block_size": 4, **options})


def check_blocks(cache: KvxCache) -> None:
    for blocks in cache._kinds:
        blocks.allocator.check()


SHAPES = [pytest.param((19,), id="one"), pytest.param((23, 5, 12), id="left_padded")]


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_same_tokens_as_dynamic_cache(family, lengths):
    inputs = prompts(lengths)
    want = generate(family.name, family.own, inputs)
    assert len(set(want[0, lengths[0] :].tolist())) > 3, "a model that repeats one token shows nothing"
    for implementation in dict.fromkeys((family.own, "eager", "kvx")):
        cache = cache_of(family.name)
        got = generate(family.name, implementation, inputs, cache)
        assert got.tolist() == want.tolist(), implementation
        check_blocks(cache)
        assert cache.get_seq_length() == want.shape[1] - 1


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "DeepseekV3"])
def test_beam_search(name, implementation):
    inputs = prompts((11, 6))
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 9}
    want = generate(name, "sdpa", inputs, **options)
    cache = cache_of(name)
    assert generate(name, implementation, inputs, cache, **options).tolist() == want.tolist()
    check_blocks(cache)


@pytest.mark.parametrize("lengths", [(7,), (23, 5, 12), (60, 41)], ids=["one", "left_padded", "long"])
def test_latents_are_read_where_they_lie(latent_model, lengths):
    """A prompt of up to 32 tokens and every decode step attend over latents; a longer prompt is expanded."""
    inputs = prompts(lengths)
    want = generate("DeepseekV3", "sdpa", inputs)
    cache = cache_of("DeepseekV3")
    assert generate("DeepseekV3", "kvx", inputs, cache).tolist() == want.tolist()
    assert (cache.layers[0].spec.head_dim, cache.layers[0].spec.num_kv_heads) == (32, 1)
    inputs = prompts((20, 9))
    want = generate("DeepseekV3", "sdpa", inputs, cache_of("DeepseekV3"), num_beams=2)
    assert generate("DeepseekV3", "kvx", inputs, cache_of("DeepseekV3"), num_beams=2).tolist() == want.tolist()


def test_latents_allocate_the_same_at_any_context(latent_model):
    contexts = (40, 120, 360)
    steps = bytes_of_steps("DeepseekV3", "kvx", cache_of("DeepseekV3", reserve=400), contexts, True)
    assert len(set(steps)) == 1, f"bytes of a step at {contexts}: {steps}"


@pytest.fixture
def latent_model():
    made = model("DeepseekV3")
    if not hasattr(made.model.layers[0].self_attn, "expand_kv"):
        pytest.skip(f"transformers {transformers.__version__} caches expanded K and V")
    assert read_latents(made) == read_latents(made) == 3
    yield made
    for layer in made.model.layers:
        del layer.self_attn.expand_kv


def test_beams_share_blocks():
    cache = cache_of("Llama")
    generate("Llama", "kvx", prompts((40,)), cache, num_beams=4, max_new_tokens=6)
    (blocks,) = cache._kinds
    assert blocks.allocator.num_used < 4 * 10, "four beams of one prompt have their own copies of it"


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_crop_goes_back(name, implementation):
    """Tokens taken back leave no trace: the next ones are as if they had never been."""
    made = model(name)
    made.set_attn_implementation("eager" if name == "Gemma2" and implementation == "sdpa" else implementation)
    ids = prompts((30,))["input_ids"]
    with torch.no_grad():
        want = made(ids).logits[:, -3:]
        cache = cache_of(name)
        made(ids[:, :20], past_key_values=cache)
        cache.activate_past_recording()
        made(torch.full((1, 7), 5), past_key_values=cache)
        cache.crop(-7)
        assert cache.get_seq_length() == 20
        made(ids[:, 20:27], past_key_values=cache)
        made(torch.full((1, 1), 9), past_key_values=cache)
        cache.crop(27)
        got = made(ids[:, 27:], past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    check_blocks(cache)


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
def test_assisted_generation(implementation):
    inputs = prompts((9,))
    want = generate("Llama", "sdpa", inputs, max_new_tokens=20)
    model("Qwen2").set_attn_implementation("sdpa")
    got = generate("Llama", implementation, inputs, cache_of("Llama"), assistant_model=model("Qwen2"), max_new_tokens=20)
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize("name", ["Llama", "Gemma3"])
def test_chunked_prompt_and_second_turn(name):
    """Several tokens after the first: queries see the cache and each other, through windows too."""
    made, inputs = model(name), prompts((41, 33))
    made.set_attn_implementation("kvx")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = made(ids, attention_mask=mask, position_ids=positions).logits[:, -6:]  # no cache: over plain K and V
        cache = cache_of(name)
        for start, end in ((0, 17), (17, 35), (35, 41)):
            got = made(
                ids[:, start:end], attention_mask=mask[:, :end], position_ids=positions[:, start:end], past_key_values=cache
            ).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    check_blocks(cache)


def test_a_mask_that_is_not_padding_is_gathered():
    made, inputs = model("Llama"), prompts((16, 16))
    inputs["attention_mask"][0, 5:8] = 0  # a hole
    made.set_attn_implementation("sdpa")
    with torch.no_grad():
        want = made(**inputs).logits
        made.set_attn_implementation("kvx")
        got = made(**inputs, past_key_values=cache_of("Llama")).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Gemma2", "GptOss"])
def test_gathered_attention_has_soft_caps_and_sinks(name):
    made, inputs = model(name), prompts((18, 18))
    inputs["attention_mask"][1, 3:5] = 0
    made.set_attn_implementation("eager")
    with torch.no_grad():
        want = made(**inputs).logits
        made.set_attn_implementation("kvx")
        got = made(**inputs, past_key_values=cache_of(name)).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
@pytest.mark.parametrize(("format", "bound"), [("int8_per_token_head", 0.05), ("fp8_e4m3_per_token_head", 0.2)])
def test_quantised_formats_stay_close(format, bound, implementation):
    made, inputs = model("Llama"), prompts((37, 20))
    made.set_attn_implementation(implementation)
    with torch.no_grad():
        want = made(**inputs).logits[:, -1]
        cache = cache_of("Llama", format=format)
        got = made(**inputs, past_key_values=cache).logits[:, -1]
    assert ((got - want).norm() / want.norm()).item() < bound
    assert cache.memory_bytes < 0.6 * sum(layer.spec.num_slots * layer.spec.num_kv_heads * 2 * 16 * 4 for layer in cache.layers), (
        "a byte an element, and scales"
    )
    assert generate("Llama", implementation, inputs, cache_of("Llama", format=format)).shape == (2, 51)


@pytest.mark.parametrize("seed", range(12))
def test_random_operations(seed):
    """Steps, beams, crops and repeats against K and V that are simply kept, for a full and a sliding layer, with padding."""
    window = 6
    config = transformers.MistralConfig(**{**SIZES, "sliding_window": window, "num_hidden_layers": 2})
    config.layer_types = ["full_attention", "sliding_attention"]
    is_direct = seed % 2 == 0
    config._attn_implementation = "kvx" if is_direct else "sdpa"
    cache = KvxCache(config, block_size=3)
    cache.activate_past_recording()
    rng = torch.Generator().manual_seed(seed)

    def pick(end: int) -> int:
        return int(torch.randint(end, (1,), generator=rng))

    batch = 1 + pick(3)
    pads = torch.tensor([pick(4) if is_direct else 0 for _ in range(batch)])
    kept = [[torch.empty(batch, 2, 0, 16) for _ in "kv"] for _ in range(2)]
    cropped = 4  # as long as the padding
    for step in range(30):
        batch, columns = len(pads), kept[0][0].shape[2]
        what = pick(8) if step else 0
        if what < 5:
            n = 5 + pick(4) if step == 0 else 1 + pick(5) * (what == 0)
            q, *new = (torch.randn(batch, heads, n, 16, generator=rng) for heads in (4, 2, 2))
            for i, layer in enumerate(kept):
                layer[:] = [torch.cat(pair, 2) for pair in zip(layer, new, strict=True)]
                mask = CausalMask(window * i, columns + n, pads.numpy())
                got = cache.update(*new, i)
                for a, b in zip(got, layer, strict=True) if not is_direct else ():
                    torch.testing.assert_close(a, b[:, :, -a.shape[2] :], rtol=0, atol=0)
                out, _ = attend(torch.nn.Identity(), q, *got, MaskStates.make((batch, n, columns + n), q.device, mask))
                want = attend_dense(q, *layer, mask.dense(n, columns + n, q.device), 0.25, False, None, None).transpose(1, 2)
                seen = torch.arange(columns, columns + n) >= pads[:, None]  # what padding sees is nobody's business
                torch.testing.assert_close(out[seen], want[seen], rtol=1e-4, atol=1e-5)
        elif what == 5:
            n = min(pick(4), columns - cropped)  # a crop gives back what its window has left behind
            cache.crop(-n)
            cropped = columns - n
            kept = [[x[:, :, : columns - n] for x in layer] for layer in kept]
        else:
            rows = torch.randint(batch, (1 + pick(4),), generator=rng) if what == 6 else torch.randperm(batch, generator=rng)
            cache.reorder_cache(rows)
            pads, kept = pads[rows], [[x[rows] for x in layer] for layer in kept]
        check_blocks(cache)
    for blocks in cache._kinds:
        cache.crop(0)
        assert blocks.allocator.num_used <= int((-(-blocks.seq_lens // blocks.block_size)).sum())
    cache.reset()
    assert [blocks.allocator.num_used for blocks in cache._kinds] == [0, 0]


# ---- memory


class Allocations(TorchDispatchMode):
    """Bytes of the storages that ops make. Views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_iter((args, kwargs)) if _has_memory(t)}
        out = func(*args, **(kwargs or {}))
        for t in tree_iter(out):
            if _has_memory(t) and t.untyped_storage().data_ptr() not in known:
                self.num_bytes += t.untyped_storage().nbytes()
        return out


def _has_memory(t: Any) -> bool:
    return type(t) is torch.Tensor


def bytes_of_steps(name: str, implementation: str, cache: Any, contexts: tuple[int, ...], padded: bool) -> list[int]:
    """Bytes allocated by one decode step at each context, on the batch's way to the longest."""
    made = model(name)
    made.set_attn_implementation(implementation)
    generator = torch.Generator().manual_seed(1)
    mask = torch.ones(2, max(contexts) + 2, dtype=torch.bool)
    mask[1, :3] = not padded
    found, seen = [], 0
    with torch.no_grad():
        for context in contexts:
            ids = torch.randint(2, VOCAB, (2, context - seen), generator=generator)
            made(ids, attention_mask=mask[:, :context], past_key_values=cache)
            token = torch.ones(2, 1, dtype=torch.int64)
            made(token, attention_mask=mask[:, : context + 1], past_key_values=cache)  # windows give up the prompt's room in it
            with Allocations() as allocations:
                made(token, attention_mask=mask[:, : context + 2], past_key_values=cache)
            found.append(allocations.num_bytes)
            seen = context + 2
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["even", "left_padded"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "GptOss"])
def test_a_decode_step_allocates_the_same_at_any_context(name, padded):
    contexts = (40, 120, 360)
    steps = bytes_of_steps(name, "kvx", cache_of(name, reserve=400), contexts, padded)
    assert len(set(steps)) == 1, f"bytes of a step at {contexts}: {steps}"


def test_what_grows_is_seen():
    """The same count sees DynamicCache grow, and a KvxCache that is gathered."""
    contexts = (40, 360)
    for implementation, cache in (("sdpa", transformers.DynamicCache()), ("sdpa", cache_of("Llama", reserve=400))):
        first, last = bytes_of_steps("Llama", implementation, cache, contexts, False)
        row = 2 * 2 * 2 * 16 * 4  # K and V of a token, two sequences, two heads of 16
        assert last - first >= 3 * row * 320


def test_storage_grows_by_doubling():
    made = model("Llama")
    made.set_attn_implementation("kvx")
    cache, sizes = cache_of("Llama"), []
    with torch.no_grad():
        for _ in range(260):
            made(torch.ones(1, 1, dtype=torch.int64), past_key_values=cache)
            sizes.append(cache.memory_bytes)
    changes = [b / a for a, b in itertools.pairwise(sizes) if a != b]
    assert changes == [2, 2]  # a block for the token and 16 more, of 4 tokens each


def test_sliding_layers_release_what_left_the_window():
    cache = cache_of("Mistral")
    generate("Mistral", "kvx", prompts((10,)), cache, max_new_tokens=100)
    (blocks,) = cache._kinds
    assert blocks.allocator.num_used <= 9 // 4 + 2
    assert blocks.num_blocks < 100 // 4


def test_a_window_gives_up_the_room_of_a_long_prompt():
    inputs = prompts((400, 350))
    want = generate("Gemma3", "sdpa", inputs)
    cache = cache_of("Gemma3")
    assert generate("Gemma3", "kvx", inputs, cache).tolist() == want.tolist()
    sliding, full = (cache.layers[i].spec.num_blocks for i in (0, 1))
    assert {b.window: b.num_blocks for b in cache._kinds} == {7: sliding, 0: full}
    assert sliding <= 2 * 6 < 190 <= full
    check_blocks(cache)


def test_reset_uses_the_storage_again():
    cache = cache_of("Llama")
    first = generate("Llama", "kvx", prompts((12, 9)), cache)
    size = cache.memory_bytes
    cache.reset()
    assert cache.get_seq_length() == 0
    (blocks,) = cache._kinds
    assert blocks.allocator.num_used == 0
    assert generate("Llama", "kvx", prompts((12, 9)), cache).tolist() == first.tolist()
    assert cache.memory_bytes == size
    cache.reset()
    assert generate("Llama", "sdpa", prompts((7,)), cache).tolist() == generate("Llama", "sdpa", prompts((7,))).tolist()


@pytest.mark.parametrize("implementation", ["sdpa", "kvx"])
def test_a_copy_goes_its_own_way(implementation):
    """A prefix is run once, and its cache copied for each continuation."""
    made, inputs = model("Gemma3"), prompts((30,))
    made.set_attn_implementation(implementation)
    prefix = cache_of("Gemma3")
    with torch.no_grad():
        made(inputs["input_ids"][:, :20], past_key_values=prefix)
    for n in (30, 27):
        given = {name: x[:, :n] for name, x in inputs.items()}
        want = generate("Gemma3", implementation, given)
        assert generate("Gemma3", implementation, given, copy.deepcopy(prefix)).tolist() == want.tolist()
    assert prefix.get_seq_length() == 20


# ---- handles and masks


def test_handles_are_gathered_by_any_op():
    made = model("Llama")
    made.set_attn_implementation("kvx")
    cache = cache_of("Llama")
    k, v = torch.randn(2, 2, 6, 16), torch.randn(2, 2, 6, 16)
    key, value = cache.update(k, v, 0)
    assert key.shape == k.shape
    assert "layer 0" in repr(key)
    assert torch.equal(key + 0, k)
    assert torch.equal(value.transpose(1, 2).contiguous(), v.transpose(1, 2))
    cache.update(k, v, 1), cache.update(k, v, 2)
    key, _ = cache.update(k[:, :, :1], v[:, :, :1], 0)
    assert torch.equal(key.clone(), torch.cat((k, k[:, :, :1]), 2))
    assert torch.equal(cache.layers[0].keys, torch.cat((k, k[:, :, :1]), 2))


def test_left_padding():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    assert left_padding(mask, 4, 3) == [2, 0, 4]
    assert left_padding(torch.tensor([[1, 0, 1]], dtype=torch.bool), 3, 1) is None
    assert left_padding(torch.tensor([[1, 1, 0]], dtype=torch.bool), 3, 1) is None
    assert left_padding(None, 9, 2) == [0, 0]


def test_masks_are_few_numbers_or_whole():
    from transformers import masking_utils

    if "q_length" in inspect.signature(masking_utils.sdpa_mask).parameters:
        queries = {"q_length": 3, "q_offset": 5}
    else:
        queries = {"cache_position": torch.arange(5, 8)}
    made = make_mask(batch_size=2, kv_length=8, mask_function=masking_utils.sliding_window_causal_mask_function(6), **queries)
    assert made.causal == CausalMask(6, 8, None)
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    made = make_mask(batch_size=2, kv_length=8, mask_function=chunked, **queries)
    assert made.causal is None
    assert made.shape == (2, 1, 3, 8)


# ---- what is refused


def test_not_a_config():
    with pytest.raises(BadArgument, match=r"config is a str; it takes a model or its config: KvxCache\(model\)"):
        KvxCache("Llama")
    assert KvxCache(model("Llama")).config is model("Llama").config


def test_unknown_format():
    with pytest.raises(KvxError, match="int7"):
        KvxCache(model("Llama").config, format="int7")
    with pytest.raises(BadArgument, match="format 'int8_per_head' has scales that must be measured first"):
        KvxCache(model("Llama").config, format="int8_per_head")


def test_a_cache_of_another_model():
    cache = cache_of("Llama")
    generate("Llama", "sdpa", prompts((5,)), cache)
    with pytest.raises(BadArgument, match=r"layer 0 got \(heads, .*\) \(1, 32, 8, .*A cache belongs to one model"):
        cache.update(torch.zeros(1, 1, 1, 32), torch.zeros(1, 1, 1, 8), 0)
    with pytest.raises(BadArgument, match="layer 3; the config it was made from has 3 layers"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 3)


def test_crop_past_the_end():
    cache = cache_of("Llama")
    generate("Llama", "sdpa", prompts((5,)), cache, max_new_tokens=2)
    with pytest.raises(BadArgument, match="9 tokens are to be taken back; there are 6"):
        cache.crop(-9)
    cache.crop(-6)
    assert generate("Llama", "kvx", prompts((8, 3)), cache).shape == (2, 22)


def test_crop_behind_a_window():
    cache = cache_of("Mistral")
    generate("Mistral", "kvx", prompts((40,)), cache, max_new_tokens=2)
    with pytest.raises(BadArgument, match="activate_past_recording"):
        cache.crop(-30)
    assert cache.get_seq_length() == cache._kinds[0].length == 41


def test_a_mask_that_forgets_the_padding():
    cache = cache_of("Llama")
    generate("Llama", "kvx", prompts((9, 5)), cache, max_new_tokens=2)
    with torch.no_grad(), pytest.raises(BadArgument, match=r"padding; the first one had \[0 4\], which were not stored"):
        model("Llama")(torch.ones(2, 1, dtype=torch.int64), past_key_values=cache)


def test_another_batch_size():
    cache = cache_of("Llama")
    generate("Llama", "kvx", prompts((5, 5)), cache, max_new_tokens=2)
    with pytest.raises(BadArgument, match=r"got 3 sequences; it has 2\. .*reset\(\)"):
        cache.update(torch.zeros(3, 2, 1, 16), torch.zeros(3, 2, 1, 16), 0)


def test_layers_of_no_known_kind():
    config = transformers.LlamaConfig(**SIZES)
    config.layer_types = ["full_attention", "recurrent", "full_attention"]
    with pytest.raises(Unsupported, match=r"LlamaConfig, layers 1 are .recurrent., which keeps a recurrent or convolution state"):
        KvxCache(config)


def test_dropout_is_refused():
    q = torch.zeros(1, 2, 1, 16)
    with pytest.raises(Unsupported, match=r"dropout is 0.1"):
        attend(torch.nn.Identity(), q, q, q, None, dropout=0.1)
