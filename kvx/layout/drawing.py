"""A cache drawn as SVG, byte by byte: `Layout.to_svg()` and notebooks. The same picture as the page's tab "Layouts" exports.

Lines have a fixed number of bytes, a cell is as wide as its element, scales are outlined and padding is hatched. Places come from
kvx/layout/place.py; nothing here works out a stride.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import product
from math import lcm, prod
from typing import NamedTuple

from kvx.errors import BadArgument
from kvx.layout.axes import PLANES, Layout
from kvx.layout.match import inline_scale_place
from kvx.layout.place import Place, axis_spans, buffer_bytes, num_cache_buffers, places, scale_places, tensor_scale_buffers
from kvx.spec.cache_spec import CacheSpec, Spec
from kvx.spec.formats import Format
from kvx.spec.state_spec import StateSpec, state_plane

MOST_ELEMENTS = 20_000
# As --c0 to --c9 of kvx/page/static/page.css, for light.
COLOURS = ("#8db4ee", "#f2b27a", "#8fcfa0", "#ef9aa5", "#b9a5ea", "#e3cc6b", "#7accd0", "#e0a0cf", "#b5c274", "#c8ad97")
_INK, _SOFT, _NEUTRAL = "#1c2130", "#5d6475", "#b9b7b2"
_GUTTER, _TITLE, _GAP, _WIDEST, _NARROWEST = 58, 24, 12, 26, 4
_STATE_SIZES = {"head": 2, "channel": 4, "row": 2, "column": 4, "tap": 3}


class DrawnCell(NamedTuple):
    start: float  # bytes into its buffer; of four bits the second half of a byte is at .5
    size: float
    value: int  # of the axis that is coloured; -1 where the cell has none
    is_scale: bool


def layout_svg(layout: Layout, *, colour_by: str = "", format: str = "", **sizes: int) -> str:
    """A small cache of this layout. `sizes` are fields of a CacheSpec, raised to what splits divide; `colour_by` is an axis."""
    if set(layout.planes) <= {"k", "v"}:
        return spec_svg(fitting_spec(layout, format=format or "bf16", **sizes), colour_by=colour_by)
    planes = []
    for name, where in layout.planes.items():
        named = {axis.name for axis in (*where.left, *where.order)}
        axes = {axis: sizes.get(axis, size) for axis, size in _STATE_SIZES.items() if axis in named}
        planes.append(state_plane(name, format or "f32", shares=(), **axes))
    layers = sizes.get("num_layers", 2) if layout.has_layer else 1
    return spec_svg(StateSpec(sizes.get("num_blocks", 2), tuple(planes), layout.text, num_layers=layers), colour_by=colour_by)


def fitting_spec(
    layout: Layout,
    *,
    num_layers: int = 2,
    num_blocks: int = 2,
    block_size: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 8,
    format: str = "bf16",
) -> CacheSpec:
    """A cache of this layout whose sizes are whole packs of every split."""
    bits = Format.named(format).element.bits

    def size(name: str, least: int) -> int:
        packs = [128 // bits if f == "x" else int(f) for plane in layout.planes.values() if (f := plane.split_of(name))]
        return -(-least // lcm(*packs)) * lcm(*packs)

    return CacheSpec(
        num_layers=num_layers if layout.has_layer else 1,
        num_blocks=num_blocks,
        block_size=size("token", block_size),
        num_kv_heads=size("head", num_kv_heads),
        head_dim=size("dim", head_dim),
        layout=layout.text,
        format=format,
    )


def spec_svg(spec: Spec, *, colour_by: str = "", width: int = 680) -> str:
    """Every buffer of a cache. BadArgument over 20,000 elements: what repeats looks the same."""
    count = sum(spec.num_layers * spec.num_blocks * p.num_rows * p.row_elements for p in spec.planes)
    if count > MOST_ELEMENTS:
        raise BadArgument(
            f"to_svg(): the cache has {count:,} elements; a picture has at most {MOST_ELEMENTS:,}. Give smaller sizes."
        )
    axes = ["kv", "layer", "block", *dict.fromkeys(axis for p in spec.planes for axis in p.sizes)]
    by = colour_by or ("head" if any(p.sizes.get("head", 1) > 1 for p in spec.planes) else "kv")
    if by not in axes:
        raise BadArgument(f"to_svg(): colour_by is {by!r}; this cache has {', '.join(axes)}.")
    buffers: list[list[DrawnCell]] = [[] for _ in buffer_bytes(spec)]
    for buffer, cell in _cells(spec, by):
        buffers[buffer].append(cell)
    unit = min(cell.size for cells in buffers for cell in cells)
    line, cell_width = _line(spec, unit, width - _GUTTER - 8)
    scale, height = cell_width / unit, max(9, min(19, round(cell_width * 0.9)))
    parts, top, words = [], 8.0, _buffer_names(spec)
    for n, (cells, size) in enumerate(zip(buffers, _drawn_bytes(spec), strict=True)):
        here = line if n < num_cache_buffers(spec) else max(unit, min(line, size))
        title = f"{words[n]}  ·  " if words[n] else ""
        parts.append(f'<text x="{_GUTTER}" y="{top + _TITLE - 8:g}" class="t">{escape(title)}buffer {n}, {size:,} bytes</text>')
        top += _TITLE
        parts += _buffer(sorted(cells), size, here, scale, height, top)
        top += -(-size // here) * height + _GAP
    legend = _legend(spec, by, top)
    return _document(width, top + 30, [*parts, legend], spec.layout)


def _line(spec: Spec, unit: float, room: int) -> tuple[int, int]:
    """Bytes of a line, and pixels of the smallest cell: the longest run of the layout that fits with labelled cells."""
    spans: set[int] = set()
    inside = spec.plane(0).unit_bytes
    for span in (s.span for s in axis_spans(spec, 0)):
        spans |= {span // parts for parts in range(1, 65) if span % (parts * inside) == 0}
        inside = span
    for width in range(15, _NARROWEST - 1, -1):
        best = max((span for span in spans if span <= room // width * unit), default=0)
        if best >= 8 * unit or best == max(spans):
            return best, max(_NARROWEST, min(_WIDEST, int(room * unit / best)))
    return max(1, int(room // _NARROWEST * unit)), _NARROWEST


def _cells(spec: Spec, by: str) -> Iterator[tuple[int, DrawnCell]]:
    for i, (plane, place) in enumerate(zip(spec.planes, places(spec), strict=True)):
        bits, axes = plane.format.element.bits, [("layer", spec.num_layers), ("block", spec.num_blocks), *plane.axes]
        for point in product(*(range(size) for _, size in axes)):
            index = dict(zip((axis for axis, _ in axes), point, strict=True))
            units = index | {plane.row_axis: index[plane.row_axis] * bits // (8 * plane.unit_bytes)}
            buffer, byte = place.locate(**units)
            half = index[plane.row_axis] % 2 / 2 if bits == 4 else 0
            yield buffer, DrawnCell(byte + half, bits / 8, i if by == "kv" else index.get(by, -1), False)
        scale = inline_scale_place(spec, i) or scale_places(spec)[i]
        if scale is not None:
            yield from _scales(scale, i, "" if by == plane.row_axis else by)  # a group is no index of the row
        if (tensor := tensor_scale_buffers(spec)[i]) >= 0:
            for layer in range(spec.num_layers):
                yield tensor, DrawnCell(4 * layer, 4, {"kv": i, "layer": layer}.get(by, -1), True)


def _scales(place: Place, plane: int, by: str) -> Iterator[tuple[int, DrawnCell]]:
    axes = {d.axis: prod(e.size for e in place.of(d.axis)) for d in place.digits}
    for point in product(*map(range, axes.values())):
        index = dict(zip(axes, point, strict=True))
        buffer, byte = place.locate(**index)
        yield buffer, DrawnCell(byte, place.unit_bytes, plane if by == "kv" else index.get(by, -1), True)


def _buffer(cells: list[DrawnCell], size: int, line: float, scale: float, height: int, top: float) -> Iterator[str]:
    """Cells of one buffer, and what stands between them hatched."""
    for n in range(int(-(-size // line))):
        yield f'<text x="{_GUTTER - 8}" y="{top + (n + 0.5) * height + 3.5:g}" class="o">{int(n * line):,}</text>'
    at = 0.0
    for cell in (*cells, DrawnCell(size, 0, 0, False)):
        if cell.start > at:
            for x, y, w in _runs(at, cell.start - at, line, scale, height, top):
                yield f'<rect x="{x:g}" y="{y:g}" width="{w - 1:g}" height="{height - 1}" fill="url(#kvx-padding)"/>'
        for x, y, w in _runs(cell.start, cell.size, line, scale, height, top):
            colour = COLOURS[cell.value % len(COLOURS)] if cell.value >= 0 else _NEUTRAL
            edge = f' fill-opacity=".3" stroke="{colour}" stroke-width="1.5"' if cell.is_scale else ""
            inset = 0.75 if cell.is_scale else 0
            size_of = f'width="{max(0, w - 1 - 2 * inset):g}" height="{height - 1 - 2 * inset:g}"'
            yield f'<rect x="{x + inset:g}" y="{y + inset:g}" {size_of} fill="{colour}"{edge}/>'
            if w >= 14 and cell.value >= 0:
                yield f'<text x="{x + (w - 1) / 2:g}" y="{y + height / 2 + 3.2:g}" class="l">{cell.value}</text>'
        at = cell.start + cell.size


def _runs(start: float, size: float, line: float, scale: float, height: int, top: float) -> Iterator[tuple[float, float, float]]:
    """x, y and width of a run of bytes: more than one where lines end inside it."""
    while size > 1e-6:
        n = int(start // line)
        here = min(size, (n + 1) * line - start)
        yield round(_GUTTER + (start - n * line) * scale, 2), top + n * height, round(here * scale, 2)
        start, size = start + here, size - here


def _drawn_bytes(spec: Spec) -> list[int]:
    """With the padding of the last block, which an engine's allocation has."""
    sizes = list(buffer_bytes(spec))
    if spec.block_bytes:
        for n in range(num_cache_buffers(spec)):
            sizes[n] = -(-sizes[n] // spec.block_bytes) * spec.block_bytes
    return sizes


def _buffer_names(spec: Spec) -> list[str]:
    layout = Layout.parse(spec.layout)
    titles = [_plane_title(name) for name in layout.planes]
    sizes = {"layer": spec.num_layers, "block": spec.num_blocks}
    choices = [titles if a.name in PLANES else [f"{a.name} {n}" for n in range(sizes[a.name])] for a in layout.left]
    names = [", ".join(words) for words in product(*choices)]
    names += [
        f"scales of {_plane_title(p.name)}" for p, place in zip(spec.planes, scale_places(spec), strict=True) if place is not None
    ]
    names += [f"tensor scales of {_plane_title(p.name)}" for p in spec.planes if p.format.has_tensor_scale]
    return names


def _plane_title(name: str) -> str:
    return name.upper() if name in ("k", "v") else name


def _legend(spec: Spec, by: str, top: float) -> str:
    sizes = {"kv": spec.num_planes, "layer": spec.num_layers, "block": spec.num_blocks}
    count = sizes.get(by) or max(p.sizes.get(by, 1) for p in spec.planes)
    words = [_plane_title(p.name) for p in spec.planes] if by == "kv" else [f"{by} {n}" for n in range(count)]
    shown = words if len(words) <= 8 else [*words[:7], f"and on to {words[-1]}"]
    parts, x = [], float(_GUTTER)
    for n, word in enumerate(shown):
        parts.append(f'<rect x="{x:g}" y="{top:g}" width="12" height="12" rx="3" fill="{COLOURS[n % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 17:g}" y="{top + 10:g}" class="k">{escape(word)}</text>')
        x += 34 + 6.2 * len(word)
    return "".join(parts)


def _document(width: int, height: float, parts: list[str], layout: str) -> str:
    style = (
        f".t{{font:600 12px system-ui,sans-serif;fill:{_INK}}}.o{{font:10.5px ui-monospace,monospace;fill:{_SOFT};text-anchor:end}}"
        ".l{font:10px system-ui,sans-serif;fill:#000;fill-opacity:.72;text-anchor:middle}"
        f".k{{font:12px system-ui,sans-serif;fill:{_SOFT}}}"
    )
    hatch = (
        '<pattern id="kvx-padding" width="6" height="6" patternUnits="userSpaceOnUse"><rect width="6" height="6" fill="#efede8"/>'
        '<path d="M-1 1L1-1M0 6L6 0M5 7L7 5" stroke="#dedbd3" stroke-width="1.4"/></pattern>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" role="img">'
        f"<title>{escape(layout)}</title><style>{style}</style><defs>{hatch}</defs>"
        f'<rect width="{width}" height="{height:g}" fill="#ffffff"/>{"".join(parts)}</svg>'
    )
