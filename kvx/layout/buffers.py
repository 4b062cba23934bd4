"""All of a cache's buffers, every layer: what conversions take. `allocate` in storage.py makes one layer's for ops."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.layout.place import buffer_bytes
from kvx.spec.cache_spec import CacheSpec


def allocate_buffers(spec: CacheSpec, device: str | torch.device = "cpu", *, pin_memory: bool = False) -> list[Tensor]:
    """One flat uint8 tensor per allocation the layout has, zeroed, in the order of the axes left of the bar, last fastest."""
    return [torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin_memory) for size in buffer_bytes(spec)]
