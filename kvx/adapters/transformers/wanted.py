"""Wanted: which sequence of a cache export_cache is asked for, and what refuses it."""

from __future__ import annotations

from typing import NamedTuple

from kvx.errors import BadArgument


class Wanted(NamedTuple):
    num_tokens: int
    sequence: int  # of the batch
    padding: int | None  # columns at its left that are no tokens; None: not said
    block_size: int  # of the handover

    def check_sequence(self, count: int) -> None:
        if not 0 <= self.sequence < count:
            raise BadArgument(f"export_cache(): sequence is {self.sequence}; the cache has {count}, 0 to {count - 1}.")

    def check_length(self, num_columns: int, padding: int) -> None:
        has = num_columns - padding
        if self.num_tokens > has:
            raise BadArgument(
                f"export_cache(): {self.num_tokens} tokens; the cache has {has}. The last that generate() returns is not in its "
                "cache yet: leave it out."
            )

    def check_window(self, window: int, first: int, layer: int) -> None:
        """Refuse tokens whose successor would see what a window has let go; the layer has those from `first` on."""
        needs = max(0, self.num_tokens + 1 - window) if window else 0
        if first > needs:
            raise BadArgument(
                f"export_cache(): after {self.num_tokens} tokens layer {layer} (window {window}) sees from token {needs}, and has "
                f"them from {first} on. Export all of the cache's tokens."
            )
