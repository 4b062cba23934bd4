"""Layer types: what each layer of a model keeps of its tokens, read from its config; and what the config says that is not counted.

Configs come in two ages: new ones list `layer_types`, in older ones the model's name and a few fields say which layers attend, see
a window, or keep a state instead. Both are read as Transformers and the models' own code read them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from kvx.errors import BadArgument
from kvx.spec.config_fields import LAYER_RULES, ConfigFields
from kvx.spec.state_planes import LayerState, layer_state

FULL = ("full_attention", "attention", "global")
INDEXED = ("indexed_attention", "deepseek_sparse_attention")
# Layers that keep a state of fixed size in place of K and V of every token.
_STATE = {
    *("linear_attention", "mamba", "mamba2", "mamba1", "conv", "short_conv", "recurrent", "gated_delta_net", "kda"),
    *("lightning_attention", "rwkv", "gdn"),
}
_MAMBA = ("mamba", "mamba2", "falcon_mamba")  # models of such layers alone
_NOTHING = {"mlp", "moe", "no_op"}
_BOTH = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}  # attention beside a state
_LETTERS = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}  # Nemotron-H's hybrid_override_pattern
# Fields that only models with recurrent layers have.
_RECURRENT = (
    *("attn_layer_period", "attn_type_list", "full_attention_interval", "hybrid_override_pattern", "layers_block_type"),
    *("linear_attn_config", "linear_num_key_heads", "mamba_d_state", "mamba_expand", "ssm_state_size", "state_size"),
    *("time_step_rank", "block_types", "conv_L_cache", "lru_width", "mamba_d_ssm"),
)
# Without layer_types: every n-th layer sees everything, the others a window.
_PATTERN = {"gemma2": 2, "gpt_oss": 2, "cohere2": 4}


@dataclass(frozen=True)
class ModelLayer:
    """What one layer keeps."""

    type: str  # full_attention, sliding_attention, chunked_attention, an indexed one; "": no K and V of its tokens
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int = 0
    state: LayerState | None = None  # in place of K and V, or beside them
    also: str = ""  # what is not counted: a state of unknown sizes, or cross attention


def layers(config: ConfigFields) -> list[ModelLayer]:
    _refuse_what_is_no_kv_cache(config)
    types = _types(config)
    found = [_layer(config, i, t) for i, t in enumerate(types)]
    own = len(found) - config.int_of("num_kv_shared_layers", 0)  # the last ones read the KV of earlier ones
    share = config.int_of("cla_share_factor") if config.get("use_cla") else 1  # Hunyuan: of so many layers the first has it
    kept = [layer if i < own and i % share == 0 else ModelLayer("") for i, layer in enumerate(found)]
    if not any(layer.type or layer.state for layer in kept):
        if own < 1 and found:
            raise BadArgument(f"size(): num_kv_shared_layers of {config.name} leaves no layer that stores anything.")
        raise config.unsupported(f"has no layer with K and V of its tokens ({_counts(layer.also for layer in found)})")
    return kept


def notes(config: ConfigFields, kept: list[ModelLayer]) -> tuple[str, ...]:
    """What the answer leaves out, and what of the config it did not understand."""
    said = []
    states = [layer.also for layer in kept if layer.also and layer.also != "cross_attention"]
    if states:
        said.append(
            f"not counted: {len(states)} layers ({_counts(states)}) keep a state of fixed size for each request, and the "
            "config does not give its size in a field that KVX knows"
        )
    cross = sum(layer.also == "cross_attention" for layer in kept)
    if cross:
        row = f"{_kv_heads(config)} x {_head_dim(config)}"
        said.append(
            f"not counted: {cross} cross-attention layers keep K and V of image or encoder tokens, K {row} and V {row} per token "
            "and layer"
        )
    if config.get("ple_layer_ids"):
        said.append("not counted: what the layers in ple_layer_ids keep of the last tokens")
    if "index_head_dim" in config and "kv_lora_rank" not in config and config.model_type != "deepseek_v4":
        said.append("not counted: the index keys (index_head_dim)")
    # Where every layer is listed, rules it was once made from say nothing new.
    unknown = [n for n in config.fields if _is_suspect(n, config.get(n)) and not ("layer_types" in config and _RULE.search(n))]
    if unknown:
        said.append(f"not understood: {', '.join(sorted(unknown)[:8])}. If they concern attention, the numbers are wrong")
    return tuple(said)


def _refuse_what_is_no_kv_cache(config: ConfigFields) -> None:
    if config.get("is_encoder_decoder"):
        raise config.unsupported("is an encoder and a decoder, and caches cross attention too")


def _layer(config: ConfigFields, i: int, kind: str) -> ModelLayer:
    state = layer_state(config, kind) if kind in _STATE or kind in _BOTH else None
    unknown = "a state beside attention" if kind in _BOTH and state is None else ""
    kind = _BOTH.get(kind, kind)
    if kind in _STATE or kind == "cross_attention":
        return ModelLayer("", state=state, also="" if state else kind)
    if kind in _NOTHING:
        return ModelLayer("")
    if kind in FULL:
        kind = "full_attention"
    if "kv_lora_rank" in config:  # a latent, whatever the heads are
        return ModelLayer(kind, state=state, also=unknown)
    own = _of_layer(config, i)
    heads, dim = _kv_heads(config), _head_dim(config)
    v_dim = config.int_of("v_head_dim", 0) or dim
    if kind == "sliding_attention":
        twice = 2 if config.model_type == "mimo_v2_flash" else 1  # a rule of its class, whose config does not say it
        heads = config.int_of("swa_num_key_value_heads", twice * heads)
        v_dim = config.int_of("swa_v_head_dim", 0) or config.int_of("v_head_dim", 0) or config.int_of("swa_head_dim", 0) or dim
        dim = config.int_of("swa_head_dim", dim)
    elif "global_head_dim" in config:  # Gemma 4: layers that see everything have heads of their own
        dim = v_dim = config.int_of("global_head_dim")
        if config.get("attention_k_eq_v") is not False:
            heads = config.int_of("num_global_key_value_heads", heads)
    if "head_dim" in own:
        dim, v_dim = own["head_dim"], own["head_dim"] if v_dim == dim else v_dim
    heads, v_dim = own.get("num_key_value_heads", heads), own.get("v_head_dim", v_dim)
    for name, value in (("num_key_value_heads", heads), ("head_dim", dim), ("v_head_dim", v_dim)):
        if type(value) is not int or value < 1:
            raise BadArgument(f"size(): {name} of layer {i} of {config.name} is {value!r}; it takes a whole number of 1 or more.")
    window = own.get("sliding_window", 0) if kind == "sliding_attention" else 0
    return ModelLayer(kind, heads, dim, v_dim, window, state, unknown)


def _of_layer(config: ConfigFields, i: int) -> dict[str, Any]:
    """What the config says of this layer alone."""
    if "block_configs" in config:  # Nemotron-NAS
        return {"num_key_value_heads": _nas_heads(config, i)}
    if "num_key_value_heads_per_layer" in config:  # DeciLM
        return {"num_key_value_heads": config.list_of("num_key_value_heads_per_layer", config.num_layers)[i]}
    every = config.get("per_layer_config")
    if not every:
        return {}
    if not isinstance(every, dict):
        raise BadArgument(f"size(): per_layer_config of {config.name} is no object of layers.")
    own = every.get(str(i), every.get(i)) or {}
    if not isinstance(own, dict):
        raise BadArgument(f"size(): per_layer_config of {config.name} has {own!r} for layer {i}; it takes an object.")
    known = {"num_key_value_heads", "head_dim", "v_head_dim", "sliding_window"}
    strange = [k for k in own if k not in known and _is_suspect(k, own[k])]
    if strange:
        raise config.unsupported(f"has layers of their own {', '.join(strange)} (per_layer_config)")
    return {k: v for k, v in own.items() if k in known and v is not None}


def _nas_attention(config: ConfigFields, i: int) -> dict[str, Any]:
    block = config.list_of("block_configs", config.num_layers)[i]
    attention = block.get("attention") if isinstance(block, dict) else None
    if not isinstance(attention, dict):
        raise BadArgument(f"size(): block_configs of {config.name} has no attention for layer {i}.")
    for name in ("window_length", "sparsify", "num_sink_tokens", "unshifted_sink", "is_mamba", "mamba"):
        if attention.get(name):
            raise config.unsupported(f"has {name} in block_configs")
    return attention


def _nas_heads(config: ConfigFields, i: int) -> int:
    group, heads = _nas_attention(config, i).get("n_heads_in_group"), config.int_of("num_attention_heads")
    if type(group) is not int or group < 1 or heads % group:
        raise BadArgument(f"size(): n_heads_in_group of layer {i} of {config.name} is {group!r}; it takes a divisor of {heads}.")
    return heads // group


def _kv_heads(config: ConfigFields) -> int:
    # Falcon's older models and GPT-BigCode share one head, whatever their other fields say.
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    attention = config.get("attn_config")
    if isinstance(attention, dict):  # DBRX, MPT
        if attention.get("attn_type") == "multiquery_attention":
            return 1
        if attention.get("kv_n_heads") is not None:
            return ConfigFields(config.name, {"kv_n_heads": attention["kv_n_heads"]}).int_of("kv_n_heads")
    return config.int_of("num_key_value_heads", 0) or config.int_of("num_attention_heads")


def _head_dim(config: ConfigFields) -> int:
    if config.model_type == "jetmoe" and "kv_channels" in config:
        return config.int_of("kv_channels")
    own = config.int_of("head_dim", 0) or config.int_of("attention_head_dim", 0)
    return own or config.int_of("hidden_size") // config.int_of("num_attention_heads")


def _types(config: ConfigFields) -> list[str]:
    """One type a layer, in the words of Transformers' `layer_types`."""
    types = _listed(config)
    if types is None:
        recurrent = next((field for field in _RECURRENT if config.get(field)), None)
        if recurrent is not None:
            raise config.unsupported(f"has recurrent layers ({recurrent}) and does not say which; add layer_types, one per layer")
        count = config.num_layers
        if config.model_type == "llama4_text":
            types = _llama4_types(config, count)
        else:
            types = ["sliding_attention" if is_windowed else "full_attention" for is_windowed in _windowed(config, count)]
    crossing = config.get("cross_attention_layers")
    if isinstance(crossing, list):  # Mllama
        types = ["cross_attention" if i in crossing else t for i, t in enumerate(types)]
    if "block_configs" in config:
        types = ["no_op" if _nas_attention(config, i).get("no_op") else t for i, t in enumerate(types)]
        types = ["no_op" if _nas_attention(config, i).get("replace_with_linear") else t for i, t in enumerate(types)]
    # A window as long as the longest context hides nothing: such layers are full ones.
    window, longest = window_of(config), config.int_of("max_position_embeddings", 0)
    if (not window and "per_layer_config" not in config) or 0 < longest <= window:
        types = ["full_attention" if t == "sliding_attention" else t for t in types]
    return types


def window_of(config: ConfigFields) -> int:
    """Tokens a sliding layer sees, its own among them; 0: none is said."""
    if "sliding_window_size" in config:  # MiMo-V2 counts the tokens before the one that looks
        return config.int_of("sliding_window_size") + config.model_type.startswith("mimo_v2")
    return config.int_of("sliding_window", 0) or config.int_of("attention_window_size", 0)


def _listed(config: ConfigFields) -> list[str] | None:
    """From a field that says it for each layer, by whatever name."""
    if "hybrid_override_pattern" in config and "layer_types" not in config:
        letters = str(config.get("hybrid_override_pattern"))
        if set(letters) - set(_LETTERS):
            raise config.unsupported(f"has hybrid_override_pattern {letters[:80]!r}, of which {' '.join(_LETTERS)} are known")
        return [_LETTERS[x] for x in letters]
    for field in ("layer_types", "layers_block_type"):
        if field in config:
            listed = config.get(field)
            count = config.int_of("num_hidden_layers", 0) or (len(listed) if isinstance(listed, list) else 0)
            return [str(t) for t in config.list_of(field, count)]
    if config.model_type == "falcon_h1":  # attention and Mamba side by side in each
        return ["hybrid"] * config.num_layers
    if config.model_type in _MAMBA:
        return ["mamba"] * config.num_layers
    count = config.num_layers if _has_layer_rule(config) else 0
    if "hybrid_layer_pattern" in config:  # MiMo-V2: 1 sees a window
        return ["sliding_attention" if x else "full_attention" for x in config.list_of("hybrid_layer_pattern", count)]
    if "block_types" in config:  # RecurrentGemma: repeated to the end; its attention has a window
        block = config.list_of("block_types", 1, whole=True)
        names = {"attention": "sliding_attention" if window_of(config) else "full_attention"}
        return [names.get(str(block[i % len(block)]), str(block[i % len(block)])) for i in range(count)]
    if "attn_layer_period" in config:  # Jamba, Zamba
        period, offset = config.int_of("attn_layer_period"), config.int_of("attn_layer_offset", 0)
        if config.model_type == "zamba":  # whose attention stands beside Mamba, first in the third layer
            later = ["hybrid" if i % period == offset else "mamba" for i in range(count - 3)]
            return ["mamba", "mamba", "hybrid", *later][:count]
        return ["full_attention" if i % period == offset else "mamba" for i in range(count)]
    if "attn_layer_indices" in config:  # Bamba
        return _at(config, "attn_layer_indices", count, "mamba")
    if "full_attn_idxs" in config:  # LFM2
        return _at(config, "full_attn_idxs", count, "conv")
    if "full_attention_interval" in config:  # Qwen3-Next
        interval = config.int_of("full_attention_interval")
        return ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(count)]
    if "attn_type_list" in config:  # MiniMax-01
        return ["full_attention" if x else "linear_attention" for x in config.list_of("attn_type_list", count)]
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and isinstance(linear.get("full_attn_layers"), list):  # Kimi Linear counts from 1
        return ["full_attention" if i + 1 in linear["full_attn_layers"] else "kda" for i in range(count)]
    return None


def _has_layer_rule(config: ConfigFields) -> bool:
    return any(name in config for name in LAYER_RULES)


def _at(config: ConfigFields, field: str, count: int, other: str) -> list[str]:
    places = config.list_of(field, 0, whole=True)
    if any(type(i) is not int or not 0 <= i < count for i in places):
        raise BadArgument(f"size(): {field} of {config.name} has layers outside of 0 to {count - 1} (num_hidden_layers).")
    return ["full_attention" if i in places else other for i in range(count)]


def _windowed(config: ConfigFields, count: int) -> list[bool]:
    if not window_of(config) or config.get("use_sliding_window") is False:
        return [False] * count
    if isinstance(config.get("sliding_window_pattern"), str):
        raise config.unsupported("spells sliding_window_pattern in letters; add layer_types, one per layer")
    pattern = config.int_of("sliding_window_pattern", _PATTERN.get(config.model_type, 0))
    if pattern:
        return [(i + 1) % pattern != 0 for i in range(count)]
    if "use_sliding_window" in config and config.model_type != "qwen3_moe":  # Qwen: the upper layers
        return [i >= config.int_of("max_window_layers", 28) for i in range(count)]
    return [True] * count


def _llama4_types(config: ConfigFields, count: int) -> list[str]:
    """Layers with rotary embedding see their own chunk, the others everything."""
    interval = config.int_of("no_rope_layer_interval", 4) or 4
    has_rope = (
        config.list_of("no_rope_layers", count) if config.get("no_rope_layers") else [(i + 1) % interval for i in range(count)]
    )
    chunked = "chunked_attention" if config.int_of("attention_chunk_size", 0) else "full_attention"
    return [chunked if rotary else "full_attention" for rotary in has_rope]


def _counts(names: Any) -> str:
    return ", ".join(f"{n} {name}" for name, n in Counter(name for name in names if name).items()) or "nothing"


# Names that sound like another kind of attention, a share of K and V, or a state; and those of them that change no byte.
_SOUNDS = re.compile(
    r"attn|attention|kv_|_kv|window|sliding|recurren|mamba|ssm|lru|cla_|_cla$|sparse|latent|lora_rank|compress|hybrid|pattern|"
    r"layer_types|block_type|block_config|share|cross|linear_|conv|state_size|chunk"
)
_HARMLESS = re.compile(
    r"dropout|drop$|bias|softcap|logit|scal|multiplier|implementation|output_|rope|norm|init|dtype|temperature|mlp|expert|moe|vision|"
    r"audio|image|video|mtp|draft|feed_forward|flash|fused|sink|value_scale|alpha|beta|precision|mask|act$|pipeline|parallel|"
    r"a_log|dt_m|intermediate|is_causal|bidirectional|loss|router|_fn|gate|vocab|tie_|embedding|prediction|use_qk|qk_|in_attn|reorder|out_dim|type_vocab"
)
_RULE = re.compile(r"every_n|interval|pattern|period|offset|indices|idx")
_READ = {
    *("num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_head_kv", "num_kv_shared_layers", "multi_query"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "sliding_window_size", "layer_types"),
    *("layers_block_type", "hybrid_override_pattern", "hybrid_layer_pattern", "block_types", "attention_window_size", "use_cla"),
    *("attn_layer_period", "attn_layer_offset", "attn_layer_indices", "full_attn_idxs", "full_attention_interval", "block_configs"),
    *("attn_type_list", "linear_attn_config", "cla_share_factor", "cross_attention_layers", "attn_config", "kv_lora_rank"),
    *("attention_head_dim", "attention_chunk_size", "attention_k_eq_v", "per_layer_config", "num_key_value_heads_per_layer"),
    *("swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim", "num_global_key_value_heads", "compress_ratios"),
    *("compress_rates", "q_lora_rank", "o_lora_rank", "kv_channels", "attention_layers", "attention_types", "hybrid_layer_ids"),
    # Sizes of states and convolutions: kvx/spec/state_planes.py.
    *("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_d_head", "mamba_n_heads", "mamba_n_groups", "mamba_chunk_size"),
    *(
        "mamba_d_ssm",
        "mamba_dt_rank",
        "mamba_num_heads",
        "mamba_head_dim",
        "mamba_headdim",
        "mamba_ngroups",
        "mamba_ssm_cache_dtype",
    ),
    *(
        "n_mamba_heads",
        "use_mamba_kernels",
        "ssm_state_size",
        "state_size",
        "conv_kernel",
        "conv_L_cache",
        "lru_width",
        "chunk_size",
    ),
    *("conv1d_width", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads", "num_attention_heads_per_layer", "attention_hidden_size"),
    *("use_shared_attention_adapter", "hybrid_block_size", "chunk_size_feed_forward", "use_cache"),
    *("cca_time0", "cca_time1", "sconv_kernel_size", "mamba_ssm_dtype", "ple_layer_ids"),
    *("short_conv_kernel_size", "conv_kernel_size", "number_of_conv_states", "swa_num_attention_heads"),
}


def _is_suspect(name: str, value: Any) -> bool:
    is_off = value is None or value is False or value in (0, 1, "", [], {})
    return not is_off and name not in _READ and bool(_SOUNDS.search(name)) and not _HARMLESS.search(name)
