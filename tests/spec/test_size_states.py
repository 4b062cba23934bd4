"""Sizes of hybrid models beside the tensors that Transformers allocates for a request, to the byte; and their layers' specs."""

from __future__ import annotations

import warnings
from math import prod

import pytest

import kvx
from kvx.spec.engine_size import engine_sizes
from kvx.spec.layer_specs import layer_specs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.22", reason="hybrids are those of transformers 5.22")

TOKENS = 21  # past every window below
IDS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = {**IDS, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
GDN = {
    **BASE, **LINEAR, "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
MLA = {
    **BASE, **LINEAR, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_local_experts": 4,
}  # fmt: skip
MAMBA2 = {
    **BASE, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 24, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip
GRANITE = {**MAMBA2, **LINEAR, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
NEMOTRON = {
    **BASE, "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe"], "head_dim": 32, "ssm_state_size": 24,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 8, "n_routed_experts": 4, "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip
ZAMBA2 = {
    **BASE, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 24, "n_mamba_heads": 8,
    "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1,
}  # fmt: skip
JAMBA = {**BASE, "num_hidden_layers": 4, "num_experts": 2, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 8}
LFM2 = {**BASE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
MAMBA = {**IDS, "hidden_size": 64, "num_hidden_layers": 2}
GEMMA4 = {
    **BASE, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 8, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 16, "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
INKLING = {
    **BASE, "num_hidden_layers": 3, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "head_dim": 16, "swa_head_dim": 16,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
# name -> (model_type, fields). A name ends with what is not usual of it.
HYBRIDS = {
    "qwen3_next": ("qwen3_next", {**GDN, **MOE}),
    "qwen3_next kernel 3": ("qwen3_next", {**GDN, **MOE, "linear_conv_kernel_dim": 3}),
    "qwen3_next equal heads": ("qwen3_next", {**GDN, **MOE, "linear_num_key_heads": 4, "linear_value_head_dim": 16}),
    "qwen3_5": ("qwen3_5_text", GDN),
    "qwen3_5 8 heads": ("qwen3_5_text", {**GDN, "linear_num_value_heads": 8}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**GDN, **MOE}),
    "olmo_hybrid": ("olmo_hybrid", {**GDN, "linear_num_value_heads": 2}),
    "olmo_hybrid heads left out": (
        "olmo_hybrid",
        {k: v for k, v in GDN.items() if not k.startswith("linear_") and k != "head_dim"},
    ),
    "kimi_linear": ("kimi_linear", {**MLA, "linear_head_dim": 16, "linear_num_heads": 4}),
    "kimi_linear kernel 3": (
        "kimi_linear",
        {**MLA, "linear_head_dim": 32, "linear_num_heads": 2, "linear_conv_kernel_dim": 3},
    ),
    "bailing_hybrid": (
        "bailing_hybrid",
        {**MLA, "n_group": 1, "topk_group": 1, "head_dim": 16, "num_mtp_layers": 0},
    ),
    "bamba": ("bamba", {**MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "bamba 2 groups": ("bamba", {**MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_groups": 2}),
    "bamba auto": ("bamba", {**MAMBA2, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_d_head": "auto"}),
    "granitemoehybrid": ("granitemoehybrid", GRANITE),
    "granitemoehybrid 4 groups": ("granitemoehybrid", {**GRANITE, "mamba_n_groups": 4, "mamba_d_conv": 3}),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h odd width": ("nemotron_h", {**NEMOTRON, "mamba_head_dim": 8, "n_groups": 4}),
    "falcon_h1": ("falcon_h1", {**MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": 128}),
    "falcon_h1 expand": ("falcon_h1", {**MAMBA2, "num_hidden_layers": 2, "mamba_d_ssm": None}),
    "zamba2": ("zamba2", ZAMBA2),
    "zamba2 2 groups": ("zamba2", {**ZAMBA2, "mamba_ngroups": 2, "mamba_d_state": 16}),
    "zamba": ("zamba", {**BASE, "num_hidden_layers": 5, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "jamba": ("jamba", JAMBA),
    "jamba wide": ("jamba", {**JAMBA, "mamba_expand": 3, "mamba_d_state": 8, "mamba_d_conv": 3}),
    "lfm2": ("lfm2", LFM2),
    "lfm2 kernel 4": ("lfm2", {**LFM2, "conv_L_cache": 4}),
    "lfm2_moe": ("lfm2_moe", {**LFM2, **MOE, "num_dense_layers": 1}),
    "mamba": ("mamba", MAMBA),
    "falcon_mamba": ("falcon_mamba", {**MAMBA, "state_size": 8}),
    "mamba2": ("mamba2", {**MAMBA, "num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 1, "chunk_size": 8}),
    "mamba2 2 groups": ("mamba2", {**MAMBA, "num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 2, "chunk_size": 8}),
    "minimax": (
        "minimax",
        {**BASE, **LINEAR, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 8},
    ),
    "zaya": ("zaya", {**BASE, **MOE, "num_hidden_layers": 2, "head_dim": 16, "num_experts_per_tok": 1, "router_hidden_size": 16}),
    "inkling": ("inkling_text", INKLING),
    "gemma4": ("gemma4_text", GEMMA4),
    "gemma4 K = V": ("gemma4_text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 shared": ("gemma4_text", {**GEMMA4, "num_kv_shared_layers": 2}),
    "gemma3n": (
        "gemma3n_text",
        {k: v for k, v in GEMMA4.items() if k != "global_head_dim"}
        | {"num_kv_shared_layers": 2, "laurel_rank": 8, "activation_sparsity_pattern": None},
    ),
    "llama4": (
        "llama4_text",
        {
            **BASE, "num_hidden_layers": 4, "head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2,
            "attention_chunk_size": 8,
        },
    ),
}  # fmt: skip
STATELESS = {name for name in HYBRIDS if name.startswith(("gemma", "llama4"))}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def config_of(name: str):
    model_type, fields = HYBRIDS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.CONFIG_MAPPING[model_type](**fields)


def model_of(config, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        except ValueError:  # the text model of one that sees or hears
            return transformers.AutoModel.from_config(config, dtype=dtype).eval()


def real_layers(name: str, format: str) -> list[dict[str, list]]:
    """Tensors of every layer of a cache after one prompt of one request: what holds tokens, convolutions, and the rest."""
    config = config_of(name)
    torch.manual_seed(0)
    ids = torch.arange(2, 2 + TOKENS)[None]
    with torch.inference_mode():
        out = model_of(config, DTYPES[format])(input_ids=ids, use_cache=True)
    cache = out.past_key_values if "past_key_values" in out else out.cache_params
    found = []
    for i, layer in enumerate(cache.layers):
        linear = getattr(cache, "linear_cache", [])
        parts = {
            "kv": [getattr(layer, n, None) for n in ("keys", "values")],
            "conv": list(getattr(layer, "conv_states", {}).values()),
            "rest": [*getattr(layer, "recurrent_states", {}).values(), *(linear[i : i + 1] if linear else [])],
        }
        found.append({n: [t for t in ts if isinstance(t, torch.Tensor) and t.numel()] for n, ts in parts.items()})
    return found


def num_bytes(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("format", DTYPES)
@pytest.mark.parametrize("name", HYBRIDS)
def test_bytes_are_those_transformers_allocates(name, format):
    config, real = config_of(name), real_layers(name, format)
    row = engine_sizes(config, format, context=TOKENS)[0]
    assert row.engine == "transformers"
    assert row.state_bytes == sum(num_bytes(x["conv"] + x["rest"]) for x in real)
    assert row.request_bytes == sum(num_bytes(x["kv"] + x["conv"] + x["rest"]) for x in real)
    size = kvx.size(config, format)
    assert not size.notes
    assert bool(row.state_bytes) == (name not in STATELESS)
    if name not in STATELESS:  # an oldest column of a convolution is in Transformers' tensors, and nobody reads it
        unused = sum(num_bytes([t[..., :1] for t in x["conv"]]) for x in real) if name != "zaya" else 0
        assert sum(g.state_bytes for g in size.groups) == row.state_bytes - unused


@pytest.mark.parametrize("name", HYBRIDS)
def test_layer_specs_have_the_planes_of_each_layer(name):
    """Axis by axis: of K and V, and of each plane of a state."""
    config, real = config_of(name), real_layers(name, "bf16")
    specs = layer_specs(config)
    kept = [s for s in specs if s.kv or s.state]
    real = [x for x in real if any(x.values())]  # layers of an MLP have an empty one
    assert len(kept) == len(real)
    for spec, x in zip(kept, real, strict=True):
        assert bool(spec.kv) == bool(x["kv"])
        if spec.kv:
            tokens = min(TOKENS, spec.window - 1) if spec.window else TOKENS
            assert [(p.sizes["head"], tokens, p.head_dim) for p in spec.kv.planes] == [tuple(t.shape[1:]) for t in x["kv"]]
        assert bool(spec.state) == bool(x["conv"] + x["rest"])
        planes = spec.state.planes if spec.state else ()
        convs = [p for p in planes if p.name.startswith("conv")]
        assert [p.sizes["channel"] for p in convs] == [t.shape[1] for t in x["conv"]]
        assert [p.sizes["tap"] + (name != "zaya") for p in convs] == [t.shape[2] for t in x["conv"]]
        others = [p for p in planes if not p.name.startswith("conv")]
        assert [prod(p.sizes.values()) for p in others] == [t[0].numel() for t in x["rest"]]
        axes = [tuple(size for axis, size in p.axes if (axis, size) != ("column", 1)) for p in others]
        assert axes == [tuple(t.shape[1:]) for t in x["rest"]]
        names = {torch.bfloat16: "bf16", torch.float32: "f32"}
        assert [p.format.name for p in (*convs, *others)] == [names[t.dtype] for t in (*x["conv"], *x["rest"])]


def test_recurrent_gemma_keeps_its_states_on_its_modules():
    fields = {k: v for k, v in BASE.items() if k != "num_key_value_heads"} | {"num_hidden_layers": 3, "lru_width": 96}
    config = transformers.RecurrentGemmaConfig(**fields, attention_window_size=16)
    model = model_of(config, torch.bfloat16)
    with torch.inference_mode():
        model(input_ids=torch.arange(2, 2 + TOKENS)[None], use_cache=True)
    states = [t for m in model.modules() for n in ("conv1d_state", "recurrent_states") if (t := getattr(m, n, None)) is not None]
    (row, *_) = engine_sizes(config, context=TOKENS)
    assert len(states) == 4
    assert row.state_bytes == num_bytes(states) == sum(g.state_bytes for g in kvx.size(config).groups)
