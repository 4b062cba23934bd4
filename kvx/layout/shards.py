"""What shards of a cache hold: layers of the model, and of each plane a share of the axis that ranks share out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvx.errors import BadArgument
from kvx.spec.cache_spec import PlaneSpec, Spec


class Rectangle(NamedTuple):
    """Layers of a model, and what a shard holds of the axis that ranks share out."""

    layer: int
    layer_end: int
    first: int
    end: int
    axis: str = "head"

    def __str__(self) -> str:
        return f"layers {self.layer}..{self.layer_end - 1}, {self.axis}s {self.first}..{self.end - 1}"


def as_shards(name: str, specs: Spec | Sequence[Spec]) -> tuple[Spec, ...]:
    shards = (specs,) if isinstance(specs, Spec) else tuple(specs) if isinstance(specs, Iterable) else ()
    if not shards or not all(isinstance(s, Spec) for s in shards):
        raise BadArgument(f"plan(): {name} is {specs!r}; it must be a CacheSpec or a list of them, one a shard.")
    for other in shards[1:]:
        for what, a, b in _facts(shards[0], other):
            if a != b:
                raise BadArgument(f"plan(): {name} shards differ in {what}: {a!r} and {b!r}. Shards of one cache share it.")
    return shards


def _facts(one: Spec, other: Spec) -> Iterable[tuple[str, object, object]]:
    """What shards of one cache share, by name."""
    yield from ((what, getattr(one, what), getattr(other, what)) for what in ("num_blocks", "block_size", "positions"))
    yield "planes", [p.name for p in one.planes], [p.name for p in other.planes]
    for a, b in zip(one.planes, other.planes, strict=True):
        axis = differing_axis(a, b)
        if axis:
            yield f"{a.name} {field_of(axis)}", a.sizes.get(axis, 0), b.sizes.get(axis, 0)
        yield f"{a.name} format", str(a.format), str(b.format)


def differing_axis(a: PlaneSpec, b: PlaneSpec) -> str:
    """An axis whose size two planes must share and do not; "" when there is none. Tokens and shares of ranks may differ."""
    free = {"token", a.shard_axis}
    names = dict.fromkeys((*a.sizes, *b.sizes))
    return next((n for n in names if n not in free and a.sizes.get(n) != b.sizes.get(n)), "")


def field_of(axis: str) -> str:
    """An axis as a spec's fields call it."""
    return "head_dim" if axis == "dim" else axis


def sharded_alike(shards: Sequence[Spec]) -> list[list[int]]:
    """Planes by what shards hold of them: K and V always go together."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i in range(shards[0].num_planes):
        groups.setdefault(tuple(rectangles(spec, i) for spec in shards), []).append(i)
    return list(groups.values())


def rectangles(spec: Spec, plane: int) -> tuple[Rectangle, ...]:
    """What a shard holds of a plane: one for each share."""
    p = spec.plane(plane)
    layers = spec.layer_start, spec.layer_start + spec.num_layers
    return tuple(Rectangle(*layers, share.first, share.first + share.size, p.shard_axis) for share in p.shares)


def held(spec: Spec, plane: int, layers: tuple[int, int] | None) -> list[Rectangle]:
    """What a shard holds of these layers."""
    these = rectangles(spec, plane)
    if layers is not None:
        these = tuple(r._replace(layer=max(r.layer, layers[0]), layer_end=min(r.layer_end, layers[1])) for r in these)
    return [r for r in these if r.layer < r.layer_end]


def holdings(shards: Sequence[Spec]) -> str:
    """In words."""
    return ", ".join(
        "; ".join(dict.fromkeys(str(r) for i in range(spec.num_planes) for r in rectangles(spec, i))) for spec in shards
    )


def held_twice(shards: Sequence[Spec]) -> list[Rectangle]:
    """What more than one of these shards holds."""
    return [r for planes in sharded_alike(shards) for r in several([r for s in shards for r in rectangles(s, planes[0])])]


# ---- rectangles


def without(these: Iterable[Rectangle], others: Iterable[Rectangle]) -> list[Rectangle]:
    left = list(these)
    for other in others:
        left = [rest for r in left for rest in cut(r, other)[1]]
    return left


def union(these: Iterable[Rectangle]) -> list[Rectangle]:
    """The same, each part once."""
    out: list[Rectangle] = []
    for r in these:
        out += without([r], out)
    return out


def several(these: Sequence[Rectangle]) -> list[Rectangle]:
    """What more than one of them covers."""
    both = (cut(r, other)[0] for i, r in enumerate(these) for other in these[:i])
    return union(r for r in both if r is not None)


def cut(r: Rectangle, other: Rectangle) -> tuple[Rectangle | None, list[Rectangle]]:
    """What two rectangles share, and the rest of the first."""
    layers = max(r.layer, other.layer), min(r.layer_end, other.layer_end)
    both = Rectangle(*layers, max(r.first, other.first), min(r.end, other.end), r.axis)
    if both.layer >= both.layer_end or both.first >= both.end:
        return None, [r]
    rest = [
        r._replace(layer_end=both.layer),
        r._replace(layer=both.layer_end),
        both._replace(first=r.first, end=both.first),
        both._replace(first=both.end, end=r.end),
    ]
    return both, [x for x in rest if x.layer < x.layer_end and x.first < x.end]
