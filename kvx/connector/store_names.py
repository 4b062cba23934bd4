"""Whose names a store's blocks have, and records that lead from one engine's names to another's blocks. docs/store.md has it all.

A kind without the field `names` has blocks by KVX's names: `kvx.handover.names`. An engine that hands out only hashes of its own
keeps its blocks under those, in a kind that says so: `names` is the engine. Who has the tokens can make either, and so write an
alias: a record under the one name that lists the others for the same tokens.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import fields
from math import lcm
from typing import NamedTuple

import torch

from kvx.errors import BadArgument, Damaged, KvxError
from kvx.spec import CacheSpec, Spec, StateSpec, spec_from_json
from kvx.tiers import Block, BlockKind

SKIP = -1
NAMES = "names"  # of a kind's manifest
ALIAS = "kvx_alias"
_VERSION = 1
_HEAD = struct.Struct("<QII")  # the first token of the page in its sequence, how many names, bytes of a name
BLOCK_SIZE = "block_size"  # tokens between names: of K and V a field of the spec, of states under an engine's own names beside it
_SPEC_FIELDS = {"kvx_manifest", *CacheSpec.__dataclass_fields__}
_STATE_FIELDS = {"kvx_manifest", *(f.name for f in fields(StateSpec) if f.init)}


class Scheme(NamedTuple):
    """Blocks of so many tokens, by names of this engine; "": KVX's names."""

    names: str
    block_size: int  # 0: a state by KVX's names, which any block that ends where it stands may name

    @classmethod
    def of(cls, kind: BlockKind) -> Scheme:
        size = kind.manifest.get(BLOCK_SIZE, 0)
        return cls(str(kind.manifest.get(NAMES, "")), size if isinstance(size, int) else 0)


def named_kind(kind: BlockKind, names: str, **facts: str | int) -> BlockKind:
    """The same blocks under an engine's own names. `facts` are what else must be equal to read them."""
    return BlockKind({**kind.manifest, **facts, **({NAMES: names} if names else {})}, kind.buffer_bytes)


def spec_of(kind: BlockKind) -> tuple[CacheSpec, dict[str, str | int]] | None:
    """The spec that a kind says, and what it says beside it; None where it is no cache of K and V."""
    found = any_spec_of(kind)
    return (found[0], found[1]) if found is not None and isinstance(found[0], CacheSpec) else None


def any_spec_of(kind: BlockKind) -> tuple[Spec, dict[str, str | int]] | None:
    """The same of states too; None where a kind says no spec."""
    known = _STATE_FIELDS if "planes" in kind.manifest else _SPEC_FIELDS
    inner = {name: value for name, value in kind.manifest.items() if name in known}
    try:
        spec = spec_from_json(json.dumps(inner))
    except KvxError:
        return None
    return spec, {name: value for name, value in kind.manifest.items() if name not in known}


class Alias(NamedTuple):
    """The blocks that hold a page's tokens. They begin at or before it and end at or after it."""

    first_token: int  # of the page, in its sequence
    names: tuple[bytes, ...]

    def end_name(self, page_size: int, block_size: int) -> bytes | None:
        """The name of the block that ends with the page, which a state has that stands there; None where none does."""
        return None if (self.first_token + page_size) % block_size else self.names[-1]

    def tables(self, page_size: int, block_size: int) -> tuple[list[int], list[int]]:
        """Places among the names, and 0 where the page is, over the same tokens; SKIP elsewhere. For `kvx.convert`."""
        unit, last = lcm(page_size, block_size), self.first_token + page_size - 1
        start, end = self.first_token // unit * unit, -(-(last + 1) // unit) * unit
        first = self.first_token // block_size
        blocks = [
            n - first if first <= n < first + len(self.names) else SKIP for n in range(start // block_size, end // block_size)
        ]
        pages = [0 if n * page_size == self.first_token else SKIP for n in range(start // page_size, end // page_size)]
        return blocks, pages


def alias_kind(model: str, page: Scheme, block: Scheme) -> BlockKind:
    """Records of one engine's pages that lead to blocks of another scheme."""
    most = 1 + -(-(page.block_size - 1) // block.block_size)  # blocks that a page may touch
    width = 64  # of a name, MOST_KEY_BYTES
    manifest: dict[str, str | int] = {
        ALIAS: _VERSION, "model": model, NAMES: page.names, "page_size": page.block_size,
        "of_names": block.names, "of_block_size": block.block_size,
    }  # fmt: skip
    return BlockKind(manifest, (_HEAD.size + most * width,))


def alias_schemes(kind: BlockKind) -> tuple[Scheme, Scheme] | None:
    """Whose pages a kind of records leads from, and to which blocks; None where it is another kind, or of another version."""
    m = kind.manifest
    if m.get(ALIAS) != _VERSION:
        return None
    try:
        page = Scheme(str(m[NAMES]), int(m["page_size"]))
        block = Scheme(str(m["of_names"]), int(m["of_block_size"]))
        return (page, block) if alias_kind(str(m["model"]), page, block).text == kind.text else None
    except (KeyError, ValueError, ZeroDivisionError, BadArgument):
        return None


def write_alias(kind: BlockKind, alias: Alias) -> Block:
    data = bytearray(kind.num_bytes)
    width = len(alias.names[0])
    head = _HEAD.pack(alias.first_token, len(alias.names), width) + b"".join(alias.names)
    data[: len(head)] = head
    return kind.block([torch.frombuffer(data, dtype=torch.uint8)])


def read_alias(block: Block) -> Alias:
    """Damaged where it says what a record of its kind cannot."""
    data = block.buffers[0].numpy().tobytes()
    first, count, width = _HEAD.unpack_from(data)
    if not 0 < width <= 64 or not 0 < count <= (len(data) - _HEAD.size) // 64 or first >= 1 << 62:
        raise Damaged(f"an alias has {count} names of {width} bytes from token {first} on; its kind has room for fewer.")
    at = _HEAD.size
    return Alias(first, tuple(data[at + n * width : at + (n + 1) * width] for n in range(count)))


def state_names(names: Sequence[bytes], size: int, other: int) -> dict[int, bytes]:
    """Of names of blocks of so many tokens, those under which a state may be that blocks of another size end with too."""
    return {end: names[end // size - 1] for end in range(lcm(size, other), len(names) * size + 1, lcm(size, other))}


def aliases(page_names: Sequence[bytes], page_size: int, names: Sequence[bytes], block_size: int) -> dict[bytes, Alias]:
    """For pages of a sequence from its first token on, those that the blocks cover wholly."""
    found = {}
    for n, page in enumerate(page_names):
        first, end = n * page_size // block_size, -(-(n + 1) * page_size // block_size)
        if end <= len(names):
            found[page] = Alias(n * page_size, tuple(names[first:end]))
    return found
