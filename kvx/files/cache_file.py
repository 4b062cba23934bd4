"""Cache files: opened, checked and made.

Buffers are mapped, not read, and a conversion walks them block by block, so that a cache may be larger than memory. A file is
written under another name and takes its own when it is whole, so what stands under it is never half a cache. The digest of its
content is kept with it, of all and of each part, under a seal with its spec: damage is found without a second file, and where.
"""

from __future__ import annotations

import mmap
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument
from kvx.files.header import MANIFEST, entries, header_bytes, read_header, require_few
from kvx.files.seal import PartDigests, SealCheck, part_ranges
from kvx.layout.buffers import bytes_of
from kvx.layout.gate import check_buffers
from kvx.ops.move.digest import Digest
from kvx.ops.move.sides import Buffers, flat
from kvx.spec import Spec

_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE, which mmap names from Python 3.13 on
_ALIGN = 4096  # tensors begin on pages, so that rows of any size are aligned


class CacheFile(NamedTuple):
    """A cache in a file, as `kvx.load` gives it: its spec, and its buffers mapped into memory."""

    spec: Spec
    buffers: list[Tensor]  # uint8, mapped: what is written into them stays in memory and never reaches the file
    content: str  # digest of the content when it was written; "" when not kept
    parts: list[str]  # of each part of it (part_ranges); [] when not kept
    path: str

    def check(self) -> None:
        """Read all of it: Damaged unless it is what was written; BadArgument where it has no seal. Padding is not content."""
        SealCheck(self).read_all().finish()


class NewFile:
    """A file being filled."""

    def __init__(self, spec: Spec, buffers: list[Tensor]):
        self.spec, self.buffers = spec, buffers
        self.digests: PartDigests | None = None  # None: it gets no seal

    def keep_digest(self, first: int, end: int, cache: list[Tensor] | None = None) -> None:
        """Blocks first to end are filled: count them in, while they are at hand. `cache` holds the same where it came from."""
        self.digests = self.digests or PartDigests(self.spec)
        self.digests.add(cache or self.buffers, first, end)


def save(path: str | Path, cache: Buffers, spec: Spec, *, check: bool = True) -> None:
    """Write every buffer of a cache. `check` seals it with the digest of its content, so that whoever reads it can tell damage."""
    tensors = list(flat("cache", cache))
    check_buffers("save", "cache", tensors, (spec,))
    with create(path, spec) as file:
        if check:
            file.keep_digest(0, spec.num_blocks, tensors)
        for to, t in zip(file.buffers, tensors, strict=True):
            to.copy_(bytes_of(t)[: to.numel()])


def load(path: str | Path, expect: Spec | None = None, *, verify: bool = True) -> CacheFile:
    """Open a file. Its content is read once and held against its seal; Damaged where it is not what was written.

    `verify=False` maps it at once, whatever its size, and reads nothing: `check()` before the content is used. It also takes files
    without a seal, as save(check=False) writes. With `expect`, a spec that differs is refused by the first field that does.
    """
    try:
        path = Path(path)
        size = path.stat().st_size if path.is_file() else -1
        is_folder = path.is_dir()
    except (OSError, ValueError, TypeError) as error:  # a name with a zero byte, or none
        raise BadArgument(f"load(): {str(path)[:200]!r} names no file: {str(error)[:100]}.") from None
    if size < 8:
        what = "is no safetensors file" if size >= 0 else "is a folder; name a file in it" if is_folder else "does not exist"
        what = what if size >= 0 or is_folder or not path.exists() else "is no regular file"
        raise BadArgument(f"load(): {path} {what}.")
    try:
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            header = read_header(path, opened, size, lambda spec: len(part_ranges(spec)), expect)
            mapped = _mapped(opened, size)
    except (OSError, ValueError) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(f"load(): {path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    file = CacheFile(header.spec, _views(mapped, header.spans), header.content, header.parts, str(path))
    if verify:
        if not file.parts:
            raise BadArgument(
                f"load(): {path} has no seal: it was written without a digest of its content, so nothing can be checked. "
                "load(path, verify=False) takes it as it is."
            )
        file.check()
    return file


def _mapped(file: BinaryIO, size: int) -> mmap.mmap:
    """Whoever writes into it has a copy of that page; no memory is set aside for such copies, so it may be larger than memory."""
    return mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def is_cache_file(path: str | Path) -> bool:
    """Whether it says it is one of ours, damaged or not: by its first bytes."""
    try:
        with Path(path).open("rb") as file:
            return MANIFEST.encode() in file.read(1 << 12)
    except OSError:
        return False


@contextmanager
def create(path: str | Path, spec: Spec) -> Iterator[NewFile]:
    """A new file, its buffers mapped, to be filled. It appears under `path` when the block ends well, and not at all otherwise."""
    path = Path(path)
    if path.is_dir() or not path.name:
        raise BadArgument(f"{path} cannot be written: it is a folder. Name a file in it.")
    if path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file of that name
        raise BadArgument(f"{path} cannot be written: it is no regular file. Name a file.")
    require_few(f"{path} cannot be written", spec)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    nothing = str(Digest())
    length = len(header_bytes(spec, nothing, [nothing] * len(part_ranges(spec))))  # digests are known last and stand first
    length += -(8 + length) % _ALIGN
    spans, at = [], 8 + length
    for entry in entries(spec):
        spans.append((at, entry.size))
        at += entry.size
    try:
        with _new(path, partial, at) as file:
            mapped = mmap.mmap(file.fileno(), 0)
            new = NewFile(spec, _views(mapped, spans))
            yield new
            sums = new.digests.sums if new.digests else []
            total = str(new.digests.total) if new.digests else ""
            header = header_bytes(spec, total, [str(d) for d in sums]).ljust(length)
            mapped[: 8 + length] = length.to_bytes(8, "little") + header
            mapped.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError, ValueError):  # it is not there: it has its name, or never was
            partial.unlink()


def _new(path: Path, partial: Path, size: int) -> BinaryIO:
    try:
        file = partial.open("w+b")
        try:
            # Room is taken now: a disk that is full is an error here, and not a bus error in the middle of a write to the mapping.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:  # macOS
                file.truncate(size)
        except OSError:
            file.close()
            raise
    except (OSError, ValueError) as error:
        missing = "" if path.parent.is_dir() else f" There is no folder {path.parent}: make it first."
        raise BadArgument(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}.{missing}") from None
    return file


def _views(mapped: mmap.mmap, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=begin) for begin, size in spans]


def sync_folder(folder: Path) -> None:
    """What its names stand for outlives a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shard_paths(path: str, count: int) -> Sequence[Path]:
    """One path a rank: `{rank}` in the name stands for its number."""
    if "{rank}" not in path:
        if count == 1:
            return [Path(path)]
        raise BadArgument(f"{path}: {count} shards need {{rank}} in the name, such as cache.{{rank}}.safetensors.")
    return [Path(path.replace("{rank}", str(i))) for i in range(count)]
