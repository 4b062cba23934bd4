"""LMCache's keys of chunks: a chain of hashes over tokens, as it hands them to its storage. Read in 0.5.6.

Its engine mode folds hashes to 64 bits and starts from a root that depends on the process; its server mode has BLAKE3. A kind says
which, `lmcache:ALGORITHM` or `lmcache:ALGORITHM:ROOT`, so that who has the tokens can make the same names.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from numpy.typing import ArrayLike

from kvx.cache.tokens import token_ids
from kvx.connector.neighbours import Namer
from kvx.errors import BadArgument, Unsupported

LMCACHE = "lmcache"  # in a kind's manifest, before what its names are made with
BLAKE3 = "blake3"
CHUNK_SIZE = 256  # LMCache's default
VLLM_SEED = "vllm-none-hash"  # of vLLM's hash before the first token, where PYTHONHASHSEED is not set
_BITS = 64
_LOGGER = logging.getLogger("kvx")
_Hash = Callable[[int, tuple[int, ...]], int]


def chunk_names(
    tokens: ArrayLike,
    chunk_size: int = CHUNK_SIZE,
    *,
    algorithm: str = BLAKE3,  # the server's --hash-algorithm, or the engine mode's pre_caching_hash_algorithm
    root: int | None = None,  # of the engine mode: LMCache's NONE_HASH; by default what PYTHONHASHSEED makes of it
    python_hash_seed: str | None = None,  # of the process that LMCache is in; by default this one's
) -> list[bytes]:
    """Of every full chunk of these tokens."""
    if type(chunk_size) is not int or chunk_size < 1:
        raise BadArgument(f"chunk_names(): chunk_size is {chunk_size!r}; a chunk has a token or more, {CHUNK_SIZE} by default.")
    ids = token_ids("chunk_names()", tokens).tolist()
    chunks = [tuple(ids[n : n + chunk_size]) for n in range(0, len(ids) - chunk_size + 1, chunk_size)]
    if algorithm == BLAKE3:
        return _blake3_chain(chunks)
    if algorithm not in _HASHES:
        raise BadArgument(f"chunk_names(): algorithm is {algorithm!r}; there are {', '.join((BLAKE3, *_HASHES))}.")
    hash_, found = _HASHES[algorithm], []
    prefix = none_hash(algorithm, python_hash_seed) if root is None else root
    for chunk in chunks:
        prefix = hash_(prefix, chunk)
        found.append(name_of(prefix))
    return found


def none_hash(algorithm: str, python_hash_seed: str | None = None) -> int:
    """What the engine mode's chain starts from where vLLM is installed."""
    if algorithm not in _DIGESTS:
        raise BadArgument(
            f"chunk_names(): {algorithm!r} starts from what Python's hash makes of a string in LMCache's own process. Say it: "
            "root=0 where LMCache runs without vLLM, or else the number behind `lmcache:builtin:` in the kind's manifest. Or set "
            'pre_caching_hash_algorithm="sha256_cbor" in LMCache, which is the same in every process.'
        )
    seed = python_hash_seed or os.environ.get("PYTHONHASHSEED") or VLLM_SEED
    return _folded(_DIGESTS[algorithm](seed))


def names_field(algorithm: str, root: int | None = None) -> str:
    """What a kind says of such names."""
    return ":".join((LMCACHE, algorithm, *(() if root is None else (name_of(root).hex(),))))


def chunk_namer(names: str) -> Namer | None:
    """What makes the names of a kind that says this; None where nobody can: of segments, or by a hash that is not known here."""
    algorithm, _, root = names.removeprefix(f"{LMCACHE}:").partition(":")
    if algorithm == BLAKE3 and not root:
        return _blake3_namer()
    if algorithm not in _HASHES or len(root) * 4 != _BITS:
        return None
    start = int.from_bytes(bytes.fromhex(root), "big", signed=algorithm == _BUILTIN)
    return lambda tokens, size: chunk_names(tokens, size, algorithm=algorithm, root=start)


def name_of(chunk_hash: int | bytes, *more: str) -> bytes:
    """A chunk hash as the name of a block. `more` is what else LMCache tells chunks apart by: tags of a request, a salt."""
    name = chunk_hash if isinstance(chunk_hash, bytes) else (chunk_hash & (1 << _BITS) - 1).to_bytes(_BITS // 8, "big")
    if not more and 0 < len(name) <= 64:
        return name
    state = hashlib.sha256(len(name).to_bytes(8, "little") + name)
    for part in more:
        state.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return state.digest()


# --- hashes ------------------------------------------------------------------------------------------------------------------

_BUILTIN = "builtin"


def _blake3_chain(chunks: Sequence[tuple[int, ...]]) -> list[bytes]:
    try:
        from blake3 import blake3
    except ImportError as error:
        raise Unsupported('LMCache\'s names by "blake3" need the package blake3: pip install blake3.') from error
    prefix: bytes = blake3((0).to_bytes(8, "big") + struct.pack(">1I", 0)).digest()  # of no tokens
    return [prefix := blake3(prefix + struct.pack(f">{len(chunk)}I", *chunk)).digest() for chunk in chunks]


@cache
def _blake3_namer() -> Namer | None:
    if find_spec("blake3") is None:
        _LOGGER.warning("KVX leaves LMCache's chunks alone: their names need the package blake3 (pip install blake3).")
        return None
    return lambda tokens, size: chunk_names(tokens, size)


def _cbor(value: Any) -> bytes:
    """Canonical CBOR of what is hashed: whole numbers that are not negative, text, and tuples of them."""
    if isinstance(value, tuple):
        return _cbor_head(4, len(value)) + b"".join(map(_cbor, value))
    if isinstance(value, str):
        return _cbor_head(3, len(value.encode())) + value.encode()
    return _cbor_head(0, value)


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    power = next(n for n in range(4) if number < 1 << (8 << n))  # 1, 2, 4 or 8 bytes
    return bytes([major << 5 | 24 + power]) + number.to_bytes(1 << power, "big")


def _sha256_cbor(value: Any) -> bytes:
    return hashlib.sha256(_cbor(value)).digest()


def _sha256_pickle(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=5)).digest()  # vLLM's "sha256": the highest of every Python since 3.8


def _folded(digest: bytes) -> int:
    return int.from_bytes(digest[: _BITS // 8], "big")


_DIGESTS: dict[str, Callable[[Any], bytes]] = {"sha256_cbor": _sha256_cbor, "sha256": _sha256_pickle}


def _folding(digest: Callable[[Any], bytes]) -> _Hash:
    return lambda prefix, chunk: _folded(digest((prefix, chunk, ())))


_HASHES: dict[str, _Hash] = {
    # Python's own hash of numbers and tuples is the same in every process of a 64-bit machine. Only that of text is not.
    _BUILTIN: lambda prefix, chunk: hash((prefix, chunk, ())),
    **{name: _folding(digest) for name, digest in _DIGESTS.items()},
}
