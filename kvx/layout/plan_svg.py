"""A plan as a picture: the buffers of both sides, coloured by the shard of the source, and lines from runs to where they go."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import islice
from typing import TYPE_CHECKING

from kvx.layout.box import Box, Side, family, fold, walk
from kvx.layout.place import buffer_bytes

if TYPE_CHECKING:
    from kvx.layout.plan import Plan
    from kvx.spec.cache_spec import Spec

_COLOURS = ("#4c78c8", "#e08a3c", "#4fa06b", "#c9566b", "#8f73c4", "#c9a227", "#35a2a8", "#b5689f", "#7d8c3a", "#8a6d5a")
_WIDTH, _HALF, _LABEL, _ROW, _TOP = 880, 320, 88, 20, 52
_MOST_RUNS, _MOST_ROWS, _MOST_LINES = 3000, 40, 60
Run = tuple[int, int, int, int, int]  # box, buffer and byte at the source, buffer and byte at the destination


def plan_svg(plan: Plan) -> str:
    """For the first blocks of both sides; where there are more runs or buffers than a picture shows, it says so."""
    boxes = [fold(box) for box in plan.boxes]
    runs = list(islice(_runs(boxes), _MOST_RUNS + 1))
    sides = [
        [(shard, n, size) for shard, spec in enumerate(specs) for n, size in enumerate(buffer_bytes(spec))]
        for specs in (plan.src, plan.dst)
    ]
    rows = min(_MOST_ROWS, max(map(len, sides)))
    xs, scales = (_LABEL, _WIDTH - _HALF - 8), [_HALF / max(size for _, _, size in side) for side in sides]
    parts = [_words(_title(plan), 8, 18, "600 13px"), _words(f"{plan.src[0].layout}  →  {plan.dst[0].layout}", 8, 36, "11px")]
    for x, scale, side in zip(xs, scales, sides, strict=True):
        for i, (shard, n, size) in enumerate(side[:rows]):
            y = _TOP + i * _ROW
            parts.append(f'<rect x="{x}" y="{y}" width="{size * scale:.2f}" height="{_ROW - 4}" fill="#8884"/>')
            parts.append(_words(f"shard {shard} · {n}", x - 6, y + 12, "10px", "end"))
    step = max(1, len(runs) // _MOST_LINES)
    starts = _source_shards(plan.src)
    for i, (n, a, at, b, to) in enumerate(runs[:_MOST_RUNS]):
        box, colour = boxes[n], _COLOURS[starts[a] % len(_COLOURS)] if a < len(starts) else _COLOURS[0]
        lengths = _lengths(box)
        places = [
            (x + byte * scale, _TOP + buffer * _ROW) for x, byte, scale, buffer in zip(xs, (at, to), scales, (a, b), strict=True)
        ]
        for (left, top), length, scale, buffer in zip(places, lengths, scales, (a, b), strict=True):
            if buffer < rows:
                parts.append(
                    f'<rect x="{left:.2f}" y="{top}" width="{max(0.6, length * scale):.2f}" height="{_ROW - 4}" fill="{colour}"/>'
                )
        if i % step == 0 and max(a, b) < rows:
            (x0, y0), (x1, y1), middle = places[0], places[1], (xs[0] + _HALF + xs[1]) / 2
            y0, y1 = y0 + _ROW // 2 - 2, y1 + _ROW // 2 - 2
            curve = f"M{x0:.1f} {y0}C{middle:.1f} {y0} {middle:.1f} {y1} {x1:.1f} {y1}"
            parts.append(f'<path d="{curve}" fill="none" stroke="{colour}" stroke-opacity=".35"/>')
    height = _TOP + rows * _ROW + 8
    for line in _notes(plan, boxes, len(runs), [len(side) for side in sides], rows):
        parts.append(_words(line, 8, height + 8, "11px"))
        height += 16
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height + 4}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(_title(plan))}"><g fill="currentColor" font-family="system-ui, sans-serif">{"".join(parts)}</g></svg>'
    )


def _title(plan: Plan) -> str:
    return f"{len(plan.src)} → {len(plan.dst)} shards, {plan.unit_bytes:,} bytes for {plan.unit_tokens} tokens"


def _notes(plan: Plan, boxes: list[Box], num_runs: int, counts: list[int], rows: int) -> list[str]:
    kernels = dict.fromkeys(
        f"{family(box)}, {box.run_bytes if box.cell is None else box.cell.row_bytes} bytes each" for box in boxes
    )
    lines = [f"{len(boxes)} boxes: {'; '.join(islice(kernels, 4))}{'; ...' if len(kernels) > 4 else ''}"]
    lines += [f"left out: {r}" for r in plan.left_out[:3]]
    lines += [f"written twice: {r}" for r in plan.written_twice[:3]]
    if num_runs > _MOST_RUNS:
        lines.append(f"drawn: the first {_MOST_RUNS:,} runs")
    if max(counts) > rows:
        lines.append(f"drawn: the first {rows} of {counts[0]:,} and {counts[1]:,} buffers")
    return lines


def _runs(boxes: list[Box]) -> Iterator[Run]:
    for n, box in enumerate(boxes):
        for src, dst, src_buffer, dst_buffer in walk(box.digits):
            a, b = _begin(box.src), _begin(box.dst)
            yield n, a[0] + src_buffer, a[1] + src, b[0] + dst_buffer, b[1] + dst


def _begin(side: Side) -> tuple[int, int]:
    return side.buffer, side.offset


def _source_shards(specs: tuple[Spec, ...]) -> list[int]:
    return [shard for shard, spec in enumerate(specs) for _ in buffer_bytes(spec)]


def _lengths(box: Box) -> tuple[int, int]:
    """Bytes of a run at the source and at the destination."""
    return (box.run_bytes, box.run_bytes) if box.cell is None else (box.cell.src_bytes, box.cell.row_bytes)


def _words(text: str, x: float, y: float, font: str, anchor: str = "start") -> str:
    weight, size = font.split() if " " in font else ("400", font)
    return f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}">{escape(text)}</text>'
