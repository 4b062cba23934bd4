"""The picture of docs/architecture.md: packages by level with the arrows of their imports, and the walks through them.

    make picture        writes docs/architecture.svg

Imports are read in the source; an arrow that follows from others is left out. Walks are the numbered lists of the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from tests.test_imports import LEVELS, ROOT, import_graph, level

PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
NATIVE = "native"  # below all levels
LEFT, BOX, COLUMN, STOP, GAP, TOP = 150, 130, 250, 34, 10, 50
GREY, COLOURS = "#555555", ("#1b6ca8", "#b3541e", "#2e7d4f")


class Stop(NamedTuple):
    """One of a walk."""

    files: tuple[tuple[str, tuple[str, ...]], ...]  # paths, and the functions named in each

    @property
    def row(self) -> int:
        """The level of its first file, lowest 1; 0: native code."""
        path = Path(self.files[0][0])
        return 0 if path.parts[0] == NATIVE else 1 + level(".".join(path.with_suffix("").parts))


def walks() -> dict[str, list[Stop]]:
    """By their titles."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        lines = re.sub(r"\n   +", " ", text).splitlines()
        stops = [re.match(r"\d+\. (.+?): ", line) for line in lines if re.match(r"\d+\. ", line)]
        assert all(stops), f"docs/architecture.md, {title}: a stop is `path` `function`, a colon and a sentence"
        if stops:
            found[title.replace("`", "")] = [_stop(m[1]) for m in stops if m]
    return found


def _stop(head: str) -> Stop:
    files: list[tuple[str, tuple[str, ...]]] = []
    for word in re.findall(r"`([^`]+)`", head):
        if "/" in word:
            files.append((word, ()))
        else:
            files[-1] = (files[-1][0], (*files[-1][1], word))
    return Stop(tuple(files))


def arrows() -> list[tuple[int, int]]:
    """Rows that import others, but for what follows: where a imports b and b imports c, no arrow says that a imports c."""
    direct: dict[int, set[int]] = {n: set() for n in range(1, len(LEVELS) + 1)}
    for module, others in import_graph().items():
        if level(module) < len(LEVELS) and module != "kvx.layout":  # what the package shows is no level's
            direct[1 + level(module)] |= {1 + level(o) for o in others if level(o) < level(module)}
    direct[1 + LEVELS.index("kvx.ops")].add(0)  # no import: it loads the library
    below: dict[int, set[int]] = {0: set()}
    for n in sorted(direct):
        below[n] = direct[n].union(*(below[o] for o in direct[n]))
    return [(n, o) for n in direct for o in sorted(direct[n]) if not any(o in below[p] for p in direct[n])]


def svg() -> str:
    columns, rows = list(walks().items()), range(len(LEVELS) + 1)
    height = {r: max(1, *(sum(s.row == r for s in stops) for _, stops in columns)) * STOP + GAP for r in rows}
    y = {r: TOP + sum(height[o] for o in rows if o > r) for r in rows}
    width, end = LEFT + BOX + len(columns) * COLUMN + 20, TOP + sum(height.values()) + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {end}" font-family="sans-serif" font-size="11">',
        *map(_marker, (GREY, *COLOURS)),
        f'<rect width="{width}" height="{end}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-weight="bold">levels and their imports</text>',
    ]
    for r in rows:
        name = NATIVE if r == 0 else LEVELS[r - 1].removeprefix("kvx.").replace("layout.axes", "layout/axes.py")
        if r % 2:
            out.append(f'<rect x="{LEFT}" y="{y[r]}" width="{width - LEFT - 10}" height="{height[r]}" fill="#f4f4f2"/>')
        out.append(
            f'<rect x="{LEFT}" y="{y[r] + 5}" width="{BOX - 20}" height="{STOP - 6}" rx="3" fill="#ffffff" stroke="{GREY}"/>'
        )
        out.append(f'<text x="{LEFT + 8}" y="{y[r] + 23}">{name}</text>')
    for top, low in arrows():
        a, b, bend = y[top] + 24, y[low] + 14, LEFT - 8 - min(LEFT * 2 - 30, 22 * (top - low - 1))
        out.append(
            f'<path d="M{LEFT} {a}C{bend} {a} {bend} {b} {LEFT} {b}" fill="none" stroke="{GREY}" marker-end="url(#a{GREY[1:]})"/>'
            if top - low > 1
            else f'<path d="M{LEFT + 50} {a + 9}V{b - 9}" stroke="{GREY}" marker-end="url(#a{GREY[1:]})"/>'
        )
    for (n, (title, stops)), colour in zip(enumerate(columns), COLOURS, strict=True):
        out += _walk(LEFT + BOX + n * COLUMN, title, stops, y, colour)
    return "\n".join([*out, "</svg>"]) + "\n"


def _marker(colour: str) -> str:
    """The head of an arrow, named by its colour."""
    shape = 'viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto"'
    return f'<defs><marker id="a{colour[1:]}" {shape}><path d="M0 0L8 4L0 8z" fill="{colour}"/></marker></defs>'


def _walk(x: int, title: str, stops: list[Stop], y: dict[int, int], colour: str) -> list[str]:
    head, _, tail = title.partition(", ")
    out = [f'<text x="{x}" y="20" font-weight="bold" fill="{colour}">{escape(head)}</text>']
    out.append(f'<text x="{x}" y="36" fill="{colour}">{escape(tail)}</text>')
    is_up = stops[-1].row > stops[0].row
    tops = []
    for n, stop in enumerate(stops):  # of a row's stops, the one that is nearest to the row before comes first
        place = sum(s.row == stop.row for s in (stops[n + 1 :] if is_up else stops[:n]))
        tops.append(y[stop.row] + 4 + place * STOP)
    for n, (stop, top) in enumerate(zip(stops, tops, strict=True)):
        if n:
            was = tops[n - 1]
            a, b = (was + STOP - 4, top - 1) if top > was else (was, top + STOP - 3)
            out.append(f'<path d="M{x + 12} {a}V{b}" stroke="{colour}" stroke-width="1.5" marker-end="url(#a{colour[1:]})"/>')
        box = f'x="{x}" y="{top}" width="{COLUMN - 15}" height="{STOP - 4}" rx="3"'
        out.append(f'<rect {box} fill="#ffffff" stroke="{colour}"/>')
        files = " and ".join(
            path.removeprefix("kvx/") if n == 0 else Path(path).parts[-1] for n, (path, _) in enumerate(stop.files)
        )
        names = ", ".join(dict.fromkeys(name for _, names in stop.files for name in names))
        out.append(f'<text x="{x + 6}" y="{top + 12}" fill="{colour}">{n + 1}. {escape(files)}</text>')
        out.append(f'<text x="{x + 18}" y="{top + 25}" font-size="10">{escape(names)}</text>')
    return out


if __name__ == "__main__":
    PICTURE.write_text(svg())
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size} bytes")
