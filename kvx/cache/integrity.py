"""What must hold in a PagedCache, recomputed from its sequences: to check it, and to have it again after an interrupt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvx.errors import InternalError

if TYPE_CHECKING:
    from kvx.cache.paged import PagedCache


def check_cache(cache: PagedCache) -> None:
    """Every reference is a sequence's or a pin's, every table entry a block that is used, every name the hash of its tokens."""
    bs, seqs = cache.block_size, cache.sequences
    rows = sorted([*cache._rows, *(s._row for s in seqs)])
    if rows != list(range(cache.max_seqs)):
        raise InternalError(f"PagedCache.check(): rows are {rows}; each of {cache.max_seqs} is free or one sequence's.")
    for i, g in enumerate(cache._groups):
        for seq in seqs:
            row, first, have = g.table[seq._row], seq._first[i], -(-seq.length // bs)
            held = row[first:have]
            if (held < 0).any() or (row[:first] != -1).any() or first > have:
                raise InternalError(f"PagedCache.check(): group {i}, {seq}: blocks are {row[:have]}, held from {first} on.")
            if first > g.first_block(seq.length):
                raise InternalError(f"PagedCache.check(): group {i}, {seq}: its window sees blocks before {first}.")
        refs = count_refs(cache, i)
        wrong = np.flatnonzero(refs != g.allocator.counts())
        if len(wrong):
            b = int(wrong[0])
            raise InternalError(f"PagedCache.check(): group {i}, block {b}: {refs[b]} owners, {g.allocator.refs(b)} references.")
        g.allocator._check()
    for seq in seqs:
        if not 0 <= seq.length <= seq.num_tokens <= cache.max_seq_len:
            raise InternalError(f"PagedCache.check(): {seq}: length, num_tokens and max_seq_len are not in order.")
        if not seq.length <= seq._limit <= -(-seq.length // bs) * bs:
            raise InternalError(f"PagedCache.check(): {seq}: may write up to {seq._limit}.")
        if seq._limit > seq.length:
            for g in cache._groups:
                if g.allocator.is_shared(int(g.table[seq._row, (seq._limit - 1) // bs])):
                    raise InternalError(f"PagedCache.check(): {seq}: would write into a block that others read.")
        if cache.prefix is not None:
            want = cache.prefix.chain(seq.tokens[: len(seq._hashes) * bs].tobytes(), seq._root, seq._extras)
            if want != seq._hashes or seq._num_stored > min(len(seq._hashes) * bs, seq.length):
                raise InternalError(f"PagedCache.check(): {seq}: its hashes are not those of its tokens.")
    if cache.prefix is not None:
        cache.prefix._check()


def count_refs(cache: PagedCache, group: int) -> NDArray[np.int64]:
    """Of every block: the sequences that hold it, and its pins."""
    g, bs = cache._groups[group], cache.block_size
    refs = np.zeros(g.allocator.num_blocks, np.int64)
    for seq in cache.sequences:
        np.add.at(refs, g.table[seq._row, seq._first[group] : -(-seq.length // bs)], 1)
    for block, pins in g.allocator.pins().items():
        refs[block] += pins
    return refs


def mend_sequences(cache: PagedCache) -> None:
    """After an interrupt: what follows from which sequences live, and from their lengths."""
    for seq in [s for s in cache._live.values() if s._cache is not cache]:
        del cache._live[seq.id]
    taken = {s._row for s in cache.sequences}
    cache._rows[:] = [row for row in range(cache.max_seqs - 1, -1, -1) if row not in taken]
    for seq in cache.sequences:
        seq._limit = seq.length  # extend asks whose the last block is
        for g, first in zip(cache._groups, seq._first, strict=True):
            g.table[seq._row, :first] = -1
