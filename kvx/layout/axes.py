"""The layout language: axes named outermost first, `|` ends an allocation, `( )` fuses axes, `dim/x dim%x` splits one.

    kv | block token head dim                  K and V apart, tokens outside heads (NHD)
    block head token (kv dim)                  one tensor, K and V side by side in each cell
    kv[K: | block head dim/x token dim%x; V: | block head dim token]
    layer | block head kv[K: dim token; V: token dim]     K's area, then V's, in each head of a block
    block | head layer kv token dim            an allocation for each block
    layer | block token head dim               no kv: one row a token (MLA's latent)
    layer | block plane[conv: channel tap; state: head row column]     planes with names and axes of their own, one after the other

`kv` stands for two planes, K and V, of the same axes; `plane[...]` names any others.

Text in, a frozen `Layout` out; sizes come later (kvx/layout/place.py; for ops, which work on one layer's tensors,
kvx/layout/planes.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import NoReturn

from kvx.errors import LayoutError, a_type

AXES = ("layer", "block", "kv", "token", "head", "dim")
STATE_AXES = ("channel", "tap", "row", "column")
INNER = ("token", "head", "dim", *STATE_AXES)  # what a plane may have inside a block
PLANES = ("kv", "plane")  # axes whose indices are planes
NHD = "kv | block token head dim"
HND = "kv | block head token dim"
_OTHER_NAMES = {"NHD": NHD, "HND": HND}
MOST_CHARACTERS = 1000  # the longest an engine has takes 100


def hnd_packed(pack: int | str = "x") -> str:
    """HND with dim split in packs: `[block, head, dim/pack, token, pack]`. `x` is 16 bytes of elements."""
    return f"kv | block head dim/{pack} token dim%{pack}"


@dataclass(frozen=True)
class Axis:
    """One axis, or a part of one: `part` is "" (whole), "/" (outer part) or "%" (inner part of a split by `factor`)."""

    name: str
    part: str = ""
    factor: str = ""
    unused: int = 0  # so many in memory before the first, which nobody reads

    def __str__(self) -> str:
        return f"{self.name}{self.part}{self.factor}" + (f"+{self.unused}" if self.unused else "")


@dataclass(frozen=True)
class PlaneLayout:
    """Where each axis of one plane stands."""

    left: tuple[Axis, ...]  # left of the bar: their indices choose an allocation
    dims: tuple[tuple[Axis, ...], ...]  # inside an allocation, each one or more fused axes
    is_area: bool = False  # kv[...] or plane[...] inside an allocation: each plane's area after the other's

    @property
    def order(self) -> tuple[Axis, ...]:
        """The axes inside an allocation, outermost first."""
        return tuple(axis for dim in self.dims for axis in dim)

    @property
    def layer_dims(self) -> tuple[tuple[Axis, ...], ...]:
        """`dims` of one layer's tensor."""
        return tuple(dim for dim in self.dims if dim[0].name != "layer")

    def split_of(self, name: str) -> str:
        """The factor an axis is split by; "" when it is whole."""
        return next((axis.factor for axis in self.order if axis.name == name and axis.part), "")


@dataclass(frozen=True)
class Layout:
    """A layout string, read: the order of axes in memory and where allocations end. `Layout.parse(text)` makes one."""

    text: str
    planes: Mapping[str, PlaneLayout] = field(hash=False)  # by name: k and v, k alone, or those of plane[...]

    @property
    def first(self) -> PlaneLayout:
        """Of the first plane: what stands outside kv or plane[...] is the same for all."""
        return next(iter(self.planes.values()))

    @property
    def left(self) -> tuple[Axis, ...]:
        """Axes left of the bar, of every plane."""
        return self.first.left

    @property
    def has_layer(self) -> bool:
        return any(axis.name == "layer" for axis in (*self.left, *self.first.order))

    @property
    def has_layers_apart(self) -> bool:
        """Every layer in allocations of its own, one layer's after the other's."""
        return all(plane.left and plane.left[0].name == "layer" for plane in self.planes.values())

    @property
    def has_kv(self) -> bool:
        return list(self.planes) == ["k", "v"]

    @property
    def num_buffers(self) -> int:
        """Tensors of one layer: one a plane where planes stand left of `|`."""
        return len(self.planes) if any(axis.name in PLANES for axis in self.left) else 1

    @property
    def unsupported_by_ops(self) -> str:
        """Why write and gather cannot address this layout; "" when they can."""
        if not self.has_kv:
            return "has no kv axis"
        if self.first.is_area:
            return "keeps K and V in areas of one allocation, kv[...] without `|`"
        for plane in self.planes.values():
            if any(axis.name == "block" for axis in plane.left):
                return "has an allocation for each block"
            for name in ("token", "head"):
                if plane.split_of(name):
                    return f"splits {name}"
            if plane.split_of("dim") and [a.part for a in plane.order if a.name == "dim"] != ["/", "%"]:
                return "has dim%x outside dim/x"
        return ""

    def to_svg(self, *, colour_by: str = "", format: str = "", **sizes: int) -> str:
        """A small cache of this layout as SVG, byte by byte, coloured by an axis: head, kv, layer, block, token or dim.

        `sizes` are num_layers, num_blocks, block_size, num_kv_heads and head_dim, raised to what the layout's splits divide.
        """
        # What draws knows specs, which read layouts: it stands above this file, and is imported by whoever asks for a picture.
        drawing = import_module("kvx.layout.drawing")
        return str(drawing.layout_svg(self, colour_by=colour_by, format=format, **sizes))

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.to_svg()

    @staticmethod
    def parse(text: str) -> Layout:
        """Read a layout string such as `layer | block token head (kv dim)`. LayoutError points at the character that is wrong."""
        try:
            return _parse(layout_text(text))  # kept: the checks below cost a text once
        except TypeError:
            if isinstance(text, str):
                raise
            raise LayoutError(f"layout: {a_type(text)}; it must be text, such as {NHD!r}.") from None


def layout_text(text: str) -> str:
    """The axes of "NHD" and "HND", as engines call them; any other text as it is."""
    return _OTHER_NAMES.get(text.strip().upper(), text) if isinstance(text, str) and len(text) < 8 else text


@lru_cache(maxsize=256)
def _parse(text: str) -> Layout:
    if not isinstance(text, str):
        raise TypeError
    if len(text) > MOST_CHARACTERS:
        raise LayoutError(
            f"layout: {len(text):,} characters, beginning {text[:40]!r}; a layout has at most {MOST_CHARACTERS}. "
            f"Axes are {' '.join(AXES)}, each once or split in two."
        )
    reader = _Reader(text)
    split = re.search(r"\b(kv|plane)\[", text)
    if split:
        return reader.read_planes(split.group(1), split.start())
    left, dims = reader.read(0, len(text))
    reader.require_axes(left, dims, 0, len(text), ("token", "head", "dim"))
    plane = PlaneLayout(left, dims)
    has_kv = any(axis.name == "kv" for axis in (*left, *plane.order))
    return Layout(text, {"k": plane, "v": plane} if has_kv else {"k": plane})


class _Reader:
    def __init__(self, text: str):
        self.text = text

    def fail(self, start: int, end: int, what: str) -> NoReturn:
        marks = " " * start + "^" * max(1, end - start)
        raise LayoutError(
            f"layout: {what}\n  {self.text}\n  {marks}\n"
            f"  Axes are {' '.join(AXES)}; `dim/8 token dim%8` splits, `( )` fuses, `|` ends an allocation."
        )

    def read_planes(self, word: str, at: int) -> Layout:
        """`kv[K: ...; V: ...]` or `plane[name: ...; name: ...]`: an inner order for each plane."""
        left, prefix = self.read(0, at)
        if any(axis.name in PLANES for axis in (*left, *(a for dim in prefix for a in dim))):
            self.fail(0, at, f"`kv` stands before {word}[...] already")
        # No axis has `;` or `]`: each part ends where the next one must begin, and nothing is tried twice.
        parts = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*):([^;\]]*)([;\]])\s*")
        found, end, closed = [], at + len(word) + 1, False
        while not closed and (part := parts.match(self.text, end)):
            found.append(part)
            end, closed = part.end(), part.group(3) == "]"
        names = [part.group(1) for part in found]
        if not closed or end < len(self.text) or (word == "kv" and names != ["K", "V"]):
            how = "kv[K: axes; V: axes]" if word == "kv" else "plane[name: axes; name: axes]"
            self.fail(at, len(self.text), f"{word}[...] is written {how}, and is the last thing")
        if word == "plane" and (len(set(names)) < len(names) or any(n != n.lower() or n in ("k", "v") for n in names)):
            self.fail(at, len(self.text), "planes have lower case names, each its own; k and v are those of kv")
        planes = {part.group(1).lower(): self.read_plane(word, at, left, prefix, part.span(2)) for part in found}
        if len({plane.is_area for plane in planes.values()}) > 1:
            self.fail(at, len(self.text), f"{' and '.join(names)} all begin with `|`, or none does")
        return Layout(self.text, planes)

    def read_plane(
        self, word: str, at: int, left: tuple[Axis, ...], prefix: tuple[tuple[Axis, ...], ...], span: tuple[int, int]
    ) -> PlaneLayout:
        begin, end = span
        inner_left, dims = self.read(begin, end)
        if any(axis.name in PLANES for axis in (*inner_left, *(a for dim in dims for a in dim))):
            self.fail(begin, end, f"`{word}` cannot stand again inside {word}[...]")
        if inner_left:
            self.fail(begin, end, f"what chooses an allocation stands before {word}[...]")
        flat = [axis for dim in prefix for axis in dim]
        has_bar = "|" in self.text[begin:end]
        if has_bar and any(axis.name not in ("layer", "block") for axis in flat):
            self.fail(0, at, "only layer and block can choose an allocation")
        # Without a bar, planes are apart when nothing but `layer` stands outside them.
        if has_bar or (not self.bar_before(at) and all(axis.name == "layer" for axis in flat)):
            plane = PlaneLayout((*left, *flat, Axis(word)), dims)
        else:
            plane = PlaneLayout(left, (*prefix, (Axis(word),), *dims), is_area=True)
        self.require_axes(plane.left, plane.dims, begin, end, ("token", "head", "dim") if word == "kv" else ())
        return plane

    def bar_before(self, at: int) -> bool:
        return "|" in self.text[:at]

    def read(self, begin: int, end: int) -> tuple[tuple[Axis, ...], tuple[tuple[Axis, ...], ...]]:
        """(axes left of the bar, dimensions) of text[begin:end]."""
        bar = -1
        left: tuple[Axis, ...] = ()
        dims: list[tuple[Axis, ...]] = []
        group: list[Axis] | None = None
        group_at = 0
        pattern = re.compile(r"\s+|[()|]|[^\s()|]+")
        for token in pattern.finditer(self.text, begin, end):
            word, at = token.group(), token.start()
            if word.isspace():
                continue
            if word == "|":
                if bar >= 0 or group is not None:
                    self.fail(at, at + 1, "one `|` at most, outside parentheses")
                bar = at
                for dim in dims:
                    if len(dim) > 1 or dim[0].name not in ("layer", "kv", "block") or dim[0].part:
                        self.fail(begin, at, "only whole layer, kv and block axes can stand left of `|`")
                left = tuple(dim[0] for dim in dims)
                dims = []
            elif word == "(":
                if group is not None:
                    self.fail(at, at + 1, "parentheses do not nest")
                group, group_at = [], at
            elif word == ")":
                if not group:
                    self.fail(at, at + 1, "nothing is fused here")
                dims.append(tuple(group))
                group = None
            else:
                axis = self.read_axis(word, at)
                if axis.name == "layer" and group is not None:
                    self.fail(at, at + len(word), "`layer` cannot be fused: ops work on one layer's view")
                (group if group is not None else dims).append(axis if group is not None else (axis,))  # type: ignore[arg-type]
        if group is not None:
            self.fail(group_at, group_at + 1, "this parenthesis is not closed")
        return left, tuple(dims)

    def read_axis(self, word: str, at: int) -> Axis:
        match = re.fullmatch(r"([a-z_]+)(?:([/%])([0-9]{1,9}|x)|\+([1-9][0-9]{0,3}))?", word)
        if match is None or match.group(1) not in (*AXES, *INNER):
            if re.fullmatch(rf"({'|'.join(INNER)})[/%][0-9]{{10,}}", word):
                self.fail(at, at + len(word), "a split by a number of more than nine digits")
            self.fail(at, at + len(word), f'unknown axis "{word}"')
        name, part, factor = match.group(1), match.group(2) or "", match.group(3) or ""
        if part and name not in INNER:
            self.fail(at, at + len(word), f"only token, head and dim can be split; {name} cannot")
        if factor not in ("", "x") and int(factor) == 0:
            self.fail(at, at + len(word), "a split by 0")
        unused = int(match.group(4) or 0)
        if unused and name not in STATE_AXES:
            self.fail(at, at + len(word), f"only axes of states can have unused ones before them; {name} cannot")
        return Axis(name, part, factor, unused)

    def require_axes(
        self, left: tuple[Axis, ...], dims: tuple[tuple[Axis, ...], ...], begin: int, end: int, needed: tuple[str, ...]
    ) -> None:
        """Every axis once, or split in two; those that are needed, and no other where some are."""
        flat = [*left, *(axis for dim in dims for axis in dim)]
        for name in ("layer", "kv"):
            if sum(axis.name == name for axis in flat) > 1:
                self.fail(begin, end, f"`{name}` stands here twice")
        if sum(axis.name == "block" for axis in flat) != 1:
            self.fail(begin, end, "`block` must stand here exactly once")
        there = [axis.name for axis in flat if axis.name in INNER]
        other = next((name for name in there if needed and name not in needed), "")
        if other:
            self.fail(begin, end, f"K and V have no `{other}`; name the planes that have one: plane[name: ...]")
        for name in needed or dict.fromkeys(there):
            mine = [axis for axis in flat if axis.name == name]
            whole = len(mine) == 1 and not mine[0].part
            split = sorted(axis.part for axis in mine) == ["%", "/"] and mine[0].factor == mine[1].factor
            if not whole and not split:
                self.fail(begin, end, f"`{name}` must stand here once, or as `{name}/8 ... {name}%8`")
        for group in dims:
            names = [axis.name for axis in group]
            if "dim" in names[:-1]:
                self.fail(begin, end, "`dim` is the last axis of the parentheses it stands in")
            if "kv" in names and "dim" in names and any(axis.part for axis in group if axis.name == "dim"):
                self.fail(begin, end, "`kv` cannot be fused with a split dim")
