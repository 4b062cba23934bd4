"""Buffers of a handover in memory: all blocks in one allocation, and moved as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvx.layout.buffers import allocate_buffers
from kvx.layout.device_memory import check_fits
from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.spec import Spec


def new_buffers(spec: Spec, device: str | torch.device = "cpu") -> tuple[Tensor, ...]:
    """As kvx.allocate_buffers, with all blocks in one allocation: one registration for a wire, one copy for a link."""
    check_fits("handover", spec.num_blocks, sum(count * size for count, size in buffer_sizes(spec)), device)
    sizes = [size for count, size in buffer_sizes(spec) for _ in range(count)][: num_cache_buffers(spec)]
    arena = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    scales = allocate_buffers(spec, device)[num_cache_buffers(spec) :] if has_scales(spec) else []
    return (*arena.split(sizes), *scales)


def has_scales(spec: Spec) -> bool:
    """Scales that stand apart from the rows."""
    return sum(count for count, _ in buffer_sizes(spec)) > num_cache_buffers(spec)


def moved(buffers: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """These buffers on a device; as they are where they lie there. Neighbours in one allocation go as one."""
    out: list[Tensor] = []
    run: list[Tensor] = []
    for t in (*buffers, None):
        if run and (t is None or not _follows(run[-1], t)):
            out += _moved_run(run, device)
            run = []
        if t is not None:
            run.append(t)
    return out


def _follows(a: Tensor, b: Tensor) -> bool:
    if a.dtype != torch.uint8 or b.dtype != torch.uint8 or not (a.is_contiguous() and b.is_contiguous()):
        return False
    same = a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    return same and a.storage_offset() + a.numel() == b.storage_offset()


def _moved_run(run: list[Tensor], device: torch.device) -> list[Tensor]:
    if run[0].device == device:
        return run
    if len(run) == 1:
        return [run[0].to(device)]
    sizes = [t.numel() for t in run]
    whole = run[0].as_strided((sum(sizes),), (1,), run[0].storage_offset()).to(device)
    return [piece.view(t.shape) for piece, t in zip(whole.split(sizes), run, strict=True)]
