"""States: what a recurrent layer, a convolution or a ring of rows keeps of a sequence at one position, and nothing of others.

A sequence has one running block, which every step changes. A block that ends where a block of tokens does may be left behind as a
snapshot, under the name of those tokens: whoever is found there goes on from a copy of it. A snapshot is a block like any other: it
is evicted in LRU order, offered to tiers, and loaded again.

A snapshot costs a copy and a block, so not every block of tokens has one. They stand every `snapshot_every` blocks; where the last
full block before a prompt's end ends, since that is where the same prompt is found again; and where the caller of admit() says.
A step must end there: PagedCache.until_snapshot() says how many tokens it may have.

Where `replay` is given, a sequence may also go on without a snapshot, by computing so many tokens again: a ring of rows is whole
after as many tokens as it has rows, through all layers. A recurrent state never is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvx.cache.kinds.kind import Blocks, GroupKind
from kvx.errors import BadArgument, a_type
from kvx.spec.cache_spec import Spec
from kvx.spec.state_spec import StateSpec


@dataclass(frozen=True)
class State(GroupKind):
    snapshot_every: int = 32  # blocks of tokens between snapshots; 0: only those that are asked for otherwise
    snapshot_at_end: bool = True  # of the tokens known at admit() or append(): at the last block's end that leaves one to compute
    replay: int = -1  # tokens that make it whole when they are computed again; -1: only all of them do
    is_replay_exact: bool = True  # False: nearly whole, and nobody else is given what is computed on it
    max_cut: int = 0  # tokens at a sequence's end that the state's owner can take back: drafts that it kept the way back from
    # Told a block that a sequence goes on in, and whether it has the content of another; None: a new one is filled with zeros.
    on_new: Callable[[int, bool], None] | None = None
    has_state = True

    def __post_init__(self) -> None:
        if type(self.snapshot_every) is not int or self.snapshot_every < 0:
            raise BadArgument(
                f"State: snapshot_every is {self.snapshot_every!r}; "
                "it must be a number of blocks from one snapshot to the next, or 0."
            )
        if type(self.snapshot_at_end) is not bool:
            raise BadArgument(f"State: snapshot_at_end is {self.snapshot_at_end!r}; it must be True or False.")
        for name, least in (("replay", -1), ("max_cut", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise BadArgument(f"State: {name} is {value!r}; it must be a number of tokens, {least} or more.")

    def num_blocks(self, length: int, block_size: int) -> int:
        return 1 if length else 0

    def first_needed(self, blocks: Blocks, block_size: int) -> Blocks:
        """The snapshot that stands there."""
        return blocks - (blocks > 0)

    def name_at(self, length: int, block_size: int) -> int:
        """Only a state that stands where a block ends is that block's."""
        return length // block_size if length % block_size == 0 else 0

    def is_due(self, blocks: int, asked: Sequence[int]) -> bool:
        """Whether a snapshot is to stand after so many blocks; `asked`: where it is besides every so many."""
        return bool(self.snapshot_every and blocks % self.snapshot_every == 0) or blocks in asked

    def next_due(self, blocks: int, asked: Sequence[int]) -> int:
        """The first number of blocks over this after which a snapshot is to stand; 0: none."""
        due = [n for n in asked if n > blocks]
        if self.snapshot_every:
            due.append((blocks // self.snapshot_every + 1) * self.snapshot_every)
        return min(due, default=0)

    def num_columns(self, max_blocks: int) -> int:
        return 1

    def check(self, spec: Spec) -> str | None:
        if isinstance(spec, StateSpec):
            return None
        return f"kind is State, whose blocks hold one position each; the spec is {a_type(spec)}, and it must be a StateSpec."
