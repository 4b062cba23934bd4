"""A device as it is here: whether it exists, and whether a cache fits into its memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvx.cache.groups import LayerGroup
from kvx.errors import BadArgument
from kvx.layout import device_memory


def check_device(device: str) -> None:
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise BadArgument(f'Engine.load(): device is "{device}"; it must be cpu or cuda.')
    device_memory.check_device("Engine.load()", device)


def check_fits(groups: Sequence[LayerGroup], device: str) -> None:
    """Before anything is allocated."""
    device_memory.check_fits("Engine.load()", groups[0].spec.num_blocks, sum(g.num_bytes for g in groups), device)
