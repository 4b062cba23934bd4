"""Whether a device is there and how much memory it has, asked before a cache is allocated.

A host gives memory that it does not have, and ends the process when it is written: so what cannot fit is refused in words.
"""

from __future__ import annotations

import os
from functools import cache

import torch

from kvx.errors import BadArgument, Unsupported


def check_fits(call: str, num_blocks: int, need_bytes: int, device: str | torch.device | None) -> None:
    """Unsupported where torch has no such device; BadArgument where blocks take more than all of its memory.

    What others have of that memory is not counted."""
    check_device(call, device)
    there = device_bytes(device)
    if there is not None and need_bytes > there:
        fewer = num_blocks * there // need_bytes // 2
        raise BadArgument(
            f"{call}: {num_blocks} blocks take {need_bytes / 1e9:.1f} GB; {device} has {there / 1e9:.1f} GB. "
            + (f"{fewer} blocks take half of that." if fewer else "Make the blocks smaller.")
        )


def check_device(call: str, device: str | torch.device | None) -> None:
    """Raise unless torch can allocate there. torch's own error names neither the call nor what to do."""
    try:
        where = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise BadArgument(f'{call}: device is {str(device)[:100]!r}; it takes "cpu", "cuda" or "cuda:0".') from None
    if where.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if where.index is not None and 0 < count <= where.index:
            raise Unsupported(f'{call}: device is "{where}", and torch sees {count} CUDA devices, cuda:0 to cuda:{count - 1}.')
        if count:
            return
        if torch.version.cuda is None and torch.version.hip is None:
            fix = f"torch {torch.__version__} is built without CUDA: install a build with it (pytorch.org)"
        else:
            fix = "Check the driver with `nvidia-smi`, and CUDA_VISIBLE_DEVICES"
        raise Unsupported(f'{call}: device is "{where}", and torch sees no CUDA device. {fix}, or use device="cpu".')
    if where.type not in ("cpu", "meta"):
        try:
            torch.empty(0, device=where)
        except (AssertionError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
            why = (str(error).splitlines() or [""])[0][:100]
            raise Unsupported(f'{call}: device is "{where}", which torch cannot use here ({why}). Use "cpu" or "cuda".') from None


def device_bytes(device: str | torch.device | None) -> int | None:
    """All of its memory. None of a device that is neither cpu nor cuda: what it cannot hold, it refuses by itself."""
    where = torch.get_default_device() if device is None else torch.device(device)  # None: as torch takes it
    if where.type == "cuda":
        return int(torch.cuda.get_device_properties(where).total_memory)
    return host_bytes() if where.type == "cpu" else None


@cache
def host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
