"""A handover's manifest: JSON that says whose K and V its bytes are. Every field is under two digests.

`digest` is over all of the text's fields, so that damage to the manifest shows without the bytes. A part's `seal` is its content
digest plus a hash of all the other fields, so that bytes and fields hold to each other: a manifest that was edited, whatever was
made anew in it, or that was another's, gives a content that the bytes do not have.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvx.cache.tokens import token_ids
from kvx.errors import BadArgument, Damaged, Incompatible, a_type
from kvx.handover.facts import Facts, PartFacts, check_facts, check_parts, negative
from kvx.ops.move.digest import Digest
from kvx.spec import StateSpec, spec_from_json, to_json
from kvx.spec.manifest import unique_fields

VERSION = 1
# Of a manifest: two million tokens. A text may claim anything, and what it says in Python takes up to 13 times its length.
MOST_CHARACTERS = 1 << 24
_MOST_PARTS = 1 << 12
_FIELDS = {"kvx_handover", "tokens", "whole", "parts", "seals", "digest"}
_PART_FIELDS = {"manifest", "layers", "window", "first_block", "first_token"}
_DIGEST = re.compile(r"[0-9a-f]{32}")


class Manifest(NamedTuple):
    tokens: NDArray[np.int32]
    parts: tuple[PartFacts, ...]
    whole: tuple[Digest, ...]  # of a shard: the content of the parts of all shards together


def write_manifest(
    tokens: NDArray[np.int32], parts: Sequence[Facts], contents: Sequence[Digest], whole: Sequence[Digest]
) -> str:  # fmt: skip
    body: dict[str, Any] = {
        "kvx_handover": VERSION,
        "tokens": tokens.tolist(),
        "whole": [str(d) for d in whole],
        "parts": [_part_fields(p) for p in parts],
    }
    body["seals"] = [str(content + fields) for content, fields in zip(contents, _hashes(body), strict=True)]
    return json.dumps({**body, "digest": _hash(body).hex()})


def _part_fields(p: Facts) -> dict[str, Any]:
    fields: dict[str, Any] = {"manifest": to_json(p.spec), "layers": list(p.layers), "window": p.window}
    fields |= {"first_block": p.first_block, "first_token": p.first_token}
    # Younger than manifests that travel: absent where it says nothing.
    return fields | {"block_tokens": p.block_tokens} if isinstance(p.spec, StateSpec) else fields


def read_manifest(text: str) -> Manifest:
    """Its fields, checked against each other. No memory is taken for the bytes it speaks of."""
    if not isinstance(text, str):
        raise BadArgument(f"handover: the manifest is {a_type(text)}; it must be JSON text, as to_json() writes it.")
    if len(text) > MOST_CHARACTERS or text.count("{") + text.count("[") > 8 * _MOST_PARTS:
        raise BadArgument(
            f"handover: the manifest has {len(text):,} characters and {text.count('{') + text.count('['):,} brackets; one of up to "
            f"{_MOST_PARTS:,} parts has at most {MOST_CHARACTERS:,} and {8 * _MOST_PARTS:,}."
        )
    try:
        body = json.loads(text, object_pairs_hook=unique_fields)
    except (ValueError, TypeError, RecursionError) as error:  # also numbers of thousands of digits, and brackets without end
        raise BadArgument(f"handover: the manifest is no JSON: {str(error)[:200]}.") from None
    version = body.get("kvx_handover") if isinstance(body, dict) else type(body).__name__
    if type(version) is not int or version != VERSION:
        raise Incompatible(f"handover: the manifest's version is {str(version)[:100]!r}; this library reads {VERSION}.")
    _require_fields("the manifest", body, _FIELDS)
    stated = body.pop("digest")
    if stated != _hash(body).hex():
        raise Damaged(
            f"handover: the manifest's digest is {str(stated)[:100]!r} and its fields make {_hash(body).hex()!r}. "
            "It was changed on the way. Ask for it again."
        )
    tokens, told, seals = (_list_of(body, name) for name in ("tokens", "parts", "seals"))
    whole = tuple(map(_digest_from, _list_of(body, "whole")))
    if any(type(t) is not int for t in tokens):
        raise BadArgument("handover: tokens of the manifest are not all whole numbers.")
    ids = token_ids("handover", tokens, least=1)
    if not told or len(seals) != len(told) or len(whole) not in (0, len(told)):
        raise BadArgument(f"handover: the manifest has {len(told)} parts, {len(seals)} seals and {len(whole)} digests of wholes.")
    contents = map(_digest_from, seals)
    del body["seals"]
    parts = tuple(_part(p, content + negative(fields)) for p, content, fields in zip(told, contents, _hashes(body), strict=True))
    check_parts(len(ids), parts)
    return Manifest(ids, parts, whole)


def _part(told: Any, content: Digest) -> PartFacts:
    younger = {"block_tokens"} & set(told) if isinstance(told, dict) else set()
    _require_fields("a part of the manifest", told, _PART_FIELDS | younger)
    if not isinstance(told["manifest"], str):
        raise BadArgument(f"handover: a part's manifest is {a_type(told['manifest'])}; it must be text.")
    layers = _list_of(told, "layers")
    where = (told["window"], told["first_block"], told["first_token"])
    facts = PartFacts(spec_from_json(told["manifest"]), tuple(layers), *where, content, told.get("block_tokens", 0))
    check_facts(facts)
    return facts


def _require_fields(what: str, body: Any, names: set[str]) -> None:
    odd = sorted(set(body) ^ names) if isinstance(body, dict) else [type(body).__name__]
    if odd:
        raise BadArgument(f"handover: {what} has other fields than {', '.join(sorted(names))}: {str(odd[0])[:100]!r}.")


def _list_of(body: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(body[name], list):
        raise BadArgument(f"handover: {name} of the manifest is {a_type(body[name])}; it must be a list.")
    return list(body[name])


def _hashes(body: dict[str, Any]) -> list[Digest]:
    """A hash of the fields for each part."""
    base = _hash(body)
    out = []
    for n in range(len(body["parts"])):
        data = hashlib.blake2b(base + n.to_bytes(4, "little"), digest_size=16).digest()
        out.append(Digest(int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")))
    return out


def _hash(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _digest_from(text: Any) -> Digest:
    if not isinstance(text, str) or not _DIGEST.fullmatch(text):
        raise BadArgument(f"handover: a digest of the manifest is {str(text)[:100]!r}; it has 32 digits of 0 to f.")
    return Digest(int(text[:16], 16), int(text[16:], 16))
