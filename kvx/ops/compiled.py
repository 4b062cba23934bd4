"""torch.compile: the same ops as opaque custom ops, taken only while compiling, so that eager calls never pay for them.

Specs cross as their manifest (a string), tables as their tensors. The custom op calls the public function again, eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvx.spec.cache_spec import CacheSpec
from kvx.spec.manifest import from_json
from kvx.tables import TABLES

_parse = lru_cache(maxsize=256)(from_json)
_library = torch.library.Library("kvx", "DEF")
_library.define(
    "write(Tensor(a!)[] cache, Tensor k, Tensor v, Tensor slot_mapping, str spec, "
    "Tensor(b!)? k_scale, Tensor(c!)? v_scale, Tensor? k_tensor_scale, Tensor? v_tensor_scale, "
    "Tensor? k_token_scale, Tensor? v_token_scale, Tensor(d!)? errors, str backend) -> ()"
)
_library.define(
    "gather(Tensor[] cache, Tensor[] table, Tensor(a!) k, Tensor(b!) v, str spec, int kind, int max_seq_len, Tensor? cu_seqlens, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? k_tensor_scale, Tensor? v_tensor_scale, Tensor(c!)? errors, str backend) -> ()"
)
_library.define(
    "amax(Tensor(a!) out, Tensor x, str per, Tensor? slot_mapping, int num_blocks, int block_size, "
    "Tensor(b!)? errors, str backend) -> ()"
)
_library.define(
    "attention(Tensor q, Tensor[] cache, Tensor[] table, Tensor? cu_seqlens, Tensor(a!) out, Tensor(b!) lse, str spec, int kind, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? k_tensor_scale, Tensor? v_tensor_scale, Tensor(c!)? errors, Tensor? sinks, "
    "Tensor(d!)? workspace, float scale, bool causal, int window, float soft_cap, int max_query_len, int max_seq_len, "
    "bool planned, bool latent, str backend) -> ()"
)
# Arguments past `spec` are keyword arguments of the public function, in the order of the schema.
_WRITE = ("k_scale", "v_scale", "k_tensor_scale", "v_tensor_scale", "k_token_scale", "v_token_scale", "errors", "backend")
_GATHER = ("max_seq_len", "cu_seqlens", "k_scale", "v_scale", "k_tensor_scale", "v_tensor_scale", "errors", "backend")
_ATTENTION = (
    *("k_scale", "v_scale", "k_tensor_scale", "v_tensor_scale", "errors", "sinks", "workspace", "scale", "causal", "window"),
    *("soft_cap", "max_query_len", "max_seq_len", "planned", "latent", "backend"),
)


@torch.library.impl(_library, "write", "CompositeExplicitAutograd")
def _write(cache, k, v, slots, spec, *rest):
    from kvx.ops.write import write as eager

    eager(_as_cache(cache), k, v, slot_mapping=slots, spec=_parse(spec), **dict(zip(_WRITE, rest, strict=True)))


@torch.library.impl(_library, "gather", "CompositeExplicitAutograd")
def _gather(cache, table, k, v, spec, kind, *rest):
    from kvx.ops.gather import gather as eager

    eager(_as_cache(cache), TABLES[kind](*table), spec=_parse(spec), out=(k, v), **dict(zip(_GATHER, rest, strict=True)))


@torch.library.impl(_library, "amax", "CompositeExplicitAutograd")
def _amax(out, x, per, slots, num_blocks, block_size, errors, backend):
    from kvx.ops.amax import amax as eager

    eager(x, per, slot_mapping=slots, num_blocks=num_blocks, block_size=block_size, out=out, errors=errors, backend=backend)


@torch.library.impl(_library, "attention", "CompositeExplicitAutograd")
def _attention(q, cache, table, cu, out, lse, spec, kind, *rest):
    from kvx.ops.attention import attention_decode, attention_varlen
    from kvx.ops.attention_mla import attention_mla

    given = dict(zip(_ATTENTION, rest, strict=True), spec=_parse(spec), out=out, lse=lse)
    if given.pop("latent"):
        attention_mla(q, _as_cache(cache), TABLES[kind](*table), cu_seqlens=cu, **given)
    elif cu is None:
        del given["max_query_len"]
        attention_decode(q, _as_cache(cache), TABLES[kind](*table), **given)
    else:
        attention_varlen(q, _as_cache(cache), TABLES[kind](*table), cu_seqlens=cu, **given)


for _name in ("write", "gather", "amax", "attention"):
    torch.library.register_fake(f"kvx::{_name}", lambda *args: None, lib=_library)


def write(cache, k, v, slots, spec: CacheSpec, extra: tuple[Tensor | None, ...], backend: str) -> None:
    torch.ops.kvx.write(_as_list(cache), k, v, slots, spec.manifest_text, *extra, backend)


def gather(cache, table, k, v, spec: CacheSpec, max_seq_len: int, cu, extra: tuple[Tensor | None, ...], backend: str) -> None:
    torch.ops.kvx.gather(
        _as_list(cache),
        list(table.tensors),
        k,
        v,
        spec.manifest_text,
        table.code,
        max_seq_len,
        cu,
        *extra[:4],
        extra[-1],
        backend,
    )


def amax(out, x, per: str, slots, num_blocks: int, block_size: int, errors, backend: str) -> None:
    torch.ops.kvx.amax(out, x, per, slots, num_blocks, block_size, errors, backend)


def attention(q, cache, table, cu, out, lse, spec: CacheSpec, extra, sinks, workspace, options, backend: str) -> None:
    torch.ops.kvx.attention(
        q, _as_list(cache), list(table.tensors), cu, out, lse, spec.manifest_text, table.code, *extra[:4], extra[-1], sinks,
        workspace, *options, backend,
    )  # fmt: skip


def _as_cache(cache: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    return cache[0] if len(cache) == 1 else tuple(cache)


def _as_list(cache: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [cache] if isinstance(cache, Tensor) else list(cache)
