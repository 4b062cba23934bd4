"""Layers with a sliding window: a block is given back when no later token sees any of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvx.cache.kinds.kind import Blocks, GroupKind
from kvx.errors import BadArgument


@dataclass(frozen=True)
class Sliding(GroupKind):
    window: int  # positions a token sees, its own the last of them

    gives_back = True

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise BadArgument(
                f"Sliding: window is {self.window!r}; it must be 1 or more. Full() is the kind of layers that see all."
            )

    def first_block(self, length: Blocks, block_size: int) -> Blocks:
        return first_seen(length, self.window) // block_size


def first_seen(length: Blocks, window: int) -> Blocks:
    """The first token that the one at position `length` sees."""
    first = length - window + 1
    return max(0, first) if isinstance(first, int) else np.maximum(0, first)
