"""States of transformers' layers to and from a handover: a KvxCache's, and those of transformers' own layers, which are alike.

A state is a row of a tensor [batch, ...]; which planes those tensors are, and how ranks would share them out, the model's config
says. A convolution has one column more than the next token reads, its oldest: that one does not travel, and is 0 on the other side.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvx.adapters.transformers.layer import FORMATS
from kvx.adapters.transformers.state_layer import KvxStateLayer
from kvx.adapters.transformers.wanted import Wanted
from kvx.errors import BadArgument, Incompatible, Unsupported
from kvx.handover import Handover, Part
from kvx.handover.facts import few, is_state_part
from kvx.handover.layer_blocks import LayerPlace
from kvx.handover.memory import moved, new_buffers
from kvx.handover.plane_parts import differing_plane
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert
from kvx.spec import PlaneSpec, StateSpec
from kvx.spec.layer_specs import layer_specs
from kvx.spec.state_planes import StatePlane


class _Held(NamedTuple):
    """A tensor of a layer, and what it is."""

    tensor: Tensor  # [batch, ...]
    plane: StatePlane


def has_states(layer: Any) -> bool:
    """Whether it is of a class that keeps states. A MoE's in a hybrid model is too, and keeps none."""
    return hasattr(layer, "conv_states")


def is_state_filled(layer: Any) -> bool:
    return has_states(layer) and bool(_tensors(layer))


def has_state_of_tokens(layer: Any) -> bool:
    """Not one that was reset: transformers zeroes its states and keeps them."""
    return is_state_filled(layer) and any(layer.has_previous_state.values())


def state_parts(layers: list[Any], wanted: Wanted, length: int, config: PretrainedConfig | None, model: str) -> list[Part]:
    """One for each kind of states. `length`: columns of the cache, with padding."""
    filled = [(index, layer) for index, layer in enumerate(layers) if is_state_filled(layer)]
    if not filled:
        return []
    if wanted.num_tokens != length - (wanted.padding or 0):
        raise BadArgument(
            f"export_cache(): {wanted.num_tokens} tokens; states of layers {few(tuple(i for i, _ in filled))} stand after "
            f"{length - (wanted.padding or 0)}, and cannot be cut. Export all of the cache's tokens."
        )
    planes = _planes("export_cache", config)
    kinds: dict[tuple[PlaneSpec, ...], list[tuple[int, list[Tensor]]]] = {}
    for index, layer in filled:
        if (
            layer.record_past
            and not isinstance(layer, KvxStateLayer)
            and any(t is not None for t in layer.recurrent_states.values())
        ):
            raise Unsupported(
                f"export_cache(): layer {index} records its past, so that tokens can be taken back; transformers takes back K, V "
                "and convolutions then, and leaves the recurrent state where it was. Where that stands is not known: export before "
                "activate_past_recording(), or use a KvxCache, whose crop() is exact."
            )
        held = sorted(_held(index, layer, planes[index]), key=lambda h: h.plane.name)
        specs = tuple(h.plane.spec(_format(index, h.tensor), _format(index, h.tensor)) for h in held)
        wanted.check_sequence(held[0].tensor.shape[0])
        kinds.setdefault(specs, []).append((index, [_row(h, wanted.sequence) for h in held]))
    return [_part(specs, same, wanted.num_tokens, model) for specs, same in kinds.items()]


def _part(planes: tuple[PlaneSpec, ...], layers: list[tuple[int, list[Tensor]]], num_tokens: int, model: str) -> Part:
    here = StateSpec(1, planes, num_layers=len(layers), model=model, positions=(num_tokens,))
    neutral = here.replaced(layout=here.block_layout)
    device = layers[0][1][0].device  # layers may be spread over several
    made = new_buffers(neutral, device)
    convert([t.to(device) for _, tensors in layers for t in tensors], list(made), plan=plan(here, neutral))
    host = tuple(moved(made, torch.device("cpu")))
    return Part(neutral, tuple(index for index, _ in layers), 0, 0, host).sealed(num_tokens)


def require_states(
    handover: Handover, layers: list[Any], config: PretrainedConfig | None, num_tokens: int, dtype: torch.dtype
) -> None:
    """Incompatible unless the handover has the states of these layers, for a model of this dtype, and goes on where they stand."""
    where = _places(handover)
    able = [index for index, layer in enumerate(layers) if has_states(layer)]
    planes = _planes("import_cache", config) if where or able else ()
    want = [index for index in able if planes[index]]
    if sorted(where) != want:
        odd = sorted(set(where) ^ set(want))
        has, has_not = ("the handover", "this cache") if odd[0] in where else ("this cache", "the handover")
        raise Incompatible(f"import_cache(): {has} has a state of layer {odd[0]}, and {has_not} does not. It was not read.")
    if where and num_tokens != handover.num_tokens:
        raise Incompatible(
            f"import_cache(): states of layers {few(tuple(want))} stand after the handover's {handover.num_tokens} tokens; the "
            f"model would go on after {num_tokens}. Give it one token more. It was not read."
        )
    for index in want:
        theirs = handover.parts[where[index].part].spec
        if sentence := differing_plane(_spec(planes[index], FORMATS[dtype]), theirs, whole=True):
            raise Incompatible(f"import_cache(): layer {index}: {sentence}. It was not read.")


def fill_states(
    layers: list[Any], handover: Handover, config: PretrainedConfig | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Of one sequence, in layers that have none yet."""
    where = _places(handover)
    planes = _planes("import_cache", config) if where else ()
    for index, place in sorted(where.items()):
        kinds, spec = planes[index], _spec(planes[index], FORMATS[dtype])
        made = {
            p.name: torch.zeros(1, *p.sizes.values(), dtype=getattr(torch, p.format.element.torch_name), device=device)
            for p in spec.planes
        }
        one = spec.replaced(layer_start=place.layer)
        handover.write_planes(place.part, [made[p.name] for p in one.planes], one, [0])
        convs = [p for p in kinds if p.is_conv]
        for i, plane in enumerate(convs):
            _put(layers[index], i, plane, made[plane.name], is_conv=True)
        for i, plane in enumerate(p for p in kinds if not p.is_conv):
            _put(layers[index], i, plane, made[plane.name], is_conv=False)


def _put(layer: Any, i: int, plane: StatePlane, state: Tensor, *, is_conv: bool) -> None:
    if is_conv:
        state = torch.nn.functional.pad(state, (plane.num_unused, 0))
        layer.lazy_initialization(conv_states=state, state_idx=i)
        layer.conv_states[i].copy_(state)
        layer.has_previous_state[i] = True
    else:
        shape = [size for axis, size in plane.axes if (axis, size) != ("column", 1)]
        layer.lazy_initialization(recurrent_states=state.view(1, *shape), state_idx=i)
        layer.recurrent_states[i].copy_(state.view(1, *shape))


def _places(handover: Handover) -> dict[int, LayerPlace]:
    """Of states, by the layer's number in the model."""
    parts = [(p, part) for p, part in enumerate(handover.parts) if is_state_part(part)]
    return {number: LayerPlace(p, n) for p, part in parts for n, number in enumerate(part.layers)}


def _planes(call: str, config: PretrainedConfig | None) -> tuple[tuple[StatePlane, ...], ...]:
    """Of each layer."""
    if config is None:
        raise BadArgument(f"{call}(): the model has states, whose planes its config says: model=model.config.")
    return tuple(layer.planes for layer in layer_specs(config.get_text_config(decoder=True).to_dict()))


def _spec(planes: tuple[StatePlane, ...], format: str) -> StateSpec:
    return StateSpec(1, tuple(p.spec(format) for p in planes))


def _tensors(layer: Any) -> list[Tensor]:
    """Convolutions, then recurrences."""
    return [t for states in (layer.conv_states, layer.recurrent_states) for t in states.values() if t is not None]


def _held(index: int, layer: Any, planes: tuple[StatePlane, ...]) -> list[_Held]:
    tensors = _tensors(layer)
    shapes = [list(t.shape[1:]) for t in tensors]
    if len(tensors) != len(planes) or not all(_is_of(p, t, layer.record_past) for p, t in zip(planes, tensors, strict=True)):
        known = ", ".join(map(str, planes)) or "none that KVX knows"
        raise Unsupported(
            f"export_cache(): layer {index} keeps states {shapes} of each sequence; by its config they are {known}. It was not "
            "read."
        )
    return [_Held(t, plane) for t, plane in zip(tensors, planes, strict=True)]


def _is_of(plane: StatePlane, t: Tensor, is_recorded: bool) -> bool:
    """Axes of one element may be there or not; a convolution that records its past has as many columns as tokens came."""
    sizes = [size for _, size in plane.axes]
    if plane.is_conv:
        return list(t.shape[1:-1]) == sizes[:-1] and (t.shape[-1] >= sizes[-1] or is_recorded)
    return [n for n in t.shape[1:] if n != 1] == [n for n in sizes if n != 1] and prod(t.shape[1:]) == prod(sizes)


def _row(held: _Held, sequence: int) -> Tensor:
    """[1, ...] of one sequence: of a convolution the newest columns, those that the next token reads."""
    row = held.tensor[sequence : sequence + 1]
    if held.plane.is_conv:
        taps = dict(held.plane.axes)["tap"]
        row = torch.nn.functional.pad(row[..., -taps:], (max(0, taps - row.shape[-1]), 0))
    return row.contiguous()


def _format(index: int, t: Tensor) -> str:
    if t.dtype not in FORMATS:
        raise BadArgument(f"export_cache(): a state of layer {index} is {t.dtype}; it must be {', '.join(map(str, FORMATS))}.")
    return FORMATS[t.dtype]
