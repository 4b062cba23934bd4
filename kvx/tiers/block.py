"""What a tier keeps: blocks as bytes, with the manifest that says whose bytes they are.

A tier keeps blocks of one kind. A block of another is refused by the name of the first field that differs, and never read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvx.errors import BadArgument, Incompatible, TierError, a_type
from kvx.layout.buffers import bytes_of
from kvx.layout.place import buffer_bytes
from kvx.spec import Spec, to_json
from kvx.spec.manifest import unique_fields

Field = str | int
# Which of the keys of a call, from which of a block's bytes on, and those bytes, a row each: another's as soon as it returns.
Take = Callable[[Sequence[int], int, np.ndarray], None]


@dataclass(frozen=True)
class BlockKind:
    """The manifest of blocks, and the sizes of their buffers. `BlockKind.of(spec)` for caches that a spec describes."""

    manifest: Mapping[str, Field]  # model, layout, format, block size, heads, ...: all that must be equal to read the bytes
    buffer_bytes: tuple[int, ...]  # one a buffer, in their order
    text: str = field(init=False, repr=False, compare=False)  # as it travels: JSON with sorted keys
    digest: bytes = field(init=False, repr=False, compare=False)  # 16 bytes over the text

    def __post_init__(self) -> None:
        if not self.buffer_bytes or min(self.buffer_bytes) < 0 or not sum(self.buffer_bytes):
            raise BadArgument(
                f"BlockKind: buffer_bytes is {self.buffer_bytes}; a block has one buffer or more, with bytes in them."
            )
        if any(type(v) not in (str, int) for v in self.manifest.values()):
            raise BadArgument("BlockKind: a manifest's values are strings and integers, so that they are equal after JSON.")
        body = {"manifest": dict(self.manifest), "buffer_bytes": list(self.buffer_bytes)}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "digest", hashlib.blake2b(text.encode(), digest_size=16).digest())

    @classmethod
    def of(cls, spec: Spec) -> BlockKind:
        """One block of this cache: what `kvx.allocate_buffers(block_spec(spec))` makes, scales included."""
        one = block_spec(spec)
        fields = json.loads(to_json(one))
        del fields["digest"]  # of the fields that stand beside it
        return cls(fields, tuple(buffer_bytes(one)))

    @property
    def num_bytes(self) -> int:
        return sum(self.buffer_bytes)

    def require_same(self, theirs: BlockKind, call: str) -> None:
        """Raise Incompatible with the first field that differs."""
        if self is theirs or self.text == theirs.text:
            return
        for name in dict.fromkeys([*self.manifest, *theirs.manifest]):
            a, b = self.manifest.get(name), theirs.manifest.get(name)
            if a != b:
                raise Incompatible(f"{call}(): manifests differ in {name}: {a!r} here, {b!r} there.")
        raise Incompatible(f"{call}(): buffer_bytes is {self.buffer_bytes} here, {theirs.buffer_bytes} there.")

    def empty(self, *, pin_memory: bool = False) -> Block:
        """A block to be filled."""
        return Block(self, tuple(torch.empty(n, dtype=torch.uint8, pin_memory=pin_memory) for n in self.buffer_bytes))

    def block(self, buffers: Sequence[Tensor]) -> Block:
        """These tensors as one block, of whatever types. They are not copied."""
        return Block(self, tuple(map(bytes_of, buffers)))


class Block(NamedTuple):
    """One block in host memory."""

    kind: BlockKind
    buffers: tuple[Tensor, ...]  # uint8, flat
    is_held: Callable[[], bool] | None = None  # of memory that its owner may take back while a tier reads it: not yet?

    def require_held(self) -> None:
        """A tier asks when it has taken the bytes, before anybody can find them: they may be another's by now."""
        if self.is_held is not None and not self.is_held():
            raise TierError("put(): the memory of a block was taken back before its bytes were stored. Nothing was kept of it.")


def hand_on(n: int, block: Block, take: Take) -> None:
    start = 0
    for buffer in block.buffers:
        take([n], start, buffer.numpy()[None])
        start += buffer.numel()


def fill(block: Block) -> Callable[[int, memoryview], None]:
    """Puts bytes into a block, from a first one on."""

    def put(start: int, piece: memoryview) -> None:
        row, at = np.frombuffer(piece, np.uint8), -start  # `at`: where a buffer begins in `row`
        for buffer in block.buffers:
            begin, end = max(at, 0), min(at + buffer.numel(), len(row))
            if begin < end:
                buffer.numpy()[begin - at : end - at] = row[begin:end]
            at += buffer.numel()

    return put


def block_spec(spec: Spec) -> Spec:
    """The spec of one block of a cache. What pads blocks in an engine is not kept; which position a state is of is in its name."""
    one = spec.replaced(num_blocks=1, block_bytes=0)
    return one.replaced(positions=()) if one.positions else one


def kind_from_text(text: str) -> BlockKind:
    """The kind that a file or a peer names. BadArgument where it names none."""
    try:
        body = json.loads(text, object_pairs_hook=unique_fields)
        sizes = body["buffer_bytes"]
        if not isinstance(sizes, list) or any(type(n) is not int for n in sizes):
            raise ValueError("buffer_bytes is no list of whole numbers")
        return BlockKind(dict(body["manifest"]), tuple(sizes))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadArgument(f"kind_from_text(): no kind of block: {str(error)[:200]}.") from None


def check_kind(tier: str, kind: BlockKind) -> None:
    if not isinstance(kind, BlockKind):
        raise BadArgument(f"{tier}: kind is {str(kind)[:100]}; it must be a BlockKind. BlockKind.of(spec) makes one of a spec.")


def check_block(call: str, kind: BlockKind, block: Block) -> None:
    """Raise unless this is a block of this kind, in host memory."""
    if not isinstance(block, Block):
        raise BadArgument(f"{call}(): a block is {a_type(block)}; it must be a Block: tier.kind.block(buffers) makes one.")
    kind.require_same(block.kind, call)
    if len(block.buffers) != len(kind.buffer_bytes):
        raise BadArgument(f"{call}(): a block has {len(block.buffers)} buffers; its kind has {len(kind.buffer_bytes)}.")
    for i, (t, size) in enumerate(zip(block.buffers, kind.buffer_bytes, strict=True)):
        if t.dtype != torch.uint8 or t.device.type != "cpu" or not t.is_contiguous() or list(t.shape) != [size]:
            raise BadArgument(
                f"{call}(): buffer {i} is {list(t.shape)} {t.dtype} on {t.device}; a tier takes "
                f"[{size}] torch.uint8, contiguous, on the host."
            )
