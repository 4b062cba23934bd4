"""Plain facts out of vLLM's objects: the one place that knows their fields. They are looked up by name, so vLLM is not imported."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kvx.adapters.vllm.groups import CHUNKED, FORMATS, STATES, GroupFacts, ModelFacts
from kvx.adapters.vllm.layout import TensorFacts
from kvx.adapters.vllm.states import state_planes
from kvx.connector.groups import Group
from kvx.errors import BadArgument, Unsupported, a_type
from kvx.identity import model_name, weights_identity

# Fields of an AttentionSpec that change what its bytes mean, with the value that does not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "kv_quant_mode": (None, 0),
    "state_content_bytes": (None,),
    "tokens_per_state": (None, 1),
    "num_head_slots": (None,),
    "cache_dtype_str": (None, "auto", "float16", "bfloat16", "float32"),
    "extra_retained_tokens": (None, 0),
    "rswa_window": (None,),
    "sink_len": (None, 0),
}
_FP8_PER_TENSOR = 1  # of vLLM's KVQuantMode: a scale for each layer's K and V, which the layer has
# The same of a MambaSpec.
_PLAIN_STATES: dict[str, tuple[Any, ...]] = {"num_speculative_blocks": (None, 0), "tp_replicated": (None, False)}
# vLLM's loaders that read the weight files of the model's folder, all of them.
_READS_FILES = ("auto", "hf", "bitsandbytes", "fastsafetensors", "gguf", "instanttensor", "mistral", "npcache", "pt", "safetensors")

# vLLM's own names in kv_connector_extra_config, beside those of kvx/connector/settings.py.
EXTRA_CONFIG = (
    "spec_name",
    "spec_module_path",
    "blocks_per_chunk",
    "canonical_layout",
    "offload_prompt_only",
    "self_describing_kv_events",
)


def group_facts(group: Any, cache_dtype: str = "auto") -> GroupFacts:
    """Of a KVCacheGroupSpec. `cache_dtype` is the --kv-cache-dtype, which says which fp8 it is."""
    spec = group.kv_cache_spec
    by_layer = getattr(spec, "kv_cache_specs", None)  # UniformTypeKVCacheSpecs: one a layer
    if by_layer:
        first, *others = by_layer.values()
        if any(other != first for other in others):
            raise Unsupported("KvxConnector: layers of one group differ in their heads or their size. It was not read.")
        spec = first
    kind = type(spec).__name__
    plain = _PLAIN_STATES if kind == STATES else _PLAIN
    unusual = {name: getattr(spec, name, None) for name in plain}
    is_fp8 = kind != STATES and unusual["kv_quant_mode"] == _FP8_PER_TENSOR
    if is_fp8:
        del unusual["kv_quant_mode"]
    latent = kind == "MLAAttentionSpec"
    # A full view keeps all tokens, whatever its layers attend to.
    window = {"SlidingWindow": "sliding_window", CHUNKED: "attention_chunk_size"}
    field = next((field for beginning, field in window.items() if kind.startswith(beginning)), "")
    return GroupFacts(
        kind=kind,
        layer_names=tuple(group.layer_names),
        block_size=spec.block_size,
        num_kv_heads=getattr(spec, "num_kv_heads", 0),
        head_size=getattr(spec, "head_size", 0),
        head_size_v=0 if latent else getattr(spec, "head_size_v", None) or 0,
        dtype=_fp8(cache_dtype) if is_fp8 else str(getattr(spec, "dtype", "")).removeprefix("torch."),
        window=(getattr(spec, field, None) or 0) if field else 0,
        unusual={name: str(value) for name, value in unusual.items() if value not in plain[name]},
        states=tuple(
            (tuple(shape), str(dtype).removeprefix("torch."))
            for shape, dtype in zip(getattr(spec, "shapes", ()), getattr(spec, "dtypes", ()), strict=True)
        ),
        keeps_states=getattr(spec, "mamba_cache_mode", "none") != "none",
    )


def model_facts(config: Any, groups: Sequence[GroupFacts]) -> ModelFacts:
    """Of a VllmConfig. What states hold is asked for only where there are some."""
    text = config.model_config.hf_text_config
    has_states = any(g.kind == STATES for g in groups)
    return ModelFacts(
        num_layers=text.num_hidden_layers,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        planes=state_planes(text) if has_states else {},
        num_ranks=config.parallel_config.tensor_parallel_size,
    )


def _fp8(cache_dtype: str) -> str:
    return {"fp8": "fp8_e4m3"}.get(cache_dtype, cache_dtype)


def layer_scales(group: Group, config: Any) -> dict[str, tuple[float, float]]:
    """Of each layer's K and V, as its attention has them. Unsupported where they are not known when vLLM starts."""
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise Unsupported(
            "KvxConnector: calculate_kv_scales makes scales of the first prompt; blocks need them before. Run without it."
        )
    layers = config.compilation_config.static_forward_context
    found = {}
    for name in group.layer_names:
        scales = [getattr(layers.get(name), f"_{plane}_scale_float", None) for plane in "kv"]
        if not all(isinstance(scale, float) and scale > 0 for scale in scales):
            raise Unsupported(
                f"KvxConnector: the scales of K and V of {name} are {scales}; each must be a number above 0. It was not read."
            )
        found[name] = (float(scales[0] or 0), float(scales[1] or 0))
    return found


def tensor_facts(t: Tensor) -> TensorFacts:
    return TensorFacts(tuple(t.shape), tuple(t.stride()), t.element_size(), t.data_ptr())


def layer_tensors(group: Group, caches: Mapping[str, Any]) -> list[Tensor]:
    """The group's registered tensors, in order."""
    found = []
    for name in group.layer_names:
        t = caches.get(name)
        if not isinstance(t, Tensor):
            raise Unsupported(
                f"KvxConnector: the cache of {name} is {'missing' if t is None else a_type(t)}; it must be one tensor in "
                "vLLM 0.26 to 0.32. It was not read."
            )
        found.append(t)
    return found


def head_start(rank: int, ranks: int, heads: int, held: int) -> int:
    """The first KV head of a rank that has `held` of them. With more ranks than heads, heads are held by several ranks in a row."""
    if held > 1:  # layers may have another number than the model says
        return rank * held
    return rank * heads // ranks


def require_known(config: Any) -> None:
    """Unsupported where a whole feature of this VllmConfig makes blocks that are not a rank's own."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1) or 1
        if size > 1:
            raise Unsupported(f"KvxConnector: {name} is {size}; a block's tokens are then spread over ranks. It works with 1.")
    if getattr(config, "speculative_config", None) is not None:
        raise Unsupported("KvxConnector: speculative decoding has layers of its own, one token behind. Run without it.")
    is_async = getattr(config.scheduler_config, "async_scheduling", False)
    if computes_again(config) and (is_async or getattr(config, "use_v2_model_runner", False)):
        got = "async_scheduling" if is_async else "the V2 model runner"
        raise Unsupported(
            f'KvxConnector: kv_load_failure_policy is "recompute" with {got}; vLLM to 0.32 loses count of tokens then '
            '(vllm#49250). Give "fail", or async_scheduling=False and VLLM_USE_V2_MODEL_RUNNER=0.'
        )


def computes_again(config: Any) -> bool:
    """Whether vLLM computes what could not be loaded. Otherwise it ends the request with an error."""
    return getattr(config.kv_transfer_config, "kv_load_failure_policy", "fail") == "recompute"


def name_of(config: Any) -> str:
    """A model's name made of its geometry, as kvx.adapters.transformers makes it from the same config."""
    c = config.model_config.hf_text_config
    heads = c.num_attention_heads
    return model_name(
        c.model_type,
        num_layers=c.num_hidden_layers,
        num_kv_heads=_of_model(c, "num_key_value_heads") or heads,
        head_dim=_of_model(c, "head_dim") or c.hidden_size // heads,
        hidden_size=c.hidden_size,
        vocab_size=c.vocab_size,
    )


def _of_model(config: Any, field: str) -> Any:
    """What a config says of all layers. Transformers refuses to, where layers have their own (Gemma 4)."""
    try:
        return getattr(config, field, None)
    except RuntimeError:
        return vars(config).get(field)


def identity_of(config: Any) -> str:
    """A name that only this model has: its geometry, its weight files, and what vLLM was told to make of them.

    BadArgument where the files are not to be found, or do not say all.
    """
    model, load = config.model_config, config.load_config
    loader = str(getattr(load.load_format, "value", load.load_format)).lower()
    other_config = getattr(model, "hf_config_path", None) or model.model
    overrides = getattr(model, "hf_overrides", None) or {}
    folder, why = None, ""
    if loader not in _READS_FILES:
        why = f'load_format is "{loader}", which does not read the weight files of a folder'
    elif getattr(model, "model_weights", ""):
        why = f"the weights come from {model.model_weights}"
    elif callable(overrides):
        why = "hf_overrides is a function"
    elif other_config != model.model:
        why = f"the config comes from {other_config}"
    elif (folder := _folder_of(model, load)) is None:
        why = f"{model.model} is neither a path here nor a snapshot in Hugging Face's cache"
    if folder is None:
        raise BadArgument(
            f"KvxConnector: the model that these K and V belong to cannot be determined: {why}. "
            'Give "model" in kv_connector_extra_config: a name that only these weights have. A fine-tune needs another.'
        )
    rope = getattr(model.hf_text_config, "rope_parameters", None) or getattr(model.hf_text_config, "rope_scaling", None)
    # An engine with room for long sequences rotates short ones otherwise too.
    is_rotated_by_length = any(f"'{kind}'" in str(rope) for kind in ("longrope", "su", "dynamic"))
    settings = {
        "quantization": str(model.quantization or ""),
        "quantization_config": _text(getattr(model, "quantization_config", None)),
        "hf_overrides": _text(overrides),
        "disable_sliding_window": "yes" if getattr(model, "disable_sliding_window", False) else "",
        "max_model_len": str(model.max_model_len) if is_rotated_by_length else "",
    }
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{name_of(config)}-{weights_identity(folder, dtype=FORMATS.get(dtype, dtype), settings=settings)}"


def _folder_of(model: Any, load: Any) -> Path | None:
    """Where vLLM read the weights: a path, or what the hub's cache has of this revision."""
    path = Path(model.model)
    if path.exists():
        return path
    if getattr(sys.modules.get("vllm.envs"), "VLLM_USE_MODELSCOPE", False):  # another hub, with other models under the same names
        return None
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True))
    except (OSError, ValueError):  # of the hub: not there, or no name of a repository
        return None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str) if value else ""


def has_plain_tokens(request: Any) -> bool:
    """Whether the tokens alone say what K and V are: no adapter, no picture, no salt that keeps tenants apart.

    Others are neither found nor kept: a LoRA's name in vLLM does not say which weights it has.
    """
    odd = ("lora_request", "mm_features", "cache_salt", "prompt_embeds", "pooling_params")
    return not any(getattr(request, name, None) for name in odd[:3]) and all(getattr(request, n, None) is None for n in odd[3:])
