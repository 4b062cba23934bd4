"""The planner: two specs in, boxes out. A box is a rectangle of elements through which both sides step evenly.

Axes are matched by name, shards by the layers and heads they hold. What is adjacent on both sides folds into runs. A plan holds no
address: it is frozen, printable, and as bytes (`to_bytes`) it is what kvx_plan_load reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

from kvx.errors import BadArgument, Unsupported
from kvx.layout.box import Box, BoxDigit, family, fold, pack_box, pack_cell, walk
from kvx.layout.match import RopeReorder, boxes, join, plane_matches, reorder_of
from kvx.layout.pairs import Pairs, pairs_of
from kvx.layout.place import buffer_bytes, buffer_sizes, num_buffers, places
from kvx.layout.plan_svg import plan_svg
from kvx.layout.shards import (
    Rectangle,
    as_shards,
    cut,
    differing_axis,
    field_of,
    held,
    holdings,
    rectangles,
    several,
    sharded_alike,
    union,
    without,
)
from kvx.spec.byte_size import byte_text
from kvx.spec.cache_spec import Spec
from kvx.spec.formats import Granularity
from kvx.spec.shown import Shown

_MAGIC, _VERSION = 0x5058564B, 1
_HEADER = struct.Struct("<IIQIIIIqqqqIIII")


class ByteRun(NamedTuple):
    """`pieces` of `bytes` bytes, each `src_stride` and `dst_stride` after the one before."""

    src_buffer: int
    src_offset: int
    dst_buffer: int
    dst_offset: int
    bytes: int
    pieces: int = 1
    src_stride: int = 0
    dst_stride: int = 0


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """What turns one spec into another, made once by `kvx.plan` and run many times. It holds no address."""

    src: tuple[Spec, ...]  # one spec a shard
    dst: tuple[Spec, ...]
    unit_tokens: int  # tokens moved for one pair of blocks
    boxes: tuple[Box, ...]
    blocks: Pairs | None = None  # ids at src and at dst, moved unless others are given; None: all
    left_out: tuple[Rectangle, ...] = ()  # of the model's layers and heads, what src holds and dst does not
    written_twice: tuple[Rectangle, ...] = ()  # what more than one shard of dst holds

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy. What ops keep with a plan are addresses, good for this object in this process alone."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def shown(self) -> dict[str, str]:
        def side(specs: tuple[Spec, ...]) -> str:
            s = specs[0]
            formats = " ".join(dict.fromkeys(p.format.name for p in s.planes))
            return f"{s.layout!r} {formats}, blocks of {s.block_size}" + f", {len(specs)} shards" * (len(specs) > 1)

        runs = sorted({box.run_bytes if box.cell is None else box.cell.row_bytes for box in map(fold, self.boxes)})
        return {
            "from": side(self.src),
            "to": side(self.dst),
            "moves": f"{byte_text(self.unit_bytes)} for {self.unit_tokens} tokens",
            "runs": f"{runs[0]} to {runs[-1]} bytes" if len(runs) > 1 else f"{runs[0]} bytes" if runs else "none",
            "blocks": "all" if self.blocks is None else f"{len(self.blocks[0])}",
            **({"left out": ", ".join(map(str, self.left_out[:3]))} if self.left_out else {}),
            "more": "print(plan.explain())",
        }

    @cached_property
    def unit_bytes(self) -> int:
        """Payload of one unit of tokens, all layers and heads."""
        return sum(box.bytes for box in self.boxes)

    def buffer_bytes(self, side: str) -> tuple[int, ...]:
        """The sizes of all shards' buffers, in order. `side` is src or dst."""
        return tuple(size for spec in (self.src if side == "src" else self.dst) for size in buffer_bytes(spec))

    def runs(
        self, src_blocks: Sequence[int] | None = None, dst_blocks: Sequence[int] | None = None, *, strided: bool = False
    ) -> Iterator[ByteRun]:
        """What a transport moves for these pairs of blocks: plain pieces, or strided ones (fewer). None: the plan's, or all."""
        reason = self._no_runs()
        if reason:
            raise Unsupported(f"runs(): {reason}")
        if src_blocks is None and dst_blocks is None:
            src_blocks, dst_blocks = self.blocks or (range(self.src[0].num_blocks), range(self.dst[0].num_blocks))
        if src_blocks is None or dst_blocks is None:
            raise BadArgument("runs(): one of src_blocks and dst_blocks is given; blocks move in pairs. Give both, or neither.")
        if len(src_blocks) != len(dst_blocks):
            raise BadArgument(f"runs(): {len(src_blocks)} source blocks and {len(dst_blocks)} destination blocks.")
        for box in map(fold, self.boxes):
            inner = _strided(box) if strided else None
            outer = box.digits[1:] if inner else box.digits
            for s, d in zip(src_blocks, dst_blocks, strict=True):
                for src, dst, src_buffer, dst_buffer in walk(outer):
                    yield ByteRun(
                        box.src.buffer + s * box.src.block_step + src_buffer,
                        box.src.offset + s * box.src.block + src,
                        box.dst.buffer + d * box.dst.block_step + dst_buffer,
                        box.dst.offset + d * box.dst.block + dst,
                        box.run_bytes,
                        *((inner.size, inner.src, inner.dst) if inner else ()),
                    )

    def _no_runs(self) -> str:
        """Why a transport cannot move it as it is; "" when it can."""
        if self.unit_tokens != self.src[0].block_size or self.unit_tokens != self.dst[0].block_size:
            return "the block sizes differ. A transport moves whole blocks: plan with one block size."
        if any(box.cell is not None for box in self.boxes):
            return "the formats differ, so bytes do not move as they are. Convert first, then move."
        return ""

    def explain(self, num_blocks: int | None = None) -> str:
        """The plan in words and a table, with the bytes of so many units. None: of the plan's blocks, or of one."""
        planned = None if self.blocks is None else len(self.blocks[0]) * self.src[0].block_size // self.unit_tokens
        num_blocks = num_blocks if num_blocks is not None else 1 if planned is None else planned
        lines = [
            f"{len(self.src)} -> {len(self.dst)} shards, {self.src[0].layout!r} -> {self.dst[0].layout!r}",
            f"blocks of {self.src[0].block_size} -> {self.dst[0].block_size} tokens, moved {self.unit_tokens} at a time; "
            f"{self.unit_bytes * num_blocks:,} bytes for {num_blocks} x {self.unit_tokens} tokens",
            f"{'box':>4}  {'family':<12} {'run':>9}  {'runs':>9}  loops (size: source stride / destination stride, bytes)",
        ]
        for n, box in enumerate(map(fold, self.boxes)):
            runs = box.bytes // (box.run_bytes if box.cell is None else box.cell.row_bytes)
            digits = ", ".join(
                f"{d.size}: {d.src or f'{d.src_step} buf'}/{d.dst or f'{d.dst_step} buf'}" for d in reversed(box.digits)
            )
            lines.append(f"{n:>4}  {family(box):<12} {box.run_bytes:>7} B  {runs:>9}  {digits or 'none'}")
        lines += [f"left out: {r}, which the source holds and the destination does not" for r in self.left_out]
        lines += [f"written twice: {r}, which several shards of the destination hold" for r in self.written_twice]
        if self.blocks is not None and planned is not None:
            folded = list(map(fold, self.boxes))
            plain = planned * sum(box.bytes // box.run_bytes for box in folded)
            fewer = planned * sum(box.bytes // box.run_bytes // (s.size if (s := _strided(box)) else 1) for box in folded)
            count = f"{plain:,} descriptors, {fewer:,} strided" if not self._no_runs() else f"no descriptors: {self._no_runs()}"
            src, dst = (f"{len(ids)} blocks ({_few(ids)})" for ids in self.blocks)
            lines.append(f"{src} -> {dst}: {self.unit_bytes * planned:,} bytes, {count}")
        return "\n".join(lines)

    def to_svg(self) -> str:
        """A picture of the first blocks' runs, from where they lie to where they go: an <svg> element for notebooks and docs."""
        return plan_svg(self)

    def _repr_html_(self) -> str:
        return self.to_svg() + super()._repr_html_()

    def to_bytes(self, *, destination: tuple[tuple[int, int], ...] = (), content: int = 0) -> bytes:
        """The flat form of include/kvx_abi.h: header, boxes, cells, buffer sizes (`destination` instead of those of dst).

        Without `blocks`: ids are bound when it runs (kvx_convert_args_t), so that one plan serves every request.
        """
        sizes = [[pair for spec in specs for pair in buffer_sizes(spec)] for specs in (self.src, self.dst)]
        sizes[1] = list(destination) or sizes[1]
        numbers = [n for side in sizes for pair in side for n in pair]
        cells = list(dict.fromkeys(box.cell for box in self.boxes if box.cell is not None))
        body = b"".join(pack_box(box, 0 if box.cell is None else 1 + cells.index(box.cell)) for box in self.boxes)
        body += b"".join(pack_cell(c) for c in cells)
        body += struct.pack(f"<{len(numbers)}Q", *numbers)
        counts = [sum(count for count, _ in side) for side in sizes]
        s, d = self.src[0], self.dst[0]
        return (
            _HEADER.pack(
                _MAGIC, _VERSION, _HEADER.size + len(body), len(self.boxes), *counts, self.unit_tokens,
                s.block_size, d.block_size, s.num_blocks, d.num_blocks, len(sizes[0]), len(sizes[1]), len(cells), content,
            )
            + body
        )  # fmt: skip


def plan(
    src: Spec | Sequence[Spec],  # what there is; several specs are shards of one cache
    dst: Spec | Sequence[Spec],  # what is wanted
    *,
    blocks: tuple[Sequence[int], Sequence[int]] | None = None,  # (ids at src, ids at dst): the blocks to move, by default
    layers: tuple[int, int] | None = None,  # first and end, of the model's layers; None = all the destination holds
    rope: tuple[str, str] = ("half", "half"),  # how K's rotated pairs lie at either side: "half" apart, or "interleaved"
    rotary_dim: int = 0,  # elements of a K row that are rotated, the first ones; 0 = all
    partial: bool = False,  # whether dst may hold fewer layers or heads than src
) -> Plan:
    """How the bytes of `src` become those of `dst`. Raises with both values where the two cannot match.

    A plan fills the destination and uses the source whole: layers or heads of `src` that no shard of `dst` holds are an error,
    unless `partial` or `layers` says that they are meant to be left out. Shards of `dst` may hold the same heads, as they do where
    there are more ranks than heads.

    llama.cpp keeps the two numbers of a rotated pair side by side, Transformers half a row apart: rope=("interleaved", "half").
    """
    sources, targets = as_shards("src", src), as_shards("dst", dst)
    _require_match(sources[0], targets[0])
    if layers is not None:
        _check_layers(layers)
    pairs = pairs_of(blocks, sources[0], targets[0])
    _require_positions(sources[0], targets[0], pairs)
    reorder = reorder_of(sources[0], targets[0], rope, rotary_dim)
    unit = _unit_tokens(sources[0], targets[0])
    together = sharded_alike((*sources, *targets))
    left_out, twice = [], []
    for planes in together:
        have, wanted = ([r for spec in specs for r in held(spec, planes[0], layers)] for specs in (sources, targets))
        left_out += union(without(have, wanted))
        twice += several(wanted)
    if left_out and not partial:
        raise BadArgument(
            f"plan(): {left_out[0]} of src are in no dst and would be lost. Destinations hold {holdings(targets)}. "
            "Give the shards that hold them, or say partial=True to leave them out."
        )
    found: list[Box] = []
    dst_buffer = 0
    for target in targets:
        for planes in together:
            found += _boxes_of(target, sources, planes, layers, reorder, unit, dst_buffer)
        dst_buffer += num_buffers(target)
    return Plan(sources, targets, unit, tuple(found), pairs, tuple(left_out), tuple(twice))


def _boxes_of(
    target: Spec,
    sources: Sequence[Spec],
    planes: Sequence[int],
    layers: tuple[int, int] | None,
    reorder: RopeReorder | None,
    unit: int,
    dst_buffer: int,
) -> Iterator[Box]:
    """What fills these planes of one shard, from every source that holds some of it."""
    missing, src_buffer = held(target, planes[0], layers), 0
    for source in sources:
        for share in rectangles(source, planes[0]):
            left: list[Rectangle] = []
            for r in missing:
                both, rest = cut(r, share)
                left += rest
                if both is not None:
                    matches = [plane_matches(source, target, i, reorder if i == 0 else None) for i in planes]
                    yield from join([[x for m in found for x in boxes(m, both, unit, src_buffer, dst_buffer)] for found in matches])
            missing = left
        src_buffer += num_buffers(source)
    if missing:
        raise BadArgument(f"plan(): {missing[0]} of dst are in no src. Sources hold {holdings(sources)}.")


def _check_layers(layers: tuple[int, int]) -> None:
    try:
        first, end = layers
        is_range = 0 <= first < end
    except (TypeError, ValueError):
        is_range = False
    if not is_range:
        raise BadArgument(f"plan(): layers is {layers}; it must be (first, end) of the model's layers, first before end.")


def _strided(box: Box) -> BoxDigit | None:
    """The digit of a folded box that one strided descriptor steps through."""
    inner = box.digits[0] if box.digits else None
    return inner if inner is not None and not (inner.src_step or inner.dst_step) else None


def _few(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids if len(ids) <= 6 else ids[:5])) + (f", ... {ids[-1]}" if len(ids) > 6 else "")


# ---- matching specs


def _require_match(src: Spec, dst: Spec) -> None:
    a_names, b_names = ([p.name for p in spec.planes] for spec in (src, dst))
    if a_names != b_names:
        raise BadArgument(
            f"plan(): layout {src.layout!r} has {len(a_names)} planes ({', '.join(a_names)}), {dst.layout!r} has {len(b_names)} "
            f"({', '.join(b_names)}). Planes go to those of their name; a latent (MLA) cache converts to another latent one."
        )
    if src.model and dst.model and src.model != dst.model:
        raise BadArgument(f"plan(): the source holds KV of model {src.model!r} and the destination of {dst.model!r}.")
    for a, b in zip(src.planes, dst.planes, strict=True):
        other = differing_axis(a, b)
        if other:
            raise BadArgument(
                f"plan(): {a.name} {field_of(other)} is {a.sizes.get(other, 0)} at the source and {b.sizes.get(other, 0)} at the "
                "destination; they must be equal."
            )
        by_block = a.format.granularity in (Granularity.BLOCK, Granularity.BLOCK_HEAD)
        if a.format == b.format and by_block and src.block_size != dst.block_size:
            raise Unsupported(
                f"plan(): {a.name} is {a.format}, whose scales belong to blocks, and blocks change from {src.block_size} to "
                f"{dst.block_size} tokens. Convert to a format with scales per token-head, or through bf16."
            )


def _require_positions(src: Spec, dst: Spec, pairs: Pairs | None) -> None:
    """States that are said to be of a position move to blocks that are said to be of the same."""
    if pairs is None or not src.positions or not dst.positions:
        return
    for a, b in zip(*pairs, strict=True):
        if src.positions[a] != dst.positions[b]:
            raise BadArgument(
                f"plan(): block {a} of src is a state after {src.positions[a]} tokens, block {b} of dst one after "
                f"{dst.positions[b]}. A state holds at one position: give the block of that one."
            )


def _unit_tokens(src: Spec, dst: Spec) -> int:
    unit = gcd(src.block_size, dst.block_size)
    for spec in (src, dst):
        for place in places(spec):
            split = place.of("token")[0].divisor if place.of("token") else 1
            if unit % split and split % unit:
                unit = gcd(unit, split)
    return unit
