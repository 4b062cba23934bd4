"""Conformance vectors of sizes: a config and options, and every number of `kvx.size` for them, or that it refuses them.

For implementations in other languages, such as the page's (kvx/page/static/size_count.js). `kvx layouts --vectors` writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from kvx.errors import KvxError
from kvx.spec.models import MODELS
from kvx.spec.size import STATES, Size, size, size_formats

_MEMORY = 80 * 10**9
_ASKED = ((8192, 1, 0), (131_072, 3, 1000), (37, 5, 20))  # context, requests, shared prefix


def size_vectors(
    configs: Mapping[str, Mapping[str, Any]] | None = None,  # by name; None: every known model
    options: Sequence[dict[str, Any]] = (),  # of kvx.size; (): each format the model takes, with other ranks, blocks and states
) -> list[dict[str, Any]]:
    found = []
    for name, config in (MODELS if configs is None else configs).items():
        model = name if configs is None else config
        cases = [_case(model, given) for given in options or _options(model)]
        found.append({"model": name, "config": config, "is_known": configs is None, "cases": cases})
    return found


def _options(model: Any) -> Iterable[dict[str, Any]]:
    try:
        formats = size_formats(model, every=True)
    except KvxError:  # its refusal is the vector
        formats = ["bf16"]
    for format in formats:
        yield {"format": format}
    yield {"format": "mxfp4"}  # also where its groups do not divide
    for format, tp in product(("bf16", "int8_per_block_head"), (2, 3, 16)):
        yield {"format": format, "tp": tp}
    yield {"format": "bf16", "block_size": 256}
    yield {"format": "bf16", "block_size": 5}
    yield {"format": "fp8_e4m3", "state_format": "bf16"}
    yield {"format": "fp8_e4m3", "index_format": "fp8_e4m3"}
    yield {"format": "f16", "state": STATES[1]}


def _case(model: Any, options: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"options": options, "size": _numbers(size(model, **options))}
    except KvxError as error:
        return {"options": options, "refused": str(error)}


def _numbers(s: Size) -> dict[str, Any]:
    facts = s.to_dict()
    answers = [
        {
            "context": context, "requests": requests, "shared_prefix": shared, "memory_bytes": _MEMORY,
            "total_bytes": s.total_bytes(context, requests, shared), "requests_fit": s.fit_requests(_MEMORY, context, shared),
            "longest_context": s.fit_context(_MEMORY, requests, shared),
        }
        for context, requests, shared in _ASKED
    ]  # fmt: skip
    kept = {name: facts[name] for name in ("token_bytes", "block_bytes", "fixed_bytes", "block_size", "index_format")}
    return {**kept, "state_format": s.state_format, "notes": list(s.notes), "is_checked": s.is_checked, "groups": facts["groups"],
            "asked": answers}  # fmt: skip
