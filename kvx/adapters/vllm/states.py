"""vLLM's groups of states, read: which planes a page holds comes from the model's config, and must have the shapes that vLLM says.

Plain facts in: vLLM is not imported here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvx.adapters.vllm.layout import TensorFacts
from kvx.connector.groups import Group, PartGroups, Segment
from kvx.errors import KvxError, Unsupported
from kvx.layout.state_rows import state_row
from kvx.spec import PlaneSpec, StateSpec
from kvx.spec.layer_specs import layer_specs
from kvx.spec.state_planes import StatePlane

Shapes = Sequence[tuple[tuple[int, ...], str]]  # of a rank's planes in a page's order, with their formats
# Orders of a convolution's axes: VLLM_SSM_CONV_STATE_LAYOUT
ORDERS = ("vllm.sd", "vllm.ds")


def state_planes(config: Any) -> dict[int, tuple[StatePlane, ...]]:
    """By layer of the model, of a Transformers config. Unsupported where it says too little."""
    try:
        return {n: layer.planes for n, layer in enumerate(layer_specs(config)) if layer.planes}
    except KvxError as error:
        raise Unsupported(
            f"KvxConnector: this model has states, and its config does not say what they hold: {error} "
            "Run it without the connector."
        ) from None


def read_planes(
    name: str, layers: Sequence[int], shapes: Shapes, planes: Mapping[int, tuple[StatePlane, ...]], num_ranks: int
) -> tuple[PlaneSpec, ...]:
    """All ranks' planes of these layers. Unsupported where a rank's have not vLLM's shapes."""
    found = {_specs(planes.get(n, ()), shapes) for n in layers}
    for whole in found:
        orders = [
            order
            for order in ORDERS
            if whole and state_row(order).shapes(_shard(name, whole, num_ranks).planes) == [s for s, _ in shapes]
        ]
        if len(found) == 1 and orders:
            return whole
    said = "; ".join(" and ".join(map(str, planes.get(n, ()))) or f"layer {n} none" for n in layers[:2])
    raise Unsupported(
        f"KvxConnector: the state of {name} has shapes {[list(s) for s, _ in shapes]} in vLLM, on one of {num_ranks} ranks; by the "
        f"model's config it has {said}. It was not read."
    )


def _specs(planes: Sequence[StatePlane], shapes: Shapes) -> tuple[PlaneSpec, ...]:
    """With the types that vLLM keeps them in."""
    if len(planes) != len(shapes):
        return ()
    return tuple(p.spec(format, format) for p, (_, format) in zip(sorted(planes, key=lambda p: p.name), shapes, strict=True))


def _shard(name: str, planes: tuple[PlaneSpec, ...], num_ranks: int) -> StateSpec:
    try:
        return StateSpec(1, planes).shard(num_ranks, 0)
    except KvxError as error:
        raise Unsupported(f"KvxConnector: the state of {name}: {error} It was not read.") from None


def read_states(
    group: Group,
    tensors: Sequence[TensorFacts],
    part: PartGroups,
    spec: StateSpec,  # of this rank's part in the tiers
    *,
    num_blocks: int,
    order: str,
) -> list[Segment]:
    """A segment a layer: its pages, which have other groups' blocks between them."""
    content = StateSpec(1, spec.planes).block_content_bytes
    segments = []
    for n, (name, layer, t) in enumerate(zip(group.layer_names, group.layers, tensors, strict=True)):
        page = t.strides[0] * t.element_bytes
        if t.element_bytes != 1 or t.shape != (num_blocks, 1, 1, content) or page < content or t.strides[-1] != 1:
            raise Unsupported(
                f"KvxConnector: the states of {name} are {list(t.shape)} with strides {list(t.strides)}, elements of "
                f"{t.element_bytes} bytes; it reads pages [{num_blocks}, 1, 1, {content}] of single bytes, as vLLM 0.32 has them."
            )
        here = state_row(order).spec(spec.planes, num_blocks=num_blocks, block_bytes=0 if page == content else page)
        here = here.replaced(layer_start=part.layers.index(layer))
        segments.append(Segment(group, (layer,), here, n, False))
    return segments
