"""write: put each token's K and V into its slot. The torch body below is the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvx.errors import BadArgument, OutOfRange
from kvx.layout.gate import check_apart, check_memory
from kvx.layout.planes import cache_tensors, views
from kvx.ops import backend as backends
from kvx.ops import compiled, native, scales
from kvx.ops.cache_view import OPTIONAL, CacheView, Scales
from kvx.ops.door_spec import door_spec
from kvx.quant.numbers import encode
from kvx.spec.cache_spec import CacheSpec

_call = native.entry("kvx_door_write")
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled


def write(
    cache: Tensor | Sequence[Tensor],  # the tensor, or (K, V), that spec.layout describes; changed in place
    k: Tensor,  # [num_tokens, num_kv_heads, head_dim] f16, bf16 or f32
    v: Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    *,
    slot_mapping: Tensor,  # [num_tokens] int32 or int64; negative skips the token
    spec: CacheSpec,
    k_scale: Tensor | None = None,  # spec.scale_shape(0); per token-head and per group: written
    v_scale: Tensor | None = None,  # spec.scale_shape(1)
    k_tensor_scale: Tensor | None = None,  # one f32 that multiplies every K scale (nvfp4's global scale)
    v_tensor_scale: Tensor | None = None,
    k_token_scale: Tensor | None = None,  # [num_tokens, num_kv_heads(, groups)] f32: given instead of computed
    v_token_scale: Tensor | None = None,
    errors: Tensor | None = None,  # one int64 on the device: bad slots are added to it
    backend: str = "auto",
) -> None:
    """Put each token's K and V into its slot, cast or quantised to the cache's format.

    Two tokens with the same slot: unspecified, and the result need not be all of one token. A slot past the cache raises
    OutOfRange on the host before anything is written; on a device it is skipped and counted in `errors` (kvx.debug() raises).
    Scales per tensor, head or block are the caller's to set: the first write through one that never was gives a KvxWarning.
    """
    if _is_compiling():
        torch.ops.kvx.write(
            compiled.as_list(cache), k, v, slot_mapping, spec.manifest_text, k_scale, v_scale, k_tensor_scale, v_tensor_scale,
            k_token_scale, v_token_scale, errors, backend,
        )  # fmt: skip
        return
    if type(cache) is Tensor:
        first, second = cache, None
    else:
        first, second = _pair(cache, spec)
    if not (type(k) is type(v) is type(slot_mapping) is type(first) is Tensor and (second is None or type(second) is Tensor)):
        first = backends.as_tensor("write", "cache", first)
        second = None if second is None else backends.as_tensor("write", "v_cache", second)
        k, v = backends.as_tensor("write", "k", k), backends.as_tensor("write", "v", v)
        slot_mapping = backends.as_tensor("write", "slot_mapping", slot_mapping)
    if _is_grad_enabled() and (
        k.requires_grad or v.requires_grad or first.requires_grad or (second is not None and second.requires_grad)
    ):
        check_memory("write", cache=(first, second), k=k, v=v)

    if (
        backend == "auto"
        and native.IS_EXCHANGED
        and k_scale is v_scale is k_token_scale is v_token_scale is k_tensor_scale is v_tensor_scale is errors is None
        and ((first.is_cpu and native.HAS_CPU) or (first.is_cuda and native.HAS_CUDA and not backends.is_debug()))
    ):
        # The short way for the common call: no scales, nothing to count.
        try:
            door = spec._write_door  # type: ignore[attr-defined]
        except AttributeError:  # a spec's first write this way; what is no spec is refused
            door = door_spec(spec)
            if "_has_written" not in spec.__dict__:
                scales.say_unset("write", CacheView((), spec))
            spec.__dict__["_write_door"] = door
        status = _call(
            door,
            id(first),
            0 if second is None else id(second),
            id(k),
            id(v),
            id(slot_mapping),
            0,
            native.stream_of(first),
        )
        if status:
            scales.require("write", CacheView((), spec))  # a missing scale is named better there
            native.raise_status(status)
        return None
    given = Scales(k_scale, v_scale, k_tensor_scale, v_tensor_scale, k_token_scale, v_token_scale)
    view = CacheView((first,) if second is None else (first, second), spec, given, errors)
    if _is_grad_enabled() or backend == "torch":
        check_memory("write", backend, cache=view.tensors, k=k, v=v, slot_mapping=slot_mapping, scales=view.optional)
    if "_has_written" not in spec.__dict__:
        scales.say_unset("write", view)
    if backends.choose("write", backend, first, spec) == "torch":
        check_apart("write", cache=view.tensors, scales=(k_scale, v_scale))
        return _write_torch(view, k, v, slot_mapping)
    return _write_native(view, k, v, slot_mapping)


@compiled.register(
    "write",
    "Tensor(a!)[] cache, Tensor k, Tensor v, Tensor slot_mapping, str spec, Tensor(b!)? k_scale, Tensor(c!)? v_scale",
    "Tensor? k_tensor_scale, Tensor? v_tensor_scale, Tensor? k_token_scale, Tensor? v_token_scale, Tensor(d!)? errors, str backend",
)
def _write_compiled(cache: list[Tensor], k: Tensor, v: Tensor, slots: Tensor, spec: str, *rest: Any) -> None:
    given = dict(zip((*OPTIONAL, "backend"), rest, strict=True))
    write(compiled.as_cache(cache), k, v, slot_mapping=slots, spec=compiled.parse(spec), **given)


def _pair(cache: Tensor | Sequence[Tensor], spec: CacheSpec) -> tuple[Tensor, Tensor | None]:
    if isinstance(cache, (tuple, list)) and len(cache) == 2:
        return cache[0], cache[1]
    tensors = cache_tensors(cache if isinstance(cache, (Tensor, tuple, list)) else (cache,), spec)
    return tensors[0], tensors[1] if len(tensors) > 1 else None


def _write_native(view: CacheView, k: Tensor, v: Tensor, slots: Tensor) -> None:
    view.check_count()
    first = view.first
    if first.is_cuda and backends.is_debug() and view.errors is None:
        with backends.ErrorCounter("write", first.device) as errors:
            return _write_native(view._replace(errors=errors), k, v, slots)
    scales.require("write", view)
    named = [
        x if x is None or type(x) is Tensor else backends.as_tensor("write", n, x)
        for n, x in zip(OPTIONAL, view.optional, strict=False)
    ]
    (c0, c1, hk, hv, hs, *rest), keep = native.handles(first, view.second, k, v, slots, *named)
    extra = native.extra(rest)
    status = _call(door_spec(view.spec), c0, c1, hk, hv, hs, native.address_of(extra), native.stream_of(first))
    del keep
    if status:
        native.raise_status(status)


def _write_torch(view: CacheView, k: Tensor, v: Tensor, slots: Tensor) -> None:
    spec, errors = view.spec, view.errors
    scales.require("write", view)
    _check_io(k, v, slots, spec)
    slots = slots.to(torch.int64)
    bad = slots >= spec.num_slots
    if bool(bad.any()):
        if slots.is_cpu or backends.is_debug():
            at = int(bad.nonzero()[0])
            raise OutOfRange(
                f"write(): slot_mapping[{at}] is {int(slots[at])}; the cache has {spec.num_slots} slots. Nothing was written."
            )
        if errors is not None:
            errors += bad.sum()
    kept = (slots >= 0) & ~bad
    slots = slots[kept]
    block, offset = slots // spec.block_size, slots % spec.block_size

    for i, (rows, x) in enumerate(zip(views(view.tensors, spec), (k, v), strict=True)):
        x = x[kept]
        token_scale = view.scales.plane(i)[2]
        factor = scales.settle(view, i, x, block, offset, None if token_scale is None else token_scale[kept])
        units = encode(x, spec.plane(i).format.element, factor)  # [T, H, units]
        if rows.dim() == 5:  # [block, head, dim/x, token, dim%x]
            rows = rows.permute(0, 3, 1, 2, 4)
            units = units.unflatten(-1, rows.shape[-2:])
        rows.view(units.dtype)[block, offset] = units


def _check_io(k: Tensor, v: Tensor, slots: Tensor, spec: CacheSpec) -> None:
    tokens = slots.shape[0] if slots.dim() == 1 else -1
    if slots.dtype not in (torch.int32, torch.int64) or tokens < 0:
        raise BadArgument(f"write(): slot_mapping is {list(slots.shape)} {slots.dtype}; it must be [num_tokens] int32 or int64.")
    for x, plane in zip((k, v), spec.kv, strict=True):
        want = [tokens, spec.num_kv_heads, plane.head_dim]
        if list(x.shape) != want:
            raise BadArgument(f"write(): {plane.name} is {list(x.shape)}; slot_mapping and the spec make it {want}.")
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise BadArgument(f"write(): {plane.name} is {x.dtype}; IO is float16, bfloat16 or float32.")
