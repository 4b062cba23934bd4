"""ModelConfig: the shape of a decoder, from a Transformers config.json or the metadata of a GGUF file.

Fields that a config.json leaves out have the values of Transformers' own config class. A field that is set to something this
runner does not compute is refused by its name: the same text as Transformers, or none.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, KvxError, Unsupported

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}

# Fields of the families' config classes that this file reads.
_READ = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "eos_token_id", "tie_word_embeddings"),
    *("rope_parameters", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers"),
}
# Fields that do not change an answer: training, words for people, or what another field was made from (the last line).
_INERT = {
    *("transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "id2label", "label2id"),
    *("problem_type", "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "attention_dropout", "pretraining_tp"),
    *("chunk_size_feed_forward", "max_window_layers", "no_rope_layer_interval"),
}
# What other families compute and these do not. A config that sets one was written for another model's code.
_FOREIGN = (
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "partial_rotary_factor", "use_qk_norm"),
    *("qk_norm", "clip_qkv", "attention_chunk_size", "num_local_experts", "num_experts", "kv_lora_rank", "per_layer_config"),
    *("num_kv_shared_layers", "use_cla", "block_configs", "alibi", "attention_sinks"),
)
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, {}, [])


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's: frequencies slower than a wavelength of the old context are divided by `factor`, those between blend."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    old_context: int


@dataclass(frozen=True)
class ModelConfig:
    family: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotates: tuple[bool, ...] = ()  # per layer; (): all do
    has_qkv_bias: bool = False  # Qwen2
    has_qk_norm: bool = False  # Qwen3
    is_tied: bool = False  # the head is the embedding
    eos_ids: tuple[int, ...] = ()
    activation: str = "silu"  # a value of ACTIVATIONS

    def __post_init__(self) -> None:
        """What is impossible is said here, before any weight is read."""
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
            "max_seq_len",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise BadArgument(f"the model's {name} is {value!r}; it must be a whole number of 1 or more.")
        if self.num_heads % self.num_kv_heads:
            raise BadArgument(
                f"the model has {self.num_heads} query heads and {self.num_kv_heads} KV heads "
                "(num_attention_heads, num_key_value_heads); the first is a multiple of the second."
            )
        if self.head_dim % 2:
            raise BadArgument(f"the model's head_dim is {self.head_dim}; rotary embeddings turn pairs, so it is even.")
        if self.rotates and len(self.rotates) != self.num_layers:
            raise BadArgument(
                f"the config says for {len(self.rotates)} layers whether they rotate; the model has {self.num_layers}."
            )
        bad = [i for i in self.eos_ids if type(i) is not int]
        if bad:
            raise BadArgument(f"eos_token_id has {bad[0]!r}; it must be a token's number, a list of them, or null.")

    def inverse_frequencies(self) -> Tensor:
        """[head_dim / 2] f32, as Transformers computes them."""
        powers = torch.arange(0, self.head_dim, 2, dtype=torch.int64).float() / self.head_dim
        freq: Tensor = 1.0 / (self.rope_theta**powers)
        s = self.rope_scaling
        if s is None:
            return freq
        length = 2 * math.pi / freq
        low, high = s.old_context / s.low_freq_factor, s.old_context / s.high_freq_factor
        blend = (s.old_context / length - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        between = (1 - blend) * freq / s.factor + blend * freq
        return torch.where(length > low, freq / s.factor, torch.where(length < high, freq, between))

    def does_rotate(self, layer: int) -> bool:
        return not self.rotates or self.rotates[layer]


def read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise BadArgument(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise BadArgument(f"{path} is not JSON: {str(error)[:200]}.") from None
    if not isinstance(fields, dict):
        raise BadArgument(f"{path} holds no object; a model's is one.")
    return fields


def config_of_folder(folder: Path) -> ModelConfig:
    """From config.json as Transformers 4 and 5 write it, and the ends of text of generation_config.json, which go before."""
    path = folder / "config.json"
    if not path.is_file():
        raise BadArgument(f"{folder} has no config.json; a model folder has one, beside *.safetensors. Or name a .gguf file.")
    fields = read_json(path)
    generation = folder / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    try:
        return config_of_json(fields, eos)
    except KvxError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadArgument(f"{path} cannot be read as a decoder's config: {error!r}.") from error


def config_of_json(c: Mapping[str, Any], generation_eos: Any = None) -> ModelConfig:
    family = c.get("model_type", "")
    _check_family(family, "model_type")
    fields = _with_defaults(c)
    _refuse_what_is_not_computed(c, fields)
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    rope = fields["rope_parameters"]
    rotates = fields.get("no_rope_layers") if family == "smollm3" else None
    if rotates is not None and len(rotates) < layers:
        raise BadArgument(f"no_rope_layers is a list of {len(rotates)}; the model has {layers} layers (num_hidden_layers).")
    eos = generation_eos if generation_eos is not None else fields["eos_token_id"]
    return ModelConfig(
        family=family,
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields["num_key_value_heads"] if fields["num_key_value_heads"] is not None else heads,
        head_dim=fields["head_dim"] if fields.get("head_dim") is not None else fields["hidden_size"] // heads,
        max_seq_len=fields["max_position_embeddings"],
        norm_eps=float(fields["rms_norm_eps"]),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_rope_scaling(rope),
        rotates=tuple(bool(x) for x in rotates[:layers]) if rotates is not None else (),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        is_tied=bool(fields["tie_word_embeddings"]),
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        activation=ACTIVATIONS[fields["hidden_act"]],
    )


def _with_defaults(c: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of Transformers' config class, as it reads this config; what the class does not know is kept beside."""
    try:
        from transformers import CONFIG_MAPPING
        from transformers.utils import logging
    except ImportError:
        return _without_transformers(c)
    given = {k: v for k, v in copy.deepcopy(dict(c)).items() if k not in ("quantization_config", "per_layer_config")}
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # remarks on rope, which is checked here
    try:
        config = CONFIG_MAPPING[c["model_type"]].from_dict(given)
    except Exception as error:  # it validates with errors of its own
        raise BadArgument(f"Transformers does not take this config.json: {' '.join(str(error).split())}") from error
    finally:
        logging.set_verbosity(before)
    named = {f.name for f in dataclasses.fields(type(config))} | {"tie_word_embeddings"}
    return {**given, **{name: getattr(config, name) for name in named if hasattr(config, name)}}


def _without_transformers(c: Mapping[str, Any]) -> dict[str, Any]:
    """The config as it stands. What is missing has a default that only Transformers knows."""
    fields = dict(c)
    old = c.get("rope_scaling")
    if old and c.get("rope_parameters"):
        raise BadArgument("config.json has rope_scaling and rope_parameters, which may differ. Leave one of them out.")
    rope = dict(c.get("rope_parameters") or old or {})
    if "rope_theta" not in rope and "rope_theta" in c:
        rope["rope_theta"] = c["rope_theta"]
    rope.setdefault("rope_type", rope.get("type", "default"))
    fields["rope_parameters"] = rope
    needed = _READ - {"head_dim", "sliding_window", "use_sliding_window", "layer_types", "no_rope_layers", "mlp_bias"}
    needed -= {"attention_bias"}  # these are false where they are absent, in every family
    if c.get("model_type") == "smollm3":
        needed |= {"no_rope_layers"}
    if c.get("model_type") == "qwen3":
        needed |= {"head_dim"}
    missing = sorted(name for name in needed if name not in fields) + ([] if "rope_theta" in rope else ["rope_theta"])
    if c.get("model_type") == "mistral" and "sliding_window" not in fields:
        missing.append("sliding_window")
    if missing:
        raise Unsupported(
            f"config.json has no {', '.join(missing)}. Transformers has values for what is left out, and it is not installed: "
            "pip install transformers, or write them into config.json."
        )
    return fields


def _refuse_what_is_not_computed(c: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
    family = c["model_type"]
    if fields["hidden_act"] not in ACTIVATIONS:
        raise Unsupported(f"hidden_act is {fields['hidden_act']!r}; the runner has {', '.join(ACTIVATIONS)}.")
    # Qwen's configs name a window that is off; Mistral's is on where there is one.
    window = fields.get("sliding_window") if fields.get("use_sliding_window", family == "mistral") else None
    if window:
        raise Unsupported(f"sliding_window is {window}; this runner's layers are full. The cache has windows: kvx.LayerGroup.")
    kinds = sorted(set(fields.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise Unsupported(f"layer_types has {', '.join(map(repr, kinds))}; this runner's layers are all full_attention.")
    for key in ("attention_bias", "mlp_bias"):
        if fields.get(key) and family != "qwen2":
            raise Unsupported(f"{key} is true; the runner has biases of QKV alone, and in qwen2 alone.")
    # A class that has grown a field since this was written: any other value than its default may change the answer.
    for name, default in _class_defaults(family).items():
        if name not in _READ | _INERT and fields.get(name) != default:
            raise Unsupported(f"{name} is {fields.get(name)!r}; the runner does not know this field of {family}'s config.")
    for name in (n for n in _FOREIGN if n not in _READ):
        if not any(c.get(name) is x or c.get(name) == x for x in _NEUTRAL):
            raise Unsupported(f"{name} is {c[name]!r}; the runner's {family} does not compute that.")


def _class_defaults(family: str) -> dict[str, Any]:
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return {}
    known = dataclasses.fields(CONFIG_MAPPING[family])
    return {f.name: f.default for f in known if f.default is not dataclasses.MISSING}


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    share = rope.get("partial_rotary_factor")
    if share not in (None, 1):
        raise Unsupported(f"partial_rotary_factor is {share}; the runner rotates whole heads.")
    nested = [k for k, v in rope.items() if isinstance(v, Mapping)]
    if nested:
        raise Unsupported(f"rope_parameters has its own for {', '.join(nested)}; the runner has one for all layers.")
    if kind == "default":
        return None
    if kind != "llama3":
        raise Unsupported(f'rope_type is "{kind}"; the runner has default and llama3.')
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, context = (rope[n] for n in names)
    return RopeScaling(float(factor), float(low), float(high), int(context))


# What of a GGUF's `<architecture>.` keys is read, beside those that say nothing about the computation.
_GGUF_READ = {
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "embedding_length", "block_count", "feed_forward_length", "context_length"),
    *("rope.freq_base", "rope.dimension_count", "vocab_size", "rope.scaling.type"),
}
_GGUF_INERT = {"tensor_data_layout", "rope.scaling.finetuned"}


def config_of_gguf(m: Mapping[str, Any], names: frozenset[str]) -> ModelConfig:
    """From metadata and the names of tensors: a file without `output.weight` ties its head."""
    family = m.get("general.architecture", "")
    _check_family(family, "general.architecture")

    def get(key: str, default: Any = None) -> Any:
        value = m.get(f"{family}.{key}", default)
        if value is None:
            raise BadArgument(f"the GGUF has no {family}.{key}; a decoder's does.")
        return value

    for key, value in m.items():
        short = key.removeprefix(f"{family}.")
        is_plain = any(value is x or value == x for x in _NEUTRAL) and (short, value) != ("attention.causal", False)
        if key != short and short not in _GGUF_READ | _GGUF_INERT and not is_plain:
            raise Unsupported(f"the GGUF's {key} is {value!r}; the runner does not know this key, which may change the answer.")
    heads, hidden, layers = get("attention.head_count"), get("embedding_length"), get("block_count")
    if m.get(f"{family}.rope.scaling.type", "none") != "none":
        raise Unsupported(
            f"{family}.rope.scaling.type is {m[f'{family}.rope.scaling.type']!r}; the runner has none and rope_freqs."
        )
    head_dim = get("attention.key_length", hidden // heads if type(heads) is int and heads else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_dim) != head_dim:
            raise Unsupported(f"{family}.{key} is {get(key)}; the runner's is head_dim, {head_dim} here.")
    ends = [m.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        family=family,
        vocab_size=m.get(f"{family}.vocab_size") or len(m["tokenizer.ggml.tokens"]),
        hidden_size=hidden,
        intermediate_size=get("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_seq_len=get("context_length"),
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope_theta=get("rope.freq_base", 10000.0),
        # llama.cpp has no key for it: every fourth layer of SmolLM3 goes without.
        rotates=tuple((i + 1) % 4 != 0 for i in range(layers)) if family == "smollm3" else (),
        has_qkv_bias="blk.0.attn_q.bias" in names,
        has_qk_norm="blk.0.attn_q_norm.weight" in names,
        is_tied="output.weight" not in names,
        eos_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
    )


def _check_family(family: str, key: str) -> None:
    if family not in FAMILIES:
        raise Unsupported(f"{key} is {family!r}; the runner has {', '.join(FAMILIES)}. Other models: kvx.adapters.transformers.")
