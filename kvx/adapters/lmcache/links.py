"""Aliases for LMCache: who has the tokens says under which names a store has them. LMCache tells its storage hashes alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from kvx.adapters.lmcache.names import BLAKE3, CHUNK_SIZE, LMCACHE, chunk_namer, names_field
from kvx.adapters.sglang.names import SGLANG, page_names
from kvx.connector.alias_links import link_pages
from kvx.connector.store_names import Scheme
from kvx.errors import BadArgument
from kvx.handover import names as rule_names


def link(
    tokens: ArrayLike,
    folder: str | Path,  # of the store: what "disk:..." names
    *,
    model: str,
    chunk_size: int = CHUNK_SIZE,  # of the LMCache that is to find them
    names: str = names_field(BLAKE3),  # what its kind says; LMCache's server has BLAKE3
) -> int:
    """Lead LMCache's names of these tokens to blocks that the store has of them, whoever wrote them and in whatever size.

    How many chunks from the first on it can now find. Only blocks that are there are led to; write more, and link again.
    """
    namer = chunk_namer(names)
    if namer is None:
        raise BadArgument(
            f'link(): names is {names!r}; it is what the "names" of LMCache\'s manifest in the store says: lmcache:blake3.'
        )

    def names_of(scheme: Scheme) -> Sequence[bytes] | None:
        if scheme.names == SGLANG:
            return page_names(tokens, scheme.block_size)
        if scheme.names.split(":")[0] == LMCACHE:
            other = chunk_namer(scheme.names)
            return None if other is None else other(tokens, scheme.block_size)
        return None if scheme.names else rule_names(tokens, scheme.block_size, model)

    return link_pages(folder, Scheme(names, chunk_size), namer(tokens, chunk_size), model=model, names_of=names_of)
