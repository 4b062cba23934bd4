"""A plan whose destination is not memory but coordinates: what the content digest walks.

Every byte of a cache has a number that no layout, sharding or block size changes: byte of the row, head, K or V, layer. The
token's position is not in it; it comes from the tables when the plan runs.

    bits 0-23 byte of the row   24-39 head   40 K or V   41-56 layer

A row is its elements in the order of dim, then, at ROW_SCALE, its scale as stored (one word a group), then at ROW_TENSOR the
tensor scale. Scales that many rows share are counted for each of them, so that it does not matter how many do.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from kvx.errors import Unsupported
from kvx.layout.box import Box, BoxDigit, Side
from kvx.layout.match import inline_scale_place, pieces, reach
from kvx.layout.place import Digit, Place, places, scale_places, tensor_scale_buffers
from kvx.layout.plan import Plan
from kvx.spec.cache_spec import CacheSpec

ROW_SCALE, ROW_TENSOR = 1 << 23, 1 << 22
_HEAD, _PLANE, _LAYER = 1 << 24, 1 << 40, 1 << 41
WORD = 16
VIRTUAL_BYTES = 1 << 57


def has_whole_words(spec: CacheSpec) -> bool:
    """Whether the bytes of every word of a row stand together; otherwise convert to another layout first."""
    for place in places(spec):
        inner = place.of("dim")[-1]
        if inner.stride != place.unit_bytes or (len(place.of("dim")) > 1 and inner.size * place.unit_bytes % WORD):
            return False
    return True


@lru_cache(maxsize=256)
def coordinate_plan(spec: CacheSpec) -> Plan:
    """The walk over a cache whose rows have whole words."""
    if spec.layer_start + spec.num_layers > 1 << 16 or spec.head_start + spec.num_kv_heads > 1 << 16:
        raise Unsupported("digest(): layers and heads are numbered to 65,535, and this cache has more.")
    boxes: list[Box] = []
    for i in range(spec.num_planes):
        plane, place = spec.plane(i), places(spec)[i]
        units = plane.head_dim * plane.format.element.bits // (8 * place.unit_bytes)
        if units * place.unit_bytes >= ROW_TENSOR:
            raise Unsupported(f"digest(): rows of {units * place.unit_bytes} bytes; they are numbered to {ROW_TENSOR}.")
        boxes += _boxes(spec, place, i, units, 0, place.unit_bytes)
        scale = inline_scale_place(spec, i) or scale_places(spec)[i]
        if scale is not None:
            boxes += _boxes(spec, scale, i, plane.format.num_groups(plane.head_dim), ROW_SCALE, WORD)
        if plane.format.has_tensor_scale:
            layers = Place((Digit("layer", 1, spec.num_layers, 4, 0),), tensor_scale_buffers(spec)[i], 0, 4)
            boxes += _boxes(spec, layers, i, 1, ROW_SCALE + ROW_TENSOR, WORD)
    return Plan((spec,), (spec,), spec.block_size, tuple(boxes))


def _boxes(spec: CacheSpec, place: Place, plane: int, units: int, first: int, unit_step: int) -> list[Box]:
    """Boxes of one plane's elements or scales: at the source as they lie, at the destination their coordinates."""
    steps = {"layer": _LAYER, "head": _HEAD, "token": 0, "dim": unit_step}
    counts = {"layer": spec.num_layers, "head": spec.num_kv_heads, "token": spec.block_size, "dim": units}
    start = first + plane * _PLANE + spec.layer_start * _LAYER + spec.head_start * _HEAD
    digits: list[BoxDigit] = []
    for axis, count in counts.items():
        split = place.of(axis)[0].divisor if place.of(axis) else 1
        (_, parts), *rest = pieces(count, 0, split, 0, 1)
        assert not rest  # an axis starts at 0 and its split divides it
        for divisor, size in parts:
            byte, buffers = reach(place, axis, divisor) if size > 1 and place.of(axis) else (0, 0)
            token = divisor if axis == "token" else 0
            digits.append(BoxDigit(size, byte, steps[axis] * divisor, buffers, 0, token))
    block = place.of("block")
    stride, step = (block[0].stride, block[0].step) if block else (0, 0)
    src = Side(place.offset, stride, spec.block_size, 0, 0, place.buffer, step)
    return [Box(src, Side(start, 0, spec.block_size, 0, 0, 0, 0), place.unit_bytes, tuple(digits))]


def coordinate_bytes(spec: CacheSpec) -> bytes:
    """The plan for the library: one virtual destination, as large as coordinates go."""
    return coordinate_plan(spec).to_bytes(destination=((1, VIRTUAL_BYTES),), content=content_number(spec))


@lru_cache(maxsize=256)
def content_number(spec: CacheSpec) -> int:
    """32 bits of what rows hold: head size and format of each plane, whatever the layout. Inline scales are the same scales."""
    text = ";".join(
        f"{p.name},{p.head_dim},{p.format.element},{int(p.format.granularity)},{p.format.scale or '-'},{p.format.group_size}"
        for p in spec.planes[: spec.num_planes]
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
