"""GroupKind: the questions that a cache asks of every layer group, whatever its blocks hold.

    num_blocks        what is needed to grow: blocks of a sequence of this length, counted from its first
    first_block       what can be seen: blocks before it are given back
    first_needed      what a prefix hit needs: of its blocks, those from here on
    name_at           what happens at a block's end: whether a block that is full gets a name
    check             its planes: which specs it takes

A sequence's blocks stand in a row of the group's table, one column a block of tokens. A state has one column, whatever its length.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvx.errors import a_type
from kvx.spec.cache_spec import CacheSpec, Spec

Blocks = TypeVar("Blocks", int, NDArray[np.int64])  # a number of blocks or tokens, or many of them


class GroupKind:
    """As layers that see all tokens answer; the other kinds say where they differ."""

    window = 0  # positions a token sees, its own the last of them; 0: all
    is_latent = False  # MLA: K the latent, V the rotary part (docs/attention.md)
    gives_back = False  # blocks that no later token sees are given back
    # One block a sequence, which every step changes: whoever shares it goes on in a copy.
    has_state = False
    is_ahead = False  # a sequence may hold found blocks behind its length, which are not written again

    def num_blocks(self, length: int, block_size: int) -> int:
        """Blocks of a sequence of this length, those given back counted too."""
        return -(-length // block_size)

    def first_block(self, length: Blocks, block_size: int) -> Blocks:
        """The first block that the token at position `length`, or any after it, sees."""
        return length * 0

    def first_needed(self, blocks: Blocks, block_size: int) -> Blocks:
        """Of the first `blocks` blocks, those that a sequence needs to go on after them begin here."""
        return self.first_block(blocks * block_size, block_size)

    def name_at(self, length: int, block_size: int) -> int:
        """Full blocks of a sequence that may be found by their names, as its first `length` tokens are in the cache."""
        return length // block_size

    def num_columns(self, max_blocks: int) -> int:
        """Of the group's table."""
        return max_blocks

    def check(self, spec: Spec) -> str | None:
        """What is wrong with such a spec, as a sentence."""
        if isinstance(spec, CacheSpec):
            return None
        return f"kind is {self}, whose blocks hold K and V of tokens; the spec is {a_type(spec)}. State() takes those."
