"""Which names LMCache makes in this process, in its engine mode: seen by asking it for one."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import Any

from lmcache.v1 import token_database

from kvx.adapters.lmcache.names import chunk_namer, name_of, names_field, none_hash
from kvx.errors import BadArgument

LOGGER = logging.getLogger("kvx")
_CRYPTO = ("sha256", "sha256_cbor", "sha256_cbor_64bit")


def names_made_here(config: Any, metadata: Any) -> str:
    """What the kind says of LMCache's hashes. BadArgument where they are random in every process."""
    algorithm = config.pre_caching_hash_algorithm
    if config.enable_blending:  # names of segments, wherever they stand in a text
        return names_field("segments")
    is_drawn = find_spec("vllm") is not None and os.environ.get("PYTHONHASHSEED", "random") == "random"
    if is_drawn and algorithm not in _CRYPTO:
        raise _random(algorithm)
    theirs = token_database.ChunkedTokenDatabase(config, metadata)
    root, tokens = token_database.NONE_HASH, list(range(config.chunk_size))
    if is_drawn and root != none_hash("sha256" if algorithm == "sha256" else "sha256_cbor"):
        raise _random(algorithm)  # of an older vLLM, which draws the root for every hash
    ((_, _, first),) = theirs.process_tokens(tokens, make_key=False)
    for known in ("builtin", "sha256_cbor", "sha256"):
        namer = chunk_namer(names := names_field(known, root))
        if namer is not None and namer(tokens, len(tokens)) == [name_of(first)]:
            return names
    LOGGER.warning(
        "KVX keeps LMCache's chunks under hashes by %r, which other engines cannot make. sha256_cbor is one that they can.",
        algorithm,
    )
    return names_field(algorithm, root)


def _random(algorithm: str) -> BadArgument:
    return BadArgument(
        f"LMCache's names of chunks are random in every process: pre_caching_hash_algorithm is {algorithm!r} and PYTHONHASHSEED is "
        'not set. No process would find what another wrote. Set pre_caching_hash_algorithm="sha256_cbor", or PYTHONHASHSEED=0 for '
        "every process that LMCache is in."
    )
