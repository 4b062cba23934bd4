"""Which module of which model calls a cache. transformers tells a cache neither; the frame that calls it has the module.

One look at a forward's first layer is enough: the other layers are the same model's.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from kvx.errors import BadArgument

# What decides the K and V of a layer and what of them a query sees, in transformers' names.
_GEOMETRY = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types",
    "sliding_window", "attention_chunk_size", "num_kv_shared_layers", "kv_lora_rank",
)  # fmt: skip


def calling_module(depth: int) -> nn.Module | None:
    """The module whose method called, `depth` frames up or a few more; None: no module did."""
    frame: Any = sys._getframe(depth)
    for _ in range(4):
        if frame is None:
            return None
        if "self" in frame.f_code.co_varnames and isinstance(found := frame.f_locals.get("self"), nn.Module):
            return found
        frame = frame.f_back
    return None


def check_geometry(module: nn.Module, config: PretrainedConfig) -> PretrainedConfig:
    """The config that the module runs by. Refuses another than the cache was made from, as far as K and V hang on it."""
    found = getattr(module, "config", None)
    if found is config or not isinstance(found, PretrainedConfig):
        return config
    for name in _GEOMETRY:
        theirs, ours = (field(c, name) for c in (found.get_text_config(decoder=True), config))
        if theirs != ours and None not in (theirs, ours):
            raise BadArgument(
                f"KvxCache.update(): a {type(module).__name__} of a model whose {name} is {theirs} calls; the cache was made from "
                f"a {type(config).__name__} whose {name} is {ours}. A cache belongs to one model: KvxCache(model.config)."
            )
    return found


def field(config: PretrainedConfig, name: str) -> Any:
    """None where the config has none, or one for each layer (transformers 5)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError, which older versions do not have
        return None
