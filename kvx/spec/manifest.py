"""A spec as JSON, with its digest: what travels with bytes. Reading one that is not ours names the differing field."""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from typing import Any

from kvx.errors import BadArgument, Incompatible
from kvx.spec.cache_spec import CacheSpec

VERSION = 1
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


def from_json(text: str) -> CacheSpec:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets without end
        raise BadArgument(f"from_json(): not JSON: {str(error)[:200]}.") from None
    if not isinstance(data, dict) or "kvx_manifest" not in data:
        raise BadArgument('from_json(): no "kvx_manifest" field; this is not a KVX manifest.')
    if type(data["kvx_manifest"]) is not int or data["kvx_manifest"] != VERSION:
        raise Incompatible(f"from_json(): manifest version is {data['kvx_manifest']!r}; this library reads {VERSION}.")
    unknown = set(data) - {"kvx_manifest", "digest", *_FIELDS}
    if unknown:
        raise BadArgument(f"from_json(): unknown field {sorted(unknown)[0]!r}; fields are {', '.join(_FIELDS)}.")
    missing = {"num_blocks", "block_size", "num_kv_heads", "head_dim"} - set(data)
    if missing:
        raise BadArgument(f"from_json(): field {sorted(missing)[0]!r} is missing.")
    spec = CacheSpec(**{name: data[name] for name in _FIELDS if name in data})
    if "digest" in data and data["digest"] != digest(spec):
        raise Incompatible(
            f"from_json(): the digest is {data['digest']!r} and the fields make {digest(spec)!r}; "
            "a field was changed after it was written."
        )
    return spec


def require_same(mine: CacheSpec, theirs: CacheSpec) -> None:
    """Raise Incompatible with the first field that differs."""
    for name in _FIELDS:
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b:
            raise Incompatible(f"manifests differ in {name}: {a!r} here, {b!r} there.")
