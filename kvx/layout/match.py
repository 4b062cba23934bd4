"""How a plane of one spec becomes that of another: axes matched by name, cut where the two sides do not step evenly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvx.errors import BadArgument, Unsupported
from kvx.layout.box import Box, BoxDigit, Cell, CellFormat, Side
from kvx.layout.place import Digit, Place, places, scale_places, tensor_scale_buffers
from kvx.layout.shards import Rectangle
from kvx.spec.cache_spec import PlaneSpec, Spec


class PlaneMatch(NamedTuple):
    """Two places whose contents match, and how many units a row has. With a cell, elements are the row's own business."""

    src: Spec
    dst: Spec
    plane: int
    a: Place
    b: Place
    units: int
    cell: Cell | None = None
    a_scale: Place | None = None
    b_scale: Place | None = None
    reorder: RopeReorder | None = None


class RopeReorder(NamedTuple):
    """Pairs of a row in another order at the destination: steps, in units, to the next pair and to a pair's other number."""

    units: int  # how many of the row
    src: tuple[int, int]
    dst: tuple[int, int]


def reorder_of(src: Spec, dst: Spec, rope: tuple[str, str], rotary_dim: int) -> RopeReorder | None:
    size = rotary_dim or src.plane(0).row_elements
    if len(rope) != 2 or any(r not in ("half", "interleaved") for r in rope):
        raise BadArgument(f'plan(): rope is {rope!r}; it must be ("half" or "interleaved" of src, the same of dst).')
    if rope[0] == rope[1]:
        return None
    if not 0 < size <= src.plane(0).row_elements or size % 2:
        raise BadArgument(f"plan(): rotary_dim is {size}; it must be even and at most head_dim {src.plane(0).row_elements}.")
    for spec in (src, dst):
        fmt = spec.plane(0).format
        if (
            len(places(spec)[0].of(spec.plane(0).row_axis)) > 1
            or fmt.element.bits < 8
            or fmt.group_size
            or fmt.is_inline
            or src.plane(0).format != fmt
        ):
            raise Unsupported(
                f"plan(): rope pairs are reordered in rows that stay whole and keep their format; {spec.layout!r}, {fmt} splits "
                "them or changes it. Convert in two steps."
            )
    steps = {"half": (1, size // 2), "interleaved": (2, 1)}
    return RopeReorder(size, steps[rope[0]], steps[rope[1]])


def plane_matches(src: Spec, dst: Spec, plane: int, reorder: RopeReorder | None) -> list[PlaneMatch]:
    a, b = places(src)[plane], places(dst)[plane]
    mine, theirs = src.plane(plane), dst.plane(plane)
    if replace(mine.format, name="", is_inline=False) != replace(theirs.format, name="", is_inline=False):
        for there in (mine, theirs):
            if there.format.element.is_moved_only:
                raise Unsupported(
                    f"plan(): {mine.name} is {mine.format} at the source and {theirs.format} at the destination; "
                    f"{there.format} converts bit for bit only. Give both sides that format."
                )
        cell = Cell(_row_format(src, plane), _row_format(dst, plane), mine.row_elements)
        return [PlaneMatch(src, dst, plane, a, b, 1, cell, scale_places(src)[plane], scale_places(dst)[plane])]
    if mine.format == theirs.format and mine.format.is_inline:
        return [PlaneMatch(src, dst, plane, a, b, mine.row_units)]  # scales travel in their rows
    found = [PlaneMatch(src, dst, plane, a, b, mine.row_elements * mine.format.element.bits // (8 * a.unit_bytes), reorder=reorder)]
    a_scale, b_scale = (_scale_place(spec, plane) for spec in (src, dst))
    if a_scale is not None and b_scale is not None:
        groups = mine.format.num_groups(mine.row_elements) if a_scale.of(mine.row_axis) else 1
        found.append(PlaneMatch(src, dst, plane, a_scale, b_scale, groups))
    if mine.format.has_tensor_scale:
        layers = (Digit("layer", 1, max(src.num_layers, dst.num_layers), 4, 0),)
        a, b = (Place(layers, tensor_scale_buffers(spec)[plane], 0, 4) for spec in (src, dst))
        found.append(PlaneMatch(src, dst, plane, a, b, 1))
    return found


def _scale_place(spec: Spec, plane: int) -> Place | None:
    """Where a plane's scales lie, apart or inside its rows."""
    return inline_scale_place(spec, plane) or scale_places(spec)[plane]


def inline_scale_place(spec: Spec, plane: int) -> Place | None:
    this, place = spec.plane(plane), places(spec)[plane]
    if not this.format.is_inline or this.format.scale is None:
        return None
    size = this.format.scale.bits // 8
    group = Digit(this.row_axis, 1, this.format.num_groups(this.row_elements), size, 0)
    digits = tuple(d for d in place.digits if d.axis != this.row_axis)
    return Place((*digits, group), place.buffer, place.offset + this.row_elements * this.format.element.bits // 8, size)


def _row_format(spec: Spec, plane: int) -> CellFormat:
    this, place, scale = spec.plane(plane), places(spec)[plane], scale_places(spec)[plane]
    fmt, row = this.format, place.of(this.row_axis)
    units = fmt.element.bits // 8 if fmt.element.bits >= 8 else 1
    inner = row[-1]
    element = inner.stride * units // place.unit_bytes  # where rows are counted in bytes, elements still step by their size
    pack = inner.size * place.unit_bytes * 8 // fmt.element.bits if len(row) > 1 else this.row_elements
    strides = {d.axis: d.stride for d in scale.digits} if scale is not None else {}
    scale_bytes = fmt.scale.bits // 8 if fmt.scale is not None else 0
    return CellFormat(
        dtype=fmt.element.code,
        granularity=int(fmt.granularity),
        scale_dtype=fmt.scale.code if fmt.scale is not None else 0,
        group_size=fmt.group_size or this.row_elements,
        pack=pack,
        is_inline=int(fmt.is_inline),
        dim_outer=row[0].stride if len(row) > 1 else 0,
        dim_inner=element,
        scale_offset=this.row_elements * fmt.element.bits // 8 if fmt.is_inline else 0,
        scale_block=strides.get("block", 0),
        scale_token=strides.get("token", 0),
        scale_group=scale_bytes if fmt.is_inline else strides.get(this.row_axis, 0),
        scale_buffer=scale.buffer if scale is not None else -1,
        tensor_scale_buffer=tensor_scale_buffers(spec)[plane],
        first_layer=0,
    )


def boxes(matched: PlaneMatch, r: Rectangle, unit: int, src_buffer: int, dst_buffer: int) -> Iterator[Box]:
    src, dst, a, b = matched.src, matched.dst, matched.a, matched.b
    mine, theirs = src.plane(matched.plane), dst.plane(matched.plane)
    row = mine.row_axis
    ranges = (  # axis, elements, first at the source, first at the destination
        ("layer", r.layer_end - r.layer, r.layer - src.layer_start, r.layer - dst.layer_start),
        (r.axis, r.end - r.first, mine.local(r.first), theirs.local(r.first)),
        *((axis, unit if axis == "token" else size, 0, 0) for axis, size in _shared_axes(mine)),
        (row, matched.units, 0, 0),
    )
    start = _side(a, src, src_buffer), _side(b, dst, dst_buffer), matched.cell, ()
    partial: list[tuple[Side, Side, Cell | None, tuple[BoxDigit, ...]]] = [start]
    for axis, count, first_a, first_b in ranges:
        if not a.of(axis) or not b.of(axis):  # one scale for all of them
            continue
        grown = []
        if axis == row and matched.reorder is not None:
            partial = [
                x for at_a, at_b, cell, digits in partial for x in _reordered(matched, matched.reorder, at_a, at_b, cell, digits)
            ]
            continue
        for at_a, at_b, cell, digits in partial:
            for begin, parts in pieces(count, first_a, a.of(axis)[0].divisor, first_b, b.of(axis)[0].divisor):
                byte_a, step_a = reach(a, axis, first_a + begin)
                byte_b, step_b = reach(b, axis, first_b + begin)
                grown.append(
                    (
                        at_a._replace(offset=at_a.offset + byte_a, buffer=at_a.buffer + step_a),
                        at_b._replace(offset=at_b.offset + byte_b, buffer=at_b.buffer + step_b),
                        _moved(cell, matched, axis, first_a + begin, first_b + begin),
                        digits + tuple(_digit(matched, axis, divisor, size) for divisor, size in parts),
                    )
                )
        partial = grown
    for at_a, at_b, cell, digits in partial:
        if cell is not None:
            cell = cell._replace(src=_in_table(cell.src, src_buffer), dst=_in_table(cell.dst, dst_buffer))
        yield Box(at_a, at_b, a.unit_bytes, digits, cell)


def _shared_axes(plane: PlaneSpec) -> list[tuple[str, int]]:
    """All but the one that ranks share out and the row's."""
    return [(axis, size) for axis, size in plane.axes[:-1] if axis != plane.shard_axis]


_Partial = tuple[Side, Side, Cell | None, tuple[BoxDigit, ...]]


def _reordered(
    matched: PlaneMatch, reorder: RopeReorder, at_a: Side, at_b: Side, cell: Cell | None, digits: tuple[BoxDigit, ...]
) -> list[_Partial]:
    """The rotated part of rows, pair by pair, and the rest as it is."""
    unit, rest = matched.a.unit_bytes, matched.units - reorder.units
    pair, other = (BoxDigit(n, reorder.src[i] * unit, reorder.dst[i] * unit, 0, 0) for i, n in enumerate((reorder.units // 2, 2)))
    out: list[_Partial] = [(at_a, at_b, cell, (*digits, pair, other))]
    if rest:
        a, b = (at._replace(offset=at.offset + reorder.units * unit) for at in (at_a, at_b))
        out.append((a, b, cell, (*digits, BoxDigit(rest, unit, unit, 0, 0))))
    return out


def _moved(cell: Cell | None, matched: PlaneMatch, axis: str, a: int, b: int) -> Cell | None:
    """The cell with its scales moved on to index a of an axis at the source and b at the destination."""
    if cell is None:
        return None
    sides = []
    for row, scale, index in ((cell.src, matched.a_scale, a), (cell.dst, matched.b_scale, b)):
        offset = row.scale_offset + (reach(scale, axis, index)[0] if scale is not None else 0)
        sides.append(row._replace(scale_offset=offset, first_layer=index if axis == "layer" else row.first_layer))
    return cell._replace(src=sides[0], dst=sides[1])


def _in_table(row: CellFormat, buffer: int) -> CellFormat:
    """Buffer numbers of the whole table, which holds the shards before this one too."""
    scale, tensor = (n + buffer if n >= 0 else -1 for n in (row.scale_buffer, row.tensor_scale_buffer))
    return row._replace(scale_buffer=scale, tensor_scale_buffer=tensor)


def join(planes: Sequence[list[Box]]) -> list[Box]:
    """All planes' boxes; where the second's is the first's moved on by an even step, the two as one: so K and V of one order."""
    if len(planes) != 2:
        return [box for plane in planes for box in plane]
    ks, vs = planes
    out: list[Box] = []
    for k, v in zip(ks, vs, strict=False):
        src, dst = ((b.offset - a.offset, b.buffer - a.buffer) for a, b in ((k.src, v.src), (k.dst, v.dst)))
        same = all(a._replace(offset=0, buffer=0) == b._replace(offset=0, buffer=0) for a, b in ((k.src, v.src), (k.dst, v.dst)))
        if same and k.cell is v.cell is None and k.run_bytes == v.run_bytes and k.digits == v.digits and min(*src, *dst) >= 0:
            out.append(k._replace(digits=(BoxDigit(2, src[0], dst[0], src[1], dst[1], 0), *k.digits)))
        else:
            out += [k, v]
    return out + ks[len(vs) :] + vs[len(ks) :]


def _side(place: Place, spec: Spec, buffer: int) -> Side:
    block = place.of("block")
    token = place.of("token")
    split = token[0].divisor if len(token) > 1 else spec.block_size
    outer = token[0].stride if len(token) > 1 else 0
    inner = token[-1].stride if token else 0
    stride, step = (block[0].stride, block[0].step) if block else (0, 0)
    return Side(place.offset, stride, split, outer, inner, place.buffer + buffer, step)


def reach(place: Place, axis: str, index: int) -> tuple[int, int]:
    """(bytes, buffers) from index 0 of an axis to another."""
    byte = step = 0
    for d in place.of(axis):
        i = index // d.divisor % d.size
        byte, step = byte + i * d.stride, step + i * d.step
    return byte, step


def _digit(matched: PlaneMatch, axis: str, divisor: int, size: int) -> BoxDigit:
    reached = [
        reach(p, axis, divisor) if p is not None and size > 1 else (0, 0)
        for p in (matched.a, matched.b, matched.a_scale, matched.b_scale)
    ]
    (src, src_step), (dst, dst_step), (src_scale, _), (dst_scale, _) = reached
    token, layer = (divisor if axis == name else 0 for name in ("token", "layer"))
    return BoxDigit(size, src, dst, src_step, dst_step, token, layer, src_scale, dst_scale)


def pieces(count: int, a: int, split_a: int, b: int, split_b: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Cuts [0, count) into pieces on which both sides step evenly: (first, [(divisor, size), ...], outer first).

    Index i stands at a + i on an axis split by split_a (1 = whole) and at b + i on one split by split_b.
    """
    begin = 0
    while begin < count:
        left = count - begin
        # A split takes part unless the piece stays inside one of its parts.
        active = sorted({s for s, at in ((split_a, a + begin), (split_b, b + begin)) if s > 1 and at % s + left > s})
        aligned = all((at + begin) % s == 0 for s, at in ((split_a, a), (split_b, b)) if s in active)
        nested = len(active) < 2 or active[1] % active[0] == 0
        if not active:
            yield begin, [(1, left)]
            return
        if aligned and nested and left >= active[-1]:
            size = left // active[-1] * active[-1]
            divisors = [*reversed(active), 1]
            outer = size
            parts = []
            for divisor in divisors:
                parts.append((divisor, outer // divisor))
                outer = divisor
            yield begin, parts
        else:  # up to the next boundary of either side
            size = min(left, *(s - (at + begin) % s for s, at in ((split_a, a), (split_b, b)) if s > 1))
            yield begin, [(1, size)]
        begin += size
