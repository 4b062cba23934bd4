"""Handovers of transformers' caches: a sequence's K, V and states out of one, and into one that generate() goes on with.

    handover = export_cache(cache, tokens, model=model.config)
    cache = import_cache(handover, model.config, tokens=prompt)
    model.generate(prompt[None], past_key_values=cache)

DynamicCache, StaticCache and KvxCache, of layers that attend to all tokens or to a window of them, that keep a recurrent or
convolution state, or both; others are refused by name. A KvxCache's blocks are converted as they lie (handover_blocks.py). The
others keep K and V as [batch, heads, columns, dim], and a layer with a window its last columns alone (handover_dense.py). States
are alike in all of them (handover_states.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache

from kvx.adapters.transformers.cache import KvxCache
from kvx.adapters.transformers.caller import field
from kvx.adapters.transformers.dense_layer import is_filled, keeps_kv
from kvx.adapters.transformers.handover_blocks import block_sources, fill_blocks
from kvx.adapters.transformers.handover_dense import dense_sources, fill_dense, is_latent
from kvx.adapters.transformers.handover_states import fill_states, has_state_of_tokens, is_state_filled, require_states, state_parts
from kvx.adapters.transformers.layer import FORMATS
from kvx.adapters.transformers.wanted import Wanted
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, Unsupported, a_type
from kvx.handover import Handover, Part, model_name
from kvx.handover.facts import few
from kvx.handover.layer_blocks import num_usable, places, require_layers
from kvx.handover.source import export_parts
from kvx.layout.device_memory import check_device
from kvx.spec import CacheSpec

Tokens = Sequence[int] | NDArray[Any] | Tensor
_DTYPES = {name: dtype for dtype, name in FORMATS.items()}


def export_cache(
    cache: Cache,
    tokens: Tokens,  # [n]: whose K and V are in the cache
    *,
    model: str | PretrainedConfig,  # its name, or its config, whose geometry then is the name: name_of()
    sequence: int = 0,  # of the batch
    padding: int | None = None,  # columns at the left of this sequence that are no tokens; None: none, or what a KvxCache knows
    block_size: int = 16,  # of the handover
    format: str = "",  # of the handover, a row of kvx.FORMATS; "": as the cache has it
) -> Handover:
    """One sequence of a cache. The cache stays as it is. States stand after all of its tokens, and go with all of them alone.

    Positions count from the sequence's first token, as generate() counts them where it is given the attention_mask. With `padding`
    given, or out of a KvxCache, `tokens` may be a beginning of those in the cache.
    """
    ids = _ids("export_cache", tokens)
    if padding is not None and (type(padding) is not int or padding < 0):
        raise BadArgument(f"export_cache(): padding is {padding!r}; it must be a number of columns, 0 or more, or None.")
    here = _layers("export_cache", cache)
    if any(map(is_state_filled, here)) and not any(keeps_kv(layer) for layer in here):
        raise Unsupported("export_cache(): the model keeps states alone, and no K and V; handovers of such caches are not made.")
    if not any(map(is_filled, here)):
        raise BadArgument(f"export_cache(): {a_type(cache)} without K and V; it must be a cache that a model has filled.")
    if isinstance(cache, KvxCache):
        padding = _padding(cache, sequence, padding)
    wanted, name = Wanted(len(ids), sequence, padding, block_size), name_of(model)
    is_direct = isinstance(cache, KvxCache) and not any(map(is_latent, cache.kv_layers))
    found = block_sources(cache, wanted) if is_direct else dense_sources(cache, wanted)
    length = max(int(layer.get_seq_length()) for layer in cache.layers if keeps_kv(layer))
    states = state_parts(cache.layers, wanted, length, _config(cache, model), name)
    kv = export_parts(ids, found, model=name, block_size=block_size, format=format)
    return Handover(token_ids("export_cache()", ids), (*kv, *states))


def import_cache(
    handover: Handover,
    into: PretrainedConfig | Cache,  # a model's config, for a new DynamicCache; or an empty cache, which is filled
    *,
    model: str | PretrainedConfig = "",  # as in export_cache; "": the config that `into` is or has
    tokens: Tokens | None = None,  # what generate() will be given: these must agree, and the last is left to compute
    dtype: torch.dtype | None = None,  # of K and V; None: the cache's, the config's, or else the handover's
    device: str | torch.device | None = None,  # None: the cache's, where it has tensors, or the host
) -> Cache:
    """A cache of one sequence, with the handover's tokens. Its content is checked first; nothing of another model is read.

    Without `tokens` all of the handover's are there, and the next forward takes those that follow.
    """
    if not isinstance(handover, Handover):
        raise BadArgument(f"import_cache(): handover is {a_type(handover)}; it must be a kvx.handover.Handover.")
    entries = next((p for p in handover.parts if p.block_tokens), None)
    if entries is not None:
        raise Unsupported(
            f"import_cache(): the handover has entries of layers {few(entries.layers)}, not only K and V and states, which are all "
            "that transformers' caches are given; write_sequence() takes the rest."
        )
    handover.check()
    n = handover.num_tokens if tokens is None else num_usable("import_cache", handover, _ids("import_cache", tokens))
    config = _config(into, model)
    if not model and config is None:
        raise BadArgument(f"import_cache(): {a_type(into)} does not say which model it is of: give model=.")
    handover.require(model=name_of(model or config))
    cache = DynamicCache(config=into) if isinstance(into, PretrainedConfig) else into
    here = _layers("import_cache", cache)
    if any(map(has_state_of_tokens, here)) or any(int(layer.get_seq_length()) for layer in here if keeps_kv(layer)):
        raise BadArgument(f"import_cache(): into is {a_type(into)} with tokens in it. Give an empty one.")
    count = config.get_text_config(decoder=True).num_hidden_layers if config is not None else 0
    if cache.layers or count:
        require_layers(
            "import_cache", handover, [i for i, layer in enumerate(here) if keeps_kv(layer)] if here else list(range(count))
        )
    _require_geometry(handover, config, cache)
    there = next((layer for layer in cache.layers if is_filled(layer)), None)
    dtype = dtype or (there.dtype if there is not None else _dtype(handover, config))
    device = device or (there.device if there is not None else "cpu")
    check_device("import_cache()", device)
    device = torch.device(device)
    if dtype not in FORMATS:
        raise BadArgument(f"import_cache(): dtype is {dtype}; it must be {', '.join(map(str, FORMATS))}.")
    latent_dim = _latent_dim(handover, config)
    require_states(handover, here, config, n, dtype)
    try:
        if isinstance(cache, KvxCache) and not latent_dim:
            fill_blocks(cache, handover, n, dtype, device)
        else:
            fill_dense(cache, handover, n, dtype, device, latent_dim)
        fill_states(here, handover, config, dtype, device)
    except BaseException:
        cache.reset()  # half of it is no text
        raise
    return cache


def name_of(model: str | PretrainedConfig) -> str:
    """A model's name: as given, or made of its geometry. Two models of one geometry share that, so a name of your own is better."""
    if isinstance(model, str):
        return model
    c = model.get_text_config(decoder=True)
    return model_name(
        c.model_type, num_layers=c.num_hidden_layers, num_kv_heads=_kv_heads(c), head_dim=_head_dim(c), hidden_size=c.hidden_size,
        vocab_size=c.vocab_size,
    )  # fmt: skip


def _layers(call: str, cache: Any) -> list[Any]:
    layers = getattr(cache, "layers", None)  # a cache of an encoder and a decoder has two caches instead
    if not isinstance(cache, Cache) or not isinstance(layers, list):
        raise BadArgument(f"{call}(): got {a_type(cache)}; it takes a DynamicCache, a StaticCache or a KvxCache.")
    return layers


def _padding(cache: KvxCache, sequence: int, given: int | None) -> int:
    """Of a sequence of a KvxCache, which knows."""
    if not 0 <= sequence < cache.num_sequences:
        return given or 0  # refused where the others are
    knows = 0 if cache.pads is None else int(cache.pads[sequence])
    if given not in (None, knows):
        raise BadArgument(f"export_cache(): padding is {given}; sequence {sequence} of this KvxCache has {knows}.")
    return knows


def _require_geometry(handover: Handover, config: PretrainedConfig | None, cache: Cache) -> None:
    """Incompatible where heads or their sizes are others, as far as they are known before a forward."""
    c = config.get_text_config(decoder=True) if config is not None else None
    rank = getattr(c, "kv_lora_rank", None) or 0
    for p, part in _kv_parts(handover):
        handover.require(p, head_start=0)
        if c is not None and part.spec.num_planes == 1:
            handover.require(p, num_kv_heads=1, head_dim=rank + getattr(c, "qk_rope_head_dim", 0))
        elif c is not None and not rank:  # with it, K and V were expanded, to what is not in every config
            spec = part.kv
            handover.require(p, num_kv_heads=_kv_heads(c, spec.num_kv_heads), head_dim=_head_dim(c, spec.head_dim))
    for index, (p, _) in places(handover).items():
        layer = cache.layers[index] if index < len(cache.layers) else None
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if isinstance(keys, Tensor) and isinstance(values, Tensor) and keys.dim() == 4:
            if keys.shape[0] != 1:
                raise BadArgument(f"import_cache(): the cache is for {keys.shape[0]} sequences; a handover is one.")
            latent = handover.parts[p].spec.num_planes == 1
            sizes = {"head_dim": keys.shape[3] + values.shape[3]} if latent else {"head_dim": keys.shape[3]}
            handover.require(p, num_kv_heads=keys.shape[1], **sizes)


def _latent_dim(handover: Handover, config: PretrainedConfig | None) -> int:
    """How much of a row of latents is K, in a cache of latents; 0 in others."""
    if all(part.spec.num_planes == 2 for _, part in _kv_parts(handover)):
        return 0
    rank = getattr(config.get_text_config(decoder=True) if config is not None else None, "kv_lora_rank", None)
    if not rank:
        raise BadArgument(
            "import_cache(): the handover is of latents (MLA), whose parts the model's config tells: model=model.config."
        )
    return int(rank)


def _kv_parts(handover: Handover) -> list[tuple[int, Part]]:
    return [(p, part) for p, part in enumerate(handover.parts) if isinstance(part.spec, CacheSpec)]


def _config(into: PretrainedConfig | Cache, model: str | PretrainedConfig) -> PretrainedConfig | None:
    for given in (model, into, getattr(into, "config", None)):
        if isinstance(given, PretrainedConfig):
            return given
    return None


def _dtype(handover: Handover, config: PretrainedConfig | None) -> torch.dtype:
    stated = getattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", None)  # the latter in older transformers 4
    format = next((part.kv.format for _, part in _kv_parts(handover)), "of states alone")
    found = stated or _DTYPES.get(format)
    if not isinstance(found, torch.dtype):
        raise BadArgument(f"import_cache(): the handover is {format}, and nothing says what the model computes in: dtype=.")
    return found


def _kv_heads(c: Any, near: int = 0) -> int:
    return _near(_each(c, "num_key_value_heads") or {int(c.num_attention_heads)}, near)


def _head_dim(c: Any, near: int = 0) -> int:
    return _near(_each(c, "head_dim") or {int(c.hidden_size) // int(c.num_attention_heads)}, near)


def _each(c: Any, name: str) -> set[int]:
    """Of the layers, which may differ in it (Gemma 4); none where the config does not say."""
    one = field(c, name)
    found = [one] if one is not None else [getattr(layer, name, None) for layer in getattr(c, "per_layer_config", ())]
    return {int(x) for x in found if x}


def _near(sizes: set[int], near: int) -> int:
    """The one that is asked for, if a layer has it; else the largest."""
    return near if near in sizes else max(sizes)


def _ids(call: str, tokens: Tokens) -> NDArray[np.int64]:
    ids = np.asarray(tokens.numpy(force=True) if isinstance(tokens, Tensor) else tokens)
    if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
        raise BadArgument(f"{call}(): tokens are {ids.dtype} {list(ids.shape)}; they must be a row of ids, one sequence's.")
    return ids.astype(np.int64)
