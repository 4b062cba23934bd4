"""States: what a recurrent layer, a convolution or a ring of rows keeps of a sequence at one position, and nothing of others.

A sequence has one running block, which every step changes. A block that ends where a block of tokens does may be left behind as a
snapshot, under the name of those tokens: whoever is found there goes on from a copy of it. A snapshot is a block like any other: it
is evicted by its age, offered to tiers, and brought back.

Where `replay` is given, a sequence may also go on without a snapshot, by computing so many tokens again: a ring of rows is whole
after as many tokens as it has rows, through all layers. A recurrent state never is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvx.cache.kinds.kind import Blocks, GroupKind
from kvx.errors import BadArgument
from kvx.spec.cache_spec import Spec
from kvx.spec.state_spec import StateSpec


@dataclass(frozen=True)
class State(GroupKind):
    snapshot_every: int = 1  # blocks of tokens between snapshots; 0: none are kept
    replay: int = -1  # tokens that make it whole when they are computed again; -1: only all of them do
    is_replay_exact: bool = True  # False: nearly whole, and nobody else is given what is computed on it
    max_cut: int = 0  # tokens at a sequence's end that the state's owner can take back: drafts that it kept the way back from
    # Told a block that a sequence goes on in, and whether it has the content of another; None: a new one is filled with zeros.
    on_new: Callable[[int, bool], None] | None = None
    has_state = True

    def __post_init__(self) -> None:
        if not isinstance(self.snapshot_every, int) or self.snapshot_every < 0:
            raise BadArgument(f"State: snapshot_every is {self.snapshot_every!r}; it is a number of blocks, 0: no snapshots.")

    def num_blocks(self, length: int, block_size: int) -> int:
        return 1 if length else 0

    def first_needed(self, blocks: Blocks, block_size: int) -> Blocks:
        """The snapshot that stands there."""
        return blocks - (blocks > 0)

    def name_at(self, length: int, block_size: int) -> int:
        """Only a state that stands where a block ends is that block's."""
        every = self.snapshot_every * block_size
        return length // block_size if every and length % every == 0 else 0

    def num_columns(self, max_blocks: int) -> int:
        return 1

    def check(self, spec: Spec) -> str | None:
        if isinstance(spec, StateSpec):
            return None
        return f"kind is State, whose blocks hold one position each; the spec is a {type(spec).__name__}, and it is a StateSpec."
