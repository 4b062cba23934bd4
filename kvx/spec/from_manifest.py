"""The spec that a manifest says. Anything may stand in its text; reading one that is not ours names the differing field."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from itertools import pairwise
from typing import Any

from kvx.errors import BadArgument, Incompatible, a_type
from kvx.spec.cache_spec import CacheSpec, PlaneSpec, Share, Spec
from kvx.spec.formats import Format
from kvx.spec.manifest import VERSION, digest, unique_fields
from kvx.spec.state_spec import StateSpec

_MOST_CHARACTERS = 1 << 20  # of a manifest: a few hundred are usual, and what it claims is believed only once it is read
_FIELDS = tuple(f.name for f in fields(CacheSpec) if f.init)
_STATE_FIELDS = tuple(f.name for f in fields(StateSpec) if f.init)
_MOST_PLANES = 64
_MOST_SHARES = 64  # of a plane: a convolution has three
_MOST_LETTERS = 100  # of a plane's, an axis' or a format's name
_PLANE_FIELDS = ("name", "format", "axes", "shard_axis", "shares")


def from_json(text: str) -> CacheSpec:
    """The spec of K and V that a manifest says. Of states it is spec_from_json()."""
    spec = spec_from_json(text)
    if not isinstance(spec, CacheSpec):
        raise BadArgument("from_json(): the manifest is of states (it has planes); what reads it takes K and V.")
    return spec


def spec_from_json(text: str) -> Spec:
    """The spec that a manifest says, of K and V or of states."""
    if not isinstance(text, str):
        raise BadArgument(f"from_json(): text is {a_type(text)}; it must be JSON, as to_json() writes it.")
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
    is_state = "planes" in data
    names = _STATE_FIELDS if is_state else _FIELDS
    unknown = set(data) - {"kvx_manifest", "digest", *names}
    if unknown:
        raise BadArgument(f"from_json(): unknown field {_short(sorted(unknown)[0])}; fields are {', '.join(names)}.")
    missing = ({"num_blocks", "layout"} if is_state else {"num_blocks", "block_size", "num_kv_heads", "head_dim"}) - set(data)
    if missing:
        raise BadArgument(f"from_json(): field {sorted(missing)[0]!r} is missing.")
    given = {name: data[name] for name in names if name in data}
    if "positions" in given and is_state:
        given["positions"] = _positions(given["positions"])
    spec: Spec = StateSpec(**given | {"planes": _planes(data["planes"])}) if is_state else CacheSpec(**given)
    if "digest" in data and data["digest"] != digest(spec):
        raise Incompatible(
            f"from_json(): the digest is {_short(data['digest'])} and the fields make {digest(spec)!r}; "
            "a field was changed after it was written."
        )
    return spec


def _positions(text: object) -> tuple[int, ...]:
    """Of a manifest's text: numbers with spaces between them."""
    if not isinstance(text, str) or not re.fullmatch(r"[0-9]{1,18}( [0-9]{1,18})*", text):
        raise BadArgument(
            f"from_json(): positions are {_short(text)}; they must be numbers of tokens with spaces between, as text."
        )
    return tuple(map(int, text.split()))


def _planes(text: object) -> tuple[PlaneSpec, ...]:
    """Of a manifest's text, in which anything may stand."""
    try:
        told = json.loads(text, object_pairs_hook=unique_fields) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        told = None
    if (
        not isinstance(told, list)
        or not told
        or not all(isinstance(p, dict) and set(p) == set(_PLANE_FIELDS) for p in told[: _MOST_PLANES + 1])
    ):
        raise BadArgument(f"from_json(): planes are {_short(text)}; they must be a list of {', '.join(_PLANE_FIELDS)}, as text.")
    if len(told) > _MOST_PLANES:
        raise BadArgument(f"from_json(): {len(told):,} planes; a spec has at most {_MOST_PLANES}.")
    return tuple(map(_plane, told))


def _plane(told: dict[str, Any]) -> PlaneSpec:
    axes, shares, words = told["axes"], told["shares"], [told[name] for name in ("name", "format", "shard_axis")]
    is_axes = isinstance(axes, list) and all(isinstance(a, list) and [type(x) for x in a] == [str, int] for a in axes)
    is_shares = isinstance(shares, list) and all(isinstance(s, list) and [type(x) for x in s] == [int] * 3 for s in shares)
    if not is_axes or not is_shares or not shares or any(type(word) is not str for word in words):
        raise BadArgument(f"from_json(): a plane is {_short(told)}; its axes are (name, size), its shares (first, size, unit).")
    if len({a[0] for a in axes}) != len(axes) or len(shares) > _MOST_SHARES or max(map(len, words)) > _MOST_LETTERS:
        raise BadArgument(
            f"from_json(): plane {_short(told['name'])} has an axis twice, {len(shares)} shares (at most {_MOST_SHARES}), or a "
            f"name of over {_MOST_LETTERS} letters."
        )
    numbers = [n for share in shares for n in share] + [size for _, size in axes]
    if any(not 0 <= n < 2**31 for n in numbers) or any(share[1] < 1 or share[2] < 1 for share in shares):
        raise BadArgument(f"from_json(): plane {_short(told['name'])} has a share of no size, or a number past {2**31 - 1}.")
    held = sorted((share[0], share[0] + share[1]) for share in shares)
    if any(first < end for (_, end), (first, _) in pairwise(held)):
        raise BadArgument(f"from_json(): plane {_short(told['name'])} has shares that overlap: {_short(shares)}.")
    name, format_name, shard_axis = words
    return PlaneSpec(name, tuple(map(tuple, axes)), Format.named(format_name), shard_axis, tuple(Share(*s) for s in shares))


def _short(value: object) -> str:
    """As in JSON, and not longer than a line: a value from outside in an error of ours."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def require_same(mine: Spec, theirs: Spec) -> None:
    """Raise Incompatible with the first field that differs."""
    if type(mine) is not type(theirs):
        raise Incompatible(f"manifests differ: {a_type(mine)} here, {a_type(theirs)} there.")
    for name in _STATE_FIELDS if isinstance(mine, StateSpec) else _FIELDS:
        a, b = getattr(mine, name), getattr(theirs, name)
        if a != b and (name != "positions" or a):  # who says no positions takes any
            raise Incompatible(f"manifests differ in {name}: {a!r} here, {b!r} there.")
