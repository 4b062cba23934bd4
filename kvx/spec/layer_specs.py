"""Layer specs: for each layer of a model, the spec of the K and V it keeps and of its state, from its config.

What a cache of any kind is made from. A layer has either, both (Falcon-H1, Zamba2) or neither (an MLP, or another's K and V).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvx.errors import BadArgument
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.config_fields import ConfigFields
from kvx.spec.layer_kinds import StoredRow, layer_kind
from kvx.spec.layer_types import layers
from kvx.spec.size import STATE_FORMATS, plain_format
from kvx.spec.state_planes import StatePlane
from kvx.spec.state_spec import StateSpec


class LayerSpecs(NamedTuple):
    kv: CacheSpec | None  # of a latent (MLA): the latent as K, its rotary part as V
    state: StateSpec | None
    window: int = 0  # tokens whose K and V are kept; 0: all
    is_chunked: bool = False  # the window starts anew every `window` tokens
    planes: tuple[StatePlane, ...] = ()  # of the state, in the order of Transformers: its conv_states, then its recurrent_states
    is_latent: bool = False  # MLA


def layer_specs(
    model: str | Path | Mapping[str, Any],  # as kvx.size takes it, or a Transformers config
    format: str = "bf16",  # of K and V; of convolutions too, which are bf16 where it is quantised
    *,
    state_format: str = "",  # of recurrent matrices: bf16, f16 or f32; "": as Transformers keeps them, mostly f32
    num_blocks: int = 1,
    block_size: int = 16,
    num_states: int = 1,  # blocks of states, each of one sequence at one position
) -> tuple[LayerSpecs, ...]:
    """One entry a layer, in the model's order. `layer_start` counts all layers for K and V, those with states for states."""
    config = ConfigFields.load(model)
    if "compress_ratios" in config or config.model_type == "deepseek_v4":
        raise config.unsupported("has layers that compress tokens: kvx.cache.hybrid makes their caches")
    if state_format and state_format not in STATE_FORMATS:
        raise BadArgument(f"layer_specs(): state_format is {state_format!r}; it takes {', '.join(STATE_FORMATS)}.")
    found: list[LayerSpecs] = []
    num_before = 0
    for i, layer in enumerate(layers(config)):
        if layer.also and layer.also != "cross_attention":
            raise config.unsupported(f"keeps a state in layer {i} ({layer.also}) whose sizes the config does not say")
        if not layer.type and layer.state is None:
            found.append(LayerSpecs(None, None))
            continue
        kind = layer_kind(config, layer)
        if any(row.index_format for row in kind.rows):
            raise config.unsupported("keeps keys of an indexer beside its latents")
        kv = _kv(kind.rows, format, num_blocks, block_size, i) if kind.rows else None
        state = None
        if kind.planes:
            planes = tuple(plane.spec(plain_format(format), state_format) for plane in kind.planes)
            state = StateSpec(num_states, planes, layer_start=num_before)
            num_before += 1
        is_latent = len(kind.rows) == 1  # K and V of one row
        found.append(LayerSpecs(kv, state, kind.window, kind.is_chunked, kind.planes, is_latent))
    return tuple(found)


def _kv(rows: tuple[StoredRow, ...], format: str, num_blocks: int, block_size: int, layer: int) -> CacheSpec:
    k, v = rows[0].dims if len(rows) == 1 else (rows[0].dims[0], rows[1].dims[0])
    return CacheSpec(num_blocks, block_size, rows[0].num_heads, k, v_head_dim=0 if v == k else v, format=format, layer_start=layer)
