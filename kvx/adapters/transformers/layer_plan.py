"""LayerPlan: where a layer of a transformers model keeps what it caches, in a kvx.PagedCache that has all of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from kvx.adapters.transformers.kinds import CHUNKS_WRONG, CachedLayer, cached_layers
from kvx.adapters.transformers.layer import FORMATS
from kvx.cache.groups import Layer, PlanesLayer
from kvx.cache.kinds import Chunked, GroupKind
from kvx.cache.paged import PagedCache
from kvx.errors import BadArgument, Unsupported
from kvx.spec.layer_specs import LayerSpecs, layer_specs
from kvx.spec.state_planes import StatePlane

USE_GENERATE = "Its own generate() runs it."
MAKE_GROUPS = "Make the cache of layer_groups(model.config, ...)."
_DTYPES = {name: dtype for dtype, name in FORMATS.items()}
_NO_CHUNKS = (*CHUNKS_WRONG, "moshi")  # a prompt in two parts gives other tokens in transformers itself


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Where a layer of the model keeps what it caches. Made once, when the model is."""

    index: int
    window: int  # of its K and V, as transformers masks them; 0: all
    kv: Layer | None
    kind: GroupKind | None  # of kv's group
    states: PlanesLayer | None
    planes: tuple[tuple[StatePlane, torch.dtype], ...]  # of the states, in transformers' order, with its types


def layer_plans(config: PretrainedConfig, cache: PagedCache, dtype: torch.dtype) -> list[LayerPlan]:
    """Of every layer that transformers caches. What the model or the cache cannot do is refused by the layer and the number."""
    if config.model_type in _NO_CHUNKS:
        raise Unsupported(
            f"PagedModel(): transformers computes several tokens of a {config.model_type} after others as if these were not all "
            f"there, so a prompt could not go on from what is cached of it. {USE_GENERATE}"
        )
    found = cached_layers(config, "PagedModel()", USE_GENERATE)
    specs = layer_specs(config, FORMATS[dtype])
    if len(found) > len(specs):
        raise Unsupported(
            f"PagedModel(): transformers caches {len(found)} layers of a {config.model_type}; its config tells of {len(specs)}. "
            f"{USE_GENERATE}"
        )
    plans = [_plan(cache, i, layer, spec, dtype) for i, (layer, spec) in enumerate(zip(found, specs, strict=False))]
    known = {(i, False) for i, p in enumerate(plans) if p.kv} | {(i, True) for i, p in enumerate(plans) if p.states}
    there = {(i, g.blocks_of.has_state) for g in cache.groups for m in g.members for i in m.layers}
    if there - known:
        layer, is_state = min(there - known)
        raise BadArgument(
            f"PagedModel(): the cache has {'a state' if is_state else 'K and V'} of layer {layer}; the model keeps none there. "
            f"{MAKE_GROUPS}"
        )
    return plans


def _plan(cache: PagedCache, i: int, layer: CachedLayer, spec: LayerSpecs, dtype: torch.dtype) -> LayerPlan:
    theirs, ours = (layer.has_kv, layer.num_states > 0), (spec.kv is not None, spec.state is not None)
    if theirs != ours:
        raise Unsupported(
            f"PagedModel(): of layer {i} transformers keeps {_keeps(*theirs)}, by the config {_keeps(*ours)}. {USE_GENERATE}"
        )
    kv = kind = None
    if spec.kv is not None:
        try:
            kv = cache.layer(i)
        except BadArgument as error:
            raise BadArgument(f"PagedModel(): the cache has no K and V of layer {i}. {MAKE_GROUPS}") from error
        kind = cache.kinds[kv.group]
        has, want = ((s.num_kv_heads, s.kv[0].head_dim, s.kv[1].head_dim) for s in (kv.spec, spec.kv))
        if has != want:
            raise BadArgument(
                f"PagedModel(): layer {i} of the cache has (heads, key dim, value dim) {has}, of the model {want}. {MAKE_GROUPS}"
            )
        if why := _what_is_missing(kind, spec):
            raise BadArgument(f"PagedModel(): layer {i} of the cache {why}. {MAKE_GROUPS}")
    states = None if spec.state is None else _states(cache, i, spec)
    planes = tuple((p, _DTYPES[p.format(FORMATS[dtype])]) for p in spec.planes) if states is not None else ()
    return LayerPlan(i, layer.window, kv, kind, states, planes)


def _keeps(has_kv: bool, has_state: bool) -> str:
    return " and ".join((*(("K and V",) if has_kv else ()), *(("a state",) if has_state else ()))) or "nothing"


def _what_is_missing(kind: GroupKind, spec: LayerSpecs) -> str:
    """Why a group gives back what the model still sees; "" where it does not."""
    if not kind.gives_back:
        return ""
    if isinstance(kind, Chunked):
        is_enough = spec.is_chunked and kind.chunk == spec.window
        return "" if is_enough else f"sees chunks of {kind.chunk} tokens, of the model {_sees(spec)}"
    is_enough = 0 < spec.window <= kind.window
    return "" if is_enough else f"sees a window of {kind.window} tokens, of the model {_sees(spec)}"


def _sees(spec: LayerSpecs) -> str:
    if not spec.window:
        return "all tokens"
    return f"{'chunks' if spec.is_chunked else 'a window'} of {spec.window}"


def _states(cache: PagedCache, i: int, spec: LayerSpecs) -> PlanesLayer:
    assert spec.state is not None
    groups = [n for n, g in enumerate(cache.groups) if g.blocks_of.has_state and any(i in m.layers for m in g.members)]
    if not groups:
        raise BadArgument(f"PagedModel(): the cache has no state of layer {i}. {MAKE_GROUPS}")
    handle = cache.planes(i, groups[0])
    want = {p.name: [size for _, size in p.axes] for p in spec.state.planes}
    has = {p.name: [size for _, size in p.axes] for p in handle.spec.planes}
    if has != want:
        raise BadArgument(f"PagedModel(): layer {i} of the cache has states {has}, of the model {want}. {MAKE_GROUPS}")
    return handle
