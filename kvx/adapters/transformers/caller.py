"""Caller: which module of which model calls a cache. transformers tells a cache neither; the frame that calls it has the module.

One look at a forward's first layer is enough: the other layers are the same model's.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from kvx.errors import BadArgument, Unsupported, a_type

TWO_CACHES = (
    "An encoder-decoder model keeps two caches, of the decoder's own tokens and of the encoder's: give it "
    "transformers' EncoderDecoderCache(KvxCache(model.config), DynamicCache())."
)
# What decides the K and V of a layer and what of them a query sees, in transformers' names.
_GEOMETRY = (
    "model_type", "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types",
    "sliding_window", "attention_chunk_size", "num_kv_shared_layers", "kv_lora_rank",
)  # fmt: skip


class Caller:
    """The model whose tokens a cache has."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config  # that the cache was made from
        self.runs_by = config  # the model's own object, once one has called: it says how the model attends
        self.forget()

    def forget(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None  # that a forward begins with
        self._layer = -1  # of it

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the module is this process's."""
        return {**vars(self), "_module": None}

    def check(self, layer: int, num_tokens: int, *, is_twice: bool) -> None:
        """Refuse a forward of another model than the one whose tokens are here. Called by update(), at a forward's first layer.

        `is_twice`: the same layer was updated just before.
        """
        module, maker = _calling_module(), None if self._module is None else self._module()
        if module is None or module is maker or layer != (layer if self._layer < 0 else self._layer):
            return
        name = type(module).__name__
        if self._module is not None and num_tokens:  # maker is None where that model is gone
            if is_twice or getattr(module, "config", None) is getattr(maker, "config", self):
                raise Unsupported(
                    f"KvxCache.update(): layer {layer} gets K and V of two modules of one model, {a_type(maker)} and a "
                    f"{name}. {TWO_CACHES}"
                )
            raise BadArgument(
                f"KvxCache.update(): the cache has {num_tokens} tokens of another model, and now a {name} calls. reset() it first, "
                "or make a KvxCache for each model."
            )
        found = getattr(module, "config", None)
        if isinstance(found, PretrainedConfig):
            self._check_geometry(name, found)
            self.runs_by = found
        self._module, self._layer = weakref.ref(module), layer

    def _check_geometry(self, name: str, found: PretrainedConfig) -> None:
        """Refuse another config than the cache was made from, as far as K and V hang on it."""
        if found is self.config:
            return
        for what in _GEOMETRY:
            theirs, ours = (field(c, what) for c in (found.get_text_config(decoder=True), self.config))
            if theirs != ours and None not in (theirs, ours):
                raise BadArgument(
                    f"KvxCache.update(): a {name} of a model whose {what} is {theirs} calls; the cache was made from a "
                    f"{type(self.config).__name__} whose {what} is {ours}. A cache belongs to one model: KvxCache(model.config)."
                )


def _calling_module() -> nn.Module | None:
    """The module whose method called update(); None: no module did."""
    frame: Any = sys._getframe(3)  # 0 is this, 1 check(), 2 update(); then what wraps that, and torch's frames where it compiles
    for _ in range(5):
        if frame is None:
            return None
        if "self" in frame.f_code.co_varnames and isinstance(found := frame.f_locals.get("self"), nn.Module):
            return found
        frame = frame.f_back
    return None


def field(config: PretrainedConfig, name: str) -> Any:
    """None where the config has none, or one for each layer (transformers 5)."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' AmbiguousGlobalPerLayerAttributeError, which older versions do not have
        return None
