"""Tensors for a spec: what `write` and `gather` take, allocated once."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvx.layout.device_memory import check_fits
from kvx.layout.planes import cache_shapes
from kvx.spec.cache_spec import CacheSpec


@dataclass(frozen=True, eq=False)
class Storage:
    """One layer's cache tensors and, where the format has them apart, its scales."""

    cache: Tensor | tuple[Tensor, Tensor]
    k_scale: Tensor | None
    v_scale: Tensor | None

    def scales(self) -> dict[str, Any]:
        """The keyword arguments of `write` and `gather`."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}


def allocate(spec: CacheSpec, device: str | torch.device = "cpu") -> Storage:
    """Zeroed cache tensors and scales of one. BadArgument where they take more than the device has."""
    check_fits("allocate()", spec.num_blocks, spec.cache_bytes // spec.num_layers, device)
    tensors = []
    shared = len(cache_shapes(spec)) == 1 and spec.plane(0).format.element != spec.kv[1].format.element
    for shape, plane in zip(cache_shapes(spec), spec.kv, strict=False):
        whole = not shared and not plane.format.is_inline and plane.format.element.bits >= 8
        whole = whole and not (len(cache_shapes(spec)) == 1 and spec.kv[1].format.is_inline)
        dtype = getattr(torch, plane.format.element.torch_name) if whole else torch.uint8
        tensors.append(_zeros(spec, shape, dtype, device))
    cache = tensors[0] if len(tensors) == 1 else (tensors[0], tensors[1])
    return Storage(cache, *(_scale(spec, i, device) for i in (0, 1)))


def _zeros(spec: CacheSpec, shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    if not spec.block_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Blocks of one layer are padded as the whole cache's: block is the first dimension then.
    blocks = torch.zeros(shape[0], spec.block_bytes // dtype.itemsize, dtype=dtype, device=device)
    return blocks[:, : prod(shape[1:])].view(shape)


def _scale(spec: CacheSpec, index: int, device: str | torch.device) -> Tensor | None:
    shape, scale = spec.scale_shape(index), spec.plane(index).format.scale
    if shape is None or scale is None:
        return None
    if scale.bits == 8:  # e4m3 and e8m0 both spell 1.0 in one byte
        return torch.full(shape, 0x38 if scale.name == "fp8_e4m3" else 127, dtype=torch.uint8, device=device)
    ones = torch.ones(shape, dtype=getattr(torch, scale.torch_name), device=device)
    if not spec.plane(index).format.granularity.is_stored_per_token and not ones.is_inference():
        ones.kvx_unset_version = ones._version  # type: ignore[attr-defined]
    return ones


def is_scale_unset(scale: Tensor) -> bool:
    """Whether a scale is as `allocate` made it: torch has counted no change of it since."""
    version = getattr(scale, "kvx_unset_version", None)
    return version is not None and version == scale._version
