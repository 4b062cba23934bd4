"""Layer groups of a model, from its config: what a PagedCache of it is made of.

    cache = PagedCache(layer_groups(config, num_blocks=512, num_states=64), max_seqs=32, max_seq_len=4096)

Layers whose blocks are of one shape and see the same tokens share them. All layers with states are one group, whatever each keeps:
a sequence's states stand at one position. Layers that read another's K and V have none of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvx.cache.groups import LayerGroup, Member
from kvx.cache.kinds import Chunked, GroupKind, Latent, State, kind_of
from kvx.errors import BadArgument, Unsupported
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.layer_specs import LayerSpecs, layer_specs
from kvx.spec.state_spec import StateSpec


def layer_groups(
    model: str | Path | Mapping[str, Any],  # a config, or the path of one, as kvx.size takes it; or Transformers' model.config
    *,
    num_blocks: int,  # of every group with K and V
    num_states: int = 0,  # of the group of states: one for each sequence at once, and one for each snapshot that is kept
    block_size: int = 16,
    format: str = "bf16",  # of K and V, and of convolutions
    state_format: str = "",  # of recurrent matrices; "": as Transformers keeps them, mostly f32
    state: State | None = None,  # when snapshots are taken; None: State()
) -> list[LayerGroup]:
    """Groups with K and V, in the order of their first layers; then that of states."""
    if type(num_states) is not int or num_states < 0:
        raise BadArgument(
            f"layer_groups(): num_states is {num_states!r}; it must be a number of blocks, 0 for a model without states."
        )
    try:
        layers = layer_specs(
            model, format, state_format=state_format, num_blocks=num_blocks, block_size=block_size, num_states=max(1, num_states)
        )
    except (BadArgument, Unsupported) as error:  # what reads configs speaks for kvx.size
        raise type(error)(str(error).replace("size()", "layer_groups()", 1)) from error
    states = [i for i, layer in enumerate(layers) if layer.state is not None]
    if states and not num_states:
        raise BadArgument(
            f"layer_groups(): {len(states)} layers of this model keep a state of each sequence, from layer {states[0]} on, and "
            "num_states is 0; give one for each sequence at once, and one for each snapshot that is kept."
        )
    return [*_kv_groups(layers), *([_state_group(layers, states, state or State())] if states else [])]


def _kv_groups(layers: tuple[LayerSpecs, ...]) -> list[LayerGroup]:
    shared: dict[tuple[GroupKind, CacheSpec], list[int]] = {}
    for i, layer in enumerate(layers):
        if layer.kv is not None:
            shared.setdefault((_kind(layer), replace(layer.kv, layer_start=0)), []).append(i)
    kinds = [kind for kind, _ in shared]
    return [
        LayerGroup(_name(kind, spec if kinds.count(kind) > 1 else None), tuple(of), spec, kind=kind)
        for (kind, spec), of in shared.items()
    ]


def _kind(layer: LayerSpecs) -> GroupKind:
    if layer.is_latent:
        return Latent(layer.window)
    return Chunked(layer.window) if layer.is_chunked else kind_of(layer.window)


def _name(kind: GroupKind, spec: CacheSpec | None) -> str:
    """With heads and dim where others are of the same kind."""
    name = type(kind).__name__.lower()
    size = kind.chunk if isinstance(kind, Chunked) else kind.window
    return " ".join(filter(None, (name, str(size or ""), "" if spec is None else f"{spec.num_kv_heads}x{spec.head_dim}")))


def _state_group(layers: tuple[LayerSpecs, ...], states: list[int], kind: State) -> LayerGroup:
    shared: dict[StateSpec, list[int]] = {}
    for i in states:
        spec = layers[i].state
        assert spec is not None
        shared.setdefault(replace(spec, layer_start=0), []).append(i)
    (first, of), *others = shared.items()
    return LayerGroup("states", tuple(of), first, kind=kind, others=tuple(Member(tuple(o), spec) for spec, o in others))
