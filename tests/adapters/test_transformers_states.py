"""KvxCache of models with recurrent and convolution states: equal to transformers' own cache, or refused where that is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.56", reason="the adapter is for transformers 4.56 or newer")

from kvx.adapters.transformers import KvxCache  # noqa: E402
from kvx.errors import BadArgument, Incompatible, Unsupported  # noqa: E402

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.cache_utils, "LinearAttentionLayer"),
    reason="before transformers 5 states were kept by classes of the models",
)
TOKENS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    **TOKENS,
}
DELTA = {
    "head_dim": 16, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 24, "mamba_d_conv": 4, "mamba_chunk_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
# One model for each kind of state: delta rule, Mamba 2, Mamba 1, convolutions alone, states beside K and V, layers that keep none.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**BASE, **DELTA, **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Bamba": {**BASE, **MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_expand": 2},
    "Jamba": {
        **BASE, **EXPERTS, "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8,
    },
    "Lfm2": {
        **BASE, "num_hidden_layers": 3, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "FalconH1": {**BASE, **MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128},
    "NemotronH": {
        **BASE, "layers_block_type": ["mamba", "mlp", "attention", "mamba"], "head_dim": 16, "ssm_state_size": 24,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "conv_kernel": 4, "chunk_size": 8,
    },
}  # fmt: skip


def model(name: str) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def theirs(made: Any) -> Any:
    return transformers.DynamicCache(config=made.config)


def prompt(batch: int = 2, length: int = 17, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(made: Any, cache: Any, *parts: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Of these tokens one part after the other, at positions from `start` on."""
    out = []
    for part in parts:
        at = torch.arange(start, start + part.shape[1]).expand(len(part), -1)
        out.append(made(input_ids=part, past_key_values=cache, position_ids=at, use_cache=True).logits)
        start += part.shape[1]
    return torch.cat(out, 1)


def generated(
    made: Any, cache: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, n: int = 8, **options: Any
) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return made.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=n, do_sample=False, eos_token_id=None, **options
    )


@pytest.fixture(params=CONFIGS)
def made(request) -> Any:
    return model(request.param)


def is_chunked_wrong(made: Any) -> bool:
    return made.config.model_type == "jamba"


def test_generate_is_equal(made):
    ids = prompt(4, 12)
    mask = torch.ones_like(ids)
    for row, n in enumerate((0, 3, 7, 1)):  # left-padded
        ids[row, :n], mask[row, :n] = 0, 0
    assert torch.equal(generated(made, KvxCache(made.config), ids, mask), generated(made, theirs(made), ids, mask))
    assert torch.equal(
        generated(made, KvxCache(made.config), ids[:1], num_beams=3), generated(made, theirs(made), ids[:1], num_beams=3)
    )


def test_chunks_and_turns_are_equal(made):
    ids, caches = prompt(), (KvxCache(made.config), theirs(made))
    if is_chunked_wrong(made):
        with pytest.raises(Unsupported, match=r"6 tokens of a jamba come on top of a state.*reset\(\) the cache"):
            logits(made, caches[0], ids[:, :11], ids[:, 11:])
        return
    assert torch.equal(*(logits(made, cache, ids[:, :11], ids[:, 11:]) for cache in caches))
    caches, texts = (KvxCache(made.config), theirs(made)), [ids, ids]
    for turn in range(3):
        texts = [
            torch.cat((generated(made, c, t, n=3), torch.full((2, 2), 7 + turn)), 1) for c, t in zip(caches, texts, strict=True)
        ]
    assert torch.equal(*texts)


def test_a_copy_goes_its_own_way(made):
    cache, more = KvxCache(made.config), prompt(2, 1, 5)
    logits(made, cache, prompt())
    other = copy.deepcopy(cache)
    want = logits(made, other, more, start=17)
    logits(made, copy.deepcopy(cache), more + 1, start=17)
    assert torch.equal(logits(made, cache, more, start=17), want)


def test_states_go_with_their_sequences(made):
    """Transformers leaves them where they are when a batch is repeated or selected."""
    ids, more = prompt(3), prompt(2, 1, 5)
    cache, want = KvxCache(made.config), KvxCache(made.config)
    logits(made, cache, ids)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([5, 0]))  # of sequences 2 2 0 0 1 1
    logits(made, want, ids[[1, 2]])
    torch.testing.assert_close(logits(made, cache, more, start=17), logits(made, want, more, start=17), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kept", [False, True], ids=["all drafts go", "some are run again"])
def test_drafts_leave_no_trace(made, kept):
    """Back to before them is bit for bit; tokens of them that stay are run again."""
    ids, g = prompt(), torch.Generator().manual_seed(1)
    cache, want = KvxCache(made.config), KvxCache(made.config)
    cache.activate_past_recording()
    for c in (cache, want):
        logits(made, c, ids)
    length = 17
    for n in (1, 4, 2, 8, 1):
        n = 1 if is_chunked_wrong(made) else n
        logits(made, cache, torch.randint(3, 128, (2, n), generator=g), start=length)
        cache.crop(length)
        if kept:
            stay = torch.randint(3, 128, (2, 1), generator=g)
            assert torch.equal(*(logits(made, c, stay, start=length) for c in (cache, want)))
            length += 1
    more = prompt(2, 1, 5)
    assert torch.equal(*(logits(made, c, more, start=length) for c in (cache, want)))


def test_a_crop_that_a_state_cannot_follow_is_refused(made):
    cache = KvxCache(made.config)
    logits(made, cache, prompt())
    with pytest.raises(Unsupported, match=r"crop\(\): to 15 of 17 tokens: layer \d keeps a state, which has moved on"):
        cache.crop(15)
    assert cache.get_seq_length() == 17
    cache.reset()
    cache.activate_past_recording()
    logits(made, cache, prompt())
    if made.config.model_type == "lfm2":  # a convolution's columns are kept until a crop
        cache.crop(15)
        want = KvxCache(made.config)
        logits(made, want, prompt()[:, :15])
        more = prompt(2, 1, 5)
        torch.testing.assert_close(logits(made, cache, more, start=15), logits(made, want, more, start=15), rtol=0, atol=1e-5)
    else:
        with pytest.raises(Unsupported, match=r"keeps a recurrent state, which goes back to 0 and not to any other"):
            cache.crop(15)
        assert cache.get_seq_length() == 17


def test_reset_begins_again(made):
    cache = KvxCache(made.config)
    first = logits(made, cache, prompt())
    held = cache.memory_bytes
    cache.reset()
    assert torch.equal(logits(made, cache, prompt()), first)
    assert cache.memory_bytes == held
    cache.reset()
    logits(made, cache, prompt(3))  # a batch of another size


def test_another_batch_is_refused(made):
    cache = KvxCache(made.config)
    logits(made, cache, prompt())
    with pytest.raises((BadArgument, RuntimeError), match=r"sequences|size"):
        logits(made, cache, prompt(3, 1), start=17)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("MiniMax", "takes no cache but one of its own class"),
        ("RecurrentGemma", "'recurrent', which keeps a recurrent or convolution state that its cache does not hold"),
    ],
)
def test_models_that_keep_states_elsewhere_are_refused(name, says):
    with pytest.raises(Unsupported, match=says):
        KvxCache(getattr(transformers, f"{name}Config")())


def test_a_handover_takes_the_states_along(made):
    from kvx.adapters.transformers import export_cache, import_cache

    cache, more = KvxCache(made.config), prompt(1, 1, 5)
    logits(made, cache, prompt(1))
    handover = export_cache(cache, prompt(1)[0].tolist(), model="m")
    other = import_cache(handover, KvxCache(made.config), model="m")
    assert torch.equal(logits(made, other, more, start=17), logits(made, cache, more, start=17))
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE, num_hidden_layers=len(cache.kv_layers))).eval()
    plain = KvxCache(llama.config)
    logits(llama, plain, prompt(1))
    handover = export_cache(plain, prompt(1)[0].tolist(), model="m")
    with pytest.raises(Incompatible, match=r"import_cache\(\): .* layer"):
        import_cache(handover, KvxCache(made.config), model="m")
