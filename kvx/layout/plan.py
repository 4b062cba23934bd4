"""The planner: two specs in, boxes out. A box is a rectangle of elements through which both sides step evenly.

Axes are matched by name, shards by the layers and heads they hold. What is adjacent on both sides folds into runs. A plan holds no
address: it is frozen, printable, and as bytes (`to_bytes`) it is what kvx_plan_load reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import NamedTuple

from kvx.errors import BadArgument, Unsupported
from kvx.layout.place import Digit, Place, buffer_bytes, buffer_sizes, num_buffers, places, scale_places, tensor_scale_buffers
from kvx.spec.cache_spec import CacheSpec
from kvx.spec.dtypes import DTYPES
from kvx.spec.formats import Granularity

MAX_DIGITS = 12
_BITS = {t.code: t.bits for t in DTYPES.values()}
_FORMAT = struct.Struct("<iiiIIIqqqqqqiiq")
_MAGIC, _VERSION = 0x5058564B, 1
_HEADER, _SIDE, _DIGIT = struct.Struct("<IIQIIIIqqqqIIII"), struct.Struct("<qqqqqii"), struct.Struct("<qqqiiqqqq")


class BoxDigit(NamedTuple):
    size: int
    src: int  # bytes from one to the next
    dst: int
    src_step: int  # buffers from one to the next
    dst_step: int
    token: int = 0  # tokens from one to the next; 0 = not an axis of tokens
    layer: int = 0  # layers from one to the next; 0 = not an axis of layers
    src_scale: int = 0  # cells: bytes from one to the next among the scales
    dst_scale: int = 0


class Side(NamedTuple):
    offset: int
    block: int  # bytes from block to block
    token_split: int
    token_outer: int
    token_inner: int
    buffer: int
    block_step: int  # buffers from block to block


class RowFormat(NamedTuple):
    """One side of a row whose elements change their format; the fields of kvx_plan_format_t."""

    dtype: int
    granularity: int
    scale_dtype: int
    group_size: int
    pack: int
    is_inline: int
    dim_outer: int
    dim_inner: int
    scale_offset: int
    scale_block: int
    scale_token: int
    scale_group: int
    scale_buffer: int
    tensor_scale_buffer: int
    first_layer: int


class Cell(NamedTuple):
    src: RowFormat
    dst: RowFormat
    head_dim: int

    @property
    def row_bytes(self) -> int:
        """Of the elements of one row at the destination."""
        return self.head_dim * _BITS[self.dst.dtype] // 8


class Box(NamedTuple):
    src: Side
    dst: Side
    run_bytes: int
    digits: tuple[BoxDigit, ...]
    cell: Cell | None = None  # None: bytes move as they are

    @property
    def bytes(self) -> int:
        """Moved for one unit of tokens."""
        count = self.run_bytes if self.cell is None else self.cell.row_bytes
        for d in self.digits:
            count *= d.size
        return count


class Run(NamedTuple):
    """`pieces` of `bytes` bytes, each `src_stride` and `dst_stride` after the one before."""

    src_buffer: int
    src_offset: int
    dst_buffer: int
    dst_offset: int
    bytes: int
    pieces: int = 1
    src_stride: int = 0
    dst_stride: int = 0


@dataclass(frozen=True)
class Plan:
    src: tuple[CacheSpec, ...]  # one spec a shard
    dst: tuple[CacheSpec, ...]
    unit_tokens: int  # tokens moved for one pair of blocks
    boxes: tuple[Box, ...] = field(repr=False)

    @cached_property
    def unit_bytes(self) -> int:
        """Payload of one unit of tokens, all layers and heads."""
        return sum(box.bytes for box in self.boxes)

    def buffer_bytes(self, side: str) -> tuple[int, ...]:
        """The sizes of all shards' buffers, in order. `side` is src or dst."""
        return tuple(size for spec in (self.src if side == "src" else self.dst) for size in buffer_bytes(spec))

    def runs(self, src_blocks: Sequence[int], dst_blocks: Sequence[int], *, strided: bool = False) -> Iterator[Run]:
        """What a transport has to move for these pairs of blocks: plain pieces, or strided ones (fewer)."""
        if self.unit_tokens != self.src[0].block_size or self.unit_tokens != self.dst[0].block_size:
            raise Unsupported("runs(): the block sizes differ. A transport moves whole blocks: plan with one block size.")
        if len(src_blocks) != len(dst_blocks):
            raise BadArgument(f"runs(): {len(src_blocks)} source blocks and {len(dst_blocks)} destination blocks.")
        if any(box.cell is not None for box in self.boxes):
            raise Unsupported("runs(): the formats differ, so bytes do not move as they are. Convert first, then move.")
        for box in map(fold, self.boxes):
            inner = box.digits[0] if strided and box.digits and not (box.digits[0].src_step or box.digits[0].dst_step) else None
            outer = box.digits[1:] if inner else box.digits
            for s, d in zip(src_blocks, dst_blocks, strict=True):
                for src, dst, src_buffer, dst_buffer in _walk(outer):
                    yield Run(
                        box.src.buffer + s * box.src.block_step + src_buffer,
                        box.src.offset + s * box.src.block + src,
                        box.dst.buffer + d * box.dst.block_step + dst_buffer,
                        box.dst.offset + d * box.dst.block + dst,
                        box.run_bytes,
                        *((inner.size, inner.src, inner.dst) if inner else ()),
                    )

    def explain(self, num_blocks: int = 1) -> str:
        """The plan in words and a table."""
        lines = [
            f"{len(self.src)} -> {len(self.dst)} shards, {self.src[0].layout!r} -> {self.dst[0].layout!r}",
            f"blocks of {self.src[0].block_size} -> {self.dst[0].block_size} tokens, moved {self.unit_tokens} at a time; "
            f"{self.unit_bytes * num_blocks:,} bytes for {num_blocks} x {self.unit_tokens} tokens",
            f"{'box':>4}  {'family':<12} {'run':>9}  {'runs':>9}  digits (size: bytes at source / destination)",
        ]
        for n, box in enumerate(map(fold, self.boxes)):
            runs = box.bytes // (box.run_bytes if box.cell is None else box.cell.row_bytes)
            digits = ", ".join(
                f"{d.size}: {d.src or f'{d.src_step} buf'}/{d.dst or f'{d.dst_step} buf'}" for d in reversed(box.digits)
            )
            lines.append(f"{n:>4}  {family(box):<12} {box.run_bytes:>7} B  {runs:>9}  {digits or 'none'}")
        return "\n".join(lines)

    def to_bytes(self, *, destination: tuple[tuple[int, int], ...] = ()) -> bytes:
        """The flat form of include/kvx_abi.h: header, boxes, cells, buffer sizes (`destination` instead of those of dst)."""
        sizes = [[pair for spec in specs for pair in buffer_sizes(spec)] for specs in (self.src, self.dst)]
        sizes[1] = list(destination) or sizes[1]
        numbers = [n for side in sizes for pair in side for n in pair]
        cells = list(dict.fromkeys(box.cell for box in self.boxes if box.cell is not None))
        body = b"".join(_pack_box(box, 0 if box.cell is None else 1 + cells.index(box.cell)) for box in self.boxes)
        body += b"".join(_FORMAT.pack(*c.src) + _FORMAT.pack(*c.dst) + struct.pack("<II", c.head_dim, 0) for c in cells)
        body += struct.pack(f"<{len(numbers)}Q", *numbers)
        counts = [sum(count for count, _ in side) for side in sizes]
        s, d = self.src[0], self.dst[0]
        return (
            _HEADER.pack(
                _MAGIC, _VERSION, _HEADER.size + len(body), len(self.boxes), *counts, self.unit_tokens,
                s.block_size, d.block_size, s.num_blocks, d.num_blocks, len(sizes[0]), len(sizes[1]), len(cells), 0,
            )
            + body
        )  # fmt: skip


def plan(
    src: CacheSpec | Sequence[CacheSpec],  # what there is; several specs are shards of one cache
    dst: CacheSpec | Sequence[CacheSpec],  # what is wanted
    *,
    layers: tuple[int, int] | None = None,  # first and end, of the model's layers; None = all the destination holds
    rope: tuple[str, str] = ("half", "half"),  # how K's rotated pairs lie at either side: "half" apart, or "interleaved"
    rotary_dim: int = 0,  # elements of a K row that are rotated, the first ones; 0 = all
) -> Plan:
    """How the bytes of `src` become those of `dst`. Raises with both values where the two cannot match.

    llama.cpp keeps the two numbers of a rotated pair side by side, Transformers half a row apart: rope=("interleaved", "half").
    """
    sources, targets = _as_shards("src", src), _as_shards("dst", dst)
    _require_match(sources[0], targets[0])
    turn = _turn(sources[0], targets[0], rope, rotary_dim)
    unit = _unit_tokens(sources[0], targets[0])
    boxes: list[Box] = []
    dst_buffer = 0
    for target in targets:
        rectangle = _Rectangle(
            target.layer_start, target.layer_start + target.num_layers, target.head_start, target.head_start + target.num_kv_heads
        )
        if layers is not None:
            rectangle = rectangle._replace(layer=max(rectangle.layer, layers[0]), layer_end=min(rectangle.layer_end, layers[1]))
        missing = [rectangle] if rectangle.layer < rectangle.layer_end else []
        src_buffer = 0
        for source in sources:
            left: list[_Rectangle] = []
            for r in missing:
                both, rest = _cut(r, source)
                left += rest
                if both is not None:
                    ways = [_ways(source, target, i, turn if i == 0 else None) for i in range(target.num_planes)]
                    planes = [[x for way in w for x in _boxes(way, both, unit, src_buffer, dst_buffer)] for w in ways]
                    boxes += _join(planes[0], planes[1]) if len(planes) == 2 else planes[0]
            missing = left
            src_buffer += num_buffers(source)
        if missing:
            r = missing[0]
            raise BadArgument(
                f"plan(): layers {r.layer}..{r.layer_end - 1}, heads {r.head}..{r.head_end - 1} of dst are in no src. "
                f"Sources hold {', '.join(_holds(s) for s in sources)}."
            )
        dst_buffer += num_buffers(target)
    return Plan(sources, targets, unit, tuple(boxes))


def fold(box: Box) -> Box:
    """Digits that continue each other on both sides joined, and what is adjacent on both made part of the run; innermost first."""
    if box.cell is not None:
        return box
    run = box.run_bytes
    digits = [d._replace(layer=0) for d in box.digits if d.size > 1]
    digits.sort(key=lambda d: (bool(d.src_step or d.dst_step), d.dst, d.src))
    joined = True
    while joined:
        joined = False
        for a in digits:
            if (a.src, a.dst, a.src_step, a.dst_step) == (run, run, 0, 0):
                run *= a.size
                digits.remove(a)
                joined = True
                break
            after = [b for b in digits if b is not a and b[1:5] == tuple(x * a.size for x in a[1:5])]
            if after:
                digits[digits.index(after[0])] = a._replace(size=a.size * after[0].size)
                digits.remove(a)
                joined = True
                break
    digits.sort(key=lambda d: (bool(d.src_step or d.dst_step), d.dst, d.src))
    return box._replace(run_bytes=run, digits=tuple(digits))


def family(box: Box) -> str:
    """Which kernel moves a folded box: a copy, rows, tiles (elements change their order) or cells (they change their format)."""
    if box.cell is not None:
        return "cells"
    if not box.digits:
        return "flat copy"
    if box.run_bytes >= 16:
        return "row copy"
    across = any(d.src == box.run_bytes for d in box.digits) and any(d.dst == box.run_bytes for d in box.digits)
    return "transpose" if across else "row copy"


# ---- matching


class _Rectangle(NamedTuple):
    layer: int
    layer_end: int
    head: int
    head_end: int


def _as_shards(name: str, specs: CacheSpec | Sequence[CacheSpec]) -> tuple[CacheSpec, ...]:
    shards = (specs,) if isinstance(specs, CacheSpec) else tuple(specs)
    if not shards or not all(isinstance(s, CacheSpec) for s in shards):
        raise BadArgument(f"plan(): {name} is {specs!r}; it is a CacheSpec or a list of them, one a shard.")
    for other in shards[1:]:
        for what in ("num_blocks", "block_size", "head_dim", "v_head_dim", "format", "v_format"):
            a, b = getattr(shards[0], what), getattr(other, what)
            if a != b:
                raise BadArgument(f"plan(): {name} shards differ in {what}: {a!r} and {b!r}. Shards of one cache share it.")
    return shards


def _holds(spec: CacheSpec) -> str:
    return (
        f"layers {spec.layer_start}..{spec.layer_start + spec.num_layers - 1} x heads "
        f"{spec.head_start}..{spec.head_start + spec.num_kv_heads - 1}"
    )


def _require_match(src: CacheSpec, dst: CacheSpec) -> None:
    if src.num_planes != dst.num_planes:
        raise BadArgument(
            f"plan(): layout {src.layout!r} has {src.num_planes} of K and V, {dst.layout!r} has {dst.num_planes}. "
            "A latent (MLA) cache converts to another latent one."
        )
    if src.model and dst.model and src.model != dst.model:
        raise BadArgument(f"plan(): the source holds KV of model {src.model!r} and the destination of {dst.model!r}.")
    for a, b in list(zip(src.planes, dst.planes, strict=True))[: src.num_planes]:
        if a.head_dim != b.head_dim:
            raise BadArgument(
                f"plan(): {a.name} head_dim is {a.head_dim} at the source and {b.head_dim} at the destination; they must be equal."
            )
        by_block = a.format.granularity in (Granularity.BLOCK, Granularity.BLOCK_HEAD)
        if a.format == b.format and by_block and src.block_size != dst.block_size:
            raise Unsupported(
                f"plan(): {a.name} is {a.format}, whose scales belong to blocks, and blocks change from {src.block_size} to "
                f"{dst.block_size} tokens. Convert to a format with scales per token-head, or through bf16."
            )


def _unit_tokens(src: CacheSpec, dst: CacheSpec) -> int:
    unit = gcd(src.block_size, dst.block_size)
    for spec in (src, dst):
        for place in places(spec):
            split = place.of("token")[0].divisor
            if unit % split and split % unit:
                unit = gcd(unit, split)
    return unit


def _cut(r: _Rectangle, source: CacheSpec) -> tuple[_Rectangle | None, list[_Rectangle]]:
    """What the source holds of a rectangle, and the rest of it."""
    both = _Rectangle(
        max(r.layer, source.layer_start), min(r.layer_end, source.layer_start + source.num_layers),
        max(r.head, source.head_start), min(r.head_end, source.head_start + source.num_kv_heads),
    )  # fmt: skip
    if both.layer >= both.layer_end or both.head >= both.head_end:
        return None, [r]
    rest = [
        _Rectangle(r.layer, both.layer, r.head, r.head_end),
        _Rectangle(both.layer_end, r.layer_end, r.head, r.head_end),
        _Rectangle(both.layer, both.layer_end, r.head, both.head),
        _Rectangle(both.layer, both.layer_end, both.head_end, r.head_end),
    ]
    return both, [x for x in rest if x.layer < x.layer_end and x.head < x.head_end]


# ---- boxes


class _Way(NamedTuple):
    """Two places whose contents match, and how many units their dim axis has. With a cell, dim is the row's own business."""

    src: CacheSpec
    dst: CacheSpec
    a: Place
    b: Place
    units: int
    cell: Cell | None = None
    a_scale: Place | None = None
    b_scale: Place | None = None
    turn: _Turn | None = None


class _Turn(NamedTuple):
    """Pairs of a row that lie another way at the destination: steps, in units, to the next pair and to a pair's other number."""

    units: int  # how many of the row
    src: tuple[int, int]
    dst: tuple[int, int]


def _turn(src: CacheSpec, dst: CacheSpec, rope: tuple[str, str], rotary_dim: int) -> _Turn | None:
    size = rotary_dim or src.head_dim
    if len(rope) != 2 or any(r not in ("half", "interleaved") for r in rope):
        raise BadArgument(f'plan(): rope is {rope!r}; it is ("half" or "interleaved" of src, the same of dst).')
    if rope[0] == rope[1]:
        return None
    if not 0 < size <= src.head_dim or size % 2:
        raise BadArgument(f"plan(): rotary_dim is {size}; it is even and at most head_dim {src.head_dim}.")
    for spec in (src, dst):
        fmt = spec.plane(0).format
        if (
            len(places(spec)[0].of("dim")) > 1
            or fmt.element.bits < 8
            or fmt.group_size
            or fmt.is_inline
            or src.plane(0).format != fmt
        ):
            raise Unsupported(
                f"plan(): rope pairs are turned in rows that stay whole and keep their format; {spec.layout!r}, {fmt} splits them "
                "or changes it. Convert in two steps."
            )
    steps = {"half": (1, size // 2), "interleaved": (2, 1)}
    return _Turn(size, steps[rope[0]], steps[rope[1]])


def _ways(src: CacheSpec, dst: CacheSpec, plane: int, turn: _Turn | None) -> list[_Way]:
    a, b = places(src)[plane], places(dst)[plane]
    mine, theirs = src.plane(plane), dst.plane(plane)
    if replace(mine.format, name="", is_inline=False) != replace(theirs.format, name="", is_inline=False):
        cell = Cell(_row_format(src, plane), _row_format(dst, plane), mine.head_dim)
        return [_Way(src, dst, a, b, 1, cell, scale_places(src)[plane], scale_places(dst)[plane])]
    if mine.format == theirs.format and mine.format.is_inline:
        return [_Way(src, dst, a, b, mine.row_units)]  # scales travel in their rows
    ways = [_Way(src, dst, a, b, mine.head_dim * mine.format.element.bits // (8 * a.unit_bytes), turn=turn)]
    a_scale, b_scale = (_scale_place(spec, plane) for spec in (src, dst))
    if a_scale is not None and b_scale is not None:
        groups = mine.format.num_groups(mine.head_dim) if a_scale.of("dim") else 1
        ways.append(_Way(src, dst, a_scale, b_scale, groups))
    if mine.format.has_tensor_scale:
        layers = (Digit("layer", 1, max(src.num_layers, dst.num_layers), 4, 0),)
        a, b = (Place(layers, tensor_scale_buffers(spec)[plane], 0, 4) for spec in (src, dst))
        ways.append(_Way(src, dst, a, b, 1))
    return ways


def _scale_place(spec: CacheSpec, plane: int) -> Place | None:
    """Where a plane's scales lie, apart or inside its rows."""
    return inline_scale_place(spec, plane) or scale_places(spec)[plane]


def inline_scale_place(spec: CacheSpec, plane: int) -> Place | None:
    this, place = spec.plane(plane), places(spec)[plane]
    if not this.format.is_inline or this.format.scale is None:
        return None
    size = this.format.scale.bits // 8
    group = Digit("dim", 1, this.format.num_groups(this.head_dim), size, 0)
    digits = tuple(d for d in place.digits if d.axis != "dim")
    return Place((*digits, group), place.buffer, place.offset + this.head_dim * this.format.element.bits // 8, size)


def _row_format(spec: CacheSpec, plane: int) -> RowFormat:
    this, place, scale = spec.plane(plane), places(spec)[plane], scale_places(spec)[plane]
    fmt, dim = this.format, place.of("dim")
    units = fmt.element.bits // 8 if fmt.element.bits >= 8 else 1
    inner = dim[-1]
    element = inner.stride * units // place.unit_bytes  # where rows are counted in bytes, elements still step by their size
    pack = inner.size * place.unit_bytes * 8 // fmt.element.bits if len(dim) > 1 else this.head_dim
    strides = {d.axis: d.stride for d in scale.digits} if scale is not None else {}
    scale_bytes = fmt.scale.bits // 8 if fmt.scale is not None else 0
    return RowFormat(
        dtype=fmt.element.code,
        granularity=int(fmt.granularity),
        scale_dtype=fmt.scale.code if fmt.scale is not None else 0,
        group_size=fmt.group_size or this.head_dim,
        pack=pack,
        is_inline=int(fmt.is_inline),
        dim_outer=dim[0].stride if len(dim) > 1 else 0,
        dim_inner=element,
        scale_offset=this.head_dim * fmt.element.bits // 8 if fmt.is_inline else 0,
        scale_block=strides.get("block", 0),
        scale_token=strides.get("token", 0),
        scale_group=scale_bytes if fmt.is_inline else strides.get("dim", 0),
        scale_buffer=scale.buffer if scale is not None else -1,
        tensor_scale_buffer=tensor_scale_buffers(spec)[plane],
        first_layer=0,
    )


def _boxes(way: _Way, r: _Rectangle, unit: int, src_buffer: int, dst_buffer: int) -> Iterator[Box]:
    src, dst, a, b = way.src, way.dst, way.a, way.b
    ranges = (  # axis, elements, first at the source, first at the destination
        ("layer", r.layer_end - r.layer, r.layer - src.layer_start, r.layer - dst.layer_start),
        ("head", r.head_end - r.head, r.head - src.head_start, r.head - dst.head_start),
        ("token", unit, 0, 0),
        ("dim", way.units, 0, 0),
    )
    start = _side(a, src, src_buffer), _side(b, dst, dst_buffer), way.cell, ()
    partial: list[tuple[Side, Side, Cell | None, tuple[BoxDigit, ...]]] = [start]
    for axis, count, first_a, first_b in ranges:
        if not a.of(axis) or not b.of(axis):  # one scale for all of them
            continue
        grown = []
        if axis == "dim" and way.turn is not None:
            partial = [x for at_a, at_b, cell, digits in partial for x in _turned(way, way.turn, at_a, at_b, cell, digits)]
            continue
        for at_a, at_b, cell, digits in partial:
            for begin, parts in pieces(count, first_a, a.of(axis)[0].divisor, first_b, b.of(axis)[0].divisor):
                byte_a, step_a = reach(a, axis, first_a + begin)
                byte_b, step_b = reach(b, axis, first_b + begin)
                grown.append(
                    (
                        at_a._replace(offset=at_a.offset + byte_a, buffer=at_a.buffer + step_a),
                        at_b._replace(offset=at_b.offset + byte_b, buffer=at_b.buffer + step_b),
                        _moved(cell, way, axis, first_a + begin, first_b + begin),
                        digits + tuple(_digit(way, axis, divisor, size) for divisor, size in parts),
                    )
                )
        partial = grown
    for at_a, at_b, cell, digits in partial:
        if cell is not None:
            cell = cell._replace(src=_in_table(cell.src, src_buffer), dst=_in_table(cell.dst, dst_buffer))
        yield Box(at_a, at_b, a.unit_bytes, digits, cell)


_Partial = tuple[Side, Side, Cell | None, tuple[BoxDigit, ...]]


def _turned(way: _Way, turn: _Turn, at_a: Side, at_b: Side, cell: Cell | None, digits: tuple[BoxDigit, ...]) -> list[_Partial]:
    """The rotated part of rows, pair by pair, and the rest as it is."""
    unit, rest = way.a.unit_bytes, way.units - turn.units
    pair, other = (BoxDigit(n, turn.src[i] * unit, turn.dst[i] * unit, 0, 0) for i, n in enumerate((turn.units // 2, 2)))
    out: list[_Partial] = [(at_a, at_b, cell, (*digits, pair, other))]
    if rest:
        a, b = (at._replace(offset=at.offset + turn.units * unit) for at in (at_a, at_b))
        out.append((a, b, cell, (*digits, BoxDigit(rest, unit, unit, 0, 0))))
    return out


def _moved(cell: Cell | None, way: _Way, axis: str, a: int, b: int) -> Cell | None:
    """The cell with its scales moved on to index a of an axis at the source and b at the destination."""
    if cell is None:
        return None
    sides = []
    for row, scale, index in ((cell.src, way.a_scale, a), (cell.dst, way.b_scale, b)):
        offset = row.scale_offset + (reach(scale, axis, index)[0] if scale is not None else 0)
        sides.append(row._replace(scale_offset=offset, first_layer=index if axis == "layer" else row.first_layer))
    return cell._replace(src=sides[0], dst=sides[1])


def _in_table(row: RowFormat, buffer: int) -> RowFormat:
    """Buffer numbers of the whole table, which holds the shards before this one too."""
    scale, tensor = (n + buffer if n >= 0 else -1 for n in (row.scale_buffer, row.tensor_scale_buffer))
    return row._replace(scale_buffer=scale, tensor_scale_buffer=tensor)


def _join(ks: list[Box], vs: list[Box]) -> list[Box]:
    """K's boxes and V's; where V's is K's moved on by an even step, the two as one."""
    out: list[Box] = []
    for k, v in zip(ks, vs, strict=False):
        src, dst = ((b.offset - a.offset, b.buffer - a.buffer) for a, b in ((k.src, v.src), (k.dst, v.dst)))
        same = all(a._replace(offset=0, buffer=0) == b._replace(offset=0, buffer=0) for a, b in ((k.src, v.src), (k.dst, v.dst)))
        if same and k.cell is v.cell is None and k.run_bytes == v.run_bytes and k.digits == v.digits and min(*src, *dst) >= 0:
            out.append(k._replace(digits=(BoxDigit(2, src[0], dst[0], src[1], dst[1], 0), *k.digits)))
        else:
            out += [k, v]
    return out + ks[len(vs) :] + vs[len(ks) :]


def _side(place: Place, spec: CacheSpec, buffer: int) -> Side:
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


def _digit(way: _Way, axis: str, divisor: int, size: int) -> BoxDigit:
    reached = [reach(p, axis, divisor) if p is not None and size > 1 else (0, 0) for p in (way.a, way.b, way.a_scale, way.b_scale)]
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


def _walk(digits: tuple[BoxDigit, ...]) -> Iterator[tuple[int, int, int, int]]:
    """(source bytes, destination bytes, source buffers, destination buffers) of every index, last digit slowest."""
    if not digits:
        yield 0, 0, 0, 0
        return
    d = digits[-1]
    for i in range(d.size):
        for src, dst, src_step, dst_step in _walk(digits[:-1]):
            yield src + i * d.src, dst + i * d.dst, src_step + i * d.src_step, dst_step + i * d.dst_step


def _pack_box(box: Box, cell: int) -> bytes:
    if len(box.digits) > MAX_DIGITS:
        raise Unsupported(f"plan(): a box has {len(box.digits)} digits; plans hold {MAX_DIGITS}.")
    digits = b"".join(_DIGIT.pack(*d) for d in box.digits) + bytes(_DIGIT.size * (MAX_DIGITS - len(box.digits)))
    return (
        _SIDE.pack(*box.src) + _SIDE.pack(*box.dst) + struct.pack("<qII", box.run_bytes, len(box.digits), cell) + digits + bytes(16)
    )
