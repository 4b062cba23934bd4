"""Aliases for SGLang: who has the tokens says under which names a store has them. SGLang tells its storage hashes alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from numpy.typing import ArrayLike

from kvx.adapters.sglang.names import SGLANG, page_names
from kvx.connector.alias_links import link_pages
from kvx.connector.store_names import Scheme
from kvx.handover import names as rule_names


def link(
    tokens: ArrayLike,
    folder: str | Path,  # of the store: what "disk:..." names
    *,
    model: str,
    page_size: int,  # of the SGLang that is to find them
    extra_key: str | None = None,
    cache_salt: str | None = None,
) -> int:
    """Lead SGLang's names of these tokens to blocks that the store has of them, whoever wrote them and in whatever size.

    How many pages from the first on it can now find. Only blocks that are there are led to; write more, and link again.
    """
    pages = page_names(tokens, page_size, extra_key=extra_key, cache_salt=cache_salt)

    def names_of(scheme: Scheme) -> Sequence[bytes] | None:
        if scheme.names == SGLANG:
            return page_names(tokens, scheme.block_size, extra_key=extra_key, cache_salt=cache_salt)
        if scheme.names or extra_key is not None or cache_salt is not None:
            return None  # KVX's names of a text under a key or a salt are those of its writer, who says them
        return rule_names(tokens, scheme.block_size, model)

    return link_pages(folder, Scheme(SGLANG, page_size), pages, model=model, names_of=names_of)
