"""All of a cache's buffers, every layer: what conversions take. `allocate` in kvx/ops/storage.py makes one layer's."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.layout.device_memory import check_fits
from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.spec.cache_spec import Spec


def allocate_buffers(spec: Spec, device: str | torch.device = "cpu", *, pin_memory: bool = False) -> list[Tensor]:
    """Every buffer of the cache: one flat uint8 tensor per allocation the layout has, zeroed, in the order of the axes left of
    the bar, last fastest; then the planes' scales where they stand apart, [num_layers, ...], at 1; then their tensor scales.
    BadArgument where they take more than the device has."""
    sizes = [(count, _whole_blocks(spec, size)) for count, size in buffer_sizes(spec)]
    check_fits("allocate_buffers()", spec.num_blocks, sum(count * size for count, size in sizes), device)
    each = [size for count, size in sizes for _ in range(count)][: num_cache_buffers(spec)]
    caches = [torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pin_memory) for size in each]
    scales = []
    for i in range(spec.num_planes):
        shape, scale = spec.scale_shape(i), spec.plane(i).format.scale
        if shape is None or scale is None:
            continue
        one, dtype = (
            (1, getattr(torch, scale.torch_name)) if scale.bits > 8 else (0x38 if scale.name == "fp8_e4m3" else 127, torch.uint8)
        )
        scales.append(torch.full((spec.num_layers, *shape), one, dtype=dtype, device=device, pin_memory=pin_memory))
        if not spec.plane(i).format.granularity.is_stored_per_token:
            mark_unset(scales[-1])
    count = sum(plane.format.has_tensor_scale for plane in spec.planes)
    scales += [torch.ones(spec.num_layers, dtype=torch.float32, device=device, pin_memory=pin_memory) for _ in range(count)]
    return [*caches, *scales]


def mark_unset(scale: Tensor) -> None:
    """Remember that this is how the scale was made: torch counts its changes."""
    if not scale.is_inference():
        scale.kvx_unset_version = scale._version  # type: ignore[attr-defined]


def mark_set(scale: Tensor) -> None:
    """Of one that the library fills: torch does not see that."""
    if hasattr(scale, "kvx_unset_version"):
        del scale.kvx_unset_version


def is_unset(scale: Tensor) -> bool:
    version = getattr(scale, "kvx_unset_version", None)
    return version is not None and version == scale._version


def _whole_blocks(spec: Spec, size: int) -> int:
    """With the padding of the last block, which `buffer_sizes` leaves out and an engine's allocation has."""
    return -(-size // spec.block_bytes) * spec.block_bytes if spec.block_bytes else size


def memory_bytes(t: Tensor) -> int:
    """From a tensor's first byte to the end of its last element."""
    if t.is_contiguous():  # nearly all are, and there may be thousands
        return t.numel() * t.element_size()
    return (1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))) * t.element_size()


def bytes_of(t: Tensor) -> Tensor:
    """A tensor's memory as it lies, flat."""
    return t.as_strided((memory_bytes(t) // t.element_size(),), (1,)).view(torch.uint8)
