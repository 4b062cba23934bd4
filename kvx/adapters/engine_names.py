"""Names that engines give their blocks, by what a kind in a store says (docs/store.md). None of the engines is imported."""

from __future__ import annotations

from kvx.adapters.lmcache.names import LMCACHE, chunk_namer
from kvx.adapters.sglang.names import SGLANG, page_names
from kvx.connector.neighbours import Namer


def namer_of(names: str) -> Namer | None:
    """What makes these names of tokens; None where nobody can. The rule's, `""`, are `kvx.handover.names`."""
    if names == SGLANG:
        return page_names
    return chunk_namer(names) if names.split(":")[0] == LMCACHE else None


def said(names: str) -> str:
    """Whose names they are, for a person to read."""
    engine, _, algorithm = names.partition(":")
    owner = {"": "KVX's", SGLANG: "SGLang's", LMCACHE: "LMCache's"}.get(engine, f"{engine!r}'s")
    return f"{owner} ({algorithm})" if algorithm else owner
