"""torch.compile across norm, rotation, append and merge: opaque custom ops, as compiled.py has them for write and gather."""

from __future__ import annotations

import torch
from torch import Tensor

from kvx.ops.compiled import _as_cache, _as_list, _parse
from kvx.spec.cache_spec import CacheSpec

_library = torch.library.Library("kvx", "FRAGMENT")
_HOW = "Tensor? q_weight, Tensor? k_weight, Tensor? cos, Tensor? sin, Tensor? positions, str rope, float eps, float weight_offset, "
_library.define(f"norm_rope(Tensor(a!)[] outs, Tensor[] rows, {_HOW}Tensor(b!)? errors, str call, str backend) -> ()")
_library.define(
    "qkv_norm_rope_append(Tensor(a!) q_out, Tensor(b!)[] cache, Tensor[] qkv, Tensor slot_mapping, str spec, "
    f"{_HOW}Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? k_tensor_scale, Tensor? v_tensor_scale, Tensor? k_token_scale, "
    "Tensor? v_token_scale, Tensor(e!)? errors, str backend) -> ()"
)
_library.define("merge_attention(Tensor(a!) out, Tensor(b!) lse, Tensor outs, Tensor lses, Tensor? sinks, str backend) -> ()")
_NAMES = (
    *("q_weight", "k_weight", "cos", "sin", "positions", "rope", "eps", "weight_offset"),
    *("k_scale", "v_scale", "k_tensor_scale", "v_tensor_scale", "k_token_scale", "v_token_scale", "errors", "backend"),
)


@torch.library.impl(_library, "norm_rope", "CompositeExplicitAutograd")
def _norm_rope(outs, rows, q_weight, k_weight, cos, sin, positions, rope, eps, weight_offset, errors, call, backend):
    from kvx.ops.norm_rope import NormRope
    from kvx.ops.norm_rope import norm_rope as eager

    how = NormRope.of(call, q_weight, k_weight, cos, sin, positions, rope, eps, weight_offset)
    eager(call, tuple(outs), tuple(rows), how, errors, backend)


@torch.library.impl(_library, "qkv_norm_rope_append", "CompositeExplicitAutograd")
def _append(q_out, cache, qkv, slots, spec, *rest):
    from kvx.ops.append import qkv_norm_rope_append as eager

    given = dict(zip(_NAMES, rest, strict=True))
    eager(q_out, _as_cache(cache), _as_cache(qkv), slot_mapping=slots, spec=_parse(spec), **given)


@torch.library.impl(_library, "merge_attention", "CompositeExplicitAutograd")
def _merge(out, lse, outs, lses, sinks, backend):
    from kvx.ops.merge_attention import merge_attention as eager

    eager(outs, lses, sinks=sinks, out=(out, lse), backend=backend)


for _name in ("norm_rope", "qkv_norm_rope_append", "merge_attention"):
    torch.library.register_fake(f"kvx::{_name}", lambda *args: None, lib=_library)


def norm_rope(outs, rows, how: tuple, errors: Tensor | None, call: str, backend: str) -> None:
    """`how`: the fields of a NormRope, whose style is none where nothing rotates."""
    torch.ops.kvx.norm_rope(list(outs), list(rows), *how, errors, call, backend)


def append(q_out, cache, qkv, slots, spec: CacheSpec, how: tuple, extra: tuple, backend: str) -> None:
    torch.ops.kvx.qkv_norm_rope_append(
        q_out, _as_list(cache), _as_list(qkv), slots, spec.manifest_text, *how, *extra, backend
    )  # fmt: skip


def merge(out, lse, outs, lses, sinks, backend: str) -> None:
    torch.ops.kvx.merge_attention(out, lse, outs, lses, sinks, backend)
