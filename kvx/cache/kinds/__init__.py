"""Kinds of layer groups: what a group's blocks hold of a sequence. One file a kind, and one cache for all of them."""

from kvx.cache.kinds.chunked import Chunked
from kvx.cache.kinds.entries import Entries
from kvx.cache.kinds.full import Full
from kvx.cache.kinds.kind import Blocks, GroupKind
from kvx.cache.kinds.latent import Latent
from kvx.cache.kinds.sliding import Sliding
from kvx.cache.kinds.state import State

__all__ = ["Blocks", "Chunked", "Entries", "Full", "GroupKind", "Latent", "Sliding", "State", "kind_of"]


def kind_of(window: int = 0, is_latent: bool = False) -> GroupKind:
    """Of layers with K and V: those that see all tokens (0), or those of a window."""
    if is_latent:
        return Latent(window)
    return Sliding(window) if window else Full()
