"""Compressed entries (DeepSeek-V4): a block holds the entries of its tokens, each made of several, in every layer.

An entry is written when the last of its tokens comes, so a block is needed only then. Entries follow from their tokens alone, and
a sequence that was found further than its states are may hold them ahead of its length: it computes those tokens again, and does
not write what is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvx.cache.kinds.kind import GroupKind
from kvx.errors import a_type
from kvx.spec.cache_spec import Spec
from kvx.spec.state_spec import StateSpec


@dataclass(frozen=True)
class Entries(GroupKind):
    ratios: tuple[int, ...]  # tokens an entry stands for, of each kind of layer
    is_ahead = True

    def num_blocks(self, length: int, block_size: int) -> int:
        return -(-max(length // ratio * ratio for ratio in self.ratios) // block_size)

    def check(self, spec: Spec) -> str | None:
        if isinstance(spec, StateSpec):
            return None
        return f"kind is Entries, whose blocks hold pages of rows; the spec is {a_type(spec)}, and it must be a StateSpec."
