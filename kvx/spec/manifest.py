"""A spec as JSON, with its digest: what travels with bytes. kvx/spec/from_manifest.py reads it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol

VERSION = 1


class Described(Protocol):
    """A spec, as far as its manifest goes."""

    def manifest_fields(self) -> dict[str, str | int]: ...


def digest(spec: Described) -> str:
    """128 bits over every field and the manifest version, as hex. Equal specs have equal digests on every machine."""
    text = json.dumps({"kvx_manifest": VERSION, **spec.manifest_fields()}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def to_json(spec: Described, *, indent: int | None = None) -> str:
    """A spec as JSON with its digest, as it travels with bytes. `from_json` reads it."""
    return json.dumps({"kvx_manifest": VERSION, "digest": digest(spec), **spec.manifest_fields()}, indent=indent)


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that says everything once: of two values for one field, readers take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"field {twice[:100]!r} stands there twice")
    return found
