"""A plan whose destination is not memory but coordinates: what the content digest walks.

Every byte of a cache has a number that no layout, sharding or block size changes: byte of the row, head, plane, layer. The
token's position is not in it; it comes from the tables when the plan runs.

    bits 0-23 byte of the row   24-39 head, or what else ranks share out   40 K or V   41-56 layer

Of more than two planes, bit 40 and bits 53-56 are the plane's number, and 41-52 the layer. Where a plane has axes beside those,
its rows stand one behind the other in the first 22 bits, each from a whole word on.

A row is its elements in their order, then, at ROW_SCALE, its scale as stored (one word a group), then at ROW_TENSOR the
tensor scale. Scales that many rows share are counted for each of them, so that it does not matter how many do.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from math import prod

from kvx.errors import Unsupported
from kvx.layout.box import Box, BoxDigit, Side
from kvx.layout.match import inline_scale_place, pieces, reach
from kvx.layout.place import Digit, Place, places, scale_places, tensor_scale_buffers
from kvx.layout.plan import Plan
from kvx.spec.cache_spec import PlaneSpec, Spec

ROW_SCALE, ROW_TENSOR = 1 << 23, 1 << 22
_SHARD, _LAYER = 1 << 24, 1 << 41
_MOST_LAYERS = {True: 1 << 16, False: 1 << 12}  # of two planes, of more
WORD = 16
VIRTUAL_BYTES = 1 << 57


def has_whole_words(spec: Spec) -> bool:
    """Whether the bytes of every word of a row stand together; otherwise convert to another layout first."""
    for plane, place in zip(spec.planes, places(spec), strict=True):
        row = place.of(plane.row_axis)
        inner = row[-1]
        if inner.stride != place.unit_bytes or (len(row) > 1 and inner.size * place.unit_bytes % WORD):
            return False
    return True


@lru_cache(maxsize=256)
def coordinate_plan(spec: Spec) -> Plan:
    """The walk over a cache whose rows have whole words."""
    most, shard = _MOST_LAYERS[spec.num_planes <= 2], max(s.first + s.size for p in spec.planes for s in p.shares)
    if spec.layer_start + spec.num_layers > most or shard > 1 << 16:
        raise Unsupported(
            f"digest(): layers are numbered to {most - 1:,} and {spec.plane(0).shard_axis}s to 65,535, and this cache has more."
        )
    boxes: list[Box] = []
    for i, (plane, place) in enumerate(zip(spec.planes, places(spec), strict=True)):
        units = plane.row_elements * plane.format.element.bits // (8 * place.unit_bytes)
        row_bytes = units * place.unit_bytes
        held = row_bytes * prod(size for _, size in _numbered(plane))
        if held >= ROW_TENSOR:
            raise Unsupported(f"digest(): rows of {held} bytes; they are numbered to {ROW_TENSOR}.")
        boxes += _boxes(spec, place, i, units, 0, place.unit_bytes)
        scale = inline_scale_place(spec, i) or scale_places(spec)[i]
        if scale is not None:
            boxes += _boxes(spec, scale, i, plane.format.num_groups(plane.row_elements), ROW_SCALE, WORD)
        if plane.format.has_tensor_scale:
            layers = Place((Digit("layer", 1, spec.num_layers, 4, 0),), tensor_scale_buffers(spec)[i], 0, 4)
            boxes += _boxes(spec, layers, i, 1, ROW_SCALE + ROW_TENSOR, WORD)
    return Plan((spec,), (spec,), spec.block_size, tuple(boxes))


def _numbered(plane: PlaneSpec) -> list[tuple[str, int]]:
    """Axes whose rows stand one behind the other in a coordinate: none of K and V."""
    return [(axis, size) for axis, size in plane.axes[:-1] if axis not in ("token", plane.shard_axis)]


def _boxes(spec: Spec, place: Place, index: int, units: int, first: int, unit_step: int) -> list[Box]:
    """Boxes of one plane's elements or scales: at the source as they lie, at the destination their coordinates."""
    plane = spec.plane(index)
    rows, behind = {}, -(-units * unit_step // WORD) * WORD
    for axis, size in reversed(_numbered(plane)):
        rows[axis] = (size, behind)
        behind *= size
    number = (index & 1) << 40 | (index >> 1) << 53
    block = place.of("block")
    stride, step = (block[0].stride, block[0].step) if block else (0, 0)
    found: list[Box] = []
    for share in plane.shares:
        axes = {  # how many, the first of them, and from one to the next in a coordinate
            "layer": (spec.num_layers, 0, _LAYER),
            plane.shard_axis: (share.size, plane.local(share.first), _SHARD),
            **({"token": (spec.block_size, 0, 0)} if "token" in plane.sizes else {}),
            **{axis: (size, 0, behind) for axis, (size, behind) in reversed(rows.items())},
            plane.row_axis: (units, 0, unit_step),
        }
        start = first + number + spec.layer_start * _LAYER + share.first * _SHARD
        src = Side(place.offset, stride, spec.block_size, 0, 0, place.buffer, step)
        found += _walk(place, src, Side(start, 0, spec.block_size, 0, 0, 0, 0), axes)
    return found


def _walk(place: Place, src: Side, dst: Side, axes: dict[str, tuple[int, int, int]]) -> list[Box]:
    """Boxes through all axes; more than one where a share begins or ends inside a pack of a split axis."""
    partial: list[tuple[Side, Side, tuple[BoxDigit, ...]]] = [(src, dst, ())]
    for axis, (count, at, coordinate) in axes.items():
        split = place.of(axis)[0].divisor if place.of(axis) else 1
        grown = []
        for here, there, digits in partial:
            for begin, parts in pieces(count, at, split, 0, 1):
                byte, buffers = reach(place, axis, at + begin) if place.of(axis) else (0, 0)
                new = tuple(_digit(place, axis, divisor, size, coordinate) for divisor, size in parts)
                moved = here._replace(offset=here.offset + byte, buffer=here.buffer + buffers)
                grown.append((moved, there._replace(offset=there.offset + begin * coordinate), digits + new))
        partial = grown
    return [Box(here, there, place.unit_bytes, digits) for here, there, digits in partial]


def _digit(place: Place, axis: str, divisor: int, size: int, coordinate: int) -> BoxDigit:
    byte, buffers = reach(place, axis, divisor) if size > 1 and place.of(axis) else (0, 0)
    return BoxDigit(size, byte, coordinate * divisor, buffers, 0, divisor if axis == "token" else 0)


def coordinate_bytes(spec: Spec) -> bytes:
    """The plan for the library: one virtual destination, as large as coordinates go."""
    return coordinate_plan(spec).to_bytes(destination=((1, VIRTUAL_BYTES),), content=content_number(spec))


@lru_cache(maxsize=256)
def content_number(spec: Spec) -> int:
    """32 bits of what rows hold: head size and format of each plane, whatever the layout. Inline scales are the same scales."""
    text = ";".join(
        f"{p.name},{p.row_elements},{p.format.element},{int(p.format.granularity)},{p.format.scale or '-'},{p.format.group_size}"
        + "".join(f",{axis} {size}" for axis, size in _numbered(p))
        for p in spec.planes
    )
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
