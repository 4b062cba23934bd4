"""layer_groups: the groups of a model from its config, without transformers; and beside what transformers stores."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvx
from kvx.cache.kinds import Chunked, Full, Latent, Sliding, State
from kvx.cache.layer_groups import layer_groups
from kvx.errors import BadArgument, Unsupported

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64,
    "head_dim": 16,
}  # fmt: skip
GEMMA4 = {
    **LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 5, "sliding_window": 32, "global_head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_global_key_value_heads": 1, "num_kv_shared_layers": 2,
}  # fmt: skip
LLAMA4 = {**LLAMA, "layer_types": ["chunked_attention", "chunked_attention", "full_attention"], "attention_chunk_size": 64}
DEEPSEEK = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 8}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_conv": 4}
FALCON = {**LLAMA, **MAMBA, "model_type": "falcon_h1"}
LFM2 = {**LLAMA, "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}


def shapes(config: dict[str, object], **given: object) -> list[tuple[object, ...]]:
    groups = layer_groups(config, num_blocks=8, num_states=4, **given)
    cache = kvx.PagedCache(groups, max_seqs=2, max_seq_len=64)  # they can be one cache
    cache.check()
    return [(g.name, g.kind, g.layers) for g in groups]


def test_kinds_and_shapes_are_groups():
    assert shapes(LLAMA) == [("full", Full(), (0, 1, 2))]
    assert shapes(GEMMA4) == [("sliding 32", Sliding(32), (0, 2)), ("full", Full(), (1,))]  # the last two read others'
    assert shapes(LLAMA4) == [("chunked 64", Chunked(64), (0, 1)), ("full", Full(), (2,))]
    assert shapes(DEEPSEEK) == [("latent", Latent(), (0, 1, 2))]
    assert shapes(FALCON) == [("full", Full(), (0, 1, 2)), ("states", State(), (0, 1, 2))]  # both in each
    assert shapes(LFM2, state=State(snapshot_every=4)) == [("full", Full(), (1,)), ("states", State(snapshot_every=4), (0, 2))]
    per_layer = {**LLAMA, "per_layer_config": {"1": {"num_key_value_heads": 4}}}
    assert shapes(per_layer) == [("full 2x16", Full(), (0, 2)), ("full 4x16", Full(), (1,))]


def test_sizes_and_formats():
    kv, states = layer_groups(FALCON, num_blocks=8, num_states=4, block_size=32, format="f16", state_format="bf16")
    assert (kv.spec.num_blocks, kv.spec.block_size, kv.spec.format) == (8, 32, "f16")
    assert states.spec.num_blocks == 4
    assert {p.name: (p.format.name, p.axes) for p in states.spec.planes} == {
        "conv": ("f16", (("channel", 64), ("tap", 3))),
        "ssm": ("bf16", (("head", 4), ("row", 8), ("column", 16))),
    }


def test_states_need_blocks():
    with pytest.raises(BadArgument, match=r"2 layers of this model keep a state of each sequence, from layer 0 on, and num_states"):
        layer_groups(LFM2, num_blocks=8)
    with pytest.raises(BadArgument, match="num_states is -1; it must be a number of blocks"):
        layer_groups(LFM2, num_blocks=8, num_states=-1)
    assert len(layer_groups(LLAMA, num_blocks=8)) == 1


def test_a_config_that_says_too_little_is_refused():
    with pytest.raises(BadArgument, match=r"^layer_groups\(\): the config of .* has no num_hidden_layers"):
        layer_groups({"model_type": "llama", "hidden_size": 64}, num_blocks=8)
    with pytest.raises(Unsupported, match=r"^layer_groups\(\): .*keeps keys of an indexer beside its latents"):
        layer_groups({**DEEPSEEK, "index_head_dim": 16}, num_blocks=8)


def test_the_table_of_the_docs():
    """docs/state.md: what a state of a known model takes, beside K and V of a token."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "state.md").read_text()
    rows = re.findall(r"^\| ([\w.-]+) \| ([\d,]+) bytes \| ([\d,]+) bytes \| ([\d,]+) tokens \|$", text, re.M)
    assert len(rows) == 5
    for name, *said in rows:
        groups = layer_groups(name, num_blocks=1, num_states=1, block_size=16)
        token, state = (sum(g.num_bytes for g in groups if g.blocks_of.has_state == has) for has in (False, True))
        assert [int(n.replace(",", "")) for n in said] == [token // 16, state, round(state / (token // 16))], name
