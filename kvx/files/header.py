"""A cache file's header: which tensors lie where, whose cache they are, and the seal.

safetensors' header is JSON, and JSON from outside may claim anything. So the metadata is read first, and is small; the spec in it
says how many tensors there are and how large, which must be what the file has; only then are the tensors' entries read, one by
one. Memory and time are in proportion to the file, whatever it claims.

    8 bytes  length of the JSON
    JSON     {"__metadata__": {"kvx_manifest": spec, "kvx_content_digest", "kvx_content_parts", "kvx_seal"}, "cache.00000": ...}
    bytes    of the tensors, without gaps
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from kvx.errors import BadArgument, Damaged, Incompatible
from kvx.layout.place import buffer_sizes, num_cache_buffers
from kvx.spec import Spec, spec_from_json, to_json
from kvx.spec.from_manifest import require_same
from kvx.spec.manifest import digest as spec_digest
from kvx.spec.manifest import unique_fields

MANIFEST, CONTENT, PARTS, SEAL = "kvx_manifest", "kvx_content_digest", "kvx_content_parts", "kvx_seal"
MOST_BUFFERS = 1 << 19  # tensors of one file: each is an object of 500 bytes in Python
_MOST_BYTES = 100 << 20  # of a header: safetensors' own limit
_MOST_METADATA = 1 << 20
_LEAST_ENTRY = 50  # bytes of JSON that a tensor takes at least
_TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
_WS = r"[ \t\n\r]*"
_BEGIN = re.compile(rf'{_WS}\{{{_WS}"__metadata__"{_WS}:{_WS}')
_ENTRY = re.compile(rf'{_WS},{_WS}"([a-z0-9_.]{{1,40}})"{_WS}:{_WS}(\{{[^{{}}]{{0,400}}\}})')
_END = re.compile(rf"{_WS}\}}{_WS}")


class Header(NamedTuple):
    spec: Spec
    content: str  # digest of the content when it was written; "" where it was not kept
    parts: list[str]  # of each part of it; [] where they were not kept
    spans: list[tuple[int, int]]  # of each buffer, its first byte in the file and how many it has


class TensorEntry(NamedTuple):
    name: str
    kind: str  # safetensors' type
    shape: list[int]
    size: int  # bytes


def entries(spec: Spec) -> list[TensorEntry]:
    """One a buffer, in order. `require_few` first, where the spec is from outside."""
    sizes = [size for count, size in buffer_sizes(spec) for _ in range(count)]
    caches = num_cache_buffers(spec)
    out = [TensorEntry(f"cache.{n:05d}", "U8", [size], size) for n, size in enumerate(sizes[:caches])]
    scales = []
    for i, plane in enumerate(spec.planes):
        shape, scale = spec.scale_shape(i), plane.format.scale
        if shape is not None and scale is not None:
            scales.append((f"{plane.name}_scale", _TYPES.get(scale.name, "U8"), [spec.num_layers, *shape]))
    scales += [(f"{p.name}_tensor_scale", "F32", [spec.num_layers]) for p in spec.planes if p.format.has_tensor_scale]
    return out + [TensorEntry(*scale, size) for scale, size in zip(scales, sizes[caches:], strict=True)]


def require_few(call: str, spec: Spec) -> None:
    if num_cache_buffers(spec) > MOST_BUFFERS:
        raise BadArgument(
            f"{call}: layout {spec.layout!r} makes {num_cache_buffers(spec):,} tensors; a file has at most {MOST_BUFFERS:,}. "
            "Convert to a layout with fewer allocations: fewer axes left of `|`."
        )


def seal_of(spec: Spec, content: str, parts: Sequence[str]) -> str:
    """What holds the spec and the digests of the content to each other."""
    text = json.dumps(["kvx seal 1", spec_digest(spec), content, *parts])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def header_bytes(spec: Spec, content: str, parts: Sequence[str]) -> bytes:
    """The JSON. Without digests of its content a file has no seal."""
    metadata = {MANIFEST: to_json(spec)}
    if parts:
        metadata |= {CONTENT: content, PARTS: " ".join(parts), SEAL: seal_of(spec, content, parts)}
    tensors, at = {}, 0
    for name, kind, shape, size in entries(spec):
        tensors[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    return json.dumps({"__metadata__": metadata, **tensors}).encode()


def read_header(path: Path, file: BinaryIO, size: int, num_parts: Any, expect: Spec | None = None) -> Header:
    """Of a file of `size` bytes. `num_parts(spec)`: how many parts of its content have a digest of their own."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, _MOST_BYTES):
        raise BadArgument(
            f"load(): {path} says its header has {length} bytes; the file has {size}. It is cut short or no safetensors file."
        )
    data = file.read(length)
    metadata, at = _metadata(path, data)
    if MANIFEST not in metadata:
        raise BadArgument(f'load(): {path} has no "{MANIFEST}" in its metadata; kvx.save() and kvx convert write it.')
    spec = spec_from_json(metadata[MANIFEST])
    if expect is not None:
        require_same(expect, spec)
    content, parts = _sealed(path, metadata, spec, num_parts(spec))
    require_few(f"load(): {path}", spec)
    if num_cache_buffers(spec) * _LEAST_ENTRY > length:  # before they are listed
        raise Incompatible(
            f"load(): {path} has a header of {length:,} bytes; its manifest makes {num_cache_buffers(spec):,} tensors, which do "
            "not fit in it. It was changed after it was written."
        )
    total = sum(count * bytes_ for count, bytes_ in buffer_sizes(spec))
    if size != 8 + length + total:
        what = "It is cut short" if size < 8 + length + total else "Something was added behind it"
        raise BadArgument(f"load(): {path} has {size:,} bytes; its manifest and header make {8 + length + total:,}. {what}.")
    return Header(spec, content, parts, _spans(path, data[at:], entries(spec), 8 + length))


def _metadata(path: Path, data: bytes) -> tuple[dict[str, str], int]:
    """The metadata, and where it ends."""
    start = data[:_MOST_METADATA]
    try:
        text = start.decode() if len(data) <= _MOST_METADATA else start.decode(errors="ignore")  # a letter may be cut at its end
        begin = _BEGIN.match(text)
        if begin is None:
            raise BadArgument(
                f'load(): {path} has no "{MANIFEST}" in its metadata, which stands first; kvx.save() and kvx convert write it.'
                if text.lstrip()[:1] == "{"
                else f"load(): {path} has no readable header; it is no safetensors file."
            )
        found, end = json.JSONDecoder(object_pairs_hook=unique_fields).raw_decode(text, begin.end())
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadArgument):
            raise
        raise BadArgument(
            f"load(): {path} has no readable header: {str(error)[:100]}. It is damaged, or no safetensors file."
        ) from None
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise BadArgument(f"load(): {path}: the metadata of its header is not all text; it is no safetensors file.")
    return found, len(text[:end].encode(errors="surrogatepass"))


def _sealed(path: Path, metadata: dict[str, str], spec: Spec, num_parts: int) -> tuple[str, list[str]]:
    """The digests of the content, held against the seal."""
    kept = [name for name in (CONTENT, PARTS, SEAL) if name in metadata]
    if not kept:
        return "", []
    if len(kept) != 3:
        missing = next(name for name in (CONTENT, PARTS, SEAL) if name not in metadata)
        raise Damaged(
            f'load(): {path} has "{kept[0]}" and no "{missing}": its seal is broken. It was changed after it was written.'
        )
    content, parts = metadata[CONTENT], metadata[PARTS].split()
    if len(parts) != num_parts:
        raise BadArgument(f"load(): {path} keeps digests of {len(parts)} parts; its manifest makes {num_parts}.")
    if metadata[SEAL] != seal_of(spec, content, parts):
        raise Damaged(
            f"load(): {path}: its seal is {metadata[SEAL][:40]!r}; its manifest and digests make "
            f"{seal_of(spec, content, parts)!r}. It was changed after it was written, or written by another version of KVX."
        )
    return content, parts


def _spans(path: Path, data: bytes, want: list[TensorEntry], start: int) -> list[tuple[int, int]]:
    """Where each tensor lies: in any order, each once, all of the file, no gaps."""
    if not data.isascii():
        raise BadArgument(f"load(): {path} has a name in its header that no cache has. It is damaged.")
    text, at = data.decode("ascii"), 0
    named = {entry.name: n for n, entry in enumerate(want) if not entry.name.startswith("cache.")}
    begins = [-1] * len(want)
    while found := _ENTRY.match(text, at):
        at = found.end()
        name = found[1]
        n = named.get(name, int(name[6:]) if re.fullmatch(r"cache\.[0-9]{5,7}", name) else -1)
        if not 0 <= n < len(want) or want[n].name != name or begins[n] >= 0:
            raise Incompatible(f"load(): {path} has a tensor its manifest does not describe, or has it twice: {name}.")
        begins[n] = _begin(path, want[n], found[2])
    if not _END.fullmatch(text, at):
        raise BadArgument(f"load(): {path} has no readable header: {text[at : at + 60]!r}. It is damaged, or no safetensors file.")
    end = 0
    for n in sorted(range(len(want)), key=begins.__getitem__):
        if begins[n] != end:
            lacks = (
                f"has no tensor {want[n].name}, which its manifest describes" if begins[n] < 0 else "has gaps between its tensors"
            )
            raise Incompatible(f"load(): {path} {lacks}. It was changed after it was written.")
        end += want[n].size
    return [(start + begin, entry.size) for begin, entry in zip(begins, want, strict=True)]


def _begin(path: Path, want: TensorEntry, text: str) -> int:
    try:
        entry = json.loads(text, object_pairs_hook=unique_fields)
        begin, end = entry["data_offsets"]
        numbers = [begin, end, *entry["shape"]]
        is_right = entry == {"dtype": want.kind, "shape": want.shape, "data_offsets": [begin, begin + want.size]}
        if is_right and begin >= 0 and all(type(n) is int for n in numbers):
            return int(begin)
    except (ValueError, TypeError, KeyError):  # no JSON, or not of this shape: refused below with the rest
        pass
    raise Incompatible(
        f"load(): {path}: tensor {want.name} is {text[:120]}; its manifest makes {want.kind} {want.shape} in {want.size} bytes."
    )
