"""What a config says of each layer that has a cache: K and V of all tokens or of a window of them, states, both, or nothing. Any
other is refused by its name."""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

from transformers import PretrainedConfig, cache_utils

from kvx.errors import BadArgument, Unsupported

_FULL = "full_attention"
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # -> the config's field
# What a layer of another kind keeps, in transformers' words for kinds. "mamba" and "attention" are those of older configs.
_STATES = ("linear_attention", "conv", "mamba")
# Nothing: no attention at all, or the K and V of an earlier layer. Before transformers 5.23 the latter were not in its list.
_NOTHING = ("moe", "mlp", "dummy")
_HYBRID = {"hybrid": _FULL, "hybrid_sliding": "sliding_attention"}  # a state beside K and V: of which kind
_STATE = "keeps a recurrent or convolution state that its cache does not hold"
_OWN_CACHES = ("minimax",)  # model types
_OWN_STATES = ("recurrent_gemma",)  # model types whose modules hold the states, which since 5.23 they call linear_attention
CHUNKS_WRONG = ("jamba",)  # transformers' scan of several tokens gets no initial state
_ENTRIES = "keeps entries that each stand for several tokens beside its K and V"
_KEEPS = {
    "recurrent": _STATE,
    **dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), _ENTRIES),
    "cross_attention": "keeps K and V of an image instead of the text's tokens, as many as the image has",
    "indexed_attention": "keeps keys of an indexer beside K and V, and chooses by them which tokens a query sees",
    "minimax_m3_sparse": "keeps keys of an indexer beside K and V, and chooses by them which tokens a query sees",
    "reference_sliding_attention": "keeps all tokens of the prompt and a window of those that follow",
}


_TOO_OLD = "is cached by newer versions of transformers (5.22 and 5.23 are tested) in a way that KVX takes"


def _has_states() -> bool:
    """Whether caches of this transformers hold states, several of a layer. Before, models had classes of their own for it."""
    layer = getattr(cache_utils, "LinearAttentionLayer", None)
    return layer is not None and "number_of_states" in signature(layer.__init__).parameters


class CachedLayer(NamedTuple):
    """What the cache keeps of a layer."""

    has_kv: bool
    window: int  # of K and V; 0: all tokens
    num_states: int  # 0: none

    @property
    def is_empty(self) -> bool:
        return not self.has_kv and not self.num_states


_LEAVE_OUT = "Leave past_key_values out: generate() makes the cache that the model takes."


def cached_layers(config: PretrainedConfig, call: str = "KvxCache()", instead: str = _LEAVE_OUT) -> list[CachedLayer]:
    """Of each layer that has a cache, as transformers' DynamicCache reads a config. `instead`: what to do where it is refused."""
    name = type(config).__name__
    if not getattr(config, "num_attention_heads", None):
        raise Unsupported(
            f"{call}: a {name} has no num_attention_heads: its model keeps a state instead of K and V, or is made of several "
            f"models with caches of their own. {instead}"
        )
    if getattr(config, "model_type", "") in _OWN_CACHES:
        raise Unsupported(
            f"{call}: a {name}'s model takes no cache but one of its own class, in which states stand beside the layers. {instead}"
        )
    found = _layers(config)
    taken = {_FULL, *_WINDOWS, *((*_STATES, *_NOTHING, *_HYBRID) if _has_states() else ())}
    others = dict.fromkeys(kind for kind, _ in found if kind not in taken)
    if others:
        where = "; ".join(
            f"layers {', '.join(str(i) for i, (k, _) in enumerate(found) if k == kind)} are {kind!r}, which "
            f"{_KEEPS.get(kind, _TOO_OLD if kind in (*_STATES, *_NOTHING, *_HYBRID) else 'KVX does not know')}"
            for kind in others
        )
        raise Unsupported(
            f"{call}: of a {name}, {where}. It takes K and V of {_FULL}, {' and '.join(_WINDOWS)} layers, and states of "
            f"linear_attention, conv and hybrid ones. {instead}"
        )
    num_states, made = int(getattr(config, "number_of_conv_states", None) or 1), []
    for i, (kind, window) in enumerate(found):
        attends = _HYBRID.get(kind, kind)
        if attends in _WINDOWS and (not isinstance(window, int) or window < 1):
            field = _WINDOWS[attends]
            raise BadArgument(f"{call}: layer {i} is {kind!r}, and the config's {field} is {window}; it must be 1 or more.")
        has_kv, has_state = kind not in (*_STATES, *_NOTHING), kind in (*_STATES, *_HYBRID)
        made.append(CachedLayer(has_kv, window if attends in _WINDOWS else 0, num_states if has_state else 0))
    if not any(layer.has_kv for layer in made):
        raise Unsupported(f"{call}: a {name} has states alone, and nothing that says how many tokens they stand after. {instead}")
    return made


def _layers(config: PretrainedConfig) -> list[tuple[str, Any]]:
    """(kind, window) of each."""
    crossing = getattr(config, "cross_attention_layers", None)  # Mllama's, among the others and in one cache with them
    if crossing:
        return [("cross_attention" if i in crossing else _FULL, 0) for i in range(config.num_hidden_layers)]
    blocks = getattr(config, "layers_block_type", None)  # RecurrentGemma's, which has no layer_types
    if getattr(config, "layer_types", None) is None and isinstance(blocks, (list, tuple)) and set(blocks) - {"attention"}:
        return [(_FULL if kind == "attention" else kind, 0) for kind in blocks]
    read = getattr(cache_utils, "get_layer_types_and_kwargs", None)
    if read is not None:  # transformers 5, where layers may differ in their windows
        types, options = read(config)
        each = [options] * len(types) if isinstance(options, dict) else options  # one for all layers up to 5.17
        if config.model_type in _OWN_STATES:
            types = ["recurrent" if kind == "linear_attention" else kind for kind in types]
        return [(kind, option.get("sliding_window")) for kind, option in zip(types, each, strict=True)]
    types = getattr(config, "layer_types", None)
    if types is None:
        kind = next((k for k, field in _WINDOWS.items() if getattr(config, field, None) is not None), _FULL)
        types = [kind] * config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", None) or 0  # the last layers may read K and V of earlier ones
    return [(kind, getattr(config, _WINDOWS.get(kind, ""), None)) for kind in types[: len(types) - shared]]
