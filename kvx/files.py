"""Caches in files: safetensors, with the spec in the metadata. Any reader sees the tensors; KVX also knows what they are.

Buffers are mapped, not read: a cache larger than memory opens at once, and a conversion walks it block by block. A file is written
under another name and takes its own when it is whole, so what stands under it is never half a cache. The digest of its content is
kept with it, of all and of each part, so that damage is found without a second file, and where.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from kvx.errors import BadArgument, Incompatible
from kvx.layout.buffers import allocate_buffers, bytes_of
from kvx.layout.coordinates import has_whole_words
from kvx.layout.gate import check_buffers
from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.layout.plan import plan
from kvx.ops.convert import Buffers, convert, flat
from kvx.ops.digest import Digest, digest
from kvx.spec import CacheSpec, from_json, to_json
from kvx.spec.manifest import require_same

MANIFEST, CONTENT, PARTS = "kvx_manifest", "kvx_content_digest", "kvx_content_parts"
_MOST_PARTS = 64  # digests of parts: enough to look in the right place, few enough for a header
_ALIGN = 4096  # tensors begin on pages, so that rows of any size are aligned
_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}


class CacheFile(NamedTuple):
    spec: CacheSpec
    buffers: list[Tensor]  # uint8, mapped
    content: str  # digest of the content when it was written; "" when not kept
    parts: list[str]  # of each part of it (part_ranges); [] when not kept


class NewFile:
    """A file being filled."""

    def __init__(self, spec: CacheSpec, buffers: list[Tensor]):
        self.spec, self.buffers = spec, buffers
        self.parts: list[Digest] = []

    def keep_digest(self, first: int, end: int, cache: list[Tensor] | None = None) -> None:
        """Blocks first to end are filled: count them in, while they are at hand. `cache` holds the same where it came from."""
        self.parts = self.parts or [Digest() for _ in part_ranges(self.spec)]
        for n, part in enumerate(part_ranges(self.spec)):
            begin, stop = max(first, part.start), min(end, part.stop)
            if begin < stop:
                self.parts[n] += digest_blocks(cache or self.buffers, self.spec, begin, stop)


def part_ranges(spec: CacheSpec) -> list[range]:
    """The blocks of each part of a file that has a digest of its own."""
    step = -(-spec.num_blocks // _MOST_PARTS)
    return [range(first, min(first + step, spec.num_blocks)) for first in range(0, spec.num_blocks, step)]


def digest_blocks(cache: list[Tensor], spec: CacheSpec, first: int, end: int) -> Digest:
    """What these blocks add to the digest of all: their tokens stand where they do in the file."""
    here = torch.arange(first, end, dtype=torch.int32)
    if not has_whole_words(spec):  # through a plain layout, of so many blocks only
        layout = "layer kv | block token head dim" if spec.num_planes == 2 else "layer | block token head dim"
        plain = replace(spec, layout=layout, num_blocks=end - first, block_bytes=0)
        stage = allocate_buffers(plain, cache[0].device)
        convert(stage, cache, plan=plan(spec, plain), src_blocks=here, dst_blocks=here - first)
        cache, spec, here = stage, plain, here - first
    return digest(cache, spec, blocks=torch.cat([torch.full((first,), -1, dtype=torch.int32), here]))


def save(path: str | Path, cache: Buffers, spec: CacheSpec, *, check: bool = True) -> None:
    """Write every buffer of a cache. `check` keeps the content digest beside it, so that `kvx verify` can tell a damaged file."""
    tensors = list(flat("cache", cache))
    check_buffers("save", "cache", tensors, (spec,))
    with create(path, spec) as file:
        if check:
            file.keep_digest(0, spec.num_blocks, tensors)
        for to, t in zip(file.buffers, tensors, strict=True):
            to.copy_(bytes_of(t)[: to.numel()])


def load(path: str | Path, expect: CacheSpec | None = None) -> CacheFile:
    """Map a file read-only. With `expect`, a spec that differs is refused by the name of the first field that does."""
    path = Path(path)
    size = path.stat().st_size if path.is_file() else -1
    if size < 8:
        what = "is no safetensors file" if size >= 0 else "is a folder; name a file in it" if path.is_dir() else "does not exist"
        raise BadArgument(f"load(): {path} {what}.")
    try:
        opened = path.open("rb")
    except OSError as error:
        raise BadArgument(f"load(): {path} cannot be read: {error.strerror}.") from None
    with opened as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, 100 << 20):
            raise BadArgument(
                f"load(): {path} says its header has {length} bytes; the file has {size}. It is cut short or no safetensors file."
            )
        try:
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", {})
            manifest, content, parts = (metadata.get(name, "") for name in (MANIFEST, CONTENT, PARTS))
            parts = parts.split()
        except (ValueError, AttributeError, TypeError):
            raise BadArgument(f"load(): {path} has no readable header; it is no safetensors file.") from None
        if not manifest:
            raise BadArgument(f'load(): {path} has no "{MANIFEST}" in its metadata; kvx.save() and kvx convert write it.')
        spec = from_json(manifest)
        if expect is not None:
            require_same(expect, spec)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if parts and len(parts) != len(part_ranges(spec)):
        raise BadArgument(f"load(): {path} keeps digests of {len(parts)} parts; its manifest makes {len(part_ranges(spec))}.")
    return CacheFile(spec, _views(path, mapped, 8 + length, header, spec), content, parts)


@contextmanager
def create(path: str | Path, spec: CacheSpec) -> Iterator[NewFile]:
    """A new file, its buffers mapped, to be filled. It appears under `path` when the block ends well, and not at all otherwise."""
    path = Path(path)
    if path.is_dir():
        raise BadArgument(f"{path} cannot be written: it is a folder. Name a file in it.")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    entries, size = _layout(spec)

    def header(parts: list[Digest]) -> bytes:
        kept = {CONTENT: str(sum(parts, Digest())), PARTS: " ".join(map(str, parts))} if parts else {}
        return json.dumps({"__metadata__": {MANIFEST: to_json(spec), **kept}, **entries}).encode()

    length = len(header([Digest() for _ in part_ranges(spec)]))  # digests are known last and stand first
    length += -(8 + length) % _ALIGN
    try:
        with _new(path, partial, 8 + length + size) as file:
            mapped = mmap.mmap(file.fileno(), 0)
            new = NewFile(spec, _views(path, mapped, 8 + length, entries, spec))
            yield new
            mapped[: 8 + length] = length.to_bytes(8, "little") + header(new.parts).ljust(length)
            mapped.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()


def _new(path: Path, partial: Path, size: int) -> BinaryIO:
    try:
        file = partial.open("w+b")
        try:
            file.truncate(size)
        except OSError:
            file.close()
            raise
    except OSError as error:
        missing = "" if path.parent.is_dir() else f" There is no folder {path.parent}: make it first."
        raise BadArgument(f"{path} cannot be written: {error.strerror}.{missing}") from None
    return file


def _names(spec: CacheSpec) -> list[tuple[str, str, list[int]]]:
    """(name, safetensors type, shape) of every buffer, in order."""
    sizes = [size for count, size in buffer_sizes(spec) for _ in range(count)]
    out = [(f"cache.{n:05d}", "U8", [size]) for n, size in enumerate(sizes[: num_cache_buffers(spec)])]
    for i, plane in enumerate(spec.planes[: spec.num_planes]):
        shape, scale = spec.scale_shape(i), plane.format.scale
        if shape is not None and scale is not None:
            out.append((f"{plane.name}_scale", _TYPES.get(scale.name, "U8"), [spec.num_layers, *shape]))
    out += [
        (f"{p.name}_tensor_scale", "F32", [spec.num_layers]) for p in spec.planes[: spec.num_planes] if p.format.has_tensor_scale
    ]
    return out


def _layout(spec: CacheSpec) -> tuple[dict[str, Any], int]:
    """Header entries, one after the other, and the bytes of all. The format allows no gaps, so only the first is on a page."""
    entries, at = {}, 0
    sizes = [size for count, size in buffer_sizes(spec) for _ in range(count)]
    for (name, kind, shape), size in zip(_names(spec), sizes, strict=True):
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return entries, at


def _views(path: Path, mapped: mmap.mmap, start: int, header: dict[str, Any], spec: CacheSpec) -> list[Tensor]:
    want, total = _layout(spec)
    if set(header) != set(want):
        odd = sorted(set(header) ^ set(want))[0]
        raise Incompatible(f"load(): {path} has tensors its manifest does not describe, or lacks some: {odd}.")
    if len(mapped) < start + total:
        raise BadArgument(f"load(): {path} has {len(mapped)} bytes; its header makes {start + total}. It is cut short.")
    out = []
    for name, entry in want.items():
        begin, end = _offsets(path, name, header[name])
        if end - begin != entry["data_offsets"][1] - entry["data_offsets"][0] or begin < 0 or start + end > len(mapped):
            raise Incompatible(f"load(): {path}: tensor {name} has {end - begin} bytes; the manifest makes {entry['shape']}.")
        out.append(
            torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=start + begin)
            if end > begin
            else torch.empty(0, dtype=torch.uint8)
        )
    return out


def _offsets(path: Path, name: str, entry: Any) -> tuple[int, int]:
    found = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(found, list) or len(found) != 2 or any(type(n) is not int for n in found):
        raise BadArgument(f"load(): {path}: tensor {name} says it is at {str(found)[:80]}; it is at two numbers, first and end.")
    return found[0], found[1]


def sync_folder(folder: Path) -> None:
    """What its names stand for outlives a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def shard_paths(path: str, count: int) -> Sequence[Path]:
    """One path a rank: `{rank}` in the name stands for its number."""
    if count == 1:
        return [Path(path)]
    if "{rank}" not in path:
        raise BadArgument(f"{path}: {count} shards need {{rank}} in the name, such as cache.{{rank}}.safetensors.")
    return [Path(path.replace("{rank}", str(i))) for i in range(count)]
