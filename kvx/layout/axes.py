"""The layout language: axes named outermost first, `|` ends an allocation, `( )` fuses axes, `dim/x dim%x` splits one.

    kv | block token head dim                  K and V apart, tokens outside heads (NHD)
    block head token (kv dim)                  one tensor, K and V side by side in each cell
    kv[K: | block head dim/x token dim%x; V: | block head dim token]

Text in, a frozen `Layout` out; sizes come later (kvx/layout/planes.py). A `layer` axis is read and kept: ops work on one
layer's tensors, so it takes no part in a plane's dimensions.
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
    """K or V: which buffer it lies in, and that buffer's dimensions, each one or more fused axes."""

    buffer: int
    dims: tuple[tuple[Axis, ...], ...]


@dataclass(frozen=True)
class Layout:
    text: str
    has_layer: bool
    num_buffers: int  # per layer: 2 when `kv` stands left of `|`
    k: PlaneLayout
    v: PlaneLayout

    @staticmethod
    def parse(text: str) -> Layout:
        return _parse(text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Layout:
    reader = _Reader(text)
    split = re.search(r"kv\[", text)
    if split:
        return reader.read_kv_split(split.start())
    has_layer, kv_left, dims = reader.read(0, len(text))
    reader.require_axes(dims, kv_left, 0, len(text))
    planes = [PlaneLayout(i if kv_left else 0, dims) for i in (0, 1)]
    return Layout(text, has_layer, 2 if kv_left else 1, *planes)


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
        head = self.text[:at].replace("|", " | ").split()
        if any(word not in ("layer", "|") for word in head):
            self.fail(0, at, "only `layer` may stand before kv[...]")
        match = re.fullmatch(r"\s*K:(.*);\s*V:(.*)\]\s*", self.text[at + 3 :], re.S)
        if match is None:
            self.fail(at, len(self.text), "kv[...] is written kv[K: axes; V: axes]")
        planes = []
        for i in (0, 1):
            begin, end = at + 3 + match.start(i + 1), at + 3 + match.end(i + 1)
            has_layer, kv_left, dims = self.read(begin, end)
            if kv_left or any(axis.name == "kv" for dim in dims for axis in dim):
                self.fail(begin, end, "`kv` cannot stand again inside kv[...]")
            if has_layer:
                self.fail(begin, end, "`layer` stands before kv[...]")
            self.require_axes(dims, True, begin, end)
            planes.append(PlaneLayout(i, dims))
        return Layout(self.text, "layer" in head, 2, *planes)

    def read(self, begin: int, end: int) -> tuple[bool, bool, tuple[tuple[Axis, ...], ...]]:
        """(has_layer, kv is left of the bar, dimensions) of text[begin:end]."""
        bar = -1
        left: list[str] = []
        dims: list[tuple[Axis, ...]] = []
        group: list[Axis] | None = None
        group_at = 0
        num_layers = 0
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
                    if len(dim) > 1 or dim[0].name not in ("kv", "block") or dim[0].part:
                        self.fail(begin, at, "only whole layer, kv and block axes can stand left of `|`")
                left = [dim[0].name for dim in dims]
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
                if axis.name == "layer":
                    num_layers += 1
                    if group is not None:
                        self.fail(at, at + len(word), "`layer` cannot be fused: ops work on one layer's view")
                    if num_layers > 1:
                        self.fail(at, at + len(word), "`layer` stands here twice")
                    continue
                (group if group is not None else dims).append(axis if group is not None else (axis,))  # type: ignore[arg-type]
        if group is not None:
            self.fail(group_at, group_at + 1, "this parenthesis is not closed")
        if left.count("kv") > 1:
            self.fail(begin, bar, "`kv` must stand here exactly once")
        if "block" in left:
            self.fail(begin, bar, "a buffer per block is a list of addresses, not a paged tensor; no op takes it")
        return num_layers > 0, "kv" in left, tuple(dims)

    def read_axis(self, word: str, at: int) -> Axis:
        match = re.fullmatch(r"([a-z_]+)(?:([/%])(\d+|x))?", word)
        if match is None or match.group(1) not in AXES:
            self.fail(at, at + len(word), f'unknown axis "{word}"')
        name, part, factor = match.group(1), match.group(2) or "", match.group(3) or ""
        if part and name != "dim":
            self.fail(at, at + len(word), f"only dim can be split; {name} cannot")
        if factor not in ("", "x") and int(factor) == 0:
            self.fail(at, at + len(word), "a split by 0")
        return Axis(name, part, factor)

    def require_axes(self, dims: tuple[tuple[Axis, ...], ...], kv_left: bool, begin: int, end: int) -> None:
        flat = [axis for dim in dims for axis in dim]
        for name in ("block", "token", "head"):
            if sum(axis.name == name for axis in flat) != 1:
                self.fail(begin, end, f"`{name}` must stand here exactly once")
        if sum(axis.name == "kv" for axis in flat) + kv_left != 1:
            self.fail(begin, end, "`kv` must stand here exactly once")
        dim = [axis for axis in flat if axis.name == "dim"]
        whole = len(dim) == 1 and not dim[0].part
        split = [axis.part for axis in dim] == ["/", "%"] and dim[0].factor == dim[1].factor
        if not whole and not split:
            self.fail(begin, end, "`dim` must stand here once, or as `dim/8 ... dim%8`")
        for group in dims:
            names = [axis.name for axis in group]
            if "dim" in names[:-1]:
                self.fail(begin, end, "`dim` is the last axis of the parentheses it stands in")
            if split and "kv" in names and "dim" in names:
                self.fail(begin, end, "`kv` cannot be fused with a split dim")
