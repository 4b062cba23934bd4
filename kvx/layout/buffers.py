"""All of a cache's buffers, every layer: what conversions take. `allocate` in storage.py makes one layer's for ops."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.spec.cache_spec import CacheSpec


def allocate_buffers(spec: CacheSpec, device: str | torch.device = "cpu", *, pin_memory: bool = False) -> list[Tensor]:
    """Every buffer of the cache: one flat uint8 tensor per allocation the layout has, zeroed, in the order of the axes left of
    the bar, last fastest; then K's and V's scales where they stand apart, [num_layers, ...], at 1; then their tensor scales."""
    caches = [
        torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        for count, size in buffer_sizes(spec)
        for _ in range(count)
    ][: num_cache_buffers(spec)]
    scales = []
    for i in range(spec.num_planes):
        shape, scale = spec.scale_shape(i), spec.plane(i).format.scale
        if shape is None or scale is None:
            continue
        one, dtype = (
            (1, getattr(torch, scale.torch_name)) if scale.bits > 8 else (0x38 if scale.name == "fp8_e4m3" else 127, torch.uint8)
        )
        scales.append(torch.full((spec.num_layers, *shape), one, dtype=dtype, device=device, pin_memory=pin_memory))
    count = sum(plane.format.has_tensor_scale for plane in spec.planes[: spec.num_planes])
    scales += [torch.ones(spec.num_layers, dtype=torch.float32, device=device, pin_memory=pin_memory) for _ in range(count)]
    return [*caches, *scales]
