"""A spec as the native door reads it: everything of a cache but its addresses. Laid out once and kept with the spec."""

from __future__ import annotations

import ctypes

from kvx.errors import BadArgument, a_type
from kvx.layout.planes import plane_maps, pooled_strides
from kvx.layout.pointers import CachePointers
from kvx.ops.structs import ABI_VERSION, CacheArgs, DoorSpec, PlaneArgs
from kvx.spec.cache_spec import CacheSpec, PlaneSpec

_LAYOUT_CUSTOM, _FLAG_SCALE_INLINE = 15, 1


def door_spec(spec: CacheSpec) -> int:
    """Address of the spec as the door reads it. Made once, kept with the spec."""
    try:
        address: int = spec.__dict__["_door_address"]
        return address
    except (KeyError, AttributeError):
        if not isinstance(spec, CacheSpec):
            raise BadArgument(f"spec is {a_type(spec)}; it must be a kvx.CacheSpec.") from None
        struct = _make(spec)
        spec.__dict__["_door_struct"] = struct
        spec.__dict__["_door_address"] = address = ctypes.addressof(struct)
        return address


def pooled_door_spec(spec: CacheSpec) -> DoorSpec:
    """For KV_OFFSETS: no tensors, but the strides of one dense block of K or V."""
    struct = _make(spec)
    for plane, m, strides in zip((struct.cache.k, struct.cache.v), plane_maps(spec), pooled_strides(spec), strict=True):
        plane.data.ndim = len(m.axes)
        plane.data.shape[: len(m.axes)] = m.sizes
        plane.data.stride[: len(m.axes)] = strides
    return struct


def pointer_spec(pointers: CachePointers) -> int:
    """Address of the spec of caches behind a table: strides of one cache, no address. Made once, kept with the pointers."""
    kept = pointers.__dict__
    if "_door_struct" not in kept:
        struct = pooled_door_spec(pointers.spec)
        for plane, x in zip((struct.cache.k, struct.cache.v), pointers.caches[0], strict=True):
            # Axes block, token, head, dim. Blocks are never stepped over; past the last element, they do not overlap.
            reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
            plane.data.stride[:4] = (reach, x.stride(1), x.stride(0), x.stride(2))
        kept["_door_struct"] = struct
    return ctypes.addressof(kept["_door_struct"])


def _make(spec: CacheSpec) -> DoorSpec:
    struct = DoorSpec()
    c = struct.cache
    c.version, c.struct_bytes = ABI_VERSION, ctypes.sizeof(CacheArgs)
    c.num_blocks, c.block_size, c.num_kv_heads = spec.num_blocks, spec.block_size, spec.num_kv_heads
    c.k_head_dim, c.v_head_dim = (p.head_dim for p in spec.kv)
    for i, m in enumerate(plane_maps(spec)):
        _fill_plane(c.v if i else c.k, spec.plane(i))
        d = struct.plane[i]
        d.tensor, d.ndim, d.num_axes = m.buffer, len(m.shape), len(m.axes)
        d.raw = int(spec.plane(i).format.is_in_bytes or spec.tensor_units[i] < spec.plane(i).unit_bytes)
        d.shape[: len(m.shape)] = m.shape
        d.axis_size[: len(m.sizes)] = m.sizes
        d.dim[: len(m.dim)] = m.dim
        d.mul[: len(m.mul)] = m.mul
        d.offset_dim, d.offset_mul = m.offset_dim, m.offset_mul
    return struct


def _fill_plane(plane: PlaneArgs, spec: PlaneSpec) -> None:
    fmt = spec.format
    plane.layout = _LAYOUT_CUSTOM  # axes are named by their count, 4 or 5, and strides say the order
    plane.data.dtype = fmt.element.code
    plane.granularity = int(fmt.granularity)
    plane.group_size = fmt.group_size
    if fmt.scale is not None:
        plane.scale.dtype = fmt.scale.code
        plane.scale_dtype = fmt.scale.code
    if fmt.is_inline:
        plane.flags = _FLAG_SCALE_INLINE
        plane.scale_offset = spec.head_dim * fmt.element.bits // 8
