"""Layers that see their own chunk of tokens (Llama 4): when a chunk ends, its blocks are given back at once."""

from __future__ import annotations

from dataclasses import dataclass

from kvx.cache.kinds.kind import Blocks, GroupKind
from kvx.errors import BadArgument


@dataclass(frozen=True)
class Chunked(GroupKind):
    chunk: int  # token t sees tokens from t // chunk * chunk on

    gives_back = True

    def __post_init__(self) -> None:
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise BadArgument(f"Chunked: chunk is {self.chunk!r}; it must be 1 token or more.")

    def first_block(self, length: Blocks, block_size: int) -> Blocks:
        return length // self.chunk * self.chunk // block_size
