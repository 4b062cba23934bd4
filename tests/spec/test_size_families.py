"""kvx.size beside Transformers: every config class gets a checked answer, one marked unchecked, or a refusal; and those that are
called checked have the bytes of the cache that Transformers makes, built on the meta device, where nothing costs memory."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest

import kvx
from kvx.errors import KvxError, Unsupported
from kvx.spec.engine_size import engine_sizes
from kvx.spec.models import CHECKED_TYPES, MODELS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.22", reason="families are those of transformers 5.22")

# What the default config lacks to be built, or to be built small.
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXTRA = {
    "bamba": {"attn_layer_indices": [1, 4]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 3},
    "dbrx": {"attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": None, "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "lfm2": {"full_attn_idxs": [1, 4]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 3},
    "ministral": {"rope_parameters": ROPE, "head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 64},
    "hunyuan_v1_dense": {"rope_parameters": ROPE, "head_dim": 64},
    "hunyuan_v1_moe": {"rope_parameters": ROPE, "head_dim": 64},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
}  # fmt: skip
SMALL = {"num_hidden_layers": 6}
OUTER = {"mllama_text_model": "mllama"}  # whose decoder is built from the whole config alone
# Counted by hand in tests/spec/test_size.py: their published configs are no class of Transformers, or its cache is not theirs.
# RecurrentGemma keeps its states on its modules: tests/spec/test_size_states.py.
BY_HAND = {"kimi_k2", "deepseek_v4", "recurrent_gemma"}


def config_of(model_type: str):
    make = transformers.CONFIG_MAPPING[OUTER.get(model_type, model_type)]
    extra = EXTRA.get(model_type, {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return make(**({} if model_type in OUTER else SMALL), **extra)
        except Exception:  # lists one entry a layer, of another length
            return make(**extra)


def real_layers(config) -> tuple[Counter, int]:
    """Elements of a token in each layer of the cache, and its window, of a forward on the meta device; bytes of all states."""
    config._experts_implementation = "batched_mm"  # the one whose shapes do not hang on the numbers
    config._attn_implementation = "eager"
    with torch.device("meta"), torch.inference_mode():
        try:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        except ValueError:  # the text model of one that sees or hears
            model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16).eval()
        out = model(input_ids=torch.zeros(1, 7, dtype=torch.long), use_cache=True)
    cache = out.past_key_values if "past_key_values" in out else out.cache_params
    found: Counter = Counter()
    states = [t for t in getattr(cache, "linear_cache", []) if len(t)]
    for layer in cache.layers:
        states += [
            t for n in ("conv_states", "recurrent_states") for t in getattr(layer, n, {}).values() if isinstance(t, torch.Tensor)
        ]
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or keys.dim() != 4 or not keys.numel():
            continue  # a state alone
        window = layer.sliding_window if getattr(layer, "is_sliding", False) else 0
        found[keys.shape[1] * keys.shape[3] + values.shape[1] * values.shape[3], window] += 1
    return found, sum(t.numel() * t.element_size() for t in states)


def counted_layers(size: kvx.Size, context: int) -> Counter:
    found: Counter = Counter()
    for g in (g for g in size.groups if g.block_bytes):
        index = sum(int(part.rsplit(" ", 1)[1]) for part in g.stores.split(", ") if part.startswith("index"))  # kept apart there
        elements = g.block_bytes / g.block_size / g.num_layers / 2 - index
        found[int(elements), g.window] += g.num_layers
    return found


@pytest.mark.parametrize("model_type", sorted(CHECKED_TYPES - BY_HAND))
def test_checked_types_have_the_bytes_of_a_real_cache(model_type):
    config = config_of(model_type)
    got, (want, state_bytes) = kvx.size(config), real_layers(config)
    longest = getattr(config, "max_position_embeddings", None) or 10**9
    want = Counter({(n, 0 if w >= longest else w): 0 for n, w in want}) + Counter(
        [(n, 0 if w >= longest else w) for (n, w), count in want.items() for _ in range(count)]
    )
    assert counted_layers(got, longest) == want
    assert engine_sizes(config, context=7)[0].state_bytes == state_bytes
    assert bool(state_bytes) == any(g.planes for g in got.groups)
    assert got.is_checked
    assert not [note for note in got.notes if note.startswith("not understood")]


def test_every_config_class_is_answered_or_refused():
    """Never 0 bytes, never another error, and what was not compared says so."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    counts: Counter = Counter()
    for model_type in transformers.CONFIG_MAPPING:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                config = transformers.CONFIG_MAPPING[model_type]()
        except Exception:
            counts["has no default"] += 1
            continue
        try:
            size = kvx.size(config)
        except KvxError:  # any other error fails the test
            counts["refused"] += 1
            continue
        assert size.request_bytes(4096) > 0, model_type
        assert all(g.block_bytes > 0 or g.state_bytes > 0 for g in size.groups), model_type
        assert size.is_checked == (size.model_type in CHECKED_TYPES), model_type
        counts["checked" if size.is_checked else "unchecked"] += 1
    assert counts["checked"] > 100, counts
    assert counts["has no default"] < 5, counts


LEFT_OUT = (
    "layer_types",
    "layers_block_type",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "sliding_window",
    "per_layer_config",
)


@pytest.mark.parametrize("field", LEFT_OUT)
def test_a_field_that_is_left_out_has_transformers_default(field):
    """What Transformers reads from the same config.json, or a refusal: never another number."""
    num_equal = 0
    for model_type in sorted(CHECKED_TYPES - BY_HAND):
        make = transformers.CONFIG_MAPPING[OUTER.get(model_type, model_type)]
        whole = config_of(model_type).to_dict()
        inner = whole.get("text_config", whole)
        if field not in inner:
            continue
        del inner[field]
        try:
            want, got = kvx.size(make.from_dict(whole)), kvx.size(whole)
        except Exception as error:
            if (
                not isinstance(error, KvxError)
                and "transformers" not in type(error).__module__
                and not isinstance(error, (ValueError, TypeError))
            ):
                raise
            continue
        assert Counter((g.stores, g.window, g.num_layers) for g in got.groups) == Counter(
            (g.stores, g.window, g.num_layers) for g in want.groups
        ), model_type
        num_equal += 1
    assert num_equal > 0


def test_known_models_are_checked():
    assert {config["model_type"] for config in MODELS.values()} <= CHECKED_TYPES


HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "hidden_size": 4096}
ROW = 2 * 8 * 128 * 2  # bytes of a token in one layer of these heads


def plain(model_type: str, layers: int, **fields) -> dict:
    return {"model_type": model_type, "num_hidden_layers": layers, **HEADS, **fields}


# What issue after issue got wrong: the config as it is published, bytes of a token, fixed bytes, and what is said.
FAMILIES = {
    "MiMo-V2": (
        plain(
            "mimo_v2_flash",
            6,
            head_dim=192,
            v_head_dim=128,
            num_key_value_heads=4,
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            hybrid_layer_pattern=[0, 1, 1, 1, 1, 0],
            sliding_window_size=128,
            sliding_window=128,
        ),
        2 * 4 * (192 + 128) * 2,
        4 * 9 * 16 * 8 * (192 + 128) * 2,
        "",
    ),
    "RecurrentGemma": (
        plain(
            "recurrent_gemma",
            26,
            num_key_value_heads=1,
            block_types=["recurrent", "recurrent", "attention"],
            attention_window_size=2048,
        ),
        0,
        8 * 129 * 16 * 2 * 128 * 2 + 18 * (4096 * 3 * 2 + 4096 * 4),
        "",
    ),
    "LFM2": (
        plain("lfm2", 16, full_attn_idxs=[2, 5, 8, 10, 12, 14], conv_L_cache=3),
        6 * ROW,
        10 * 4096 * 2 * 2,
        "",
    ),
    "LFM2 layer_types": (plain("lfm2", 3, layer_types=["conv", "full_attention", "conv"]), ROW, 2 * 4096 * 2 * 2, ""),
    "DBRX": (
        {"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}},
        40 * ROW,
        0,
        "",
    ),
    "Nemotron-NAS": (
        plain(
            "nemotron-nas",
            3,
            num_key_value_heads=None,
            block_configs=[
                {"attention": {"n_heads_in_group": 4, "no_op": False}},
                {"attention": {"n_heads_in_group": None, "no_op": True}},
                {"attention": {"n_heads_in_group": 16, "no_op": False}},
            ],
        ),
        ROW + ROW // 4,
        0,
        "",
    ),
    "Hunyuan CLA": (plain("hunyuan", 64, use_cla=True, cla_share_factor=2), 32 * ROW, 0, ""),
    "Hunyuan CLA, odd": (plain("hunyuan", 5, use_cla=True, cla_share_factor=2), 3 * ROW, 0, ""),
    "Hunyuan without": (plain("hunyuan", 64, use_cla=False, cla_share_factor=2), 64 * ROW, 0, ""),
    "Mllama": (
        plain("mllama_text_model", 40, cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38]),
        32 * ROW,
        0,
        "8 cross-attention layers keep K and V of image or encoder tokens, K 8 x 128 and V 8 x 128 per token and layer",
    ),
    "Jamba": (
        plain("jamba", 32, attn_layer_period=8, attn_layer_offset=4, mamba_d_state=16),
        4 * ROW,
        28 * 8192 * (3 * 2 + 16 * 4),
        "",
    ),
    "Bamba": (
        plain("bamba", 32, attn_layer_indices=[9, 18, 27], mamba_d_state=128),
        3 * ROW,
        29 * ((8192 + 2 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
        "",
    ),
    "Nemotron-H": (
        plain("nemotron_h", 8, hybrid_override_pattern="M-M*-ME*", ssm_state_size=128),
        2 * ROW,
        3 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4),
        "",
    ),
    "Qwen3-Next": (
        plain("qwen3_next", 48, full_attention_interval=4, linear_num_key_heads=16),
        12 * ROW,
        36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4),
        "",
    ),
    "MiniMax-01": (plain("minimax_text_01", 8, attn_type_list=[0] * 7 + [1]), ROW, 7 * 32 * 128 * 128 * 2, ""),
    "Falcon-H1": (
        plain("falcon_h1", 36, mamba_d_ssm=3072),
        36 * ROW,
        36 * ((3072 + 2 * 256) * 3 * 2 + 3072 * 256 * 4),
        "",
    ),
    "Zamba": (
        plain("zamba", 9, attn_layer_period=3, attn_layer_offset=1, attention_head_dim=256, head_dim=None),  # of 2, 4 and 7
        3 * 2 * ROW,
        9 * 8192 * (3 * 2 + 16 * 4),
        "",
    ),
    "a hybrid of no known fields": (
        plain("brand_new", 4, layer_types=["linear_attention", "full_attention"] * 2),
        2 * ROW,
        0,
        "2 layers (2 linear_attention) keep a state of fixed size",
    ),
    "Kimi Linear": (
        plain(
            "kimi_linear",
            4,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            linear_attn_config={"full_attn_layers": [4], "kda_layers": [1, 2, 3]},
        ),
        576 * 2,
        3 * (3 * 4096 * 3 * 2 + 32 * 128 * 128 * 4),
        "",
    ),
    "Gemma 4": (
        plain(
            "gemma4_text",
            6,
            head_dim=256,
            global_head_dim=512,
            sliding_window=512,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
        ),
        2 * 8 * 512 * 2,
        5 * 33 * 16 * 2 * 8 * 256 * 2,
        "",
    ),
    "LongCat": (
        {"model_type": "longcat_flash", "num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        56 * 576 * 2,
        0,
        "",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_fields_of_families_are_read(name):
    config, token_bytes, fixed_bytes, note = FAMILIES[name]
    size = kvx.size({k: v for k, v in config.items() if v is not None})
    assert size.token_bytes == token_bytes
    assert size.fixed_bytes == fixed_bytes
    assert any(note in n for n in size.notes) if note else not size.notes, size.notes


def test_models_without_any_attention_have_states_alone():
    size = kvx.size(plain("nemotron_h", 4, hybrid_override_pattern="MMMM"))
    assert (size.token_bytes, size.fixed_bytes) == (0, 4 * ((8192 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4))
    assert size.request_bytes(1) == size.request_bytes(10**6) == size.fixed_bytes
    assert size.fit_context(size.fixed_bytes) is None
    assert size.fit_context(size.fixed_bytes - 1) == 0
    mamba = kvx.size({"model_type": "mamba", "num_hidden_layers": 4, "hidden_size": 768, "state_size": 16})
    assert mamba.fixed_bytes == 4 * 1536 * (3 * 2 + 16 * 4)
    with pytest.raises(Unsupported, match=r"has no layer with K and V of its tokens \(4 rwkv\)"):
        kvx.size(plain("brand_new", 4, layer_types=["rwkv"] * 4))


def test_what_is_not_known_is_said():
    size = kvx.size(plain("brand_new", 4))
    assert (size.is_checked, size.notes, size.token_bytes) == (False, (), 4 * ROW)
    odd = kvx.size(plain("brand_new", 4, sparse_attention_block=64, kv_share_group=2, attention_dropout=0.1))
    assert not odd.is_checked
    assert odd.notes == (
        "not understood: kv_share_group, sparse_attention_block. If they concern attention, the numbers are wrong",
    )
    assert odd.to_dict()["is_checked"] is False
    assert odd.to_dict()["notes"] == odd.notes
    with pytest.raises(Unsupported, match="layers of their own kv_compress_rate"):
        kvx.size(plain("brand_new", 4, per_layer_config={"1": {"kv_compress_rate": 4}}))
