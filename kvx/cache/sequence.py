"""Sequence: one request's tokens and how many of them are in the cache. PagedCache makes and changes it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Sequence:
    """A request's place in a PagedCache. Read it; change it by the cache's calls.

    tokens      t t t t t t t t t t t t     num_tokens: those whose ids are known
    in cache    c c c c w w w w             length: those with a place in blocks; num_cached: of them found when it was admitted
    blocks      [       |       ]
    """

    __slots__ = (
        "cache",
        "extra",
        "extras",
        "hashes",
        "id",
        "is_exact",
        "length",
        "limit",
        "num_ahead",
        "num_cached",
        "num_stored",
        "num_tokens",
        "root",
        "row",
        "snapshot_at",
        "snapshot_end",
        "starts",
        "token_row",
        "whole_from",
    )

    def __init__(self, cache: object, number: int, row: int, token_row: NDArray[np.int32], num_groups: int) -> None:
        self.id = number  # never used again
        self.length = 0  # tokens that have a place in the cache
        self.num_cached = 0  # of them found in the prefix cache: the first to be computed is tokens[num_cached]
        self.num_tokens = 0  # tokens known
        # What its cache goes by.
        self.cache: object | None = cache  # None: released
        self.row = row  # of the cache's tables
        self.token_row = token_row  # the cache's row of ids, [max_seq_len]
        self.limit = 0  # up to this length the last block may be written to without asking anyone
        self.starts = [0] * num_groups  # each group's first block that is still held
        self.root = b""  # the hash before the first block
        self.extra = b""  # what all of it hangs on besides its tokens
        self.extras: list[tuple[int, bytes]] = []  # what begins at which token, and is not in its id
        self.hashes: list[bytes] = []  # of full blocks, as far as they were asked for
        self.num_stored = 0  # tokens whose blocks commit has dealt with; whole blocks
        self.num_ahead = 0  # blocks that groups with is_ahead hold: tokens before their end are computed again, and not written
        self.snapshot_at: tuple[int, ...] = ()  # blocks after which its states are to be kept: where the caller asked
        self.snapshot_end = 0  # and where the newest known tokens end, but for one; 0: nowhere
        self.whole_from = 0  # tokens after which a state that is computed again is whole: between its beginning and there it is not
        self.is_exact = True  # False: computed on a state that was replayed in part, and given to nobody else

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The known ids, as a view that later calls change."""
        return self.token_row[: self.num_tokens]

    @property
    def snapshots(self) -> tuple[int, ...]:
        """Blocks after which its states are to be kept, besides every so many."""
        return (*self.snapshot_at, self.snapshot_end) if self.snapshot_end else self.snapshot_at

    @property
    def is_released(self) -> bool:
        return self.cache is None

    def __repr__(self) -> str:
        if self.cache is None:
            return f"Sequence({self.id}, released)"
        return f"Sequence({self.id}, length={self.length}, num_tokens={self.num_tokens}, num_cached={self.num_cached})"
