"""A sequence whose K and V came from elsewhere: which of its blocks may be found by others."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import TYPE_CHECKING

from kvx.errors import BadArgument

if TYPE_CHECKING:
    from kvx.cache.paged import PagedCache
    from kvx.cache.sequence import Sequence


def adopt(cache: PagedCache, seq: Sequence, first_tokens: Listing[int]) -> None:
    """PagedCache.commit for blocks that someone else wrote, in group i from token first_tokens[i] on.

    A block that a window's edge runs through is good for this sequence, which sees its end alone, and gets no name: another
    might see its beginning.
    """
    if seq._cache is not cache or len(first_tokens) != len(cache.groups):
        raise BadArgument(f"adopt(): {seq} of another cache, or {len(first_tokens)} first tokens for {len(cache.groups)} groups.")
    with cache._guard.lock:
        _adopt(cache, seq, first_tokens)


def _adopt(cache: PagedCache, seq: Sequence, first_tokens: Listing[int]) -> None:
    size, prefix = cache.block_size, cache.prefix
    done, full = seq._num_stored // size, seq.length // size
    if prefix is not None and full > done:
        hashes = seq._hashes
        if len(hashes) < full:
            parent = hashes[-1] if hashes else seq._root
            start = len(hashes) * size
            hashes += prefix.chain(seq._tokens[start : full * size].tobytes(), parent, seq._extras, start)
        for i, first_token in enumerate(first_tokens):
            first = max(done, -(-first_token // size))
            if first < full:
                prefix.put(i, hashes[first:full], cache.blocks(seq, i)[first:full])
    seq._num_stored = full * size
