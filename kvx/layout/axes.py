"""The layout language: axes named outermost first, `|` ends an allocation, `( )` fuses axes, `dim/x dim%x` splits one.

    kv | block token head dim                  K and V apart, tokens outside heads (NHD)
    block head token (kv dim)                  one tensor, K and V side by side in each cell
    kv[K: | block head dim/x token dim%x; V: | block head dim token]
    layer | block head kv[K: dim token; V: token dim]     K's area, then V's, in each head of a block
    block | head layer kv token dim            an allocation for each block
    layer | block token head dim               no kv: one row a token (MLA's latent)

Text in, a frozen `Layout` out; sizes come later (kvx/layout/place.py; for ops, which work on one layer's tensors,
kvx/layout/planes.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn

from kvx.errors import LayoutError

AXES = ("layer", "block", "kv", "token", "head", "dim")
NHD = "kv | block token head dim"
HND = "kv | block head token dim"
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

    def __str__(self) -> str:
        return f"{self.name}{self.part}{self.factor}"


@dataclass(frozen=True)
class PlaneLayout:
    """K or V: where each axis of it stands."""

    left: tuple[Axis, ...]  # left of the bar: their indices choose an allocation
    dims: tuple[tuple[Axis, ...], ...]  # inside an allocation, each one or more fused axes
    kv_split: bool = False  # kv[...] inside an allocation: K's area, then V's

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
    text: str
    k: PlaneLayout
    v: PlaneLayout  # equal to k when the layout has no kv axis

    @property
    def has_layer(self) -> bool:
        return any(axis.name == "layer" for axis in (*self.k.left, *self.k.order))

    @property
    def has_kv(self) -> bool:
        return any(axis.name == "kv" for axis in (*self.k.left, *self.k.order))

    @property
    def num_buffers(self) -> int:
        """Tensors of one layer: 2 when `kv` stands left of `|`."""
        return 2 if any(axis.name == "kv" for axis in self.k.left) else 1

    @property
    def unsupported_by_ops(self) -> str:
        """Why write and gather cannot address this layout; "" when they can."""
        if not self.has_kv:
            return "has no kv axis"
        if self.k.kv_split:
            return "keeps K and V in areas of one allocation, kv[...] without `|`"
        for plane in (self.k, self.v):
            if any(axis.name == "block" for axis in plane.left):
                return "has an allocation for each block"
            for name in ("token", "head"):
                if plane.split_of(name):
                    return f"splits {name}"
            if plane.split_of("dim") and [a.part for a in plane.order if a.name == "dim"] != ["/", "%"]:
                return "has dim%x outside dim/x"
        return ""

    @staticmethod
    def parse(text: str) -> Layout:
        try:
            return _parse(text)  # kept: the checks below cost a text once
        except TypeError:
            if isinstance(text, str):
                raise
            raise LayoutError(f"layout: {type(text).__name__}; it is text, such as {NHD!r}.") from None


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
    split = re.search(r"kv\[", text)
    if split:
        return reader.read_kv_split(split.start())
    left, dims = reader.read(0, len(text))
    reader.require_axes(left, dims, 0, len(text))
    plane = PlaneLayout(left, dims)
    return Layout(text, plane, plane)


class _Reader:
    def __init__(self, text: str):
        self.text = text

    def fail(self, start: int, end: int, what: str) -> NoReturn:
        marks = " " * start + "^" * max(1, end - start)
        raise LayoutError(
            f"layout: {what}\n  {self.text}\n  {marks}\n"
            f"  Axes are {' '.join(AXES)}; `dim/8 token dim%8` splits, `( )` fuses, `|` ends an allocation."
        )

    def read_kv_split(self, at: int) -> Layout:
        """`kv[K: ...; V: ...]`: two inner orders."""
        left, prefix = self.read(0, at)
        if any(axis.name == "kv" for axis in (*left, *(a for dim in prefix for a in dim))):
            self.fail(0, at, "`kv` stands before kv[...] already")
        # No axis has `;` or `]`: each part ends where the next one must begin, and nothing is tried twice.
        match = re.compile(r"\s*K:([^;\]]*);\s*V:([^;\]]*)\]\s*").fullmatch(self.text, at + 3)
        if match is None:
            self.fail(at, len(self.text), "kv[...] is written kv[K: axes; V: axes], and is the last thing")
        planes = []
        for i in (0, 1):
            begin, end = match.span(i + 1)
            inner_left, dims = self.read(begin, end)
            if any(axis.name == "kv" for axis in (*inner_left, *(a for dim in dims for a in dim))):
                self.fail(begin, end, "`kv` cannot stand again inside kv[...]")
            if inner_left:
                self.fail(begin, end, "what chooses an allocation stands before kv[...]")
            flat = [axis for dim in prefix for axis in dim]
            has_bar = "|" in self.text[begin:end]
            if has_bar and any(axis.name not in ("layer", "block") for axis in flat):
                self.fail(0, at, "only layer and block can choose an allocation")
            # Without a bar, K and V are apart when nothing but `layer` stands outside them.
            if has_bar or (not self.bar_before(at) and all(axis.name == "layer" for axis in flat)):
                plane = PlaneLayout((*left, *flat, Axis("kv")), dims)
            else:
                plane = PlaneLayout(left, (*prefix, (Axis("kv"),), *dims), kv_split=True)
            self.require_axes(plane.left, plane.dims, begin, end)
            planes.append(plane)
        if planes[0].kv_split != planes[1].kv_split:
            self.fail(at, len(self.text), "K and V both begin with `|`, or neither does")
        return Layout(self.text, *planes)

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
        match = re.fullmatch(r"([a-z_]+)(?:([/%])([0-9]{1,9}|x))?", word)
        if match is None or match.group(1) not in AXES:
            if re.fullmatch(r"(token|head|dim)[/%][0-9]{10,}", word):
                self.fail(at, at + len(word), "a split by a number of more than nine digits")
            self.fail(at, at + len(word), f'unknown axis "{word}"')
        name, part, factor = match.group(1), match.group(2) or "", match.group(3) or ""
        if part and name not in ("token", "head", "dim"):
            self.fail(at, at + len(word), f"only token, head and dim can be split; {name} cannot")
        if factor not in ("", "x") and int(factor) == 0:
            self.fail(at, at + len(word), "a split by 0")
        return Axis(name, part, factor)

    def require_axes(self, left: tuple[Axis, ...], dims: tuple[tuple[Axis, ...], ...], begin: int, end: int) -> None:
        flat = [*left, *(axis for dim in dims for axis in dim)]
        for name in ("layer", "kv"):
            if sum(axis.name == name for axis in flat) > 1:
                self.fail(begin, end, f"`{name}` stands here twice")
        if sum(axis.name == "block" for axis in flat) != 1:
            self.fail(begin, end, "`block` must stand here exactly once")
        for name in ("token", "head", "dim"):
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
