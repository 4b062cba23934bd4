"""Layers whose tensors lie apart and whose block ids are shared, as PagedCache and KvxCache have them, to and from a handover.

Which blocks those are, and who may find them afterwards, is the caches' business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvx.errors import BadArgument, Incompatible, Unsupported
from kvx.handover import Handover, Source
from kvx.spec import CacheSpec


class LayerTensors(NamedTuple):
    """One layer's."""

    number: int  # of the layer in the model
    tensors: tuple[Tensor, ...]  # K and V, or one for both; then their scales where those stand apart
    spec: CacheSpec  # of one layer


class LayerPlace(NamedTuple):
    """Where a handover has a layer."""

    part: int
    layer: int  # counted within the part


def sources(
    layers: Sequence[LayerTensors],
    blocks: Sequence[int],  # of the sequence, in order; -1 behind the window
    *,
    num_tokens: int,
    window: int = 0,
    first_token: int = 0,  # tokens before it are not there
) -> list[Source]:
    """What export_blocks takes: a source a layer, in the order of the model. Blocks wholly behind the window do not come along."""
    size = layers[0].spec.block_size
    for number, _, spec in layers:
        k, v = spec.planes[0], spec.planes[-1]
        if spec.num_planes == 2 and k.head_dim != v.head_dim:
            raise Unsupported(
                f"layer {number} has rows of {k.head_dim} in K and {v.head_dim} in V, of {spec.num_kv_heads} heads; a handover has "
                "rows of one size, or a latent (MLA). transformers 5.22 caches DeepSeek's latents, 5.8 what they expand to."
            )
    # What the last token sees: whoever goes on may have to compute it again.
    behind = max(0, num_tokens - window) // size if window else 0
    ids = [-1] * behind + list(blocks[behind : -(-num_tokens // size)])
    first = max(first_token, behind * size)
    return [
        Source(list(t), _with_layers(spec), ids, layers=(number,), window=window, first_token=first)
        for number, t, spec in sorted(layers, key=lambda layer: layer.number)
    ]


def write_layers(handover: Handover, layers: Sequence[LayerTensors], blocks: Sequence[int], *, num_tokens: int) -> None:
    """A handover's first tokens into the blocks of these layers; -1 leaves a block as it is."""
    where = places(handover)
    for run in _runs(sorted(layers, key=lambda layer: layer.number), where):
        part, start = where[run[0].number]
        spec = replace(_with_layers(run[0].spec), num_layers=len(run), layer_start=start)
        handover.write(part, [t for layer in run for t in layer.tensors], spec, blocks, num_tokens=num_tokens)


def places(handover: Handover) -> dict[int, LayerPlace]:
    """Of K and V, by the layer's number in the model."""
    parts = [(p, part) for p, part in enumerate(handover.parts) if isinstance(part.spec, CacheSpec)]
    return {number: LayerPlace(p, n) for p, part in parts for n, number in enumerate(part.layers)}


def require_layers(call: str, handover: Handover, layers: Sequence[int]) -> None:
    """Incompatible unless it has these layers of the model and no others."""
    has, want = sorted(places(handover)), sorted(layers)
    if len(has) != len(want):
        raise Incompatible(f"{call}(): num_layers of the handover is {len(has)}; here it is {len(want)}. It was not read.")
    if has != want:
        other = next(a for a, b in zip(has, want, strict=True) if a != b)
        raise Incompatible(f"{call}(): the handover has layer {other} of the model, and this cache does not. It was not read.")


def require_tokens(call: str, handover: Handover, layer: int, window: int, num_tokens: int) -> None:
    """Incompatible unless a layer has what the token after `num_tokens` of them sees through `window` (0: all)."""
    part = handover.parts[places(handover)[layer].part]
    needs = max(0, num_tokens + 1 - window) if window else 0
    if part.first_token > needs:
        more = "" if num_tokens == handover.num_tokens else f" It has what token {handover.num_tokens} sees: go on from there."
        raise Incompatible(
            f"{call}(): after {num_tokens} tokens layer {layer} (window {window or 'none'}) sees from token {needs}; the handover, "
            f"of window {part.window}, has {part.first_token} to {handover.num_tokens - 1}.{more} It was not read."
        )


def num_usable(call: str, handover: Handover, tokens: NDArray[Any], *, is_last_left: bool = True) -> int:
    """How many of its tokens an engine that is to go on from `tokens` takes: the last of these is left to compute."""
    if len(tokens) < 2 and is_last_left:
        raise BadArgument(f"{call}(): tokens are {len(tokens)}; the last is computed, so two or more have something to import.")
    n = min(len(tokens), handover.num_tokens)
    wrong = np.flatnonzero(np.asarray(tokens[:n]) != handover.tokens[:n])
    if len(wrong):
        at = int(wrong[0])
        raise Incompatible(
            f"{call}(): token {at} is {int(tokens[at])}; of the handover it is {int(handover.tokens[at])}. "
            "A handover belongs to its tokens. It was not read."
        )
    return min(n, len(tokens) - is_last_left)


def _runs(layers: Sequence[LayerTensors], where: dict[int, LayerPlace]) -> list[list[LayerTensors]]:
    """Layers in a row that one conversion can write: those with scales apart go one by one."""
    runs: list[list[LayerTensors]] = []
    for layer in layers:
        place = where[layer.number]
        last = runs[-1][-1] if runs else None
        follows = last is not None and where[last.number] == (place.part, place.layer - 1) and last.spec == layer.spec
        if follows and not any(layer.spec.scale_shape(i) is not None for i in (0, 1)):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _with_layers(spec: CacheSpec) -> CacheSpec:
    """A layer's spec, with the axis of layers that tensors apart have."""
    return replace(spec, layout=f"layer {spec.layout}" if "|" in spec.layout else f"layer | {spec.layout}")
