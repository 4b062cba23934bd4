"""qkv_norm_rope_append: a fused QKV to rotated Q and a written cache, in one launch. The torch body below is the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.gate import check_apart, check_memory
from kvx.layout.pointers import CachePointers
from kvx.ops import backend as backends
from kvx.ops import compiled, native, scales
from kvx.ops.append.norm_rope import (
    PLAIN,
    SCHEMA,
    STYLES,
    NormRope,
    change,
    check,
    fill_args,
    id_of,
    is_usual,
    keep_positions,
    split,
)
from kvx.ops.append.write import write
from kvx.ops.cache_view import OPTIONAL, CacheView, Scales, scales_of
from kvx.ops.door_spec import door_spec, pointer_spec
from kvx.spec.cache_spec import CacheSpec

_CALL = "qkv_norm_rope_append"
_call, _call_usual = native.entry("kvx_door_append"), native.entry("kvx_door_append_usual")


def qkv_norm_rope_append(
    q_out: Tensor | None,  # [num_tokens, num_heads, head_dim], any strides; None: a new one
    cache: Tensor | Sequence[Tensor] | CachePointers,  # as in write, or one cache a sequence; changed in place
    qkv: Tensor | tuple[Tensor, Tensor, Tensor],  # [num_tokens, (Hq + Hkv) * head_dim + Hkv * v_head_dim], or (q, k, v)
    *,
    slot_mapping: Tensor,  # [num_tokens] int32 or int64; negative skips K and V of the token. Independent of positions
    spec: CacheSpec,
    q_weight: Tensor | None = None,  # [head_dim]; None: Q is not normed
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    rope: str = "half",  # half, interleaved or none
    cos: Tensor | None = None,  # [max_positions, rotary_dim / 2] f32 or qkv's type; None: no rotation
    sin: Tensor | None = None,
    positions: Tensor | None = None,  # [num_tokens] int32 or int64
    k_scale: Tensor | None = None,  # scales as in write
    v_scale: Tensor | None = None,
    k_tensor_scale: Tensor | None = None,
    v_tensor_scale: Tensor | None = None,
    k_token_scale: Tensor | None = None,
    v_token_scale: Tensor | None = None,
    errors: Tensor | None = None,  # one int64 on the device: bad slots and bad positions are added to it
    backend: str = "auto",
) -> Tensor:
    """Q to `q_out`, K and V into their slots, with norm and rotation as in qk_norm_rope. Returns q_out.

    K is normed and rotated in f32, rounded to qkv's type, and then encoded as `write` does: the cache holds the bits that
    `write` would store for those rows. V goes to `write` as it is. A bad slot or position raises OutOfRange on the host before
    anything is written; on a device it is counted in `errors`, and a token with a bad position is left out altogether.
    """
    fields = (q_weight, k_weight, cos, sin, positions, rope, eps, weight_offset)  # of a NormRope, which the short way need not make
    if (
        backend == "auto"
        and type(qkv) is type(q_out) is Tensor
        and k_scale is v_scale is k_token_scale is v_token_scale is k_tensor_scale is v_tensor_scale is errors is None
        and is_usual(qkv, q_out, slot_mapping, q_weight, k_weight, cos, sin, positions)
        and _append_usual(q_out, cache, qkv, slot_mapping, spec, fields)
    ):
        return q_out
    given = Scales(k_scale, v_scale, k_tensor_scale, v_tensor_scale, k_token_scale, v_token_scale)
    is_compiling = torch.compiler.is_compiling()  # the cache is then looked at when the op runs
    view = None if is_compiling else _view(cache, spec, given, errors)
    how = NormRope(*fields).checked(_CALL)
    if isinstance(qkv, (tuple, list)):
        qkv, num_heads = split(_CALL, qkv, 0, 0, 0, 0), 0
        q_shape, like = qkv[0].shape, qkv[0]
    else:
        qkv = backends.as_tensor(_CALL, "qkv", qkv)
        num_heads = _query_heads(qkv, spec)
        q_shape, like = torch.Size((qkv.shape[0], num_heads, spec.head_dim)), qkv
    if q_out is None:
        q_out = torch.empty(q_shape, dtype=like.dtype, device=like.device)
    if view is None:
        pointers, plain = (cache, []) if isinstance(cache, CachePointers) else (None, compiled.as_list(cache))
        torch.ops.kvx.qkv_norm_rope_append(
            q_out, plain, *compiled.as_addresses(pointers), compiled.as_list(qkv), slot_mapping, spec.manifest_text, *how, *given,
            errors, backend,
        )  # fmt: skip
        return q_out
    if torch.is_grad_enabled() or backend == "torch":
        check_memory(
            _CALL,
            backend,
            cache=view.tensors or (view.first,),
            qkv=(qkv,) if isinstance(qkv, Tensor) else qkv,
            q_out=q_out,
            slot_mapping=slot_mapping,
            norm_and_rope=how[:5],
            scales=view.optional,
        )
    if backends.choose(_CALL, backend, view.first) == "torch":
        rows = split(_CALL, qkv, num_heads, spec.num_kv_heads, spec.head_dim, spec.kv[1].head_dim)
        _append_torch(view, q_out, rows, slot_mapping, how)
    elif view.first.is_cuda and backends.is_debug() and errors is None:
        with backends.ErrorCounter(_CALL, view.first.device) as count:
            _append_native(_CALL, view._replace(errors=count), q_out, qkv, num_heads, slot_mapping, how)
    else:
        _append_native(_CALL, view, q_out, qkv, num_heads, slot_mapping, how)
    return q_out


_KEYWORDS = (
    *("q_weight", "k_weight", "cos", "sin", "positions", "rope", "eps", "weight_offset"),
    *(*OPTIONAL, "backend"),
)


@compiled.register(
    "qkv_norm_rope_append",
    "Tensor(a!) q_out, Tensor(b!)[] cache, Tensor(f!)? k_pointers, Tensor[] beside, Tensor[] qkv, Tensor slot_mapping, str spec",
    SCHEMA,
    "Tensor(c!)? k_scale, Tensor(d!)? v_scale, Tensor? k_tensor_scale, Tensor? v_tensor_scale",
    "Tensor? k_token_scale, Tensor? v_token_scale, Tensor(e!)? errors, str backend",
)
def _append_compiled(q_out: Tensor, cache: list[Tensor], k_pointers: Tensor | None, *rest: Any) -> None:
    beside, qkv, slots, text, *others = rest
    given, spec = dict(zip(_KEYWORDS, others, strict=True)), compiled.parse(text)
    rows = qkv[0] if len(qkv) == 1 else (qkv[0], qkv[1], qkv[2])
    to = compiled.as_pointers(k_pointers, beside, spec) or compiled.as_cache(cache)
    qkv_norm_rope_append(q_out, to, rows, slot_mapping=slots, spec=spec, **given)


def _append_usual(q_out: Tensor, cache: object, qkv: Tensor, slots: Tensor, spec: CacheSpec, fields: tuple[Any, ...]) -> bool:
    """The short way of the common call, by ids as in write. What it refuses, the long way refuses too, and names better."""
    pair: tuple[object, ...] = cache if isinstance(cache, tuple) and len(cache) == 2 else (cache, None)
    first, second = pair
    if not isinstance(first, Tensor) or not (second is None or isinstance(second, Tensor)):
        return False
    if torch.is_grad_enabled() and (first.requires_grad or (second is not None and second.requires_grad)):
        return False
    heads = q_out.shape[1] if q_out.dim() == 3 else -1
    q_weight, k_weight, cos, sin, positions, rope, eps, weight_offset = fields
    style = STYLES.get(rope, -1) if cos is not None else 0
    status = _call_usual(
        b"qkv_norm_rope_append()", door_spec(spec), id(first), id_of(second), id(q_out), id(qkv), heads, id(slots),
        id_of(q_weight), id_of(k_weight), id_of(cos), id_of(sin), id_of(positions), style, eps, weight_offset,
        native.stream_of(first),
    )  # fmt: skip
    if status > 1:
        native.raise_status(status)
    is_done: bool = status == 0
    return is_done


def append_batched(
    caches: CachePointers,  # one contiguous cache a sequence; changed in place
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim] f16, bf16 or f32
    v: Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    *,
    slot_mapping: Tensor,  # [num_tokens] int32 or int64: cache index * capacity + position; negative skips the token
    k_scale: Tensor | None = None,  # scales as in write, of the caches together: a block is a cache
    v_scale: Tensor | None = None,
    errors: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Put each token's K and V into its sequence's cache, as `write` does, in one launch for all caches."""
    if torch.compiler.is_compiling():
        torch.ops.kvx.append_batched(
            *compiled.as_addresses(caches), k, v, slot_mapping, caches.spec.manifest_text, k_scale, v_scale, errors, backend
        )  # fmt: skip
        return
    view = CacheView((), caches.spec, scales_of(k_scale, v_scale), errors, caches)
    k, v = backends.as_tensor("append_batched", "k", k), backends.as_tensor("append_batched", "v", v)
    if slot_mapping.dim() != 1 or slot_mapping.dtype not in (torch.int32, torch.int64):
        raise BadArgument(
            f"append_batched(): slot_mapping is {list(slot_mapping.shape)} {slot_mapping.dtype}; "
            "it must be [num_tokens] int32 or int64."
        )
    if torch.is_grad_enabled() or backend == "torch":
        check_memory("append_batched", backend, k=k, v=v, slot_mapping=slot_mapping, scales=view.optional)
    if backends.choose("append_batched", backend, caches.k) == "torch":
        _write_each("append_batched", view, caches, k, v, slot_mapping)
    elif k.is_cuda and backends.is_debug() and errors is None:
        with backends.ErrorCounter("append_batched", k.device) as count:
            _append_native("append_batched", view._replace(errors=count), None, (k, v), 0, slot_mapping, PLAIN)
    else:
        _append_native("append_batched", view, None, (k, v), 0, slot_mapping, PLAIN)


@compiled.register(
    "append_batched",
    "Tensor(a!) k_pointers, Tensor[] beside, Tensor k, Tensor v, Tensor slot_mapping, str spec",
    "Tensor(b!)? k_scale, Tensor(c!)? v_scale, Tensor(d!)? errors, str backend",
)
def _append_batched_compiled(
    k_pointers: Tensor, beside: list[Tensor], k: Tensor, v: Tensor, slots: Tensor, spec: str, *rest: Any
) -> None:
    given = dict(zip(("k_scale", "v_scale", "errors", "backend"), rest, strict=True))
    caches = compiled.as_pointers(k_pointers, beside, compiled.parse(spec))
    assert caches is not None
    append_batched(caches, k, v, slot_mapping=slots, **given)


def _write_each(call: str, view: CacheView, caches: CachePointers, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """The definition: a write into each cache of the tokens that are its own."""
    spec, capacity = caches.spec, caches.spec.block_size
    scales.require(call, view)
    bad = slots >= spec.num_slots
    if bool(bad.any()) and (slots.is_cpu or backends.is_debug()):
        at = int(bad.nonzero()[0])
        raise OutOfRange(
            f"{call}(): slot_mapping[{at}] is {int(slots[at])}; the cache has {spec.num_slots} slots. Nothing was written."
        )
    if view.errors is not None:
        view.errors.add_(bad.sum())
    one, named = replace(spec, num_blocks=1), view.scales._asdict()
    for i, pair in enumerate(caches.caches):
        mine = (slots >= i * capacity) & (slots < (i + 1) * capacity)
        own = {n: s[i : i + 1] if s is not None and s.dim() > 1 and s.shape[0] == spec.num_blocks else s for n, s in named.items()}
        here = torch.where(mine, slots - i * capacity, -1)
        write(tuple(x[None] for x in pair), k, v, slot_mapping=here, spec=one, backend="torch", **own)


def _view(cache: Tensor | Sequence[Tensor] | CachePointers, spec: CacheSpec, given: Scales, errors: Tensor | None) -> CacheView:
    view = CacheView.of(_CALL, cache, spec, given, errors)
    if view.pointers is None:
        view.check_count()
        return view
    if spec != view.pointers.spec:
        raise BadArgument(f"{_CALL}(): spec is not that of the pointers; pass `spec=pointers.spec`.")
    return view


def _query_heads(qkv: Tensor, spec: CacheSpec) -> int:
    """What the width of a fused QKV leaves for Q."""
    kv = spec.num_kv_heads * (spec.head_dim + spec.kv[1].head_dim)
    width = qkv.shape[1] - kv if qkv.dim() == 2 else 0
    if width < spec.head_dim or width % spec.head_dim:
        raise BadArgument(
            f"{_CALL}(): qkv is {list(qkv.shape)}; the spec's K and V take {kv} columns, and what is left for Q is no multiple of "
            f"head_dim {spec.head_dim}. Expected [num_tokens, num_heads * {spec.head_dim} + {kv}]."
        )
    return width // spec.head_dim


def _append_native(
    call: str, view: CacheView, q_out: Tensor | None, qkv: Tensor | tuple[Tensor, ...], num_heads: int, slots: Tensor, how: NormRope
) -> None:
    spec = view.spec
    scales.require(call, view)
    if "_has_written" not in spec.__dict__:
        scales.say_unset(call, view)
    rows = {"q": qkv} if isinstance(qkv, Tensor) else dict(zip("qkv"[-len(qkv) :], qkv, strict=True))
    pointers = {} if view.pointers is None else {"k_pointers": view.first, "v_pointers": view.second}
    args, keep = fill_args(
        {**rows, "q_out": q_out, "slots": slots, **how.tensors(), **pointers},
        num_q_heads=num_heads,
        num_kv_heads=spec.num_kv_heads,
        k_head_dim=spec.head_dim,
        v_head_dim=spec.kv[1].head_dim,
        **how.numbers(),
    )
    first = view.first
    (c0, c1, *rest), keep_too = native.handles(first, view.second, *view.optional)
    extra = native.extra(rest)
    door = door_spec(spec) if view.pointers is None else pointer_spec(view.pointers)
    status = _call(native.name_of(call), door, c0, c1, native.address_of(args), native.address_of(extra), native.stream_of(first))
    del keep, keep_too
    if status:
        native.raise_status(status)


def _append_torch(
    view: CacheView, q_out: Tensor, rows: tuple[Tensor, Tensor, Tensor], slots: Tensor, how: NormRope
) -> None:  # fmt: skip
    check(_CALL, rows, how)
    check_apart(_CALL, q_out=q_out)
    tokens = rows[0].shape[0]
    if tuple(slots.shape) != (tokens,) or slots.dtype not in (torch.int32, torch.int64):
        raise BadArgument(f"{_CALL}(): slot_mapping is {list(slots.shape)} {slots.dtype}; it must be [{tokens}] int32 or int64.")
    kept = keep_positions(_CALL, how, rows[0], view.errors)
    q, k, v = (change(x[kept], how, kind, kept) for kind, x in enumerate(rows))
    if q_out.shape != rows[0].shape or q_out.dtype != q.dtype:
        raise BadArgument(f"{_CALL}(): q_out is {list(q_out.shape)} {q_out.dtype}; it must be {list(rows[0].shape)} {q.dtype}.")
    k_token, v_token = (None if x is None else x[kept] for x in (view.scales.k_token_scale, view.scales.v_token_scale))
    given = view.scales._replace(k_token_scale=k_token, v_token_scale=v_token)
    if view.pointers is not None:
        _write_each(_CALL, view._replace(scales=given), view.pointers, k, v, slots[kept])
        q_out[kept] = q
        return
    try:
        write(
            view.tensors, k, v, slot_mapping=slots[kept], spec=view.spec, errors=view.errors, backend="torch", **given._asdict()
        )  # fmt: skip
    except (BadArgument, OutOfRange) as e:
        raise type(e)(str(e).replace("write()", f"{_CALL}()")) from None
    q_out[kept] = q
