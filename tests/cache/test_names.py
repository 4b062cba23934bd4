"""Names of blocks: libkvx's chain and Python's are the hash functions they are called after, for every size of block."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys

import pytest

import kvx
from kvx.cache import names
from kvx.ops import native

NAMES = ("blake2b", "sha256", "xxh3_128")
# Every tail of a hash function's chunks (64 and 128 bytes), and both sides of the lengths where xxh3 changes its way: 240
# and 1,024 bytes, and a scramble after them.
BLOCK_SIZES = (*range(1, 70), 127, 128, 251, 252, 253, 255, 256, 257, 508, 509, 512, 1000, 4096)


def reference(name: str):
    if name == "xxh3_128":
        return pytest.importorskip("xxhash").xxh3_128_digest
    return {"blake2b": lambda d: hashlib.blake2b(d, digest_size=16).digest(), "sha256": lambda d: hashlib.sha256(d).digest()}[name]


def chain(digest, data: bytes, parent: bytes, block_size: int) -> list[bytes]:
    step, found = block_size * 4, []
    for at in range(0, len(data) // step * step, step):
        parent = digest(parent + data[at : at + step])
        found.append(parent)
    return found


@pytest.fixture(params=["native", "python"])
def naming(request, monkeypatch):
    """names.naming, by the library and without it."""
    if request.param == "python":
        monkeypatch.setattr(native, "LIB", None)
    elif native.LIB is None:
        pytest.skip("libkvx is not built")
    return names.naming


@pytest.mark.parametrize("name", NAMES)
def test_chain_is_the_hash_function(naming, name):
    digest, n = reference(name), naming(name)
    rng = random.Random(name)
    for block_size in BLOCK_SIZES:
        parent = rng.randbytes(n.digest_bytes)
        for num_blocks, rest in ((0, 0), (0, block_size * 4 - 1), (1, 0), (5, 3)):
            data = rng.randbytes(num_blocks * block_size * 4 + rest)
            assert n.chain(data, parent, block_size) == chain(digest, data, parent, block_size), (block_size, num_blocks)
    assert n.hash(b"some bytes") == digest(b"some bytes")


def test_a_parent_of_another_length_is_refused(naming):
    p = kvx.PrefixCache([kvx.BlockAllocator(4)], 4, hash_name="sha256")
    with pytest.raises(kvx.BadArgument, match="parent has 31 bytes; a sha256 name has 32"):
        p.chain(bytes(64), bytes(31))


@pytest.mark.skipif(native.LIB is None, reason="libkvx is not built")
def test_sha256_is_the_same_without_its_instructions():
    """KVX_SIMD=plain takes them away; which way is taken is settled once, so it is asked in a process of its own."""
    code = (
        "import hashlib; from kvx.cache.names import naming; data, h = bytes(range(256)) * 9, bytes(range(32)); want = []\n"
        "for i in range(9): want.append(h := hashlib.sha256(h + data[:256]).digest())\n"
        "assert naming('sha256').chain(data, bytes(range(32)), 64) == want"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "KVX_SIMD": "plain"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
