"""Sequence: one request's tokens and how many of them are in the cache. PagedCache makes and changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from kvx.cache.paged import PagedCache


class Sequence:
    """A request's place in a PagedCache. Read it; change it by the cache's calls.

    tokens      t t t t t t t t t t t t     num_tokens: those whose ids are known
    in cache    c c c c w w w w             length: those with a place in blocks; num_cached: of them found when it was admitted
    blocks      [       |       ]
    """

    __slots__ = (
        "_cache",
        "_extras",
        "_first",
        "_hashes",
        "_limit",
        "_num_stored",
        "_root",
        "_row",
        "_tokens",
        "id",
        "length",
        "num_cached",
        "num_tokens",
    )

    def __init__(self, cache: PagedCache, number: int, row: int, tokens: NDArray[np.int32], num_groups: int) -> None:
        self.id = number  # never used again
        self.length = 0  # tokens that have a place in the cache
        self.num_cached = 0  # of them found in the prefix cache: the first to be computed is tokens[num_cached]
        self.num_tokens = 0  # tokens known
        self._cache: PagedCache | None = cache  # None: released
        self._row = row  # of the cache's tables
        self._tokens = tokens  # the cache's row of them, [max_seq_len]
        self._limit = 0  # up to this length the last block may be written to without asking anyone
        self._first = [0] * num_groups  # each group's first block that is still held
        self._root = b""  # the hash before the first block
        self._extras: list[tuple[int, bytes]] = []  # what begins at which token, and is not in its id
        self._hashes: list[bytes] = []  # of full blocks, as far as they were asked for
        self._num_stored = 0  # tokens whose blocks commit has dealt with; whole blocks

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The known ids, as a view that later calls change."""
        return self._tokens[: self.num_tokens]

    @property
    def is_released(self) -> bool:
        return self._cache is None

    def __repr__(self) -> str:
        if self._cache is None:
            return f"Sequence({self.id}, released)"
        return f"Sequence({self.id}, length={self.length}, num_tokens={self.num_tokens}, num_cached={self.num_cached})"
