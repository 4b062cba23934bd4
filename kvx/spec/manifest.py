"""A spec as JSON, with its digest: what travels with bytes. Reading one that is not ours names the differing field."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from kvx.errors import BadArgument, Incompatible
from kvx.spec.cache_spec import CacheSpec

VERSION = 1
_MOST_CHARACTERS = 1 << 20  # of a manifest: a few hundred are usual, and what it claims is believed only once it is read
_FIELDS = tuple(f.name for f in fields(CacheSpec) if f.init)


def _body(spec: CacheSpec) -> dict[str, Any]:
    body = {name: getattr(spec, name) for name in _FIELDS}
    if not spec.block_bytes:  # younger than manifests that travel: absent where it says nothing, so their digests hold
        del body["block_bytes"]
    return body


def digest(spec: CacheSpec) -> str:
    """128 bits over every field and the manifest version, as hex. Equal specs have equal digests on every machine."""
    text = json.dumps({"kvx_manifest": VERSION, **_body(spec)}, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def to_json(spec: CacheSpec, *, indent: int | None = None) -> str:
    return json.dumps({"kvx_manifest": VERSION, "digest": digest(spec), **_body(spec)}, indent=indent)


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object that says everything once: of two values for one field, readers take different ones."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"field {twice[:100]!r} stands there twice")
    return found


def from_json(text: str) -> CacheSpec:
    if not isinstance(text, str):
        raise BadArgument(f"from_json(): text is {type(text).__name__}; it is JSON, as to_json() writes it.")
    if len(text) > _MOST_CHARACTERS:
        raise BadArgument(f"from_json(): not a manifest: {len(text):,} characters; one has at most {_MOST_CHARACTERS:,}.")
    try:
        data = json.loads(text, object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets without end
        raise BadArgument(f"from_json(): not JSON: {str(error)[:200]}.") from None
    if not isinstance(data, dict) or "kvx_manifest" not in data:
        raise BadArgument('from_json(): no "kvx_manifest" field; this is not a KVX manifest.')
    if type(data["kvx_manifest"]) is not int or data["kvx_manifest"] != VERSION:
        raise Incompatible(f"from_json(): manifest version is {_short(data['kvx_manifest'])}; this library reads {VERSION}.")
    unknown = set(data) - {"kvx_manifest", "digest", *_FIELDS}
    if unknown:
        raise BadArgument(f"from_json(): unknown field {_short(sorted(unknown)[0])}; fields are {', '.join(_FIELDS)}.")
    missing = {"num_blocks", "block_size", "num_kv_heads", "head_dim"} - set(data)
    if missing:
        raise BadArgument(f"from_json(): field {sorted(missing)[0]!r} is missing.")
    spec = CacheSpec(**{name: data[name] for name in _FIELDS if name in data})
    if "digest" in data and data["digest"] != digest(spec):
        raise Incompatible(
            f"from_json(): the digest is {_short(data['digest'])} and the fields make {digest(spec)!r}; "
            "a field was changed after it was written."
        )
    return spec


def _short(value: object) -> str:
    """As in JSON, and not longer than a line: a value from outside in an error of ours."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def require_same(mine: CacheSpec, theirs: CacheSpec) -> None:
    """Raise Incompatible with the first field that differs."""
    for name in _FIELDS:
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b:
            raise Incompatible(f"manifests differ in {name}: {a!r} here, {b!r} there.")
