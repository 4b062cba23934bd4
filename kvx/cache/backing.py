"""Backing: where blocks go that leave a cache, and come from when a prefix is asked for again. kvx/tiers implements it.

The cache offers what it is about to overwrite, and asks for what follows its own prefix. A finder is told the tokens first: with
them it can get blocks into the backing that are elsewhere under other names.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvx.cache.blocks import BlockIds
from kvx.cache.names import BlockHash


class Backing(Protocol):
    def offer(self, group: int, hashes: Listing[BlockHash], blocks: BlockIds) -> None:
        """These blocks are about to be overwritten: read them, in the order of the stream, before returning. Never raises."""

    def find(self, group: int, hashes: Listing[BlockHash]) -> Listing[bool]:
        """Which of these it has."""

    def load(self, group: int, hashes: Listing[BlockHash], blocks: BlockIds) -> int:
        """Fill these blocks, in the order of the stream: how many of the first are right now. A damaged one ends it."""


class Finder(Protocol):
    def look(self, tokens: NDArray[np.int32], hashes: Listing[BlockHash], first: int) -> None:
        """Full blocks of a sequence are about to be looked for in the backing, from block `first` on. Never raises.

        All are named, since names of other engines hang on every token before. Called where the names follow from the tokens alone:
        a sequence with an `extra` is not told.
        """
