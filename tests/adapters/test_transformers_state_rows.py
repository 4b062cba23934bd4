"""Transformers' own states of tiny models, through every engine's row and back: the model goes on bit for bit as before.

The tensors are those of DynamicCache after some tokens. What comes back goes into a cache whose states are poisoned, also in the
oldest column of its convolutions, which no row carries.
"""

from __future__ import annotations

import copy

import pytest
import torch

import kvx
from kvx.layout.buffers import allocate_buffers
from kvx.layout.state_rows import STATE_ROWS, state_row
from kvx.spec import PlaneSpec, state_plane

transformers = pytest.importorskip("transformers", reason="the states are those of Transformers")

TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3}
DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
KINDS = ["linear_attention", "full_attention"]
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
MAMBA2 = {"hidden_size": 16, "expand": 2, "num_heads": 4, "head_dim": 8, "state_size": 16, "n_groups": 1, "conv_kernel": 4}
MODELS = {  # its config, and the planes of its states
    "qwen3_next": (
        lambda: transformers.Qwen3NextConfig(
            num_hidden_layers=2, head_dim=32, layer_types=KINDS, **SIZES, **DELTA, **EXPERTS, **TOKENS
        ),
        (state_plane("conv", "f32", channel=96, tap=3), state_plane("delta", "f32", head=4, row=8, column=16)),
    ),
    "falcon_h1": (
        lambda: transformers.FalconH1Config(num_hidden_layers=2, head_dim=32, mamba_chunk_size=8, **SIZES, **MAMBA, **TOKENS),
        (state_plane("conv", "f32", channel=64, tap=3), state_plane("ssm", "f32", head=4, row=8, column=16)),
    ),
    "lfm2": (
        lambda: transformers.Lfm2Config(
            num_hidden_layers=3, conv_L_cache=3, layer_types=["conv", "full_attention", "conv"], **SIZES, **TOKENS
        ),
        (state_plane("conv", "f32", channel=64, tap=2),),
    ),
    "mamba2": (
        lambda: transformers.Mamba2Config(num_hidden_layers=2, chunk_size=8, **MAMBA2, **TOKENS),
        (state_plane("conv", "f32", channel=64, tap=3), state_plane("ssm", "f32", head=4, row=8, column=16)),
    ),
}  # fmt: skip


def states_of(cache: object) -> list[torch.Tensor]:
    """Of every layer that has some: convolution, then matrix."""
    layers = [layer for layer in cache.layers if getattr(layer, "conv_states", {}).get(0) is not None]
    return [t for layer in layers for t in (layer.conv_states[0], layer.recurrent_states.get(0)) if t is not None]


def moved(states: list[torch.Tensor], planes: tuple[PlaneSpec, ...], row: str) -> list[torch.Tensor]:
    """Into that row, every sequence to another block, and back. The second block of the row's four stays free."""
    layers, batch = len(states) // len(planes), states[0].shape[0]
    here = state_row("transformers").spec(planes, num_blocks=batch, num_layers=layers)
    there = state_row(row).spec(planes, num_blocks=4, num_layers=layers)
    between, back = allocate_buffers(there), [torch.full_like(t, 1e4) for t in states]
    blocks = list(range(batch)), [3, 0, 2][:batch]
    kvx.convert(states, between, plan=kvx.plan(here, there, blocks=blocks))
    kvx.convert(between, back, plan=kvx.plan(there, here, blocks=blocks[::-1]))
    return back


@pytest.mark.parametrize("name", MODELS)
def test_a_model_goes_on_from_states_that_went_through_every_row(name):
    make, planes = MODELS[name]
    torch.manual_seed(0)
    config = make()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    key = "cache_params" if name == "mamba2" else "past_key_values"
    tokens, cache = torch.randint(3, 64, (2, 18)), transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(tokens[:, :17], use_cache=True, **{key: cache})
        kept = copy.deepcopy(cache)
        want = model(tokens[:, 17:], use_cache=True, **{key: copy.deepcopy(kept)}).logits
        for row in STATE_ROWS:
            back, other = moved(states_of(kept), planes, row), copy.deepcopy(kept)
            for t, x in zip(states_of(other), back, strict=True):
                t.copy_(x)
            assert float(states_of(other)[0][..., 0].min()) == 1e4  # the column that no row carries
            got = model(tokens[:, 17:], use_cache=True, **{key: other}).logits
            assert torch.equal(got, want), row
        for t in states_of(kept):  # and the states do matter
            t.mul_(1.5)
        assert not torch.equal(model(tokens[:, 17:], use_cache=True, **{key: kept}).logits, want)
