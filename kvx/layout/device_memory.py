"""How much memory a device has, asked before a cache is allocated.

A host gives memory that it does not have, and ends the process when it is written: so what cannot fit is refused in words.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from kvx.errors import BadArgument


def check_fits(call: str, num_blocks: int, need_bytes: int, device: str | torch.device | None) -> None:
    """BadArgument where blocks take more than all of a device's memory. What others have of it is not counted."""
    there = device_bytes(device)
    if there is not None and need_bytes > there:
        fewer = num_blocks * there // need_bytes // 2
        raise BadArgument(
            f"{call}: {num_blocks} blocks take {need_bytes / 1e9:.1f} GB; {device} has {there / 1e9:.1f} GB. "
            + (f"{fewer} blocks take half of that." if fewer else "Make the blocks smaller.")
        )


def device_bytes(device: str | torch.device | None) -> int | None:
    """All of its memory. None of a device that is neither cpu nor cuda: what it cannot hold, it refuses by itself."""
    where = torch.get_default_device() if device is None else torch.device(device)  # None: as torch takes it
    if where.type == "cuda":
        return int(torch.cuda.get_device_properties(where).total_memory)
    return host_bytes() if where.type == "cpu" else None


@cache
def host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
