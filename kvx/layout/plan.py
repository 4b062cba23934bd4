"""The planner: two specs in, boxes out. A box is a rectangle of elements through which both sides step evenly.

Axes are matched by name, shards by the layers and heads they hold. What is adjacent on both sides folds into runs. A plan holds no
address: it is frozen, printable, and as bytes (`to_bytes`) it is what kvx_plan_load reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import NamedTuple

from kvx.errors import BadArgument, Unsupported
from kvx.layout.place import Place, buffer_bytes, buffer_sizes, num_buffers, places
from kvx.spec.cache_spec import CacheSpec

MAX_DIGITS = 12
_MAGIC, _VERSION = 0x5058564B, 1
_HEADER, _SIDE, _DIGIT = struct.Struct("<IIQIIIIqqqqIIQ"), struct.Struct("<qqqqqii"), struct.Struct("<qqqiiq")


class BoxDigit(NamedTuple):
    size: int
    src: int  # bytes from one to the next
    dst: int
    src_step: int  # buffers from one to the next
    dst_step: int
    token: int  # tokens from one to the next; 0 = not an axis of tokens


class Side(NamedTuple):
    offset: int
    block: int  # bytes from block to block
    token_split: int
    token_outer: int
    token_inner: int
    buffer: int
    block_step: int  # buffers from block to block


class Box(NamedTuple):
    src: Side
    dst: Side
    run_bytes: int
    digits: tuple[BoxDigit, ...]

    @property
    def bytes(self) -> int:
        """Moved for one unit of tokens."""
        count = self.run_bytes
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
            runs = box.bytes // box.run_bytes
            digits = ", ".join(
                f"{d.size}: {d.src or f'{d.src_step} buf'}/{d.dst or f'{d.dst_step} buf'}" for d in reversed(box.digits)
            )
            lines.append(f"{n:>4}  {family(box):<12} {box.run_bytes:>7} B  {runs:>9}  {digits or 'none'}")
        return "\n".join(lines)

    def to_bytes(self) -> bytes:
        """The flat form of include/kvx_abi.h: header, boxes, buffer sizes."""
        sizes = [[pair for spec in specs for pair in buffer_sizes(spec)] for specs in (self.src, self.dst)]
        numbers = [n for side in sizes for pair in side for n in pair]
        body = b"".join(map(_pack_box, self.boxes)) + struct.pack(f"<{len(numbers)}Q", *numbers)
        counts = [sum(num_buffers(spec) for spec in specs) for specs in (self.src, self.dst)]
        s, d = self.src[0], self.dst[0]
        return (
            _HEADER.pack(
                _MAGIC, _VERSION, _HEADER.size + len(body), len(self.boxes), *counts, self.unit_tokens,
                s.block_size, d.block_size, s.num_blocks, d.num_blocks, len(sizes[0]), len(sizes[1]), 0,
            )
            + body
        )  # fmt: skip


def plan(
    src: CacheSpec | Sequence[CacheSpec],  # what there is; several specs are shards of one cache
    dst: CacheSpec | Sequence[CacheSpec],  # what is wanted
    *,
    layers: tuple[int, int] | None = None,  # first and end, of the model's layers; None = all the destination holds
) -> Plan:
    """How the bytes of `src` become those of `dst`. Raises with both values where the two cannot match."""
    sources, targets = _as_shards("src", src), _as_shards("dst", dst)
    _require_match(sources[0], targets[0])
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
                    planes = [list(_boxes(source, target, i, both, unit, src_buffer, dst_buffer)) for i in range(target.num_planes)]
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
    run = box.run_bytes
    digits = [d for d in box.digits if d.size > 1]
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
    """Which kernel moves a folded box: copy (one run a unit), rows, or tiles (elements change their order)."""
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
        if a.format != b.format:
            raise Unsupported(
                f"plan(): {a.name} is {a.format} at the source and {b.format} at the destination; formats must be equal."
            )
        if a.format.scale is not None and not a.format.is_inline:
            raise Unsupported(
                f"plan(): {a.format} keeps its scales apart from the cache; plans move caches with inline scales or none."
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


def _boxes(src: CacheSpec, dst: CacheSpec, plane: int, r: _Rectangle, unit: int, src_buffer: int, dst_buffer: int) -> Iterator[Box]:
    a, b = places(src)[plane], places(dst)[plane]
    sizes = src.plane(plane)
    ranges = (  # axis, elements, first at the source, first at the destination
        ("layer", r.layer_end - r.layer, r.layer - src.layer_start, r.layer - dst.layer_start),
        ("head", r.head_end - r.head, r.head - src.head_start, r.head - dst.head_start),
        ("token", unit, 0, 0),
        ("dim", sizes.row_units, 0, 0),
    )
    partial: list[tuple[Side, Side, tuple[BoxDigit, ...]]] = [(_side(a, src, src_buffer), _side(b, dst, dst_buffer), ())]
    for axis, count, first_a, first_b in ranges:
        grown = []
        for at_a, at_b, digits in partial:
            for begin, parts in _pieces(count, first_a, a.of(axis)[0].divisor, first_b, b.of(axis)[0].divisor):
                byte_a, step_a = _reach(a, axis, first_a + begin)
                byte_b, step_b = _reach(b, axis, first_b + begin)
                grown.append(
                    (
                        at_a._replace(offset=at_a.offset + byte_a, buffer=at_a.buffer + step_a),
                        at_b._replace(offset=at_b.offset + byte_b, buffer=at_b.buffer + step_b),
                        digits + tuple(_digit(a, b, axis, divisor, size) for divisor, size in parts),
                    )
                )
        partial = grown
    for at_a, at_b, digits in partial:
        yield Box(at_a, at_b, a.unit_bytes, digits)


def _join(ks: list[Box], vs: list[Box]) -> list[Box]:
    """K's boxes and V's; where V's is K's moved on by an even step, the two as one."""
    out: list[Box] = []
    for k, v in zip(ks, vs, strict=False):
        src, dst = ((b.offset - a.offset, b.buffer - a.buffer) for a, b in ((k.src, v.src), (k.dst, v.dst)))
        same = all(a._replace(offset=0, buffer=0) == b._replace(offset=0, buffer=0) for a, b in ((k.src, v.src), (k.dst, v.dst)))
        if same and k.run_bytes == v.run_bytes and k.digits == v.digits and min(*src, *dst) >= 0:
            out.append(k._replace(digits=(BoxDigit(2, src[0], dst[0], src[1], dst[1], 0), *k.digits)))
        else:
            out += [k, v]
    return out + ks[len(vs) :] + vs[len(ks) :]


def _side(place: Place, spec: CacheSpec, buffer: int) -> Side:
    (block,) = place.of("block")
    token = place.of("token")
    split = token[0].divisor if len(token) > 1 else spec.block_size
    outer = token[0].stride if len(token) > 1 else 0
    return Side(place.offset, block.stride, split, outer, token[-1].stride, place.buffer + buffer, block.step)


def _reach(place: Place, axis: str, index: int) -> tuple[int, int]:
    """(bytes, buffers) from index 0 of an axis to another."""
    byte = step = 0
    for d in place.of(axis):
        i = index // d.divisor % d.size
        byte, step = byte + i * d.stride, step + i * d.step
    return byte, step


def _digit(a: Place, b: Place, axis: str, divisor: int, size: int) -> BoxDigit:
    (src, src_step), (dst, dst_step) = (_reach(p, axis, divisor) if size > 1 else (0, 0) for p in (a, b))
    return BoxDigit(size, src, dst, src_step, dst_step, divisor if axis == "token" else 0)


def _pieces(count: int, a: int, split_a: int, b: int, split_b: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
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


def _pack_box(box: Box) -> bytes:
    if len(box.digits) > MAX_DIGITS:
        raise Unsupported(f"plan(): a box has {len(box.digits)} digits; plans hold {MAX_DIGITS}.")
    digits = b"".join(_DIGIT.pack(*d) for d in box.digits) + bytes(_DIGIT.size * (MAX_DIGITS - len(box.digits)))
    return _SIDE.pack(*box.src) + _SIDE.pack(*box.dst) + struct.pack("<qII", box.run_bytes, len(box.digits), 0) + digits + bytes(16)
