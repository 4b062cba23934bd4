"""Tiny models of transformers for the tests of PagedModel, and what each says alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

import kvx
from kvx.adapters.transformers import PagedModel, layer_groups
from kvx.cache.kinds import State
from kvx.runner import Engine
from tests.adapters.test_transformers_states import CONFIGS, model
from tests.adapters.tiny_models import tiny_config, tiny_model

# A model for each kind of state, of K and V, and of both in one layer or in turn; those of tiny_models by their model type.
STATES = (
    "Qwen3Next",
    "FalconH1",
    "Lfm2",
    "Bamba",
    "NemotronH",
    "granitemoehybrid",
    "qwen3_5_text",
    "kimi_linear",
    "zamba2",
    "zaya",
)
PLAIN = ("llama", "gemma3_text", "gemma4_text", "gemma3n_text", "llama4_text", "gpt_oss", "deepseek_v3", "roberta", "gpt2")
NEAR = 2e-5  # of the largest logit: another order of sums moves it by about 1e-6, so no token hangs on it


@functools.cache
def tiny(name: str) -> Any:
    transformers.logging.set_verbosity_error()
    if name in CONFIGS:
        return model(name)
    config = tiny_config(name)
    if name == "kimi_linear":
        config.linear_num_heads, config.linear_head_dim = 2, 16
    return tiny_model(type(transformers.AutoModelForCausalLM.from_config(config)), config)


def prompts(sizes: tuple[int, ...] = (1, 5, 17, 3, 9), shared: int = 21, seed: int = 5) -> list[list[int]]:
    """They begin alike; the first comes twice."""
    g = torch.Generator().manual_seed(seed)
    begin = torch.randint(3, 100, (shared,), generator=g).tolist()
    made = [begin + torch.randint(3, 100, (n,), generator=g).tolist() for n in sizes]
    return [*made, list(made[0])]


@functools.cache
def _alone(name: str, prompt: tuple[int, ...], n: int) -> tuple[int, ...]:
    made = tiny(name)
    ids = torch.tensor([prompt])
    cache = transformers.DynamicCache(config=made.config.get_text_config(decoder=True))
    out = made.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=n, do_sample=False, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    for logits in out.logits:
        top = logits[0].topk(2).values
        assert float(top[0] - top[1]) > NEAR * float(logits.abs().max()), f"{name}: two tokens are so near that rounding may decide"
    return tuple(out.sequences[0, len(prompt) :].tolist())


def alone(name: str, prompt: list[int], n: int = 8) -> list[int]:
    """Greedy tokens of one prompt, by transformers' generate() with its own cache."""
    return list(_alone(name, tuple(prompt), n))


def engine(
    name: str, *, num_blocks: int = 64, num_states: int = 40, max_seqs: int = 6, block_size: int = 4, format: str = "f32",
    max_batch_tokens: int = 128, state: State | None = None, prefix: bool = True,
) -> Engine:  # fmt: skip
    groups = layer_groups(
        tiny(name).config, num_blocks=num_blocks, num_states=num_states, format=format, block_size=block_size,
        state=state or State(snapshot_every=1),
    )  # fmt: skip
    cache = kvx.PagedCache(groups, max_seqs=max_seqs, max_seq_len=96, max_tokens=128, prefix=prefix)
    return Engine(PagedModel(tiny(name), cache), max_batch_tokens=max_batch_tokens)
