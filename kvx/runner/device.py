"""A device as it is here: whether it exists, and whether a cache fits into its memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kvx.cache.groups import LayerGroup
from kvx.errors import BadArgument


def check_device(device: str) -> None:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise BadArgument(f'Engine.load(): device is "{device}"; it is cpu or cuda.')
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadArgument(f'Engine.load(): device is "{device}", and torch {torch.__version__} finds no GPU here. "cpu" runs.')


def check_fits(groups: Sequence[LayerGroup], device: str) -> None:
    """Before anything is allocated: a host gives memory it does not have, and ends the process when it is written."""
    if device.startswith("cuda"):
        there = torch.cuda.mem_get_info(device)[1]
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = sum(g.spec.num_blocks * g.spec.block_size * g.spec.token_bytes * len(g.layers) for g in groups)
    if need > there:
        blocks = groups[0].spec.num_blocks
        raise BadArgument(
            f"Engine.load(): {blocks} blocks take {need / 1e9:.1f} GB; {device} has {there / 1e9:.1f} GB. "
            f"{blocks * there // need // 2} blocks take half of that."
        )
