"""Parts of a model by its config: which layers are kept together, and which read others' K and V."""

from __future__ import annotations

from kvx.adapters.store import store_parts
from kvx.handover.model_parts import model_parts
from kvx.spec import CacheSpec, StateSpec

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
GEMMA4 = {
    **SIZES, "model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 32, "global_head_dim": 64, "sliding_window": 48,
    "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
LFM2 = {**SIZES, "model_type": "lfm2", "num_hidden_layers": 4, "conv_L_cache": 3}
LFM2 |= {"layer_types": ["conv", "full_attention", "conv", "conv"]}
FALCON = {
    **SIZES, "model_type": "falcon_h1", "num_hidden_layers": 2, "head_dim": 32, "mamba_d_ssm": 64, "mamba_n_heads": 4,
    "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4,
}  # fmt: skip
LLAMA = {**SIZES, "model_type": "llama", "num_hidden_layers": 3}


def test_windows_and_layers_that_read_others():
    full, window = model_parts(GEMMA4)
    assert (full.layers, full.window, full.head_dim, full.num_shared) == ((1, 3), 0, 64, 1)
    assert (window.layers, window.window, window.head_dim, window.num_shared) == ((0, 2), 48, 32, 1)
    assert window.fields() == {"layers": "0,2", "window": 48}


def test_states_beside_and_in_place_of_k_and_v():
    assert [(p.layers, [plane.name for plane in p.planes]) for p in model_parts(LFM2)] == [((1,), []), ((0, 2, 3), ["conv"])]
    assert [(p.layers, len(p.planes)) for p in model_parts(FALCON)] == [((0, 1), 0), ((0, 1), 2)]
    assert [p.layers for p in model_parts(LLAMA)] == [(0, 1, 2)]


def test_parts_of_a_store():
    kv, states = store_parts(FALCON, model="weights", block_size=32, dtype="bf16", format="fp8_e4m3_per_token_head_inline")
    assert isinstance(kv.spec, CacheSpec)
    assert (kv.spec.block_size, kv.spec.format, kv.spec.num_layers) == (32, "fp8_e4m3_per_token_head_inline", 2)
    assert isinstance(states.spec, StateSpec)
    assert [(p.name, p.format.name) for p in states.spec.planes] == [("conv", "bf16"), ("ssm", "f32")]
