"""Names of blocks: a chain of hashes, by libkvx where it is built and by Python's own modules otherwise. Both give the same.

h[-1] = H(salt, extra)        extra: what else the content hangs on, such as a LoRA's id
h[i]  = H(h[i - 1], tokens of block i as little-endian int32)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvx.errors import BadArgument, Unsupported
from kvx.ops import native

BlockHash = bytes
Hash = Callable[[bytes], BlockHash]
Chain = Callable[[bytes, BlockHash, int], list[BlockHash]]  # of tokens as bytes, after a block of this name, block_size


class Naming(NamedTuple):
    """H by a name of docs/cache.md: 128 bits or more."""

    hash: Hash
    chain: Chain  # of every full block
    digest_bytes: int

    def root(self, salt: bytes, extra: bytes = b"") -> BlockHash:
        """The name before the first block. With the salt's length, no other salt and extra run together to the same bytes."""
        return self.hash(len(salt).to_bytes(8, "little") + salt + extra)


def naming(hash_name: str) -> Naming:
    known = {"blake2b": (_blake2b, 1, 16), "sha256": (_sha256, 2, 32), "xxh3_128": (None, 3, 16)}  # kvx_hash_t, bytes
    if hash_name not in known:
        raise BadArgument(f'hash_name is {hash_name!r}; it must be "blake2b", "sha256" or "xxh3_128".')
    function, code, digest_bytes = known[hash_name]
    hash_ = function or _xxh3_128()
    return Naming(hash_, _native_chain(code, digest_bytes) if native.LIB else python_chain(hash_), digest_bytes)


def _blake2b(data: bytes) -> BlockHash:
    return hashlib.blake2b(data, digest_size=16).digest()


def _sha256(data: bytes) -> BlockHash:
    return hashlib.sha256(data).digest()


def _xxh3_128() -> Hash:
    try:
        from xxhash import xxh3_128_digest
    except ImportError as error:
        raise Unsupported('hash_name="xxh3_128" needs the package xxhash; "blake2b" and "sha256" need none.') from error
    digest: Hash = xxh3_128_digest
    return digest


def python_chain(hash_: Hash) -> Chain:
    def chain(data: bytes, parent: BlockHash, block_size: int) -> list[BlockHash]:
        step = block_size * 4
        parts: list[bytes] = np.frombuffer(data[: len(data) // step * step], f"V{step}").tolist()
        return [parent := hash_(parent + part) for part in parts]

    return chain


def _native_chain(code: int, digest_bytes: int) -> Chain:
    digest, call = np.dtype(f"V{digest_bytes}"), native.entry("kvx_hash_blocks")

    def chain(data: bytes, parent: BlockHash, block_size: int) -> list[BlockHash]:
        n = len(data) // (4 * block_size)
        names = np.empty(n, digest)
        status = call(code, parent, data, n, block_size, names.ctypes.data)
        if status:
            native.raise_status(status)
        found: list[BlockHash] = names.tolist()
        return found

    return chain
