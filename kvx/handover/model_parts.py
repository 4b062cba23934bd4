"""The parts of a model, from its config: what tells engines that have groups without layers' numbers which layers those are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvx.handover.in_tiers import part_fields
from kvx.spec.config_fields import ConfigFields
from kvx.spec.layer_specs import LayerSpecs, layer_specs
from kvx.spec.state_planes import StatePlane


class ModelPart(NamedTuple):
    """Layers that are kept together: those that see all tokens, those of one window, or states."""

    layers: tuple[int, ...]  # of the model
    window: int = 0
    is_chunked: bool = False
    num_kv_heads: int = 0  # of all ranks; 0: states
    head_dim: int = 0  # of a latent all of its row
    v_head_dim: int = 0  # 0: as K
    is_latent: bool = False
    planes: tuple[StatePlane, ...] = ()  # of states, all ranks' together
    num_shared: int = 0  # more layers of this kind, the model's last, that read others' K and V: some engines give them memory too

    def fields(self) -> dict[str, str | int]:
        """What a kind of its blocks says beside their spec, where the model has several parts."""
        return part_fields(self.layers, self.window) | ({"is_chunked": 1} if self.is_chunked else {})


def model_parts(model: str | Path | Mapping[str, Any]) -> tuple[ModelPart, ...]:
    """Of a config.json, its folder, its fields or a Transformers config. K and V come first, by window; then states."""
    config = ConfigFields.load(model)
    own = _by_kind(layer_specs(config.fields))
    every = own
    if config.get("num_kv_shared_layers"):
        every = _by_kind(layer_specs({**config.fields, "num_kv_shared_layers": 0}))
    return tuple(
        part._replace(layers=tuple(layers), num_shared=len(every.get(part, layers)) - len(layers))
        for part, layers in sorted(own.items(), key=lambda kind: (bool(kind[0].planes), kind[0].window, kind[1]))
    )


def _by_kind(layers: tuple[LayerSpecs, ...]) -> dict[ModelPart, list[int]]:
    """Layers of each part, which has none itself yet."""
    found: dict[ModelPart, list[int]] = {}
    for n, layer in enumerate(layers):
        kinds = []
        if layer.kv is not None:
            k, v = layer.kv.head_dim, layer.kv.v_head_dim
            dims = (k + (v or k), 0) if layer.is_latent else (k, v)
            kinds.append(ModelPart((), layer.window, layer.is_chunked, layer.kv.num_kv_heads, *dims, layer.is_latent))
        if layer.planes:
            kinds.append(ModelPart((), planes=layer.planes))
        for kind in kinds:
            found.setdefault(kind, []).append(n)
    return found
