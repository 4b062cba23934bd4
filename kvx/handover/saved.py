"""A handover in a folder: its manifest, and a file for each part. It appears under its name when it is whole, or not at all.

Every bit is under a digest: the manifest's under its own, the blocks' under the content digest, and what stands before them in
the files under a hash in the folder's list.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from kvx.errors import BadArgument, Damaged, Incompatible, KvxError, a_type
from kvx.files import load as load_cache
from kvx.files import save as save_cache
from kvx.files import sync_folder
from kvx.handover.handover import Handover, from_manifest
from kvx.handover.manifest import MOST_CHARACTERS, read_manifest
from kvx.layout.place import buffer_sizes
from kvx.spec import Spec

_MANIFEST, _FILES = "handover.json", "files.json"
_MOST_TEXT_BYTES = {_MANIFEST: 2 * MOST_CHARACTERS, _FILES: 1 << 20}
_MOST_HEADING_BYTES = 101 << 20  # safetensors' limit, and what aligns the blocks


def save(path: str | Path, handover: Handover) -> None:
    """Write it to a folder that is not there yet. Its content is checked first."""
    path = _path("save", path)
    if not isinstance(handover, Handover):
        raise BadArgument(f"save(): handover is {a_type(handover)}; it must be a Handover, such as export_blocks() makes.")
    try:
        is_there = path.exists() or path.is_symlink()
    except OSError as error:
        raise BadArgument(f"save(): {path} cannot be made: {error.strerror}. Name a folder that can be.") from None
    if is_there:
        raise BadArgument(f"save(): {path} is there already. Give a name of its own.")
    handover.check()
    # A name of its own for every call: two that save under one name do not meet before the last step, and one of them wins it.
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise BadArgument(f"save(): {path} cannot be made: {error.strerror}. Name a folder that can be.") from None
    try:
        names = [f"part{n}.safetensors" for n in range(len(handover.parts))]
        for name, part in zip(names, handover.parts, strict=True):
            save_cache(partial / name, list(part.buffers), part.spec, check=False)
        files = [_heading(partial / name, p.spec) for name, p in zip(names, handover.parts, strict=True)]
        _write(partial / _FILES, json.dumps(files))
        _write(partial / _MANIFEST, handover.to_json())
        sync_folder(partial)
        try:
            os.rename(partial, path)
        except OSError:
            if not path.exists():
                raise
            raise BadArgument(f"save(): {path} is there already: another saved it meanwhile. Give a name of its own.") from None
        sync_folder(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load(path: str | Path, *, model: str = "") -> Handover:
    """Read a folder that save() wrote, and check its content. `model`: refuse another's. The blocks are mapped, not copied."""
    path = _path("load", path)
    text = _text(path, _MANIFEST)
    try:
        told = read_manifest(text)
    except KvxError as error:
        raise type(error)(f"load(): {path / _MANIFEST}: {str(error).removeprefix('handover: ')}") from None
    if model and told.parts[0].spec.model != model:
        raise Incompatible(f"load(): {path} is of model {told.parts[0].spec.model!r}; here it is {model!r}. It was not read.")
    listed = _text(path, _FILES)
    try:
        files: Any = json.loads(listed)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"load(): {path}: {_FILES} is no JSON: {str(error)[:200]}.") from None
    if not isinstance(files, list) or len(files) != len(told.parts):
        raise Damaged(f"load(): {path}: {_FILES} lists no file for each of {len(told.parts)} parts.")
    buffers = []
    for n, (part, stated) in enumerate(zip(told.parts, files, strict=True)):
        name = path / f"part{n}.safetensors"
        found = _heading(name, part.spec)
        if found != stated:
            raise Damaged(
                f"load(): {name} has {found['bytes']} bytes and a heading {found['heading']}; when it was saved it was "
                f"{str(stated)[:200]}. It is cut short, changed, or another handover's."
            )
        buffers.append(load_cache(name, expect=part.spec, verify=False).buffers)  # the handover's own seal is checked below
    handover = from_manifest(text, buffers)
    handover.check()
    return handover


def _path(call: str, path: str | Path) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise BadArgument(f"{call}(): path is {path!r}; it names a folder.") from None


def _heading(path: Path, spec: Spec) -> dict[str, str | int]:
    """A file's size, and a hash of all that stands before its blocks."""
    blocks = sum(count * size for count, size in buffer_sizes(spec))
    try:
        if not path.is_file():  # opening a pipe would wait for whoever writes into it
            raise BadArgument(f"load(): there is no file {path}; kvx.handover.save() writes it.")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            heading, left = hashlib.blake2b(digest_size=16), size - blocks
            if left > _MOST_HEADING_BYTES:
                raise Damaged(
                    f"load(): {path} has {size:,} bytes; the manifest's blocks have {blocks:,} of them. It is of another."
                )
            while left > 0 and (data := file.read(min(left, 1 << 20))):
                heading.update(data)
                left -= len(data)
    except OSError as error:
        raise BadArgument(f"load(): {path} cannot be read: {error.strerror}.") from None
    return {"bytes": size, "heading": heading.hexdigest()}


def _text(path: Path, name: str) -> str:
    try:
        size = (path / name).stat().st_size
        if not (path / name).is_file():
            raise BadArgument(f"load(): {path / name} is no file; kvx.handover.save() writes one.")
        if size <= _MOST_TEXT_BYTES[name]:
            return (path / name).read_text(encoding="utf-8")
    except OSError as error:
        raise BadArgument(f"load(): {path} has no readable {name}; kvx.handover.save() writes it. {error}") from None
    except UnicodeDecodeError as error:
        raise Damaged(f"load(): {path}: {name} is no text: {error}.") from None
    raise BadArgument(f"load(): {path}: {name} has {size:,} bytes; those of a handover have under {_MOST_TEXT_BYTES[name]:,}.")


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
