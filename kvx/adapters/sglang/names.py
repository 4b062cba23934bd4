"""SGLang's keys of pages: a chain of SHA-256 over tokens, as its storage backends are given them. Read in 0.5.23."""

from __future__ import annotations

import hashlib

from numpy.typing import ArrayLike

from kvx.cache.names import naming
from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument

SGLANG = "sglang"  # in a kind's manifest: the names of its blocks are these


def page_names(tokens: ArrayLike, page_size: int, *, extra_key: str | None = None, cache_salt: str | None = None) -> list[bytes]:
    """Of every full page of these tokens. `extra_key` (a LoRA, say) and `cache_salt` are the request's, where it has any."""
    if type(page_size) is not int or page_size < 1:
        raise BadArgument(f"page_names(): page_size is {page_size!r}; a page has a token or more.")
    by = naming("sha256")
    data = token_ids("page_names()", tokens).astype("<i4").tobytes()
    seed = _seed(extra_key, cache_salt)
    if seed:
        return by.chain(data, seed, page_size)
    step = 4 * page_size  # the first page follows nothing, not a name of zeros
    if len(data) < step:
        return []
    first = hashlib.sha256(data[:step]).digest()
    return [first, *by.chain(data[step:], first, page_size)]


def _seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    if extra_key is None and cache_salt is None:
        return b""
    state = hashlib.sha256(b"sglang-cache-namespace-v1")
    for part in (extra_key, cache_salt):
        if part is None:
            state.update(b"\0")
        else:
            state.update(b"\1" + len(part.encode()).to_bytes(8, "little") + part.encode())
    return state.digest()


def name_of(key: str) -> bytes:
    """A key that SGLang hands to its storage, as the name of a block: the 32 bytes that it spells."""
    try:
        name = bytes.fromhex(key)
    except ValueError:
        name = b""
    return name if len(name) == 32 and len(key) == 64 else hashlib.sha256(b"sglang-key\0" + key.encode()).digest()
