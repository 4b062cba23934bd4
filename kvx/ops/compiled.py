"""torch.compile: ops as opaque custom ops, taken only while compiling, so that eager calls never pay for them.

An op registers its own form beside its body: the schema that the compiler sees, and what runs in its place, which calls the op
again, eagerly. Specs cross as their manifest (a string), tables as their tensors, caches behind pointers as the addresses of K
and the tensors beside them. An op that writes into such caches says that it changes those addresses: its order among the others is
kept by that, and the caches, which the graph must not copy, are never changed in its eyes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvx.errors import InternalError
from kvx.layout.pointers import CachePointers
from kvx.ops.registry import OPS
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.from_manifest import from_json

Body = Callable[..., None]
parse = lru_cache(maxsize=256)(from_json)
SCHEMAS: dict[str, str] = {}  # of every custom op, by its name
_library = torch.library.Library("kvx", "DEF")


def register(name: str, *schema: str) -> Callable[[Body], Body]:
    """Make kvx::`name` of the function below: it changes what the schema marks, and gives nothing."""
    if not any(op.compiled == name for op in OPS.values()):
        raise InternalError(f"kvx::{name} is no op's form in kvx/ops/registry.py; say so in the op's row.")

    def define(body: Body) -> Body:
        SCHEMAS[name] = f"{name}({', '.join(schema)}) -> ()"
        _library.define(SCHEMAS[name])
        _library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"kvx::{name}", _nothing, lib=_library)
        return body

    return define


def _nothing(*args: Any) -> None:
    """What a compiler runs to learn shapes: results are tensors it has."""


def as_cache(cache: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return cache[0] if len(cache) == 1 else tuple(cache)


def as_list(cache: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [cache] if isinstance(cache, Tensor) else list(cache)


def as_addresses(pointers: CachePointers | None) -> tuple[Tensor | None, list[Tensor]]:
    """Addresses of K, and what else caches behind pointers have."""
    if pointers is None:
        return None, []
    return pointers.k, [pointers.v, pointers.ids, *(x for pair in pointers.caches for x in pair)]


def as_pointers(k: Tensor | None, beside: list[Tensor], spec: CacheSpec) -> CachePointers | None:
    if k is None:
        return None
    v, ids, *flat = beside
    return CachePointers(k, v, ids, tuple(zip(flat[::2], flat[1::2], strict=True)), spec)
