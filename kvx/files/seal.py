"""Whether a file's bytes are those that were written: a digest for each of up to 64 parts, so that damage is found, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kvx.errors import BadArgument, Damaged
from kvx.layout.buffers import allocate_buffers
from kvx.layout.coordinates import has_whole_words
from kvx.layout.plan import plan
from kvx.ops.move.convert import convert
from kvx.ops.move.digest import Digest, digest
from kvx.spec import Spec

_MOST_PARTS = 64  # digests of parts: enough to look in the right place, few enough for a header


class Sealed(Protocol):
    """A file with what it was written with."""

    @property
    def spec(self) -> Spec: ...
    @property
    def buffers(self) -> list[Tensor]: ...
    @property
    def content(self) -> str: ...
    @property
    def parts(self) -> list[str]: ...
    @property
    def path(self) -> str: ...


def part_ranges(spec: Spec) -> list[range]:
    """The blocks of each part of a file that has a digest of its own."""
    step = -(-spec.num_blocks // _MOST_PARTS)
    return [range(first, min(first + step, spec.num_blocks)) for first in range(0, spec.num_blocks, step)]


def digest_blocks(cache: list[Tensor], spec: Spec, first: int, end: int) -> Digest:
    """What these blocks add to the digest of all: their tokens stand where they do in the file."""
    here = torch.arange(first, end, dtype=torch.int32)
    if not has_whole_words(spec):  # through a plain layout, of so many blocks only
        plain = spec.replaced(layout=spec.plain_layout, num_blocks=end - first, block_bytes=0)
        stage = allocate_buffers(plain, cache[0].device)
        convert(cache, stage, plan=plan(spec, plain), src_blocks=here, dst_blocks=here - first)
        cache, spec, here = stage, plain, here - first
    return digest(cache, spec, blocks=torch.cat([torch.full((first,), -1, dtype=torch.int32), here]))


class PartDigests:
    """Digests of a cache's parts, counted in while its blocks are at hand."""

    def __init__(self, spec: Spec):
        self.spec = spec
        self.sums = [Digest() for _ in part_ranges(spec)]

    def add(self, cache: list[Tensor], first: int, end: int) -> None:
        for n, part in enumerate(part_ranges(self.spec)):
            begin, stop = max(first, part.start), min(end, part.stop)
            if begin < stop:
                self.sums[n] += digest_blocks(cache, self.spec, begin, stop)

    @property
    def total(self) -> Digest:
        return sum(self.sums, Digest())


class SealCheck:
    """A file held against its seal while it is read, front to back: `read` before the blocks are used, `finish` at the end.

    Where damage is found, what was made of the file so far must not be kept.
    """

    def __init__(self, file: Sealed):
        if not file.parts:
            raise BadArgument(
                f"{file.path} has no seal: it was written without a digest of its content, so nothing can be checked."
            )
        self.file = file
        self.found = PartDigests(file.spec)
        self.done = 0  # blocks before it were read

    def read(self, first: int, end: int) -> None:
        """Damaged as soon as a part that was read whole is not what was written."""
        assert first == self.done
        self.found.add(self.file.buffers, first, end)
        self.done = end
        if any(self._bad_parts()):
            raise Damaged(self.words())

    def finish(self) -> None:
        assert self.done == self.file.spec.num_blocks
        if any(self._bad_parts()) or str(self.found.total) != self.file.content:
            raise Damaged(self.words())

    def read_all(self) -> SealCheck:
        """Every block, whatever is found on the way."""
        for part in part_ranges(self.file.spec):
            self.found.add(self.file.buffers, part.start, part.stop)
        self.done = self.file.spec.num_blocks
        return self

    def _bad_parts(self) -> list[range]:
        ranges = part_ranges(self.file.spec)
        return [
            part
            for part, mine, kept in zip(ranges, self.found.sums, self.file.parts, strict=True)
            if part.stop <= self.done and str(mine) != kept
        ]

    def words(self) -> str:
        """What is wrong, and in which blocks. Scales that all blocks share damage all of them."""
        return (
            f"{self.file.path} differs{_blocks(self._bad_parts(), self.file.spec)} from what was written (content "
            f"{self.file.content}): it was damaged or changed. Take another copy; nothing was made of this one."
        )


def _blocks(bad: Sequence[range], spec: Spec) -> str:
    if not bad:
        return ""
    names = [f"{part.start}" if len(part) == 1 else f"{part.start}..{part.stop - 1}" for part in bad]
    return f" in blocks {', '.join(names[:8])}{', ...' if len(bad) > 8 else ''} of {spec.num_blocks}"
