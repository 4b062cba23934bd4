"""Any architecture of transformers as a tiny random model: its own config class, with every size that it names made small."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 120
LAYERS = 4


def _named(value: int, names: str) -> dict[str, int]:
    return dict.fromkeys(names.split(), value)


# What a field of this name is in a tiny model. Whatever is not named here stays as the config class has it.
SIZES: dict[str, int] = {
    **_named(VOCAB, "vocab_size text_vocab_size audio_vocab_size t2u_vocab_size vocab_size_per_layer_input"),
    **_named(64, "hidden_size d_model n_embd dim embed_dim embedding_size word_embed_proj_dim projection_dim hidden_dim"),
    **_named(64, "cross_attention_hidden_size out_hidden_size output_dim proj_hidden_size"),
    **_named(LAYERS, "num_hidden_layers n_layer num_layers n_layers decoder_layers num_decoder_layers encoder_layers"),
    **_named(LAYERS, "num_encoder_layers"),
    **_named(2, "depth num_hidden_layers_vision speech_encoder_layers t2u_encoder_layers t2u_decoder_layers num_mtp_layers"),
    **_named(4, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads"),
    **_named(4, "num_decoder_attention_heads num_encoder_attention_heads speech_encoder_attention_heads"),
    **_named(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads num_kv_shared_layers"),
    **_named(2, "linear_num_key_heads linear_num_value_heads"),
    **_named(16, "head_dim d_kv attention_head_dim kv_channels global_head_dim swa_head_dim v_head_dim qk_nope_head_dim dim_head"),
    **_named(16, "linear_key_head_dim linear_value_head_dim mamba_d_state mamba_head_dim ssm_state_size mamba_chunk_size"),
    **_named(96, "intermediate_size ffn_dim d_ff n_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size block_ff_dim"),
    **_named(96, "intermediate_dim"),
    **_named(32, "moe_intermediate_size shared_expert_intermediate_size moe_ffn_hidden_size expert_ffn_hidden_size"),
    **_named(32, "shared_intermediate_size kv_lora_rank image_size"),
    **_named(24, "q_lora_rank"),
    **_named(8, "sliding_window attention_chunk_size attention_window_size local_attention window_size"),
    **_named(8, "qk_rope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank patch_size"),
    **_named(4, "num_experts n_routed_experts num_local_experts moe_num_experts zero_expert_num"),
    **_named(2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_selected_experts"),
    **_named(1, "n_group topk_group first_k_dense_replace num_dense_layers n_shared_experts moe_num_shared_experts"),
    **_named(512, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length max_target_positions"),
    **_named(512, "max_source_positions"),
}
# Where None is no model that runs.
UNSET = ("head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}
IDS |= {"forced_bos_token_id": None, "forced_eos_token_id": None}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
# Fields of one model type, over the above.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 64},
    },
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64},
    "gemma3n_text": {"activation_sparsity_pattern": None, "intermediate_size": 96},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_num_heads": 4, "linear_head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8},
    "roc_bert": {
        "pronunciation_vocab_size": 20, "shape_vocab_size": 20, "pronunciation_embed_dim": 16, "shape_embed_dim": 16,
    },
    **{
        name: {"rope_parameters": _MROPE}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_ocr_text", "paddleocr_vl_text")
    },
    "glm4v_moe_text": {"rope_parameters": {**_MROPE, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_config(model_type: str, kind: type[PretrainedConfig] | None = None, depth: int = 0) -> PretrainedConfig:
    kind = kind or CONFIG_MAPPING[model_type]
    own = dict(OWN.get(model_type, {}))
    has = kind()
    fields = has.to_dict()
    fields |= {name: 0 for name in UNSET if fields.get(name, 0) is None}
    given: dict[str, Any] = {}
    back = {v: k for k, v in kind.attribute_map.items()}
    for name, value in SIZES.items():
        if name in fields and name not in kind.sub_configs and isinstance(fields[name], int) and not isinstance(fields[name], bool):
            given[name] = value
    for name in kind.sub_configs:
        sub = getattr(has, name, None)
        if sub is not None and depth < 4:
            given[name] = tiny_config(sub.model_type, type(sub), depth + 1)
    for name, value in IDS.items():
        if name in fields and (name != "decoder_start_token_id" or fields[name] is not None):
            given[name] = value
    layers = given.get("num_hidden_layers") or given.get(back.get("num_hidden_layers", ""), LAYERS)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
        if isinstance(fields.get(name), list):
            given[name] = spread(fields[name], layers)
    if given.get("num_kv_shared_layers"):  # the last two have no K and V of their own, and read those of a layer of their kind
        given["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    if "is_decoder" in fields and not fields.get("is_encoder_decoder"):
        given["is_decoder"] = True
    if fields.get("kv_lora_rank"):  # MLA: what rotates is the head's own dim, and every query head has its K and V
        given |= {"head_dim": SIZES["qk_rope_head_dim"]} if "head_dim" in given else {}
        given |= {"num_key_value_heads": 4} if "num_key_value_heads" in given else {}
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:  # three parts of what rotates, by pairs
        pairs = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        given["rope_parameters"] = {**rope, "mrope_section": [pairs // 4, pairs // 4, pairs // 2]}
    given.update(own)
    return kind(**given)


def spread(kinds: list[str], count: int) -> list[str]:
    """`count` layers that show every kind of a longer list, in its order as far as they go."""
    distinct = list(dict.fromkeys(kinds))
    if len(kinds) <= count:
        return (kinds * count)[:count]
    start = kinds[:count]
    missing = [k for k in distinct if k not in start]
    for i, k in enumerate(reversed(missing)):
        start[count - 1 - i] = k
    return start


def tiny_model(cls: type[nn.Module], config: PretrainedConfig, most: int = 30_000_000) -> nn.Module:
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(config, attn_implementation="eager").parameters())
    if count > most:
        raise ValueError(f"{cls.__name__} has {count} parameters")
    torch.manual_seed(7)
    made = cls._from_config(config, attn_implementation="eager").eval().float()
    for parameter in made.parameters():
        if parameter.dim() > 1:  # the usual start is so even that every token is the same
            nn.init.normal_(parameter, std=0.15)
    return made
