"""Scales inside an op: which tensors a format needs, where a row's scale stands, and settling it when a row is written."""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from kvx.errors import BadArgument, KvxWarning
from kvx.layout.buffers import is_unset
from kvx.layout.planes import plane_maps, views
from kvx.ops.cache_view import NO_SCALES, CacheView
from kvx.quant.scales import finite_amax, load_scale, round_scale, scale_from_amax
from kvx.spec.cache_spec import PlaneSpec
from kvx.spec.formats import Granularity

_SHAPE_OF = {
    Granularity.BLOCK: "[num_blocks]",
    Granularity.HEAD: "[num_kv_heads]",
    Granularity.BLOCK_HEAD: "[num_blocks, num_kv_heads]",
    Granularity.TOKEN_HEAD: "[num_blocks, block_size, num_kv_heads]",
    Granularity.GROUP: "[num_blocks, block_size, num_kv_heads, groups]",
}


@cache
def _types(name: str) -> tuple[torch.dtype, ...]:
    """What a scale of this type may be given as. Of one byte: as bytes too."""
    own = getattr(torch, name, torch.uint8)
    return (own, torch.uint8) if own.itemsize == 1 else (own,)


def require(call: str, view: CacheView) -> None:
    """Refuse scales that the format does not have, and miss the ones it does."""
    spec = view.spec
    if view.scales is NO_SCALES and "_takes_no_scales" in spec.__dict__:
        return  # asked before, and kept with the spec
    for i, plane in enumerate(spec.kv):
        scale, tensor_scale, token_scale = view.scales.plane(i)
        fmt = plane.format
        shape = spec.scale_shape(i)
        if scale is not None and shape is None:
            why = "keeps its scales inline" if fmt.is_inline else "takes no scales"
            raise BadArgument(f"{call}(): {plane.name}_scale is given, but format {fmt} {why}.")
        if scale is None and shape is not None and fmt.granularity > Granularity.TENSOR:
            raise BadArgument(f"{call}(): format {fmt} needs {plane.name}_scale {_SHAPE_OF[fmt.granularity]} = {list(shape)}.")
        if scale is not None and fmt.scale is not None and scale.dtype not in _types(fmt.scale.torch_name):
            raise BadArgument(f"{call}(): {plane.name}_scale is {scale.dtype}; format {fmt} makes it torch.{fmt.scale.torch_name}.")
        if (
            scale is not None
            and shape is not None
            and tuple(scale.shape) != shape
            and not (shape == () and tuple(scale.shape) == (1,))
        ):
            raise BadArgument(f"{call}(): {plane.name}_scale is {list(scale.shape)}; format {fmt} makes it {list(shape)}.")
        if tensor_scale is not None and not fmt.element.is_quantised:
            raise BadArgument(f"{call}(): {plane.name}_tensor_scale is given, but format {fmt} takes no scales.")
        if token_scale is not None and not fmt.granularity.is_stored_per_token:
            raise BadArgument(f"{call}(): {plane.name}_token_scale is given, but format {fmt} has no scale per token.")
    if view.scales is NO_SCALES:
        spec.__dict__["_takes_no_scales"] = True


def say_unset(call: str, view: CacheView) -> None:
    """At a spec's first write: that a scale it goes by was never set. A look at the values would wait for the device."""
    view.spec.__dict__["_has_written"] = True
    for i, plane in enumerate(view.spec.kv):
        fmt, (scale, tensor_scale, _) = plane.format, view.scales.plane(i)
        if not fmt.element.is_quantised or fmt.granularity.is_stored_per_token or fmt.element.name == "fp8_e5m2":
            continue
        if is_unset(scale) if scale is not None else tensor_scale is None:
            warnings.warn(unset_words(call, plane), KvxWarning, stacklevel=3)
            return


def unset_words(call: str, plane: PlaneSpec) -> str:
    fmt = plane.format
    least = "" if "fp8" in fmt.element.name else ", and values under 0.5 become 0"
    return (
        f"{call}(): the {plane.name}_scale of format {fmt} was never set: 1 is used. Values over {fmt.element.qmax:g} are "
        f'clipped{least}. Compute it from data: kvx.scale_from_amax(kvx.amax({plane.name}), "{fmt}"), or use '
        "a format with a scale per token, such as int8_per_token_head. If the scale is meant to be 1: fill_(1)."
    )


def settle(view: CacheView, index: int, x: Tensor, block: Tensor, offset: Tensor, given: Tensor | None) -> Tensor | None:
    """The factor for each element of x [T, H, D], stored first where it is per token. None is 1. `given`: scales of these rows."""
    plane = view.spec.plane(index)
    fmt, (scale, tensor_scale, _) = plane.format, view.scales.plane(index)
    if not fmt.granularity.is_stored_per_token:
        return read(view, index, block, offset)
    assert fmt.scale is not None
    groups = fmt.num_groups(plane.head_dim)
    if given is None:
        s = scale_from_amax(finite_amax(x.unflatten(-1, (groups, -1)), -1), fmt, tensor_scale)  # [T, H, G]
    else:
        s = given.to(torch.float32).reshape(*x.shape[:2], groups)
    stored = round_scale(s, fmt.scale)
    target = inline_view(view, index) if fmt.is_inline else scale
    assert target is not None
    if target.dim() == 3:
        stored = stored.squeeze(-1)
    target.view(stored.dtype)[block, offset] = stored
    return read(view, index, block, offset)


def read(view: CacheView, index: int, block: Tensor, offset: Tensor) -> Tensor | None:
    """The factor of each row at (block, offset), shaped to multiply [..., H, D]. None is 1."""
    fmt = view.spec.plane(index).format
    scale, tensor_scale, _ = view.scales.plane(index)
    if fmt.scale is None:
        return None
    if fmt.is_inline:
        scale = inline_view(view, index)
        scale = scale if fmt.group_size else scale.squeeze(-1)
    if scale is None:
        return tensor_scale
    kind = fmt.granularity
    at = {
        Granularity.TENSOR: lambda s: s.reshape(()),
        Granularity.BLOCK: lambda s: s[block][..., None, None],
        Granularity.HEAD: lambda s: s[:, None],
        Granularity.BLOCK_HEAD: lambda s: s[block][..., None],
        Granularity.TOKEN_HEAD: lambda s: s[block, offset][..., None],
        Granularity.GROUP: lambda s: s[block, offset],
    }[kind](scale)
    factor = load_scale(at, fmt.scale)
    if tensor_scale is not None:
        factor = factor * tensor_scale
    return factor.repeat_interleave(fmt.group_size, dim=-1) if kind == Granularity.GROUP else factor


def inline_view(view: CacheView, index: int) -> Tensor:
    """Inline scales as [num_blocks, block_size, num_kv_heads, groups] of the scale's type: a view into the cells."""
    caches, spec = view.tensors, view.spec
    plane = spec.plane(index)
    scale = plane.format.scale
    assert scale is not None
    cells = views(caches, spec)[index]  # bytes [block, token, head, dim]
    size = scale.bits // 8
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}.get(scale.name, torch.uint8)
    elements = plane.head_dim * plane.format.element.bits // 8
    # as_strided by hand: Tensor.view(dtype) wants the last dimension to divide, and a cell's bytes are elements and scales.
    raw = caches[plane_maps(spec)[index].buffer]
    flat = torch.empty(0, dtype=dtype, device=raw.device).set_(raw.untyped_storage())
    byte_offset = cells.storage_offset() + elements
    strides = [s // size for s in cells.stride()[:3]]
    return flat.as_strided((*cells.shape[:3], plane.format.num_groups(plane.head_dim)), (*strides, 1), byte_offset // size)
