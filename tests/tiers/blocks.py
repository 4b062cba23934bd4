"""Small blocks for the tests of tiers: each one's bytes follow from its key, so that whatever is read can be judged alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from kvx.tiers import Block, BlockKind, DiskTier, HostTier, Tier
from kvx.tiers.block_file import file_bytes

KIND = BlockKind({"model": "small", "layout": "block | layer kv token head dim", "head_start": 0}, (300, 17))


def key(n: int) -> bytes:
    return hashlib.blake2b(n.to_bytes(8, "little"), digest_size=16).digest()


def block(k: bytes, kind: BlockKind = KIND) -> Block:
    def content(i: int, size: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(hashlib.shake_128(k + bytes([i])).digest(size)), dtype=torch.uint8)

    return Block(kind, tuple(content(i, size) for i, size in enumerate(kind.buffer_bytes)))


def is_right(k: bytes, got: Block) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got.buffers, block(k).buffers, strict=True))


def put(tier: Tier, *numbers: int) -> list[bool]:
    return tier.put([key(n) for n in numbers], [block(key(n)) for n in numbers]).result()


def found(tier: Tier, *numbers: int) -> list[bool]:
    """Which are there; what is must be right."""
    keys = [key(n) for n in numbers]
    got = tier.get(keys).result()
    assert all(is_right(k, b) for k, b in zip(keys, got, strict=True) if b is not None)
    return [b is not None for b in got]


def open_tier(name: str, path: Path, num_blocks: int, **options) -> Tier:
    if name == "host":
        return HostTier(KIND, num_blocks * KIND.num_bytes, **options)
    return DiskTier(path, KIND, num_blocks * file_bytes(KIND), **options)


def files(path: Path) -> list[Path]:
    return sorted(path.glob("??/*"))
